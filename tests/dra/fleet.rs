//! `linkwise claim` for a fleet of unlike machines: the alternatives, what is said of them, and what is refused.

use std::path::Path;
use std::process::Command;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use serde_json::{Value, json};

use super::exact::{cluster, file, slices};
use super::golden::holds;

/// The claim, and what goes to standard error.
fn claim(args: &[&str]) -> Result<(Value, String), String> {
    let command = ["claim", "--format", "json"];
    let output = Command::new(env!("CARGO_BIN_EXE_linkwise")).env_clear().args(command).args(args).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if !output.status.success() {
        assert!(output.stdout.is_empty(), "{said}");
        return Err(said);
    }
    let claim: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Names, selectors and constraints are what the API takes.
    stored(&ResourceType::RESOURCE_CLAIMS, Some("default"), Gates::default(), &claim).unwrap();
    Ok((claim, said))
}

/// The alternatives, each with its attribute and its selector.
fn alternatives(claim: &Value) -> Vec<(String, Option<String>, Option<String>)> {
    let devices = &claim["spec"]["devices"];
    let constraint = |name: &str| {
        let constraints = devices["constraints"].as_array().into_iter().flatten();
        let own = constraints.clone().find(|of| of["requests"] == json!([format!("gpus/{name}")]));
        own.map(|of| of["matchAttribute"].as_str().unwrap().to_owned())
    };
    let alternative = |of: &Value| {
        let name = of["name"].as_str().unwrap();
        let selector = of["selectors"][0]["cel"]["expression"].as_str();
        (name.to_owned(), constraint(name), selector.map(str::to_owned))
    };
    devices["requests"][0]["firstAvailable"].as_array().into_iter().flatten().map(alternative).collect()
}

#[test]
fn fleet_of_unlike_machines_has_one_order() {
    let mut told = String::new();
    for (nodes, size) in [
        (&["dgx1-v100", "pcie-8x-pix-pairs", "dgx-a100"][..], "2"),
        (&["dgx1-v100", "pcie-8x-pix-pairs", "dgx-a100"], "4"),
        (&["dgx1-v100", "dgx-h100", "hgx-h200"], "2"),
        (&["nvlink-bridge-pairs", "dgx1-v100", "workstation-a6000", "dgx-a100", "dgx-h100"], "2"),
    ] {
        for options in [&[][..], &["--spare-nvswitch"]] {
            let named: Vec<&str> =
                nodes.iter().flat_map(|node| ["--node", node]).chain(options.iter().copied()).collect();
            let (claim, said) = claim(&[&["--gpus", size], &named[..]].concat()).unwrap();
            told += &format!("{size} GPUs, {}\n{said}", named.join(" "));
            for (name, attribute, selector) in alternatives(&claim) {
                told += &format!("  {name}: {}", attribute.as_deref().unwrap_or("any"));
                told += &selector
                    .map(|selector| format!(", {}", selector.rsplit(".productName ").next().unwrap()))
                    .unwrap_or_default();
                told += "\n";
            }
        }
    }
    holds("claim-fleet", &told);
}

/// The slices of a cluster and its machines by name give one claim.
#[test]
fn slices_say_the_same_as_machines() {
    let machines = ["dgx1-v100", "pcie-8x-pix-pairs", "dgx-a100"];
    let all: Vec<Value> = machines.iter().flat_map(|machine| slices(machine, machine)).collect();
    let file = file(&all, false);
    for size in ["1", "2", "4", "8"] {
        let by_name = machines.iter().flat_map(|machine| ["--node", machine]);
        let named = claim(&[&["--gpus", size], &by_name.collect::<Vec<_>>()[..]].concat()).unwrap();
        let read = claim(&["--gpus", size, &cluster(&file)]).unwrap();
        assert_eq!(named.0, read.0);
        assert_eq!(alternatives(&read.0).is_empty(), size == "1");
        assert!(read.1.lines().all(|line| line.contains("1 node of 8") && line.contains(", as ")), "{}", read.1);
    }
}

/// A machine that no known one is like comes last, and a file of it says what its groups carry.
#[test]
fn unknown_machine_comes_last_until_its_file_is_there() {
    // Its model's name is made to break out of a string of CEL, and a terminal.
    let model = r#"Other "]\ || true"#;
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-a100.yaml");
    let text = std::fs::read_to_string(machine).unwrap().replace("NVIDIA A100-SXM4-40GB", &format!("'{model}'"));
    let node = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(node.path(), text).unwrap();
    let node = node.path().to_str().unwrap();
    let mut all = slices("dgx1-v100", "mesh");
    all.extend(slices(node, "other"));
    let all = file(&all, false);

    let (found, said) = claim(&["--gpus", "2", &cluster(&all)]).unwrap();
    assert!(said.contains("what its groups carry is unknown"), "{said}");
    let first = &alternatives(&found)[0];
    assert_eq!(first.1.as_deref(), Some("linkwise.dev/pair1a"));
    assert!(first.2.as_ref().is_some_and(|selector| selector.contains("V100")), "{first:?}");

    let (found, said) = claim(&["--gpus", "2", &cluster(&all), "--node", node]).unwrap();
    assert!(!said.contains("unknown"), "{said}");
    let first = &alternatives(&found)[0];
    let selector = first.2.as_deref().unwrap();
    assert!(selector.ends_with(r#"in ["Other \"]\\ || true"]"#), "{selector}");
}

#[test]
fn strict_claim_for_a_fleet_takes_groups_only() {
    let nodes = ["--node", "dgx1-v100", "--node", "dgx-a100", "--strict"];
    let (found, _) = claim(&[&["--gpus", "2"], &nodes[..]].concat()).unwrap();
    let names: Vec<String> = alternatives(&found).into_iter().map(|of| of.0).collect();
    assert!(!names.is_empty() && !names.contains(&"any".to_owned()), "{names:?}");
    let error = claim(&[&["--gpus", "9"], &nodes[..]].concat()).unwrap_err();
    assert!(error.contains("no machine of this fleet has a group of 9 GPUs"), "{error}");
}

#[test]
fn impossible_claims_for_a_fleet_are_refused_by_name() {
    for (args, named) in [
        (&["--cluster", "--gpus", "2"][..], "no API server"),
        (&["--cluster=/none/slices.json", "--gpus", "2"], "cannot open /none/slices.json"),
        (&["--cluster", "--near", "nic"], "--cluster with --near"),
        (&["--cluster", "--rails", "0"], "--cluster with --rails"),
        (&["--cluster", "--mig", "1g.10gb"], "--cluster: only claims of whole GPUs"),
        (&["--cluster", "--shares", "2"], "--cluster: only claims of whole GPUs"),
        (&["--spare-nvswitch", "--node", "dgx-a100"], "--spare-nvswitch orders"),
        (&["--spare-nvswitch", "--exact", "--cluster"], "--spare-nvswitch orders"),
        (&["--node", "dgx-a100", "--node", "none.yaml", "--gpus", "2"], "none.yaml"),
        (&["--node", "dgx-a100", "--node", "dgx-h100", "--rails", "0"], "--rails: one --node"),
    ] {
        let error = claim(args).unwrap_err();
        assert!(error.contains(named), "{args:?}: {error}");
    }
}
