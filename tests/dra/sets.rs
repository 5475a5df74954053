//! Sets of GPUs as devices: what they look like, the limits of the API with them, and claims that hold them.

use std::fmt::Write as _;

use linkwise::allocation::AllocationTables;
use linkwise::claims::ClaimName;
use linkwise::machines;
use linkwise::publish::dra::slice::Pool;
use linkwise::publish::dra::{
    DraFacts, DraSettings, GpuLayout, GroupSizes, HeldDevices, LayoutCache, MOST_DEVICES_WITH_SETS, PublishedSets,
    SliceDevice, counters, devices, offered, offered_now,
};
use linkwise::state::{
    ClaimedDevice, DRA_GRACE, Door, DraGpus, DriverVersions, Event, Holdings, NodeState, NumaHints, PreparedClaim,
    ResourcePlan, Timestamp, UnhealthyReason,
};
use linkwise::topology::{NodeObservation, NodeTopology};
use proptest::prelude::*;

use super::checker::check;
use super::golden::{holds, linkwise};
use super::limits::{cut, rich};
use crate::random_node;

const DRIVER: &str = "gpu.nvidia.com";

/// The pool of a machine with sets, as the API gets it; with reasons all of it is sick.
pub fn pool(observed: &NodeObservation, reasons: &[UnhealthyReason]) -> Pool {
    let (topology, _) = NodeTopology::assemble(observed);
    let gpus = offered(&topology, &ResourcePlan { dra: DraGpus::All, ..ResourcePlan::default() });
    let tables = AllocationTables::new(topology.clone().into());
    let layout = GpuLayout::of(&tables, gpus, &GroupSizes::default());
    let versions = DriverVersions::of(observed);
    let count = DraFacts::of_machine(&topology, &versions, gpus, &layout).devices.len();
    let layout = layout.with_sets(&tables, &GroupSizes::default(), MOST_DEVICES_WITH_SETS.saturating_sub(count));
    let mut facts = DraFacts::of_machine(&topology, &versions, gpus, &layout);
    facts.settings = DraSettings { sets: PublishedSets::All, evict_from_lost: true, ..DraSettings::default() };
    facts.devices.iter_mut().for_each(|device| device.reasons = reasons.to_vec());
    let devices = devices(&facts).0;
    Pool { counters: counters(&devices), ..Pool::new(DRIVER, "node-1.example.org", devices) }
}

/// The bytes of its slices, checked.
fn bytes(pool: &Pool) -> usize {
    let slices: Vec<_> = pool.slices(7).iter().map(|slice| serde_json::to_value(slice).unwrap()).collect();
    check(&slices);
    slices.iter().map(|slice| slice.to_string().len()).sum()
}

fn is_set(device: &&SliceDevice) -> bool {
    device.name.starts_with("gpus-")
}

/// A machine of so many GPUs, each of which is like the last of a built-in one.
fn of_gpus(count: u32) -> NodeObservation {
    let mut observed = machines::load("pcie-8x-pix-pairs").unwrap().observed;
    let last = observed.gpus.last().unwrap().clone();
    observed.gpus = (0..count)
        .map(|number| {
            let mut gpu = last.clone();
            (gpu.index, gpu.minor) = (number, Some(number));
            gpu.uuid = format!("GPU-{number:08}-0000-4000-8000-000000000000").parse().unwrap();
            gpu.pci = format!("0000:{number:02x}:00.0").parse().unwrap();
            gpu
        })
        .collect();
    observed
}

fn sick() -> Vec<UnhealthyReason> {
    vec![UnhealthyReason::Xid { code: 79, instance: None }, UnhealthyReason::OffBus, UnhealthyReason::DoubleBitEcc]
}

#[test]
fn every_machine_with_sets_is_within_the_limits() {
    let built_in = machines::built_in().map(|machine| machines::load(machine.name).unwrap().observed);
    for observed in built_in.chain([of_gpus(9), of_gpus(10), of_gpus(64)]) {
        let gpus = observed.gpus.len();
        for (number, observed) in [observed.clone(), rich(observed)].into_iter().enumerate() {
            let healthy = pool(&observed, &[]);
            let (all, size) = (healthy.devices.len(), bytes(&healthy));
            eprintln!("{gpus} GPUs, {all} devices: {size} bytes");
            let expected = match gpus {
                2 => 2 + 1,
                4 => 4 + 6 + 1,
                8 => 8 + 28 + 70 + 1,
                9 => 9 + 36 + 126 + 9,
                _ => MOST_DEVICES_WITH_SETS,
            };
            assert!(
                if gpus < 10 { all == expected } else { (expected - 16..=expected).contains(&all) },
                "{gpus}: {all}"
            );
            assert!(size <= if gpus <= 8 { 80_000 } else { 200_000 }, "{gpus} GPUs, {number}: {size} bytes");
            let sick = pool(&observed, &sick());
            assert!(bytes(&sick) > size && sick.devices.iter().all(|device| device.taints.len() == 3), "{gpus}");
        }
    }
}

