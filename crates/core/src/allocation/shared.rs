//! The choice among units of shared and partitioned GPUs: slots of time-slicing or MPS, MIG devices.
//!
//! The spread of units over GPUs is decided here. Where several GPUs are equal, the choice of whole GPUs decides among
//! them. The spread works with counts for each GPU, so its cost grows with the number of units only. Like the choice of
//! whole GPUs it never fails.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::choose::{Question, fall_back};
use super::report::{AllocationReport, FallbackReason};
use super::set::GpuSet;
use super::tables::AllocationTables;
use super::{AllocationPolicy, AllocationRequest, DeviceId, PreferredAllocation};
use crate::topology::{GpuUuid, NodeTopology};

/// The units of one resource, and how much of their GPUs other resources use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Units {
    /// Each unit's id and its GPU's place; by place, within a GPU by number.
    units: Vec<(DeviceId, usize)>,
    /// The position in `units` of each id.
    by_id: BTreeMap<DeviceId, usize>,
    /// The number of units of other resources in use, by the GPU's place.
    others: BTreeMap<usize, usize>,
    /// The device of each unit, as a number: a GPU may have several MIG devices, and a unit is a slot of one. Empty if
    /// all units of a GPU are equal.
    devices: Vec<usize>,
}

impl Units {
    /// Makes units from ids with the places of their GPUs, and from the number of units of other resources that are in
    /// use at each place (MIG devices of another profile). The order of the units does not matter. If two have one id,
    /// the first counts.
    pub fn new(units: impl IntoIterator<Item = (DeviceId, usize)>, others: BTreeMap<usize, usize>) -> Self {
        let mut places: BTreeMap<DeviceId, usize> = BTreeMap::new();
        for (id, gpu) in units {
            places.entry(id).or_insert(gpu);
        }
        let mut units: Vec<(DeviceId, usize)> = places.into_iter().collect();
        units.sort_by(|(a, on), (b, other)| (on, slot_key(a)).cmp(&(other, slot_key(b))));
        let by_id = units.iter().enumerate().map(|(at, (id, _))| (id.clone(), at)).collect();
        let devices = devices(&units);
        Self { units, by_id, others, devices }
    }

    /// Makes the same number of slots on each GPU of a machine.
    pub fn slots(topology: &NodeTopology, replicas: usize) -> Self {
        let gpus = topology.gpus().iter().enumerate();
        let slots = gpus.flat_map(|(place, gpu)| (0..replicas).map(move |slot| (Self::slot(&gpu.uuid, slot), place)));
        Self::new(slots, BTreeMap::new())
    }

    /// The id of a slot, as the NVIDIA device plugin writes it: `UUID::N`, N from 0.
    pub fn slot(gpu: &GpuUuid, slot: usize) -> DeviceId {
        DeviceId::from(format!("{gpu}::{slot}"))
    }

    /// All ids, by the places of their GPUs, within a GPU by number.
    pub fn ids(&self) -> impl Iterator<Item = &DeviceId> {
        self.units.iter().map(|(id, _)| id)
    }

    /// The place of the GPU behind a unit.
    pub fn gpu(&self, id: &DeviceId) -> Option<usize> {
        self.units.get(*self.by_id.get(id)?).map(|(_, gpu)| *gpu)
    }
}

/// The device of each unit, as a number, if some GPU has several devices and some device has several slots; otherwise
/// empty. Slots of one device are adjacent.
fn devices(units: &[(DeviceId, usize)]) -> Vec<usize> {
    let devices = units.chunk_by(|(a, on), (b, other)| on == other && slot_key(a).0 == slot_key(b).0);
    let devices: Vec<_> = devices.collect();
    let has_slots = devices.iter().any(|slots| slots.len() > 1);
    let share_gpu = devices.windows(2).any(|pair| matches!(pair, [[(_, on), ..], [(_, other), ..]] if on == other));
    if !has_slots || !share_gpu {
        return Vec::new();
    }
    devices.iter().enumerate().flat_map(|(number, slots)| slots.iter().map(move |_| number)).collect()
}

/// The sort key that puts slot 2 before slot 10.
fn slot_key(id: &DeviceId) -> (&str, u64) {
    let slot = id.as_str().rsplit_once("::").and_then(|(gpu, slot)| Some((gpu, slot.parse().ok()?)));
    slot.unwrap_or((id.as_str(), 0))
}

