//! Keeps the control daemon of one resource alive, and its marker true.
//!
//! Called by the runtime, which owns the task. The marker stands only while the limits hold; whatever else is the case, it
//! goes first.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::daemon::{Daemon, Settings, StartError};
use super::limits::Limits;
use super::marker::Marker;
use crate::state::ResourceName;

/// What happened to the control daemon of a resource.
#[derive(Clone, Debug)]
pub enum Occurrence {
    /// It serves, and the limits hold.
    Serving,
    /// It does not serve, or no longer; it is started again after a pause.
    Failed {
        /// Why.
        why: Arc<StartError>,
        /// The pause.
        again_in: Duration,
    },
    /// It was ended in order; the error is what could not be put back.
    Ended(Option<Arc<StartError>>),
}

/// Serves one resource until `shutdown`.
pub async fn supervise(
    settings: &Settings,
    resource: &ResourceName,
    limits: &Limits,
    shutdown: &CancellationToken,
    mut report: impl FnMut(Occurrence),
) {
    let (first, longest) = settings.pace.pauses;
    let mut pause = Duration::ZERO;
    loop {
        let began = Instant::now();
        let why = match one_daemon(settings, resource, limits, shutdown, &mut report).await {
            Ok(()) => return,
            Err(why) => Arc::new(why),
        };
        // Doubling, also where each one serves and dies soon after; one that lasted died of something new.
        pause = if began.elapsed() >= longest { first } else { (pause * 2).clamp(first, longest) };
        report(Occurrence::Failed { why, again_in: pause });
        if shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            report(Occurrence::Ended(None));
            return;
        }
    }
}

/// One daemon from its start to its end; `Ok` when that was by `shutdown`.
async fn one_daemon(
    settings: &Settings,
    resource: &ResourceName,
    limits: &Limits,
    shutdown: &CancellationToken,
    report: &mut impl FnMut(Occurrence),
) -> Result<(), StartError> {
    let path = settings.layout.marker(resource);
    let write = |source| StartError::Write { path: path.clone(), source };
    Marker::clear(&path).map_err(write)?;
    let Some(daemon) = shutdown.run_until_cancelled(Daemon::start(settings, resource, limits)).await else {
        report(Occurrence::Ended(None));
        return Ok(());
    };
    let mut daemon = daemon?;
    let marker = Marker::set(&path, limits).map_err(write)?;
    report(Occurrence::Serving);
    let failed = shutdown.run_until_cancelled(daemon.watch()).await;
    drop(marker);
    match failed {
        Some(why) => Err(why),
        None => {
            report(Occurrence::Ended(daemon.end().await.err().map(Arc::new)));
            Ok(())
        }
    }
}
