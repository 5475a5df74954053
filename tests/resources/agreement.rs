//! `config check` and `run` agree about random configurations: both refuse the same ones with the same findings, and
//! each row of a valid one is offered on a machine that fits it. The expected slots follow docs/sharing.md.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use linkwise::config::settings::{ConfigError, Severity, check, load_text};
use linkwise::config::{Environment, Flags};
use linkwise_core::state::{Event, Health, Holdings, NodeState, ResourcePlan};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines::Machine;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

const NOW: Duration = Duration::from_secs(1_000_000);
/// The number of GPUs that rows can list. Each machine has two more, of which a filter may exclude one.
const GPUS: u32 = 4;
/// The most slots of a resource.
const MAX_SLOTS: u64 = 16_384;

fn uuid(gpu: u32) -> String {
    format!("GPU-{gpu:08}-0000-4000-8000-000000000000")
}

/// Names of resources: some have devices by default or by the MIG strategy, some by a pattern, one never.
const NAMES: [&str; 5] =
    ["nvidia.com/gpu", "nvidia.com/a100", "nvidia.com/mig-1g.10gb", "nvidia.com/slice", "nvidia.com/other"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An H100.
    Plain,
    /// An A100, which every pattern matches.
    Patterned,
    /// An H100 in MIG mode, with two MIG devices of this number of slices.
    Mig(u32),
}

