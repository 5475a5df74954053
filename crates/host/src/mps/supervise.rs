//! Keeps the control daemon of one resource, or of GPUs of claims, running; keeps its marker correct, and its GPUs
//! exclusive if they should be.
//!
//! Called by the program, which owns the task. The marker exists only while the limits hold, and is removed first. The
//! compute mode stays EXCLUSIVE_PROCESS between two daemons: clients start again at once, and a client that found the
//! GPU open would take memory that no limit covers. The mode is set back when the supervisor ends, at any point.
//!
//! The marker is the file that shows that a resource's limits hold, while the process that wrote it lives. The plugin
//! reads it, but not during an admission: a resource may be offered while [`readiness`] is `Ok`, and at no other time.
//! The writer holds a kernel lock on the file, which ends with the process: so the file of a killed daemon does not
//! count, even after a reboot of the node. A process id would not do: the plugin is in another container, with other
//! process ids.

use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::control::Control;
use super::daemon::{Daemon, MpsError, Settings, end_predecessor, set_back, set_exclusive};
use super::layout::{Layout, LayoutError};
use super::limits::Limits;
use super::shm::label;
use super::shm::mount_own_shm;
use linkwise_core::backoff::Backoff;
use linkwise_core::errors::chain;
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_core::topology::GpuUuid;
use linkwise_system::files;

/// An event of the control daemon of a resource.
#[derive(Debug)]
pub enum DaemonEvent {
    /// The daemon serves, and the limits hold.
    Serving,
    /// SELinux may deny containers the daemon's sockets.
    NotLabelled(MpsError),
    /// The daemon does not serve, or no longer; it is started again after a pause.
    Failed(MpsError, Duration),
    /// The daemon ended as requested; the error is a compute mode that is not set back.
    Ended(Option<MpsError>),
}

/// Serves one resource until `shutdown`.
pub async fn supervise(
    settings: &Settings,
    resource: &ResourceName,
    limits: &Limits,
    shutdown: &CancellationToken,
    mut report: impl FnMut(DaemonEvent),
) {
    let (first, longest) = settings.pace.pauses;
    let mut backoff = Backoff::new(first, longest);
    while !shutdown.is_cancelled() {
        let began = Instant::now();
        if let Err(why) = one_daemon(settings, resource, limits, shutdown, &mut report).await {
            // The pause doubles even if each daemon serves and dies soon after.
            let again_in = backoff.failed_after(began.elapsed());
            // For the plugin, which says it in the events of pods. Without it, the log alone has the reason.
            let _ = files::write_for_this_boot(&settings.layout.failure(resource), chain(&why).as_bytes(), 0o600);
            report(DaemonEvent::Failed(why, again_in));
            shutdown.run_until_cancelled(tokio::time::sleep(again_in)).await;
        }
    }
    forget_failure(settings, resource);
    let own = |gpu: &GpuUuid| limits.gpus().any(|one| one == gpu);
    report(DaemonEvent::Ended(set_back(settings, own).await.err()));
}

fn forget_failure(settings: &Settings, resource: &ResourceName) {
    // One that stays counts for nothing while the marker is there.
    let _ = files::remove_for_this_boot(&settings.layout.failure(resource));
}

/// Runs one daemon from its start to its end; `Ok` if `shutdown` ended it.
async fn one_daemon(
    settings: &Settings,
    resource: &ResourceName,
    limits: &Limits,
    shutdown: &CancellationToken,
    report: &mut impl FnMut(DaemonEvent),
) -> Result<(), MpsError> {
    let path = settings.layout.marker(resource);
    let cannot_write = |source| MpsError::Write(path.clone(), source);
    files::remove_for_this_boot(&path).map_err(cannot_write)?;
    let control = Control::of(settings, resource, limits)?;
    if let Err(error) = label(&settings.layout.pipe(resource), &settings.selinuxfs) {
        report(DaemonEvent::NotLabelled(error));
    }
    if limits.own_shm {
        mount_own_shm(&settings.layout, resource)?;
    }
    let pace = settings.pace;
    let Some(ended) = shutdown.run_until_cancelled(end_predecessor(&control, pace.quit)).await else { return Ok(()) };
    ended?;
    // This is not cancelled: a killed nvidia-smi may have set the mode, or be about to.
    if limits.exclusive {
        set_exclusive(settings, &limits.gpus().collect::<Vec<_>>()).await?;
    }
    let Some(daemon) = shutdown.run_until_cancelled(Daemon::start(control, limits, pace)).await else { return Ok(()) };
    let mut daemon = daemon?;
    let marker = Marker::set(&path, limits).map_err(cannot_write)?;
    forget_failure(settings, resource);
    report(DaemonEvent::Serving);
    let failed = shutdown.run_until_cancelled(daemon.watch()).await;
    drop(marker);
    if let Some(why) = failed {
        return Err(why);
    }
    daemon.end().await;
    Ok(())
}

/// The longest file that is read, in bytes; 16 GPUs take about 1,500.
const MAX_FILE: u64 = 64 << 10;

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
}

impl Drop for Marker {
    fn drop(&mut self) {
        // If this fails, the lock still ends, and the marker is stale.
        let _ = files::remove_for_this_boot(&self.path);
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
    file.take(MAX_FILE).read_to_end(&mut text).map_err(|error| unreadable(&error))?;
    let limits: Limits = serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
    match limits.hold(wanted) {
        true if limits.own_shm => Ok(MpsShm::Own),
        true => Ok(MpsShm::Common),
        false => Err(NotReady::OtherLimits),
    }
}

fn failure(layout: &Layout, resource: &ResourceName) -> NotReady {
    let text = files::read(&layout.failure(resource), MAX_FILE);
    text.map_or(NotReady::NoMarker, |text| NotReady::Failed(String::from_utf8_lossy(&text).into_owned()))
}
