//! What each client of a shared GPU may take: memory and threads, from the GPUs and the number of replicas. Pure.
//!
//! The numbers are those of the NVIDIA device plugin: a replica's memory is the GPU's divided by the replicas, rounded
//! down to whole MiB, and its threads are 100 % divided by the replicas, rounded down to whole percent.

use serde::{Deserialize, Serialize};

use crate::inventory::ResourceName;
use crate::topology::{ComputeCapability, GpuUuid};

use super::layout::LayoutError;

/// Clients that an MPS server takes for each GPU: since Volta, and before (man nvidia-cuda-mps-control, driver 580: "SM
/// 7.0 has a limit of 48", "SM 3.5 through SM 6.0 the limit is 16"). The NVIDIA plugin counts Volta among the older.
const MOST_CLIENTS: (u32, u32) = (48, 16);

/// The first compute capability of Volta.
const VOLTA: ComputeCapability = ComputeCapability { major: 7, minor: 0 };

/// A GPU that is to be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsGpu {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// NVML's index, which is the GPU's place in the order of PCI addresses.
    pub index: u32,
    /// Its memory in MiB; `None` gets no limit, as where NVML has no such number.
    pub memory_mib: Option<u64>,
    /// Its compute capability; `None` counts as Volta or later.
    pub compute_capability: Option<ComputeCapability>,
    /// Whether it is cut into MIG devices.
    pub mig: bool,
}

/// A resource that is shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsResource {
    /// The name under which it is offered.
    pub name: ResourceName,
    /// Its GPUs.
    pub gpus: Vec<MpsGpu>,
    /// Into how many each GPU is shared.
    pub replicas: u32,
    /// Whether its GPUs are all that the node has. If not, its daemon is shown its own GPUs only.
    pub whole_node: bool,
}

/// What each client may take, and of which GPUs. Two that are equal promise the same to the pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// The part of a GPU's threads, in percent.
    pub thread_percentage: u32,
    /// The memory, GPU by GPU, in the order in which the daemon counts them.
    pub memory: Vec<MemoryLimit>,
    /// Whether the daemon is shown these GPUs only.
    pub shown_only: bool,
}

/// What each client may take of one GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryLimit {
    /// The number by which the control daemon knows the GPU. Not its UUID: the daemon takes a limit by UUID and does not
    /// hold it (NVIDIA/k8s-device-plugin#572).
    pub device: u32,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The memory in MiB; `None` for a GPU whose memory is unknown.
    pub mib: Option<u64>,
}

