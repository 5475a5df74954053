//! [`Groups`]: named sets of GPUs of a node that belong together.
//!
//! Labels and resource slices are made from these. A group may have one GPU. Each GPU is in exactly one group of each
//! kind, except that a GPU without NVLinks, or of unknown NUMA node or package, is in no such group.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::choose::Question;
use super::remaining::grouped;
use super::request::AllocationPolicy;
use super::set::{GpuSet, components};
use super::tables::AllocationTables;
use crate::topology::{NumaNodeId, PackageId, Rank};

/// The group sizes of [`Groups::best`], which are those that jobs ask for.
const SIZES: [usize; 3] = [2, 4, 8];

/// The groups of a node. Sets hold places in [`crate::topology::NodeTopology::gpus`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// GPUs that NVLink connects, over any number of hops; at least two.
    pub nvlink_domains: Vec<GpuSet>,
    /// GPUs below one PCIe switch, or on one board (PXB or closer).
    pub pcie_switches: Vec<GpuSet>,
    /// GPUs below one PCIe host bridge (PHB or closer).
    pub pcie_roots: Vec<GpuSet>,
    /// GPUs by their NUMA node, memory-only ones included.
    pub numa_nodes: BTreeMap<NumaNodeId, GpuSet>,
    /// GPUs by their CPU package.
    pub packages: BTreeMap<PackageId, GpuSet>,
    /// Sets of 2, 4 and 8 GPUs by size: the best set of the whole node, then the best set of the rest, and so on.
    pub best: BTreeMap<usize, Vec<GpuSet>>,
}

impl Groups {
    /// Finds the groups of a node. Each set in `best` costs one choice.
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

/// Finds the best set of `size` GPUs, then the best set of the rest, until fewer are left.
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
