//! [`MpsShare`]: the GPUs of a resource that is shared by MPS.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::device::Device;
use crate::allocation::DeviceId;
use crate::topology::{Gpu, GpuUuid};

/// The GPUs of a resource that is shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsShare {
    /// The number of slots of each GPU, at least 2.
    pub replicas: u32,
    /// Its GPUs, by index; at least one.
    pub gpus: Vec<MpsGpu>,
    /// True if these are all GPUs of the node.
    pub whole_node: bool,
}

/// A GPU that is shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsGpu {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// NVML's index, which is the GPU's place in the order of PCI addresses.
    pub index: u32,
    /// Its memory in MiB, if NVML reports it.
    pub memory_mib: Option<u64>,
}

impl MpsShare {
    /// Makes the share of these devices; `None` if none is shared.
    pub(super) fn of(devices: &BTreeMap<DeviceId, Device>, gpus_of_node: usize) -> Option<Self> {
        let slots = || devices.values().filter_map(|device| Some((&device.gpu, device.slot?)));
        let replicas = slots().map(|(_, slot)| slot).max()?.saturating_add(1);
        let gpu = |gpu: &Gpu| MpsGpu { uuid: gpu.uuid.clone(), index: gpu.index, memory_mib: gpu.facts.memory_mib };
        let gpus: BTreeMap<(u32, &GpuUuid), MpsGpu> =
            slots().map(|(shared, _)| ((shared.index, &shared.uuid), gpu(shared))).collect();
        let gpus: Vec<MpsGpu> = gpus.into_values().collect();
        Some(Self { replicas, whole_node: gpus.len() == gpus_of_node, gpus })
    }

    /// The share without these GPUs; `None` if none is left.
    pub fn without(&self, gpus: &BTreeSet<GpuUuid>) -> Option<Self> {
        let left: Vec<MpsGpu> = self.gpus.iter().filter(|gpu| !gpus.contains(&gpu.uuid)).cloned().collect();
        let whole_node = self.whole_node && left.len() == self.gpus.len();
        (!left.is_empty()).then_some(Self { replicas: self.replicas, gpus: left, whole_node })
    }

    /// Returns true if a daemon that is ready for this share is ready for the other too. A GPU that is gone makes no
    /// difference.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let has = |gpu: &MpsGpu| self.gpus.iter().any(|own| own.uuid == gpu.uuid && own.memory_mib == gpu.memory_mib);
        self.replicas == other.replicas && other.gpus.iter().all(has)
    }
}
