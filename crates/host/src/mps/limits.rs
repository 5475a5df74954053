//! The limits of each client of a shared GPU: memory and threads. Pure.
//!
//! An order for claims has its limits. For a resource they are those of the NVIDIA device plugin: a replica's memory is
//! the GPU's divided by the replicas, rounded down to whole MiB; its threads are 100 % divided by the replicas, rounded
//! down to whole percent.

use serde::{Deserialize, Serialize};

use linkwise_core::claims::MpsOrder;
use linkwise_core::state::MpsShare;
use linkwise_core::topology::GpuUuid;

/// The limits of each client, and the GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// The part of a GPU's threads, in percent.
    pub thread_percentage: u32,
    /// The memory limits, in the order in which the daemon numbers the GPUs.
    pub memory: Vec<MemoryLimit>,
    /// True if the daemon sees only these GPUs.
    pub shown_only: bool,
    /// True if the GPUs refuse processes that are not clients. False for a GPU in shares, because claims without MPS
    /// may have shares of it too.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub exclusive: bool,
    /// True if the daemon and its clients have shared memory of their own, as those of claims have. Earlier releases
    /// gave claims none, and do not write this key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own_shm: bool,
}

fn yes() -> bool {
    true
}

fn is_yes(flag: &bool) -> bool {
    *flag
}

/// Each client's limit of one GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryLimit {
    /// The control daemon's number of the GPU. Its UUID would not do: the daemon accepts a limit by UUID and does not
    /// hold it (NVIDIA/k8s-device-plugin#572).
    pub device: u32,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The limit in MiB; `None` for no limit, as for a GPU whose memory is unknown.
    pub mib: Option<u64>,
}

impl Limits {
    /// The limits of each client of a share.
    pub fn of(share: &MpsShare) -> Self {
        let replicas = share.replicas.max(1);
        // A daemon that sees only some GPUs numbers these from 0.
        let memory = (0..).zip(&share.gpus).map(|(place, gpu)| MemoryLimit {
            device: if share.whole_node { gpu.index } else { place },
            gpu: gpu.uuid.clone(),
            mib: gpu.memory_mib.map(|mib| mib / u64::from(replicas)),
        });
        let (memory, shown_only) = (memory.collect(), !share.whole_node);
        Self { thread_percentage: 100 / replicas, memory, shown_only, exclusive: true, own_shm: false }
    }

    /// The limits of a daemon for claims.
    pub fn of_order(order: &MpsOrder) -> Self {
        let memory = (0..).zip(&order.gpus);
        let memory = memory.map(|(device, gpu)| MemoryLimit { device, gpu: gpu.gpu.clone(), mib: gpu.mib }).collect();
        let MpsOrder { thread_percentage, exclusive, .. } = *order;
        Self { thread_percentage, memory, shown_only: true, exclusive, own_shm: true }
    }

    /// The GPUs, in the order in which the daemon numbers them.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.memory.iter().map(|limit| &limit.gpu)
    }

    /// Returns true if a daemon with these limits also meets `wanted`. A daemon that sees all GPUs meets them even
    /// after a GPU has left, so that it is not restarted, which would end CUDA work. Device numbers have to agree too,
    /// because NVML renumbers GPUs after one that left.
    pub fn meet(&self, wanted: &Self) -> bool {
        let same_gpus = self.gpus().eq(wanted.gpus());
        // CUDA ignores all GPUs in CUDA_VISIBLE_DEVICES after one that has left, so a daemon with such a list needs all
        // of its GPUs. A daemon that sees all GPUs does not meet limits for one that may see only its own.
        let has_gpus = if self.shown_only { same_gpus } else { !wanted.shown_only };
        let held = |one: &MemoryLimit| {
            let any =
                |same: &dyn Fn(&MemoryLimit) -> bool| self.memory.iter().any(|own| same(own) && own.mib == one.mib);
            any(&|own| own.gpu == one.gpu) && any(&|own| own.device == one.device)
        };
        self.thread_percentage == wanted.thread_percentage
            && self.exclusive == wanted.exclusive
            && has_gpus
            && wanted.memory.iter().all(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::MpsGpu;

    fn gpu(index: u32) -> MpsGpu {
        MpsGpu { uuid: format!("GPU-{index}").parse().unwrap(), index, memory_mib: Some(40_960) }
    }

    fn shared(replicas: u32, gpus: Vec<MpsGpu>) -> MpsShare {
        MpsShare { replicas, gpus, whole_node: true }
    }

    #[test]
    fn limits_are_divided_and_rounded_down() {
        let limits = Limits::of(&shared(3, vec![MpsGpu { memory_mib: None, ..gpu(0) }, gpu(1)]));
        assert_eq!(limits.thread_percentage, 33);
        let memory: Vec<_> = limits.memory.iter().map(|one| (one.device, one.gpu.as_str(), one.mib)).collect();
        assert_eq!(memory, [(0, "GPU-0", None), (1, "GPU-1", Some(13_653))]);
    }

    #[test]
    fn gpus_shown_to_a_daemon_count_from_0() {
        let limits = Limits::of(&MpsShare { whole_node: false, ..shared(2, vec![gpu(3), gpu(5)]) });
        let memory: Vec<_> = limits.memory.iter().map(|one| (one.device, one.gpu.as_str())).collect();
        assert_eq!((memory, limits.shown_only), (vec![(0, "GPU-3"), (1, "GPU-5")], true));
    }

    #[test]
    fn daemon_meets_wanted_limits_or_not() {
        let small = |index| MpsGpu { memory_mib: Some(20_480), ..gpu(index) };
        let renumbered = |old, new| MpsGpu { index: new, ..gpu(old) };
        let all = |gpus| Limits::of(&shared(2, gpus));
        let some = |gpus| Limits::of(&MpsShare { whole_node: false, ..shared(2, gpus) });
        let three = || vec![gpu(0), gpu(1), gpu(2)];
        for (held, wanted, meets) in [
            (all(three()), all(three()), true),
            (all(three()), all(vec![gpu(0), gpu(1)]), true),
            (all(three()), all(vec![gpu(0), renumbered(2, 1)]), true),
            // The limit of the GPU's new number is another GPU's.
            (all(vec![gpu(0), small(1), gpu(2)]), all(vec![gpu(0), renumbered(2, 1)]), false),
            (all(vec![gpu(0), gpu(1)]), all(three()), false),
            (all(vec![gpu(0), small(1)]), all(vec![gpu(0), gpu(1)]), false),
            (all(three()), Limits::of(&shared(3, three())), false),
            (some(vec![gpu(1), gpu(2)]), some(vec![gpu(1), gpu(2)]), true),
            (some(vec![gpu(1), gpu(2)]), some(vec![gpu(1)]), false),
            // The node's other GPUs left, or came.
            (some(vec![gpu(0), gpu(1)]), all(vec![gpu(0), gpu(1)]), true),
            (all(vec![gpu(0), gpu(1)]), some(vec![gpu(0), gpu(1)]), false),
        ] {
            assert_eq!(held.meet(&wanted), meets, "{held:?}\n{wanted:?}");
        }
    }
}
