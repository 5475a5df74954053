//! The labels, by the tables of GPU Feature Discovery's unit tests (v0.20, internal/lm, mig-strategy_test.go and
//! resource_test.go): the same numbers and rules, on machines of our own.

use std::boxed::Box;

use serde_json::{Value, json};

use super::*;
use crate::state::{Event, MigStrategy, NodeState, SharedResource, Sharing, Timestamp};

/// A GPU outside MIG mode: 300 MiB, compute capability 8.0.
fn full() -> Value {
    json!({"memory_mib": 300, "compute_capability": "8.0", "mig": {"enabled": false}})
}

/// A GPU in MIG mode with these devices, each by GPU slices, compute slices and GiB. As in GFD's tests, it has no
/// compute capability. On a GPU of 800 GiB a device of 100 GiB is a `1g.100gb`.
fn mig(devices: &[(u32, u32, u64)]) -> Value {
    let device = |(index, (gi, ci, gib)): (usize, &(u32, u32, u64))| {
        json!({"index": index, "uuid": "", "gpu_instance": index, "compute_instance": 0, "gpu_slices": gi,
               "compute_slices": ci, "memory_mib": gib * 1024})
    };
    let total = 8 * 1024 * devices.iter().map(|(_, _, gib)| *gib).max().unwrap_or(0);
    let devices: Vec<Value> = devices.iter().enumerate().map(device).collect();
    json!({"memory_mib": if total == 0 { 300 } else { total }, "mig": {"enabled": true, "devices": devices}})
}

/// A node with these GPUs, which are of the model MOCKMODEL unless they name another.
fn node(gpus: &[Value], plan: ResourcePlan) -> NodeState {
    let gpu = |(index, gpu): (usize, &Value)| {
        let mut gpu = gpu.clone();
        let about = gpu.as_object_mut().unwrap();
        about.insert("index".into(), json!(index));
        about.insert("uuid".into(), json!(format!("GPU-{index}")));
        about.insert("pci".into(), json!(format!("0000:{:02x}:00.0", index + 1)));
        about.entry("model").or_insert(json!("MOCKMODEL"));
        about.entry("nvlinks").or_insert(json!([]));
        let devices = about.get_mut("mig").and_then(|mig| mig.get_mut("devices")?.as_array_mut());
        for (at, device) in devices.into_iter().flatten().enumerate() {
            device["uuid"] = json!(format!("MIG-{index}-{at}"));
        }
        gpu
    };
    let gpus: Vec<Value> = gpus.iter().enumerate().map(gpu).collect();
    let observed = serde_json::from_value(json!({"gpus": gpus})).unwrap();
    let (state, _) = NodeState::default().apply(Event::Planned(Box::new(plan)), Timestamp::ZERO);
    state.apply(Event::Observed(Box::new(observed)), Timestamp::ZERO).0
}

fn of(state: &NodeState, settings: &LabelSettings) -> (BTreeMap<String, String>, Vec<LabelProblem>) {
    let host = HostFacts::default();
    labels(LabelFacts {
        topology: state.topology(),
        versions: state.hardware().versions(),
        plan: state.offers().plan(),
        host: &host,
        settings,
    })
}

fn labels_of(gpus: &[Value], plan: ResourcePlan) -> BTreeMap<String, String> {
    of(&node(gpus, plan), &LabelSettings::default()).0
}

fn shared(kind: SharingKind, name: &str, rename: Option<&str>) -> Sharing {
    let rename = rename.map(|name| name.parse().unwrap());
    Sharing::new(kind, vec![SharedResource { rename, ..SharedResource::new(name.parse().unwrap(), 2) }])
}

fn plan(mig_strategy: MigStrategy, sharing: Option<Sharing>) -> ResourcePlan {
    ResourcePlan { mig_strategy, sharing, ..ResourcePlan::default() }
}

/// Compares the labels of `nvidia.com/gpu.`: count, replicas, strategy, memory and product, then the rest as
/// `name=value` words.
fn check(case: &str, gpus: &[Value], plan: ResourcePlan, five: [&str; 5], further: &str) {
    let labels = labels_of(gpus, plan);
    let names = ["count", "replicas", "sharing-strategy", "memory", "product"];
    let mut expected: BTreeMap<String, String> =
        names.iter().zip(five).map(|(name, value)| ((*name).to_owned(), value.to_owned())).collect();
    expected.insert("machine".to_owned(), "unknown".to_owned());
    expected.insert("mode".to_owned(), "unknown".to_owned());
    expected.extend(further.split_whitespace().map(|word| {
        let (name, value) = word.split_once('=').unwrap();
        (name.to_owned(), value.to_owned())
    }));
    let of_gpu =
        labels.iter().filter_map(|(key, value)| Some((key.strip_prefix("nvidia.com/gpu.")?.to_owned(), value.clone())));
    assert_eq!(of_gpu.collect::<BTreeMap<_, _>>(), expected, "{case}");
}

