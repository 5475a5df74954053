//! The folder that daemons and clients share as /dev/shm: a file system in memory of its own, on the host.
//!
//! Called by `linkwise mps-control-daemon mount-shm`, which runs once, privileged, before the daemon; the command and
//! its mount options are those of the NVIDIA plugin. Unlike there, what is mounted already stays: running pods have it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use super::layout::Layout;
use super::program::{self, ProgramError};

/// As the NVIDIA plugin mounts it: 64 MiB, the size container runtimes give a /dev/shm.
const OPTIONS: &str = "rw,nosuid,nodev,noexec,relatime,size=65536k";

/// How long `mount` may take.
const WITHIN: Duration = Duration::from_secs(60);

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The folder cannot be made.
    #[error("cannot make {path}")]
    Folder {
        /// The folder.
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
    let is_mounted = fs::create_dir_all(&path).and_then(|()| is_mounted(&path));
    if is_mounted.map_err(|source| ShmError::Folder { path: path.clone(), source })? {
        return Ok(false);
    }
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", OPTIONS, "shm"]).arg(&path);
    let mounted = program::run(&mut mount, "", WITHIN).await;
    mounted.map(|_| true).map_err(|source| ShmError::Mount { path, source })
}

/// Whether a file system is mounted at a folder: then its parent is on another device.
fn is_mounted(folder: &Path) -> io::Result<bool> {
    Ok(fs::metadata(folder)?.dev() != fs::metadata(folder.join(".."))?.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_point_is_on_another_device_than_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("shm");
        fs::create_dir(&inner).unwrap();
        assert!(is_mounted(Path::new("/proc")).unwrap());
        assert!(!is_mounted(&inner).unwrap());
        assert!(is_mounted(&inner.join("missing")).is_err());
    }
}
