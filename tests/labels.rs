//! The labels of machines: golden files of each built-in machine under each kind of configuration, values that real
//! nodes publish, and properties of any machine.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use linkwise_core::publish::labels::{HostFacts, LabelFacts, LabelProblem, LabelSettings, Vgpu, labels};
use linkwise_core::state::{DriverVersions, MigStrategy, ResourcePlan, SharedResource, Sharing, SharingKind};
use linkwise_core::topology::{
    MigDeviceObservation, MigEngines, MigObservation, MigPlacement, NodeObservation, NodeTopology,
};
use linkwise_host::labels::own_fabric;
use linkwise_host::machines;
use proptest::prelude::*;

use crate::dra::published::golden::assert_golden;
use crate::dra::published::limits::mig_device;
use crate::random_node;

type Map = BTreeMap<String, String>;

/// The labels below `linkwise.dev/`.
const OURS: [&str; 7] =
    ["gpu.island-size", "gpu.link", "gpu.models", "gpu.per-numa", "gpu.per-rail", "gpu.rails", "nvlink-fabric"];

fn labels_of(observed: NodeObservation, plan: ResourcePlan, own: Option<&str>) -> (Map, Vec<LabelProblem>) {
    labels(LabelFacts {
        topology: &NodeTopology::assemble(&observed).0,
        versions: &DriverVersions::of(&observed),
        plan: &plan,
        host: &HostFacts { machine_type: Some("Some Machine (X)\n".to_owned()), vgpu: Vgpu::Absent },
        settings: &LabelSettings { timestamp: Some(1), clique: true, own_fabric: own.map(own_fabric) },
    })
}

fn shared(kind: SharingKind, resource: &str) -> Option<Sharing> {
    Some(Sharing::new(kind, vec![SharedResource::new(resource.parse().unwrap(), 4)]))
}

/// A MIG device of this GPU.
fn device(gpu: usize, index: u32, slices: u32, memory_mib: u64) -> MigDeviceObservation {
    MigDeviceObservation {
        uuid: format!("MIG-{gpu}-{index}").parse().unwrap(),
        memory_mib,
        engines: Some(MigEngines { multiprocessors: 16 * slices, copy: slices, ..MigEngines::default() }),
        ..mig_device(index, slices, 19, MigPlacement { start: 0, size: 1 })
    }
}

/// Cuts GPUs that have MIG into devices of these slices and eighths of memory, but not the first `whole` GPUs.
fn cut(mut observed: NodeObservation, whole: usize, devices: &[(u32, u64)]) -> NodeObservation {
    for (at, gpu) in observed.gpus.iter_mut().enumerate().skip(whole).filter(|(_, gpu)| gpu.mig.is_some()) {
        let eighth = gpu.memory_mib.unwrap() / 8;
        let cut = (0..).zip(devices).map(|(index, (slices, eighths))| device(at, index, *slices, eighths * eighth));
        gpu.mig = Some(MigObservation { enabled: true, devices: cut.collect(), profiles: Vec::new() });
    }
    observed
}

fn text(labels: &Map) -> String {
    labels.iter().fold(String::new(), |mut text, (key, value)| {
        writeln!(text, "{key}={value}").unwrap();
        text
    })
}

/// The labels that a configuration adds, changes (`+`) or removes (`-`).
fn difference(before: &Map, after: &Map) -> String {
    let mut text = String::new();
    for (key, value) in after.iter().filter(|(key, value)| before.get(*key) != Some(value)) {
        writeln!(text, "+ {key}={value}").unwrap();
    }
    for key in before.keys().filter(|key| !after.contains_key(*key)) {
        writeln!(text, "- {key}").unwrap();
    }
    text
}

