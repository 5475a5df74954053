//! Keeps the control daemon of one resource, or of GPUs of claims, running, with a correct marker and, if the limits
//! say so, with its GPUs in the compute mode EXCLUSIVE_PROCESS.
//!
//! Called by `mps-control-daemon`, which owns the task. The marker exists only while the limits hold: it is removed
//! before the daemon is ended. The compute mode stays EXCLUSIVE_PROCESS between two daemons, because clients start
//! again at once, and a client that found the mode DEFAULT would take memory that no limit covers. The mode is set back
//! when the supervisor is told to end, at whatever stage it is.
//!
//! The marker is the file that shows that a resource's limits hold, while the process that wrote it lives. The plugin
//! reads it, but not during an admission: a resource may be offered only while [`readiness`] is `Ok`. The writer holds
//! a kernel lock on the file, which ends with the process, so that the marker of a killed process does not count, even
//! after a reboot of the node. A process id would not do: the plugin is in another container, with other process ids.

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
use super::shm::{label, mount_own_shm};
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
    /// The daemon did not start to serve, or stopped serving; it is started again after this pause.
    Failed(MpsError, Duration),
    /// The daemon ended as requested; the error, if any, is a compute mode that could not be set back.
    Ended(Option<MpsError>),
}

/// Keeps the daemon of one resource running until `shutdown`.
pub async fn supervise(
    settings: &Settings,
    resource: &ResourceName,
    limits: &Limits,
    shutdown: &CancellationToken,
    mut report: impl FnMut(DaemonEvent),
) {
    let mut backoff = Backoff::new(settings.pace.first_pause, settings.pace.longest_pause);
    while !shutdown.is_cancelled() {
        let began = Instant::now();
        if let Err(error) = run_daemon(settings, resource, limits, shutdown, &mut report).await {
            // The pause doubles even if each daemon serves and dies soon after.
            let pause = backoff.failed_after(began.elapsed());
            // The plugin reads the reason from this file and reports it. If the write fails, only the log has the
            // reason.
            let _ = files::write_for_this_boot(&settings.layout.failure(resource), chain(&error).as_bytes(), 0o600);
            report(DaemonEvent::Failed(error, pause));
            shutdown.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }
    forget_failure(settings, resource);
    let is_own = |gpu: &GpuUuid| limits.gpus().any(|own| own == gpu);
    report(DaemonEvent::Ended(set_back(settings, is_own).await.err()));
}

fn forget_failure(settings: &Settings, resource: &ResourceName) {
    // If the file stays, it does not count while the marker exists: `readiness` reads the marker first.
    let _ = files::remove_for_this_boot(&settings.layout.failure(resource));
}

/// Runs one daemon from its start to its end; `Ok` if `shutdown` ended it.
async fn run_daemon(
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
    if let Some(error) = failed {
        return Err(error);
    }
    daemon.end().await;
    Ok(())
}

/// The longest marker, or file with a failure, that is read, in bytes; a marker of 16 GPUs takes about 1,500.
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
    #[error("the MPS daemon does not serve")]
    NoMarker,
    /// The daemon failed, with the reason.
    #[error("the MPS daemon does not serve: {0}")]
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

/// Checks a resource as [`readiness`] does, and returns the shared memory that its daemon has.
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
    match limits.meet(wanted) {
        true if limits.own_shm => Ok(MpsShm::Own),
        true => Ok(MpsShm::Common),
        false => Err(NotReady::OtherLimits),
    }
}

fn failure(layout: &Layout, resource: &ResourceName) -> NotReady {
    let text = files::read(&layout.failure(resource), MAX_FILE);
    text.map_or(NotReady::NoMarker, |text| NotReady::Failed(String::from_utf8_lossy(&text).into_owned()))
}
