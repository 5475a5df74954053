//! The file that says that a resource's limits hold, and while a process lives that stands by it.
//!
//! It is held by a lock of the kernel's, which goes with the process however that ends: a file that a killed daemon left
//! behind, also before the node was rebooted, is nobody's word. A process id would not do: the plugin is in another
//! container and counts processes otherwise. Made by `supervise`, read by `ready`.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::limits::Limits;
use crate::files;

/// The longest file that is read, in bytes; 16 GPUs take about 1,500.
const LONGEST: u64 = 64 << 10;

/// A marker that stands; gone when dropped.
#[derive(Debug)]
pub struct Marker {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

/// What a marker says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// There is none.
    Nothing,
    /// Nobody stands by it any more.
    Stale,
    /// These limits hold.
    Holds(Limits),
}

impl Marker {
    /// Puts a marker there; it is there whole and held, or not at all.
    ///
    /// # Errors
    ///
    /// The folder cannot be written to, or its file system knows no locks.
    pub fn set(path: &Path, limits: &Limits) -> io::Result<Self> {
        let mut file = files::draft(path, 0o600)?;
        file.as_file().lock()?;
        file.write_all(&serde_json::to_vec(limits)?)?;
        let file = files::place(file, path)?;
        Ok(Self { path: path.to_owned(), _file: file })
    }

    /// Takes away what a process before left behind.
    ///
    /// # Errors
    ///
    /// It is there and cannot be taken away.
    pub fn clear(path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // Where that fails, the lock goes all the same, and with it the marker's word.
        let _ = Self::clear(&self.path);
    }
}

/// Reads a marker.
pub(super) fn read(path: &Path) -> io::Result<Said> {
    use std::io::Read;
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Said::Nothing),
        opened => opened?,
    };
    match file.try_lock_shared() {
        Ok(()) => return Ok(Said::Stale),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(Said::Holds(serde_json::from_slice(&text)?))
}
