//! The gate: the folder through which all linkwise processes of a node share the driver. It has an operator's release,
//! the processes that use the driver, and the turns to initialise NVML and to change MIG devices.
//!
//! Called by the agent, its supervisor and the MPS daemons' process. Each fact is a file or a lock on a file. The
//! kernel releases a lock when the file is closed, at the latest when its process has ended. File calls may hang, so
//! async callers make them on a thread.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use linkwise_system::files;

/// The call that [`CallError`](crate::CallError) names for an agent that ends because the driver is released.
pub const RELEASED: &str = "linkwise admin release";

/// The file that exists while an operator has released the driver. It contains the id of the boot.
const RELEASE: &str = "released";
/// The prefix of the users' files: each user of the driver has locked the file with its name.
const USED_BY: &str = "used-by-";
/// The file that is locked by the process that initialises NVML.
const INITIALISING: &str = "initialising";
/// The file that is locked by the process that carries out an order about MIG devices.
const MIG: &str = "mig";

/// The longest time that an agent waits until other processes of linkwise have initialised NVML: a quarter of the time
/// that a start may take.
const INIT_TURN_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest time that an order about MIG devices waits for orders of other processes. Meanwhile the agent sends no
/// message. The supervisor kills a silent agent later: after a poll interval and the longest time of a call.
const MIG_TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The time from one attempt to take a turn to the next.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The folder, and the name under which this process uses the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    folder: PathBuf,
    user: String,
}

/// The mark that this process uses the driver, until it is dropped.
#[derive(Debug)]
pub struct DriverUse {
    /// `None` where the folder does not exist or cannot be written: then a release does not wait for this process.
    _lock: Option<File>,
}

/// The error of using the driver while an operator has released it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an operator released the driver; run `linkwise admin resume` to use it again")]
pub struct DriverReleased;

/// The error of waiting too long for another process's turn to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another linkwise process is still changing MIG devices")]
pub struct TurnTaken;

impl Gate {
    /// The gate of the kubelet's node: a folder beside the kubelet's socket. `user` names this process in it.
    pub fn of_kubelet(kubelet_socket: &Path, user: &str) -> Option<Self> {
        let folder = kubelet_socket.parent()?.join("linkwise/driver");
        Some(Self { folder, user: user.to_owned() })
    }

    /// The same gate for another user.
    #[must_use]
    pub fn for_user(&self, user: &str) -> Self {
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

    /// Returns true if an operator has released the driver since the last boot. A reboot ends every use of the driver,
    /// and the release.
    pub fn is_released(&self) -> bool {
        let Ok(boot) = fs::read_to_string(self.folder.join(RELEASE)) else { return false };
        // A full disk may have left the file empty.
        boot.is_empty() || boot_id().is_none_or(|now| now == boot)
    }

    /// Releases the driver for every process of the node, or resumes it. A release returns false if the kubelet's
    /// folder is missing: then other processes cannot learn of it.
    pub fn set_released(&self, is_released: bool) -> io::Result<bool> {
        let path = self.folder.join(RELEASE);
        if is_released {
            self.prepare()?;
            return match fs::write(path, boot_id().unwrap_or_default()) {
                Err(_) if !self.folder.is_dir() => Ok(false),
                written => written.map(|()| true),
            };
        }
        files::remove_for_this_boot(&path).map(|_| true)
    }

    /// Begins to use the driver. Fails while it is released.
    pub fn enter(&self) -> Result<DriverUse, DriverReleased> {
        let file = self.open(&format!("{USED_BY}{}", self.user));
        let lock = file.and_then(|file| file.lock_shared().map(|()| file)).ok();
        // The lock comes first, because a release is written before anyone looks for locks.
        if self.is_released() { Err(DriverReleased) } else { Ok(DriverUse { _lock: lock }) }
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

    /// Waits for the turn to initialise NVML; the turn ends when the file is dropped. Returns `None` if another process
    /// keeps its turn too long, or if there is no folder: NVML may be initialised all the same.
    pub fn init_turn(&self) -> Option<File> {
        self.turn(INITIALISING, INIT_TURN_TIMEOUT).ok().flatten()
    }

    /// Waits for the turn to change MIG devices. The turn ends when the file is dropped, or when the process ends: a
    /// killed process ends only after its present call. Returns `None` if there is no folder. Fails if another process
    /// keeps its turn too long, because the MIG devices that it makes are not known yet.
    pub fn mig_turn(&self) -> Result<Option<File>, TurnTaken> {
        self.turn(MIG, MIG_TURN_TIMEOUT)
    }

    fn turn(&self, name: &str, timeout: Duration) -> Result<Option<File>, TurnTaken> {
        let Ok(file) = self.open(name) else { return Ok(None) };
        let begin = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) if begin.elapsed() < timeout => thread::park_timeout(LOCK_INTERVAL),
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
        let gate = Gate::of_kubelet(&folder.join("kubelet.sock"), user).unwrap();
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
        run.set_released(true).unwrap();
        assert!(labels.is_released());
        assert_eq!(labels.enter().unwrap_err(), DriverReleased);
        drop((one, other));
        assert_eq!(labels.users(), ["run"], "one of its two uses has ended");
        drop(two);
        assert!(run.users().is_empty());
        labels.set_released(false).unwrap();
        labels.set_released(false).unwrap();
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
    fn without_a_kubelet_gate_is_open_and_not_made() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("kubelet");
        let gate = Gate::of_kubelet(&absent.join("kubelet.sock"), "run").unwrap();
        gate.prepare().unwrap();
        assert!(gate.enter().is_ok() && gate.users().is_empty() && gate.init_turn().is_none());
        assert!(!gate.set_released(true).unwrap() && !absent.exists());
    }

    #[test]
    fn one_process_has_a_turn_and_none_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let (run, labels) = (gate(folder.path(), "run"), gate(folder.path(), "labels"));
        let turn = run.turn(MIG, Duration::ZERO).unwrap().unwrap();
        assert_eq!(labels.turn(MIG, LOCK_INTERVAL * 2).unwrap_err(), TurnTaken);
        assert!(labels.turn(INITIALISING, Duration::ZERO).unwrap().is_some(), "another turn");
        let waiting = thread::spawn(move || labels.turn(MIG, Duration::from_secs(60)).unwrap().is_some());
        drop(turn);
        assert!(waiting.join().unwrap());
    }
}
