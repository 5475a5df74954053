//! Keeps the GPUs' health across restarts: one small file, written whole or not at all, off every admission's path.
//!
//! Called by `node`. What has to be kept, and what of it still holds, is decided by `snapshot`.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::state::{HealthRecord, XidPolicy};

/// The file.
pub(super) const FILE: &str = "linkwise_health.json";
/// The folder of our own beside the kubelet's socket. Kubelets that clean up that folder at their start leave folders alone; up to
/// 1.31 and longer they remove every file there but their own checkpoint (CleanupPluginDirectory in
/// pkg/kubelet/cm/devicemanager/manager.go).
const FOLDER: &str = "linkwise";
/// The longest file that is read, in bytes: a hundred times that of a node with 16 GPUs in trouble.
const LONGEST: u64 = 1 << 20;
/// How long a start waits for a disk.
const PATIENCE: Duration = Duration::from_secs(2);
/// How soon a record that could not be written is tried again: a disk is full for a while, and the next news may be days off.
const AGAIN: Duration = Duration::from_secs(10);

/// How health is judged and kept.
#[derive(Clone, Debug, Default)]
pub struct HealthSettings {
    /// An operator's word on XIDs.
    pub xids: XidPolicy,
    /// The first hold; without it, the snapshot's own.
    pub hold: Option<Duration>,
    /// Whether somebody polls the GPUs, so that the first list may wait for it.
    pub await_first_poll: bool,
    /// Where it is kept; nowhere without one.
    pub state_dir: Option<PathBuf>,
}

/// Reads and writes.
#[derive(Clone, Debug)]
pub(super) struct Keeper {
    folder: Option<PathBuf>,
    again: Duration,
}

/// Where the record is kept unless somebody says otherwise: in a folder of our own beside the kubelet's socket.
pub(super) fn beside(kubelet_socket: &Path) -> Option<PathBuf> {
    Some(kubelet_socket.parent()?.join(FOLDER))
}

