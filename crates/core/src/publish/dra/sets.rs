//! Sets of GPUs that are devices: which ones, and how good each is.
//!
//! Where there is room, all sets of 2, 4 and 8 GPUs: then the scheduler, which takes the first device that fits, gives
//! the best set of those that are free. Where there is not, one way after another to divide the GPUs into disjoint
//! sets, the engine's own division first: so each GPU is in sets of each size, and nodes of 64 GPUs have whole
//! divisions.

use crate::prelude::*;

use super::group_size::{GroupSize, GroupSizes};
use crate::allocation::{AllocationTables, GpuSet, Values, subsets};
use crate::topology::{Gpu, NodeTopology};

/// The most devices of a pool with sets: four slices of
/// [`MOST_DEVICES_WITH_TAINTS`](super::slice::MOST_DEVICES_WITH_TAINTS), some 200 kB for each node in the API server
/// and in each scheduler. Nine GPUs have 171 sets, ten have 300.
pub const MOST_DEVICES_WITH_SETS: usize = 256;

/// How many sets there is room for. By the GPUs that there are, not by what is published of them: the sets stay while MIG
/// devices come and go.
pub fn room_for_sets(topology: &NodeTopology) -> usize {
    MOST_DEVICES_WITH_SETS.saturating_sub(topology.gpus().len())
}

/// Sets that are valued for one size, at most: all eights of 16 GPUs are fewer, all fours of 64 are more.
const MOST_SETS: usize = 1 << 14;

/// Where a size has more sets, its candidates are made of two of half the size; of these, the first so many.
const MOST_HALVES: usize = 128;

/// A set of GPUs that is a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankedSet {
    /// The members, by their places.
    pub gpus: GpuSet,
    /// 1 for sets that carry as much as the best of their size; where all carry the same, for those that are closest.
    pub tier: usize,
    /// The ring bandwidth of the set by NCCL's model, MB/s; `None` where only a bound of that is known.
    pub all_reduce: Option<u64>,
}

/// The sets of some GPUs that are devices, by size, and in each size the best first: as the engine orders them on the
/// idle machine. `room`: how many there may be. GPUs in MIG mode are in no set, and none has GPUs of different kinds.
pub fn sets(tables: &AllocationTables, gpus: GpuSet, of_sizes: &GroupSizes, room: usize) -> Vec<RankedSet> {
    let topology = tables.topology();
    let gpus: GpuSet =
        gpus.places().filter(|place| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled)).collect();
    let kinds = kinds(topology, gpus);
    let mut sizes: Vec<Size> = Vec::new();
    for size in of_sizes.iter().map(GroupSize::gpus) {
        let halves: Vec<GpuSet> = sizes.last().map(Size::halves).unwrap_or_default();
        let next = Size::new(tables, gpus, &kinds, size, &halves, room);
        sizes.push(next);
    }
    let mut left = room;
    let most = sizes.iter().map(|size| size.divisions.len()).max().unwrap_or(0);
    for number in 0..most {
        // The sizes take turns, so that none is left without room.
        for size in &mut sizes {
            let Some(division) = size.divisions.get(number).filter(|_| size.taken == number) else { continue };
            if let Some(rest) = left.checked_sub(division.len()) {
                (left, size.taken) = (rest, number + 1);
            }
        }
    }
    sizes.iter().flat_map(|size| size.ranked(tables.are_exact())).collect()
}

/// The GPUs by model, memory and compute capability.
fn kinds(topology: &NodeTopology, gpus: GpuSet) -> Vec<GpuSet> {
    let alike = |a: &Gpu, b: &Gpu| {
        (&a.model, a.memory_mib, a.compute_capability) == (&b.model, b.memory_mib, b.compute_capability)
    };
    let mut kinds: Vec<(&Gpu, GpuSet)> = Vec::new();
    for place in gpus.places() {
        let Some(gpu) = topology.gpus().get(place) else { continue };
        match kinds.iter_mut().find(|(first, _)| alike(first, gpu)) {
            Some((_, kind)) => *kind = kind.union(GpuSet::of(place)),
            None => kinds.push((gpu, GpuSet::of(place))),
        }
    }
    kinds.into_iter().map(|(_, kind)| kind).collect()
}

