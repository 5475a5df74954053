//! Keeps the control daemon of one resource, or of GPUs of claims, running; keeps its marker correct, and its GPUs
//! exclusive if they should be.
//!
//! Called by the program, which owns the task. The marker exists only while the limits hold, and is removed first. The
//! compute mode stays EXCLUSIVE_PROCESS between two daemons: clients start again at once, and a client that found the
//! GPU open would take memory that no limit covers. The mode is set back when the supervisor ends, at any point.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::compute_mode::{set_back, set_exclusive};
use super::control::Control;
use super::daemon::{Daemon, MpsError, Settings, end_predecessor};
use super::limits::Limits;
use super::marker::Marker;
use super::selinux::label;
use super::shm::mount_own_shm;
use linkwise_core::backoff::Backoff;
use linkwise_core::errors::chain;
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
    Marker::clear(&path).map_err(cannot_write)?;
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