const AMPERE: &str = "compute.major=8 compute.minor=0 family=ampere";

#[test]
fn whole_gpus_have_the_labels_of_gfd() {
    use MigStrategy::None as Off;
    use SharingKind::{Mps, TimeSlicing};
    let gpu = "nvidia.com/gpu";
    let twice = || plan(Off, Some(shared(TimeSlicing, gpu, None)));
    let plain = ["1", "1", "none", "300", "MOCKMODEL"];
    check("one GPU", &[full()], plan(Off, None), plain, AMPERE);
    let slots = ["1", "2", "time-slicing", "300", "MOCKMODEL-SHARED"];
    check("one GPU, twice", &[full()], twice(), slots, AMPERE);
    let two = ["2", "2", "time-slicing", "300", "MOCKMODEL-SHARED"];
    check("two GPUs, twice", &[full(), full()], twice(), two, AMPERE);
    let other = plan(Off, Some(shared(TimeSlicing, "nvidia.com/not-gpu", None)));
    check("another resource shared", &[full()], other, plain, AMPERE);
    let renamed = plan(Off, Some(shared(TimeSlicing, gpu, Some("nvidia.com/gpu.shared"))));
    check("renamed", &[full()], renamed, ["1", "2", "time-slicing", "300", "MOCKMODEL"], AMPERE);
    let by_default = Sharing { rename_by_default: true, ..shared(TimeSlicing, gpu, None) };
    let by_default = plan(Off, Some(by_default));
    check("renamed by default", &[full()], by_default, ["1", "2", "time-slicing", "300", "MOCKMODEL"], AMPERE);
    let by_mps = plan(Off, Some(shared(Mps, gpu, None)));
    check("MPS", &[full()], by_mps, ["1", "2", "mps", "300", "MOCKMODEL-SHARED"], AMPERE);
    check("an empty MIG GPU", &[mig(&[])], twice(), ["1", "0", "none", "300", "MOCKMODEL"], "");
    check("two empty MIG GPUs", &[mig(&[]), mig(&[])], twice(), ["2", "0", "none", "300", "MOCKMODEL"], "");
    check("an empty MIG GPU and a whole one", &[mig(&[]), full()], twice(), two, AMPERE);
    assert!(labels_of(&[], twice()).is_empty(), "no GPUs, no labels");
}

#[test]
fn single_strategy_has_the_labels_of_gfd() {
    use MigStrategy::Single;
    let single = || plan(Single, None);
    check("one whole GPU", &[full()], single(), ["1", "1", "none", "300", "MOCKMODEL"], AMPERE);
    check("two whole GPUs", &[full(), full()], single(), ["2", "1", "none", "300", "MOCKMODEL"], AMPERE);
    let device = ["1", "1", "none", "102400", "MOCKMODEL-MIG-1g.100gb"];
    check("one MIG device", &[mig(&[(1, 1, 100)])], single(), device, "slices.gi=1 slices.ci=1");
    // GFD's mock names a device by memory and GPU slices alone; NVML's name has the compute slices too.
    let part = ["1", "1", "none", "102400", "MOCKMODEL-MIG-2c.1g.100gb"];
    check("a part of a GPU instance", &[mig(&[(1, 2, 100)])], single(), part, "slices.gi=1 slices.ci=2");
    let mut gpu = mig(&[(1, 1, 100)]);
    gpu["mig"]["devices"][0]["engines"] =
        json!({"multiprocessors": 12, "copy": 13, "decoder": 14, "encoder": 15, "jpeg": 16, "ofa": 17});
    check(
        "two GPUs with a MIG device each",
        &[gpu.clone(), gpu],
        single(),
        ["2", "1", "none", "102400", "MOCKMODEL-MIG-1g.100gb"],
        "slices.gi=1 slices.ci=1 multiprocessors=12 engines.copy=13 engines.decoder=14 engines.encoder=15 \
         engines.jpeg=16 engines.ofa=17",
    );
    let invalid = ["0", "0", "", "0", "MOCKMODEL-MIG-INVALID"];
    check("an empty MIG GPU", &[mig(&[])], single(), invalid, "");
    check("two profiles", &[mig(&[(1, 1, 100), (2, 2, 200)])], single(), invalid, "");
    check("MIG devices beside a whole GPU", &[mig(&[(1, 1, 100)]), full()], single(), invalid, AMPERE);
    check("beside a whole and an empty one", &[mig(&[(1, 1, 100)]), full(), mig(&[])], single(), invalid, AMPERE);
    let twice = |rename| plan(Single, Some(shared(SharingKind::TimeSlicing, "nvidia.com/gpu", rename)));
    let slots = ["1", "2", "time-slicing", "307200", "MOCKMODEL-MIG-1g.300gb-SHARED"];
    check("shared", &[mig(&[(1, 1, 300)])], twice(None), slots, "slices.gi=1 slices.ci=1");
    let renamed = ["1", "2", "time-slicing", "307200", "MOCKMODEL-MIG-1g.300gb"];
    check("renamed", &[mig(&[(1, 1, 300)])], twice(Some("nvidia.com/x")), renamed, "slices.gi=1 slices.ci=1");
    assert_eq!(labels_of(&[full()], single())["nvidia.com/mig.strategy"], "single");
}

