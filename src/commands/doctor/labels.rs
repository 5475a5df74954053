//! Checks the writers of the GPUs' labels: Node Feature Discovery (NFD) reads a folder with a file of each writer.
//!
//! NFD reads the files in the order of their names and takes the last value of a label, so that with two writers
//! the node's labels depend on the file names.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Findings;
use super::Node;
use linkwise_core::words::count;

/// The file in which gpu-feature-discovery writes its labels by default.
const DEFAULT_FILE: &str = "/etc/kubernetes/node-feature-discovery/features.d/gfd";
/// The first part of gpu-feature-discovery's labels, and so of linkwise's.
const OURS: &str = "nvidia.com/gpu.";
/// The largest file that NFD reads (source/local, `MaxFeatureFileSize`), in bytes.
const LARGEST: u64 = 65_536;

/// Reports a second file with the GPUs' labels. Reports nothing if the folder does not exist.
pub(super) fn check(found: &mut Findings, node: &Node) {
    let configured = node.settings.as_ref().map(|settings| settings.gfd_output_file.value.to_string_lossy());
    let own = node.at(configured.as_deref().filter(|file| !file.is_empty()).unwrap_or(DEFAULT_FILE));
    let Some(folder) = own.parent() else { return };
    let paths = match std::fs::read_dir(folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()),
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        Err(error) => {
            let advice = "run as uid 0 with the folder mounted to look at its files";
            return found.warning(format!("{}: {error}", folder.display()), advice);
        }
    };
    let mut paths: Vec<PathBuf> = paths.filter(|path| is_read(path)).collect();
    paths.sort();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut writers = Vec::new();
    for path in paths {
        match std::fs::read(&path) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let labels = labels(&text, i64::try_from(now).unwrap_or(i64::MAX));
                let ours = labels.iter().filter(|label| label.starts_with(OURS)).count();
                writers.extend((ours > 0).then_some((path, ours)));
            }
            Err(error) => found.warning(format!("{}: {error}", path.display()), "NFD reads this file: see its mode"),
        }
    }
    let beside_own = writers.iter().any(|(path, _)| *path == own);
    let alone = writers.len() == 1;
    for (path, labels) in writers {
        let what = format!("{} has {} {OURS}*", path.display(), count(labels, "label"));
        match (path == own, alone) {
            (true, true) => found.ok(what),
            (true, false) => {}
            (false, true) => found.skipped(
                format!("{what}, and linkwise writes none to {}", own.display()),
                Some(
                    "right where another program writes the labels; linkwise labels beside it would be a second writer",
                ),
            ),
            (false, false) => {
                let beside = if beside_own { format!(", and so has {}", own.display()) } else { String::new() };
                found.warning(
                    format!("{what}{beside}"),
                    "two programs write the same labels, and NFD takes the file that is last by name: end one of them and remove \
                     its file",
                );
            }
        }
    }
}

/// Returns true if NFD reads the file: it is not hidden and not too large.
fn is_read(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    !hidden && std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= LARGEST)
}

/// The keys of the labels that NFD makes: a line each, `key=value` or `key`. A directive in a comment ends the labels
/// of all lines below it at a given time, or keeps the next line from becoming a label.
fn labels(text: &str, now: i64) -> BTreeSet<&str> {
    let (mut labels, mut skipped, mut expired) = (BTreeSet::new(), false, false);
    for line in text.split('\n').map(str::trim).filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        match key {
            "# +no-label" => skipped = true,
            "# +expiry-time" => expired = seconds(value.trim()).map_or(expired, |end| end < now),
            _ if line.starts_with('#') || expired => {}
            _ => {
                if skipped {
                    labels.remove(key);
                } else {
                    labels.insert(key);
                }
                skipped = false;
            }
        }
    }
    labels
}

/// The seconds from 1970 to a time in the form of RFC 3339, such as `2030-01-31T12:00:00Z` or `...00.5+02:00`.
fn seconds(time: &str) -> Option<i64> {
    let (date, clock) = time.split_once('T')?;
    let (clock, zone) = clock.split_at_checked(clock.find(['Z', '+', '-'])?)?;
    let (clock, _fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let ([year, month, day], [hour, minute, second]) = (numbers(date, '-')?, numbers(clock, ':')?);
    let zone = match zone.split_at_checked(1)? {
        ("Z", "") => 0,
        (sign, zone) => {
            let [hours, minutes]: [i64; 2] = numbers(zone, ':')?;
            (hours * 60 + minutes) * if sign == "-" { -60 } else { 60 }
        }
    };
    // The days of a year that begins in March, so that a leap day is the last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second - zone)
}

/// Splits a text into N numbers; `None` if it does not have them.
fn numbers<const N: usize>(text: &str, between: char) -> Option<[i64; N]> {
    let numbers = text.split(between).map(|part| part.parse::<u16>().ok().map(i64::from));
    numbers.collect::<Option<Vec<i64>>>()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_file_is_read_as_nfd_reads_it() {
        let text = "# a comment\n nvidia.com/gpu.count=8 \r\nnvidia.com/gpu.present\n\n\
                    # +no-label\nnvidia.com/gpu.family=hopper\nnvidia.com/gpu.memory=1=2\n#+no-label\na=1\n\
                    # +expiry-time=2001-09-09T01:46:39Z\nold=1\n# +expiry-time=soon\nolder=1\n\
                    # +expiry-time=2001-09-09T01:46:40Z\nnew=1\n# +no-label\nnew=2\n# +no-feature\nlast";
        let expected = ["a", "last", "nvidia.com/gpu.count", "nvidia.com/gpu.memory", "nvidia.com/gpu.present"];
        assert_eq!(labels(text, 1_000_000_000), expected.into());
    }

    #[test]
    fn times_are_read_in_every_form() {
        for (time, expected) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2001-09-09T01:46:40Z", Some(1_000_000_000)),
            ("2024-02-29T23:59:59.999Z", Some(1_709_251_199)),
            ("2024-03-01T02:00:00+02:00", Some(1_709_251_200)),
            ("1969-12-31T19:00:00-05:00", Some(0)),
            ("2024-02-29", None),
            ("2024-02-29T23:59Z", None),
            ("2024-02-29T23:59:59", None),
            ("99999-02-29T23:59:59Z", None),
            ("T+", None),
            ("é", None),
        ] {
            assert_eq!(seconds(time), expected, "{time}");
        }
    }
}
