//! The file that shows that a resource's limits hold, while the process that wrote it lives.
//!
//! `supervise` writes the marker; the plugin reads it, but not during an admission. A resource may be offered while
//! [`readiness`] is `Ok`, and at no other time. The writer holds a kernel lock on the file, which ends with the
//! process: so the file of a killed daemon does not count, even after a reboot of the node. A process id would not do:
//! the plugin is in another container, with other process ids.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use super::layout::{Layout, LayoutError};
use super::limits::Limits;
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_system::files;

/// The longest file that is read, in bytes; 16 GPUs take about 1,500.
const LONGEST: u64 = 64 << 10;

/// A marker in place; dropping it removes the file.
#[derive(Debug)]
pub struct Marker {
    path: PathBuf,
    _file: File,
}

/// The reason why a resource that MPS shares may not be offered.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum NotReady {
    #[error("the MPS daemon does not serve it")]
    NoMarker,
    /// The daemon failed, with the reason.
    #[error("the MPS daemon does not serve it: {0}")]
    Failed(String),
    /// The process that wrote the marker has ended.
    #[error("the MPS daemon is gone and left {0} behind")]
    Stale(PathBuf),
    #[error("cannot read {0}: {1}")]
    Unreadable(PathBuf, String),
    #[error("the MPS daemon holds other limits than the configuration asks for")]
    OtherLimits,
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl Marker {
    /// Writes a marker; the file appears whole and locked, or not at all. Fails too if the file system has no locks.
    pub fn set(path: &Path, limits: &Limits) -> io::Result<Self> {
        let mut file = files::draft(path, 0o600)?;
        file.as_file().lock()?;
        file.write_all(&serde_json::to_vec(limits)?)?;
        let file = files::place(file, path)?;
        Ok(Self { path: path.to_owned(), _file: file })
    }

    /// Removes the marker of an earlier process.
    pub fn clear(path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // If this fails, the lock still ends, and the marker is stale.
        let _ = Self::clear(&self.path);
    }
}

/// Checks that a resource may be offered: its daemon serves, and holds the limits `wanted`, which follow from the
/// plugin's configuration and GPUs.
pub fn readiness(layout: &Layout, resource: &ResourceName, wanted: &Limits) -> Result<(), NotReady> {
    shm_of_ready(layout, resource, wanted).map(drop)
}

/// [`readiness`], and the shared memory that the daemon has.
pub fn shm_of_ready(layout: &Layout, resource: &ResourceName, wanted: &Limits) -> Result<MpsShm, NotReady> {
    let path = layout.marker(resource);
    let unreadable = |why: &dyn std::error::Error| NotReady::Unreadable(path.clone(), why.to_string());
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(failure(layout, resource)),
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
    match limits.hold(wanted) {
        true if limits.own_shm => Ok(MpsShm::Own),
        true => Ok(MpsShm::Common),
        false => Err(NotReady::OtherLimits),
    }
}

fn failure(layout: &Layout, resource: &ResourceName) -> NotReady {
    let text = files::read(&layout.failure(resource), LONGEST);
    text.map_or(NotReady::NoMarker, |text| NotReady::Failed(String::from_utf8_lossy(&text).into_owned()))
}