#[test]
fn mixed_strategy_has_labels_for_each_profile() {
    let sharing = shared(SharingKind::TimeSlicing, "nvidia.com/mig-2g.200gb", None);
    let gpus = [mig(&[(1, 1, 100), (1, 1, 100), (2, 2, 200)]), mig(&[(1, 1, 100)]), full()];
    // The GPU's memory decides the name, and all GPUs here have the same memory.
    let gpus = gpus.map(|mut gpu| {
        gpu["memory_mib"] = json!(800 * 1024);
        gpu
    });
    let labels = labels_of(&gpus, plan(MigStrategy::Mixed, Some(sharing)));
    let expected = "mig.strategy=mixed gpu.count=3 gpu.replicas=1 mig-1g.100gb.count=3 mig-1g.100gb.replicas=1 \
                    mig-2g.200gb.product=MOCKMODEL-MIG-2g.200gb-SHARED mig-2g.200gb.count=1 mig-2g.200gb.replicas=2 \
                    mig-2g.200gb.sharing-strategy=time-slicing";
    for (key, value) in expected.split_whitespace().map(|label| label.split_once('=').unwrap()) {
        assert_eq!(labels[&format!("nvidia.com/{key}")], value, "{key}");
    }
    let all_mig = labels_of(&[mig(&[(1, 1, 100)])], plan(MigStrategy::Mixed, None));
    assert_eq!((&*all_mig["nvidia.com/gpu.replicas"], &*all_mig["nvidia.com/gpu.count"]), ("0", "1"));
}

#[test]
fn mig_label_and_resource_have_one_name() {
    for (extension, name) in [("media", "1g.100gb.me"), ("all-media", "1g.100gb.me.all"), ("no-media", "1g.100gb-me")] {
        let mut gpu = mig(&[(1, 1, 100)]);
        gpu["mig"]["devices"][0]["extension"] = json!(extension);
        let state = node(&[gpu], plan(MigStrategy::Mixed, None));
        let labels = of(&state, &LabelSettings::default()).0;
        assert_eq!(labels[&format!("nvidia.com/mig-{name}.product")], format!("MOCKMODEL-MIG-{name}"));
        let resource: Vec<_> = state.offers().resources().keys().map(ToString::to_string).collect();
        assert_eq!(resource, [format!("nvidia.com/mig-{name}")]);
    }
}