#[test]
fn built_in_machines_keep_their_labels() {
    let plan = |mig_strategy, sharing| ResourcePlan { mig_strategy, sharing, ..ResourcePlan::default() };
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        let of = |observed, plan| labels_of(observed, plan, Some(machine.name)).0;
        let plain = of(observed.clone(), plan(MigStrategy::None, None));
        let mut golden = text(&plain);
        let halves = cut(observed.clone(), 0, &[(3, 4), (3, 4)]);
        let parts = cut(observed.clone(), 1, &[(1, 1), (1, 1), (3, 4)]);
        let by_time = shared(SharingKind::TimeSlicing, "nvidia.com/gpu");
        for (case, observed, plan) in [
            ("time-slicing", observed.clone(), plan(MigStrategy::None, by_time.clone())),
            ("MPS", observed.clone(), plan(MigStrategy::None, shared(SharingKind::Mps, "nvidia.com/gpu"))),
            ("single, MIG off", observed, plan(MigStrategy::Single, None)),
            ("single", halves.clone(), plan(MigStrategy::Single, None)),
            ("single, time-slicing", halves, plan(MigStrategy::Single, by_time)),
            ("mixed", parts.clone(), plan(MigStrategy::Mixed, None)),
            ("single with two profiles", parts, plan(MigStrategy::Single, None)),
        ] {
            write!(golden, "\n{case}\n{}", difference(&plain, &of(observed, plan))).unwrap();
        }
        assert_golden(&format!("labels-{}", machine.name), &golden);
    }
}

#[test]
fn labels_command_prints_labels_of_machine() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.yaml");
    std::fs::write(&config, "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    command.env_clear().args(["labels", "--node", "dgx-h100", "--config-file"]).arg(config);
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let observed = machines::load("dgx-h100").unwrap().observed;
    let plan = ResourcePlan { sharing: shared(SharingKind::TimeSlicing, "nvidia.com/gpu"), ..ResourcePlan::default() };
    let mut expected = labels_of(observed, plan, Some("dgx-h100")).0;
    // The command prints no timestamp, and with `--node` no facts of the host.
    expected.retain(|key, _| key != "nvidia.com/gfd.timestamp" && key != "nvidia.com/vgpu.present");
    expected.insert("nvidia.com/gpu.machine".to_owned(), "unknown".to_owned());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text(&expected));
}

