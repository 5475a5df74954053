//! How much memory an agent has that the kernel cannot take back, looked at by its parent.
//!
//! Called by `child`, which kills an agent that has more than its bound. Nothing fails inside the library for it: a limit
//! of the kernel's (RLIMIT_DATA, RLIMIT_AS) would count what is mapped, of which a runtime such as Go's uses a small part.

use std::fmt;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep_until};

use crate::files;

/// From one look to the next.
const USUAL: Duration = Duration::from_secs(1);
/// The same, while the agent grows.
const SOON: Duration = Duration::from_millis(100);
/// So much more than at the last look counts as growing, in KiB.
const GROWTH_KIB: u64 = 1 << 10;

/// The lines of /proc/PID/status that count (proc_pid_status(5)): anonymous pages, tmpfs and shared anonymous pages, and
/// what was swapped out of these. Pages of files are left out, since the kernel drops them before it kills; a driver's
/// mappings of device memory are no memory of the process at all. The counters need no lock of the process, unlike smaps:
/// this file answers while a driver hangs in the kernel.
const LINES: [&str; 3] = ["RssAnon:", "RssShmem:", "VmSwap:"];

/// Follows one agent.
#[derive(Debug)]
pub struct MemoryWatch {
    /// Where the kernel has this process's children.
    procfs: PathBuf,
    bound_mib: u64,
    last_kib: u64,
    next: Instant,
    /// A look that has not returned; no second one begins beside it.
    look: Option<Look>,
}

/// A file that is being read.
struct Look(BoxFuture<'static, io::Result<String>>);

impl fmt::Debug for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Look")
    }
}

impl MemoryWatch {
    /// An agent that starts now.
    pub fn new(procfs: &Path, bound_mib: u64, now: Instant) -> Self {
        Self { procfs: procfs.to_owned(), bound_mib, last_kib: 0, next: now + SOON, look: None }
    }

    /// How much the agent may have, in MiB.
    pub fn bound_mib(&self) -> u64 {
        self.bound_mib
    }

    /// Waits until the agent has more than its bound; returns how much it has, in MiB. A file that does not answer holds
    /// up this look and its followers, nothing else. Cancel safe: a look that was begun goes on.
    pub async fn exceeded(&mut self, process: Option<u32>) -> u64 {
        // One that was reaped has none.
        let Some(process) = process else { return pending().await };
        loop {
            let look = match &mut self.look {
                Some(look) => look,
                None => {
                    sleep_until(self.next).await;
                    let path = self.procfs.join(process.to_string()).join("status");
                    let read = files::blocking(move || std::fs::read_to_string(path));
                    self.look.insert(Look(Box::pin(read)))
                }
            };
            let status = (&mut look.0).await;
            self.look = None;
            // Unreadable: it has just ended.
            let kib = status.ok().and_then(|status| own_kib(&status)).unwrap_or(0);
            self.next = Instant::now() + self.pause(kib);
            if kib > self.bound_mib.saturating_mul(1024) {
                return kib.div_ceil(1024);
            }
        }
    }

    /// When to look again at an agent that has so much now.
    fn pause(&mut self, kib: u64) -> Duration {
        let last = std::mem::replace(&mut self.last_kib, kib);
        if kib.saturating_sub(last) > GROWTH_KIB { SOON } else { USUAL }
    }
}

/// How much memory a process has that the kernel cannot take back, in KiB, from its /proc/PID/status; `None` where it has
/// ended.
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
        let looks = [(900, USUAL), (2_900, SOON), (3_000, USUAL), (1_000, USUAL), (30_000, SOON), (30_000, USUAL)];
        for (kib, pause) in looks {
            assert_eq!(watch.pause(kib), pause, "{kib}");
        }
    }
}
