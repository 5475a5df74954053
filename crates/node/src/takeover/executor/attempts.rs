//! The attempts to take the lock, one at a time: an attempt keeps a thread for as long as the disk does not answer.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::takeover::{Lock, Owner};

/// The longest time that a process waits for the disk to give the lock, before it does something else.
const LIMIT: Duration = Duration::from_secs(2);

/// The result of an attempt.
#[derive(Debug)]
pub struct Found {
    /// The lock; `None` if another process holds it.
    pub lock: Option<Lock>,
    /// The owner that the file named before.
    pub owner: Owner,
}

impl Found {
    fn at(folder: &Path) -> io::Result<Self> {
        Ok(Self { lock: Lock::try_take(folder)?, owner: Lock::owner(folder) })
    }
}

/// Takes the lock of a folder.
#[derive(Debug)]
pub struct Attempts {
    folder: PathBuf,
    limit: Duration,
    take: fn(&Path) -> io::Result<Found>,
    under_way: Option<JoinHandle<io::Result<Found>>>,
}

impl Attempts {
    pub fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), limit: LIMIT, take: Found::at, under_way: None }
    }

    /// Begins an attempt, or waits for the one that is under way. `None`: the disk has not answered in time; the attempt
    /// goes on, and the next call has its result. Cancel-safe.
    pub async fn next(&mut self) -> Option<io::Result<Found>> {
        let Self { folder, limit, take, under_way } = self;
        let attempt = under_way.get_or_insert_with(|| {
            let (folder, take) = (folder.clone(), *take);
            spawn_blocking(move || take(&folder))
        });
        let ended = timeout(*limit, attempt).await.ok()?;
        *under_way = None;
        Some(ended.unwrap_or_else(|error| Err(io::Error::other(error))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};

    static BEGUN: AtomicUsize = AtomicUsize::new(0);
    /// Until its sender is gone, the disk hangs.
    static DISK: Mutex<Option<mpsc::Receiver<()>>> = Mutex::new(None);

    fn from_hung_disk(folder: &Path) -> io::Result<Found> {
        BEGUN.fetch_add(1, Ordering::SeqCst);
        let disk = DISK.lock().unwrap().take();
        if let Some(disk) = disk {
            let _ = disk.recv();
        }
        Found::at(folder)
    }

    #[tokio::test]
    async fn hung_disk_has_one_attempt_whose_result_counts() {
        let folder = tempfile::tempdir().unwrap();
        let limit = Duration::from_millis(5);
        let mut attempts = Attempts { limit, take: from_hung_disk, ..Attempts::at(folder.path()) };
        let (hung, disk) = mpsc::channel();
        *DISK.lock().unwrap() = Some(disk);
        for _ in 0..20 {
            assert!(attempts.next().await.is_none());
        }
        assert_eq!(BEGUN.load(Ordering::SeqCst), 1);
        drop(hung);
        attempts.limit = LIMIT;
        let found = attempts.next().await.unwrap().unwrap();
        assert!(found.lock.is_some() && BEGUN.load(Ordering::SeqCst) == 1);
        assert!(attempts.next().await.unwrap().unwrap().lock.is_none(), "it is taken");
    }
}
