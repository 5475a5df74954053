//! Tiered groups: attributes by which a claim finds the best sets of the node for jobs of 2, 4 and 8 GPUs
//! ([`GroupSize`]).
//!
//! All sets of a size are sorted, best first; equally good sets are a tier. A *group* consists of GPUs of which any
//! `size` are a set of this tier or of a better one: two GPUs of an NVLink bridge, or all GPUs of a package whose
//! GPUs are alike. Groups overlap, but a GPU has one value for an attribute. So a tier is split into *families*, each
//! of disjoint groups. A family is an attribute (`quad1a`: of 4 GPUs, the first tier, its first family), and its value
//! on a GPU names the GPU's group. None of this depends on the GPUs that are free now.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::cmp::Reverse;

use crate::allocation::{AllocationTables, GpuSet, Values, subsets};
use crate::topology::PciAddress;

/// The most families of a node, of all sizes: the 32 attributes and capacities that a device may have, less the others
/// of a GPU.
const MAX_FAMILIES: usize = 10;

/// The most sets that are valued for one size. A size with more (eights of 17 GPUs) has no family.
const MAX_SETS: usize = 1 << 14;

/// The limit of `steps * left.len()` in [`disjoint_groups`]; 16 GPUs need less. At the limit it returns the best family
/// found so far.
const MAX_STEPS: usize = 1 << 20;

/// The most states of a node by which families are compared: all states of up to 12 GPUs.
const MAX_STATES: usize = 1 << 12;

/// A family gets no attribute if claims take it in at most one of `RARE` states, unless it is the first of its size.
const RARE: usize = 32;

/// Disjoint groups of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// The attribute's name, such as `quad1a`.
    pub name: String,
    /// The number of GPUs of the claims that the family is for.
    pub size: usize,
    /// The groups, by their first members.
    pub groups: Vec<Group>,
}

/// GPUs of which any `size` are a good set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The attribute's value: the least PCI address of the members. It stays when that GPU is lost.
    pub name: PciAddress,
    /// The members, by their places.
    pub gpus: GpuSet,
}

/// A family, with the facts that decide whether it gets an attribute.
struct Candidate {
    family: Family,
    /// True for the first family of its size, which is always published: otherwise a claim for groups only would find
    /// none on this node.
    is_first: bool,
    /// The number of states in which a claim takes it, times the number of worse tiers (at least 1).
    gain: usize,
}

/// The families of a node: by size, tier and letter. If all sets of a size are alike, all GPUs are one group.
pub fn families(tables: &AllocationTables) -> Vec<Family> {
    let candidates = GroupSize::ALL.into_iter().flat_map(|size| of_size(tables, size));
    let mut candidates: Vec<(usize, Candidate)> = candidates.enumerate().collect();
    // The sort is stable: of equal families the first is kept.
    candidates.sort_by_key(|(_, candidate)| Reverse((candidate.is_first, candidate.gain)));
    candidates.truncate(MAX_FAMILIES);
    candidates.sort_by_key(|(at, _)| *at);
    candidates.into_iter().map(|(_, candidate)| candidate.family).collect()
}

/// The families of a size, the best first.
fn of_size(tables: &AllocationTables, size: GroupSize) -> Vec<Candidate> {
    let tiers = tiers(tables, size.gpus());
    let (gpus, worst) = (tables.topology().gpus().len(), tiers.len().saturating_sub(1));
    let mut unserved: Vec<GpuSet> = states(gpus).filter(|free| free.len() >= size.gpus()).collect();
    let max_rare = unserved.len() / RARE;
    let (mut candidates, mut good) = (Vec::new(), BTreeSet::new());
    for ((tier, sets), max_families) in (0..).zip(tiers).zip(size.tiers()) {
        // Any GPUs are at least as good as the sets of the last tier.
        if tier == worst && tier > 0 {
            break;
        }
        good.extend(sets.iter().copied());
        let mut left = sets;
        for at in 0..max_families {
            left.retain(|set| !candidates.iter().any(|known: &Candidate| known.family.has(*set)));
            let groups = disjoint_groups(&left, &good, size.gpus(), gpus);
            if groups.is_empty() {
                break;
            }
            let name = |gpus: GpuSet| Some(tables.topology().gpus().get(gpus.places().next()?)?.pci);
            let groups = groups.into_iter().filter_map(|gpus| Some(Group { name: name(gpus)?, gpus })).collect();
            let family = Family { name: size.name(tier, at), size: size.gpus(), groups };
            let before = unserved.len();
            unserved.retain(|free| !family.serves(*free));
            let (served, is_first) = (before - unserved.len(), tier == 0 && at == 0);
            if served <= max_rare && !is_first {
                break;
            }
            candidates.push(Candidate { family, is_first, gain: served * worst.saturating_sub(tier).max(1) });
        }
    }
    candidates
}

