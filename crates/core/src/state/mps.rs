//! Resources that are shared by MPS: the GPUs of each, the limits of MPS, and slots that wait for their control daemon.
//!
//! A part of [`super::Offers`]. The node orders the daemons of [`super::NodeState::mps_shares`], and reports those that
//! are ready as an event.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{Device, PlanProblem, ResourceName, Timestamp};
use crate::allocation::DeviceId;
use crate::topology::{ComputeCapability, Gpu, GpuUuid};

/// The oldest GPUs that MPS works on (man nvidia-cuda-mps-control, driver 580: "SM 3.5 or higher").
const MIN_CAPABILITY: ComputeCapability = ComputeCapability { major: 3, minor: 5 };

/// The most clients of an MPS server for each GPU since Volta, and so the most replicas that any node can have.
pub const MAX_MPS_CLIENTS: u32 = 48;

/// The most clients for each older GPU (man nvidia-cuda-mps-control, driver 580: "SM 7.0 has a limit of 48", "SM 3.5
/// through SM 6.0 the limit is 16"). The NVIDIA plugin counts Volta among the older GPUs.
const MAX_CLIENTS_BEFORE_VOLTA: u32 = 16;

/// The compute capability of Volta.
pub(crate) const VOLTA: ComputeCapability = ComputeCapability { major: 7, minor: 0 };

/// The resources that are shared by MPS, and the readiness of their daemons.
#[derive(Clone, Debug, Default)]
pub(super) struct Mps {
    /// The resources that are shared by MPS, offered or not, with the GPUs of each.
    pub(super) shares: BTreeMap<ResourceName, MpsShare>,
    /// The daemons that are ready, each with its share.
    pub(super) ready: BTreeMap<ResourceName, MpsShare>,
    /// The resources whose daemon is not ready, each with the beginning of the wait.
    waiting: BTreeMap<ResourceName, Timestamp>,
}

impl Mps {
    /// The time since which a slot waits for its resource's daemon; `None` if it does not wait.
    pub(super) fn waiting_since(&self, resource: &ResourceName, device: &Device) -> Option<Timestamp> {
        self.waiting.get(resource).copied().filter(|_| device.slot.is_some())
    }

    /// Reads the shares of `made`, and removes from it the new slots of resources whose daemon is not ready. Slots that
    /// are on the list already stay there, unhealthy, because pods may hold them.
    pub(super) fn hold_back(
        &mut self,
        by_mps: bool,
        gpus_of_node: usize,
        made: &mut BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
        is_listed: impl Fn(&ResourceName, &DeviceId) -> bool,
        now: Timestamp,
    ) {
        let shared = made.iter().filter(|_| by_mps);
        self.shares =
            shared.filter_map(|(name, devices)| Some((name.clone(), MpsShare::of(devices, gpus_of_node)?))).collect();
        let Self { shares, ready, waiting } = self;
        let is_ready = |name: &ResourceName, share: &MpsShare| ready.get(name).is_some_and(|of| of.covers(share));
        let before = core::mem::take(waiting);
        for (name, _) in shares.iter().filter(|(name, share)| !is_ready(name, share)) {
            waiting.insert(name.clone(), before.get(name).copied().unwrap_or(now));
            if let Some(devices) = made.get_mut(name) {
                devices.retain(|id, device| device.slot.is_none() || is_listed(name, id));
            }
        }
        made.retain(|_, devices| !devices.is_empty());
    }
}

/// The reason why a resource cannot be shared by MPS on these GPUs, if there is one.
pub(super) fn refusal<'a>(
    resource: &ResourceName,
    replicas: u32,
    gpus: impl Iterator<Item = &'a Gpu> + Clone,
) -> Option<PlanProblem> {
    let addresses = |wrong: fn(&Gpu) -> bool| {
        let mut addresses: Vec<_> = gpus.clone().filter(|gpu| wrong(gpu)).map(|gpu| gpu.pci).collect();
        addresses.dedup();
        addresses
    };
    let in_mig_mode = addresses(|gpu| gpu.mig_enabled);
    if !in_mig_mode.is_empty() {
        return Some(PlanProblem::MpsOnMig(resource.clone(), in_mig_mode));
    }
    // A GPU of unknown capability counts as new: all of today's drivers report it.
    let too_old = addresses(|gpu| gpu.facts.compute_capability.is_some_and(|capability| capability < MIN_CAPABILITY));
    if !too_old.is_empty() {
        return Some(PlanProblem::MpsTooOld(resource.clone(), too_old));
    }
    let max_clients = |gpu: &Gpu| match gpu.facts.compute_capability {
        Some(capability) if capability < VOLTA => MAX_CLIENTS_BEFORE_VOLTA,
        _ => MAX_MPS_CLIENTS,
    };
    let (gpu, max_clients) = gpus.map(|gpu| (gpu.pci, max_clients(gpu))).find(|(_, max)| replicas > *max)?;
    Some(PlanProblem::MpsTooManyClients { resource: resource.clone(), gpu, replicas, max_clients })
}

/// The GPUs of a resource that is shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsShare {
    /// The number of slots of each GPU, at least 2.
    pub replicas: u32,
    /// Its GPUs in the order of index; at least one.
    pub gpus: Vec<MpsGpu>,
    /// True if these are all GPUs of the node.
    pub whole_node: bool,
}

/// A GPU that is shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MpsGpu {
    /// NVML's index, which is the GPU's place in the order of PCI addresses.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// Its memory in MiB, if NVML reports it.
    pub memory_mib: Option<u64>,
}

impl MpsShare {
    /// Makes the share of these devices; `None` if none is shared.
    pub(super) fn of(devices: &BTreeMap<DeviceId, Device>, gpus_of_node: usize) -> Option<Self> {
        let slots = || devices.values().filter_map(|device| Some((&device.gpu, device.slot?)));
        let replicas = slots().map(|(_, slot)| slot).max()?.saturating_add(1);
        let gpu = |gpu: &Gpu| MpsGpu { uuid: gpu.uuid.clone(), index: gpu.index, memory_mib: gpu.facts.memory_mib };
        let gpus: BTreeSet<MpsGpu> = slots().map(|(shared, _)| gpu(shared)).collect();
        Some(Self { replicas, whole_node: gpus.len() == gpus_of_node, gpus: gpus.into_iter().collect() })
    }

    /// The share without these GPUs; `None` if none is left.
    pub fn without(&self, gpus: &BTreeSet<GpuUuid>) -> Option<Self> {
        let left: Vec<MpsGpu> = self.gpus.iter().filter(|gpu| !gpus.contains(&gpu.uuid)).cloned().collect();
        let whole_node = self.whole_node && left.len() == self.gpus.len();
        (!left.is_empty()).then_some(Self { replicas: self.replicas, gpus: left, whole_node })
    }

    /// Returns true if a daemon that is ready for this share is ready for the other too. A GPU that the other lacks
    /// makes no difference.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let has = |gpu: &MpsGpu| self.gpus.iter().any(|own| own.uuid == gpu.uuid && own.memory_mib == gpu.memory_mib);
        self.replicas == other.replicas && other.gpus.iter().all(has)
    }
}