/// Why what was kept is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("cannot read it")]
    Io(#[from] io::Error),
    #[error("it has {0} bytes, more than {LONGEST}")]
    TooLong(u64),
    #[error("it is no health record")]
    Nonsense(#[from] serde_json::Error),
}

/// What every version of the record has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Keeper {
    pub fn new(settings: &HealthSettings) -> Self {
        Self { folder: settings.state_dir.clone(), again: AGAIN }
    }

    /// What the last process kept. A file that is broken is set aside, and a person is told.
    pub async fn read(&self) -> Option<HealthRecord> {
        let file = self.folder.as_ref()?.join(FILE);
        let reading = spawn_blocking(move || read(&file).map_err(|error| (error, set_aside(&file), file)));
        match timeout(PATIENCE, reading).await {
            Ok(Ok(Ok(record))) => return record,
            Ok(Ok(Err((error, aside, file)))) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::warn!(file = %file.display(), error, aside, "the health record is not used");
            }
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(folder = ?self.folder, "the health record cannot be read in time and is not used");
            }
        }
        None
    }

    /// Writes each record that comes, the last one for certain, until the shutdown. A disk that is full is told of once, and
    /// tried again.
    pub async fn follow(&self, mut records: watch::Receiver<Option<HealthRecord>>, shutdown: CancellationToken) {
        let mut failing = false;
        loop {
            let news = async {
                if records.changed().await.is_err() {
                    // Nobody will tell: what is left is the shutdown.
                    std::future::pending::<()>().await;
                }
            };
            let due = async {
                // Late: what could not be written is tried again.
                if failing { timeout(self.again, news).await.unwrap_or(()) } else { news.await }
            };
            if shutdown.run_until_cancelled(due).await.is_none() {
                break;
            }
            self.write(&mut records, &mut failing).await;
        }
        if failing || records.has_changed().unwrap_or(false) {
            self.write(&mut records, &mut failing).await;
        }
    }

    async fn write(&self, records: &mut watch::Receiver<Option<HealthRecord>>, failing: &mut bool) {
        let record = records.borrow_and_update().clone();
        let (Some(folder), Some(record)) = (self.folder.clone(), record) else { return };
        let file = folder.join(FILE);
        let written = spawn_blocking(move || write(&folder, &record).map_err(anyhow::Error::from)).await;
        match written.unwrap_or_else(|broke_off| Err(broke_off.into())) {
            Ok(()) if *failing => {
                *failing = false;
                tracing::info!("the health record is written again");
            }
            Err(error) if !*failing => {
                *failing = true;
                let (file, error) = (file.display(), format!("{error:#}"));
                tracing::warn!(
                    %file,
                    error,
                    "cannot write the health record: a restart now would forget what is in it"
                );
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// Where the file is now; nowhere, if it could not be moved.
fn set_aside(file: &Path) -> String {
    let aside = file.with_extension("json.broken");
    fs::rename(file, &aside).map_or_else(|_| String::new(), |()| aside.display().to_string())
}

pub(super) fn read(file: &Path) -> Result<Option<HealthRecord>, ReadError> {
    let length = match fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
        Ok(found) => found.len(),
    };
    if length > LONGEST {
        return Err(ReadError::TooLong(length));
    }
    let text = fs::read_to_string(file)?;
    let Version { version } = serde_json::from_str(&text)?;
    if version != HealthRecord::VERSION {
        // Not broken: a newer linkwise wrote it. Who decides what that means is the snapshot.
        return Ok(Some(HealthRecord { version, ..HealthRecord::default() }));
    }
    Ok(Some(serde_json::from_str(&text)?))
}

fn write(folder: &Path, record: &HealthRecord) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let file = folder.join(FILE);
    let fresh = file.with_extension("json.new");
    let mut text = serde_json::to_vec_pretty(record)?;
    text.push(b'\n');
    let mut written = fs::File::create(&fresh)?;
    written.write_all(&text)?;
    written.sync_all()?;
    fs::rename(&fresh, &file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::GpuRecord;

    /// A record of one GPU, whose hold was doubled so often.
    fn record(flaps: u32) -> HealthRecord {
        let gpu = GpuRecord { flaps: Some(flaps), ..GpuRecord::default() };
        HealthRecord { gpus: [("GPU-1".parse().unwrap(), gpu)].into(), ..HealthRecord::default() }
    }

    /// Waits until the file on the disk says this.
    async fn kept(keeper: &Keeper, wanted: &HealthRecord) {
        let reads = async {
            while keeper.read().await.as_ref() != Some(wanted) {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), reads).await.unwrap();
    }

    #[tokio::test]
    async fn a_full_disk_costs_no_record_once_it_has_room_again() {
        let folder = tempfile::tempdir().unwrap();
        let settings = HealthSettings { state_dir: Some(folder.path().join(FOLDER)), ..HealthSettings::default() };
        let keeper = Keeper { again: Duration::from_millis(1), ..Keeper::new(&settings) };
        let (records, shutdown) = (watch::Sender::new(Some(record(1))), CancellationToken::new());
        let mut followed = records.subscribe();
        followed.mark_changed();
        let life = async {
            kept(&keeper, &record(1)).await;
            // What is written there does not fit: ENOSPC.
            let fresh = settings.state_dir.as_ref().unwrap().join(FILE).with_extension("json.new");
            std::os::unix::fs::symlink("/dev/full", &fresh).unwrap();
            records.send_replace(Some(record(2)));
            // A second change is written no better, and the file stays whole.
            records.send_replace(Some(record(3)));
            let error = spawn_blocking(move || fs::File::create(&fresh).and_then(|mut file| file.write_all(b"x")));
            assert_eq!(error.await.unwrap().unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert_eq!(keeper.read().await, Some(record(1)));
            // Room again, and no news: what could not be kept is kept now.
            fs::remove_file(settings.state_dir.as_ref().unwrap().join("linkwise_health.json.new")).unwrap();
            kept(&keeper, &record(3)).await;
            shutdown.cancel();
        };
        tokio::join!(keeper.follow(followed, shutdown.clone()), life);
    }

    #[tokio::test]
    async fn the_last_record_is_written_though_the_end_has_come() {
        let folder = tempfile::tempdir().unwrap();
        let settings = HealthSettings { state_dir: Some(folder.path().join(FOLDER)), ..HealthSettings::default() };
        let (keeper, records) = (Keeper::new(&settings), watch::Sender::new(None));
        let (followed, shutdown) = (records.subscribe(), CancellationToken::new());
        shutdown.cancel();
        records.send_replace(Some(record(7)));
        keeper.follow(followed, shutdown).await;
        assert_eq!(keeper.read().await, Some(record(7)));
    }

    #[tokio::test]
    async fn a_file_beyond_all_measure_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let mut text = serde_json::to_vec(&record(1)).unwrap();
        let longest = usize::try_from(LONGEST).unwrap();
        for (length, is_read) in [(longest, true), (longest + 1, false)] {
            text.resize(length, b' ');
            fs::write(&file, &text).unwrap();
            assert_eq!(read(&file).is_ok(), is_read, "{length}");
        }
    }
}
