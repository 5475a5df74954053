//! Exact claims: claims for a number of GPUs with one constraint and without alternatives.
//!
//! They are for schedulers that do not read alternatives. The scheduler gives such a claim GPUs of one group of one
//! attribute, or lets it wait. [`of`] computes for each attribute of a node what the claim gets, and how often it
//! waits, over the states of the node. The scheduler's rule for one constraint is: the first free GPU in published
//! order whose group has enough free GPUs, and the next free ones of that group.

use crate::prelude::*;

use super::families::{Family, states};
use super::layout::GpuLayout;
use crate::allocation::{AllocationTables, GpuSet, subsets};

/// The attribute of NVLink domains, the only one for claims of more than 8 GPUs.
pub const NVLINK_DOMAIN: &str = "nvlinkDomain";

/// The most sets of an attribute's groups whose collectives are computed.
const MAX_SETS: usize = 1 << 14;

/// A share of 1, in per mille.
const WHOLE: u64 = 1000;

/// The groups of one attribute. A GPU is its place in published order, the order in which the scheduler tries GPUs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupAttribute {
    /// The attribute's name, such as `quad1a`.
    pub name: String,
    /// The groups; no GPU is in two of them.
    pub groups: Vec<GpuSet>,
}

/// A claim for some GPUs by one attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExactClaim {
    /// The attribute's name.
    pub name: String,
    /// The number of such claims that fit on the idle node.
    pub sets: usize,
    /// The least collective that such a claim gets, MB/s; `None` where it is unknown.
    pub promised: Option<u64>,
    /// The number of compared states of the node with enough free GPUs.
    pub states: u64,
    /// The number of those states in which the claim waits.
    pub waits: u64,
    /// The mean of `1000 * collective / best` over the states in which the claim does not wait: the collective of its
    /// GPUs, and the best one of as many free GPUs.
    pub share: Option<u64>,
    /// The same mean of a claim with alternatives, over the states in which this claim waits.
    pub forgone: Option<u64>,
}

impl ExactClaim {
    /// The share of states in which the claim waits although enough GPUs are free: `1000 * waits / states`.
    pub fn waits_per_mille(&self) -> u64 {
        (self.waits * WHOLE).checked_div(self.states).unwrap_or(0)
    }
}

impl GroupAttribute {
    /// The attributes of a node's GPUs: those of each size, the best first, then the NVLink domains.
    pub fn all_of(layout: &GpuLayout) -> Vec<Self> {
        let place = |gpu: usize| layout.order.iter().position(|other| *other == gpu);
        let published = |set: GpuSet| set.places().filter_map(place).collect::<GpuSet>();
        let sets = |family: &Family| family.groups.iter().map(|group| group.gpus).collect();
        let families = layout.families.iter().map(|family| (family.name.clone(), sets(family)));
        let attributes = families.chain([(NVLINK_DOMAIN.to_owned(), layout.nvlink_domains.clone())]);
        let attributes = attributes.filter(|(_, sets): &(String, Vec<GpuSet>)| !sets.is_empty());
        attributes.map(|(name, sets)| Self { name, groups: sets.into_iter().map(published).collect() }).collect()
    }

    /// A node's `all` GPUs as one group, from which a claim without a constraint takes its GPUs.
    pub fn any(all: usize) -> Self {
        Self { name: "any".to_owned(), groups: vec![(0..all).collect()] }
    }

    /// Returns, for each state of a node of `all` GPUs with at least `gpus` free ones, true if one group has enough of
    /// them. The states are the same for all attributes.
    pub fn serves(&self, all: usize, gpus: usize) -> Vec<bool> {
        let free = states(all).filter(|free| free.len() >= gpus);
        free.map(|free| self.chosen(free, gpus).is_some()).collect()
    }

    /// The GPUs that a claim gets: the first in published order of a group with enough free GPUs.
    fn chosen(&self, free: GpuSet, gpus: usize) -> Option<GpuSet> {
        let enough = self.groups.iter().map(|group| group.intersection(free)).filter(|group| group.len() >= gpus);
        let first = enough.min_by_key(|group| group.lowest())?;
        Some(first.places().take(gpus).collect())
    }
}

/// The tables that value a node's sets, and the order in which its GPUs are published.
pub type Valued<'a> = (&'a AllocationTables, &'a GpuLayout);

/// The collective of a set of GPUs in published order, MB/s.
fn collective((tables, layout): Valued<'_>, published: GpuSet) -> Option<u64> {
    tables.collective(layout.places(published))
}

/// The mean over states.
fn mean(shares: &[u64]) -> Option<u64> {
    shares.iter().sum::<u64>().checked_div(shares.len() as u64)
}

/// A state of the node: its free GPUs, their best collective, and the share of it that a claim with alternatives gets.
struct State {
    free: GpuSet,
    best: Option<u64>,
    alternatives: Option<u64>,
}

/// Computes the claims for `gpus` of a node's `all` GPUs: one for each attribute with a large enough group, in the
/// order of the attributes, compared with a claim that has `alternatives`. Without `valued` (a node that is known by
/// its slices alone) the collectives are unknown.
pub fn of(
    attributes: &[GroupAttribute],
    alternatives: &[GroupAttribute],
    (all, gpus): (usize, usize),
    valued: Option<Valued<'_>>,
) -> Vec<ExactClaim> {
    let share = |set: GpuSet, best: Option<u64>| {
        let got = collective(valued?, set)?;
        Some((got * WHOLE).checked_div(best?).unwrap_or(WHOLE))
    };
    let state = |free: GpuSet| {
        let best = valued.and_then(|(tables, layout)| tables.best_collective(layout.places(free), gpus));
        let by_group = alternatives.iter().find_map(|other| other.chosen(free, gpus));
        let other = by_group.unwrap_or_else(|| free.places().take(gpus).collect());
        State { free, best, alternatives: share(other, best) }
    };
    let states: Vec<State> = states(all).filter(|free| free.len() >= gpus).map(state).collect();
    let claim = |attribute: &GroupAttribute| {
        let (mut waits, mut got, mut forgone) = (0, Vec::new(), Vec::new());
        for state in &states {
            match attribute.chosen(state.free, gpus) {
                Some(chosen) => got.extend(share(chosen, state.best)),
                None => {
                    waits += 1;
                    forgone.extend(state.alternatives);
                }
            }
        }
        ExactClaim {
            name: attribute.name.clone(),
            sets: attribute.groups.iter().map(|group| group.len().checked_div(gpus).unwrap_or(0)).sum(),
            promised: valued.and_then(|valued| promised(attribute, gpus, valued)),
            states: states.len() as u64,
            waits,
            share: mean(&got),
            forgone: mean(&forgone),
        }
    };
    attributes.iter().map(claim).filter(|claim| claim.sets > 0).collect()
}

/// The least collective of any `gpus` GPUs of one group, MB/s. `None` if it is unknown, or if there are too many sets.
pub fn promised(attribute: &GroupAttribute, gpus: usize, valued: Valued<'_>) -> Option<u64> {
    let sets = attribute.groups.iter().flat_map(|group| subsets(*group, gpus)).take(MAX_SETS + 1);
    let collectives: Vec<u64> = sets.map(|set| collective(valued, set)).collect::<Option<_>>()?;
    collectives.iter().min().copied().filter(|_| collectives.len() <= MAX_SETS)
}
