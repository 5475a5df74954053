//! A kubelet in a box: the device manager's half of a kubelet, in this process, over real sockets.
//!
//! Owns a folder's `kubelet.sock`, the connections to the plugins that register there, and the books of the devices
//! that each container holds. Used by the demo, the GPU kit, benchmarks and tests, so that a plugin that works here
//! works with a kubelet. The semantics were read in the source of 1.33. They are the same up to 1.36 except where a
//! file says otherwise. Kubelets from 1.37 on tell a resource's connections apart, which the box can do too (see
//! [`Connections`]). The box knows the wire types of `linkwise_kubelet_api` and nothing else of linkwise, because
//! with linkwise's own types it would share linkwise's mistakes.
//!
//! The DRA manager's half is separate, in [`dra`], because a kubelet, too, keeps claims apart from the devices
//! of plugins.
//!
//! Absent: init containers, the Memory Manager, and all parts of PodResources except devices and claims. A kubelet that
//! starts has its books from memory, not from its checkpoint file.

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
pub mod runtime;
mod selection;
mod socket;
mod state;
mod topology_manager;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_kubelet_api::v1beta1 as wire;

pub use errors::{AdmissionError, BoxError, CallError, WaitError};
pub use linkwise_kubelet_api::v1beta1::{DeviceSpec, Mount};
pub use load::{Load, Tally};
pub use names::is_extended_resource;
pub use pod::{Admitted, AdmittedContainer, Allocation, Asked, Container, Grant, Place, Pod};
pub use state::{Calls, ResourceState, Resources, State, Violation, ViolationKind};
pub use topology_manager::{
    NumaMask, Policy, Refusal, ResourceHints, Scope, TopologyHint, TopologyManager, UnsupportedMachine,
};

use life::{Core, Life, lock};

/// The behaviour of the box. [`Options::new`] gives a kubelet's own values.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device-plugins folder; created if it is missing. Socket paths have at most 107 bytes.
    pub dir: PathBuf,
    /// The seed of every random order. The same seed and the same calls give the same orders.
    pub seed: u64,
    /// The time in which Register must dial the plugin and get its options (10 s).
    pub dial_timeout: Duration,
    /// The wait after the first failed dial; each further wait is 1.6 times as long (1 s).
    pub dial_retry: Duration,
    /// The deadline of GetPreferredAllocation and Allocate (30 s; a kubelet has none).
    pub call_timeout: Duration,
    /// The time from the stop of an endpoint to the removal of its resource (5 min).
    pub grace: Duration,
    /// The longest time that [`KubeletBox::wait`] waits (20 s).
    pub wait_timeout: Duration,
    /// The Topology Manager and the machine it works on (policy none).
    pub topology_manager: TopologyManager,
    /// The socket on which PodResources is served, in a folder of its own (none).
    pub pod_resources: Option<PathBuf>,
    /// True if the box writes the checkpoint file (true). Tests that write one by hand turn it off.
    pub writes_checkpoint: bool,
    /// The rule by which the kubelet tells a resource's connections apart (the rule up to 1.36).
    pub connections: Connections,
}

/// The rule by which a kubelet tells the connections to a resource's plugins apart. It decides which connection the
/// kubelet closes when a stream ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connections {
    /// The rule up to 1.36, by the resource alone. The end of any stream closes the connection that was registered last
    /// and makes the devices unhealthy. So the end of an old stream undoes a newer registration, and may undo one that
    /// comes while the kubelet handles the end. The connection that a registration replaced is not closed, and calls on
    /// it go on.
    #[default]
    ByResource,
    /// The rule from 1.37, by the resource and the plugin's socket. The end of a stream closes its own connection, and
    /// the devices stay as they are while another socket is connected. A connected socket cannot be registered again:
    /// the attempt is refused, and the kubelet no longer notices the end of the socket's stream.
    BySocket,
}

impl Options {
    /// The file name of the registration socket in the folder.
    pub const SOCKET: &str = wire::KUBELET_SOCKET;

    /// A kubelet's own values, with seed 1.
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
            writes_checkpoint: true,
            connections: Connections::default(),
        }
    }
}

/// The behaviour of Register until the fault is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Register does its work.
    #[default]
    None,
    /// Register refuses with this status.
    Refuse {
        /// The status code.
        code: tonic::Code,
        /// The status message.
        message: String,
    },
    /// Register does not answer until the fault is changed or the kubelet stops.
    Hang,
    /// Register answers, but never dials the plugin.
    AnswerWithoutDial,
    /// Register dials, answers and follows the stream, but the books ignore all lists. Kubelets up to 1.36 can lose a
    /// registration in this way when an older stream of the resource ends.
    Forget,
}