#[test]
fn node_of_eight_without_sets_is_small() {
    for machine in machines::built_in() {
        let observed = rich(machines::load(machine.name).unwrap().observed);
        if observed.gpus.len() <= 8 {
            let size = bytes(&Pool::new(DRIVER, "node-1.example.org", super::limits::published(&observed, &[])));
            assert!(size <= 20_000, "{}: {size} bytes", machine.name);
        }
    }
}

#[test]
fn gpus_in_mig_mode_are_in_no_set() {
    let observed = machines::load("dgx-a100").unwrap().observed;
    let all = pool(&cut(observed.clone(), 7), &[]);
    assert!(all.counters.is_empty() && !all.devices.iter().any(|device| is_set(&device)));
    bytes(&all);
    let mut some = observed.clone();
    for gpu in 0..4 {
        some.gpus[gpu].mig = cut(observed.clone(), 7).gpus[gpu].mig.clone();
    }
    let some = pool(&some, &[]);
    assert_eq!(some.devices.iter().filter(is_set).count(), 6 + 1);
    assert!(
        some.devices.iter().filter(|device| device.name.contains("mig")).all(|mig| mig.consumes_counters.is_empty())
    );
    bytes(&some);
}

#[test]
fn sets_of_machines_keep_their_order() {
    let mut text = String::new();
    for name in ["workstation-a6000", "dgx1-v100"] {
        let pool = pool(&machines::load(name).unwrap().observed, &[]);
        writeln!(text, "{name}: {} devices", pool.devices.len()).unwrap();
        for device in pool.devices.iter().filter(is_set) {
            let of = |key: &str| {
                serde_json::to_value(&device.attributes[&format!("linkwise.dev/{key}")]).unwrap()["int"].clone()
            };
            writeln!(text, "{} tier {}, {} MB/s", device.name, of("tier"), of("allReduceMBps")).unwrap();
        }
    }
    holds("dra-sets", &text);
}

#[test]
fn command_prints_sets_and_their_counters() {
    holds("dra-sets-command", &linkwise(&["dra", "--node", "workstation-a6000", "--sets", "on", "--format", "yaml"]));
    for machine in machines::built_in() {
        let list: serde_json::Value =
            serde_json::from_str(&linkwise(&["dra", "--node", machine.name, "--dra-sets", "auto"])).unwrap();
        let specs: Vec<_> = list["items"].as_array().unwrap().iter().map(|item| item["spec"].clone()).collect();
        check(&specs);
        assert!(specs[0]["sharedCounters"].is_array() && specs[1].get("sharedCounters").is_none(), "{}", machine.name);
    }
}

/// A DGX-1 all of whose GPUs have gone to DRA.
struct Node {
    state: NodeState,
    layouts: LayoutCache,
    now: Timestamp,
}

impl Node {
    fn new() -> Self {
        let now = Timestamp::from_secs(1_000);
        let mut node = Self { state: NodeState::new(NumaHints::Node), layouts: LayoutCache::default(), now };
        node.apply(Event::Observed(Box::new(machines::load("dgx1-v100").unwrap().observed)));
        node.offers(DraGpus::All);
        (0..3).for_each(|_| node.lists(&[]));
        node
    }

    fn apply(&mut self, event: Event) {
        self.state = self.state.clone().apply(event, self.now).0;
    }

    fn offers(&mut self, dra: DraGpus) {
        self.apply(Event::Planned(Box::new(ResourcePlan { dra, ..ResourcePlan::default() })));
    }

    /// The kubelet lists these devices of one claim, each with its CDI names.
    fn lists(&mut self, claimed: &[(&str, &[&str])]) {
        let claimed = claimed.iter().map(|(device, cdi)| ClaimedDevice {
            claim: "default/a".to_owned(),
            driver: DRIVER.to_owned(),
            device: (*device).to_owned(),
            pool: "n/gpu".to_owned(),
            cdi_names: cdi.iter().map(|name| (*name).to_owned()).collect(),
        });
        self.apply(Event::Holders(Some(Holdings { claims: claimed.collect(), ..Holdings::default() })));
    }

