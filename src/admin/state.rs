//! The answer to `GET /state` on the admin socket: what this node has and offers now. docs/operations.md documents it.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::publish::placement::{Allocation, Outlook};
use crate::state::Availability;

/// The whole state, for a person or a script.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// The version that runs.
    pub version: &'static str,
    /// Whether the driver is released on an operator's order.
    pub driver_released: bool,
    /// Why no resource is offered, where none is.
    pub idle: Option<String>,
    /// The resources by name.
    pub resources: BTreeMap<String, ResourceState>,
    /// The other parts whose readiness counts, by name.
    pub parts: BTreeMap<String, PartState>,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuState>,
    /// What containers hold, by namespace, pod, container and resource. `None` while it is unknown which GPUs are held.
    pub allocations: Option<Vec<AllocationState>>,
    /// What requests for 1, 2, 4 ... GPUs would get now. `None` likewise.
    pub outlook: Option<Vec<OutlookState>>,
    /// The warnings about the node, each of which the log has once.
    pub warnings: Vec<String>,
}

/// One resource.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceState {
    /// Where its plugin is with the kubelet, in words.
    pub phase: &'static str,
    /// What keeps the plugin from serving.
    pub trouble: Option<String>,
    /// Devices on the kubelet's list that may be given out.
    pub healthy: usize,
    /// Devices on it that may not.
    pub unhealthy: usize,
}

/// One part of the node, of which some are plugins of resources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartState {
    /// Where it is, in words.
    pub phase: &'static str,
    /// Whether it is ready.
    pub ready: bool,
    /// What went wrong last, until the part is ready.
    pub trouble: Option<String>,
}

impl fmt::Display for PartState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phase)?;
        self.trouble.iter().try_for_each(|trouble| write!(f, "; {trouble}"))
    }
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuState {
    /// Its UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Its PCI address.
    pub pci: String,
    /// The product name.
    pub model: Option<String>,
    /// Through which API it is offered, on a node with DRA: `plugin`, `to-dra`, `dra`, `from-dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub door: Option<&'static str>,
    /// Whether it may be allocated.
    pub healthy: bool,
    /// Who can have it now: `held`, `free`, `mig`, `unhealthy`, `unknown`.
    #[serde(serialize_with = "label")]
    pub availability: Availability,
    /// Why it is unhealthy, in the order in which the reasons began.
    pub reasons: Vec<ReasonState>,
}

fn label<S: serde::Serializer>(availability: &Availability, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(availability.label())
}

/// One reason for which a GPU is unhealthy.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonState {
    /// The reason in words.
    pub reason: String,
    /// The kind of reason, as docs/health.md and the metrics name it.
    pub kind: &'static str,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// What ends it: what to do, or what to wait for.
    pub ends_with: &'static str,
}

/// The GPUs that one container has of one resource. Collectives are in MB/s, and null where they are not known; one GPU
/// has none.
#[derive(Clone, Debug, Serialize)]
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
    pub door: &'static str,
    /// The UUIDs of the GPUs, in the order of their PCI addresses.
    pub gpus: Vec<String>,
    /// Their ring bandwidth by NCCL's model.
    pub collective: Option<u64>,
    /// Their bus bandwidth with NVLink SHARP by the same; null without it.
    pub nvls: Option<u64>,
    /// The most that so many GPUs of this machine have.
    pub best: Option<u64>,
    /// The most that so many GPUs had that were free when these were given.
    pub best_at_admission: Option<u64>,
    /// Why it is below the best: `narrowed`, `scheduler`, `fragmented`, `sick`.
    pub why: Vec<&'static str>,
}

/// What a request for so many GPUs would get now. Collectives are in MB/s, and null where no such request can be met.
#[derive(Clone, Debug, Serialize)]
pub struct OutlookState {
    /// How many GPUs.
    pub size: usize,
    /// The collective of the GPUs that it would get.
    pub collective: Option<u64>,
    /// Their bus bandwidth with NVLink SHARP; null without it.
    pub nvls: Option<u64>,
    /// The most that so many GPUs of this machine have.
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
            door: allocation.door.label(),
            gpus: allocation.gpus.iter().map(ToString::to_string).collect(),
            collective: allocation.collective,
            nvls: allocation.nvls,
            best: allocation.best,
            best_at_admission: allocation.best_at_admission,
            why: allocation.why.iter().map(|why| why.label()).collect(),
        }
    }
}

impl From<&Outlook> for OutlookState {
    fn from(outlook: &Outlook) -> Self {
        let gpus = outlook.gpus.iter().map(ToString::to_string).collect();
        Self { size: outlook.size, collective: outlook.collective, nvls: outlook.nvls, best: outlook.best, gpus }
    }
}