/// Why a resource cannot be shared by MPS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no GPU.
    #[error("{0}: no GPU to share by MPS")]
    NoGpu(ResourceName),
    /// Shared into nothing.
    #[error("{0}: 0 replicas are nothing to offer")]
    NoReplicas(ResourceName),
    /// One of its GPUs is cut into MIG devices.
    #[error("{resource}: {gpu} is in MIG mode, and MPS shares no MIG devices")]
    Mig {
        /// The resource.
        resource: ResourceName,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// More replicas than an MPS server takes clients.
    #[error("{resource}: {replicas} replicas of {gpu}, whose MPS server takes {most} clients at most")]
    TooMany {
        /// The resource.
        resource: ResourceName,
        /// The GPU.
        gpu: GpuUuid,
        /// What was asked for.
        replicas: u32,
        /// What there may be.
        most: u32,
    },
    /// It has no place under the MPS root.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl MpsResource {
    /// What each client of the resource may take.
    ///
    /// # Errors
    ///
    /// See [`Refusal`].
    pub fn limits(&self) -> Result<Limits, Refusal> {
        let resource = || self.name.clone();
        if self.gpus.is_empty() {
            return Err(Refusal::NoGpu(resource()));
        }
        if self.replicas == 0 {
            return Err(Refusal::NoReplicas(resource()));
        }
        for gpu in &self.gpus {
            if gpu.mig {
                return Err(Refusal::Mig { resource: resource(), gpu: gpu.uuid.clone() });
            }
            let (since, before) = MOST_CLIENTS;
            let most = if gpu.compute_capability.is_none_or(|capability| capability >= VOLTA) { since } else { before };
            if self.replicas > most {
                let (replicas, gpu) = (self.replicas, gpu.uuid.clone());
                return Err(Refusal::TooMany { resource: resource(), gpu, replicas, most });
            }
        }
        let mut gpus: Vec<&MpsGpu> = self.gpus.iter().collect();
        gpus.sort_unstable_by_key(|gpu| gpu.index);
        // Whoever is shown some GPUs only counts these from 0.
        let memory = (0..).zip(gpus).map(|(place, gpu)| MemoryLimit {
            device: if self.whole_node { gpu.index } else { place },
            gpu: gpu.uuid.clone(),
            mib: gpu.memory_mib.map(|mib| mib / u64::from(self.replicas)),
        });
        let memory = memory.collect();
        Ok(Limits { thread_percentage: 100 / self.replicas, memory, shown_only: !self.whole_node })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> MpsGpu {
        let compute_capability = Some(ComputeCapability { major: 8, minor: 0 });
        MpsGpu {
            uuid: format!("GPU-{index}").parse().unwrap(),
            index,
            memory_mib: Some(40_960),
            compute_capability,
            mig: false,
        }
    }

    fn shared(replicas: u32, gpus: Vec<MpsGpu>) -> MpsResource {
        MpsResource { name: ResourceName::gpu(), gpus, replicas, whole_node: true }
    }

    #[test]
    fn memory_and_threads_are_divided_and_rounded_down() {
        let limits = shared(3, vec![gpu(1), MpsGpu { memory_mib: None, ..gpu(0) }]).limits().unwrap();
        assert_eq!(limits.thread_percentage, 33);
        let memory: Vec<_> = limits.memory.iter().map(|one| (one.device, one.gpu.as_str(), one.mib)).collect();
        assert_eq!(memory, [(0, "GPU-0", None), (1, "GPU-1", Some(13_653))]);
        let all = shared(1, vec![gpu(0)]).limits().unwrap();
        assert_eq!((all.thread_percentage, all.memory[0].mib), (100, Some(40_960)));
    }

    #[test]
    fn some_gpus_of_a_node_are_counted_from_0() {
        let limits = MpsResource { whole_node: false, ..shared(2, vec![gpu(5), gpu(3)]) }.limits().unwrap();
        let memory: Vec<_> = limits.memory.iter().map(|one| (one.device, one.gpu.as_str())).collect();
        assert_eq!((memory, limits.shown_only), (vec![(0, "GPU-3"), (1, "GPU-5")], true));
    }

    #[test]
    fn what_mps_cannot_do_is_refused_by_name() {
        let words = |resource: MpsResource| resource.limits().map_err(|refusal| refusal.to_string());
        let capability = |major, minor| Some(ComputeCapability { major, minor });
        let of = |compute_capability, replicas| shared(replicas, vec![MpsGpu { compute_capability, ..gpu(0) }]);
        for fits in [of(capability(7, 0), 48), of(capability(9, 0), 48), of(None, 48), of(capability(6, 1), 16)] {
            assert!(words(fits.clone()).is_ok(), "{fits:?}");
        }
        for (resource, why) in [
            (
                of(capability(7, 0), 49),
                "nvidia.com/gpu: 49 replicas of GPU-0, whose MPS server takes 48 clients at most",
            ),
            (
                of(capability(6, 1), 17),
                "nvidia.com/gpu: 17 replicas of GPU-0, whose MPS server takes 16 clients at most",
            ),
            (shared(2, vec![]), "nvidia.com/gpu: no GPU to share by MPS"),
            (shared(0, vec![gpu(0)]), "nvidia.com/gpu: 0 replicas are nothing to offer"),
            (
                shared(2, vec![gpu(0), MpsGpu { mig: true, ..gpu(1) }]),
                "nvidia.com/gpu: GPU-1 is in MIG mode, and MPS shares no MIG devices",
            ),
        ] {
            assert_eq!(words(resource), Err(why.to_owned()));
        }
    }
}