impl Family {
    /// Returns true if one of its groups has all of these GPUs.
    fn has(&self, set: GpuSet) -> bool {
        self.groups.iter().any(|group| set.without(group.gpus).is_empty())
    }

    /// Returns true if one of its groups has enough free GPUs.
    fn serves(&self, free: GpuSet) -> bool {
        self.groups.iter().any(|group| group.gpus.intersection(free).len() >= self.size)
    }
}

/// The sets of GPUs that may be free on a node: all of them, or as many as the limit allows, spread evenly (by a linear
/// congruential generator that is the same in each release).
pub(super) fn states(gpus: usize) -> impl Iterator<Item = GpuSet> {
    let all: GpuSet = (0..gpus).collect();
    let next = move |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    let some = core::iter::successors(Some(1), next).map(move |state| GpuSet(state.rotate_left(32)).intersection(all));
    let every = (0..=gpus).flat_map(move |size| subsets(all, size));
    let is_small = 1_usize.checked_shl(u32::try_from(gpus).unwrap_or(u32::MAX)).is_some_and(|all| all <= MAX_STATES);
    every.take(if is_small { MAX_STATES } else { 0 }).chain(some.take(if is_small { 0 } else { MAX_STATES }))
}

/// The sets of a size by tier, the best first. Within a tier the better sets by all values come first.
fn tiers(tables: &AllocationTables, size: usize) -> Vec<Vec<GpuSet>> {
    let gpus = tables.topology().gpus().len();
    let all: GpuSet = (0..gpus).collect();
    if subsets(all, size).take(MAX_SETS + 1).count() > MAX_SETS {
        return Vec::new();
    }
    let mut sets: Vec<(Values, GpuSet)> = subsets(all, size).map(|set| (tables.worth(set), set)).collect();
    // The values of a set by itself: the scheduler decides which GPUs stay free.
    let worth = |values: &Values| (values.collective, values.pairs, values.closeness, values.nics);
    sets.sort_by(|(a, first), (b, second)| worth(b).cmp(&worth(a)).then_with(|| second.by_list(*first)));
    // If NVLink is the same between all GPUs, the nearer ones are better.
    let is_uniform =
        sets.first().map(|(values, _)| values.collective) == sets.last().map(|(values, _)| values.collective);
    let tier_key = |values: &Values| (values.collective, if is_uniform { values.closeness } else { 0 });
    let mut by_tier: BTreeMap<_, Vec<GpuSet>> = BTreeMap::new();
    for (values, set) in &sets {
        by_tier.entry(tier_key(values)).or_default().push(*set);
    }
    by_tier.into_values().rev().collect()
}

/// Finds the disjoint groups that contain the most sets of `left`, the sets that no family has yet, the best first. Of
/// several families with equally many sets it takes the one with the first groups.
fn disjoint_groups(left: &[GpuSet], good: &BTreeSet<GpuSet>, size: usize, gpus: usize) -> Vec<GpuSet> {
    // Groups, grown from the best set on; they may overlap.
    let mut groups: Vec<GpuSet> = Vec::new();
    for set in left {
        if !groups.iter().any(|group| set.without(*group).is_empty()) {
            groups.push(grown(*set, good, size, gpus));
        }
    }
    let (mut best, mut best_sets): (Vec<GpuSet>, usize) = (Vec::new(), 0);
    let steps = MAX_STEPS / left.len().max(1);
    // A family, its members, the number of its sets, and the first group that may still join it.
    let mut open = vec![(Vec::new(), GpuSet::default(), 0, 0)];
    for _ in 0..steps {
        let Some((family, members, sets, from)) = open.pop() else { break };
        if sets > best_sets {
            best.clone_from(&family);
            best_sets = sets;
        }
        if best_sets == left.len() {
            break;
        }
        // The part of a group without the family's members is a group too.
        let mut rest = (from..).zip(groups.iter().skip(from));
        let joining = rest.find_map(|(at, group)| {
            let group = group.without(members);
            let new = left.iter().filter(|set| set.without(group).is_empty()).count();
            (group.len() >= size && new > 0).then_some((at, group, new))
        });
        if let Some((at, group, new)) = joining {
            // The last pushed is tried first: the family with the group comes before the family without it.
            open.push((family.clone(), members, sets, at + 1));
            let mut joined: Vec<GpuSet> = family;
            joined.push(group);
            open.push((joined, members.union(group), sets + new, at + 1));
        }
    }
    best.sort_by_key(|group| group.lowest());
    best
}