fn machine(kind: Kind) -> NodeObservation {
    let gpu = |index: u32| {
        let model = if kind == Kind::Patterned { "NVIDIA A100-SXM4-80GB" } else { "NVIDIA H100 80GB HBM3" };
        let slice = |slices: u32, number: u32| {
            json!({
                "index": number, "uuid": format!("MIG-{index:08}-0000-4000-8000-{number:012}"),
                "gpu_instance": 7 + number, "compute_instance": 0, "gpu_slices": slices, "compute_slices": slices,
                "memory_mib": 9728 * slices,
            })
        };
        let mut gpu = json!({
            "index": index, "uuid": uuid(index), "pci": format!("0000:{:02x}:00.0", index + 1), "model": model,
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

/// Each row of a valid configuration fits at least one of these machines.
static MACHINES: LazyLock<[NodeObservation; 4]> =
    LazyLock::new(|| [Kind::Plain, Kind::Patterned, Kind::Mig(1), Kind::Mig(2)].map(machine));

/// Values for keys of a row. Many make a configuration invalid.
fn faults() -> Vec<(&'static str, Value)> {
    let of = |key, values: Value| values.as_array().unwrap().iter().map(|value| (key, value.clone())).collect();
    let faults: [Vec<_>; 4] = [
        of("name", json!(["nvidia.com/other", "nvidia.com/slice"])),
        of("replicas", json!([1, 49, 16_384, 16_385])),
        of("rename", json!(["no name", "nvidia.com/gpu", "nvidia.com/a100"])),
        of("devices", json!(["all", ["GPU"], ["0:0"], [0, 0]])),
    ];
    faults.concat()
}

/// The random draws of a row: its name among those with devices, its replicas, and the forms of `rename` and `devices`.
type Row = (Index, u32, u32, u32);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let replicas = prop::sample::select(vec![2, 3, 10, 48]);
    prop::collection::vec((any::<Index>(), replicas, 0..3u32, 0..8u32), 1..4)
}

/// Configurations, each with true if a row may have a fault. Those without one are valid: each name has devices, and no
/// two rows list the same GPU.
fn configurations() -> impl Strategy<Value = (Value, bool)> {
    let kind = prop::sample::select(vec!["timeSlicing", "timeSlicing", "mps"]);
    let strategy = prop::sample::select(vec!["none", "single", "mixed"]);
    let pattern = prop::option::of(prop::sample::select(vec!["*A100*", "NVIDIA A100-SXM4-80GB", "*"]));
    let flags = (prop::bool::weighted(0.8), any::<bool>(), any::<bool>(), prop::bool::weighted(0.3), any::<bool>());
    let deck = Just((0..GPUS).collect::<Vec<_>>()).prop_shuffle();
    let fault = prop::option::weighted(0.4, prop::sample::select(faults()));
    let lists = (deck, prop::collection::vec(GPUS..GPUS + 2, 0..2), rows(), fault);
    ((kind, strategy, pattern, flags), lists).prop_map(|((kind, strategy, pattern, flags), lists)| {
        let (naming, by_default, one_each, slices, prefers_mig) = flags;
        let (mut deck, excluded, draws, fault) = lists;
        let is_mps = kind == "mps";
        let strategy = if is_mps && strategy == "mixed" { "none" } else { strategy };
        let has_gpus = |name: &str| match name {
            "nvidia.com/gpu" => !naming || pattern != Some("*"),
            "nvidia.com/a100" => naming && pattern.is_some(),
            _ => false,
        };
        let has_mig = |name: &str| match name {
            "nvidia.com/gpu" => !is_mps && strategy == "single",
            "nvidia.com/mig-1g.10gb" => strategy == "mixed" && !(naming && slices),
            "nvidia.com/slice" => !is_mps && strategy != "none" && naming && slices,
            _ => false,
        };
        let names: Vec<&str> = NAMES.into_iter().filter(|name| has_gpus(name) || has_mig(name)).collect();
        let drawn: Vec<&str> = draws.iter().map(|(name, ..)| *name.get(&names)).collect();
        let mut rows = Vec::new();
        for (number, (name, (_, replicas, rename, devices))) in drawn.iter().zip(&draws).enumerate() {
            let replicas = if is_mps { draws[0].1 } else { *replicas };
            let mut row = json!({"name": name, "replicas": replicas});
            match rename {
                1 => row["rename"] = json!(name.replace("nvidia.com/", "slots-")),
                2 => row["rename"] = json!(format!("nvidia.com/row-{number}")),
                _ => {}
            }
            let is_mig = has_mig(name) && (prefers_mig || !has_gpus(name));
            let device = |gpu: u32| match gpu % 2 {
                slice if is_mig => json!(format!("{gpu}:{slice}")),
                0 => json!(gpu),
                _ => json!(uuid(gpu)),
            };
            let is_alone = drawn.iter().filter(|other| *other == name).count() == 1;
            match devices {
                0 | 1 if is_alone => {}
                2 if is_alone => row["devices"] = json!("all"),
                3 | 4 if is_alone => row["devices"] = json!(devices),
                _ => row["devices"] = deck.drain(..=usize::from(number == 0)).map(device).collect(),
            }
            rows.push(row);
        }
        if let (Some((key, value)), Some(row)) = (&fault, rows.last_mut()) {
            row[key] = value.clone();
        }
        let sharing = json!({"renameByDefault": by_default, "failRequestsGreaterThanOne": one_each, "resources": rows});
        let mut resources = json!({});
        if let Some(pattern) = pattern {
            resources["gpus"] = json!([{"pattern": pattern, "name": "nvidia.com/a100"}]);
        }
        if slices {
            resources["mig"] = json!([{"pattern": "1g.*", "name": "nvidia.com/slice"}]);
        }
        let configuration = json!({
            "version": "v1", "flags": {"migStrategy": strategy}, "sharing": {kind: sharing}, "resources": resources,
            "linkwise": {"naming": naming, "filter": {"exclude": excluded}},
        });
        (configuration, fault.is_some())
    })
}

/// The number of healthy slots of each resource, once all MPS daemons are ready.
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

/// The resource of a row, and the least number of its devices on the machine that fits it.
fn expected(configuration: &Value, row: &Value) -> (String, u64) {
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
        // All GPUs of a machine are whole, or all are in MIG mode.
        Value::Array(list) if naming => {
            let mig = list.iter().filter(|device| device.as_str().is_some_and(|text| text.contains(':'))).count();
            u64::try_from(mig.max(list.len() - mig)).unwrap()
        }
        _ => 1,
    };
    (name, devices)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn check_and_run_agree((configuration, may_be_refused) in configurations()) {
        let folder = tempfile::tempdir().unwrap();
        let (path, text) = (folder.path().join("config.yaml"), configuration.to_string());
        std::fs::write(&path, &text).unwrap();
        let found = check(&path).unwrap();
        let is_valid = found.iter().all(|finding| finding.severity == Severity::Note);
        prop_assert!(is_valid || may_be_refused, "{found:?}: {text}");
        let loaded = load_text(&Flags::default(), &Environment::default(), &text);
        match loaded {
            Err(ConfigError::Rejected(_, findings)) => prop_assert_eq!(findings, found),
            Err(other) => panic!("{other}"),
            Ok(loaded) => {
                prop_assert_eq!(&loaded.findings, &found);
                if !is_valid {
                    return Ok(());
                }
                let offers = MACHINES.each_ref().map(|machine| offered(loaded.settings.plan(), machine.clone()));
                for row in rows_of(&configuration) {
                    let (name, devices) = expected(&configuration, row);
                    let replicas = row["replicas"].as_u64().unwrap();
                    let most_mig_devices = u64::from(2 * (GPUS + 2));
                    let min_slots = (devices * replicas).min(MAX_SLOTS / most_mig_devices * devices);
                    let mut slots = offers.iter().filter_map(|offer| u64::try_from(*offer.get(&name)?).ok());
                    let fits = slots.any(|slots| slots >= min_slots);
                    prop_assert!(fits, "no machine offers {min_slots} slots of {name} for {row}: {text}");
                }
            }
        }
    }
}
