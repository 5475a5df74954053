//! Measures, in the parent, how much memory of an agent the kernel cannot reclaim.
//!
//! Called by `child`, which kills an agent that has more than its limit. A limit of the kernel (RLIMIT_DATA, RLIMIT_AS)
//! would make allocations inside the library fail, and would count mapped memory, of which a runtime such as Go's uses
//! a small part.

use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until};

/// The time from one measurement to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time from one measurement to the next while the agent grows.
const GROWING_INTERVAL: Duration = Duration::from_millis(100);
/// The growth since the last measurement that counts as growing, in KiB.
const MIN_GROWTH_KIB: u64 = 1 << 10;

/// The lines of /proc/PID/status that count (proc_pid_status(5)): anonymous pages, tmpfs and shared anonymous pages,
/// and swapped private pages. Pages of files do not count, since the kernel drops them before it kills a process. A
/// driver's mappings of device memory are not memory of the process. The counters need no lock of the process, unlike
/// smaps: this file answers while a driver hangs in the kernel.
const LINES: [&str; 3] = ["RssAnon:", "RssShmem:", "VmSwap:"];

/// The memory of one agent over time.
#[derive(Debug)]
pub struct MemoryWatch {
    /// The /proc that shows this process's children.
    procfs: PathBuf,
    pub(crate) limit_mib: u64,
    last_kib: u64,
    next: Instant,
    /// The measurement that has not returned; a second one waits for it.
    running: Option<JoinHandle<io::Result<String>>>,
}

impl MemoryWatch {
    /// Begins with an agent that starts now.
    pub fn new(procfs: &Path, limit_mib: u64, now: Instant) -> Self {
        Self { procfs: procfs.to_owned(), limit_mib, last_kib: 0, next: now + GROWING_INTERVAL, running: None }
    }

    /// Waits until the agent has more memory than its limit; returns its memory in MiB. If the file does not answer,
    /// only this measurement and later ones wait. Cancel safe: a measurement that was begun goes on.
    pub async fn exceeded(&mut self, process: Option<u32>) -> u64 {
        // A process that has ended has no memory.
        let Some(process) = process else { return pending().await };
        loop {
            let running = match &mut self.running {
                Some(running) => running,
                None => {
                    sleep_until(self.next).await;
                    let path = self.procfs.join(process.to_string()).join("status");
                    self.running.insert(spawn_blocking(move || std::fs::read_to_string(path)))
                }
            };
            let status = running.await;
            self.running = None;
            // An unreadable file means that the process has just ended.
            let kib = status.ok().and_then(|status| own_kib(&status.ok()?)).unwrap_or(0);
            self.next = Instant::now() + self.pause(kib);
            if kib > self.limit_mib.saturating_mul(1024) {
                return kib.div_ceil(1024);
            }
        }
    }

    /// The pause before the next measurement, given the agent's present memory.
    fn pause(&mut self, kib: u64) -> Duration {
        let last = std::mem::replace(&mut self.last_kib, kib);
        if kib.saturating_sub(last) > MIN_GROWTH_KIB { GROWING_INTERVAL } else { INTERVAL }
    }
}

/// The unreclaimable memory of a process in KiB, from its /proc/PID/status; `None` if it has ended.
fn own_kib(status: &str) -> Option<u64> {
    let value = |line: &str| {
        let rest = LINES.into_iter().find_map(|name| line.strip_prefix(name))?;
        rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    status.lines().filter_map(value).reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tlinkwise\nVmSize:\t 1259000 kB\nVmRSS:\t   54904 kB\nRssAnon:\t   20756 kB\n\
                          RssFile:\t   32148 kB\nRssShmem:\t    2000 kB\nVmData:\t 1066964 kB\nVmSwap:\t     100 kB\n";

    #[test]
    fn memory_that_the_kernel_cannot_take_back_counts() {
        assert_eq!(own_kib(STATUS), Some(20_756 + 2_000 + 100));
        assert_eq!(own_kib("Name:\tlinkwise\nState:\tZ (zombie)\n"), None);
        assert_eq!(own_kib("RssAnon:\t18446744073709551615 kB\nRssShmem:\t1 kB\n"), Some(u64::MAX));
    }

    #[test]
    fn agent_that_grows_is_looked_at_more_often() {
        let mut watch = MemoryWatch::new(Path::new("/proc"), 48, Instant::now());
        let (slow, fast) = (INTERVAL, GROWING_INTERVAL);
        for (kib, pause) in [(900, slow), (2_900, fast), (3_000, slow), (1_000, slow), (30_000, fast), (30_000, slow)] {
            assert_eq!(watch.pause(kib), pause, "{kib}");
        }
    }
}
