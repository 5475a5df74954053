//! The values of the GPUs that stay free, for every set.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::collective::{at, by_set};
use super::set::{GpuSet, subsets};
use crate::topology::{Gpu, NodeTopology};

/// The job sizes for which free GPUs are valued.
pub(super) const GROUPS: [usize; 3] = [2, 4, 8];

/// The value of one group as good as the machine's best, in thousandths.
pub(super) const WHOLE: u64 = 1_000;

/// Computes the value of every set R of free GPUs: the sum over the group sizes j of `j * P(j, R)`. P(j, R) is the
/// largest total value of disjoint groups of j GPUs of R. A group G has the value `1000 * collective(G) / top(j)`,
/// rounded down; `top(j)` is the machine's best collective of j GPUs.
pub(super) fn table(gpus: usize, collective: &[u32], top: impl Fn(usize) -> u32) -> Vec<u32> {
    let mut remaining = vec![0; 1 << gpus];
    for group in GROUPS.into_iter().filter(|group| *group <= gpus) {
        let packed = packing(gpus, group, collective, top(group));
        let weight = u32::try_from(group).unwrap_or(0);
        for (total, packed) in remaining.iter_mut().zip(packed) {
            *total += weight * packed;
        }
    }
    remaining
}

/// The best collective of any `group` GPUs of a machine. `collective` has a row for each set.
pub(super) fn top(gpus: usize, collective: &[u32], group: usize) -> u32 {
    let all = GpuSet((1_u64 << gpus) - 1);
    subsets(all, group).map(|set| at(collective, set)).max().unwrap_or(0)
}

/// The largest total value of disjoint groups of `group` GPUs inside every set.
fn packing(gpus: usize, group: usize, collective: &[u32], top: u32) -> Vec<u32> {
    let value = |set: GpuSet| {
        let thousandths = u64::from(at(collective, set)) * WHOLE / u64::from(top.max(1));
        u32::try_from(thousandths).unwrap_or(0)
    };
    by_set(gpus, |set, packed| {
        // Either some GPU of the set is in no group ...
        let idle = set.places().map(|place| at(packed, set.without(GpuSet::of(place))));
        let mut best = idle.max().unwrap_or(0);
        // ... or every GPU is in a group: then the groups divide the set, and one of them has its lowest GPU.
        if set.len().is_multiple_of(group) {
            let lowest = set.lowest();
            for others in subsets(set.without(lowest), group - 1) {
                let taken = lowest.union(others);
                best = best.max(value(taken) + at(packed, set.without(taken)));
            }
        }
        best
    })
}

/// The smallest sum of ranks that a division into pairs has, for every set. One GPU of a set of odd size stays alone.
pub(super) fn distance_table(topology: &NodeTopology) -> Vec<u8> {
    by_set(topology.gpus().len(), |set, totals: &[u8]| {
        let lowest = set.lowest();
        let rest = set.without(lowest);
        let first = lowest.0.trailing_zeros() as usize;
        let paired = rest.places().map(|other| {
            at(totals, rest.without(GpuSet::of(other))).saturating_add(topology.rank(first, other).number())
        });
        let alone = (set.len() % 2 == 1).then(|| at(totals, rest));
        paired.chain(alone).min().unwrap_or(0)
    })
}

/// The [`room`] of every set.
pub(super) fn room_table(topology: &NodeTopology) -> Vec<u8> {
    let packages: Vec<GpuSet> = grouped(topology, |gpu| gpu.package).into_values().collect();
    (0..1_u64 << topology.gpus().len()).map(|row| room(&packages, GpuSet(row))).collect()
}

/// The number of GPUs of a set in whole groups that fit a package: over group sizes j and packages, the sum of
/// `members / j * j`, with each quotient rounded down. It is at most three times the set's size.
pub(super) fn room(packages: &[GpuSet], set: GpuSet) -> u8 {
    let whole = |group: usize| packages.iter().map(move |package| package.intersection(set).len() / group * group);
    u8::try_from(GROUPS.into_iter().flat_map(whole).sum::<usize>()).unwrap_or(u8::MAX)
}

/// Groups GPUs by a property, such as the package. GPUs without the property are left out.
pub(super) fn grouped<K: Ord>(topology: &NodeTopology, key: impl Fn(&Gpu) -> Option<K>) -> BTreeMap<K, GpuSet> {
    let mut sets: BTreeMap<K, GpuSet> = BTreeMap::new();
    for (place, gpu) in topology.gpus().iter().enumerate() {
        if let Some(key) = key(gpu) {
            sets.entry(key).or_default().insert(place);
        }
    }
    sets
}
