//! The shortfalls of a node: hardware that it had before, or that the operator expects, and that it lacks.

use std::time::Duration;

use linkwise_core::state::{Effect, Event, Expectation, HealthRecord, NodeIdentity, NodeState};
use linkwise_core::topology::{GpuObservation, NodeObservation};
use serde_json::{Value, json};

/// A node over reboots: its state, and a line for each shortfall that began (`+`) or ended (`-`) since the last scan.
struct World {
    state: NodeState,
    /// The lanes of the first GPU.
    lanes: u32,
    expected: Expectation,
    now: u64,
    lines: Vec<String>,
}

/// A GPU of this number in this slot, with 4 NVLinks to a switch and 2 to the GPU in each slot of `peers`.
fn gpu(number: u32, slot: u32, peers: &[u32]) -> Value {
    let mut links = vec![json!({"links": [0, 1, 2, 3], "remote": {"switch": null}})];
    links
        .extend(peers.iter().map(|peer| json!({"links": [4 + 2 * peer, 5 + 2 * peer], "remote": {"gpu": pci(*peer)}})));
    json!({"index": slot, "uuid": format!("GPU-{number}"), "pci": pci(slot), "model": "NVIDIA H100 80GB HBM3",
           "memory_mib": 81_559, "nvlinks": links, "mig": {"enabled": false}})
}

fn pci(slot: u32) -> String {
    format!("0000:0{slot}:00.0")
}

/// The GPU with one fact changed.
fn with(mut gpu: Value, key: &str, value: Value) -> Value {
    gpu[key] = value;
    gpu
}

fn whole() -> Vec<Value> {
    (0..4).map(|at| gpu(at, at, &[])).collect()
}

fn without(slot: usize) -> Vec<Value> {
    let mut gpus = whole();
    gpus.remove(slot);
    gpus
}

impl World {
    fn expecting(expected: Expectation, gpus: Vec<Value>) -> Self {
        let mut world =
            Self { state: NodeState::default(), lanes: 16, expected, now: 1_700_000_000, lines: Vec::new() };
        world.start(HealthRecord::default(), "0");
        world.scan(gpus);
        world
    }

    fn new() -> Self {
        Self::expecting(Expectation::default(), whole())
    }

    fn apply(&mut self, event: Event) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, Duration::from_secs(self.now));
        self.state = state;
        self.lines.extend(effects.into_iter().filter_map(|effect| match effect {
            Effect::Shortfall(shortfall, began) => Some(format!("{} {shortfall}", if began { "+" } else { "-" })),
            _ => None,
        }));
    }

    fn accept(&mut self) {
        self.apply(Event::HardwareAccepted(self.state.hardware().shortfalls().cloned().collect()));
    }

    fn start(&mut self, record: HealthRecord, boot: &str) {
        // The record goes through its form on the disk.
        let record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        self.state = NodeState::default().expecting(self.expected.clone());
        self.apply(Event::Restored(Box::new(HealthRecord { version: HealthRecord::VERSION, ..record })));
        self.apply(Event::Identified(NodeIdentity { boot: Some(boot.to_owned()), ..NodeIdentity::default() }));
    }

    /// Scans a minute later; returns the lines since the last scan.
    fn scan(&mut self, gpus: Vec<Value>) -> Vec<String> {
        self.now += 60;
        let mut gpus: Vec<GpuObservation> = serde_json::from_value(Value::Array(gpus)).unwrap();
        gpus.iter_mut().take(1).for_each(|gpu| gpu.pcie_width_now = Some(self.lanes));
        self.apply(Event::Observed(Box::new(NodeObservation { gpus, ..NodeObservation::default() })));
        std::mem::take(&mut self.lines)
    }

    /// Restarts linkwise in this boot and scans; returns the lines.
    fn boots(&mut self, boot: &str, gpus: Vec<Value>) -> Vec<String> {
        let record = self.state.record();
        self.start(record, boot);
        self.scan(gpus)
    }

    /// The present shortfalls, each with the time at which it began.
    fn shortfalls(&self) -> Vec<(String, u64)> {
        let shortfalls = self.state.hardware().shortfalls();
        shortfalls.map(|shortfall| (shortfall.to_string(), shortfall.since)).collect()
    }
}

const MISSING: &str = "GPU 0000:02:00.0 (GPU-2): missing (NVIDIA H100 80GB HBM3)";

#[test]
fn missing_gpu_is_named_until_it_is_back() {
    let mut world = World::new();
    assert_eq!(world.boots("1", without(2)), [format!("+ {MISSING}")]);
    let standing = vec![(MISSING.to_owned(), world.now)];
    assert_eq!(world.boots("2", without(2)), Vec::<String>::new(), "the record has the shortfall");
    assert_eq!(world.shortfalls(), standing);
    // A clock that was set back changes nothing.
    world.now -= 1_000_000;
    assert_eq!((world.scan(without(2)), world.shortfalls()), (Vec::new(), standing));
    assert_eq!(world.scan(whole()), [format!("- {MISSING}")]);
    assert_eq!(world.scan(Vec::new()).len(), 4, "a node without GPUs lacks them all");
}

