//! Sets of GPUs as devices.

use super::*;

/// The sets of a machine as devices, of which there may be so many.
fn with_sets(topology: &NodeTopology, room: usize, change: impl FnOnce(&mut DraFacts<'_>)) -> Vec<SliceDevice> {
    let gpus = offered(topology, &all());
    let tables = AllocationTables::new(Arc::new(topology.clone()));
    let sizes = GroupSizes::default();
    let layout = GpuLayout::of(&tables, gpus, &sizes).with_sets(&tables, &sizes, room);
    let versions = DriverVersions { driver: Some("580.95.05".to_owned()), cuda: None };
    let mut facts = DraFacts::of_machine(topology, &versions, gpus, &layout);
    facts.settings.sets = PublishedSets::All;
    change(&mut facts);
    devices(&facts).0
}

fn names(devices: &[SliceDevice]) -> Vec<&str> {
    devices.iter().map(|device| device.name.as_str()).collect()
}

/// What a device consumes, as `counter set/counter`.
fn consumed(device: &SliceDevice) -> Vec<String> {
    let of = |set: &CounterConsumption| -> Vec<String> {
        set.counters.keys().map(|counter| format!("{}/{counter}", set.counter_set)).collect()
    };
    device.consumes_counters.iter().flat_map(of).collect()
}

#[test]
fn sets_are_devices_over_the_counters_of_their_members() {
    let devices = with_sets(&chain(), 20, |_| {});
    let expected =
        ["gpus-2-0-1", "gpus-2-2-3", "gpus-2-1-2", "gpus-2-0-3", "gpus-2-0-2", "gpus-2-1-3", "gpus-4-0-1-2-3"];
    assert_eq!(names(&devices)[..4].iter().filter(|name| name.starts_with("gpu-")).count(), 4);
    assert_eq!(names(&devices)[4..], expected);
    assert_eq!(consumed(&devices[0]), ["gpus-0/gpu-0"]);
    assert_eq!(consumed(&devices[4]), ["gpus-0/gpu-0", "gpus-0/gpu-1"]);
    let pair = &devices[4];
    assert_eq!(
        ["type", "linkwise.dev/size", "linkwise.dev/tier", "linkwise.dev/members", "cudaComputeCapability"]
            .map(|key| text(pair, key).unwrap()),
        ["gpu-set", "2", "1", "0,1", "7.0.0"]
    );
    assert_eq!(
        devices[4..10].iter().map(|pair| text(pair, "linkwise.dev/tier").unwrap()).collect::<String>(),
        "111222"
    );
    let counters = counters(&devices);
    assert_eq!((counters.len(), counters[0].name.as_str(), counters[0].counters.len()), (1, "gpus-0", 4));
    assert!(counters[0].counters.values().all(|counter| counter.value == "1"));
}

#[test]
fn no_set_is_over_gpus_of_two_kinds() {
    let gpu = |number: u32, more: &str| {
        format!("{{\"index\": {number}, \"uuid\": \"GPU-{number}\", \"pci\": \"0000:0{number}:00.0\", {more}}}")
    };
    let kinds = [
        gpu(0, "\"minor\": 0, \"model\": \"A\""),
        gpu(1, "\"minor\": 1, \"model\": \"B\""),
        gpu(2, "\"minor\": 2, \"model\": \"A\""),
        gpu(3, "\"minor\": 3, \"model\": \"A\", \"memory_mib\": 1024"),
        gpu(4, "\"model\": \"A\""),
        gpu(5, "\"minor\": 5, \"model\": \"A\", \"mig\": {\"enabled\": true, \"devices\": []}"),
    ];
    let devices = with_sets(&node(&kinds.join(", ")), 100, |_| {});
    assert_eq!(names(&devices), ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-pci-0000-04-00-0", "gpus-2-0-2"]);
    assert!(devices[4].consumes_counters.is_empty(), "a GPU without a minor number is in no set");
}

#[test]
fn taint_of_a_member_is_on_its_sets() {
    let sick = |facts: &mut DraFacts<'_>| {
        let gpu = facts.devices.iter_mut().find(|device| device.name.as_deref() == Some("gpu-1")).unwrap();
        gpu.reasons = Vec::from([UnhealthyReason::Xid { code: 79, instance: None }]);
    };
    let devices = with_sets(&chain(), 20, sick);
    for device in &devices {
        let has_it =
            device.name == "gpu-1" || text(device, "linkwise.dev/members").is_some_and(|all| all.contains('1'));
        assert_eq!(
            device.taints.iter().map(|taint| taint.value.as_str()).collect::<Vec<_>>(),
            &["79"][..has_it.into()]
        );
    }
    // Without taints such a set is left out, unless a claim holds it.
    let devices = with_sets(&chain(), 20, |facts| {
        sick(facts);
        facts.settings.taints_survive = false;
        facts.held.insert("gpus-2-1-2".to_owned());
    });
    assert_eq!(names(&devices)[3..], ["gpus-2-2-3", "gpus-2-1-2", "gpus-2-0-3", "gpus-2-0-2"]);
    assert!(devices.iter().all(|device| device.taints.is_empty()));
}

#[test]
fn set_that_a_claim_holds_keeps_its_counters() {
    let held = |sets| {
        move |facts: &mut DraFacts<'_>| {
            facts.settings.sets = sets;
            facts.devices.retain(|device| device.name.as_deref() != Some("gpu-1"));
            facts.held.insert("gpus-2-0-1".to_owned());
        }
    };
    for sets in [PublishedSets::All, PublishedSets::Withdrawn, PublishedSets::Held] {
        let devices = with_sets(&chain(), 20, held(sets));
        let set = devices.iter().find(|device| device.name == "gpus-2-0-1").unwrap();
        assert_eq!(consumed(set), ["gpus-0/gpu-0", "gpus-0/gpu-1"], "{sets:?}");
        assert!(counters(&devices)[0].counters.contains_key("gpu-1"), "else the pool were invalid");
        let others: Vec<&SliceDevice> = devices.iter().filter(|device| device.name.starts_with("gpus-")).collect();
        let expected = if sets == PublishedSets::Held { 1 } else { 4 };
        assert_eq!(others.len(), expected, "{sets:?}");
        let is_tainted = sets != PublishedSets::All;
        assert!(others.iter().all(|set| set.taints.is_empty() != is_tainted), "{sets:?}");
    }
    // Without counters its members are left out.
    let devices = with_sets(&chain(), 20, held(PublishedSets::None));
    assert_eq!(names(&devices), ["gpu-2", "gpu-3"]);
    assert!(devices.iter().all(|device| device.consumes_counters.is_empty()));
}

