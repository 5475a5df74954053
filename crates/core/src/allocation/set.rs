//! A set of GPUs as bits, in the order of their PCI addresses; and [`Groups`], the named sets that belong together.
//!
//! Labels and resource slices are made from groups. A group may have one GPU. Each GPU is in exactly one group of each
//! kind, except that a GPU without NVLinks, or of unknown NUMA node or package, is in no such group.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::cmp::Ordering;

use super::AllocationPolicy;
use super::choose::Question;
use super::remaining::grouped;
use super::tables::AllocationTables;
use crate::topology::{NumaNodeId, PackageId, Rank};

/// A set of up to 64 GPUs; bit i is the GPU at place i of the topology.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuSet(pub u64);

impl GpuSet {
    /// The set of one GPU; empty for a place beyond 63.
    pub fn of(place: usize) -> Self {
        Self(u32::try_from(place).ok().and_then(|place| 1_u64.checked_shl(place)).unwrap_or(0))
    }

    /// Adds the GPU at a place.
    pub(super) fn insert(&mut self, place: usize) {
        *self = self.union(Self::of(place));
    }

    /// The number of members.
    pub fn len(self) -> usize {
        // At most 64.
        self.0.count_ones() as usize
    }

    /// Returns true if there is no member.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns true if `place` is a member.
    pub fn contains(self, place: usize) -> bool {
        !self.intersection(Self::of(place)).is_empty()
    }

    /// The members of either.
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The members that both have.
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The members that are not in `other`.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The lowest member as a set of its own; empty for the empty set.
    pub fn lowest(self) -> Self {
        Self(self.0 & self.0.wrapping_neg())
    }

    /// The places of the members, ascending.
    pub fn places(self) -> impl Iterator<Item = usize> {
        // Ends at the empty set; trailing_zeros of the others is at most 63.
        core::iter::successors(Some(self), |set| Some(set.without(set.lowest())))
            .take_while(|set| !set.is_empty())
            .map(|set| set.0.trailing_zeros() as usize)
    }

    /// Compares the sorted lists of members of two sets of one size: `Greater` is the
    /// lexicographically smaller list, which is preferred.
    pub(crate) fn by_list(self, other: Self) -> Ordering {
        let lowest_difference = Self(self.0 ^ other.0).lowest();
        self.intersection(lowest_difference).0.cmp(&other.intersection(lowest_difference).0)
    }
}

impl FromIterator<usize> for GpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(places: I) -> Self {
        places.into_iter().fold(Self::default(), |set, place| set.union(Self::of(place)))
    }
}

/// All subsets of `of` with `size` members, each once, in the order of their bits as a number.
///
/// Each step finds the next number with as many ones (Gosper's hack), where only the members of `of` count as digits.
pub(crate) fn subsets(of: GpuSet, size: usize) -> impl Iterator<Item = GpuSet> {
    let lowest_free = move |set: GpuSet| of.without(set).lowest();
    let first = (0..size).fold(GpuSet::default(), |set, _| set.union(lowest_free(set)));
    let next = move |set: &GpuSet| {
        // Adding the lowest member carries over the members above it, and over the gaps between members.
        let carried = GpuSet((set.0 | !of.0).wrapping_add(set.lowest().0)).intersection(of);
        // One of the members that are gone was carried; the others begin again at the lowest places.
        let gone = set.without(carried).places().skip(1);
        (!carried.is_empty()).then(|| gone.fold(carried, |set, _| set.union(lowest_free(set))))
    };
    core::iter::successors((size <= of.len()).then_some(first), next)
}

/// The connected parts of the graph of `gpus` vertices that `joined` makes, in the order of their first members.
pub(crate) fn components(gpus: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<GpuSet> {
    let mut parts: Vec<GpuSet> = Vec::new();
    for gpu in 0..gpus {
        let near: GpuSet = (0..gpu).filter(|other| joined(gpu, *other)).collect();
        let (joined, apart): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| !part.intersection(near).is_empty());
        parts = apart;
        parts.push(joined.into_iter().fold(GpuSet::of(gpu), GpuSet::union));
    }
    parts.sort_by_key(|part| part.lowest());
    parts
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_are_complete_and_unique() {
        for members in [0_u64, 0b1, 0b1011, 0b1111_1111, 0b1010_0110_0001_1101, 0xFF00_0000_0000_000F] {
            let of = GpuSet(members);
            for size in 0..=of.len() + 1 {
                let mut seen: Vec<u64> = subsets(of, size).map(|set| set.0).collect();
                let count = seen.len();
                assert!(seen.iter().all(|set| set & !members == 0 && GpuSet(*set).len() == size));
                seen.sort_unstable();
                seen.dedup();
                let choose = (0..size).fold(1_u128, |n, i| n * (of.len().saturating_sub(i)) as u128 / (i as u128 + 1));
                assert_eq!((seen.len() as u128, count as u128), (choose, choose), "{members:b} {size}");
            }
        }
        assert_eq!(subsets(GpuSet(u64::MAX), 64).count(), 1);
        assert_eq!(subsets(GpuSet(u64::MAX), 63).count(), 64);
    }

    #[test]
    fn smaller_sorted_list_is_preferred() {
        let set = |places: &[usize]| places.iter().copied().collect::<GpuSet>();
        assert_eq!(set(&[0, 7]).by_list(set(&[1, 2])), Ordering::Greater);
        assert_eq!(set(&[0, 3]).by_list(set(&[0, 2])), Ordering::Less);
        assert_eq!(set(&[4, 5]).by_list(set(&[4, 5])), Ordering::Equal);
    }
}
