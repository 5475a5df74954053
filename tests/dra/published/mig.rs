//! MIG devices that can be made for claims, published beside those that exist.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::publish::dra::{DraFacts, DraSettings, SliceDevice, devices, mig_counters};
use linkwise_core::state::{ResourcePlan, UnhealthyReason};
use linkwise_core::topology::{
    MigDeviceObservation, MigEngines, MigExtension, MigPlacement, NodeObservation, NodeTopology, hardware_of,
};
use linkwise_host::machines;

use super::limits::{idle, mig_device};

/// GPU 0 in MIG mode without instances, GPU 1 whole.
pub const MACHINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/mig-on-demand.yaml");

/// 2g.20gb from memory slice 2.
pub const DEVICE: &str = "gpu-0-mig-2g20gb-14-2";

pub fn observed() -> NodeObservation {
    machines::load(MACHINE).unwrap().observed
}

/// [`MACHINE`] with the MIG device [`DEVICE`], which linkwise or an administrator made.
pub fn with_device() -> NodeObservation {
    let mut observed = observed();
    let engines = MigEngines { multiprocessors: 28, copy: 2, decoder: 1, ..MigEngines::default() };
    observed.gpus[0].mig.as_mut().unwrap().devices.push(MigDeviceObservation {
        gpu_instance: 3,
        memory_mib: 19_968,
        extension: Some(MigExtension::None),
        engines: Some(engines),
        ..mig_device(0, 2, 14, MigPlacement { start: 2, size: 2 })
    });
    observed
}

