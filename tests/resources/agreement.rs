//! `config check` and `run` agree about random configurations: what one refuses the other refuses with the same words,
//! and each row of a valid configuration is offered on a machine that fits it.
//!
//! The machine is made for the row, and what the row offers there is counted by the rules of docs/sharing.md.

use std::collections::BTreeMap;
use std::time::Duration;

use linkwise::config::settings::{ConfigError, Severity, check, load_text};
use linkwise::config::{Environment, Flags};
use linkwise_core::state::{Event, Health, Holdings, NodeState, ResourcePlan};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines::Machine;
use proptest::prelude::*;
use serde_json::{Value, json};

const NOW: Duration = Duration::from_secs(1_000_000);
/// The GPUs that a configuration can name. Each machine has two more, since some may be left out.
const GPUS: u32 = 6;
/// The most slots of a resource.
const MOST: u64 = 16_384;

fn uuid(gpu: u32) -> String {
    format!("GPU-{gpu:08}-0000-4000-8000-000000000000")
}

/// Names of resources: some have devices by default, some by a pattern, one nowhere.
const NAMES: [&str; 5] =
    ["nvidia.com/gpu", "nvidia.com/a100", "nvidia.com/mig-1g.10gb", "nvidia.com/slice", "nvidia.com/other"];

/// A kind of GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An H100.
    Plain,
    /// An A100, whose name a pattern may be for.
    Patterned,
    /// An H100 in MIG mode, with two MIG devices of one profile: of so many slices.
    Mig(u32),
}

/// A machine of GPUs of one kind, whose UUIDs have other indices by so many.
fn machine(kind: Kind, shift: u32) -> NodeObservation {
    let gpu = |number: u32| {
        let index = (number + shift) % (GPUS + 2);
        let model = if kind == Kind::Patterned { "NVIDIA A100-SXM4-80GB" } else { "NVIDIA H100 80GB HBM3" };
        let slice = |slices: u32, number: u32| {
            json!({
                "index": number, "uuid": format!("MIG-{index:08}-0000-4000-8000-{number:012}"),
                "gpu_instance": 7 + number, "compute_instance": 0, "gpu_slices": slices, "compute_slices": slices,
                "memory_mib": 9728 * slices,
            })
        };
        let mut gpu = json!({
            "index": index, "uuid": uuid(number), "pci": format!("0000:{:02x}:00.0", index + 1), "model": model,
            "compute_capability": "9.0", "memory_mib": 81_559,
        });
        if let Kind::Mig(slices) = kind {
            gpu["mig"] = json!({"enabled": true, "devices": [slice(slices, 0), slice(slices, 1)]});
        }
        gpu
    };
    let gpus: Vec<Value> = (0..GPUS + 2).map(gpu).collect();
    Machine::parse(&json!({"version": 1, "name": "m", "observed": {"gpus": gpus}}).to_string()).unwrap().observed
}

/// Machines of each kind: one of them fits a row.
fn machines() -> impl Iterator<Item = NodeObservation> {
    let kinds = [Kind::Plain, Kind::Patterned, Kind::Mig(1), Kind::Mig(2)];
    (0..GPUS + 2).flat_map(move |shift| kinds.map(|kind| machine(kind, shift)))
}

/// A row of `sharing`.
fn rows() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(NAMES.to_vec());
    let replicas = prop::sample::select(vec![0, 1, 2, 3, 10, 48, 49, 200, 8192, 16_384, 16_385, 100_000]);
    let rename = prop::option::weighted(
        0.3,
        prop::sample::select(vec!["nvidia.com/slots", "nvidia.com/gpu", "nvidia.com/a100", "no name", "small"]),
    );
    let device = prop_oneof![
        4 => (0..GPUS).prop_map(|gpu| json!(gpu)),
        2 => (0..GPUS).prop_map(|gpu| json!(uuid(gpu))),
        2 => (0..GPUS, 0..2u32).prop_map(|(gpu, slice)| json!(format!("{gpu}:{slice}"))),
        1 => Just(json!("GPU")),
    ];
    let devices = prop_oneof![
        3 => Just(None),
        1 => Just(Some(json!("all"))),
        2 => (0..=GPUS).prop_map(|count| Some(json!(count))),
        3 => prop::collection::vec(device, 0..3).prop_map(|list| Some(json!(list))),
    ];
    (name, replicas, rename, devices).prop_map(|(name, replicas, rename, devices)| {
        let mut row = json!({"name": name, "replicas": replicas});
        row.as_object_mut().unwrap().extend(rename.map(|rename| ("rename".to_owned(), json!(rename))));
        row.as_object_mut().unwrap().extend(devices.map(|devices| ("devices".to_owned(), devices)));
        row
    })
}

