//! [`AllocationTables`]: values that depend on the topology alone, computed once and read at every admission.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use super::choose::Question;
use super::collective::{at, row};
use super::report::{AllocationReport, Values};
use super::search::MAX_TABLED_GPUS;
use super::set::{GpuSet, subsets};
use super::tree::Tree;
use super::{AllocationPolicy, DeviceId};
use super::{collective, remaining, tree};
use crate::topology::{NodeTopology, bandwidth};

/// The tables of one topology. They are built off the admission path, are read-only afterwards, and are replaced as a
/// whole.
///
/// Up to [`Self::EXACT_GPUS`] GPUs they hold a row of 24 bytes for each of the 2^n sets (6 KiB for 8 GPUs, 1.5 MiB for
/// 16) and each value once. For more GPUs they hold the machine's tree, and sets are valued when a request needs them.
#[derive(Clone, Debug)]
pub struct AllocationTables {
    topology: Arc<NodeTopology>,
    /// The place of each GPU.
    places: BTreeMap<DeviceId, usize>,
    pub(super) values: SetValues,
}

/// The source of the values of a set.
#[derive(Clone, Debug)]
pub(super) enum SetValues {
    Tables(SetTables),
    Tree(Tree),
}

/// One row for each set of GPUs.
///
/// A row keeps each value before the NICs as a rank among its kind; a closeness shares the rank of the value before it.
/// There are at most 2^16 sets, so four ranks of 16 bits make one number that compares as these values do.
#[derive(Clone, Debug)]
pub(super) struct SetTables {
    /// The ranks of collective and pairs of a chosen set, each with 16 free bits below it.
    chosen: Vec<u64>,
    /// The ranks of the remaining value and the room of a free set, in the bits that `chosen` leaves.
    remains: Vec<u64>,
    /// Mbit/s.
    nics: Vec<u64>,
    /// The values behind the ranks, ascending: MB/s.
    collective: Vec<u32>,
    remaining: Vec<u32>,
    /// MB/s, and the closeness.
    pairs: Vec<(u64, i64)>,
    /// GPUs, and the closeness of the remaining GPUs.
    room: Vec<(u8, i64)>,
}

/// The tables of a node without GPUs.
impl Default for AllocationTables {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl AllocationTables {
    /// The most GPUs for which every set has a row and every choice is exact.
    pub const EXACT_GPUS: usize = 16;

    /// Computes the tables of a topology.
    pub fn new(topology: Arc<NodeTopology>) -> Self {
        let values = if topology.gpus().len() <= Self::EXACT_GPUS {
            SetValues::Tables(SetTables::new(&topology, None))
        } else {
            SetValues::Tree(Tree::new(&topology))
        };
        let ids = topology.gpus().iter().enumerate().map(|(place, gpu)| (DeviceId::from(&gpu.uuid), place));
        Self { places: ids.collect(), values, topology }
    }

    /// The place of the whole GPU that an id names.
    pub(super) fn place(&self, id: &DeviceId) -> Option<usize> {
        self.places.get(id).copied()
    }

    /// The topology that the tables were computed from.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        &self.topology
    }

    /// The values of a set of GPUs by itself, as if no other GPU were free.
    pub(crate) fn worth(&self, set: GpuSet) -> Values {
        match &self.values {
            SetValues::Tables(sets) => sets.values(set, GpuSet::default()),
            SetValues::Tree(tree) => tree.values(set, GpuSet::default()),
        }
    }

    /// The choice of the best `size` of these GPUs; `None` if there are fewer, or for size 0.
    pub(super) fn best(&self, gpus: GpuSet, size: usize) -> Option<AllocationReport> {
        let question = Question::of(GpuSet::default(), gpus, size, AllocationPolicy::BestEffort);
        (1..=gpus.len()).contains(&size).then(|| question.answer(self))
    }

    /// The best `size` of these GPUs; empty if there are fewer.
    pub(crate) fn best_of(&self, gpus: GpuSet, size: usize) -> GpuSet {
        self.best(gpus, size).map(|report| report.chosen).unwrap_or_default()
    }

    /// The ring bandwidth of a set by NCCL's model, MB/s. `None` for fewer than two GPUs, which have no links between
    /// them, and if it is unknown: large sets of a mesh of NVLinks of more than [`Self::EXACT_GPUS`] GPUs.
    pub fn collective(&self, set: GpuSet) -> Option<u64> {
        match &self.values {
            _ if set.len() < 2 => None,
            SetValues::Tree(tree) if !tree.exact => {
                (set.len() <= MAX_TABLED_GPUS).then(|| u64::from(tree::collective_of(&self.topology, set)))
            }
            _ => Some(self.worth(set).collective),
        }
    }

    /// The best collective of any `size` of these GPUs, MB/s; `None` for a size below two, and if there are fewer GPUs.
    /// On a mesh of NVLinks of more than [`Self::EXACT_GPUS`] GPUs it is the best one found, `None` for large sizes.
    pub fn best_collective(&self, gpus: GpuSet, size: usize) -> Option<u64> {
        match &self.values {
            _ if !(2..=gpus.len()).contains(&size) => None,
            SetValues::Tables(sets) => Some(sets.best_collective(gpus, size)),
            SetValues::Tree(tree) if tree.exact => {
                let holds = |cluster: &&tree::Cluster| cluster.members.intersection(gpus).len() >= size;
                Some(tree.bandwidths.clusters.iter().find(holds).map_or(0, |cluster| u64::from(cluster.width)))
            }
            SetValues::Tree(_) => self.collective(self.best_of(gpus, size)),
        }
    }
}

