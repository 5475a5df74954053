//! What depends on the topology alone, computed once and asked at every admission.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use super::collective::at;
use super::set::GpuSet;
use super::tree::Tree;
use super::{collective, remaining};
use crate::topology::{NodeTopology, bandwidth};

/// The tables of one topology. Off the admission path to build, read-only afterwards, swapped in whole.
///
/// Up to [`Self::EXACT_GPUS`] GPUs they hold a row for each of the 2^n sets: 2.1 MiB for 16 GPUs, 9 KiB for 8. For
/// more they hold the tree of the machine, and sets are valued when they are asked for.
#[derive(Clone, Debug)]
pub struct AllocationTables {
    topology: Arc<NodeTopology>,
    values: SetValues,
}

/// Where the values of a set come from.
#[derive(Clone, Debug)]
pub(super) enum SetValues {
    Tables(SetTables),
    Tree(Tree),
}

/// One row for each set of GPUs.
#[derive(Clone, Debug)]
pub(super) struct SetTables {
    /// MB/s.
    pub collective: Vec<u32>,
    pub remaining: Vec<u32>,
    /// MB/s.
    pub pairs: Vec<u64>,
    /// The sum of ranks over the pairs: closeness without its minus.
    pub distance: Vec<u64>,
    /// `remaining_closeness` without its minus.
    pub remaining_distance: Vec<u8>,
    /// GPUs.
    pub room: Vec<u8>,
    /// Mbit/s.
    pub nics: Vec<u64>,
}

impl AllocationTables {
    /// The most GPUs for which every set has its row, and every choice is exact.
    pub const EXACT_GPUS: usize = 16;

    /// Computes the tables of a topology.
    pub fn new(topology: Arc<NodeTopology>) -> Self {
        let values = if topology.gpus().len() <= Self::EXACT_GPUS {
            SetValues::Tables(SetTables::new(&topology, None))
        } else {
            SetValues::Tree(Tree::new(&topology))
        };
        Self { values, topology }
    }

    /// The tables of a few GPUs of a larger machine: what remains is valued by that machine's best.
    pub(super) fn of_part(part: NodeTopology, tree: &Tree) -> Self {
        Self { values: SetValues::Tables(SetTables::new(&part, Some(tree))), topology: Arc::new(part) }
    }

    /// The topology they were computed from.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        &self.topology
    }

    /// What they occupy, in bytes, the topology left out.
    pub fn bytes(&self) -> usize {
        match &self.values {
            SetValues::Tables(sets) => sets.bytes(),
            SetValues::Tree(tree) => tree.bytes(),
        }
    }

    /// Where the values of a set come from.
    pub(super) fn values(&self) -> &SetValues {
        &self.values
    }
}

impl SetTables {
    fn new(topology: &NodeTopology, tree: Option<&Tree>) -> Self {
        let gpus = topology.gpus().len();
        let collective = collective::table(topology);
        let top = |group| tree.map_or_else(|| remaining::top(gpus, &collective, group), |tree| tree.top(group).mbps);
        Self {
            remaining: remaining::table(gpus, &collective, top),
            pairs: collective::inside(gpus, |a, b| topology.bandwidth(a, b)),
            distance: collective::inside(gpus, |a, b| u32::from(topology.rank(a, b).number())),
            remaining_distance: remaining::closeness_table(topology),
            room: remaining::room_table(topology),
            nics: nics_table(topology),
            collective,
        }
    }

    fn bytes(&self) -> usize {
        let words = [&self.collective, &self.remaining].into_iter().map(|table| size_of_val(table.as_slice()));
        let doubles = [&self.pairs, &self.distance, &self.nics].into_iter().map(|table| size_of_val(table.as_slice()));
        words.chain(doubles).sum::<usize>() + self.remaining_distance.len() + self.room.len()
    }
}

/// For every set, the summed rates of the distinct NICs nearest to its members, Mbit/s.
fn nics_table(topology: &NodeTopology) -> Vec<u64> {
    let (nearest, rates) = nearest_nics(topology);
    let mut near: Vec<u64> = vec![0; 1 << topology.gpus().len()];
    for row in 1..near.len() {
        let set = GpuSet(row as u64);
        let lowest = set.lowest();
        let own = lowest.places().filter_map(|place| nearest.get(place)).fold(0, |all, own| all | own);
        let all = own | at(&near, set.without(lowest));
        if let Some(cell) = near.get_mut(row) {
            *cell = all;
        }
    }
    near.into_iter().map(|nics| GpuSet(nics).places().filter_map(|nic| rates.get(nic)).sum()).collect()
}

/// For each GPU its nearest NICs as bits, and the rate of each such NIC.
///
/// Nearest are all NICs of the smallest rank, if that is PHB or closer. Only NICs that are nearest to some
/// GPU have a bit; the 65th such (no machine has it) would count for none.
pub(super) fn nearest_nics(topology: &NodeTopology) -> (Vec<u64>, Vec<u64>) {
    let mut bits: BTreeMap<usize, u64> = BTreeMap::new();
    let mut rates = Vec::new();
    let mut nearest = Vec::new();
    for place in 0..topology.gpus().len() {
        let mut near = 0;
        for nic in topology.nearest_nics(place) {
            let bit = *bits.entry(nic).or_insert_with(|| {
                let mbps = topology.nics().get(nic).and_then(|nic| nic.mbps).unwrap_or(bandwidth::UNKNOWN_NIC);
                rates.push(u64::from(mbps));
                GpuSet::of(rates.len() - 1).0
            });
            near |= bit;
        }
        nearest.push(near);
    }
    (nearest, rates)
}
