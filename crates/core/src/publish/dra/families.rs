//! Tiered groups: for jobs of 2, 4 and 8 GPUs the best sets of the node, as attributes by which a claim finds them.
//!
//! All sets of a size, best first; sets that carry the same are a tier. Sets of one tier overlap, and a GPU has one
//! value for an attribute: a tier is split into families, each of disjoint sets. A family is an attribute (`quad1a`:
//! of 4 GPUs, the first tier, its first family) by which a GPU names the set that it is in. Which GPUs are free
//! changes none of it.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use crate::allocation::{AllocationTables, GpuSet, Values, subsets};

/// A size of group that is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSize {
    /// GPUs in a set.
    pub gpus: usize,
    /// What its attributes begin with.
    pub word: &'static str,
    /// The most families of each tier. A claim lists an alternative for each and one for any GPUs, and takes 8
    /// (`resource.k8s.io/v1`, `FirstAvailableDeviceRequestMaxSize`).
    tiers: [usize; 3],
}

/// The sizes: what jobs ask for. Pairs have up to three best partners (GPUs of a package), and a mesh two by two
/// kinds of link; what is best for four is rare, and what comes third frequent.
pub const SIZES: [GroupSize; 3] = [
    GroupSize { gpus: 2, word: "pair", tiers: [3, 2, 2] },
    GroupSize { gpus: 4, word: "quad", tiers: [1, 2, 4] },
    GroupSize { gpus: 8, word: "octet", tiers: [1, 2, 4] },
];

/// The most families of a node, of all sizes: 32 attributes and capacities of a device, less those that a GPU has
/// anyway.
const MOST: usize = 11;

/// Sets that are valued for one size, at most: of more (eights of 17 GPUs) there is no family.
const MOST_SETS: usize = 1 << 14;

/// Sets that are tried for one family, at most: far more than 16 GPUs need. Then the largest so far counts.
const MOST_STEPS: usize = 1 << 12;

/// Disjoint sets of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// The attribute's name, such as `quad1a`.
    pub name: String,
    /// The sets, by their first members.
    pub sets: Vec<GpuSet>,
}

impl GroupSize {
    /// The names of all families of this size that a node may have, the best first.
    pub fn names(self) -> impl Iterator<Item = String> {
        let tiers = (1..).zip(self.tiers);
        tiers.flat_map(move |(tier, families)| {
            letters(families).map(move |letter| format!("{}{tier}{letter}", self.word))
        })
    }

    /// The smallest size that so many GPUs fit in.
    pub fn holding(gpus: usize) -> Option<Self> {
        SIZES.into_iter().find(|size| gpus <= size.gpus)
    }
}

fn letters(many: usize) -> impl Iterator<Item = char> {
    ('a'..='z').take(many)
}

/// The families of a node: by size, tier and letter. A size of which all sets are alike has none.
pub fn families(tables: &AllocationTables) -> Vec<Family> {
    let mut ranked: Vec<((usize, usize, usize), Family)> = Vec::new();
    for (number, size) in SIZES.into_iter().enumerate() {
        for (tier, sets) in tiers(tables, size.gpus).into_iter().enumerate() {
            let Some(most) = size.tiers.get(tier) else { break };
            let mut left = sets;
            for (at, letter) in letters(*most).enumerate() {
                let family = disjoint(&left, tables.topology().gpus().len() / size.gpus);
                if family.is_empty() {
                    break;
                }
                left.retain(|set| !family.contains(set));
                let name = format!("{}{}{letter}", size.word, tier + 1);
                ranked.push(((tier, at, number), Family { name, sets: family }));
            }
        }
    }
    // Where there are too many, the last ones of the last tiers go.
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.truncate(MOST);
    ranked.sort_by_key(|((tier, at, number), _)| (*number, *tier, *at));
    ranked.into_iter().map(|(_, family)| family).collect()
}

/// The sets of a size by tier, the best first, but for the last tier: any GPUs are as good as those. Within a tier
/// the better sets by all values come first.
fn tiers(tables: &AllocationTables, size: usize) -> Vec<Vec<GpuSet>> {
    let gpus = tables.topology().gpus().len();
    let all: GpuSet = (0..gpus).collect();
    if subsets(all, size).take(MOST_SETS + 1).count() > MOST_SETS {
        return Vec::new();
    }
    let mut sets: Vec<(Values, GpuSet)> = subsets(all, size).map(|set| (tables.worth(set), set)).collect();
    // Of a set by itself: what stays free beside it is the scheduler's business.
    let worth = |values: &Values| (values.collective, values.pairs, values.closeness, values.nics);
    sets.sort_by(|(a, first), (b, second)| worth(b).cmp(&worth(a)).then_with(|| second.by_list(*first)));
    // Where NVLink carries the same for all, the nearer ones are better.
    let is_uniform =
        sets.first().map(|(values, _)| values.collective) == sets.last().map(|(values, _)| values.collective);
    let carries = |values: &Values| (values.collective, if is_uniform { values.closeness } else { 0 });
    let mut by_tier: BTreeMap<_, Vec<GpuSet>> = BTreeMap::new();
    for (values, set) in &sets {
        by_tier.entry(carries(values)).or_default().push(*set);
    }
    by_tier.pop_first();
    by_tier.into_values().rev().collect()
}

/// The most disjoint ones of these sets, `enough` at most; of several such families the one with the first sets.
fn disjoint(sets: &[GpuSet], enough: usize) -> Vec<GpuSet> {
    let mut best: Vec<GpuSet> = Vec::new();
    // A family, its members, and the first set that may still join it.
    let mut open = vec![(Vec::new(), GpuSet::default(), 0)];
    let mut steps = 0;
    while let Some((family, members, from)) = open.pop() {
        steps += 1;
        if family.len() > best.len() {
            best.clone_from(&family);
        }
        if best.len() >= enough || steps > MOST_STEPS {
            break;
        }
        let rest = sets.iter().enumerate().skip(from);
        if let Some((at, set)) = rest.into_iter().find(|(_, set)| set.intersection(members).is_empty()) {
            // Last in, first looked at: with the set before without it.
            open.push((family.clone(), members, at + 1));
            let mut joined: Vec<GpuSet> = family;
            joined.push(*set);
            open.push((joined, members.union(*set), at + 1));
        }
    }
    best.sort_by_key(|set| set.lowest());
    best
}
