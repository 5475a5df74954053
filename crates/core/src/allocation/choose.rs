//! The order of the values, and the walk over all sets.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::cmp::Ordering;

use super::collective::at;
use super::report::{AllocationReport, ChosenGpu, FallbackReason, RunnerUp, Value, Values};
use super::request::{AllocationPolicy, AllocationRequest, DeviceId, PreferredAllocation};
use super::search;
use super::set::{GpuSet, subsets};
use super::tables::{AllocationTables, SetTables, SetValues};

/// Chooses the best devices for a request, and reports why.
///
/// Never fails: a request that cannot be met is answered with `must_include` and then `available` in
/// sorted order, up to its size, and the report names the reason.
pub fn preferred_allocation(
    tables: &AllocationTables,
    request: &AllocationRequest,
    policy: AllocationPolicy,
) -> (PreferredAllocation, AllocationReport) {
    // Of whole GPUs all policies take the best set: none is more used than another.
    let ids: BTreeMap<&str, usize> =
        tables.topology().gpus().iter().enumerate().map(|(place, gpu)| (gpu.uuid.as_str(), place)).collect();
    match Question::new(&ids, request) {
        Ok(question) => match tables.values() {
            SetValues::Tables(sets) => question.answer(tables, sets, policy),
            SetValues::Tree(tree) => search::answer(tables.topology(), tree, &question, policy),
        },
        Err(reason) => fall_back(tables, &ids, request, policy, reason),
    }
}

/// A request in terms of places.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub must: GpuSet,
    /// What may be taken beside `must`.
    pub free: GpuSet,
    pub available: GpuSet,
    pub size: usize,
}

/// One set under comparison; the later values are computed when the earlier ones tie.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    tables: &'a AllocationTables,
    sets: &'a SetTables,
    chosen: GpuSet,
    remains: GpuSet,
}

impl Question {
    fn new(ids: &BTreeMap<&str, usize>, request: &AllocationRequest) -> Result<Self, FallbackReason> {
        let known = |devices: &[DeviceId]| {
            let places = devices.iter().map(|id| ids.get(id.as_str()).copied().ok_or(FallbackReason::UnknownDevice));
            places.collect::<Result<GpuSet, _>>()
        };
        let must = known(&request.must_include)?;
        let available = known(&request.available)?;
        let free = available.without(must);
        let possible = (must.len().max(1)..=must.len() + free.len()).contains(&request.size);
        possible.then_some(Self { must, free, available, size: request.size }).ok_or(FallbackReason::Size)
    }

    /// Walks all sets.
    pub(super) fn answer(
        &self,
        tables: &AllocationTables,
        sets: &SetTables,
        policy: AllocationPolicy,
    ) -> (PreferredAllocation, AllocationReport) {
        let candidate = |more: GpuSet| {
            let chosen = self.must.union(more);
            Candidate { tables, sets, chosen, remains: self.available.without(chosen) }
        };
        let mut best = candidate(GpuSet::default());
        let mut second = None;
        let mut compared = 0;
        // `Question::new` made sure that there is a set, and that `must` is not larger than `size`.
        for more in subsets(self.free, self.size.saturating_sub(self.must.len())) {
            let next = candidate(more);
            compared += 1;
            if compared == 1 {
                best = next;
            } else if next.compare(best).0 == Ordering::Greater {
                second = Some(best);
                best = next;
            } else if second.is_none_or(|second| next.compare(second).0 == Ordering::Greater) {
                second = Some(next);
            }
        }
        let devices = best.gpus();
        let report = AllocationReport {
            values: Some(best.values()),
            runner_up: second.map(|second| RunnerUp {
                devices: second.gpus(),
                values: second.values(),
                lost_at: best.compare(second).1,
            }),
            exact: true,
            compared,
            candidates: self.must.union(self.free).len(),
            size: self.size,
            policy,
            fallback: None,
            remains: best.remains,
            devices: devices.clone(),
        };
        let devices = devices.iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
        (PreferredAllocation { devices }, report)
    }
}

impl Candidate<'_> {
    /// Whether this set is better (`Greater`) than another, and the value that decided.
    fn compare(self, other: Self) -> (Ordering, Value) {
        let (a, b) = (self, other);
        let sets = a.sets;
        let row = |table: &[u32], a, b| at(table, a).cmp(&at(table, b));
        let order = row(&sets.collective, a.chosen, b.chosen);
        if order.is_ne() {
            return (order, Value::Collective);
        }
        let order = row(&sets.remaining, a.remains, b.remains);
        if order.is_ne() {
            return (order, Value::Remaining);
        }
        let order = at(&sets.pairs, a.chosen).cmp(&at(&sets.pairs, b.chosen));
        if order.is_ne() {
            return (order, Value::Pairs);
        }
        let order = at(&sets.distance, b.chosen).cmp(&at(&sets.distance, a.chosen));
        if order.is_ne() {
            return (order, Value::Closeness);
        }
        let order = at(&sets.room, a.remains).cmp(&at(&sets.room, b.remains));
        if order.is_ne() {
            return (order, Value::Room);
        }
        let order = at(&sets.remaining_distance, b.remains).cmp(&at(&sets.remaining_distance, a.remains));
        if order.is_ne() {
            return (order, Value::RemainingCloseness);
        }
        let order = at(&sets.nics, a.chosen).cmp(&at(&sets.nics, b.chosen));
        if order.is_ne() {
            return (order, Value::Nics);
        }
        (a.chosen.by_list(b.chosen), Value::PciAddresses)
    }

    fn values(self) -> Values {
        let minus = |sum: u64| i64::try_from(sum).map_or(i64::MIN, |sum| -sum);
        Values {
            collective: u64::from(at(&self.sets.collective, self.chosen)),
            remaining: u64::from(at(&self.sets.remaining, self.remains)),
            pairs: at(&self.sets.pairs, self.chosen),
            closeness: minus(at(&self.sets.distance, self.chosen)),
            room: u64::from(at(&self.sets.room, self.remains)),
            remaining_closeness: minus(u64::from(at(&self.sets.remaining_distance, self.remains))),
            nics: at(&self.sets.nics, self.chosen),
        }
    }

    fn gpus(self) -> Vec<ChosenGpu> {
        self.chosen.places().filter_map(|place| ChosenGpu::at(self.tables.topology(), place)).collect()
    }
}

/// `must_include`, then `available`, each sorted and without repetitions, up to the size.
pub(super) fn fall_back(
    tables: &AllocationTables,
    ids: &BTreeMap<&str, usize>,
    request: &AllocationRequest,
    policy: AllocationPolicy,
    reason: FallbackReason,
) -> (PreferredAllocation, AllocationReport) {
    let must: BTreeSet<&DeviceId> = request.must_include.iter().collect();
    let available: BTreeSet<&DeviceId> = request.available.iter().collect();
    let all = must.iter().chain(available.difference(&must)).copied();
    let candidates = must.union(&available).count();
    let devices: Vec<DeviceId> = all.take(request.size).cloned().collect();
    let gpus = devices.iter().filter_map(|id| ChosenGpu::at(tables.topology(), *ids.get(id.as_str())?));
    let report = AllocationReport {
        devices: gpus.collect(),
        values: None,
        runner_up: None,
        exact: false,
        compared: 0,
        candidates,
        size: request.size,
        policy,
        fallback: Some(reason),
        remains: GpuSet::default(),
    };
    (PreferredAllocation { devices }, report)
}
