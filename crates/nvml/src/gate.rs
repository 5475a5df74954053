//! The folder over which all processes of linkwise on a node agree about the driver: an operator's release, the
//! processes that use the driver, and the turns to initialise NVML and to change MIG devices.
//!
//! Called by the agent, its supervisor and the MPS daemons' process. Facts are files and locks on files; the kernel ends
//! a lock with its process, however that ends, and only then. The files may hang: async callers use a thread.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use linkwise_system::files;

/// The call that [`CallError`](crate::CallError) names for an agent that ends because the driver is released.
pub const RELEASED: &str = "linkwise admin release";

/// The file that exists while an operator has released the driver. It has the id of the boot.
const RELEASE: &str = "released";
/// The prefix of the files that the users of the driver have locked, by their names.
const USED_BY: &str = "used-by-";
/// The file that the process has locked that initialises NVML.
const INITIALISING: &str = "initialising";
/// The file that the process has locked that carries out an order about MIG devices.
const MIG: &str = "mig";

/// The longest time that an agent waits until other processes of linkwise have initialised NVML: a quarter of the time
/// that a start may take.
const INIT_TURN: Duration = Duration::from_secs(30);
/// The longest time that an order about MIG devices waits for those of other processes. The supervisor hears nothing of
/// the agent meanwhile, and allows a poll and a call for that.
const MIG_TURN: Duration = Duration::from_secs(10);

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The time from one attempt to lock the turn to the next.
const ATTEMPTS: Duration = Duration::from_millis(20);

/// The folder, and the name under which this process uses the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    folder: PathBuf,
    user: String,
}

/// The driver is used as long as this lives.
#[derive(Debug)]
pub struct Use {
    /// `None` where the folder does not exist or cannot be written: then a release does not wait for this process.
    _lock: Option<File>,
}

/// An operator has released the driver: it may not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an operator released the driver; `linkwise admin resume` takes it back")]
pub struct DriverReleased;

/// Another process has had a turn for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an order about MIG devices that another process of linkwise gave has not ended")]
pub struct TurnTaken;

impl Gate {
    /// The gate of the node whose kubelet has this socket.
    pub fn beside(kubelet_socket: &Path, user: &str) -> Option<Self> {
        let folder = kubelet_socket.parent()?.join("linkwise/driver");
        Some(Self { folder, user: user.to_owned() })
    }

    /// The same gate for another user.
    #[must_use]
    pub fn of(&self, user: &str) -> Self {
        Self { folder: self.folder.clone(), user: user.to_owned() }
    }

    /// The folder; it may not exist.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes the folder, where the kubelet's folder exists, and this user's file in it.
    pub fn prepare(&self) -> io::Result<()> {
        let Some(linkwise) = self.folder.parent().filter(|folder| folder.parent().is_some_and(Path::is_dir)) else {
            return Ok(());
        };
        for folder in [linkwise, &self.folder] {
            files::make_private(folder)?;
        }
        self.open(&format!("{USED_BY}{}", self.user)).map(drop)
    }

    /// Returns true if an operator has released the driver in this boot. A reboot has ended every use of the driver, and
    /// ends the release.
    pub fn is_released(&self) -> bool {
        let Ok(boot) = fs::read_to_string(self.folder.join(RELEASE)) else { return false };
        // A full disk may have left the file empty.
        boot.is_empty() || boot_id().is_none_or(|now| now == boot)
    }

    /// Releases the driver for every process of the node, or takes it back. Returns false if there is no kubelet's
    /// folder, over which others could learn of it.
    pub fn release(&self, release: bool) -> io::Result<bool> {
        let path = self.folder.join(RELEASE);
        if release {
            self.prepare()?;
            return match fs::write(path, boot_id().unwrap_or_default()) {
                Err(_) if !self.folder.is_dir() => Ok(false),
                written => written.map(|()| true),
            };
        }
        files::remove_for_this_boot(&path).map(|_| true)
    }

    /// Begins to use the driver.
    pub fn enter(&self) -> Result<Use, DriverReleased> {
        let file = self.open(&format!("{USED_BY}{}", self.user));
        let lock = file.and_then(|file| file.lock_shared().map(|()| file)).ok();
        // The order matters: a release is written first, and looks for locks afterwards.
        if self.is_released() { Err(DriverReleased) } else { Ok(Use { _lock: lock }) }
    }