#[test]
fn few_sets_still_divide_all_gpus() {
    let gpu = |n: u32| {
        format!("{{\"index\": {n}, \"uuid\": \"GPU-{n:02}\", \"pci\": \"0000:{n:02x}:00.0\", \"minor\": {n}}}")
    };
    let many = node(&(0..64).map(gpu).collect::<Vec<_>>().join(", "));
    let devices = with_sets(&many, 192, |_| {});
    assert!(devices.len() <= MOST_DEVICES_WITH_SETS && devices.len() > 240, "{}", devices.len());
    for size in [2, 4, 8] {
        let sets = devices.iter().filter(|device| device.name.starts_with(&format!("gpus-{size}-")));
        let mut free: Vec<String> = devices[..64].iter().map(|gpu| gpu.name.clone()).collect();
        // In published order, as long as one is free.
        for set in sets {
            let members = crate::topology::set_members(&set.name).unwrap();
            assert!(set.consumes_counters.len() <= 2);
            if members.iter().all(|member| free.contains(member)) {
                free.retain(|gpu| !members.contains(gpu));
            }
        }
        assert!(free.is_empty(), "{size}: {free:?}");
    }
    assert_eq!(counters(&devices).iter().map(|set| set.counters.len()).collect::<Vec<_>>(), [32, 32]);
    assert_eq!(with_sets(&many, 0, |_| {}).len(), 64);
}
