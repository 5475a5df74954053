//! The answer to `GET /state` on the admin socket: the state and the offers of this node. docs/operations.md documents
//! it. A command reads it too: a field that a linkwise of another version lacks is unknown.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::readiness::{Part, PartState, Readiness};
use linkwise_core::publish::placement::{Allocation, Outlook, Placements};
use linkwise_core::state::{Availability, Door, DraWait, NodeState, Resource};

/// A word of a closed list, or of another version.
type Word = Cow<'static, str>;

/// The whole state, for a person or a script.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// The running version.
    pub version: Word,
    /// Set while the driver is released on an operator's order.
    pub driver_released: bool,
    /// The reason why no resource is offered; null if one is.
    pub idle: Option<String>,
    /// The resources by name.
    pub resources: BTreeMap<String, ResourceState>,
    /// The other parts whose readiness counts, by name.
    pub parts: BTreeMap<String, PartState>,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuState>,
    /// The GPUs of containers, by namespace, pod, container and resource. `None` while it is unknown which GPUs are
    /// held.
    pub allocations: Option<Vec<AllocationState>>,
    /// The GPUs that requests for 1, 2, 4 ... GPUs would get now. `None` while it is unknown which GPUs are held.
    pub outlook: Option<Vec<OutlookState>>,
    /// The warnings about the node; the log has each of them once.
    pub warnings: Vec<String>,
}

impl State {
    /// The state of a snapshot and its placements.
    pub fn of(snapshot: &NodeState, placements: &Placements, readiness: &Readiness, driver_released: bool) -> Self {
        let waits = snapshot.dra_waits();
        let gpus: Vec<GpuState> = snapshot
            .gpus()
            .into_iter()
            .map(|status| GpuState {
                uuid: status.gpu.uuid.to_string(),
                index: status.gpu.index,
                pci: status.gpu.pci.to_string(),
                model: status.gpu.model.clone(),
                door: snapshot.door(&status.gpu.uuid).filter(|_| snapshot.has_dra()).map(Door::label).map(Into::into),
                waits_for: waits.get(&status.gpu.uuid).map(ToString::to_string),
                waits_until: waits.get(&status.gpu.uuid).and_then(DraWait::until).map(|until| until.as_secs()),
                healthy: status.is_healthy,
                availability: status.availability,
                reasons: status
                    .reasons
                    .into_iter()
                    .map(|(reason, since)| ReasonState {
                        reason: reason.to_string(),
                        kind: reason.label().into(),
                        since: since.as_secs(),
                        ends_with: reason.ends_with().into(),
                    })
                    .collect(),
            })
            .collect();
        let offered = snapshot.offers().resources();
        let (mut parts, mut resources) = (BTreeMap::new(), BTreeMap::new());
        for (part, state) in readiness.all() {
            if let Part::Plugin(resource) = &part {
                let (healthy, unhealthy) = offered.get(resource).map(Resource::counts).unwrap_or_default();
                let PartState { phase, trouble, .. } = state;
                resources.insert(resource.to_string(), ResourceState { phase, trouble, healthy, unhealthy });
            } else {
                parts.insert(part.to_string(), state);
            }
        }
        let is_known = gpus.is_empty() || snapshot.knows_holders();
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            driver_released,
            idle: (resources.is_empty() && !snapshot.has_dra()).then(|| readiness.idle().borrow().reason().to_owned()),
            resources,
            parts,
            gpus,
            allocations: is_known.then(|| placements.allocations.iter().map(Into::into).collect()),
            outlook: is_known.then(|| placements.outlook.iter().map(Into::into).collect()),
            warnings: snapshot.hardware().warnings().iter().map(ToString::to_string).collect(),
        }
    }
}

/// One resource.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceState {
    /// The phase of the plugin's registration with the kubelet, in words.
    pub phase: Word,
    /// The reason why the plugin does not serve.
    pub trouble: Option<String>,
    /// The number of devices on the kubelet's list that may be given out.
    pub healthy: usize,
    /// The number of devices on the kubelet's list that may not be given out.
    pub unhealthy: usize,
}

/// One GPU.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuState {
    /// Its UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Its PCI address.
    pub pci: String,
    /// The product name.
    pub model: Option<String>,
    /// The API through which the GPU is offered, on a node with DRA: `plugin`, `to-dra`, `dra`, `from-dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub door: Option<Word>,
    /// The reason why a GPU that goes to DRA, leaves it or is to be shared otherwise has not changed yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The end of that wait at the latest, in seconds since 1970, if the time is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_until: Option<u64>,
    /// Set if the GPU may be allocated.
    pub healthy: bool,
    /// The availability of the GPU now: `held`, `free`, `mig`, `unhealthy`, `unknown`.
    pub availability: Availability,
    /// The reasons why it is unhealthy, in the order in which they began.
    pub reasons: Vec<ReasonState>,
}

/// One reason for which a GPU is unhealthy.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReasonState {
    /// The reason in words.
    pub reason: String,
    /// The kind of reason, as docs/health.md and the metrics name it.
    pub kind: Word,
    /// The begin of the reason, in seconds since 1970.
    pub since: u64,
    /// The end of the reason: what an operator has to do, or what linkwise waits for.
    pub ends_with: Word,
}

/// The GPUs that one container has of one resource. Collectives are in MB/s, and null if they are not known; a single
/// GPU has none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct AllocationState {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The resource, or the DRA driver.
    pub resource: String,
    /// `plugin` or `dra`.
    pub door: Word,
    /// The UUIDs of the GPUs, in the order of their PCI addresses.
    pub gpus: Vec<String>,
    /// Their ring bandwidth by NCCL's model.
    pub collective: Option<u64>,
    /// Their bus bandwidth with NVLink SHARP by NCCL's model; null without NVLink SHARP.
    pub nvls: Option<u64>,
    /// The most that as many GPUs of this machine can have.
    pub best: Option<u64>,
    /// The most that as many GPUs had among those that were free when these were given.
    pub best_at_admission: Option<u64>,
    /// The reasons why it is below the best: `narrowed`, `scheduler`, `fragmented`, `sick`.
    pub why: Vec<Word>,
}

/// The GPUs that a request of one size would get now. Collectives are in MB/s, and null if no such request can be met.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OutlookState {
    /// The number of GPUs.
    pub size: usize,
    /// The collective of these GPUs.
    pub collective: Option<u64>,
    /// Their bus bandwidth with NVLink SHARP; null without NVLink SHARP.
    pub nvls: Option<u64>,
    /// The most that as many GPUs of this machine can have.
    pub best: Option<u64>,
    /// The UUIDs of these GPUs, in the order of their PCI addresses.
    pub gpus: Vec<String>,
}

impl From<&Allocation> for AllocationState {
    fn from(allocation: &Allocation) -> Self {
        let holder = allocation.holder.clone();
        Self {
            namespace: holder.namespace,
            pod: holder.pod,
            container: holder.container,
            resource: allocation.resource.clone(),
            door: allocation.door.label().into(),
            gpus: allocation.gpus.iter().map(ToString::to_string).collect(),
            collective: allocation.collective,
            nvls: allocation.nvls,
            best: allocation.best,
            best_at_admission: allocation.best_at_admission,
            why: allocation.why.iter().map(|why| why.label().into()).collect(),
        }
    }
}

impl From<&Outlook> for OutlookState {
    fn from(outlook: &Outlook) -> Self {
        let gpus = outlook.gpus.iter().map(ToString::to_string).collect();
        Self { size: outlook.size, collective: outlook.collective, nvls: outlook.nvls, best: outlook.best, gpus }
    }
}
