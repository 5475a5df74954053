//! The exclusive CPUs of each container: the books of a static CPU manager.
//!
//! Part of `devices::Book`, written by `admission`. Pure. A kubelet fills sockets, cores and threads in an order of
//! its own; here the lowest numbers go first. Hints see NUMA nodes only, so they are the same.

use std::collections::{BTreeMap, BTreeSet};

use super::hints::Units;
use super::mask::NumaMask;
use super::{NumaNode, ResourceHints, TopologyManager, cpu_hints};

type Cpus = BTreeSet<u32>;

/// CPUs by pod and container; they outlive a restart, as devices do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuBook {
    /// The held CPUs, by pod and container.
    pub(crate) held: BTreeMap<String, BTreeMap<String, Cpus>>,
}

impl CpuBook {
    /// The CPUs of a container.
    fn held(&self, pod: &str, container: &str) -> Option<&Cpus> {
        self.held.get(pod)?.get(container)
    }

    /// Takes CPUs for a container, those of the mask first. `Err` holds the number of free CPUs.
    pub(crate) fn take(
        &mut self,
        manager: &TopologyManager,
        (pod, container): (&str, &str),
        count: usize,
        affinity: Option<NumaMask>,
    ) -> Result<Cpus, usize> {
        if let Some(held) = self.held(pod, container) {
            return Ok(held.clone());
        }
        let aligned = |node: &NumaNode| affinity.is_none_or(|mask| mask.meets(NumaMask::new([node.id])));
        let free = |node: &NumaNode| self.free(node);
        let (near, far): (Vec<&NumaNode>, Vec<&NumaNode>) = manager.numa_nodes.iter().partition(|node| aligned(node));
        let all: Vec<u32> =
            [near, far].into_iter().flat_map(|side| side.into_iter().flat_map(free).collect::<Cpus>()).collect();
        let taken: Cpus = all.iter().take(count).copied().collect();
        if taken.len() < count {
            return Err(all.len());
        }
        self.held.entry(pod.to_owned()).or_default().insert(container.to_owned(), taken.clone());
        Ok(taken)
    }

    /// The hints for one container, or in scope pod for all containers of a pod: `wanted` names them with the number of
    /// CPUs that each requests. `None` if no CPU is requested.
    pub(crate) fn hints(
        &self,
        manager: &TopologyManager,
        pod: &str,
        wanted: &[(&str, usize)],
    ) -> Option<ResourceHints> {
        let requested: usize = wanted.iter().map(|(_, count)| count).sum();
        if requested == 0 || !manager.static_cpus {
            return None;
        }
        let mut assigned = Cpus::new();
        for (container, count) in wanted {
            let Some(held) = self.held(pod, container) else { continue };
            if held.len() != *count {
                let nothing =
                    ResourceHints { hints: Some(Vec::new()), ..cpu_hints(manager, requested, &Units::default()) };
                return Some(nothing);
            }
            assigned.extend(held);
        }
        let on = |cpus: &dyn Fn(&NumaNode) -> usize| -> Vec<NumaMask> {
            let masks = manager.numa_nodes.iter().map(|node| (NumaMask::new([node.id]), cpus(node)));
            masks.flat_map(|(mask, count)| std::iter::repeat_n(mask, count)).collect()
        };
        let all = on(&|node| node.cpus.len());
        let mine = on(&|node| node.cpus.intersection(&assigned).count());
        let units = if assigned.len() == requested {
            Units { all, available: mine, reusable: Vec::new() }
        } else {
            Units { all, available: on(&|node| self.free(node).len()), reusable: mine }
        };
        Some(cpu_hints(manager, requested, &units))
    }

    fn free(&self, node: &NumaNode) -> Cpus {
        let held: Cpus = self.held.values().flat_map(BTreeMap::values).flatten().copied().collect();
        node.cpus.difference(&held).copied().collect()
    }
}