#[test]
fn most_frequent_of_several_models_gives_the_labels() {
    let of_model = |model: &str, memory: u64| json!({"model": model, "memory_mib": memory, "mig": {"enabled": false}});
    let (a, b, c) = (of_model("NVIDIA A", 1), of_model("NVIDIA B", 2), of_model("NVIDIA C", 3));
    let mut in_mig = a.clone();
    in_mig["mig"] = json!({"enabled": true});
    for (gpus, product, memory) in [
        (vec![a.clone(), b.clone()], "NVIDIA-A", "1"),
        (vec![b.clone(), a.clone()], "NVIDIA-A", "1"),
        (vec![b.clone(), c.clone(), c.clone(), a.clone()], "NVIDIA-C", "3"),
        // As in GFD, GPUs outside MIG mode come before those in it.
        (vec![in_mig.clone(), in_mig.clone(), b.clone()], "NVIDIA-B", "2"),
    ] {
        let state = node(&gpus, ResourcePlan::default());
        let (labels, problems) = of(&state, &LabelSettings { own_fabric: Some("node-x".into()), ..Default::default() });
        assert_eq!(labels["nvidia.com/gpu.product"], product);
        assert_eq!(labels["nvidia.com/gpu.memory"], memory);
        let alike = gpus.iter().filter(|gpu| gpu["model"] == product.replace('-', " ")).count();
        assert_eq!(labels["nvidia.com/gpu.count"], alike.to_string());
        assert!(matches!(&problems[..], [LabelProblem::SeveralModels(..)]), "{problems:?}");
    }
    let unknown = json!({"model": null, "memory_mib": 5});
    let (labels, _) = of(&node(&[unknown.clone(), a.clone()], ResourcePlan::default()), &LabelSettings::default());
    assert_eq!(labels["nvidia.com/gpu.product"], "NVIDIA-A", "a known model comes first");
    // If the chosen model lacks a fact, the label is missing. Another model's fact does not replace it.
    let (labels, _) = of(&node(&[json!({"model": "NVIDIA A"}), b], ResourcePlan::default()), &LabelSettings::default());
    assert!(!labels.contains_key("nvidia.com/gpu.memory"));
}

#[test]
fn missing_fact_costs_its_own_labels() {
    let whole = labels_of(&[full()], ResourcePlan::default());
    for (fact, missing) in [
        ("memory_mib", &["gpu.memory"][..]),
        ("compute_capability", &["gpu.compute.major", "gpu.compute.minor", "gpu.family"]),
        ("mig", &[]),
    ] {
        let mut gpu = full();
        gpu.as_object_mut().unwrap().remove(fact);
        let labels = labels_of(&[gpu], ResourcePlan::default());
        let gone: Vec<_> = whole.keys().filter(|key| !labels.contains_key(*key)).collect();
        assert_eq!(
            gone,
            missing.iter().map(|name| format!("nvidia.com/{name}")).collect::<Vec<_>>().iter().collect::<Vec<_>>()
        );
    }
    assert_eq!(whole["nvidia.com/mig.capable"], "true");
}

#[test]
fn mps_with_mig_is_not_capable() {
    let by_mps = || plan(MigStrategy::Mixed, Some(shared(SharingKind::Mps, "nvidia.com/gpu", None)));
    let capable = |gpus: &[Value], plan| {
        let (labels, problems) =
            of(&node(gpus, plan), &LabelSettings { own_fabric: Some("x".into()), ..Default::default() });
        (labels["nvidia.com/mps.capable"].clone(), problems)
    };
    assert_eq!(capable(&[full()], by_mps()), ("true".to_owned(), vec![]));
    assert_eq!(capable(&[full()], plan(MigStrategy::Mixed, None)), ("false".to_owned(), vec![]));
    let with_mig = capable(&[full(), mig(&[(1, 1, 100)])], by_mps());
    assert_eq!(with_mig, ("false".to_owned(), vec![LabelProblem::MpsWithMig]));
}

#[test]
fn value_that_nfd_would_drop_is_left_out() {
    let mut gpu = full();
    gpu["model"] = json!("_NVIDIA X");
    let state = node(&[gpu], ResourcePlan::default());
    let (labels, problems) = of(&state, &LabelSettings { own_fabric: Some("x".into()), ..Default::default() });
    assert!(!labels.contains_key("nvidia.com/gpu.product") && labels.contains_key("nvidia.com/gpu.count"));
    assert!(
        matches!(&problems[..], [LabelProblem::Dropped { key, .. }] if key == "nvidia.com/gpu.product"),
        "{problems:?}"
    );
    assert!(
        problems[0].to_string().starts_with("label nvidia.com/gpu.product left out: '_NVIDIA-X'"),
        "{}",
        problems[0]
    );
}

