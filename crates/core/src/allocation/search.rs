//! The choice on a machine of more than 16 GPUs: by the same nine values, within a limited number of sets.
//!
//! First, GPUs that differ in nothing but their address form a class, and of a class the first ones are taken, so a
//! set is a count for each class. Second, if this leaves more than [`MAX_SETS`] sets, the search keeps only the widest
//! clusters that hold the request, because a set's first value is the width of its cluster. Third, if at most
//! [`MAX_SETS`] sets are left, the search compares all, and the answer is exact. Otherwise sets grow GPU by GPU, from
//! `must_include` and from whole clusters, and only the best few of each size grow further; the report marks the
//! answer as not exact.
//!
//! A mesh of NVLinks is not a tree of clusters, so the search is not exact for it. If a request may take few of its
//! GPUs, it gets tables of these GPUs alone.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::cmp::Reverse;

use super::choose::{Found, Question};
use super::remaining::GROUPS;
use super::report::AllocationReport;
use super::set::GpuSet;
use super::tables::SetTables;
use super::tree::{Tree, collective_of};
use crate::topology::NodeTopology;

/// The most sets that are valued for one request: 2 ms at half a microsecond each, the most that one set takes.
const MAX_SETS: u64 = 4_096;

/// The most GPUs of a mesh that get tables for one request.
pub(super) const MAX_TABLED_GPUS: usize = 10;

/// The most sets of one size that grow further.
const MAX_GROWN_SETS: u64 = 16;

/// The largest sets of a mesh whose exact collectives are computed at the end.
const MAX_REFINED_SIZE: usize = 8;

/// The number of best sets of a mesh whose exact collectives are computed at the end.
const MAX_REFINED_SETS: usize = 16;

/// Finds the best set for a request that can be met.
pub(super) fn answer(topology: &NodeTopology, tree: &Tree, question: &Question) -> AllocationReport {
    if !tree.exact && question.candidates().len() <= MAX_TABLED_GPUS {
        return of_few(topology, tree, question);
    }
    let search = Search { tree, question };
    let need = question.need();
    let is_refined = !tree.exact && question.size <= MAX_REFINED_SIZE;
    let mut best = Best { search: &search, limit: if is_refined { MAX_REFINED_SETS } else { 2 }, found: Vec::new() };
    let mut compared = 0;
    let mut is_complete = None;
    for regions in search.regions(need) {
        let classes = search.classes(&regions);
        let ways = classes.iter().map(|classes| ways(classes, need)).fold(0, u64::saturating_add);
        // Only a runner-up can lie beyond the widest clusters.
        is_complete.get_or_insert(ways <= MAX_SETS);
        let mut sets = Vec::new();
        if ways <= MAX_SETS {
            classes.iter().for_each(|classes| compose(classes, need, question.must, &mut sets));
        } else {
            sets = search.grow(&regions, &classes, need);
        }
        compared += best.add(&sets);
        if let Some(first) = best.found.first() {
            let others: Vec<GpuSet> = search.other_members(first.chosen, &classes).collect();
            compared += best.add(others.iter().filter(|set| !sets.contains(set)));
        }
        if best.found.len() > 1 {
            break;
        }
    }
    let mut found = best.found;
    if is_refined {
        for found in &mut found {
            found.values.collective = u64::from(collective_of(topology, found.chosen));
        }
        found.sort_by(|a, b| b.compare(a));
    }
    let mut found = found.into_iter();
    // The question's maker checks that there is a set, and the search finds one.
    let first = found.next().unwrap_or_else(|| search.value(GpuSet::default()));
    question.report(topology, first, found.next(), compared, is_complete == Some(true) && tree.exact)
}

/// Answers with tables for the request's GPUs alone. The answer is exact if the machine's best collective is known for
/// each group size that fits the GPUs that stay free.
fn of_few(topology: &NodeTopology, tree: &Tree, question: &Question) -> AllocationReport {
    let places: Vec<usize> = question.candidates().places().collect();
    let part = topology.restricted(&places);
    let inside = |set: GpuSet| -> GpuSet {
        places.iter().enumerate().filter(|(_, place)| set.contains(**place)).map(|(at, _)| at).collect()
    };
    let outside = |set: GpuSet| set.places().filter_map(|at| places.get(at).copied()).collect();
    let within = Question::of(inside(question.must), inside(question.available), question.size, question.policy);
    let mut report = within.compare_all(&part, &SetTables::new(&part, Some(tree)));
    (report.chosen, report.remains) = (outside(report.chosen), outside(report.remains));
    report.exact = GROUPS.into_iter().filter(|group| *group <= report.remains.len()).all(|group| tree.top(group).exact);
    report
}

struct Search<'a> {
    tree: &'a Tree,
    question: &'a Question,
}

/// The best of the sets compared so far.
struct Best<'a> {
    search: &'a Search<'a>,
    /// The most sets that are kept.
    limit: usize,
    /// The sets kept, the best first.
    found: Vec<Found>,
}

impl Best<'_> {
    /// Compares sets of one size with those kept. Returns the number of sets that were new.
    fn add<'s>(&mut self, sets: impl IntoIterator<Item = &'s GpuSet>) -> u64 {
        sets.into_iter().filter(|set| self.add_one(**set)).count() as u64
    }

    fn add_one(&mut self, chosen: GpuSet) -> bool {
        if self.found.len() == self.limit
            && let Some(last) = self.found.last()
            && self.search.tree.falls_behind(chosen, self.search.remains(chosen), &last.values)
        {
            return true;
        }
        let new = self.search.value(chosen);
        let place = self.found.partition_point(|found| found.compare(&new).is_gt());
        if self.found.get(place).is_some_and(|found| found.chosen == chosen) {
            return false;
        }
        self.found.insert(place, new);
        self.found.truncate(self.limit);
        true
    }
}

