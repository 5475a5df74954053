//! [`Groups`]: which GPUs of a node belong together, as named sets.
//!
//! What schedulers are told of a node (labels, resource slices) is made from these. A group of one is a group: each GPU is in
//! exactly one group of each kind, except for those that NVLink, a NUMA node or a package does not name.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::choose::preferred_allocation;
use super::request::{AllocationPolicy, AllocationRequest, DeviceId};
use super::set::GpuSet;
use super::tables::AllocationTables;
use crate::topology::{NodeTopology, NumaNodeId, PackageId, Rank};

/// The sizes of [`Groups::best`]: what jobs ask for.
const SIZES: [usize; 3] = [2, 4, 8];

/// The groups of a node; sets are of places in [`NodeTopology::gpus`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// GPUs that NVLink connects, over any number of hops; two at least.
    pub nvlink_domains: Vec<GpuSet>,
    /// GPUs below one PCIe switch, or on one board (PXB or closer).
    pub pcie_switches: Vec<GpuSet>,
    /// GPUs below one PCIe host bridge (PHB or closer).
    pub pcie_roots: Vec<GpuSet>,
    /// GPUs by their NUMA node, memory-only ones included.
    pub numa_nodes: BTreeMap<NumaNodeId, GpuSet>,
    /// GPUs by their CPU package.
    pub packages: BTreeMap<PackageId, GpuSet>,
    /// For sizes 2, 4 and 8: the best set of so many GPUs of the whole node, then the best of the rest, and so on.
    pub best: BTreeMap<usize, Vec<GpuSet>>,
}

impl Groups {
    /// The groups of a node. Each of `best` costs one choice.
    pub fn of(tables: &AllocationTables) -> Self {
        let topology = tables.topology();
        let gpus = topology.gpus().len();
        let by_rank = |most: Rank| components(gpus, |a, b| topology.rank(a, b) <= most);
        let mut nvlink_domains = components(gpus, |a, b| topology.nvlink(a, b) > 0);
        nvlink_domains.retain(|domain| domain.len() > 1);
        let mut groups = Self {
            nvlink_domains,
            pcie_switches: by_rank(Rank::PCIE_SWITCHES),
            pcie_roots: by_rank(Rank::HOST_BRIDGE),
            ..Self::default()
        };
        for (place, gpu) in topology.gpus().iter().enumerate() {
            if let Some(numa) = gpu.numa {
                add(groups.numa_nodes.entry(numa).or_default(), place);
            }
            if let Some(package) = gpu.package {
                add(groups.packages.entry(package).or_default(), place);
            }
        }
        groups.best = SIZES.into_iter().filter(|size| *size <= gpus).map(|size| (size, best(tables, size))).collect();
        groups
    }
}

/// The best set of `size` GPUs, then the best of the rest, until fewer are left.
fn best(tables: &AllocationTables, size: usize) -> Vec<GpuSet> {
    let topology: &NodeTopology = tables.topology();
    let mut available: Vec<DeviceId> = topology.gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
    let mut sets = Vec::new();
    while available.len() >= size {
        let request = AllocationRequest { available: available.clone(), must_include: Vec::new(), size };
        let chosen = preferred_allocation(tables, &request, AllocationPolicy::BestEffort).0.devices;
        let places = topology.gpus().iter().enumerate().filter(|(_, gpu)| chosen.contains(&DeviceId::from(&gpu.uuid)));
        let set: GpuSet = places.map(|(place, _)| place).collect();
        if set.len() != size {
            break;
        }
        sets.push(set);
        available.retain(|id| !chosen.contains(id));
    }
    sets
}

/// The connected parts of the graph of `gpus` vertices that `joined` makes, in the order of their first members.
fn components(gpus: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<GpuSet> {
    let mut parts: Vec<GpuSet> = Vec::new();
    let mut seen = GpuSet::default();
    for start in 0..gpus {
        if seen.contains(start) {
            continue;
        }
        let (mut part, mut open) = (GpuSet::default(), vec![start]);
        while let Some(gpu) = open.pop() {
            if !part.contains(gpu) {
                add(&mut part, gpu);
                add(&mut seen, gpu);
                open.extend((0..gpus).filter(|other| *other != gpu && joined(gpu, *other)));
            }
        }
        parts.push(part);
    }
    parts
}

/// Adds the GPU at a place to a set.
fn add(set: &mut GpuSet, place: usize) {
    *set = set.union(GpuSet::of(place));
}
