//! The file that shows that a resource's limits hold, while the process that wrote it lives.
//!
//! Written by `supervise`, read by the plugin, off the path of admissions: a resource may be offered while
//! [`readiness`] is `Ok`, and at no other time. The writer holds a kernel lock on the file, which ends with the
//! process: a file that a killed daemon left behind, also before the node was rebooted, counts for nothing. A process
//! id would not do: the plugin is in another container, with other process ids.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use super::layout::{Layout, LayoutError};
use super::limits::Limits;
use crate::files;
use crate::state::ResourceName;

/// The longest file that is read, in bytes; 16 GPUs take about 1,500.
const LONGEST: u64 = 64 << 10;

/// A marker that stands; gone when dropped.
#[derive(Debug)]
pub struct Marker {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

/// Why a resource that is shared by MPS may not be offered.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum NotReady {
    /// There is no marker.
    #[error("the MPS daemon does not serve it")]
    NoMarker,
    /// The process that wrote the marker is gone.
    #[error("the MPS daemon is gone and left {0} behind")]
    Stale(PathBuf),
    /// The marker cannot be read.
    #[error("cannot read {path}: {why}")]
    Unreadable {
        /// The marker.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The daemon still holds the limits of another configuration.
    #[error("the MPS daemon holds other limits than the configuration asks for")]
    OtherLimits,
    /// No daemon can serve it.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl Marker {
    /// Puts a marker there; it is there whole and locked, or not at all.
    ///
    /// # Errors
    ///
    /// The folder cannot be written to, or its file system has no locks.
    pub fn set(path: &Path, limits: &Limits) -> io::Result<Self> {
        let mut file = files::draft(path, 0o600)?;
        file.as_file().lock()?;
        file.write_all(&serde_json::to_vec(limits)?)?;
        let file = files::place(file, path)?;
        Ok(Self { path: path.to_owned(), _file: file })
    }

    /// Removes what a process before left behind.
    ///
    /// # Errors
    ///
    /// It is there and cannot be removed.
    pub fn clear(path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // If that fails, the lock ends all the same, and the marker is stale.
        let _ = Self::clear(&self.path);
    }
}

/// Whether a resource may be offered: its daemon serves, and holds the limits that the plugin's configuration and GPUs
/// call for, `wanted`.
pub fn readiness(layout: &Layout, resource: &ResourceName, wanted: &Limits) -> Result<(), NotReady> {
    let path = layout.marker(resource);
    let unreadable = |why: &dyn std::error::Error| NotReady::Unreadable { path: path.clone(), why: why.to_string() };
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(NotReady::NoMarker),
        opened => opened.map_err(|error| unreadable(&error))?,
    };
    match file.try_lock_shared() {
        Ok(()) => return Err(NotReady::Stale(path)),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(unreadable(&error)),
    }
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text).map_err(|error| unreadable(&error))?;
    let limits: Limits = serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
    if limits.hold(wanted) { Ok(()) } else { Err(NotReady::OtherLimits) }
}