/// The event between two runs of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// Only the kubelet ended, and containers go on running. Their pods are admitted again, once, without a check of
    /// their devices.
    Kubelet,
    /// The node restarted. No container runs, and pods are admitted again only after their plugins have registered.
    Node,
}

/// A kubelet's device manager. End it with [`KubeletBox::stop`]. Dropping it ends it too, but does not wait for the
/// end.
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

    /// Starts a stopped box again, in the same folder and with the same allocations. Resources have no healthy device
    /// until their plugins have registered again and sent a list.
    pub fn start_again(&self, after: Restart) -> Result<(), BoxError> {
        let mut current = lock(&self.life);
        if current.is_some() {
            return Err(BoxError::Running);
        }
        let life = Life::new(Arc::clone(&self.core));
        // The books come before the registration socket, as a kubelet's device manager reads its checkpoint first
        // (`Start` in manager.go).
        let stamps = self.core.change(|book| book.kubelet_started(after == Restart::Kubelet));
        registration::serve(&life)?;
        pod_resources::serve(&life)?;
        for (resource, stamp) in stamps {
            life.expire_later(resource, stamp);
        }
        *current = Some(life);
        Ok(())
    }

    /// Ends the servers, streams and connections, and returns when they have ended. The file `kubelet.sock` stays, as
    /// it does when a kubelet's process ends. A second stop does nothing.
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

    /// Admits a pod and starts its containers, all of them or none. Admissions wait for each other. If the call is
    /// dropped midway, the pod keeps the devices that it got until [`KubeletBox::remove_pod`].
    ///
    /// A `hint` is for all containers and replaces the Topology Manager's decision.
    pub async fn admit(&self, pod: &Pod, hint: Option<&TopologyHint>) -> Result<Admitted, AdmissionError> {
        let life = self.life(&pod.name)?;
        admission::admit(&life, pod, hint.copied()).await
    }

    /// Starts a container again with the devices of its admission, from the kubelet's books. Returns them by resource.
    /// No plugin is called, because linkwise does not ask for PreStartContainer.
    pub fn restart_container(
        &self,
        pod: &str,
        container: &str,
    ) -> Result<BTreeMap<String, Allocation>, AdmissionError> {
        self.life(pod)?;
        let held = self.core.read(|book| book.container(pod, container));
        if held.is_empty() {
            return Err(AdmissionError::NothingHeld(pod.to_owned(), container.to_owned()));
        }
        Ok(held)
    }

    /// Removes the pod and frees its devices. Returns true if it held any.
    pub fn remove_pod(&self, pod: &str) -> bool {
        self.core.change(|book| book.remove_pod(pod))
    }

    /// Records in the books that a container holds these devices, as an earlier kubelet's checkpoint would. So a test
    /// can begin with a node that is half full.
    pub fn hold(&self, place: Place, devices: impl IntoIterator<Item = String>) {
        let mut devices: Vec<String> = devices.into_iter().collect();
        devices.sort_unstable();
        self.core.change(|book| book.commit(place, Allocation { devices, ..Allocation::default() }));
    }

    /// Makes PodResources list the claims of this DRA manager too, because both belong to one kubelet.
    pub fn list_claims_of(&self, dra: &dra::DraKubelet) {
        *lock(&self.core.claims) = Some(dra.lister());
    }

    /// The number of lists that PodResources gave since the box was made.
    pub fn lists(&self) -> u64 {
        self.core.lists.load(Ordering::Relaxed)
    }

    /// The present visible state.
    pub fn state(&self) -> Arc<State> {
        self.core.state.borrow().clone()
    }

    /// The plugins' violations, in order. A good plugin leaves the list empty.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations.clone()
    }

    /// Waits until the state is as wanted and returns it.
    pub async fn wait(&self, mut wanted: impl FnMut(&State) -> bool) -> Result<Arc<State>, WaitError<Arc<State>>> {
        errors::wait_for(&self.core.state, self.core.options.wait_timeout, |state| wanted(state)).await
    }

    /// Makes Register misbehave from now on. [`Fault::None`] ends this.
    pub fn set_fault(&self, fault: Fault) {
        self.core.fault.send_replace(fault);
    }

    /// Closes the current connection of a resource, as the kubelet does when its stream ends. Returns false if there
    /// was none.
    pub fn disconnect(&self, resource: &str) -> bool {
        let life = lock(&self.life).clone();
        life.is_some_and(|life| life.disconnect(resource))
    }

    /// The durations of the resource's gaps that have ended, in order. A gap lasts from the end of the stream that made
    /// the resource's devices unhealthy until pods could get them again.
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
