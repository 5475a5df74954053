//! The state folder with its lock, and the owner that the lock's file names.

use std::io;
use std::path::PathBuf;

use super::VERSION;
use super::attempts::{Attempts, Found};
use crate::takeover::{Lock, Owner};

/// The state folder, and the process that shares it with others.
#[derive(Debug)]
pub struct Place {
    pub folder: PathBuf,
    attempts: Attempts,
    /// The UID of this process's pod.
    pub pod: String,
    /// The owner that the lock's file named last.
    owner: Owner,
}

impl Place {
    pub fn new(folder: PathBuf, pod: &str) -> Self {
        Self { attempts: Attempts::at(&folder), folder, pod: pod.to_owned(), owner: Owner::default() }
    }

    /// Returns true if this process takes over from the owner: a pod that has handed over does not.
    pub fn takes_over(&self) -> bool {
        let takes_over = !self.owner.is_retired(&self.pod);
        let Owner { pod, version, .. } = &self.owner;
        tracing::info!(pod, version, takes_over, "another linkwise serves this node: standing by");
        takes_over
    }

    /// Tries to take the lock; see [`Attempts::next`]. `Ok(None)`: another process holds it.
    pub async fn try_take(&mut self) -> Option<io::Result<Option<Lock>>> {
        let found = self.attempts.next().await?;
        Some(found.map(|Found { lock, owner }| {
            self.owner = owner;
            lock
        }))
    }

    /// Writes this process beside the lock. Without that line, a pod that handed over may take over once more.
    pub fn write_owner(&mut self, lock: &mut Lock) {
        let owner = std::mem::take(&mut self.owner).succeeded_by(&self.pod, VERSION);
        if let Err(error) = lock.write(&owner) {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot write who serves this node");
        }
        self.owner = owner;
    }
}
