//! The API's limits for each machine: with whole GPUs, cut into MIG devices, and with all devices unhealthy.

use std::collections::BTreeSet;

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{
    DraFacts, DraSettings, GpuLayout, SliceDevice, device_name, devices, hardware_of, offered_now,
};
use linkwise_core::state::{Door, NodeState, ResourcePlan, UnhealthyReason};
use linkwise_core::topology::{
    AddressingMode, CudaVersion, FabricObservation, MigDeviceObservation, MigEngines, MigObservation, MigPlacement,
    NodeObservation,
};
use linkwise_host::machines;
use proptest::prelude::*;

use super::checker::check;
use crate::random_node;

/// The state of a machine whose GPUs go through DRA and are not held, and the GPUs' layout.
pub fn idle(observed: &NodeObservation, plan: ResourcePlan) -> (NodeState, GpuLayout) {
    let state = NodeState::of_machine(observed.clone(), ResourcePlan { door: Door::Dra, ..plan });
    let layout = GpuLayout::of(state.tables(), offered_now(&state));
    (state, layout)
}

/// The devices that a machine publishes if each is unhealthy for these reasons.
pub fn published(observed: &NodeObservation, reasons: &[UnhealthyReason]) -> Vec<SliceDevice> {
    let (state, layout) = idle(observed, ResourcePlan::default());
    let settings = DraSettings { evict_from_lost: true, ..DraSettings::default() };
    let mut facts = DraFacts::of_state(&state, &layout, settings);
    facts.devices.iter_mut().for_each(|device| device.reasons = reasons.to_vec());
    let (devices, _) = devices(&facts);
    for device in &devices {
        let (gpu, mig) = hardware_of(state.topology(), &device.name).unwrap();
        assert_eq!(device_name(state.topology(), gpu, mig).as_ref(), Some(&device.name));
    }
    devices
}

/// A machine with facts that a built-in one may lack, such as a fabric for each GPU.
pub fn with_all_facts(mut observed: NodeObservation) -> NodeObservation {
    observed.driver_version = Some("580.95.05".to_owned());
    observed.cuda_version = Some(CudaVersion { major: 13, minor: 0 });
    for gpu in &mut observed.gpus {
        gpu.brand = Some("Nvidia".to_owned());
        gpu.addressing_mode = Some(AddressingMode::Ats);
        let cluster = "3143b15b-c2cd-192b-28cc-9b5473fb5b93".to_owned();
        gpu.fabric = Some(FabricObservation { cluster, clique: u32::MAX });
        gpu.memory_mib.get_or_insert(81_559);
    }
    observed
}

/// A MIG device that has all of its GPU instance, which is of a profile with this many GPU slices.
pub fn mig_device(index: u32, slices: u32, profile_id: u32, placement: MigPlacement) -> MigDeviceObservation {
    MigDeviceObservation {
        index,
        uuid: format!("MIG-{index}").parse().unwrap(),
        gpu_instance: index,
        compute_instance: 0,
        gpu_slices: slices,
        compute_slices: slices,
        memory_mib: 9_728,
        profile_id: Some(profile_id),
        placement: Some(placement),
        extension: None,
        engines: Some(MigEngines { multiprocessors: 16, copy: 1, ..MigEngines::default() }),
        capabilities: None,
    }
}

/// A machine whose GPUs are each cut into this many MIG devices, of which the last has eight memory slices.
pub fn cut_into_mig(mut observed: NodeObservation, devices: u32) -> NodeObservation {
    for (gpu, number) in observed.gpus.iter_mut().zip(0..) {
        let device = |index: u32| {
            let place = MigPlacement { start: index, size: if index + 1 == devices { 8 } else { 1 } };
            let uuid = format!("MIG-{number}-{index}").parse().unwrap();
            MigDeviceObservation { uuid, ..mig_device(index, 1, 19, place) }
        };
        let devices = (0..devices).map(device).collect();
        gpu.mig = Some(MigObservation { enabled: true, devices, profiles: Vec::new() });
    }
    observed
}

/// The specifications of the slices with these devices, after the check.
pub fn slices(devices: Vec<SliceDevice>) -> Vec<serde_json::Value> {
    let pool = Pool::new("node-1.example.org", devices);
    let slices: Vec<_> = pool.slices(7).iter().map(|slice| serde_json::to_value(slice).unwrap()).collect();
    check(&slices);
    slices
}

