//! What can go wrong, by operation. Each error names its thing; none repeats its source.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::pod::Place;
use super::state::State;
use super::topology_manager::{Refusal, UnsupportedMachine};

/// Starting, stopping or restarting the box.
#[derive(Debug, thiserror::Error)]
pub enum BoxError {
    /// The folder cannot be made, read or cleaned, or the socket in it cannot be bound.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// `start` on a box that is running.
    #[error("the kubelet is already running")]
    Running,
    /// The Topology Manager does not work on this machine.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedMachine),
    /// A task of the box panicked.
    #[error("a task of the kubelet ended badly")]
    Task {
        /// The panic.
        source: tokio::task::JoinError,
    },
    /// Tasks or connections did not end in time; the tasks were aborted.
    #[error("tasks or connections of the kubelet were still there after {after:?}")]
    Stuck {
        /// How long they were waited for.
        after: Duration,
    },
}

/// [`super::KubeletBox::wait`] waited in vain.
#[derive(Debug, thiserror::Error)]
#[error("the awaited state did not come within {after:?}; the last one was {last:#?}")]
pub struct WaitError {
    /// How long it waited.
    pub after: Duration,
    /// What it saw last.
    pub last: Arc<State>,
}

/// A call to a plugin failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The plugin, or the connection to it, answered with a status.
    #[error("{method} failed")]
    Status {
        /// The method's name.
        method: &'static str,
        /// The answer.
        source: Box<tonic::Status>,
    },
    /// No answer in time.
    #[error("{method} had no answer after {after:?}")]
    Timeout {
        /// The method's name.
        method: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The endpoint is stopped, or was while the call was under way.
    #[error("{method}: the endpoint is stopped")]
    Stopped {
        /// The method's name.
        method: &'static str,
    },
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
    /// No plugin has listed devices of this resource, or it has been removed since.
    #[error("{0}: no such resource on this node")]
    Unregistered(Box<Place>),
    /// The resource is there, but none of its devices is healthy.
    #[error("{0}: no device is healthy")]
    NoHealthyDevices(Box<Place>),
    /// The container holds devices that are not healthy any more.
    #[error("{place}: devices it holds are not healthy: {}", devices.join(", "))]
    HeldUnhealthy {
        /// The pod.
        place: Box<Place>,
        /// The ids.
        devices: Vec<String>,
    },
    /// The container holds another number of devices than it asks for.
    #[error("{place}: asks for {requested} but holds {held}")]
    RequestChanged {
        /// The pod.
        place: Box<Place>,
        /// Devices it asks for.
        requested: u32,
        /// Devices it holds.
        held: usize,
    },
    /// Too few devices are healthy and free, or CPUs (resource `cpu`) for a container that wants them for itself.
    #[error("{place}: requested {requested}, available {available}")]
    Insufficient {
        /// The pod.
        place: Box<Place>,
        /// Devices it asks for.
        requested: u32,
        /// Devices that are healthy and free.
        available: usize,
    },
    /// The Topology Manager refuses: `TopologyAffinityError`.
    #[error("{0}")]
    TopologyAffinity(Box<Refusal>),
    /// GetPreferredAllocation failed.
    #[error("{place}: no preferred allocation")]
    Preferred {
        /// The pod.
        place: Box<Place>,
        /// Why.
        source: CallError,
    },
    /// Allocate failed.
    #[error("{place}: no allocation of {}", devices.join(", "))]
    Allocate {
        /// The pod.
        place: Box<Place>,
        /// The ids that were to be allocated, sorted.
        devices: Vec<String>,
        /// Why.
        source: CallError,
    },
    /// Allocate answered for no container.
    #[error("{0}: the plugin's allocation holds no container")]
    EmptyResponse(Box<Place>),
    /// PreStartContainer failed: the pod stays admitted and holds its devices, the container did not start.
    #[error("{place}: the container cannot start")]
    PreStart {
        /// Whose start.
        place: Box<Place>,
        /// Why.
        source: CallError,
    },
    /// A restart of a container that holds nothing.
    #[error("pod {pod}, container {container}: holds no devices")]
    NothingHeld {
        /// The pod.
        pod: String,
        /// The container.
        container: String,
    },
}

impl AdmissionError {
    /// The status with which the plugin answered, where it did.
    pub fn status(&self) -> Option<&tonic::Status> {
        match self {
            Self::Preferred { source: CallError::Status { source, .. }, .. }
            | Self::Allocate { source: CallError::Status { source, .. }, .. }
            | Self::PreStart { source: CallError::Status { source, .. }, .. } => Some(source),
            _ => None,
        }
    }
}