impl SetTables {
    /// Computes the rows. If the GPUs are a few of a larger machine, `tree` is the tree of that machine, and the
    /// remaining value is relative to that machine's best.
    pub fn new(topology: &NodeTopology, tree: Option<&Tree>) -> Self {
        let gpus = topology.gpus().len();
        let collective = collective::table(topology);
        let top = |group| tree.map_or_else(|| remaining::top(gpus, &collective, group), |tree| tree.top(group).mbps);
        let remaining = remaining::table(gpus, &collective, top);
        let pairs = collective::pair_sums(gpus, |a, b| topology.bandwidth(a, b));
        let distances = collective::pair_sums(gpus, |a, b| u32::from(topology.rank(a, b).number()));
        let pairs = pairs.into_iter().zip(distances.into_iter().map(minus)).collect();
        let distances = remaining::distance_table(topology).into_iter().map(|distance| minus(u64::from(distance)));
        let room = remaining::room_table(topology).into_iter().zip(distances).collect();
        let near_nics = NearNics::of(topology);
        let (collective, by_collective) = ranked(collective);
        let (remaining, by_remaining) = ranked(remaining);
        let (pairs, by_pairs) = ranked(pairs);
        let (room, by_room) = ranked(room);
        Self {
            chosen: by_collective.zip(by_pairs).map(|(high, low)| high << 48 | low << 16).collect(),
            remains: by_remaining.zip(by_room).map(|(high, low)| high << 32 | low).collect(),
            nics: (0..1 << gpus).map(|row| near_nics.rate(GpuSet(row))).collect(),
            collective,
            remaining,
            pairs,
            room,
        }
    }

    /// Combines the values of a chosen set and of the GPUs that stay free into one number. The larger number is better
    /// by all values before [`Value::Nics`](super::Value::Nics).
    pub fn rank(&self, chosen: GpuSet, remains: GpuSet) -> u64 {
        at(&self.chosen, chosen) | at(&self.remains, remains)
    }

    /// The best collective of any `size` of these GPUs, MB/s.
    fn best_collective(&self, gpus: GpuSet, size: usize) -> u64 {
        let ranks = subsets(gpus, size).map(|set| at(&self.chosen, set) >> 48);
        u64::from(row(&self.collective, ranks.max().unwrap_or(0)))
    }

    /// The rates of the NICs nearest to a set, Mbit/s.
    pub fn nics(&self, chosen: GpuSet) -> u64 {
        at(&self.nics, chosen)
    }

    /// The sum of the bandwidths of a set's pairs, MB/s.
    pub fn pairs(&self, set: GpuSet) -> u64 {
        let (sum, _) = row(&self.pairs, at(&self.chosen, set) >> 16 & u64::from(u16::MAX));
        sum
    }

    /// The values of a chosen set and of the GPUs that stay free.
    pub fn values(&self, chosen: GpuSet, remains: GpuSet) -> Values {
        let all = self.rank(chosen, remains);
        let rank = |shift: u32| all >> shift & u64::from(u16::MAX);
        let (pairs, closeness) = row(&self.pairs, rank(16));
        let (room, remaining_closeness) = row(&self.room, rank(0));
        Values {
            collective: u64::from(row(&self.collective, rank(48))),
            remaining: u64::from(row(&self.remaining, rank(32))),
            pairs,
            closeness,
            room: u64::from(room),
            remaining_closeness,
            nics: self.nics(chosen),
            remaining_pairs: self.pairs(remains),
        }
    }
}

/// The closeness of GPUs with this sum of ranks: minus the sum.
fn minus(distance: u64) -> i64 {
    i64::try_from(distance).map_or(i64::MIN, |distance| -distance)
}

/// The distinct values, ascending, and the rank of each value among them.
fn ranked<T: Ord + Clone>(values: Vec<T>) -> (Vec<T>, impl Iterator<Item = u64>) {
    let mut distinct = values.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let ranks: Vec<u64> =
        values.iter().map(|value| distinct.binary_search(value).unwrap_or_else(|rank| rank) as u64).collect();
    (distinct, ranks.into_iter())
}

/// The NICs nearest to each GPU, as bits, and the rate of each such NIC, Mbit/s.
///
/// The nearest NICs are those of [`NodeTopology::nearest_nics`]. Only NICs that are nearest to some GPU have a bit. No
/// machine has 65 such NICs; a 65th would count for no GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct NearNics {
    pub near: Vec<u64>,
    rates: Vec<u64>,
}

impl NearNics {
    pub fn of(topology: &NodeTopology) -> Self {
        let mut bits: BTreeMap<usize, u64> = BTreeMap::new();
        let mut nics = Self::default();
        for place in 0..topology.gpus().len() {
            let mut near = 0;
            for nic in topology.nearest_nics(place) {
                near |= *bits.entry(nic).or_insert_with(|| {
                    let mbps = topology.nics().get(nic).and_then(|nic| nic.mbps).unwrap_or(bandwidth::UNKNOWN_NIC);
                    nics.rates.push(u64::from(mbps));
                    GpuSet::of(nics.rates.len() - 1).0
                });
            }
            nics.near.push(near);
        }
        nics
    }

    /// Sums the rates of the distinct NICs nearest to a set's members, Mbit/s.
    pub fn rate(&self, set: GpuSet) -> u64 {
        let near = set.places().filter_map(|place| self.near.get(place)).fold(0, |all, own| all | own);
        GpuSet(near).places().filter_map(|nic| self.rates.get(nic)).sum()
    }
}