fn reasons_for_three_taints() -> Vec<UnhealthyReason> {
    vec![
        UnhealthyReason::Xid { code: 79, instance: None },
        UnhealthyReason::Xid { code: u64::MAX, instance: None },
        UnhealthyReason::DoubleBitEcc,
        UnhealthyReason::OffBus,
        UnhealthyReason::Quarantined { why: "a call hung".to_owned() },
        UnhealthyReason::Gone,
    ]
}

#[test]
fn every_machine_is_within_the_limits() {
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        for observed in [observed.clone(), with_all_facts(observed.clone()), cut_into_mig(with_all_facts(observed), 7)]
        {
            for reasons in [vec![], reasons_for_three_taints()] {
                let devices = published(&observed, &reasons);
                assert!(!devices.is_empty(), "{}", machine.name);
                assert_eq!(devices.iter().all(|device| device.taints.len() == 3), !reasons.is_empty());
                slices(devices);
            }
        }
    }
}

#[test]
fn slices_of_eight_gpus_are_small() {
    for machine in machines::built_in() {
        let observed = with_all_facts(machines::load(machine.name).unwrap().observed);
        if observed.gpus.len() <= 8 {
            let size: usize = slices(published(&observed, &[])).iter().map(|slice| slice.to_string().len()).sum();
            assert!(size <= 20_000, "{}: {size} bytes", machine.name);
        }
    }
}

#[test]
fn slices_are_as_few_as_taints_allow() {
    let sixteen = cut_into_mig(machines::load("dgx2-v100").unwrap().observed, 7);
    assert_eq!(slices(published(&sixteen, &[])).len(), 1, "112 devices without taints");
    let sick = published(&sixteen, &reasons_for_three_taints());
    assert_eq!(slices(sick.clone()).len(), 2, "64 and 48 devices with taints");
    let many = |count: usize| -> Vec<SliceDevice> {
        (0..count).map(|number| SliceDevice { name: format!("gpu-{number}"), ..SliceDevice::default() }).collect()
    };
    // If a pool needs several slices, each keeps room for taints.
    for (devices, expected) in [(0, 1), (64, 1), (128, 1), (129, 3)] {
        assert_eq!(slices(many(devices)).len(), expected, "{devices} devices");
    }
    let slices = slices(sick.clone());
    let written = slices.iter().flat_map(|slice| slice["devices"].as_array().unwrap());
    let written: Vec<&str> = written.map(|device| device["name"].as_str().unwrap()).collect();
    assert_eq!(written, sick.iter().map(|device| device.name.as_str()).collect::<Vec<_>>());
}

#[test]
fn gpu_in_mig_mode_is_published_by_its_mig_devices() {
    let mut observed = machines::load("dgx-a100").unwrap().observed;
    let all = cut_into_mig(observed.clone(), 3);
    observed.gpus[2].mig = all.gpus[2].mig.clone();
    let published = published(&observed, &[]);
    let minor = observed.gpus[2].minor.unwrap();
    let names: BTreeSet<&str> = published.iter().map(|device| device.name.as_str()).collect();
    assert!(!names.contains(format!("gpu-{minor}").as_str()));
    let mig: Vec<_> = published.iter().filter(|device| device.name.starts_with(&format!("gpu-{minor}-mig-"))).collect();
    assert_eq!(mig.len(), 3);
    assert!(mig.iter().all(|device| !device.attributes.keys().any(|key| key.contains("pair"))));
    assert_eq!(published.len(), 7 + 3);
    assert!(published[..7].iter().all(|device| !device.name.contains("mig")), "a MIG device before a whole GPU");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_machine_is_within_the_limits(
        observed in random_node::odd_node(9),
        minors in prop::collection::vec(prop::option::of(0..4_u32), 9),
        model in "[ -~]{0,80}", driver in "[0-9.x]{0,12}", mig in 0..4_u32,
    ) {
        let mut observed = observed;
        for (gpu, minor) in observed.gpus.iter_mut().zip(minors) {
            (gpu.minor, gpu.model) = (minor, Some(model.clone()));
        }
        observed.driver_version = Some(driver);
        let observed = if mig == 0 { observed } else { cut_into_mig(observed, mig) };
        slices(published(&observed, &[UnhealthyReason::DoubleBitEcc]));
    }

    #[test]
    fn order_of_gpus_changes_no_device(observed in random_node::node(8)) {
        let mut reversed = observed.clone();
        reversed.gpus.reverse();
        prop_assert_eq!(published(&reversed, &[]), published(&observed, &[]));
    }
}