#[test]
fn long_product_is_cut_and_keeps_its_suffix() {
    for (model, whole, in_mig) in [
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "-Edition", "-Workstation-Ed-MIG-1g.100gb"),
        ("NVIDIA X-Blackwell Max-Q Workstation Edition of the year with- a name", "-year-with", "-th-MIG-1g.100gb"),
    ] {
        let product = |mut gpu: Value, strategy| {
            gpu["model"] = json!(model);
            labels_of(&[gpu], plan(strategy, None))["nvidia.com/gpu.product"].clone()
        };
        let (gpu, device) = (product(full(), MigStrategy::None), product(mig(&[(1, 1, 100)]), MigStrategy::Single));
        assert!(gpu.len() <= 63 && gpu.ends_with(whole), "{gpu}");
        assert!(device.len() <= 63 && device.ends_with(in_mig), "{device}");
    }
}

#[test]
fn unknown_nvlinks_cost_the_labels_of_links() {
    let settings = LabelSettings { own_fabric: Some("x".into()), ..Default::default() };
    let unknown = |gpu: Value| {
        let mut gpu = gpu;
        gpu["nvlinks"] = Value::Null;
        gpu
    };
    let of_gpus = |gpus: &[Value]| of(&node(gpus, ResourcePlan::default()), &settings);
    let (labels, problems) = of_gpus(&[full(), unknown(full())]);
    assert!(!labels.contains_key("linkwise.dev/gpu.link") && !labels.contains_key("linkwise.dev/gpu.island-size"));
    assert!(labels.contains_key("linkwise.dev/nvlink-fabric"));
    assert_eq!(problems, [LabelProblem::NvLinksUnknown]);
    // The links of a single GPU do not matter.
    let (labels, problems) = of_gpus(&[unknown(full())]);
    assert_eq!((&*labels["linkwise.dev/gpu.link"], problems), ("single", vec![]));
}

#[test]
fn versions_have_old_and_new_names() {
    let versions = |driver: &str| {
        let gpu = json!({"index": 0, "uuid": "GPU-0", "pci": "0000:01:00.0"});
        let observed = json!({"gpus": [gpu], "driver_version": driver, "cuda_version": {"major": 12, "minor": 4}});
        let observed = serde_json::from_value(observed).unwrap();
        let state = NodeState::default().apply(Event::Observed(Box::new(observed)), Timestamp::ZERO).0;
        let (labels, _) = of(&state, &LabelSettings::default());
        let cuda = labels
            .into_iter()
            .filter_map(|(key, value)| Some((key.strip_prefix("nvidia.com/cuda.")?.to_owned(), value)));
        cuda.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
    };
    let runtime =
        "runtime-version.full=12.4 runtime-version.major=12 runtime-version.minor=4 runtime.major=12 runtime.minor=4";
    let full = "driver-version.full=550.54.16 driver-version.major=550 driver-version.minor=54 \
                driver-version.revision=16 driver.major=550 driver.minor=54 driver.rev=16";
    assert_eq!(versions("550.54.16"), format!("{full} {runtime}"));
    let two = "driver-version.full=550.54 driver-version.major=550 driver-version.minor=54 driver-version.revision= \
               driver.major=550 driver.minor=54 driver.rev=";
    assert_eq!(versions("550.54"), format!("{two} {runtime}"));
    assert_eq!(versions("550"), format!("driver-version.full=550 {runtime}"));
}

#[test]
fn families_follow_compute_capability() {
    let families = "3.5=kepler 5.2=maxwell 6.1=pascal 7.0=volta 7.2=volta 7.5=turing 8.0=ampere 8.6=ampere \
                    8.9=ada-lovelace 9.0=hopper 10.0=blackwell 11.0=undefined 12.0=blackwell 13.0=rubin";
    for (capability, family) in families.split_whitespace().map(|words| words.split_once('=').unwrap()) {
        let gpu = json!({"compute_capability": capability});
        assert_eq!(labels_of(&[gpu], ResourcePlan::default())["nvidia.com/gpu.family"], family, "{capability}");
    }
}

