//! Memory, wake-ups and system calls of linkwise's processes while they are idle.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Result;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::program::Linkwise;
use super::{KitArgs, Report, TIMEOUT};

/// The time from one poll of the agent to the next, in seconds.
const POLL_INTERVAL: u64 = 10;

/// The time after which linkwise has done the work of its start, in seconds.
const SETTLE_DELAY: u64 = 12;

/// The counters of a process, summed over its threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    /// Voluntary context switches: a wake-up follows each of them.
    wake_ups: u64,
    preempted: u64,
    /// Nanoseconds on a CPU.
    running: u64,
    /// Calls of read and write.
    calls: u64,
    /// Bytes read and written.
    bytes: u64,
}

impl Counters {
    fn of(process: u32) -> Self {
        let mut counters = Self::default();
        for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let read = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            let status = read("status");
            counters.wake_ups += number(&status, "voluntary_ctxt_switches:");
            counters.preempted += number(&status, "nonvoluntary_ctxt_switches:");
            counters.running += number(&read("schedstat"), "");
        }
        let io = fs::read_to_string(format!("/proc/{process}/io")).unwrap_or_default();
        counters.calls = number(&io, "syscr:") + number(&io, "syscw:");
        counters.bytes = number(&io, "rchar:") + number(&io, "wchar:");
        counters
    }
}

/// Writes footprint.txt (copies of the kernel's files) and idle.tsv, and with `--system-calls` system-calls.tsv.
pub(super) async fn measure(args: &KitArgs, linkwise: &Linkwise, report: &Report) -> Result<()> {
    sleep(Duration::from_secs(args.idle_seconds.min(SETTLE_DELAY))).await;
    let processes = linkwise.processes();
    let mut text = String::new();
    let before: Vec<Counters> = processes.iter().map(|process| Counters::of(*process)).collect();
    sleep(Duration::from_secs(args.idle_seconds)).await;
    let mut table = String::from(
        "process\tseconds\twake_ups\tpreempted\tcpu_us\treads_and_writes\tbytes\tmapped_kib\tresident_kib\t\
         proportional_kib\tprivate_kib\n",
    );
    for (place, (process, before)) in processes.iter().zip(before).enumerate() {
        let now = Counters::of(*process);
        let read = |file: &str| fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
        let (status, rollup) = (read("status"), read("smaps_rollup"));
        for (file, content) in [("status", &status), ("smaps_rollup", &rollup), ("io", &read("io"))] {
            text.push_str(&format!("== /proc/{process}/{file}\n{content}"));
        }
        let name = if place == 0 { "plugin" } else { "agent" };
        let growth = |now: u64, before: u64| now.saturating_sub(before);
        let (wake_ups, cpu) = (growth(now.wake_ups, before.wake_ups), growth(now.running, before.running) / 1000);
        let (mapped, resident) = (number(&status, "VmSize:"), number(&status, "VmRSS:"));
        let private = number(&rollup, "Private_Clean:") + number(&rollup, "Private_Dirty:");
        table.push_str(&format!(
            "{name}\t{}\t{wake_ups}\t{}\t{cpu}\t{}\t{}\t{mapped}\t{resident}\t{}\t{private}\n",
            args.idle_seconds,
            growth(now.preempted, before.preempted),
            growth(now.calls, before.calls),
            growth(now.bytes, before.bytes),
            number(&rollup, "Pss:"),
        ));
        let memory = format!("{mapped} KiB mapped, {resident} KiB resident, {private} KiB of it private");
        let idle = format!("{wake_ups} wake-ups and {cpu} us of CPU in {} s", args.idle_seconds);
        report.note(resident > 0, &format!("{name}: {memory}; {idle}"))?;
    }
    report.note(processes.len() > 1, &format!("processes of linkwise: {}", processes.len()))?;
    report.write("footprint.txt", text)?;
    report.write("idle.tsv", table)?;
    match (&args.system_calls, processes.get(1)) {
        (Some(program), Some(agent)) => {
            count_system_calls(program, *agent, args.idle_seconds.clamp(1, POLL_INTERVAL), report).await
        }
        _ => Ok(()),
    }
}

/// Counts the agent's system calls for some seconds, with a program that traces the agent.
async fn count_system_calls(program: &std::path::Path, agent: u32, seconds: u64, report: &Report) -> Result<()> {
    let mut command = Command::new(program);
    command.arg(agent.to_string()).arg(seconds.to_string()).stdin(Stdio::null()).kill_on_drop(true);
    let Ok(Ok(output)) = timeout(TIMEOUT, command.output()).await else {
        return report.note(false, "the agent's system calls could not be counted");
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let total: u64 = text.lines().filter_map(|line| line.split_once('\t')?.1.parse::<u64>().ok()).sum();
    report.write("system-calls.tsv", &text)?;
    let error = String::from_utf8_lossy(&output.stderr);
    let what =
        format!("system calls of the agent in {seconds} s, also those for --nvml-calls: {total} {}", error.trim());
    report.note(output.status.success(), what.trim_end())
}

/// The first number on the first line that begins with this word, or 0 if there is none.
fn number(text: &str, word: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(word));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_kernel_files_are_read() {
        assert_eq!(number("VmPeak:\t  12 kB\nVmRSS:\t   340 kB\n", "VmRSS:"), 340);
        assert_eq!(
            number("nonvoluntary_ctxt_switches:\t2\nvoluntary_ctxt_switches:\t7\n", "voluntary_ctxt_switches:"),
            7
        );
        assert_eq!(number("123 45 6\n", ""), 123);
        assert_eq!(number("", "VmRSS:"), 0);
        let own = Counters::of(std::process::id());
        // The first thread may not have waited yet.
        assert!(own.wake_ups + own.preempted > 0 && own.running > 0, "{own:?}");
    }
}