/// Grows a set by each GPU, in the order of their places, with which any `size` of the group are still good.
fn grown(set: GpuSet, good: &BTreeSet<GpuSet>, size: usize, gpus: usize) -> GpuSet {
    let mut group = set;
    for place in (0..gpus).filter(|place| !set.contains(*place)) {
        let gpu = GpuSet::of(place);
        if subsets(group, size - 1).all(|others| good.contains(&others.union(gpu))) {
            group = group.union(gpu);
        }
    }
    group
}

/// A number of GPUs for which groups are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSize(usize);

impl GroupSize {
    /// The sizes that jobs ask for, ascending.
    pub const ALL: [Self; 3] = [Self(2), Self(4), Self(8)];

    /// The smallest size that holds so many GPUs.
    pub fn holding(gpus: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|size| gpus <= size.0)
    }

    /// The number of GPUs.
    pub fn gpus(self) -> usize {
        self.0
    }

    /// The most attributes of each tier, seven together. A claim that lists all attributes has an alternative for each,
    /// and one for any GPUs; it may have 8 (`resource.k8s.io/v1`, `FirstAvailableDeviceRequestMaxSize`). A mesh has
    /// pairs by two kinds of link. For four GPUs the best tier is rare and the third is frequent.
    pub(super) fn tiers(self) -> [usize; 3] {
        if self.0 == 2 { [3, 2, 2] } else { [1, 2, 4] }
    }

    /// The attributes of all groups of this size that a node may have, the best first: `quad1a`, `quad2a`, `quad2b`,
    /// ...
    pub fn names(self) -> impl Iterator<Item = String> {
        self.named(self.tiers())
    }

    /// The attributes that a claim for any machine lists. On a node where too few GPUs of its groups are free, each
    /// alternative costs the scheduler as much as a whole claim without alternatives (docs/scale.md). So the list has
    /// the best tiers only, without those that no built-in machine has or that gain little in a cluster.
    pub fn usual_names(self) -> impl Iterator<Item = String> {
        self.named(if self.0 == 2 { [2, 1] } else { [1, 1] })
    }

    /// The attributes of this many families of each tier.
    fn named<const TIERS: usize>(self, families: [usize; TIERS]) -> impl Iterator<Item = String> {
        (0..).zip(families).flat_map(move |(tier, families)| (0..families).map(move |at| self.name(tier, at)))
    }

    /// The attribute of one family, from its tier (0 is the best) and its number in the tier: `pair1a`.
    pub(super) fn name(self, tier: usize, at: usize) -> String {
        let letter = ('a'..='z').nth(at).unwrap_or('z');
        let set = match self.0 {
            2 => "pair",
            4 => "quad",
            _ => "octet",
        };
        format!("{set}{}{letter}", tier + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_has_room_for_all_names_of_a_size() {
        for size in GroupSize::ALL {
            let names: Vec<String> = size.names().collect();
            assert_eq!(names.len(), 7, "{names:?}");
            // An attribute's name is a C identifier of at most 32 characters.
            assert!(names.iter().all(|name| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric())));
        }
        assert_eq!(GroupSize::ALL.map(|size| size.names().next().unwrap()), ["pair1a", "quad1a", "octet1a"]);
        let usual = GroupSize::ALL.map(|size| size.usual_names().collect::<Vec<_>>().join(" "));
        assert_eq!(usual, ["pair1a pair1b pair2a", "quad1a quad2a", "octet1a octet2a"]);
        assert!(
            GroupSize::ALL.iter().all(|size| size.usual_names().all(|name| size.names().any(|other| other == name)))
        );
    }

    #[test]
    fn smallest_size_that_fits_holds_gpus() {
        let held = |gpus| GroupSize::holding(gpus).map(GroupSize::gpus);
        assert_eq!([1, 2, 3, 8, 9].map(held), [Some(2), Some(2), Some(4), Some(8), None]);
    }
}