#[test]
fn clique_is_written_if_all_gpus_agree() {
    let cluster = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31";
    let zero = "00000000-0000-0000-0000-000000000000";
    let gpu = |cluster: &str, clique: u32| json!({"fabric": {"cluster": cluster, "clique": clique}});
    let alone = json!({});
    let own = "node-0123456789abcdef".to_owned();
    let settings = LabelSettings { own_fabric: Some(own.clone()), ..LabelSettings::default() };
    let value = format!("{cluster}.1");
    let long = "c".repeat(62);
    for (gpus, clique, fabric) in [
        (vec![gpu(cluster, 1), gpu(cluster, 1)], Some(&value), &value),
        (vec![gpu(cluster, 1), alone.clone()], Some(&value), &value),
        (vec![gpu(cluster, 1), gpu(cluster, 2)], None, &own),
        (vec![gpu(zero, 1)], None, &own),
        (vec![gpu("", 1)], None, &own),
        (vec![gpu(&long, 1)], None, &own),
        (vec![alone], None, &own),
    ] {
        let state = node(&gpus, ResourcePlan::default());
        let labels = of(&state, &settings).0;
        assert_eq!(labels.get("nvidia.com/gpu.clique"), clique, "{gpus:?}");
        assert_eq!(&labels["linkwise.dev/nvlink-fabric"], fabric, "{gpus:?}");
        let labels = of(&state, &LabelSettings { clique: false, ..settings.clone() }).0;
        assert_eq!((labels.get("nvidia.com/gpu.clique"), &labels["linkwise.dev/nvlink-fabric"]), (None, fabric));
    }
}

#[test]
fn node_without_gpus_has_timestamp_and_vgpu() {
    let settings = LabelSettings { timestamp: Some(1_700_000_000), own_fabric: Some("x".into()), clique: true };
    let state = node(&[], ResourcePlan::default());
    let on = |vgpu| {
        let host = HostFacts { machine_type: Some("Standard PC".into()), vgpu };
        let facts = LabelFacts {
            topology: state.topology(),
            versions: state.hardware().versions(),
            plan: state.offers().plan(),
            host: &host,
            settings: &settings,
        };
        let labels = labels(facts).0;
        labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
    };
    let timestamp = "nvidia.com/gfd.timestamp=1700000000";
    assert_eq!(on(Vgpu::Unknown), timestamp);
    assert_eq!(on(Vgpu::Absent), format!("{timestamp} nvidia.com/vgpu.present=false"));
    let vgpu = Vgpu::Present { driver_version: Some("460.16".into()), driver_branch: Some("r460_00".into()) };
    let three = "nvidia.com/vgpu.host-driver-branch=r460_00 nvidia.com/vgpu.host-driver-version=460.16 \
                 nvidia.com/vgpu.present=true";
    assert_eq!(on(vgpu), format!("{timestamp} {three}"));
}

#[test]
fn excluded_gpus_have_no_labels() {
    let mut plan = ResourcePlan::default();
    plan.filter.exclude = vec!["0".into()];
    assert_eq!(labels_of(&[full(), full()], plan.clone())["nvidia.com/gpu.count"], "1");
    assert!(labels_of(&[full()], plan).is_empty());
    let adapter = json!({"model": "DGX Display"});
    assert_eq!(labels_of(&[full(), adapter.clone()], ResourcePlan::default())["nvidia.com/gpu.count"], "1");
    assert!(labels_of(&[adapter], ResourcePlan::default()).is_empty());
}

/// The cases of GPU Feature Discovery's own test.
#[test]
fn texts_become_values_as_in_gfd() {
    for (text, value) in [
        ("a space separated string", "a-space-separated-string"),
        ("some(thing)else", "somethingelse"),
        ("some ( thing )else", "some-thing-else"),
        ("NVIDIA-TITAN-X-(Pascal)", "NVIDIA-TITAN-X-Pascal"),
        (" input  with multiple   spaces   ", "input-with-multiple-spaces"),
        ("some [ / thing / ]else", "some-thing-else"),
        ("some / thing /else", "some-thing-else"),
        ("some-thing.else_new", "some-thing.else_new"),
        ("", ""),
        ("größer\tals 1", "grer-als-1"),
    ] {
        assert_eq!(sanitised(text), value, "{text}");
    }
}

#[test]
fn values_are_checked_as_kubernetes_does() {
    let long = |length: usize| "a".repeat(length);
    for value in ["", "a", "0", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1", "A_b.C-d", &long(63)] {
        assert!(is_value(value), "{value}");
    }
    for value in ["-a", "a-", ".a", "a_", "a b", "@a.b.c", "é", "a/b", "a\n", &long(64)] {
        assert!(!is_value(value), "{value}");
    }
    assert!(is_key("nvidia.com/gpu.count") && !is_key("nvidia.com/") && !is_key("gpu"));
    assert!(!is_key(&format!("nvidia.com/{}", long(64))));
}