    fn uuid(&self, minor: u32) -> linkwise::topology::GpuUuid {
        self.state.topology().gpus().iter().find(|gpu| gpu.minor == Some(minor)).unwrap().uuid.clone()
    }

    fn devices(&mut self, sets: PublishedSets) -> Vec<SliceDevice> {
        let layout = self.layouts.layout(self.state.tables(), offered_now(&self.state), &GroupSizes::default(), 248);
        let settings = DraSettings { sets, ..DraSettings::default() };
        devices(&DraFacts::of_state(&self.state, DRIVER, &layout, settings)).0
    }

    fn is_dra(&self, minor: u32) -> bool {
        self.state.door(&self.uuid(minor)).is_some_and(Door::is_dra)
    }
}

#[test]
fn gpu_in_a_held_set_stays_with_dra() {
    let by_name: &[&str] = &[];
    for with_cdi in [false, true] {
        let mut node = Node::new();
        let cdi = [node.uuid(4).to_string(), node.uuid(7).to_string()];
        let cdi: Vec<&str> = cdi.iter().map(String::as_str).collect();
        let names = if with_cdi { cdi.as_slice() } else { by_name };
        // A claim that linkwise prepared; the kubelet lists it.
        node.apply(Event::Prepared(vec![PreparedClaim {
            claim: ClaimName { namespace: "default".into(), name: "a".into(), uid: "u".into() },
            gpus: [node.uuid(4), node.uuid(7)].into(),
            devices: ["gpus-2-4-7".to_owned()].into(),
            ..PreparedClaim::default()
        }]));
        node.lists(&[("gpus-2-4-7", names)]);
        assert_eq!(HeldDevices::of(&node.state, DRIVER), HeldDevices { is_known: true, any: true, sets: true });
        // Its checkpoint is gone, the kubelet's list is not.
        node.apply(Event::Prepared(Vec::new()));
        node.offers(DraGpus::None);
        node.now += DRA_GRACE;
        (0..3).for_each(|_| node.lists(&[("gpus-2-4-7", names)]));
        let left: Vec<u32> = (0..8).filter(|minor| node.is_dra(*minor)).collect();
        assert_eq!(left, [4, 7], "with CDI names: {with_cdi}");
        (0..3).for_each(|_| node.lists(&[]));
        assert!(!node.is_dra(4) && !node.is_dra(7));
    }
}

#[test]
fn held_set_keeps_its_members_out_without_counters() {
    let mut node = Node::new();
    node.lists(&[("gpus-2-4-7", &[])]);
    let names = |devices: &[SliceDevice]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
    let without = names(&node.devices(PublishedSets::None));
    assert_eq!(without.len(), 6);
    assert!(!without.contains(&"gpu-4".to_owned()) && !without.contains(&"gpu-7".to_owned()), "{without:?}");
    let leaving = node.devices(PublishedSets::Held);
    assert_eq!(names(&leaving)[8..], ["gpus-2-4-7"]);
    assert!(leaving.iter().all(|device| !device.consumes_counters.is_empty()));
}

#[test]
fn change_of_health_moves_no_counter() {
    let mut node = Node::new();
    let counted = |devices: &[SliceDevice]| {
        devices.iter().map(|device| (device.name.clone(), device.consumes_counters.clone())).collect::<Vec<_>>()
    };
    let before = counted(&node.devices(PublishedSets::All));
    node.apply(Event::Xid { gpu: node.uuid(3), code: 79, instance: None });
    assert_eq!(counted(&node.devices(PublishedSets::All)), before);
    let tainted = node.devices(PublishedSets::All).iter().filter(|device| !device.taints.is_empty()).count();
    // The GPU, 7 pairs, 35 fours and the eight.
    assert_eq!(tainted, 1 + 7 + 35 + 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_machine_with_sets_is_within_the_limits(
        observed in random_node::odd_node(9),
        minors in prop::collection::vec(prop::option::of(0..70_u32), 9),
    ) {
        let mut observed = observed;
        for (gpu, minor) in observed.gpus.iter_mut().zip(minors) {
            gpu.minor = minor;
        }
        bytes(&pool(&observed, &sick()));
    }
}
