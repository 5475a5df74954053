//! The folder that daemons and clients share as /dev/shm: a file system in memory of its own, on the host.
//!
//! Called by `linkwise mps-control-daemon mount-shm`, which runs once, privileged, before the daemon; the command and its
//! mount options are those of the NVIDIA plugin. Unlike there, what is mounted already stays: pods that run have it.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tokio::process::Command;

use super::layout::Layout;
use crate::quote::one_line;

/// As the NVIDIA plugin mounts it: 64 MiB, the size container runtimes give a /dev/shm.
const OPTIONS: &str = "rw,nosuid,nodev,noexec,relatime,size=65536k";

/// The mounts of this process.
const MOUNTS: &str = "/proc/self/mountinfo";

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shm {
    /// It was there.
    Kept,
    /// It was mounted.
    Mounted,
}

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The folder cannot be made.
    #[error("cannot make {path}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The list of mounts cannot be read, or `mount` cannot be started.
    #[error("cannot use {what}")]
    Tool {
        /// Which.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// `mount` failed.
    #[error("cannot mount a tmpfs at {path}: {output} (it takes a privileged container)")]
    Mount {
        /// The folder.
        path: PathBuf,
        /// What it said.
        output: String,
    },
}

/// Mounts the shared memory where it is not mounted.
///
/// # Errors
///
/// See [`ShmError`].
pub async fn mount_shm(layout: &Layout) -> Result<Shm, ShmError> {
    let path = layout.shm();
    fs::create_dir_all(&path).map_err(|source| ShmError::Folder { path: path.clone(), source })?;
    let mounts = fs::read(MOUNTS).map_err(|source| ShmError::Tool { what: MOUNTS, source })?;
    if is_mounted(&mounts, &path) {
        return Ok(Shm::Kept);
    }
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", OPTIONS, "shm"]).arg(&path).kill_on_drop(true);
    let done = mount.output().await.map_err(|source| ShmError::Tool { what: "mount", source })?;
    if done.status.success() {
        return Ok(Shm::Mounted);
    }
    Err(ShmError::Mount { path, output: one_line(&String::from_utf8_lossy(&done.stderr)) })
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
