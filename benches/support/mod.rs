//! Helpers of the benchmarks: percentiles of times, and figures of processes from /proc.

#![allow(dead_code, reason = "each benchmark needs a part")]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The time that `percent` % of all times do not exceed.
pub fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Median and worst.
pub fn spread(times: &mut [Duration]) -> String {
    format!("median {:.2?}, worst of {}: {:.2?}", percentile(times, 50), times.len(), percentile(times, 100))
}

/// The program to measure.
#[allow(clippy::disallowed_methods, reason = "the environment names the program to measure")]
pub fn program() -> PathBuf {
    let named = std::env::var_os("LINKWISE_BENCH_PROGRAM").map(PathBuf::from);
    named.unwrap_or_else(|| env!("CARGO_BIN_EXE_linkwise").into())
}

/// The first child of a process.
pub fn child_of(pid: u32) -> u32 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap());
    children.collect::<String>().split_whitespace().next().unwrap().parse().unwrap()
}

/// The value of a line of smaps_rollup, in KiB.
pub fn memory(pid: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
