//! The folder that daemons and clients share as /dev/shm: a file system in memory of its own, on the host.
//!
//! Called by `linkwise mps-control-daemon mount-shm`, which runs once, privileged, before the daemon. The command, its
//! options and the size are those of the NVIDIA plugin (`cmd/mps-control-daemon/mount/mount-shm.go`). Unlike there, an
//! existing mount stays, because running pods have it; it grows if it is smaller.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::statfs;
use tokio::process::Command;

use super::daemon::MpsError;
use super::layout::Layout;
use super::program;

/// The size if the host's memory is unknown, in KiB: 64 MiB, as container runtimes give a /dev/shm.
const FALLBACK_KIB: u64 = 64 << 10;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// The longest time for `mount`.
const WITHIN: Duration = Duration::from_secs(60);

/// The result for the shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shm {
    /// The shared memory was mounted.
    Mounted,
    /// The shared memory was mounted already, and is larger now.
    Grown,
    /// The shared memory was mounted already, and is large enough or not a tmpfs.
    Kept,
}

/// Mounts the shared memory, of half the host's memory; `meminfo` is /proc/meminfo, `mount` the program mount(8).
pub async fn mount_shm(layout: &Layout, meminfo: &Path, mount: &Path) -> Result<Shm, MpsError> {
    let path = layout.shm();
    let wanted = fs::read_to_string(meminfo).ok().and_then(|text| half_of_memory(&text)).unwrap_or(FALLBACK_KIB);
    let there = fs::create_dir_all(&path).and_then(|()| {
        // A file system mounted there is on another device than the folder's parent.
        let is_mounted = fs::metadata(&path)?.dev() != fs::metadata(path.join(".."))?.dev();
        Ok(is_mounted.then_some(statfs(&path)?))
    });
    let (done, remount) = match there.map_err(|source| MpsError::Write(path.clone(), source))? {
        None => (Shm::Mounted, ""),
        Some(there) => {
            let is_tmpfs = u64::try_from(there.f_type) == Ok(TMPFS);
            let bytes = u64::try_from(there.f_bsize).unwrap_or(0).saturating_mul(there.f_blocks);
            // The kernel rounds up to whole pages; 0 blocks stand for no limit.
            if !is_tmpfs || bytes == 0 || bytes / 1024 >= wanted {
                return Ok(Shm::Kept);
            }
            (Shm::Grown, "remount,")
        }
    };
    let mut mount = Command::new(mount);
    let options = format!("{remount}rw,nosuid,nodev,noexec,relatime,size={wanted}k");
    mount.args(["-t", "tmpfs", "-o", options.as_str(), "shm"]).arg(&path);
    let mounted = program::run(&mut mount, "", WITHIN).await;
    mounted.map(|_| done).map_err(|source| MpsError::Mount(path, source))
}

/// Half of `MemTotal` in a text such as /proc/meminfo, in KiB.
fn half_of_memory(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_half_of_the_hosts() {
        assert_eq!(half_of_memory("MemTotal:       263856640 kB\nMemFree: 1 kB\n"), Some(131_928_320));
        for text in ["", "MemTotal:", "MemTotal: many kB", "MemTotal: 1", "MemFree: 2 kB"] {
            assert_eq!(half_of_memory(text), None, "{text}");
        }
    }
}
