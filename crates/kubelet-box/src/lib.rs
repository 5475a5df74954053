//! A kubelet in a box: the device manager's half of a kubelet, in this process, over real sockets.
//!
//! Owns a folder's `kubelet.sock`, the connections to the plugins that register there, and the
//! books of which container holds which device. Used by the `demo` command and by integration
//! tests, so that a plugin that works here works with a kubelet (semantics read in the source of
//! 1.33, and the same up to 1.36 where the files note it). Kubelets from 1.37 on tell a resource's connections apart;
//! the box plays those too, see [`Connections`]. It knows the wire types of
//! `linkwise_kubelet_api` and nothing else of linkwise: it must not use linkwise's own types, or it
//! would agree with linkwise's mistakes.
//!
//! The DRA manager's half is apart, in [`dra`]: claims and devices of plugins have nothing to do with each other in a
//! kubelet either.
//!
//! What it does not have: init containers, the Memory Manager, of PodResources what is neither device nor claim, the
//! checkpoint as a file.

mod admission;
mod affinity;
mod devices;
pub mod dra;
mod endpoint;
mod errors;
mod gaps;
mod life;
mod load;
mod names;
mod pod;
mod pod_resources;
mod registration;
mod rng;
mod selection;
mod state;
mod topology_manager;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_kubelet_api::v1beta1 as wire;
use tokio::time::timeout;

pub use errors::{AdmissionError, BoxError, CallError, WaitError};
pub use linkwise_kubelet_api::v1beta1::{DeviceSpec, Mount};
pub use load::{Load, Tally};
pub use names::is_extended_resource;
pub use pod::{Admitted, AdmittedContainer, Allocation, Asked, Container, Grant, Place, Pod};
pub use state::{Calls, Harm, ResourceState, Resources, State, Violation};
pub use topology_manager::{
    NumaMask, NumaNode, Policy, Refusal, ResourceHints, Scope, TopologyHint, TopologyManager, UnsupportedMachine,
};

use life::{Core, Life, lock};

/// How the box behaves. [`Options::new`] gives a kubelet's own values.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device-plugins folder; made where it is missing. Socket paths have at most 107 bytes.
    pub dir: PathBuf,
    /// Decides every random order; the same seed and the same calls give the same orders.
    pub seed: u64,
    /// How long Register tries to dial the plugin and to get its options (10 s).
    pub dial_timeout: Duration,
    /// Wait after the first dial that failed, then 1.6 times as long each time (1 s).
    pub dial_retry: Duration,
    /// Deadline of each of the other calls (30 s; a kubelet has it for PreStartContainer only).
    pub call_timeout: Duration,
    /// How long a resource outlives its endpoint (5 min).
    pub grace: Duration,
    /// How long [`KubeletBox::wait`] waits (20 s).
    pub wait_timeout: Duration,
    /// The Topology Manager and the machine it works on (policy none).
    pub topology_manager: TopologyManager,
    /// Where PodResources is served, in a folder of its own (nowhere).
    pub pod_resources: Option<PathBuf>,
    /// How the kubelet tells a resource's connections apart (as up to 1.36).
    pub connections: Connections,
    /// How long it lets pass between the end of a stream and what it does about it (no time).
    pub lag: Lag,
}

/// How a kubelet tells the connections to a resource's plugins apart: which one it gives up when a stream ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connections {
    /// Up to 1.36, by the resource alone: the end of any stream gives up the connection that was registered last and
    /// makes the devices unhealthy. A registration that came before that end is lost; one that comes while it is being
    /// dealt with may be. The connection that a registration replaced is not closed, and a call on it goes on.
    #[default]
    ByResource,
    /// From 1.37, by the resource and the plugin's socket: the end of a stream gives up its own connection, and the
    /// devices stay as they are while another socket is connected. A socket that is connected cannot be registered
    /// again: the attempt is refused, and the end of its stream goes unnoticed from then on.
    BySocket,
}

/// The time that a busy kubelet lets pass between two steps. None is waited for but other tasks where it is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// From the end of a stream until the connection to give up is looked up.
    pub look_up: Duration,
    /// From the close of that connection until the devices are unhealthy.
    pub disconnect: Duration,
}

impl Options {
    /// The file name of the registration socket in the folder.
    pub const SOCKET: &str = wire::KUBELET_SOCKET;

    /// A kubelet's own values, seed 1.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            seed: 1,
            dial_timeout: Duration::from_secs(10),
            dial_retry: Duration::from_secs(1),
            call_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(300),
            wait_timeout: Duration::from_secs(20),
            topology_manager: TopologyManager::default(),
            pod_resources: None,
            connections: Connections::default(),
            lag: Lag::default(),
        }
    }
}

/// What Register does instead of its work, until the fault is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Its work.
    #[default]
    None,
    /// Refuses with this status.
    Refuse {
        /// The status code.
        code: tonic::Code,
        /// The status message.
        message: String,
    },
    /// Does not answer until the fault is changed or the kubelet stops.
    Hang,
    /// Answers, but never dials the plugin.
    AnswerWithoutDial,
    /// Dials, answers and follows the stream, but none of its lists gets into the books: kubelets up to 1.36 can lose a
    /// registration so when an older stream of the resource ends.
    Forget,
}

/// What happened between two lives of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// The kubelet alone ended: containers go on running, and their pods are admitted again, once,
    /// without a look at their devices.
    Kubelet,
    /// The node ended: no container runs, and pods are admitted again only when plugins are back.
    Node,
}

/// A kubelet's device manager. End it with [`KubeletBox::stop`]; dropping it ends it too, without
/// waiting for the end.
#[derive(Debug)]
pub struct KubeletBox {
    core: Arc<Core>,
    life: Mutex<Option<Arc<Life>>>,
}

