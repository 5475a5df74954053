//! Keeps the health record across restarts of linkwise: one small file, written apart from admissions.
//!
//! Called by `node`, which owns the task, by the takeover, and by the doctor, for which no file is renamed or written.
//! The core's `state` decides what is recorded, and which part of a record still counts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use linkwise_core::errors::chain;
use linkwise_core::state::{Expectation, HealthRecord, NodeIdentity, XidPolicy};
use linkwise_nvml::supervisor::identity;
use linkwise_system::right::Right;
use linkwise_system::{files, or_never};

/// The record's file name.
pub const FILE: &str = "linkwise_health.json";
/// linkwise's own folder beside the kubelet's socket. At their start, kubelets (at least up to 1.31) remove every file
/// beside that socket except their own checkpoint, and no folder (CleanupPluginDirectory in
/// pkg/kubelet/cm/devicemanager/manager.go).
const FOLDER: &str = "linkwise";
/// The longest record that is read, in bytes: a hundred times that of a node with 16 unhealthy GPUs.
const MAX_RECORD: u64 = 1 << 20;
/// The longest time that a start waits for the disk to give the record.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause before a failed write is tried again: a full disk has room after a while, and the next change of health
/// may be days away.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// The settings for deciding about health and recording it.
#[derive(Clone, Debug, Default)]
pub struct HealthSettings {
    /// The XIDs that make a GPU unhealthy.
    pub xids: XidPolicy,
    /// The first hold time; without it, the state's default.
    pub hold: Option<Duration>,
    /// The hardware that is expected of the node.
    pub expected: Expectation,
    /// True if GPUs are polled, so that the first device list waits for the first poll.
    pub await_first_poll: bool,
    /// True if the prepared claims come as an event, so that the first device list waits for them.
    pub await_claims: bool,
    /// The record's folder; without one, nothing is kept.
    pub state_dir: Option<PathBuf>,
}

/// Reads and writes the health record, for the node and the takeover.
#[derive(Clone, Debug)]
pub struct Keeper {
    folder: Option<PathBuf>,
    retry: Duration,
    /// True if the last write failed.
    has_failed: bool,
}

/// The record's default folder: `linkwise` in the folder of the kubelet's socket.
pub fn default_folder(kubelet_socket: &Path) -> Option<PathBuf> {
    Some(kubelet_socket.parent()?.join(FOLDER))
}

/// The reason why a record is not used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// The file has other content.
    #[error("the file is not a health record")]
    Invalid(#[from] serde_json::Error),
}

/// The part that every version of the record has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Keeper {
    /// A keeper of the record in a folder; without one, nothing is kept.
    pub fn of(folder: Option<PathBuf>) -> Self {
        Self { folder, retry: RETRY_DELAY, has_failed: false }
    }

    /// Reads the record of the previous process. A file that cannot be used is renamed, and the log names both paths.
    pub async fn read(&self) -> Option<HealthRecord> {
        let file = self.folder.as_ref()?.join(FILE);
        let reading = spawn_blocking(move || read(&file).map_err(|error| (error, set_aside(&file), file)));
        match timeout(READ_TIMEOUT, reading).await {
            Ok(Ok(Ok(record))) => return record,
            Ok(Ok(Err((error, aside, file)))) => {
                let error = chain(&error);
                tracing::warn!(file = %file.display(), error, aside, "health record not used");
            }
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(folder = ?self.folder, "health record not used: it cannot be read in time");
            }
        }
        None
    }

    /// Writes each new record while this process has the right to write files, and the last record even after the
    /// shutdown began. A failed write is logged once, and tried again until a write succeeds.
    pub async fn follow(
        mut self,
        mut records: watch::Receiver<Option<HealthRecord>>,
        mut files: watch::Receiver<Option<Right>>,
        shutdown: CancellationToken,
    ) {
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                () = or_never(records.changed()) => {}
                () = or_never(files.changed()) => {}
                () = sleep(self.retry), if self.has_failed => {}
            }
            let right = files.borrow_and_update().clone();
            self.write(&mut records, right).await;
        }
        let right = files.borrow().clone().filter(|_| self.has_failed || records.has_changed().unwrap_or(false));
        self.write(&mut records, right).await;
    }

    /// Writes the current record, if this process has the right to. Otherwise another process owns the file, and this
    /// process writes the record when it gets the right. Logs the first failure, and the success that ends it.
    async fn write(&mut self, records: &mut watch::Receiver<Option<HealthRecord>>, right: Option<Right>) {
        let Some(right) = right else { return };
        let record = records.borrow_and_update().clone();
        let (Some(folder), Some(record)) = (self.folder.clone(), record) else { return };
        let file = folder.join(FILE);
        let written = spawn_blocking(move || {
            let _right = right;
            write(&folder, &record)
        });
        let written = written.await.context("the writing task failed").flatten();
        match &written {
            Ok(()) if self.has_failed => tracing::info!("health record written again"),
            Err(error) if !self.has_failed => {
                let (file, error) = (file.display(), format!("{error:#}"));
                tracing::warn!(%file, error, "cannot write the health record: a restart now would lose it");
            }
            Ok(()) | Err(_) => {}
        }
        self.has_failed = written.is_err();
    }
}

