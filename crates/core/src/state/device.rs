//! Devices and their health.

use crate::prelude::*;
use core::time::Duration;

use super::mig_instance::MigInstance;
use super::numa_hints::NumaHints;
use super::reason::UnhealthyReason;
use crate::allocation::DeviceId;
use crate::topology::{Gpu, MigDevice, NodeTopology, NumaNodeId};

/// A moment: time since the Unix epoch. The runtime reads the wall clock once, at its start, and adds what a monotonic clock
/// says has passed: moments of one process are in order, and hold durations of it are true.
pub type Timestamp = Duration;

/// One device on the kubelet's list: a whole GPU, a MIG device of one, or a slot on either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The GPU.
    pub gpu: Gpu,
    /// The MIG device, where it is not the whole GPU.
    pub mig: Option<MigDevice>,
    /// The slot, from 0, where it is shared.
    pub slot: Option<u32>,
    /// The NUMA nodes the kubelet is told of: CPU-bearing ones only, none when unknown.
    pub numa_nodes: Vec<NumaNodeId>,
    /// Whether it may be given to a pod.
    pub health: Health,
}

impl Device {
    /// A healthy whole GPU.
    pub fn new(topology: &NodeTopology, gpu: &Gpu, hints: NumaHints) -> Self {
        let numa_nodes = hints.nodes(topology, gpu);
        Self { gpu: gpu.clone(), mig: None, slot: None, numa_nodes, health: Health::Healthy }
    }

    /// Its name for the kubelet, as the NVIDIA plugin has it: [`Self::uuid`], for a slot `UUID::N`.
    pub fn id(&self) -> DeviceId {
        Self::id_of(&self.gpu, self.mig.as_ref(), self.slot)
    }

    pub(super) fn id_of(gpu: &Gpu, mig: Option<&MigDevice>, slot: Option<u32>) -> DeviceId {
        let uuid = mig.map_or(gpu.uuid.as_str(), |mig| mig.uuid.as_str());
        DeviceId::from(slot.map_or_else(|| uuid.to_owned(), |slot| format!("{uuid}::{slot}")))
    }

    /// What a container gets, by UUID: the MIG device, or else the GPU. All slots of it have the same.
    pub fn uuid(&self) -> &str {
        self.mig.as_ref().map_or(self.gpu.uuid.as_str(), |mig| mig.uuid.as_str())
    }

    /// The MIG instance it is; none for a whole GPU, or a slot on one.
    pub fn instance(&self) -> Option<MigInstance> {
        let mig = self.mig.as_ref()?;
        Some(MigInstance { gpu_instance: mig.gpu_instance, compute_instance: Some(mig.compute_instance) })
    }
}

/// Whether a device may be given to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It may.
    Healthy,
    /// It may not.
    Unhealthy {
        /// Why.
        reason: UnhealthyReason,
        /// Since when.
        since: Timestamp,
    },
}

impl Health {
    /// Whether people who were told the one know the other: it differs in details at most.
    pub(super) fn tells_the_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Healthy, Self::Healthy) => true,
            (Self::Unhealthy { reason, .. }, Self::Unhealthy { reason: other, .. }) => reason.is(other),
            _ => false,
        }
    }
}
