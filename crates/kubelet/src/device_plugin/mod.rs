//! The device plugin API: one server for each resource, and its life with the kubelet.
//!
//! Owns the socket, the registration and the streams of one resource. The node makes a [`Plugin`] for each resource
//! and owns the task that runs it; this module starts no task. Wire types stop at `convert.rs` and the files that use
//! them: `service.rs`, `register.rs`, `channel.rs`, `pod_resources.rs`. `registration` runs the life with the kubelet,
//! with this plugin's `handshake` (docs/life-cycle.md); `publish::injection` decides what a container gets. An
//! admission reads one snapshot, and waits for no NVML, no disk and no lock that a probe holds.

mod calls;
mod channel;
mod checkpoint;
mod convert;
mod handshake;
mod life;
mod metrics;
mod narrowing;
pub mod pod_resources;
mod register;
mod reporter;
mod service;
mod session;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use linkwise_core::allocation::AllocationReport;
use linkwise_core::publish::injection::{HostDevices, InjectionOptions};
use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_system::uds::Callers;

use crate::readiness::{OVERLAPPING, Readiness};
pub use crate::registration::Life;
pub use calls::HeldCalls;
pub(crate) use channel::connect;
pub use channel::{ConnectError, ProbeError, probe};
pub use life::{NoFolder, Plugin};
pub use metrics::PluginMetrics;
use reporter::Reporter;

/// The data that the parts of a running plugin share.
#[derive(Clone)]
struct Shared {
    resource: ResourceName,
    settings: Arc<Settings>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    reporter: Arc<Reporter>,
}

/// A plugin's settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's registration socket; our own sockets lie beside it.
    pub kubelet_socket: PathBuf,
    /// The ways in which containers get their GPUs.
    pub injection: InjectionOptions,
    /// The host's devices beside its GPUs, as last scanned.
    pub host_devices: watch::Receiver<Arc<HostDevices>>,
    /// The kubelet's PodResources socket, which confirms a registration; without it, the stream does.
    pub pod_resources_socket: Option<PathBuf>,
    /// The users that may call our sockets.
    pub callers: Callers,
    /// Holds the kubelet's calls while another plugin ends.
    pub calls: HeldCalls,
    /// The kubelet's time to answer Register. The kubelet dials back meanwhile, for up to 10 s.
    pub register_timeout: Duration,
    /// The kubelet's time to open ListAndWatch after Register.
    pub stream_timeout: Duration,
    /// The longest time between two checks of the sockets.
    pub poll: Duration,
    /// True if inotify is used. Without inotify, polling remains.
    pub inotify: bool,
    /// The longest pause between attempts; the first retry comes at once, the next after 1/64 of this at most.
    pub longest_pause: Duration,
}

impl Settings {
    /// The settings for a kubelet whose registration socket is at `kubelet_socket`.
    pub fn new(kubelet_socket: PathBuf) -> Self {
        Self {
            kubelet_socket,
            // The NVIDIA device plugin's default strategy.
            injection: InjectionOptions { envvar: true, ..InjectionOptions::default() },
            host_devices: watch::channel(Arc::default()).1,
            pod_resources_socket: None,
            callers: Callers::default(),
            calls: HeldCalls::default(),
            register_timeout: Duration::from_secs(15),
            stream_timeout: Duration::from_secs(10),
            poll: Duration::from_secs(1),
            inotify: true,
            longest_pause: Duration::from_secs(16),
        }
    }

    /// The places where the kubelet lists the holders of devices. `None` without a PodResources socket.
    pub fn holder_sources(&self) -> Option<pod_resources::HolderSources> {
        let socket = self.pod_resources_socket.clone()?;
        let folder = self.kubelet_socket.parent()?.to_owned();
        Some(pod_resources::HolderSources { socket, folder })
    }
}

/// A phase of a plugin's life with the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// There is no kubelet.sock.
    WaitingForKubelet,
    /// Our socket is being bound.
    Binding,
    /// Our socket is served; the kubelet has not answered Register yet.
    Registering,
    /// Registered; the kubelet has not opened ListAndWatch yet.
    WaitingForStream,
    /// The kubelet holds an open ListAndWatch stream; PodResources does not list our devices yet.
    Confirming,
    /// Confirmed, and not ready yet: the kubelet is about to forget the client that it would disconnect when the plugin
    /// before us ends.
    Detaching,
    /// As [`Self::Serving`], while another plugin of the resource has not ended, or the kubelet may not have seen its
    /// end yet.
    Overlapping,
    /// The kubelet holds an open ListAndWatch stream, and PodResources, where it answers, lists our devices.
    Serving,
    /// The session ended; its connections are closing.
    Ending,
    /// A session ended or could not begin; the next attempt follows after a pause.
    Pausing,
}

impl Phase {
    /// Returns true if the registration stands, and outlasts the end of a plugin before us.
    pub fn is_serving(self) -> bool {
        matches!(self, Self::Overlapping | Self::Serving)
    }

    /// The phase in words, for /readyz and the log.
    pub fn words(self) -> &'static str {
        match self {
            Self::WaitingForKubelet => "waiting for kubelet.sock",
            Self::Binding => "binding our socket",
            Self::Registering => "registering",
            Self::WaitingForStream => "registered, waiting for the kubelet's ListAndWatch",
            Self::Confirming => "registered, waiting for PodResources to list our devices",
            Self::Detaching => "registered, detaching from the plugin before us",
            Self::Overlapping => OVERLAPPING,
            Self::Serving => "serving",
            Self::Ending => "ending the session, waiting for its connections to close",
            Self::Pausing => "pausing before the next attempt",
        }
    }
}

/// Receives the report of a choice, and true if the kubelet narrowed the request. Called during an admission: it must
/// not block.
pub type Chosen = Arc<dyn Fn(&ResourceName, &Arc<AllocationReport>, bool) + Send + Sync>;

/// The inputs and outputs that all plugins of a node share.
#[derive(Clone)]
pub struct Sources {
    /// The current snapshot.
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    /// The metrics of all plugins.
    pub metrics: PluginMetrics,
    /// The readiness of the node's parts.
    pub readiness: Readiness,
    /// Receives the allocations.
    pub events: mpsc::Sender<Event>,
    /// Receives the choices.
    pub chosen: Chosen,
    /// The number of plugins that registered after ours and ended: after each, our plugins register again.
    pub renew: watch::Receiver<u64>,
}