/// Labels of nodes in the field: <https://github.com/NVIDIA/k8s-device-plugin/issues/1501> (H100),
/// <https://github.com/Mellanox/network-operator/issues/211> (A100 40 GB), and dumps of H100 and A100 80 GB with MIG
/// strategy `mixed`.
#[test]
fn labels_equal_those_of_real_nodes() {
    let assert_has = |labels: &Map, expected: &str| {
        for (key, value) in expected.split_whitespace().map(|label| label.split_once('=').unwrap()) {
            assert_eq!(labels.get(&format!("nvidia.com/{key}")).map(String::as_str), Some(value), "{key}");
        }
    };
    let h100 = machines::load("dgx-h100").unwrap().observed;
    let (labels, _) = labels_of(h100.clone(), ResourcePlan::default(), None);
    let expected = "gpu.product=NVIDIA-H100-80GB-HBM3 gpu.memory=81559 gpu.family=hopper gpu.compute.major=9 \
                    gpu.compute.minor=0 gpu.mode=compute gpu.count=8 gpu.replicas=1 mig.capable=true";
    assert_has(&labels, expected);
    let mixed = || ResourcePlan { mig_strategy: MigStrategy::Mixed, ..ResourcePlan::default() };
    let of_one = |observed: &NodeObservation, model: &str, memory: u64, devices: Vec<MigDeviceObservation>| {
        let mut observed = observed.clone();
        for gpu in &mut observed.gpus {
            (gpu.model, gpu.memory_mib, gpu.mig) = (Some(model.to_owned()), Some(memory), Some(Default::default()));
        }
        observed.gpus[0].mig = Some(MigObservation { enabled: true, devices, profiles: Vec::new() });
        labels_of(observed, mixed(), None).0
    };
    let with = |index, slices, memory_mib, [multiprocessors, copy, decoder, jpeg]: [u32; 4]| {
        let engines = MigEngines { multiprocessors, copy, decoder, encoder: 0, jpeg, ofa: 0 };
        MigDeviceObservation { engines: Some(engines), ..device(0, index, slices, memory_mib) }
    };
    let devices = vec![with(0, 1, 9_984, [16, 1, 1, 1]), with(1, 2, 20_096, [32, 2, 2, 2])];
    let labels = of_one(&h100, "NVIDIA H100 80GB HBM3", 81_559, devices);
    let expected = "mig-1g.10gb.product=NVIDIA-H100-80GB-HBM3-MIG-1g.10gb mig-1g.10gb.memory=9984 \
                    mig-1g.10gb.multiprocessors=16 mig-1g.10gb.slices.gi=1 mig-1g.10gb.slices.ci=1 \
                    mig-1g.10gb.engines.copy=1 mig-1g.10gb.engines.decoder=1 mig-1g.10gb.engines.encoder=0 \
                    mig-1g.10gb.engines.jpeg=1 mig-1g.10gb.engines.ofa=0 mig-1g.10gb.replicas=1 \
                    mig-1g.10gb.sharing-strategy=none mig-2g.20gb.memory=20096 mig-2g.20gb.engines.copy=2";
    assert_has(&labels, expected);
    let devices =
        vec![with(0, 1, 9_728, [14, 1, 0, 0]), with(1, 2, 19_968, [28, 2, 1, 0]), with(2, 3, 40_192, [42, 3, 2, 0])];
    let labels = of_one(&h100, "NVIDIA A100 80GB PCIe", 81_920, devices);
    let expected = "gpu.product=NVIDIA-A100-80GB-PCIe mig-1g.10gb.memory=9728 mig-2g.20gb.multiprocessors=28 \
                    mig-3g.40gb.memory=40192 mig-3g.40gb.slices.gi=3 mig-3g.40gb.engines.decoder=2";
    assert_has(&labels, expected);
    let labels = of_one(&h100, "A100-PCIE-40GB", 40_536, vec![with(0, 1, 4_864, [14, 1, 0, 0])]);
    assert_has(&labels, "gpu.product=A100-PCIE-40GB gpu.memory=40536 mig-1g.5gb.memory=4864");
}

/// Returns true if NFD accepts a label's name or value: at most 63 letters, digits, `-`, `_` and `.`, with a letter or
/// digit at both ends.
fn nfd_accepts(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.iter().enumerate().all(|(at, byte)| {
            let is_end = at == 0 || at + 1 == bytes.len();
            byte.is_ascii_alphanumeric() || (!is_end && b"-_.".contains(byte))
        })
}

/// The size of the largest set of GPUs of which every two are `linked`, found by looking at every set.
fn largest(gpus: usize, linked: impl Fn(usize, usize) -> bool) -> usize {
    let is_island = |set: &u32| {
        let members: Vec<usize> = (0..gpus).filter(|gpu| set >> gpu & 1 == 1).collect();
        members.iter().all(|a| members.iter().all(|b| a == b || linked(*a, *b)))
    };
    (0_u32..1 << gpus).filter(is_island).map(|set| set.count_ones() as usize).max().unwrap()
}

fn plans() -> impl Strategy<Value = ResourcePlan> {
    let strategies = prop_oneof![Just(MigStrategy::None), Just(MigStrategy::Single), Just(MigStrategy::Mixed)];
    let sharing = prop_oneof![
        Just(None),
        Just(shared(SharingKind::TimeSlicing, "nvidia.com/gpu")),
        Just(shared(SharingKind::Mps, "nvidia.com/gpu")),
        Just(shared(SharingKind::TimeSlicing, "nvidia.com/mig-1g.10gb")),
    ];
    let plan = |(mig_strategy, sharing)| ResourcePlan { mig_strategy, sharing, ..ResourcePlan::default() };
    (strategies, sharing).prop_map(plan)
}

/// A model for each GPU, and the slices of its MIG devices if it is in MIG mode.
fn looks() -> impl Strategy<Value = Vec<(Option<String>, Option<Vec<u32>>)>> {
    let model = prop::option::of("(NVIDIA )?[A-Z][ -~]{0,70}");
    let mig = prop::option::of(prop::collection::vec(1..8_u32, 0..4));
    prop::collection::vec((model, mig), 9)
}