impl Search<'_> {
    fn value(&self, chosen: GpuSet) -> Found {
        Found { chosen, values: self.tree.values(chosen, self.remains(chosen)) }
    }

    fn remains(&self, chosen: GpuSet) -> GpuSet {
        self.question.available.without(chosen)
    }

    /// The clusters with room for the request, the widest first, and all GPUs last. Clusters of one width are one
    /// entry. A set that is in no cluster of an entry has a worse collective than the sets that are. All GPUs are
    /// the only entry if there are few sets, if one GPU is requested, or if the tree has no exact widths.
    fn regions(&self, need: usize) -> Vec<Vec<GpuSet>> {
        let Question { must, free, size, .. } = *self.question;
        let everything = vec![must.union(free)];
        let few = self.classes(&everything).iter().all(|classes| ways(classes, need) <= MAX_SETS);
        // One GPU has no peers, and the tree of a mesh is too coarse to leave anything out.
        if few || size < 2 || !self.tree.exact {
            return vec![everything];
        }
        let holds =
            |members: GpuSet| must.without(members).is_empty() && must.union(free.intersection(members)).len() >= size;
        let clusters = self.tree.bandwidths.clusters.iter().filter(|cluster| holds(cluster.members));
        let mut regions: BTreeMap<Reverse<u32>, Vec<GpuSet>> = BTreeMap::new();
        for cluster in clusters {
            regions.entry(Reverse(cluster.width)).or_default().push(cluster.members);
        }
        regions.into_values().chain([everything]).collect()
    }

    /// The members of each class that may be taken, for each region.
    fn classes(&self, regions: &[GpuSet]) -> Vec<Vec<GpuSet>> {
        let free = |region: GpuSet| {
            let classes = self.tree.classes.iter().map(move |class| class.intersection(region));
            classes.map(|class| class.intersection(self.question.free)).filter(|class| !class.is_empty()).collect()
        };
        regions.iter().map(|region| free(*region)).collect()
    }

    /// Grows sets of the requested size, from `must_include` and from `must_include` with a whole cluster.
    fn grow(&self, regions: &[GpuSet], classes: &[Vec<GpuSet>], need: usize) -> Vec<GpuSet> {
        let Question { must, free, size, .. } = *self.question;
        let inside = |set: GpuSet| regions.iter().any(|region| set.without(*region).is_empty());
        let seeds = self.tree.bandwidths.clusters.iter().map(|cluster| must.union(cluster.members.intersection(free)));
        let seeds = seeds.filter(|seed| seed.len() <= size && inside(*seed));
        let mut pools: BTreeMap<usize, BTreeSet<GpuSet>> = BTreeMap::new();
        for seed in seeds.chain([must]) {
            pools.entry(seed.len()).or_default().insert(seed);
        }
        let steps = need.max(1) * classes.iter().map(Vec::len).sum::<usize>().max(1);
        let limit = usize::try_from((MAX_SETS / steps as u64).clamp(1, MAX_GROWN_SETS)).unwrap_or(1);
        for len in must.len()..size {
            let mut best = Best { search: self, limit, found: Vec::new() };
            best.add(&pools.remove(&len).unwrap_or_default());
            let next = pools.entry(len + 1).or_default();
            for found in best.found {
                for class in classes.iter().flatten() {
                    let grown = found.chosen.union(class.without(found.chosen).lowest());
                    if grown != found.chosen && inside(grown) {
                        next.insert(grown);
                    }
                }
            }
        }
        pools.remove(&size).into_iter().flatten().collect()
    }

    /// The sets in which another GPU of a class replaces its last one in `best`. All have the same values as `best`.
    fn other_members<'s>(&self, best: GpuSet, classes: &'s [Vec<GpuSet>]) -> impl Iterator<Item = GpuSet> + use<'s> {
        let replaceable = best.without(self.question.must);
        classes.iter().flatten().filter_map(move |class| {
            let last = GpuSet::of(class.intersection(replaceable).places().last()?);
            let next = class.without(replaceable).lowest();
            (!next.is_empty()).then(|| best.without(last).union(next))
        })
    }
}

/// The number of sets of `need` GPUs, with the GPUs of one class counted as equal.
fn ways(classes: &[GpuSet], need: usize) -> u64 {
    let mut ways = vec![0_u64; need + 1];
    ways.first_mut().into_iter().for_each(|none| *none = 1);
    for class in classes {
        let with = |total: usize| {
            let before = (0..=class.len().min(total)).filter_map(|taken| ways.get(total - taken));
            before.fold(0, |sum: u64, ways| sum.saturating_add(*ways))
        };
        ways = (0..=need).map(with).collect();
    }
    ways.last().copied().unwrap_or(0)
}

/// Lists the sets that [`ways`] counts, each with the first members of each class.
fn compose(classes: &[GpuSet], need: usize, taken: GpuSet, sets: &mut Vec<GpuSet>) {
    let left = classes.iter().map(|class| class.len()).sum::<usize>();
    let Some((class, rest)) = classes.split_first().filter(|_| need > 0) else {
        sets.extend((need == 0).then_some(taken));
        return;
    };
    if left < need {
        return;
    }
    let mut with = taken;
    compose(rest, need, with, sets);
    for (place, count) in class.places().zip(1..=need) {
        with = with.union(GpuSet::of(place));
        compose(rest, need - count, with, sets);
    }
}