/// The devices by name and the GPU's counters that are published after a change to the facts.
pub fn published(
    observed: &NodeObservation,
    change: impl FnOnce(&mut DraFacts<'_>),
) -> (BTreeMap<String, SliceDevice>, BTreeMap<String, String>) {
    let (state, layout) = idle(observed, ResourcePlan::default());
    let settings = DraSettings { dynamic_mig: true, ..DraSettings::default() };
    let mut facts = DraFacts::of_state(&state, &layout, settings);
    change(&mut facts);
    let (devices, problems) = devices(&facts);
    assert_eq!(problems, []);
    let sets = mig_counters(&facts);
    assert!(sets.len() <= 1 && sets.iter().all(|set| set.name == "gpu-0-counter-set"));
    let counters = sets.into_iter().flat_map(|set| set.counters).map(|(name, counter)| (name, counter.value));
    (devices.into_iter().map(|device| (device.name.clone(), device)).collect(), counters.collect())
}

fn consumed(device: &SliceDevice) -> BTreeMap<&str, &str> {
    let counters = device.consumes_counters.iter().flat_map(|set| &set.counters);
    counters.map(|(name, counter)| (name.as_str(), counter.value.as_str())).collect()
}

#[test]
fn every_profile_and_place_is_a_device() {
    let (devices, counters) = published(&observed(), |_| {});
    assert_eq!(devices.len(), 1 + 7 + 7 + 4 + 3 + 2 + 1 + 1);
    assert!(devices["gpu-1"].consumes_counters.is_empty());
    let device = &devices[DEVICE];
    let expected = "copy-engines=2 decoders=1 memory=19968Mi memory-slice-2=1 memory-slice-3=1 multiprocessors=28";
    assert_eq!(consumed(device), expected.split(' ').map(|counter| counter.split_once('=').unwrap()).collect());
    assert!(device.attributes.contains_key("parentUUID") && !device.attributes.contains_key("uuid"));
    let slices = device.capacity.keys().filter(|key| key.starts_with("memorySlice"));
    assert_eq!(slices.collect::<Vec<_>>(), ["memorySlice2", "memorySlice3"]);
    let left = |name: &str| counters.get(name).map(String::as_str);
    assert_eq!((left("multiprocessors"), left("decoders"), left("jpeg-engines")), (Some("98"), Some("5"), Some("1")));
    assert_eq!((left("memory"), left("memory-slice-7"), left("encoders")), (Some("79Gi"), Some("1"), None));
}

#[test]
fn made_device_stays_the_same() {
    let (before, counters) = published(&observed(), |_| {});
    let (after, left) = published(&with_device(), |facts| facts.made = BTreeSet::from([DEVICE.to_owned()]));
    assert_eq!((before, counters), (after, left));
}

#[test]
fn administrators_device_blocks_its_placement() {
    let (devices, counters) = published(&with_device(), |_| {});
    let own = &devices[DEVICE];
    assert!(own.consumes_counters.is_empty() && own.attributes.contains_key("uuid"));
    let is_taken = |counter: &&str| ["memory-slice-2", "memory-slice-3"].contains(counter);
    for (name, device) in &devices {
        assert!(!consumed(device).keys().any(is_taken), "{name}");
    }
    assert!(devices.contains_key("gpu-0-mig-3g40gb-9-4") && !devices.contains_key("gpu-0-mig-3g40gb-9-0"));
    let left = |name: &str| counters[name].as_str();
    assert_eq!((left("multiprocessors"), left("decoders"), left("copy-engines")), ("70", "4", "5"));
    assert_eq!((left("memory-slice-1"), left("memory-slice-2"), left("memory-slice-3")), ("1", "0", "0"));
}

#[test]
fn device_in_an_unknown_place_leaves_no_other() {
    let mut observed = with_device();
    let device = &mut observed.gpus[0].mig.as_mut().unwrap().devices[0];
    (device.placement, device.profile_id) = (None, None);
    let (devices, _) = published(&observed, |_| {});
    assert_eq!(devices.keys().collect::<Vec<_>>(), ["gpu-0-mig-2g20gb-gi3-ci0", "gpu-1"]);
}

#[test]
fn without_dynamic_mig_no_device_is_added() {
    let (devices, counters) = published(&observed(), |facts| facts.settings.dynamic_mig = false);
    assert_eq!(devices.keys().collect::<Vec<_>>(), ["gpu-1"]);
    assert!(counters.is_empty());
}

#[test]
fn sick_gpu_taints_its_mig_devices() {
    let sick = |facts: &mut DraFacts<'_>| {
        facts.mig_gpus[0].reasons = vec![UnhealthyReason::Xid { code: 79, instance: None }];
    };
    let (devices, _) = published(&observed(), sick);
    let is_mig = |name: &String| name.starts_with("gpu-0-mig-");
    assert!(devices.iter().all(|(name, device)| is_mig(name) != device.taints.is_empty()));
    // If the API server drops taints, a sick GPU keeps only devices of claims.
    let (devices, counters) = published(&with_device(), |facts| {
        sick(facts);
        facts.settings.taints_survive = false;
        facts.made = BTreeSet::from([DEVICE.to_owned()]);
    });
    assert_eq!(devices.keys().collect::<Vec<_>>(), [DEVICE, "gpu-1"]);
    assert!(counters.contains_key("memory-slice-2"));
}

#[test]
fn device_name_is_the_same_before_and_after_making() {
    let (topology, _) = NodeTopology::assemble(&with_device());
    assert_eq!(hardware_of(&topology, DEVICE), Some((0, Some(0))));
    let (devices, _) = published(&observed(), |_| {});
    assert!(devices.contains_key(DEVICE));
}

#[test]
fn invalid_mig_placements_make_no_device() {
    let mut observed = observed();
    let profiles = &mut observed.gpus[0].mig.as_mut().unwrap().profiles;
    profiles.truncate(1);
    let place = |start, size| MigPlacement { start, size };
    profiles[0].placements = vec![place(0, 0), place(7, 2), place(u32::MAX, u32::MAX), place(3, 1), place(3, 1)];
    let (devices, _) = published(&observed, |_| {});
    assert_eq!(devices.keys().collect::<Vec<_>>(), ["gpu-0-mig-1g10gb-19-3", "gpu-1"]);
    let profile = &mut observed.gpus[0].mig.as_mut().unwrap().profiles[0];
    (profile.gpu_slices, profile.memory_mib, profile.id) = (u32::MAX, u64::MAX, u32::MAX);
    profile.instances = u32::MAX;
    let (devices, _) = published(&observed, |_| {});
    assert!(devices.keys().all(|name| name.len() <= 63));
}
