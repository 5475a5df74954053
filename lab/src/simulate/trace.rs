//! Reads traces: CSV with the columns `size`, `duration_seconds` and optionally `arrival_seconds` and `pods`. An error
//! in a line names the line.

use anyhow::{Context, Result, bail, ensure};

use linkwise_core::quote::excerpt;

/// One job of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The number of GPUs of each pod, at least one.
    pub size: usize,
    /// The number of pods, which start together; at least one.
    pub pods: usize,
    /// The duration in seconds.
    pub duration: u64,
    /// The arrival, in seconds from the trace's zero.
    pub arrival: u64,
}

const SIZE: &str = "size";
const DURATION: &str = "duration_seconds";
const ARRIVAL: &str = "arrival_seconds";
const PODS: &str = "pods";
const COLUMNS: [&str; 4] = [SIZE, DURATION, ARRIVAL, PODS];

/// The most pods of a job.
const MAX_PODS: usize = 10_000;

const NO_HEADER: &str =
    "no header: the first line must name the columns size, duration_seconds and perhaps arrival_seconds and pods";

/// Reads the jobs, in the order of their arrivals. Jobs with the same arrival are in the order of their lines.
///
/// Blank lines are skipped. The columns may come in any order. Without arrivals all jobs arrive at 0.
pub(super) fn parse(text: &str) -> Result<Vec<Job>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    let mut lines = lines.filter(|(_, line)| !line.is_empty());
    let (line, header) = lines.next().context(NO_HEADER)?;
    let columns = columns(line, header)?;
    let mut jobs = lines.map(|(line, row)| job(line, row, &columns)).collect::<Result<Vec<Job>>>()?;
    ensure!(!jobs.is_empty(), "no jobs");
    jobs.sort_by_key(|job| job.arrival);
    Ok(jobs)
}

fn columns(line: usize, header: &str) -> Result<Vec<&'static str>> {
    let mut columns: Vec<&'static str> = Vec::new();
    for name in header.split(',').map(str::trim) {
        let Some(column) = COLUMNS.into_iter().find(|known| *known == name) else {
            ensure!(name.parse::<f64>().is_err(), NO_HEADER);
            bail!("line {line}: unknown column '{}' (known: {})", excerpt(name), COLUMNS.join(", "));
        };
        ensure!(!columns.contains(&column), "line {line}: column '{column}' is there twice");
        columns.push(column);
    }
    for needed in [SIZE, DURATION] {
        ensure!(columns.contains(&needed), "line {line}: no column '{needed}'");
    }
    Ok(columns)
}

fn job(line: usize, row: &str, columns: &[&'static str]) -> Result<Job> {
    let mut job = Job { size: 0, pods: 1, duration: 0, arrival: 0 };
    let found = row.split(',').count();
    ensure!(found == columns.len(), "line {line}: {found} fields where the header has {}", columns.len());
    for (column, text) in columns.iter().copied().zip(row.split(',').map(str::trim)) {
        let least = match column {
            SIZE => " of at least 1".to_owned(),
            PODS => format!(" from 1 to {MAX_PODS}"),
            _ => String::new(),
        };
        let wrong = || format!("line {line}: {column} '{}' is not a whole number{least}", excerpt(text));
        match column {
            SIZE => job.size = text.parse().ok().filter(|size| *size > 0).with_context(wrong)?,
            PODS => job.pods = text.parse().ok().filter(|pods| (1..=MAX_PODS).contains(pods)).with_context(wrong)?,
            DURATION => job.duration = text.parse().ok().with_context(wrong)?,
            _ => job.arrival = text.parse().ok().with_context(wrong)?,
        }
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_may_come_in_any_order() {
        let text = "\u{feff}duration_seconds, arrival_seconds,size\r\n10,7,2\r\n\r\n20,3,1\n30,3,4";
        let job = |size, duration, arrival| Job { size, pods: 1, duration, arrival };
        assert_eq!(parse(text).unwrap(), [job(1, 20, 3), job(4, 30, 3), job(2, 10, 7)]);
        assert_eq!(parse("size,duration_seconds\n1,0\n").unwrap(), [job(1, 0, 0)]);
        assert_eq!(parse("size,pods,duration_seconds\n4,3,9\n").unwrap(), [Job { pods: 3, ..job(4, 9, 0) }]);
    }

    #[test]
    fn faults_are_named_with_their_line() {
        for (text, expected) in [
            ("", "no header"),
            ("2,10\n", "no header"),
            ("size\n2\n", "line 1: no column 'duration_seconds'"),
            ("\nsize,duration_seconds,colour\n", "line 2: unknown column 'colour'"),
            ("size,size,duration_seconds\n", "line 1: column 'size' is there twice"),
            ("size,duration_seconds\n", "no jobs"),
            ("size,duration_seconds\n1,2\n\n3\n", "line 4: 1 fields where the header has 2"),
            ("size,duration_seconds\n1,2,3\n", "line 2: 3 fields"),
            ("size,duration_seconds\n0,2\n", "line 2: size '0' is not a whole number of at least 1"),
            ("size,duration_seconds\n-1,2\n", "line 2: size '-1'"),
            ("size,duration_seconds\n1,2.5\n", "line 2: duration_seconds '2.5' is not a whole number"),
            ("size,duration_seconds\n1,99999999999999999999\n", "line 2: duration_seconds '9999"),
            ("size,duration_seconds,arrival_seconds\n1,2,\n", "line 2: arrival_seconds ''"),
            ("size,duration_seconds,pods\n1,2,0\n", "line 2: pods '0' is not a whole number from 1 to 10000"),
            ("size,duration_seconds,pods\n1,2,10001\n", "line 2: pods '10001'"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
    }
}
