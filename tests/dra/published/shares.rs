//! The slices of GPUs that several claims share.

use linkwise_core::publish::dra::{Capacity, DraFacts, DraSettings, SliceDevice, devices};
use linkwise_core::state::{
    DeviceSelector, GpuShares, ResourceName, ResourcePlan, SharedDevices, SharedResource, Sharing, SharingKind,
};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

use super::golden::{assert_golden, config, linkwise, run};
use super::limits::{idle, slices, with_all_facts};

/// The devices that a machine publishes if its GPUs with these indices are shared.
pub fn published(observed: &NodeObservation, shared: &[u32], shares: GpuShares) -> Vec<SliceDevice> {
    let devices_shared = SharedDevices::List(shared.iter().copied().map(DeviceSelector::Index).collect());
    let row = SharedResource { devices: devices_shared, ..SharedResource::new(ResourceName::gpu(), shares.shares) };
    let fail_requests_greater_than_one = shares.one_each;
    let sharing = Sharing { fail_requests_greater_than_one, ..Sharing::new(SharingKind::TimeSlicing, vec![row]) };
    let sharing = Some(sharing).filter(|_| !shared.is_empty());
    let (state, layout) = idle(observed, ResourcePlan { sharing, ..ResourcePlan::default() });
    devices(&DraFacts::of_state(&state, &layout, DraSettings::default())).0
}

fn in_shares(shares: u32) -> GpuShares {
    GpuShares { shares, one_each: false }
}

#[test]
fn shared_gpus_keep_to_the_limits_on_every_machine() {
    for machine in machines::built_in() {
        let observed = with_all_facts(machines::load(machine.name).unwrap().observed);
        let all: Vec<u32> = observed.gpus.iter().map(|gpu| gpu.index).collect();
        for shares in [2, 3, 7, 1000, 1024] {
            for one_each in [false, true] {
                let devices = published(&observed, &all, GpuShares { shares, one_each });
                assert_eq!(devices.len(), all.len(), "{}", machine.name);
                slices(devices);
            }
        }
    }
}

#[test]
fn memory_is_divided_by_shares_if_it_can_be() {
    let mut observed = machines::load("workstation-a6000").unwrap().observed;
    let mut memory_of = |memory: Option<u64>, shares: u32| -> Option<Capacity> {
        observed.gpus[0].memory_mib = memory;
        published(&observed, &[0], in_shares(shares)).pop().unwrap().capacity.remove("memory")
    };
    let default = |capacity: Option<Capacity>| capacity.and_then(|capacity| Some(capacity.request_policy?.default));
    assert_eq!(default(memory_of(Some(81_559), 4)).as_deref(), Some("20389Mi"));
    assert_eq!(default(memory_of(Some(81_920), 4)).as_deref(), Some("20Gi"));
    assert_eq!(default(memory_of(Some(1024), 1024)).as_deref(), Some("1Mi"));
    for memory in [None, Some(0), Some(1023)] {
        assert_eq!(memory_of(memory, 1024), None, "{memory:?}");
    }
}

#[test]
fn shared_gpus_follow_the_others_and_are_in_no_group() {
    let observed = machines::load("dgx1-v100").unwrap().observed;
    let devices = published(&observed, &[0, 3], in_shares(2));
    let are_shared: Vec<_> = devices.iter().map(|device| device.allow_multiple_allocations).collect();
    assert_eq!(are_shared, [false, false, false, false, false, false, true, true]);
    let is_group = |key: &String| ["pair", "quad", "octet", "nvlinkDomain"].iter().any(|word| key.contains(word));
    assert!(devices[..6].iter().all(|device| device.attributes.keys().any(is_group)));
    assert!(devices[6..].iter().all(|device| !device.attributes.keys().any(is_group)));
    // GPUs 0 and 3 are one of the machine's best pairs. The groups of the others are made without them.
    let unshared = published(&NodeObservation { ..observed }, &[], in_shares(2));
    assert_ne!(unshared[0].attributes, devices[0].attributes);
}

/// Runs the command with a configuration. Returns what it prints, and its standard error.
fn with_config(machine: &str, text: &str) -> (serde_json::Value, String) {
    let config = config(text);
    let (printed, stderr) = run(&["dra", "--node", machine, "--config-file", config.to_str().unwrap()]).unwrap();
    (serde_json::from_str(&printed).unwrap(), stderr)
}

/// The shared devices of a list, each with the number of its shares.
fn shared(list: &serde_json::Value) -> Vec<String> {
    let devices = list["items"][0]["spec"]["devices"].as_array().unwrap().iter();
    let shared = devices.filter(|device| device["allowMultipleAllocations"] == true);
    let texts = shared.map(|device| format!("{} in {}", device["name"], device["capacity"]["shares"]["value"]));
    texts.map(|text| text.replace('"', "")).collect()
}

#[test]
fn command_prints_shared_gpus() {
    let row = "{name: nvidia.com/gpu, replicas: 4, devices: 1}";
    let sharing = format!("sharing: {{timeSlicing: {{resources: [{row}]}}}}");
    let config = config(&format!("version: v1\nlinkwise: {{naming: true}}\n{sharing}\n"));
    let args = ["--config-file", config.to_str().unwrap(), "--format", "yaml"];
    assert_golden("dra-command-shared", &linkwise(&[&["dra", "--node", "workstation-a6000"][..], &args].concat()));
}

#[test]
fn rows_for_sharing_choose_the_gpus_of_dra() {
    let run = |more: &str, strategy: &str, row: &str| {
        let sharing = format!("sharing: {{{strategy}: {{resources: [{{name: nvidia.com/gpu, {row}}}]}}}}");
        with_config("dgx-h100", &format!("version: v1\nlinkwise: {{naming: true{more}}}\n{sharing}\n"))
    };
    let (all, stderr) = run("", "timeSlicing", "replicas: 2");
    assert_eq!((shared(&all).len(), stderr.as_str()), (8, ""));
    let other = "{name: nvidia.com/gpu, rename: nvidia.com/y, replicas: 3, devices: [1]";
    let (rows, stderr) = run("", "timeSlicing", &format!("rename: nvidia.com/x, replicas: 2, devices: [0]}}, {other}"));
    assert_eq!((shared(&rows), stderr.as_str()), (vec!["gpu-0 in 2".to_owned(), "gpu-1 in 3".to_owned()], ""));
    let some = ", filter: {exclude: [0, 1, 4, 6, 7]}";
    let fewer = "linkwise: nvidia.com/gpu: 4 of its devices are to be shared, the node has 3; these are shared\n";
    let absent = "linkwise: nvidia.com/gpu has no device 9 that could be shared; the others are shared\n";
    for (devices, names, warning) in [
        ("2", &["gpu-2 in 2", "gpu-3 in 2"][..], ""),
        ("4", &["gpu-2 in 2", "gpu-3 in 2", "gpu-5 in 2"], fewer),
        ("[9, 3]", &["gpu-3 in 2"], absent),
    ] {
        let (list, stderr) = run(some, "timeSlicing", &format!("replicas: 2, devices: {devices}"));
        assert_eq!((shared(&list), stderr.as_str()), (names.iter().map(ToString::to_string).collect(), warning));
    }
    let (none, stderr) = run(some, "mps", "replicas: 2");
    assert_eq!(shared(&none), [""; 0]);
    assert!(stderr.contains("is to be shared by MPS, but with DRA each claim asks for MPS itself"), "{stderr}");
}