impl KubeletBox {
    /// Removes every socket in the folder, binds `kubelet.sock` there and serves registrations.
    /// Must be called within a tokio runtime.
    pub fn start(options: Options) -> Result<Self, BoxError> {
        options.topology_manager.check()?;
        let this = Self { core: Arc::new(Core::new(options)), life: Mutex::default() };
        this.start_again(Restart::Node)?;
        Ok(this)
    }

    /// Starts a box that was stopped, in the same folder and with the allocations it had. Plugins
    /// have to register again: until then their resources have no healthy device.
    pub fn start_again(&self, after: Restart) -> Result<(), BoxError> {
        let mut current = lock(&self.life);
        if current.is_some() {
            return Err(BoxError::Running);
        }
        let life = Life::new(Arc::clone(&self.core));
        registration::serve(&life)?;
        pod_resources::serve(&life)?;
        let stamps = self.core.change(|book| book.started(after == Restart::Kubelet));
        for (resource, stamp) in stamps {
            life.expire_later(resource, stamp);
        }
        *current = Some(life);
        Ok(())
    }

    /// Ends the server, all streams and all connections, and returns when they are gone. The file
    /// `kubelet.sock` stays, as it does when a kubelet's process ends. A second stop does nothing.
    pub async fn stop(&self) -> Result<(), BoxError> {
        let life = lock(&self.life).take();
        match life {
            Some(life) => life.finish().await,
            None => Ok(()),
        }
    }

    /// [`KubeletBox::stop`], then [`KubeletBox::start_again`].
    pub async fn restart(&self, after: Restart) -> Result<(), BoxError> {
        self.stop().await?;
        self.start_again(after)
    }

    /// Admits a pod and starts its containers: all of it or nothing. Admissions wait for each
    /// other. Of a call that is dropped midway, what was taken stays until [`KubeletBox::remove_pod`].
    ///
    /// A `hint` is for all containers and stands for the Topology Manager's; without one, the box's own settles.
    pub async fn admit(&self, pod: &Pod, hint: Option<&TopologyHint>) -> Result<Admitted, AdmissionError> {
        let life = self.life(&pod.name)?;
        admission::admit(&life, pod, hint.copied()).await
    }

    /// Starts a container anew: what it got at its admission, by resource, from the kubelet's
    /// books. No call is made, but PreStartContainer where the plugin wants it.
    pub async fn restart_container(
        &self,
        pod: &str,
        container: &str,
    ) -> Result<BTreeMap<String, Allocation>, AdmissionError> {
        let life = self.life(pod)?;
        let held = self.core.read(|book| book.container(pod, container));
        if held.is_empty() {
            return Err(AdmissionError::NothingHeld { pod: pod.to_owned(), container: container.to_owned() });
        }
        admission::start(&life, pod, container).await?;
        Ok(held)
    }

    /// The pod is gone: its devices are free. Says whether it held any.
    pub fn remove_pod(&self, pod: &str) -> bool {
        self.core.change(|book| book.remove_pod(pod))
    }

    /// Puts into the books that a container holds these devices, as the checkpoint of an earlier kubelet would: for
    /// a node that is to begin half full.
    pub fn hold(&self, place: Place, devices: impl IntoIterator<Item = String>) {
        let mut devices: Vec<String> = devices.into_iter().collect();
        devices.sort_unstable();
        self.core.change(|book| book.commit(place, Allocation { devices, ..Allocation::default() }));
    }

    /// PodResources lists the claims of this DRA manager too: both are of one kubelet.
    pub fn list_claims_of(&self, dra: &dra::DraKubelet) {
        *lock(&self.core.claims) = Some(dra.lister());
    }

    /// What can be seen now.
    pub fn state(&self) -> Arc<State> {
        self.core.state.borrow().clone()
    }

    /// What plugins did that can harm a kubelet, in order. Empty is good.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations.clone()
    }

    /// Waits until the state is as wanted and gives it.
    pub async fn wait(&self, mut wanted: impl FnMut(&State) -> bool) -> Result<Arc<State>, WaitError> {
        let after = self.core.options.wait_timeout;
        let mut states = self.core.state.subscribe();
        // The sender lives as long as this box: an error can only be that the time is up.
        let found = timeout(after, states.wait_for(|state| wanted(state))).await;
        match found {
            Ok(Ok(state)) => Ok(state.clone()),
            Ok(Err(_)) | Err(_) => Err(WaitError { after, last: self.state() }),
        }
    }

    /// Makes Register misbehave from now on; [`Fault::None`] ends it.
    pub fn set_fault(&self, fault: Fault) {
        self.core.fault.send_replace(fault);
    }

    /// Gives up the current connection of a resource, as the kubelet does when its stream ends.
    /// Says whether there was one.
    pub fn disconnect(&self, resource: &str) -> bool {
        let life = lock(&self.life).clone();
        life.is_some_and(|life| life.disconnect(resource))
    }

    /// How long the resource had nothing to give, each time: from the end of the stream that took its devices to the
    /// list that brought them back. In order; a gap that is not over yet is left out.
    pub fn gaps(&self, resource: &str) -> Vec<Duration> {
        lock(&self.core.gaps).of(resource)
    }

    fn life(&self, pod: &str) -> Result<Arc<Life>, AdmissionError> {
        lock(&self.life).clone().ok_or_else(|| AdmissionError::NotRunning(pod.to_owned()))
    }
}

impl Drop for KubeletBox {
    fn drop(&mut self) {
        if let Some(life) = lock(&self.life).take() {
            life.abandon();
        }
    }
}