fn configurations() -> impl Strategy<Value = Value> {
    let kind = prop::sample::select(vec!["timeSlicing", "timeSlicing", "mps"]);
    let strategy = prop::sample::select(vec!["none", "single", "mixed", "mixed", "double"]);
    let patterns = prop::option::of(prop::sample::select(vec!["*A100*", "NVIDIA A100-SXM4-80GB", "*"]));
    let excluded = prop::collection::vec(0..GPUS, 0..2);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), prop::bool::weighted(0.3));
    (prop::collection::vec(rows(), 1..4), kind, strategy, patterns, excluded, flags).prop_map(
        |(rows, kind, strategy, pattern, excluded, (naming, by_default, one_each, slices))| {
            let sharing =
                json!({"renameByDefault": by_default, "failRequestsGreaterThanOne": one_each, "resources": rows});
            let mut configuration = json!({
                "version": "v1", "flags": {"migStrategy": strategy}, "sharing": {kind: sharing},
                "linkwise": {"naming": naming, "filter": {"exclude": excluded}},
            });
            let mut resources = json!({});
            if let Some(pattern) = pattern {
                resources["gpus"] = json!([{"pattern": pattern, "name": "nvidia.com/a100"}]);
            }
            if slices {
                resources["mig"] = json!([{"pattern": "1g.*", "name": "nvidia.com/slice"}]);
            }
            configuration["resources"] = resources;
            configuration
        },
    )
}

/// The number of slots by resource that a node offers, once the MPS daemons that it asks for serve.
fn offered(plan: ResourcePlan, machine: NodeObservation) -> BTreeMap<String, usize> {
    let apply = |state: NodeState, event| state.apply(event, NOW).0;
    let state = apply(NodeState::default(), Event::Planned(Box::new(plan)));
    let state = apply(apply(state, Event::Observed(Box::new(machine))), Event::Holders(Some(Holdings::default())));
    let daemons = Event::MpsReady(state.mps_shares().clone());
    let state = apply(state, daemons);
    let slots = |name| {
        let offers = state.offers().of(name).filter(|(_, device)| device.health == Health::Healthy);
        offers.filter(|(id, _)| id.as_str().contains("::")).count()
    };
    state.offers().resources().keys().map(|name| (name.to_string(), slots(name))).collect()
}

fn rows_of(configuration: &Value) -> &[Value] {
    let sharing = configuration["sharing"].as_object().unwrap().values().next().unwrap();
    sharing["resources"].as_array().unwrap()
}

/// What a row offers at least on the machine that fits it: its resource, and how many slots.
fn promised(configuration: &Value, row: &Value) -> (String, u64) {
    let naming = configuration["linkwise"]["naming"] == true;
    let sharing = configuration["sharing"].as_object().unwrap().values().next().unwrap();
    let own = row["name"].as_str().unwrap();
    let name = match row["rename"].as_str().filter(|_| naming) {
        Some(rename) if rename.contains('/') => rename.to_owned(),
        Some(rename) => format!("nvidia.com/{rename}"),
        None if sharing["renameByDefault"] == true => format!("{own}.shared"),
        None => own.to_owned(),
    };
    let devices = match &row["devices"] {
        Value::Number(count) if naming => count.as_u64().unwrap(),
        // A GPU is whole on one machine, and in MIG mode on another.
        Value::Array(list) if naming => {
            let mig = list.iter().filter(|device| device.as_str().is_some_and(|text| text.contains(':'))).count();
            u64::try_from(mig.max(list.len() - mig)).unwrap()
        }
        _ => 1,
    };
    (name, devices)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn check_and_run_agree(configuration in configurations()) {
        let folder = tempfile::tempdir().unwrap();
        let (path, text) = (folder.path().join("config.yaml"), configuration.to_string());
        std::fs::write(&path, &text).unwrap();
        let found = check(&path).unwrap();
        let loaded = load_text(&Flags::default(), &Environment::default(), &text);
        match loaded {
            Err(ConfigError::Rejected(_, findings)) => prop_assert_eq!(findings, found),
            Err(other) => panic!("{other}"),
            Ok(loaded) => {
                prop_assert_eq!(&loaded.findings, &found);
                let is_valid = found.iter().all(|finding| finding.severity == Severity::Note);
                for row in rows_of(&configuration).iter().filter(|_| is_valid) {
                    let (name, devices) = promised(&configuration, row);
                    let replicas = row["replicas"].as_u64().unwrap();
                    let least = (devices * replicas).min(MOST / u64::from(2 * GPUS + 4) * devices);
                    let fits = machines().any(|machine| {
                        let slots = offered(loaded.settings.plan(), machine).get(&name).copied().unwrap_or_default();
                        u64::try_from(slots).unwrap() >= least
                    });
                    prop_assert!(fits, "no machine offers {least} slots of {name} for {row}: {text}");
                }
            }
        }
    }
}