#[test]
fn accepted_shortfall_is_silent_until_it_grows() {
    let mut world = World::new();
    let fewer = |links: u32| {
        with(gpu(1, 1, &[]), "nvlinks", json!([{"links": (0..links).collect::<Vec<_>>(), "remote": {"switch": null}}]))
    };
    let odd = |links: u32| vec![gpu(0, 0, &[]), fewer(links), gpu(3, 3, &[])];
    let links = |has: u32| format!("GPU 0000:01:00.0 (GPU-1): {has} of 4 NVLinks are active");
    assert_eq!(world.scan(odd(2)), [format!("+ {}", links(2)), format!("+ {MISSING}")]);
    world.accept();
    assert_eq!(std::mem::take(&mut world.lines).len(), 2);
    assert_eq!((world.boots("1", odd(2)), world.boots("1", odd(3))), (Vec::new(), Vec::new()));
    assert_eq!(world.scan(odd(1)), [format!("+ {}", links(1))], "fewer links than accepted");
    world.accept();
    world.lines.clear();
    // A shortfall that had ended is no longer accepted.
    assert_eq!((world.scan(whole()), world.scan(odd(1)).len()), (Vec::new(), 2));
}

#[test]
fn lanes_memory_and_links_compare_with_the_most_seen() {
    let mut world = World::new();
    let memory = |mib: u64| with(gpu(0, 0, &[]), "memory_mib", json!(mib));
    // A driver that reserves more memory causes no shortfall.
    assert_eq!(world.scan(vec![memory(81_000), gpu(1, 1, &[]), gpu(2, 2, &[]), gpu(3, 3, &[])]), Vec::<String>::new());
    world.lanes = 8;
    let lines = world.scan(vec![memory(40_000), gpu(1, 1, &[]), gpu(2, 2, &[]), gpu(3, 3, &[])]);
    let gpu_0 = "+ GPU 0000:00:00.0 (GPU-0):";
    assert_eq!(
        lines,
        [format!("{gpu_0} its PCIe link has 8 of 16 lanes"), format!("{gpu_0} it has 40000 of 81559 MiB of memory")]
    );
    world.lanes = 16;
    // An unknown value is not a smaller one.
    let unknown = |at| ["nvlinks", "memory_mib"].iter().fold(gpu(at, at, &[]), |gpu, key| with(gpu, key, Value::Null));
    assert_eq!(world.scan((0..4).map(unknown).collect()).len(), 2);
    assert_eq!(world.shortfalls(), []);
}

#[test]
fn links_to_missing_gpu_are_no_second_shortfall() {
    let mesh = |gpus: &[u32]| {
        gpus.iter().map(|at| gpu(*at, *at, &gpus.iter().copied().filter(|to| to != at).collect::<Vec<_>>())).collect()
    };
    let mut world = World::expecting(Expectation::default(), mesh(&[0, 1, 2, 3]));
    assert_eq!(world.boots("1", mesh(&[0, 1, 3])), [format!("+ {MISSING}")]);
    assert_eq!(world.boots("2", mesh(&[0, 1, 2, 3])), [format!("- {MISSING}")]);
    // Links of or to a GPU in MIG mode, and links to a GPU whose absence is accepted, are no shortfall either.
    let mut divided: Vec<Value> = mesh(&[0, 1, 2, 3]);
    divided
        .iter_mut()
        .for_each(|gpu| gpu["nvlinks"] = json!([{"links": [0, 1, 2, 3, 4, 5, 6, 7], "remote": {"switch": null}}]));
    divided[2]["mig"] = json!({"enabled": true});
    assert_eq!(world.scan(divided), Vec::<String>::new());
    world.scan(mesh(&[0, 1, 3]));
    world.accept();
    world.lines.clear();
    assert_eq!(world.scan(mesh(&[0, 1, 3])), Vec::<String>::new());
    let mut world = World::expecting(Expectation { nvlinks: Some(10), ..Expectation::default() }, mesh(&[0, 1, 2, 3]));
    assert_eq!(world.scan(mesh(&[0, 1, 3])), [format!("+ {MISSING}")]);
    world.scan(mesh(&[0, 1, 2, 3]));
    let alone = |at: u32| gpu(at, at, &[]);
    assert_eq!(world.scan((0..4).map(alone).collect()).len(), 4, "no missing GPU explains the missing links");
}

