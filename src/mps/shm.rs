//! The folder that daemons and clients share as /dev/shm: a file system in memory of its own, on the host.
//!
//! Called by `linkwise mps-control-daemon mount-shm`, which runs once, privileged, before the daemon; the command and its
//! mount options are those of the NVIDIA plugin. Unlike there, what is mounted already stays: running pods have it.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use super::layout::Layout;
use super::program::{self, ProgramError};

/// As the NVIDIA plugin mounts it: 64 MiB, the size container runtimes give a /dev/shm.
const OPTIONS: &str = "rw,nosuid,nodev,noexec,relatime,size=65536k";

/// The mounts of this process.
const MOUNTS: &str = "/proc/self/mountinfo";

/// How long `mount` may take.
const WITHIN: Duration = Duration::from_secs(60);

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The folder cannot be made, or the list of mounts cannot be read.
    #[error("cannot use {path}")]
    Path {
        /// Which.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// `mount` failed.
    #[error("cannot mount a tmpfs at {path} (it takes a privileged container)")]
    Mount {
        /// The folder.
        path: PathBuf,
        /// What happened.
        source: ProgramError,
    },
}

/// Mounts the shared memory; returns `false` where it was mounted already.
///
/// # Errors
///
/// See [`ShmError`].
pub async fn mount_shm(layout: &Layout) -> Result<bool, ShmError> {
    let path = layout.shm();
    fs::create_dir_all(&path).map_err(|source| ShmError::Path { path: path.clone(), source })?;
    let mounts = fs::read(MOUNTS).map_err(|source| ShmError::Path { path: MOUNTS.into(), source })?;
    if is_mounted(&mounts, &path) {
        return Ok(false);
    }
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", OPTIONS, "shm"]).arg(&path);
    let mounted = program::run(&mut mount, "", WITHIN).await;
    mounted.map(|_| true).map_err(|source| ShmError::Mount { path, source })
}

/// Whether a tmpfs is mounted at `path`, by a text in the form of /proc/self/mountinfo (man 5 proc): the fifth field is
/// where, and the first after ` - ` is what.
fn is_mounted(mounts: &[u8], path: &Path) -> bool {
    // The kernel writes these four as octal numbers.
    let mut written = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => written.extend(format!("\\{byte:03o}").into_bytes()),
            _ => written.push(*byte),
        }
    }
    mounts.split(|byte| *byte == b'\n').any(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let here = fields.by_ref().nth(4).is_some_and(|at| at == written);
        here && fields.skip_while(|field| *field != b"-").nth(1) == Some(b"tmpfs")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_in_the_kernels_list() {
        let mounts = b"22 1 0:21 / /mps rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            23 22 0:44 / /mps/shm rw,nosuid shared:7 master:2 - tmpfs shm rw,size=65536k\n\
            24 22 0:45 / /my\\040mps/shm rw - tmpfs shm rw\n25 1 0:46 / /disk/shm rw - ext4 /dev/sdb1 rw\n";
        for there in ["/mps/shm", "/my mps/shm"] {
            assert!(is_mounted(mounts, Path::new(there)), "{there}");
        }
        for not in ["/mps", "/mps/sh", "/disk/shm", "/other"] {
            assert!(!is_mounted(mounts, Path::new(not)), "{not}");
        }
        assert!(!is_mounted(b"", Path::new("/mps/shm")));
    }
}