/// The sets of one size.
struct Size {
    /// All that were valued, the best first.
    sets: Vec<(Values, GpuSet)>,
    /// The same, as ways to divide the GPUs into disjoint sets.
    divisions: Vec<Vec<GpuSet>>,
    /// How many of the divisions there is room for.
    taken: usize,
}

impl Size {
    fn new(
        tables: &AllocationTables,
        gpus: GpuSet,
        kinds: &[GpuSet],
        size: usize,
        halves: &[GpuSet],
        room: usize,
    ) -> Self {
        let all = || kinds.iter().flat_map(|kind| subsets(*kind, size));
        let first: Vec<GpuSet> = kinds.iter().flat_map(|kind| divided(tables, *kind, size)).collect();
        let mut candidates: Vec<GpuSet> = all().take(MOST_SETS + 1).collect();
        if candidates.len() > MOST_SETS {
            let is_of_a_kind = |set: &GpuSet| kinds.iter().any(|kind| set.without(*kind).is_empty());
            let unions = halves.iter().enumerate().flat_map(|(at, one)| {
                halves.iter().skip(at + 1).map(|other| one.union(*other)).filter(|union| union.len() == size)
            });
            candidates = unions.filter(is_of_a_kind).chain(first.iter().copied()).collect();
            candidates.sort_unstable();
            candidates.dedup();
        }
        let mut sets: Vec<(Values, GpuSet)> =
            candidates.into_iter().map(|set| (tables.worth_beside(set, gpus.without(set)), set)).collect();
        sets.sort_by(|(a, one), (b, other)| b.cmp(a).then_with(|| other.by_list(*one)));
        let divisions = divisions(&sets, first, room);
        Self { sets, divisions, taken: 0 }
    }

    /// The sets that sets of twice the size are made of.
    fn halves(&self) -> Vec<GpuSet> {
        self.divisions.iter().flatten().copied().take(MOST_HALVES).collect()
    }

    /// The sets that there is room for, the best first, with their tiers among all.
    fn ranked(&self, are_exact: bool) -> Vec<RankedSet> {
        let taken: Vec<GpuSet> = self.divisions.iter().take(self.taken).flatten().copied().collect();
        let is_uniform = self
            .sets
            .iter()
            .all(|(values, _)| self.sets.first().is_some_and(|(first, _)| first.collective == values.collective));
        let carries = |values: &Values| (values.collective, if is_uniform { values.closeness } else { 0 });
        let mut tiers: Vec<_> = self.sets.iter().map(|(values, _)| carries(values)).collect();
        tiers.sort_unstable_by(|a, b| b.cmp(a));
        tiers.dedup();
        let published = self.sets.iter().filter(|(_, set)| taken.contains(set));
        let ranked = published.map(|(values, set)| RankedSet {
            gpus: *set,
            tier: tiers.partition_point(|tier| *tier > carries(values)) + 1,
            all_reduce: are_exact.then_some(values.collective),
        });
        ranked.collect()
    }
}

/// The engine's own division of GPUs into disjoint sets: the best set, then the best of what is left.
fn divided(tables: &AllocationTables, mut gpus: GpuSet, size: usize) -> Vec<GpuSet> {
    let mut sets = Vec::new();
    while gpus.len() >= size {
        let best = tables.best_of(gpus, size);
        if best.is_empty() {
            break;
        }
        gpus = gpus.without(best);
        sets.push(best);
    }
    sets
}

/// Sets as ways to divide the GPUs: `first`, and then of the sets that are left the best ones that are disjoint, until
/// there are `enough` sets.
fn divisions(sets: &[(Values, GpuSet)], first: Vec<GpuSet>, enough: usize) -> Vec<Vec<GpuSet>> {
    let mut left: Vec<GpuSet> = sets.iter().map(|(_, set)| *set).filter(|set| !first.contains(set)).collect();
    let mut count = first.len();
    let mut divisions: Vec<Vec<GpuSet>> = Vec::from([first]);
    while count < enough && !left.is_empty() {
        let mut members = GpuSet::default();
        let (division, rest): (Vec<GpuSet>, Vec<GpuSet>) = left.into_iter().partition(|set| {
            let is_disjoint = set.intersection(members).is_empty();
            if is_disjoint {
                members = members.union(*set);
            }
            is_disjoint
        });
        count += division.len();
        divisions.push(division);
        left = rest;
    }
    divisions
}
