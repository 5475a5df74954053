//! The plugin's side of the kubelet's device plugin API: one server for each resource, and its life.
//!
//! Owns our socket, the registration and the streams of one resource. The runtime makes a
//! [`Plugin`] for each resource and owns the task that runs it; this module starts no task. Wire
//! types stop at `convert.rs` and the two files that speak them, `service.rs` and `register.rs`. The path of an
//! admission reads one inventory snapshot: no NVML, no lock held by a probe, no disk.

mod convert;
mod handover;
mod layer;
mod life;
mod nics;
mod offers;
mod register;
mod service;
mod socket;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::allocation::AllocationReport;
use crate::inventory::{Inventory, ResourceName};

pub use handover::{CdiNames, DeviceIds, Handover, Surroundings};
pub use life::{Plugin, PluginError};
pub use nics::RdmaNodes;

/// How a plugin finds its kubelet and what it hands to containers.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's registration socket; our own sockets lie beside it.
    pub kubelet_socket: PathBuf,
    /// How containers get their GPUs.
    pub handover: Handover,
    /// How long the kubelet may take to answer Register. It dials back meanwhile, for up to 10 s.
    pub register_timeout: Duration,
    /// How long after Register the kubelet may take to open ListAndWatch.
    pub stream_timeout: Duration,
    /// How often the sockets are looked at where inotify is silent.
    pub poll: Duration,
    /// The longest pause between attempts; the first retry comes at once, the next after 1/64 of this.
    pub longest_pause: Duration,
}

impl Settings {
    /// The settings for a kubelet whose registration socket is at `kubelet_socket`.
    pub fn new(kubelet_socket: PathBuf) -> Self {
        Self {
            kubelet_socket,
            handover: Handover::default(),
            register_timeout: Duration::from_secs(15),
            stream_timeout: Duration::from_secs(10),
            poll: Duration::from_secs(1),
            longest_pause: Duration::from_secs(16),
        }
    }
}

/// Where a plugin is in its life with the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// There is no kubelet.sock.
    WaitingForKubelet,
    /// Our socket is served, the kubelet has not answered yet.
    Registering,
    /// Registered; the kubelet has not opened ListAndWatch yet.
    WaitingForStream,
    /// The kubelet holds an open ListAndWatch stream.
    Serving,
    /// Something ended; the next attempt is to come.
    Pausing,
}

impl Phase {
    /// The phase in words, for /readyz and the log.
    pub fn words(self) -> &'static str {
        match self {
            Self::WaitingForKubelet => "waiting for kubelet.sock",
            Self::Registering => "registering",
            Self::WaitingForStream => "registered, waiting for the kubelet's ListAndWatch",
            Self::Serving => "serving",
            Self::Pausing => "pausing before the next attempt",
        }
    }
}

/// Something a plugin did, for the log and the metrics.
#[derive(Clone, Debug)]
pub enum Occurrence {
    /// The phase changed.
    Phase(Phase),
    /// There is no kubelet to register with, and why not.
    Waiting(String),
    /// A registration ended, `Err` with the whole chain of causes.
    Registered(Result<(), String>),
    /// A session with the kubelet ended, and why.
    Ended(String),
    /// An RPC ended.
    Rpc {
        /// `Allocate`, `ListAndWatch` ...
        method: String,
        /// gRPC's name of the code, `CANCELLED` when the caller went away.
        code: &'static str,
        /// From the request's head to the end of the answer.
        elapsed: Duration,
    },
    /// GetPreferredAllocation was answered.
    Chosen {
        /// Why these.
        report: Arc<AllocationReport>,
        /// What the choice alone took.
        elapsed: Duration,
        /// Whether the kubelet held back devices that are healthy and free, or had taken some already.
        narrowed: bool,
    },
    /// Allocate was answered, `Err` with the refusal.
    Allocated(Result<Vec<String>, String>),
}

/// Where occurrences go. Called on the path of an admission: it must not block.
pub type Observer = Arc<dyn Fn(&ResourceName, Occurrence) + Send + Sync>;

/// What all servers of one node follow.
#[derive(Clone)]
pub struct Sources {
    /// The current inventory.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Where occurrences go.
    pub observer: Observer,
}
