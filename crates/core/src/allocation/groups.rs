//! [`Groups`]: which GPUs of a node belong together, as named sets.
//!
//! What schedulers are told of a node (labels, resource slices) is made from these. A group of one is a group: each GPU is in
//! exactly one group of each kind, except for those that NVLink, a NUMA node or a package does not name.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::choose::Question;
use super::remaining::grouped;
use super::request::AllocationPolicy;
use super::set::{GpuSet, components};
use super::tables::AllocationTables;
use crate::topology::{NumaNodeId, PackageId, Rank};

/// The sizes of [`Groups::best`]: what jobs ask for.
const SIZES: [usize; 3] = [2, 4, 8];

/// The groups of a node; sets are of places in [`crate::topology::NodeTopology::gpus`].
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
        Self {
            nvlink_domains,
            pcie_switches: by_rank(Rank::PCIE_SWITCHES),
            pcie_roots: by_rank(Rank::HOST_BRIDGE),
            numa_nodes: grouped(topology, |gpu| gpu.numa),
            packages: grouped(topology, |gpu| gpu.package),
            best: SIZES.into_iter().filter(|size| *size <= gpus).map(|size| (size, best(tables, size))).collect(),
        }
    }
}

/// The best set of `size` GPUs, then the best of the rest, until fewer are left.
fn best(tables: &AllocationTables, size: usize) -> Vec<GpuSet> {
    let mut available: GpuSet = (0..tables.topology().gpus().len()).collect();
    let mut sets = Vec::new();
    while available.len() >= size {
        let question = Question::of(GpuSet::default(), available, size, AllocationPolicy::BestEffort);
        let chosen = question.answer(tables).chosen;
        if chosen.is_empty() {
            break;
        }
        sets.push(chosen);
        available = available.without(chosen);
    }
    sets
}
