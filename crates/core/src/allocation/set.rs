//! A set of GPUs as bits, in the order of their PCI addresses.

use crate::prelude::*;
use core::cmp::Ordering;

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
        // Ends before the empty set, so trailing_zeros is at most 63.
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

/// The neighbours of each of `gpus` vertices in the graph that `joined` makes.
pub(crate) fn neighbours(gpus: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<GpuSet> {
    (0..gpus).map(|a| (0..gpus).filter(|&b| a != b && joined(a, b)).collect()).collect()
}

/// The connected parts of the graph of `gpus` vertices that `joined` makes, in the order of their first members.
pub(crate) fn components(gpus: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<GpuSet> {
    let mut parts: Vec<GpuSet> = Vec::new();
    for gpu in 0..gpus {
        let near: GpuSet = (0..gpu).filter(|other| joined(gpu, *other)).collect();
        let (linked, apart): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| !part.intersection(near).is_empty());
        parts = apart;
        parts.push(linked.into_iter().fold(GpuSet::of(gpu), GpuSet::union));
    }
    parts.sort_by_key(|part| part.lowest());
    parts
}
