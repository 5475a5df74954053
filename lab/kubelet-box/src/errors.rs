//! The errors, one type for each operation. Each error names the thing that failed and does not repeat its source.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::pod::Place;
use super::topology_manager::{Refusal, UnsupportedMachine};

/// An error of starting, stopping or restarting the box.
#[derive(Debug, thiserror::Error)]
pub enum BoxError {
    /// One of the box's folders or sockets cannot be used.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path that the action was for.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A start of a box that is running.
    #[error("the kubelet is already running")]
    Running,
    /// The Topology Manager does not work on this machine.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedMachine),
    /// A task of the box panicked.
    #[error("a task of the kubelet panicked")]
    Task(#[source] tokio::task::JoinError),
    /// Tasks or connections did not end in time, and the tasks were aborted.
    #[error("tasks or connections of the kubelet did not end within {0:?}")]
    Stuck(Duration),
}

/// The wanted state did not come in time.
#[derive(Debug, thiserror::Error)]
#[error("the awaited state did not come within {after:?}; the last one was {last:#?}")]
pub struct WaitError<S> {
    /// The time of the wait.
    pub after: Duration,
    /// The last state.
    pub last: S,
}

/// Waits until the state is as wanted and returns it.
pub(super) async fn wait_for<S: Clone>(
    states: &watch::Sender<S>,
    after: Duration,
    wanted: impl FnMut(&S) -> bool,
) -> Result<S, WaitError<S>> {
    // The sender lives as long as this call, so that the only possible error is the timeout.
    match timeout(after, states.subscribe().wait_for(wanted)).await {
        Ok(Ok(state)) => Ok(state.clone()),
        Ok(Err(_)) | Err(_) => Err(WaitError { after, last: states.borrow().clone() }),
    }
}

/// An error and its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A call to a plugin failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The plugin, or the connection to it, answered with a status.
    #[error("{0} failed")]
    Status(&'static str, #[source] Box<tonic::Status>),
    /// No answer in time.
    #[error("{0} had no answer after {1:?}")]
    Timeout(&'static str, Duration),
    /// The endpoint is stopped, or was stopped during the call.
    #[error("{0}: the endpoint is stopped")]
    Stopped(&'static str),
}

/// A plugin could not be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("cannot dial {} within {after:?}", path.display())]
    Connect { path: PathBuf, after: Duration, source: Option<tonic::transport::Error> },
    #[error("{} was dialled but did not give its options", path.display())]
    Options { path: PathBuf, source: CallError },
    #[error("{} is already connected", path.display())]
    AlreadyConnected { path: PathBuf },
}

/// A pod was not admitted, or its containers did not start.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The box is stopped.
    #[error("pod {0}: the kubelet is not running")]
    NotRunning(String),
    /// No plugin has listed devices of this resource, or the resource has been removed since.
    #[error("{0}: no such resource on this node")]
    Unregistered(Box<Place>),
    /// The resource is there, but none of its devices is healthy.
    #[error("{0}: no device is healthy")]
    NoHealthyDevices(Box<Place>),
    /// The container holds devices that are no longer healthy.
    #[error("{0}: devices it holds are not healthy: {ids}", ids = .1.join(", "))]
    HeldUnhealthy(Box<Place>, Vec<String>),
    /// The container requests another number of devices than it holds.
    #[error("{0}: asks for {1} but holds {2}")]
    RequestChanged(Box<Place>, u32, usize),
    /// Too few devices are healthy and free.
    #[error("{place}: requested {requested}, available {available}")]
    Insufficient {
        /// The container and the resource.
        place: Box<Place>,
        /// The number of requested devices.
        requested: u32,
        /// The number of devices that are healthy and free.
        available: usize,
    },
    /// The Topology Manager refuses the pod: `TopologyAffinityError`.
    #[error("{0}")]
    TopologyAffinity(Box<Refusal>),
    /// GetPreferredAllocation failed.
    #[error("{0}: no preferred allocation")]
    Preferred(Box<Place>, #[source] CallError),
    /// Allocate failed.
    #[error("{place}: no allocation of {}", devices.join(", "))]
    Allocate {
        /// The container and the resource.
        place: Box<Place>,
        /// The ids of the Allocate call, sorted.
        devices: Vec<String>,
        /// The reason.
        source: CallError,
    },
    /// Allocate answered without a container.
    #[error("{0}: the plugin's allocation holds no container")]
    EmptyResponse(Box<Place>),
    /// A restart of a container that holds no devices.
    #[error("pod {0}, container {1}: holds no devices")]
    NothingHeld(String, String),
}

impl AdmissionError {
    /// The status of the failed call to the plugin, if there is one.
    pub fn status(&self) -> Option<&tonic::Status> {
        match self {
            Self::Preferred(_, CallError::Status(_, status))
            | Self::Allocate { source: CallError::Status(_, status), .. } => Some(status),
            _ => None,
        }
    }
}