#[test]
fn mig_mode_that_a_boot_changed_is_named() {
    let mut world = World::new();
    let in_mig = || whole().into_iter().map(|gpu| with(gpu, "mig", json!({"enabled": true}))).collect::<Vec<_>>();
    assert_eq!(world.scan(in_mig()), Vec::<String>::new(), "a change without a boot is deliberate");
    let off = |at: u32| format!("GPU {} (GPU-{at}): MIG mode has been off since the last boot or driver load", pci(at));
    let lines = world.boots("1", whole());
    assert_eq!(lines, (0..4).map(|at| format!("+ {}", off(at))).collect::<Vec<_>>());
    assert_eq!((world.scan(whole()), world.shortfalls().len()), (Vec::new(), 4), "another scan changes nothing");
    let mut laid_out = in_mig();
    let device = json!({"index": 0, "uuid": "MIG-0", "gpu_instance": 1, "compute_instance": 0, "gpu_slices": 1,
                        "compute_slices": 1, "memory_mib": 9_728});
    assert_eq!(world.boots("1", in_mig()), (0..4).map(|at| format!("- {}", off(at))).collect::<Vec<_>>());
    // A GPU with MIG devices is in MIG mode deliberately, after a boot too.
    laid_out[0]["mig"]["devices"] = json!([device]);
    let mut world = World::new();
    assert_eq!(world.boots("1", laid_out).len(), 3);
}

#[test]
fn failed_count_is_no_shortfall() {
    let mut world = World::new();
    let failures = vec![
        serde_json::from_value(json!({"subject": "driver", "call": "nvmlDeviceGetCount_v2", "error": "x"})).unwrap(),
    ];
    world.apply(Event::Observed(Box::new(NodeObservation { failures, ..NodeObservation::default() })));
    assert_eq!(world.shortfalls(), []);
}

#[test]
fn replaced_and_swapped_gpus_are_no_shortfall() {
    let mut world = World::new();
    let replaced = || vec![gpu(0, 0, &[]), gpu(1, 1, &[]), gpu(9, 2, &[]), gpu(3, 3, &[])];
    assert_eq!(world.boots("1", replaced()), Vec::<String>::new());
    let swapped = || vec![gpu(1, 0, &[]), gpu(0, 1, &[]), gpu(9, 2, &[]), gpu(3, 3, &[])];
    assert_eq!(world.boots("2", swapped()), Vec::<String>::new());
    let lost = world.boots("3", swapped().into_iter().skip(1).collect());
    assert_eq!(lost, ["+ GPU 0000:00:00.0 (GPU-1): missing (NVIDIA H100 80GB HBM3)"]);
}

#[test]
fn inventory_of_another_machine_is_forgotten() {
    let mut world = World::new();
    let other = |gpus: &[u32]| gpus.iter().map(|at| gpu(at + 10, at + 5, &[])).collect::<Vec<_>>();
    assert_eq!(world.boots("1", other(&[0, 1])), Vec::<String>::new(), "all GPUs and slots are new");
    let machine = |name: &str| NodeIdentity { machine: Some(name.to_owned()), ..NodeIdentity::default() };
    world.apply(Event::Identified(machine("one")));
    let record = world.state.record();
    world.start(record, "2");
    world.apply(Event::Identified(machine("two")));
    assert_eq!(world.scan(other(&[1])), Vec::<String>::new());
    assert_eq!(world.scan(other(&[2])).len(), 0, "all GPUs are new again");
}

#[test]
fn gpu_in_quarantine_is_not_missing() {
    let mut world = World::new();
    world.apply(Event::Quarantined("GPU-2".parse().unwrap(), "it hangs".to_owned()));
    assert_eq!(world.scan(without(2)), Vec::<String>::new());
}

#[test]
fn unmet_expectation_is_named_at_the_first_scan() {
    let expected = Expectation { gpus: Some(8), model: Some("NVIDIA-H100-80GB-HBM3".to_owned()), nvlinks: Some(18) };
    let mut gpus = vec![with(gpu(0, 0, &[]), "model", json!("Tesla T4")), gpu(1, 1, &[1, 2, 3, 4, 5, 6, 7])];
    let mut world = World::expecting(expected, gpus.clone());
    let standing: Vec<String> = world.shortfalls().into_iter().map(|(line, _)| line).collect();
    assert_eq!(
        standing,
        [
            "GPU 0000:00:00.0 (GPU-0): 4 of 18 NVLinks are active",
            "GPU 0000:00:00.0 (GPU-0): it is a Tesla T4, a NVIDIA-H100-80GB-HBM3 is expected",
            "this node: 2 GPUs, 8 are expected",
        ]
    );
    world.accept();
    world.lines.clear();
    assert_eq!(world.boots("1", gpus.clone()), Vec::<String>::new());
    gpus.pop();
    assert_eq!(world.boots("2", gpus).len(), 2, "fewer than accepted: the missing GPU, and the number of GPUs");
}