fn dressed(mut observed: NodeObservation, looks: &[(Option<String>, Option<Vec<u32>>)]) -> NodeObservation {
    for (at, (gpu, (model, mig))) in observed.gpus.iter_mut().zip(looks).enumerate() {
        gpu.model.clone_from(model);
        gpu.memory_mib = Some(81_920);
        gpu.mig = mig.as_ref().map(|devices| MigObservation {
            enabled: true,
            profiles: Vec::new(),
            devices: (0..).zip(devices).map(|(index, slices)| device(at, index, *slices, 9_728)).collect(),
        });
    }
    observed
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_machine_has_labels_that_nfd_accepts(
        observed in random_node::odd_node(8), looks in looks(), plan in plans(), named in any::<bool>(),
    ) {
        let (labels, _) = labels_of(dressed(observed, &looks), plan, named.then_some("gpu-1"));
        for (key, value) in &labels {
            let (domain, name) = key.split_once('/').unwrap();
            prop_assert!(["nvidia.com", "linkwise.dev"].contains(&domain) && !name.is_empty() && nfd_accepts(name));
            prop_assert!(nfd_accepts(value), "{key}={value}");
        }
        let ours: Vec<&str> = labels.keys().filter_map(|key| key.strip_prefix("linkwise.dev/")).collect();
        let all = named && labels.contains_key("nvidia.com/gpu.count");
        let links = ["gpu.link", "gpu.island-size"];
        let is_known = ours.contains(&links[0]);
        let expected = OURS.into_iter().filter(|name| is_known || !links.contains(name)).collect::<Vec<_>>();
        prop_assert_eq!(ours, if all { expected } else { Vec::new() });
    }

    #[test]
    fn order_of_gpus_changes_no_label(observed in random_node::node(8), looks in looks(), plan in plans()) {
        let observed = dressed(observed, &looks);
        let mut reversed = observed.clone();
        reversed.gpus.reverse();
        prop_assert_eq!(labels_of(reversed, plan.clone(), Some("gpu-1")), labels_of(observed, plan, Some("gpu-1")));
    }

    #[test]
    fn link_island_and_numa_labels_match_brute_force(observed in random_node::node(8)) {
        let mut observed = observed;
        for gpu in &mut observed.gpus {
            gpu.nvlinks.get_or_insert_default();
        }
        let (topology, _) = NodeTopology::assemble(&observed);
        let gpus = topology.gpus().len();
        let (labels, _) = labels_of(observed, ResourcePlan::default(), Some("gpu-1"));
        let plane = |a: usize| topology.gpus()[a].nvswitch_plane;
        let meshed = largest(gpus, |a, b| topology.nvlink(a, b) > 0);
        let switched = largest(gpus, |a, b| plane(a).is_some() && plane(a) == plane(b));
        let below_switch = largest(gpus, |a, b| topology.rank(a, b).number() <= 1);
        let (link, size) = match () {
            () if gpus == 1 => ("single", 1),
            () if switched > 1 && switched == meshed => ("nvswitch", switched),
            () if meshed == gpus => ("nvlink-mesh", meshed),
            () if meshed > 1 => ("nvlink-partial", meshed),
            () if below_switch > 1 => ("pcie-switch", below_switch),
            () => ("pcie-host", largest(gpus, |a, b| topology.rank(a, b).number() <= 2)),
        };
        prop_assert_eq!(labels["linkwise.dev/gpu.link"].as_str(), link);
        prop_assert_eq!(&labels["linkwise.dev/gpu.island-size"], &size.to_string());
        let numa = |node| topology.gpus().iter().filter(|gpu| gpu.cpu_node == Some(node)).count();
        let most = topology.cpu_nodes().keys().map(|node| numa(*node)).max().unwrap_or(0);
        prop_assert_eq!(&labels["linkwise.dev/gpu.per-numa"], &most.to_string());
    }
}
