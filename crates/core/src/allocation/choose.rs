//! The choice among whole GPUs where every set has a row in the tables: compares all sets by their values.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::cmp::Ordering;

use super::report::{AllocationReport, ChosenGpu, FallbackReason, RunnerUp, Values};
use super::search;
use super::set::{GpuSet, subsets};
use super::tables::{AllocationTables, SetTables, SetValues};
use super::{AllocationPolicy, AllocationRequest, DeviceId, PreferredAllocation};
use crate::topology::NodeTopology;

/// Chooses the best devices for a request, and reports why.
///
/// Never fails. A request that cannot be met is answered with `must_include` and then `available` in sorted order, up
/// to its size; the report names the reason.
pub fn preferred_allocation(
    tables: &AllocationTables,
    request: &AllocationRequest,
    policy: AllocationPolicy,
) -> (PreferredAllocation, AllocationReport) {
    match Question::new(tables, request, policy) {
        Ok(question) => {
            let report = question.answer(tables);
            (PreferredAllocation { devices: report.devices.iter().map(|gpu| (&gpu.uuid).into()).collect() }, report)
        }
        Err(reason) => fall_back(tables, |id| tables.place(id), request, policy, reason),
    }
}

/// A request that can be met, with its GPUs as sets of places.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub must: GpuSet,
    /// The GPUs that may be taken in addition to `must`.
    pub free: GpuSet,
    pub available: GpuSet,
    pub size: usize,
    /// The policy, for the report: for whole GPUs every policy takes the best set, because no whole GPU is more used
    /// than another.
    pub policy: AllocationPolicy,
}

/// A set in a comparison.
#[derive(Clone, Copy, Default)]
struct Candidate {
    chosen: GpuSet,
    /// The values that are compared before the NICs, as one number ([`SetTables::rank`]).
    rank: u64,
}

/// A set and its values.
#[derive(Clone, Copy)]
pub(super) struct Found {
    pub chosen: GpuSet,
    pub values: Values,
}

impl Found {
    /// Compares with another set of the same size; the better set is `Greater`.
    pub fn compare(&self, other: &Self) -> Ordering {
        self.values.cmp(&other.values).then_with(|| self.chosen.by_list(other.chosen))
    }
}

impl Question {
    fn new(
        tables: &AllocationTables,
        request: &AllocationRequest,
        policy: AllocationPolicy,
    ) -> Result<Self, FallbackReason> {
        let known = |devices: &[DeviceId]| {
            let places = devices.iter().map(|id| tables.place(id).ok_or(FallbackReason::UnknownDevice));
            places.collect::<Result<GpuSet, _>>()
        };
        let question = Self::of(known(&request.must_include)?, known(&request.available)?, request.size, policy);
        let is_possible = (question.must.len().max(1)..=question.candidates().len()).contains(&request.size);
        is_possible.then_some(question).ok_or(FallbackReason::Size)
    }

    /// Asks for `size` GPUs: all of `must`, the others from `available`. The caller makes sure that there are enough.
    pub fn of(must: GpuSet, available: GpuSet, size: usize, policy: AllocationPolicy) -> Self {
        Self { must, free: available.without(must), available, size, policy }
    }

    /// The GPUs that can be in the answer.
    pub fn candidates(&self) -> GpuSet {
        self.must.union(self.free)
    }

    /// The number of GPUs to take in addition to `must`.
    pub fn need(&self) -> usize {
        self.size.saturating_sub(self.must.len())
    }

    /// Finds the best set.
    pub fn answer(&self, tables: &AllocationTables) -> AllocationReport {
        match &tables.values {
            SetValues::Tables(sets) => self.compare_all(tables.topology(), sets),
            SetValues::Tree(tree) => search::answer(tables.topology(), tree, self),
        }
    }

    /// Compares all sets.
    pub fn compare_all(&self, topology: &NodeTopology, sets: &SetTables) -> AllocationReport {
        let candidate = |more: GpuSet| {
            let chosen = self.must.union(more);
            Candidate { chosen, rank: sets.rank(chosen, self.available.without(chosen)) }
        };
        let is_better = |one: Candidate, other: Candidate| {
            let by_nics = || sets.nics(one.chosen).cmp(&sets.nics(other.chosen));
            let pairs = |chosen: GpuSet| sets.pairs(self.available.without(chosen));
            let by_pairs = || pairs(one.chosen).cmp(&pairs(other.chosen));
            let by_list = || one.chosen.by_list(other.chosen);
            one.rank.cmp(&other.rank).then_with(by_nics).then_with(by_pairs).then_with(by_list).is_gt()
        };
        let mut candidates = subsets(self.free, self.need()).map(candidate);
        // The question's maker checks that there is a set.
        let mut best = candidates.next().unwrap_or_default();
        let mut second = None;
        let mut compared = 1;
        for next in candidates {
            compared += 1;
            if is_better(next, best) {
                second = Some(best);
                best = next;
            } else if second.is_none_or(|second| is_better(next, second)) {
                second = Some(next);
            }
        }
        let found = |chosen: GpuSet| Found { chosen, values: sets.values(chosen, self.available.without(chosen)) };
        self.report(topology, found(best.chosen), second.map(|second| found(second.chosen)), compared, true)
    }

    /// The report of the best set and the second best.
    pub fn report(
        &self,
        topology: &NodeTopology,
        best: Found,
        second: Option<Found>,
        compared: u64,
        exact: bool,
    ) -> AllocationReport {
        let gpus = |set: GpuSet| set.places().filter_map(|place| ChosenGpu::at(topology, place)).collect();
        AllocationReport {
            devices: gpus(best.chosen),
            values: Some(best.values),
            runner_up: second.map(|second| RunnerUp {
                devices: gpus(second.chosen),
                values: second.values,
                lost_at: best.values.difference(&second.values),
            }),
            exact,
            compared,
            candidates: self.candidates().len(),
            size: self.size,
            policy: self.policy,
            fallback: None,
            chosen: best.chosen,
            remains: self.available.without(best.chosen),
        }
    }
}

/// The answer without a choice: `must_include`, then `available`, each sorted and without repetitions, up to the size.
/// `place` gives the place of the GPU behind an id.
pub(super) fn fall_back(
    tables: &AllocationTables,
    place: impl Fn(&DeviceId) -> Option<usize>,
    request: &AllocationRequest,
    policy: AllocationPolicy,
    reason: FallbackReason,
) -> (PreferredAllocation, AllocationReport) {
    let must: BTreeSet<&DeviceId> = request.must_include.iter().collect();
    let available: BTreeSet<&DeviceId> = request.available.iter().collect();
    let all = must.iter().chain(available.difference(&must)).copied();
    let devices: Vec<DeviceId> = all.take(request.size).cloned().collect();
    let report = AllocationReport {
        devices: devices.iter().filter_map(|id| ChosenGpu::at(tables.topology(), place(id)?)).collect(),
        candidates: must.union(&available).count(),
        size: request.size,
        policy,
        fallback: Some(reason),
        ..AllocationReport::default()
    };
    (PreferredAllocation { devices }, report)
}