/// A health record and the identity that it has to match.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The file.
    pub file: PathBuf,
    /// Its content; `None` if there is no file.
    pub record: Option<HealthRecord>,
    /// The current boot and load of the driver: a record of another boot or load does not count.
    pub identity: NodeIdentity,
}

/// Reads the record in `folder`, or else in [`default_folder`]. The call may block. An error names the file.
pub fn kept(folder: Option<&Path>, kubelet_socket: &Path, sysfs: &Path) -> Result<Kept, (PathBuf, ReadError)> {
    let folder = folder.map(Path::to_owned).or_else(|| default_folder(kubelet_socket)).unwrap_or_default();
    let file = folder.join(FILE);
    match read(&file) {
        Ok(record) => Ok(Kept { file, record, identity: identity(sysfs) }),
        Err(error) => Err((file, error)),
    }
}

/// Renames a broken record; returns its new path, empty if it could not be renamed.
fn set_aside(file: &Path) -> String {
    let aside = file.with_extension("json.broken");
    fs::rename(file, &aside).map_or_else(|_| String::new(), |()| aside.display().to_string())
}

/// Reads a record of any version; `None` if there is no file. The call may block.
pub fn read(file: &Path) -> Result<Option<HealthRecord>, ReadError> {
    let text = match files::read(file, MAX_RECORD) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    Ok(Some(parse(&text)?))
}

/// Reads the text of a record of any version.
pub fn parse(text: &[u8]) -> Result<HealthRecord, serde_json::Error> {
    let Version { version } = serde_json::from_slice(text)?;
    if version != HealthRecord::VERSION {
        // The record is not broken: another version of linkwise wrote it. The core's `state` decides what that means.
        return Ok(HealthRecord { version, ..HealthRecord::default() });
    }
    serde_json::from_slice(text)
}

fn write(folder: &Path, record: &HealthRecord) -> anyhow::Result<()> {
    files::make_private(folder)?;
    let mut text = serde_json::to_vec_pretty(record)?;
    text.push(b'\n');
    Ok(files::write(&folder.join(FILE), &text, 0o600)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::GpuRecord;

    /// A record of one GPU whose hold time was doubled `flaps` times.
    fn record(flaps: u32) -> HealthRecord {
        let gpu = GpuRecord { flaps: Some(flaps), ..GpuRecord::default() };
        let (version, gpus) = (HealthRecord::VERSION, [("GPU-1".parse().unwrap(), gpu)].into());
        HealthRecord { version, gpus, ..HealthRecord::default() }
    }

    /// Waits until the file on the disk has this record.
    async fn wait_for_record(keeper: &Keeper, wanted: &HealthRecord) {
        let reads = async {
            while keeper.read().await.as_ref() != Some(wanted) {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), reads).await.unwrap();
    }

    #[tokio::test]
    async fn failed_write_is_retried_without_news() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, aside) = (folder.path().join(FOLDER), folder.path().join("aside"));
        let settings = HealthSettings { state_dir: Some(dir.clone()), ..HealthSettings::default() };
        let mut keeper = Keeper { retry: Duration::from_millis(1), ..Keeper::of(settings.state_dir.clone()) };
        let (records, shutdown) = (watch::Sender::new(Some(record(1))), CancellationToken::new());
        let mut followed = records.subscribe();
        keeper.write(&mut followed, Some(Right::default())).await;
        assert!(!keeper.has_failed);
        // There is a file in the folder's place: nothing can be written, not even by root.
        fs::rename(&dir, &aside).unwrap();
        fs::write(&dir, "a file").unwrap();
        records.send_replace(Some(record(2)));
        keeper.write(&mut followed, Some(Right::default())).await;
        assert!(keeper.has_failed);
        // There is room again, and no further change.
        fs::remove_file(&dir).unwrap();
        fs::rename(&aside, &dir).unwrap();
        assert_eq!(keeper.read().await, Some(record(1)), "the old record is whole");
        let ends = async {
            wait_for_record(&keeper, &record(2)).await;
            shutdown.cancel();
        };
        tokio::join!(keeper.clone().follow(followed, watch::channel(Some(Right::default())).1, shutdown.clone()), ends);
    }

    #[tokio::test]
    async fn last_record_is_written_after_shutdown() {
        let folder = tempfile::tempdir().unwrap();
        let settings = HealthSettings { state_dir: Some(folder.path().join(FOLDER)), ..HealthSettings::default() };
        let (keeper, records) = (Keeper::of(settings.state_dir.clone()), watch::Sender::new(None));
        let (followed, shutdown) = (records.subscribe(), CancellationToken::new());
        shutdown.cancel();
        records.send_replace(Some(record(7)));
        keeper.clone().follow(followed, watch::channel(Some(Right::default())).1, shutdown).await;
        assert_eq!(keeper.read().await, Some(record(7)));
    }

    #[tokio::test]
    async fn too_long_record_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let mut text = serde_json::to_vec(&record(1)).unwrap();
        let longest = usize::try_from(MAX_RECORD).unwrap();
        for (length, is_read) in [(longest, true), (longest + 1, false)] {
            text.resize(length, b' ');
            fs::write(&file, &text).unwrap();
            assert_eq!(read(&file).is_ok(), is_read, "{length}");
        }
    }
}
