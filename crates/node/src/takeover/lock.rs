//! The lock of the state folder, and the owner that its file names.
//!
//! A lock belongs to an open file, which several processes may have. After one process has passed the file to another,
//! the lock is held until both have closed the file. Nothing else ends the lock.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use super::VERSION;
use linkwise_system::files;

const FILE: &str = "owner.lock";
/// The longest content that is read, in bytes.
const MAX_CONTENT: u64 = 1 << 16;
/// The most pods of earlier owners that are kept in the file.
const MAX_RETIRED: usize = 16;
/// The longest time that one call waits for the disk to answer an attempt to take the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// The content of the lock's file: the owner, and the pods of earlier owners, which do not take over from a living
/// owner. People may read it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// The UID of the owner's pod; empty where the owner is in no pod, or does not know its UID.
    pub pod: String,
    pub version: String,
    /// The UIDs of earlier owners' pods, the last one last.
    pub retired: Vec<String>,
}

impl Owner {
    /// Reads the file. A file that cannot be read, or was cut off, names no owner.
    fn at(folder: &Path) -> Self {
        let mut text = String::new();
        let file = File::open(folder.join(FILE));
        let read = file.and_then(|file| file.take(MAX_CONTENT).read_to_string(&mut text));
        read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// The content that the next owner writes.
    #[must_use]
    fn succeeded_by(mut self, pod: &str, version: &str) -> Self {
        if self.pod != pod {
            self.retired.retain(|retired| *retired != self.pod && *retired != pod);
            self.retired.extend(Some(self.pod).filter(|pod| !pod.is_empty()));
            let surplus = self.retired.len().saturating_sub(MAX_RETIRED);
            self.retired.drain(..surplus);
        }
        (self.pod, self.version) = (pod.to_owned(), version.to_owned());
        self
    }

    /// Returns true if an earlier owner was in this pod. A new process there does not take over from a living owner.
    fn is_retired(&self, pod: &str) -> bool {
        !pod.is_empty() && self.retired.iter().any(|retired| retired == pod)
    }
}

/// An open file that holds the lock.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Takes the lock of a state folder; makes the folder if it is missing. `None`: another process holds the lock.
    /// Fails with `NotFound` if the folder above is missing. The call may block as long as the disk does.
    pub fn try_take(folder: &Path) -> io::Result<Option<Self>> {
        files::make_private(folder)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(folder.join(FILE))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// The lock that the owner passed over the takeover socket.
    pub fn passed(file: OwnedFd) -> Self {
        Self(file.into())
    }

    fn write(&mut self, owner: &Owner) -> io::Result<()> {
        let mut text = serde_json::to_vec(owner)?;
        text.push(b'\n');
        self.0.rewind()?;
        self.0.write_all(&text)?;
        self.0.set_len(u64::try_from(text.len()).unwrap_or(u64::MAX))
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The lock if this process got it, and the content of the lock's file.
type Attempt = io::Result<(Option<Lock>, Owner)>;

/// The state folder as this process uses it; the executor of the takeover owns it.
#[derive(Debug)]
pub struct StateFolder {
    pub path: PathBuf,
    /// The UID of this process's pod.
    pub pod: String,
    /// The content of the lock's file, as it was read last.
    owner: Owner,
    timeout: Duration,
    /// The attempt that is under way. There is one at a time, because it keeps a thread until the disk answers.
    attempt: Option<JoinHandle<Attempt>>,
}

impl StateFolder {
    pub fn new(path: PathBuf, pod: &str) -> Self {
        Self { path, pod: pod.to_owned(), owner: Owner::default(), timeout: LOCK_TIMEOUT, attempt: None }
    }

    /// Tries to take the lock, or waits for the attempt that is under way. `None`: the disk has not answered in time;
    /// the attempt goes on, and a later call has its result. `Ok(None)`: another process holds the lock. Cancel-safe.
    pub async fn try_take(&mut self) -> Option<io::Result<Option<Lock>>> {
        let path = &self.path;
        let attempt = self.attempt.get_or_insert_with(|| {
            let path = path.clone();
            spawn_blocking(move || Ok((Lock::try_take(&path)?, Owner::at(&path))))
        });
        let ended = timeout(self.timeout, attempt).await.ok()?;
        self.attempt = None;
        Some(ended.unwrap_or_else(|error| Err(io::Error::other(error))).map(|(lock, owner)| {
            self.owner = owner;
            lock
        }))
    }

    /// Returns true if this process can take over from the owner: its pod is not retired. Logs the owner.
    pub fn can_take_over(&self) -> bool {
        let takes_over = !self.owner.is_retired(&self.pod);
        let Owner { pod, version, .. } = &self.owner;
        tracing::info!(pod, version, takes_over, "another linkwise serves this node: standing by");
        takes_over
    }

    /// Writes this process into the lock's file, as the owner. If that fails, a pod that handed over may take over
    /// again.
    pub fn write_owner(&mut self, lock: &mut Lock) {
        let owner = std::mem::take(&mut self.owner).succeeded_by(&self.pod, VERSION);
        if let Err(error) = lock.write(&owner) {
            tracing::warn!(folder = %self.path.display(), %error, "cannot write the owner into owner.lock");
        }
        self.owner = owner;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_free_when_every_holder_has_closed_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("linkwise");
        let mut lock = Lock::try_take(&folder).unwrap().unwrap();
        assert!(Lock::try_take(&folder).unwrap().is_none());
        let owner = Owner::default().succeeded_by("pod", "1");
        lock.write(&owner).unwrap();
        assert_eq!(Owner::at(&folder), owner);
        let passed = Lock::passed(lock.as_fd().try_clone_to_owned().unwrap());
        drop(lock);
        assert!(Lock::try_take(&folder).unwrap().is_none(), "the other process holds it still");
        drop(passed);
        assert!(Lock::try_take(&folder).unwrap().is_some());
    }

    #[test]
    fn pod_that_handed_over_is_retired() {
        let mut owner = Owner::default().succeeded_by("a", "1").succeeded_by("b", "2");
        assert!(owner.is_retired("a") && !owner.is_retired("b") && !owner.is_retired(""));
        // The same pod again: its container was restarted.
        owner = owner.succeeded_by("b", "2");
        assert_eq!(owner.retired, ["a"]);
        owner = owner.succeeded_by("a", "1");
        assert!(owner.is_retired("b") && !owner.is_retired("a"), "a pod that serves again is not retired");
        for pod in 0..100 {
            owner = owner.succeeded_by(&format!("pod {pod}"), "3");
        }
        assert_eq!(owner.retired.len(), MAX_RETIRED);
    }

    #[test]
    fn broken_content_names_no_owner() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[]", "{\"pod\": 1}"] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            assert_eq!(Owner::at(folder.path()), Owner::default(), "{text}");
            assert!(Lock::try_take(folder.path()).unwrap().is_some());
        }
    }

    #[tokio::test]
    async fn hung_disk_has_one_attempt_whose_result_counts() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().to_owned();
        let lock = Lock::try_take(&path).unwrap();
        let mut folder = StateFolder { timeout: Duration::from_millis(5), ..StateFolder::new(path.clone(), "pod") };
        let (hung, disk) = std::sync::mpsc::channel::<()>();
        let attempt = spawn_blocking(move || {
            let _ = disk.recv();
            Ok((Lock::try_take(&path)?, Owner::at(&path)))
        });
        let id = attempt.id();
        folder.attempt = Some(attempt);
        for _ in 0..20 {
            assert!(folder.try_take().await.is_none());
            assert_eq!(folder.attempt.as_ref().unwrap().id(), id);
        }
        drop((lock, hung));
        folder.timeout = LOCK_TIMEOUT;
        let taken = folder.try_take().await.unwrap().unwrap();
        assert!(taken.is_some() && folder.attempt.is_none());
        assert!(folder.try_take().await.unwrap().unwrap().is_none(), "it is taken");
    }
}