/// Chooses the best units for a request, and reports why.
///
/// The use of a GPU is the number of its units that the request neither offers nor demands, plus the number of units of
/// other resources in use on it.
///
/// - `distributed`: takes units in rounds. Each round takes one unit of each GPU that has the fewest units of this
///   request; units of `must_include` count. If a round needs fewer GPUs than there are, the least used GPUs take part.
///   Among equally used GPUs the choice of whole GPUs decides: its set must include the GPUs that take part already and
///   may include the equally used ones. For its remaining value, only the equally used GPUs outside the set count as
///   free, because the next request gets those first.
/// - `best-effort`: the same, but ignores how much the GPUs are used.
/// - `packed`: fills the most used GPU, then the next; units taken for this request count as used. Among equally used
///   GPUs it prefers those that have a unit of this request, then those with more free units, then those that the
///   choice of whole GPUs takes in addition to the GPUs that have units already. The last of the taken GPUs by PCI
///   address may stay partly free.
///
/// Within a GPU that has several devices (shared MIG devices), `distributed` and `best-effort` go from device to device
/// in the same way: first those with the fewest units of this request, then for `distributed` the less used ones.
/// `packed` fills the most used device first. Within one device the slots with the lowest numbers are taken. With one
/// unit on each GPU and no other resource, all three policies are the choice of whole GPUs. The report is about the
/// GPUs behind the units, and its `size` and `candidates` count GPUs; after a fallback they count units.
pub fn preferred_units(
    tables: &AllocationTables,
    units: &Units,
    request: &AllocationRequest,
    policy: AllocationPolicy,
) -> (PreferredAllocation, AllocationReport) {
    let mut spread = match Spread::new(tables, units, request, policy) {
        Ok(spread) => spread,
        Err(reason) => return fall_back(tables, |id| units.gpu(id), request, policy, reason),
    };
    let report = match policy {
        AllocationPolicy::Packed => spread.pack(),
        AllocationPolicy::BestEffort | AllocationPolicy::Distributed => spread.distribute(),
    };
    (spread.answer(), report)
}

/// The units of one GPU in a request.
#[derive(Clone, Debug, Default)]
struct Share {
    /// Units in use, as the policy counts them.
    used: usize,
    /// Units of `must_include`, as positions in [`Units`].
    must: Vec<usize>,
    /// Units that may be taken, as positions in [`Units`], in the order of taking.
    free: Vec<usize>,
    /// The number of units of `free` that are taken.
    taken: usize,
}

impl Share {
    /// The number of units that the request gets of the GPU.
    fn assigned(&self) -> usize {
        self.must.len() + self.taken
    }

    /// The number of units that can still be taken.
    fn left(&self) -> usize {
        self.free.len().saturating_sub(self.taken)
    }
}

/// Sorts the free units of each GPU into the order of taking, by their devices.
fn arrange(gpus: &mut [Share], units: &Units, policy: AllocationPolicy) {
    // Units that the request demands, and units that are in use, by device.
    let mut carried: BTreeMap<usize, usize> = BTreeMap::new();
    let mut used: BTreeMap<usize, usize> = BTreeMap::new();
    let device = |at: &usize| units.devices.get(*at).copied().unwrap_or_default();
    for device in &units.devices {
        *used.entry(*device).or_default() += 1;
    }
    for share in gpus.iter() {
        for at in share.free.iter().chain(&share.must) {
            used.entry(device(at)).and_modify(|used| *used = used.saturating_sub(1));
        }
        for at in &share.must {
            *carried.entry(device(at)).or_default() += 1;
        }
    }
    let of = |counts: &BTreeMap<usize, usize>, device| counts.get(&device).copied().unwrap_or(0);
    let mut rounds = carried.clone();
    for share in gpus {
        let key = |at| {
            let device = device(at);
            match policy {
                AllocationPolicy::Packed => (usize::MAX - of(&used, device).saturating_add(of(&carried, device)), 0),
                AllocationPolicy::Distributed | AllocationPolicy::BestEffort => {
                    let round = rounds.entry(device).or_default();
                    *round += 1;
                    (*round, if policy == AllocationPolicy::BestEffort { 0 } else { of(&used, device) })
                }
            }
        };
        let mut keyed: Vec<_> = share.free.iter().map(key).zip(share.free.iter().copied()).collect();
        keyed.sort_unstable();
        share.free = keyed.into_iter().map(|(_, at)| at).collect();
    }
}

/// A request while its units are being taken.
struct Spread<'a> {
    tables: &'a AllocationTables,
    units: &'a Units,
    policy: AllocationPolicy,
    /// The GPUs by place.
    gpus: Vec<Share>,
    /// Units still to be taken.
    need: usize,
}

