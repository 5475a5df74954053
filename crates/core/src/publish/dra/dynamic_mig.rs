//! The MIG devices that GPUs in MIG mode could have, published with counters that show which of them fit together. Each
//! is made when a claim gets it, and destroyed when the claim has ended.
//!
//! A GPU has a counter set, as with NVIDIA's driver: a counter for each memory slice, the memory and each kind of
//! engine. A MIG device that an administrator made is published without counters. Its parts are subtracted from the
//! counters, and no possible device with one of its memory slices is published. The scheduler reads the amounts of
//! allocated devices in the *current* slices, so these depend on a device's profile and place only.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::attributes::{Draft, taints};
use super::{Counter, CounterConsumption, CounterSet, DraDevice, DraFacts, DraProblem, SliceDevice};
use crate::quantity;
use crate::topology::{MigDevice, MigEngines, MigPlacement, PossibleMig, device_name, possible_mig};

/// Adds the devices of all GPUs in MIG mode, in the order of [`possible_mig`].
pub(super) fn add(facts: &DraFacts<'_>, devices: &mut Vec<SliceDevice>, problems: &mut Vec<DraProblem>) {
    if !facts.settings.dynamic_mig {
        return;
    }
    let possible = possible_mig(facts.topology);
    for gpu in &facts.mig_gpus {
        let gpu_taints = taints(&gpu.reasons, facts.settings.evict_from_lost);
        for possible in possible.iter().filter(|possible| gpu.place == Some(possible.gpu)) {
            let is_made = facts.made.contains(&possible.name);
            // The taints of the MIG device itself, if it exists.
            let own = facts.devices.iter().find(|device| is_made && device.mig.is_some_and(|mig| possible.is(mig)));
            let own = own.map(|own| taints(&own.reasons, facts.settings.evict_from_lost));
            let mut taints = own.unwrap_or_else(|| gpu_taints.clone());
            let is_blocked = static_devices(facts, gpu).any(|mig| possible.is_blocked_by(mig));
            // If an administrator's device has the same name, `held` is about that device, and `is_blocked` is true.
            let may_publish = facts.settings.taints_survive || taints.is_empty() || facts.held.contains(&possible.name);
            if !is_made && (is_blocked || !may_publish) {
                continue;
            }
            if !facts.settings.taints_survive {
                taints.clear();
            }
            let Some(counter_set) = counter_set(facts, gpu) else { continue };
            let name = possible.name.clone();
            let mut draft = Draft { device: SliceDevice { name, taints, ..Default::default() }, problems, facts };
            draft.possible_mig(gpu, possible);
            let counters = values(consumed(possible));
            draft.device.consumes_counters = vec![CounterConsumption { counter_set, counters }];
            devices.push(draft.device);
        }
    }
}

/// The counters that possible devices consume: the amounts of each GPU, less those of an administrator's MIG devices.
pub fn counters(facts: &DraFacts<'_>) -> Vec<CounterSet> {
    if !facts.settings.dynamic_mig {
        return Vec::new();
    }
    let possible = possible_mig(facts.topology);
    let of_gpu = |gpu: &DraDevice<'_>| {
        let mut left: BTreeMap<String, u64> = BTreeMap::new();
        for possible in possible.iter().filter(|possible| gpu.place == Some(possible.gpu)) {
            for (name, amount) in consumed(possible) {
                // `instances` devices of the profile fit at once, so the GPU has at least `amount * instances`. The
                // largest of these products is the GPU's amount. Each memory slice is a counter of 1.
                let is_slice = name.starts_with(SLICE);
                let at_least = if is_slice { 1 } else { amount.saturating_mul(possible.kind.instances.max(1).into()) };
                let total = left.entry(name).or_default();
                *total = at_least.max(*total);
            }
        }
        let mut instances = BTreeSet::new();
        for mig in static_devices(facts, gpu) {
            // Compute instances of one GPU instance share all parts but the multiprocessors: shared parts count once.
            let is_first = instances.insert(mig.gpu_instance);
            let engines = mig.facts.engines.unwrap_or_default();
            let own = MigEngines { multiprocessors: engines.multiprocessors, ..MigEngines::default() };
            let whole = || amounts(engines, mig.facts.memory_mib, mig.facts.placement);
            let taken = if is_first { whole() } else { amounts(own, 0, None) };
            for (name, amount) in taken {
                if let Some(total) = left.get_mut(&name) {
                    *total = total.saturating_sub(amount);
                }
            }
        }
        Some(CounterSet { name: counter_set(facts, gpu)?, counters: values(left) })
            .filter(|set| !set.counters.is_empty())
    };
    facts.mig_gpus.iter().filter_map(of_gpu).collect()
}

/// The prefix of the counters of memory slices.
const SLICE: &str = "memory-slice-";

/// The counter of memory, in MiB.
const MEMORY: &str = "memory";

/// The counter set of a GPU, by NVIDIA's name.
fn counter_set(facts: &DraFacts<'_>, gpu: &DraDevice<'_>) -> Option<String> {
    Some(format!("{}-counter-set", device_name(facts.topology, gpu.place?, None)?))
}

/// The MIG devices of a GPU that were not made for a claim.
fn static_devices<'a>(facts: &'a DraFacts<'_>, gpu: &DraDevice<'_>) -> impl Iterator<Item = &'a MigDevice> {
    let (topology, place) = (facts.topology, gpu.place);
    let own = topology.mig_devices().iter().enumerate().filter(move |(_, mig)| place == Some(mig.parent));
    let is_made = move |(at, mig): &(usize, &MigDevice)| {
        device_name(topology, mig.parent, Some(*at)).is_some_and(|name| facts.made.contains(&name))
    };
    own.filter(move |device| !is_made(device)).map(|(_, mig)| mig)
}

/// The amounts that a device takes of its GPU's counters, by NVIDIA's names.
fn consumed(possible: &PossibleMig<'_>) -> BTreeMap<String, u64> {
    amounts(possible.kind.engines, possible.kind.memory_mib, Some(possible.slot.placement))
}

fn amounts(engines: MigEngines, memory_mib: u64, placement: Option<MigPlacement>) -> BTreeMap<String, u64> {
    let MigEngines { multiprocessors, copy, decoder, encoder, jpeg, ofa } = engines;
    let named = [
        ("multiprocessors", multiprocessors),
        ("copy-engines", copy),
        ("decoders", decoder),
        ("encoders", encoder),
        ("jpeg-engines", jpeg),
        ("ofa-engines", ofa),
    ];
    let named = named.map(|(name, amount)| (name.to_owned(), u64::from(amount)));
    let slices = placement.into_iter().flat_map(MigPlacement::slices).map(|slice| (format!("{SLICE}{slice}"), 1));
    let all = named.into_iter().chain([(MEMORY.to_owned(), memory_mib)]).chain(slices);
    all.filter(|(_, amount)| *amount > 0).collect()
}

fn values(amounts: BTreeMap<String, u64>) -> BTreeMap<String, Counter> {
    let value =
        |name: &str, amount: u64| if name == MEMORY { quantity::of_mebibytes(amount) } else { amount.to_string() };
    amounts.into_iter().map(|(name, amount)| (name.clone(), Counter { value: value(&name, amount) })).collect()
}
