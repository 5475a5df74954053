//! Sets of GPUs as devices: over the counters of their members, so that no GPU is in two allocations.
//!
//! Each whole GPU has a counter of 1, which it consumes itself and each set with it does. The allocator subtracts what
//! the *current* slices say of allocated devices, so a device that a claim may have keeps what it consumes: a set that
//! a claim holds stays published, whatever became of its members.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::attributes::OURS;
use super::sets::RankedSet;
use super::taints::withdrawn;
use super::{Attribute, Capacity, Counter, CounterConsumption, CounterSet, DraFacts, SliceDevice, Taint};
use crate::quantity;
use crate::topology::{gpu_name, minor_of, set_members, set_minors, set_name};

/// The counters of a set, at most (`ResourceSliceMaxCountersPerCounterSet`).
const MOST_COUNTERS: u32 = 32;

/// The counter sets that a device may consume from (`ResourceSliceMaxDeviceCounterConsumptionsPerDevice`).
const MOST_COUNTER_SETS: usize = 2;

/// What all members have in common is the set's too. Bytes count here: there are some hundred sets.
const COMMON: [&str; 9] = [
    "productName",
    "architecture",
    "cudaComputeCapability",
    "driverVersion",
    "cudaDriverVersion",
    "resource.kubernetes.io/pcieRoot",
    "resource.kubernetes.io/numaNode",
    "dra.net/numaNode",
    "linkwise.dev/socket",
];

/// The type of sets; that of GPUs is `gpu`.
pub const SET_TYPE: &str = "gpu-set";

/// Which sets are published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublishedSets {
    /// None, and GPUs consume no counters. A GPU is left out while a claim holds it in a set.
    #[default]
    None,
    /// Those that claims hold.
    Held,
    /// All, tainted; where taints do not survive, those that claims hold.
    Withdrawn,
    /// All.
    All,
}

impl PublishedSets {
    /// Whether GPUs consume counters.
    pub fn has_counters(self) -> bool {
        self != Self::None
    }
}

/// How the names of counter sets of whole GPUs begin.
pub const GPU_COUNTERS: &str = "gpus-";

/// The counters of whole GPUs that devices consume.
pub fn counters(devices: &[SliceDevice]) -> Vec<CounterSet> {
    let mut sets: BTreeMap<&str, BTreeMap<String, Counter>> = BTreeMap::new();
    let all = devices.iter().flat_map(|device| &device.consumes_counters);
    for consumption in all.filter(|consumption| consumption.counter_set.starts_with(GPU_COUNTERS)) {
        sets.entry(&consumption.counter_set).or_default().extend(consumption.counters.clone());
    }
    sets.into_iter().map(|(name, counters)| CounterSet { name: name.to_owned(), counters }).collect()
}

/// What a device over these GPUs consumes. The counter of a GPU is in a set by its minor number, wherever other GPUs
/// are: it stays there when they go.
fn consumption(minors: &[u32]) -> Vec<CounterConsumption> {
    let mut sets: BTreeMap<u32, BTreeMap<String, Counter>> = BTreeMap::new();
    for minor in minors {
        let counter = Counter { value: "1".to_owned() };
        sets.entry(minor / MOST_COUNTERS).or_default().insert(gpu_name(*minor), counter);
    }
    let set = |(number, counters)| CounterConsumption { counter_set: format!("{GPU_COUNTERS}{number}"), counters };
    sets.into_iter().map(set).collect()
}

/// Makes a whole GPU consume its counter. One that several claims may have consumes none: it is in no set.
pub(super) fn count(gpu: &mut SliceDevice) {
    if let Some(minor) = minor_of(&gpu.name).filter(|_| !gpu.allow_multiple_allocations) {
        gpu.consumes_counters = consumption(&[minor]);
    }
}

/// The GPUs that claims hold in sets, by their names.
pub(super) fn held_in_sets(facts: &DraFacts<'_>) -> BTreeSet<String> {
    facts.held.iter().filter_map(|name| set_members(name)).flatten().collect()
}

/// A set to be published.
struct Wanted {
    minors: Vec<u32>,
    /// What is known of it among the sets of its size; nothing of one that only a claim has.
    rank: Option<RankedSet>,
}