impl<'a> Spread<'a> {
    fn new(
        tables: &'a AllocationTables,
        units: &'a Units,
        request: &AllocationRequest,
        policy: AllocationPolicy,
    ) -> Result<Self, FallbackReason> {
        // `true` for a unit that must be taken, `false` for one that may be.
        let mut requested = vec![None; units.units.len()];
        for (ids, must) in [(&request.available, false), (&request.must_include, true)] {
            for id in ids {
                let cell = units.by_id.get(id).and_then(|at| requested.get_mut(*at));
                *cell.ok_or(FallbackReason::UnknownDevice)? = Some(must);
            }
        }
        let mut gpus = vec![Share::default(); tables.topology().gpus().len()];
        for (at, ((_, gpu), requested)) in units.units.iter().zip(requested).enumerate() {
            match (gpus.get_mut(*gpu), requested) {
                (Some(share), None) => share.used += 1,
                (Some(share), Some(must)) => if must { &mut share.must } else { &mut share.free }.push(at),
                // A unit of a GPU that this topology lacks counts only if it is requested.
                (None, None) => {}
                (None, Some(_)) => return Err(FallbackReason::UnknownDevice),
            }
        }
        for (place, share) in gpus.iter_mut().enumerate() {
            let others = units.others.get(&place).copied().unwrap_or(0);
            share.used = if policy == AllocationPolicy::BestEffort { 0 } else { share.used.saturating_add(others) };
        }
        if !units.devices.is_empty() {
            arrange(&mut gpus, units, policy);
        }
        let must: usize = gpus.iter().map(|share| share.must.len()).sum();
        let free: usize = gpus.iter().map(|share| share.free.len()).sum();
        let is_possible = (must.max(1)..=must + free).contains(&request.size);
        let need = request.size.saturating_sub(must);
        is_possible.then_some(Self { tables, units, policy, gpus, need }).ok_or(FallbackReason::Size)
    }

    fn distribute(&mut self) -> AllocationReport {
        let mut chosen = None;
        while let Some(level) = self.open().map(|(_, share)| share.assigned()).min() {
            let mut tied: Vec<(usize, usize)> = self
                .open()
                .filter(|(_, share)| share.assigned() == level)
                .map(|(place, share)| (share.used, place))
                .collect();
            let mut round: GpuSet = tied.iter().map(|(_, place)| *place).collect();
            if tied.len() > self.need {
                tied.sort_unstable();
                let most = tied.get(self.need.saturating_sub(1)).map_or(0, |(used, _)| *used);
                let used = |wanted: &dyn Fn(usize) -> bool| -> GpuSet {
                    tied.iter().filter(|(used, _)| wanted(*used)).map(|(_, place)| *place).collect()
                };
                let part = self.carriers(level + 1);
                let forced = part.union(used(&|used| used < most));
                let best = self.choose(forced, used(&|used| used == most), part.len() + self.need);
                round = best.chosen.without(part);
                chosen = Some(best);
            }
            for place in round.places() {
                self.take(place, 1);
            }
        }
        self.report(chosen)
    }

    fn pack(&mut self) -> AllocationReport {
        let key = |share: &Share| (share.used.saturating_add(share.assigned()), share.assigned() > 0, share.left());
        let mut chosen = None;
        while let Some((used, has_units, left)) = self.open().map(|(_, share)| key(share)).max() {
            let tied = self.open().filter(|(_, share)| key(share) == (used, has_units, left));
            let mut tied: GpuSet = tied.map(|(place, _)| place).collect();
            let gpus = self.need.div_ceil(left.max(1));
            if tied.len() > gpus && !has_units {
                let part = self.carriers(1);
                let best = self.choose(part, tied, part.len() + gpus);
                tied = best.chosen.without(part);
                chosen = Some(best);
            }
            for place in tied.places() {
                self.take(place, left);
            }
        }
        self.report(chosen)
    }

    /// The GPUs that have units to take; none once the request is met.
    fn open(&self) -> impl Iterator<Item = (usize, &Share)> {
        let gpus = if self.need > 0 { self.gpus.as_slice() } else { &[] };
        gpus.iter().enumerate().filter(|(_, share)| share.left() > 0)
    }

    /// The GPUs that have at least `least` units of this request.
    fn carriers(&self, least: usize) -> GpuSet {
        self.gpus.iter().enumerate().filter(|(_, share)| share.assigned() >= least).map(|(place, _)| place).collect()
    }

    /// Takes units of a GPU, at most as many as it has and the request needs.
    fn take(&mut self, place: usize, count: usize) {
        if let Some(share) = self.gpus.get_mut(place) {
            let count = count.min(self.need).min(share.left());
            share.taken += count;
            self.need -= count;
        }
    }

    /// The best set of `size` GPUs that holds `must`, the others among `tied`.
    fn choose(&self, must: GpuSet, tied: GpuSet, size: usize) -> AllocationReport {
        Question::of(must, must.union(tied), size, self.policy).answer(self.tables)
    }

    /// Reports the choice, if it made the whole set of GPUs; otherwise reports the values of the set.
    fn report(&self, chosen: Option<AllocationReport>) -> AllocationReport {
        let all = self.carriers(1);
        let made = chosen.filter(|report| report.chosen == all);
        made.unwrap_or_else(|| self.choose(all, GpuSet::default(), all.len()))
    }

    fn answer(&self) -> PreferredAllocation {
        let taken = |share: &Share| {
            let mut units: Vec<usize> = share.free.iter().take(share.taken).chain(&share.must).copied().collect();
            units.sort_unstable();
            units
        };
        let units = self.gpus.iter().flat_map(taken);
        let devices = units.filter_map(|at| self.units.units.get(at)).map(|(id, _)| id.clone()).collect();
        PreferredAllocation { devices }
    }
}