    /// The names of the users of the driver.
    pub fn users(&self) -> Vec<String> {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let users = names.filter_map(|name| name.to_str()?.strip_prefix(USED_BY).map(str::to_owned));
        let is_used = |user: &String| {
            let file = self.open(&format!("{USED_BY}{user}"));
            file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
        };
        let mut users: Vec<String> = users.filter(is_used).collect();
        users.sort();
        users
    }

    /// Waits for the turn to initialise NVML; it ends when the file is dropped. None comes in time where another process
    /// hangs, and that hinders nobody.
    pub fn init_turn(&self) -> Option<File> {
        self.turn(INITIALISING, INIT_TURN).ok().flatten()
    }

    /// Waits for the turn to change MIG devices; it ends when the file is dropped, or with the process and the call that
    /// it is in. `None` where there is no folder over which others could learn of it. Fails if another process has the
    /// turn: what that one makes is not known yet.
    pub fn mig_turn(&self) -> Result<Option<File>, TurnTaken> {
        self.turn(MIG, MIG_TURN)
    }

    fn turn(&self, name: &str, patience: Duration) -> Result<Option<File>, TurnTaken> {
        let Ok(file) = self.open(name) else { return Ok(None) };
        let begin = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) if begin.elapsed() < patience => thread::park_timeout(ATTEMPTS),
                Err(TryLockError::WouldBlock) => return Err(TurnTaken),
                Err(TryLockError::Error(_)) => return Ok(None),
            }
        }
    }

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().create(true).append(true).open(self.folder.join(name))
    }
}

fn boot_id() -> Option<String> {
    fs::read_to_string(BOOT_ID).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(folder: &Path, user: &str) -> Gate {
        let gate = Gate::beside(&folder.join("kubelet.sock"), user).unwrap();
        gate.prepare().unwrap();
        gate
    }

    #[test]
    fn release_holds_for_every_user_until_it_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let (run, labels) = (gate(folder.path(), "run"), gate(folder.path(), "labels"));
        let (one, two) = (run.enter().unwrap(), run.enter().unwrap());
        let other = labels.enter().unwrap();
        assert_eq!(run.users(), ["labels", "run"]);
        run.release(true).unwrap();
        assert!(labels.is_released());
        assert_eq!(labels.enter().unwrap_err(), DriverReleased);
        drop((one, other));
        assert_eq!(labels.users(), ["run"], "one of two users has ended");
        drop(two);
        assert!(run.users().is_empty());
        labels.release(false).unwrap();
        labels.release(false).unwrap();
        assert!(!run.is_released() && run.enter().is_ok());
    }

    #[test]
    fn release_ends_with_the_boot() {
        let folder = tempfile::tempdir().unwrap();
        let gate = gate(folder.path(), "run");
        for (boot, holds) in [("another boot\n", false), ("", true), (boot_id().unwrap().as_str(), true)] {
            fs::write(gate.folder.join(RELEASE), boot).unwrap();
            assert_eq!(gate.is_released(), holds, "{boot}");
        }
    }

    #[test]
    fn without_a_kubelet_nothing_is_made_and_nothing_refused() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("kubelet");
        let gate = Gate::beside(&absent.join("kubelet.sock"), "run").unwrap();
        gate.prepare().unwrap();
        assert!(gate.enter().is_ok() && gate.users().is_empty() && gate.init_turn().is_none());
        assert!(!gate.release(true).unwrap() && !absent.exists());
    }

    #[test]
    fn one_process_has_a_turn_and_none_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let (run, labels) = (gate(folder.path(), "run"), gate(folder.path(), "labels"));
        let turn = run.turn(MIG, Duration::ZERO).unwrap().unwrap();
        assert_eq!(labels.turn(MIG, ATTEMPTS * 2).unwrap_err(), TurnTaken);
        assert!(labels.turn(INITIALISING, Duration::ZERO).unwrap().is_some(), "another turn");
        let waiting = thread::spawn(move || labels.turn(MIG, Duration::from_secs(60)).unwrap().is_some());
        drop(turn);
        assert!(waiting.join().unwrap());
    }
}