/// The sets. `gpus`: the whole GPUs by name, with all their taints, also those that are not published.
pub(super) fn set_devices(facts: &DraFacts<'_>, gpus: &BTreeMap<String, SliceDevice>) -> Vec<SliceDevice> {
    let published = facts.settings.sets;
    if !published.has_counters() {
        return Vec::new();
    }
    let minor = |place: usize| {
        let own = facts.devices.iter().find(|device| device.place == Some(place) && device.mig.is_none())?;
        minor_of(own.name.as_ref()?)
    };
    let ranked = facts.layout.sets.iter().filter_map(|set| {
        let mut minors: Vec<u32> = set.gpus.places().map(minor).collect::<Option<_>>()?;
        minors.sort_unstable();
        Some(Wanted { minors, rank: Some(*set) })
    });
    let mut wanted: Vec<Wanted> = ranked.collect();
    let known: BTreeSet<String> = wanted.iter().filter_map(|set| set_name(&set.minors)).collect();
    let others = facts.held.iter().filter(|name| !known.contains(*name)).filter_map(|name| set_minors(name));
    wanted.extend(others.map(|minors| Wanted { minors, rank: None }));
    wanted.into_iter().filter_map(|set| set_device(facts, gpus, &set)).collect()
}

fn set_device(facts: &DraFacts<'_>, gpus: &BTreeMap<String, SliceDevice>, set: &Wanted) -> Option<SliceDevice> {
    let (name, settings) = (set_name(&set.minors)?, facts.settings);
    let names: Vec<String> = set.minors.iter().map(|minor| gpu_name(*minor)).collect();
    let members: Vec<&SliceDevice> = names.iter().filter_map(|name| gpus.get(name)).collect();
    let (is_held, is_whole) = (facts.held.contains(&name), members.len() == names.len());
    let consumes_counters = consumption(&set.minors);
    // What several claims have in parts is not counted.
    let is_shared = members.iter().any(|member| member.allow_multiple_allocations);
    if consumes_counters.len() > MOST_COUNTER_SETS || !is_held && (!is_whole || is_shared) {
        return None;
    }
    let mut taints: BTreeMap<String, Taint> = BTreeMap::new();
    let withdrawn = (settings.sets != PublishedSets::All).then(withdrawn);
    for taint in members.iter().flat_map(|member| member.taints.iter().cloned()).chain(withdrawn) {
        taints.entry(taint.key.clone()).or_insert(taint);
    }
    let may_be_new = settings.taints_survive && settings.sets != PublishedSets::Held || taints.is_empty();
    if !is_held && !may_be_new {
        return None;
    }
    if !settings.taints_survive {
        taints.clear();
    }
    let mut device =
        SliceDevice { name, consumes_counters, taints: taints.into_values().collect(), ..SliceDevice::default() };
    let mut put = |key: &str, value: Attribute| drop(device.attributes.insert(key.to_owned(), value));
    let number = |number: usize| Attribute::Int(i64::try_from(number).unwrap_or(i64::MAX));
    let minors: Vec<String> = set.minors.iter().map(u32::to_string).collect();
    put("type", Attribute::String(SET_TYPE.to_owned()));
    put(&format!("{OURS}/size"), number(set.minors.len()));
    put(&format!("{OURS}/members"), Attribute::String(minors.join(",")));
    // Selectors may read it, so no set is without.
    put(&format!("{OURS}/tier"), number(set.rank.map_or(0, |rank| rank.tier)));
    if let Some(mbps) = set.rank.and_then(|rank| rank.all_reduce) {
        put(&format!("{OURS}/allReduceMBps"), Attribute::Int(i64::try_from(mbps).unwrap_or(i64::MAX)));
    }
    if let Some((first, others)) = members.split_first().filter(|_| is_whole) {
        for key in COMMON {
            let value = first.attributes.get(key);
            if let Some(value) = value.filter(|value| others.iter().all(|it| it.attributes.get(key) == Some(value))) {
                put(key, value.clone());
            }
        }
    }
    let memory = |name: &String| {
        facts.devices.iter().find(|device| device.name.as_ref() == Some(name)).and_then(|it| it.gpu.memory_mib)
    };
    if let Some(memory) = names.iter().map(memory).collect::<Option<Vec<u64>>>() {
        let sum = memory.into_iter().fold(0, u64::saturating_add);
        device.capacity.insert("memory".to_owned(), Capacity::whole(quantity::of_mebibytes(sum)));
    }
    Some(device)
}
