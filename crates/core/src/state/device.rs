//! [`Device`], [`Health`] and [`NumaHints`]: a device as the kubelet's list has it. A kubelet with a Topology Manager
//! aligns pods by the NUMA nodes of devices before it asks us.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::reason::UnhealthyReason;
use crate::allocation::DeviceId;
use crate::topology::{Gpu, MigDevice, NodeTopology, NumaNodeId};

/// A moment, as time since the Unix epoch. The node reads the wall clock once, at its start, and adds the time that
/// a monotonic clock measures since. Moments of one process are therefore in order, and durations between them are
/// true.
pub type Timestamp = Duration;

/// One MIG instance of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MigInstance {
    /// The GPU instance.
    pub gpu_instance: u32,
    /// The compute instance in it, if one is named.
    pub compute_instance: Option<u32>,
}

/// One device on the kubelet's list or of DRA: a whole GPU, a MIG device of one, or a slot on either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The GPU.
    pub gpu: Gpu,
    /// The MIG device; `None` for the whole GPU.
    pub mig: Option<MigDevice>,
    /// The slot, from 0, if the device is shared.
    pub slot: Option<u32>,
    /// The NUMA nodes that are reported to the kubelet: only nodes with CPUs; none if unknown.
    pub numa_nodes: Vec<NumaNodeId>,
    /// The health, which decides whether a pod may get the device.
    pub health: Health,
}

impl Device {
    /// A healthy whole GPU.
    pub fn new(topology: &NodeTopology, gpu: &Gpu, hints: NumaHints) -> Self {
        let numa_nodes = hints.nodes(topology, gpu);
        Self { gpu: gpu.clone(), mig: None, slot: None, numa_nodes, health: Health::Healthy }
    }

    /// The device's name for the kubelet, as in the NVIDIA plugin: [`Self::uuid`], for a slot `UUID::N`.
    pub fn id(&self) -> DeviceId {
        let uuid = self.uuid();
        DeviceId::from(self.slot.map_or_else(|| uuid.to_owned(), |slot| format!("{uuid}::{slot}")))
    }

    /// A slot on the device.
    pub(super) fn with_slot(&self, slot: u32) -> Self {
        Self { slot: Some(slot), ..self.clone() }
    }

    /// The UUID of the hardware that a container gets: the MIG device's, otherwise the GPU's. All slots of one device
    /// share it.
    pub fn uuid(&self) -> &str {
        self.mig.as_ref().map_or(self.gpu.uuid.as_str(), |mig| mig.uuid.as_str())
    }

    /// Returns true if an operator's cordon, and no other reason, keeps new work from the device.
    pub(super) fn is_cordoned(&self) -> bool {
        matches!(self.health.reason(), Some(UnhealthyReason::Cordoned(_)))
    }

    /// The MIG instance; `None` for a whole GPU or a slot on one.
    pub fn instance(&self) -> Option<MigInstance> {
        let mig = self.mig.as_ref()?;
        Some(MigInstance { gpu_instance: mig.gpu_instance, compute_instance: Some(mig.compute_instance) })
    }
}

/// The health of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// A pod may get the device.
    Healthy,
    /// No pod may get the device.
    Unhealthy {
        /// The reason.
        reason: UnhealthyReason,
        /// The time at which it began.
        since: Timestamp,
    },
}

impl Health {
    /// The reason; `None` if the device is healthy.
    pub fn reason(&self) -> Option<&UnhealthyReason> {
        match self {
            Self::Healthy => None,
            Self::Unhealthy { reason, .. } => Some(reason),
        }
    }

    /// Returns true if both are healthy, or unhealthy for the same reason; its details may differ.
    pub(super) fn has_same_reason(&self, other: &Self) -> bool {
        match (self.reason(), other.reason()) {
            (Some(reason), Some(other)) => reason.is(other),
            (one, other) => one == other,
        }
    }
}

/// The NUMA nodes that devices report to the kubelet. docs/topology-manager.md says when to use which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NumaHints {
    /// The GPU's node with CPUs ([`Gpu::cpu_node`]).
    #[default]
    Node,
    /// Every node with CPUs of the GPU's package; if the package is unknown, as [`Self::Node`].
    Package,
    /// No node: the Topology Manager ignores our devices.
    Off,
}

impl NumaHints {
    /// The nodes that a GPU's device reports, in order. Nodes without CPUs are left out: a machine may have dozens, and
    /// every one doubles the combinations that the kubelet tries.
    pub fn nodes(self, topology: &NodeTopology, gpu: &Gpu) -> Vec<NumaNodeId> {
        let own = gpu.cpu_node;
        match self {
            Self::Off => Vec::new(),
            Self::Node => own.into_iter().collect(),
            Self::Package => {
                let nodes = topology.cpu_nodes().iter();
                let near = nodes.filter(|(_, package)| package.is_some() && **package == gpu.package);
                let near: BTreeSet<NumaNodeId> = near.map(|(id, _)| *id).chain(own).collect();
                near.into_iter().collect()
            }
        }
    }
}
