//! `linkwise claim` for a fleet of unlike machines: alternatives, the report on standard error, and refusals.

use std::path::Path;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use serde_json::{Value, json};

use super::exact::{cluster, file, slices};
use super::golden::{assert_all_refused, assert_golden, run};

/// The claim that the command prints, which the API server accepts, and the command's standard error.
pub fn claim(args: &[&str]) -> Result<(Value, String), String> {
    let (printed, stderr) = run(&[&["claim", "--format", "json"], args].concat())?;
    let claim: Value = serde_json::from_str(&printed).unwrap();
    stored(&ResourceType::RESOURCE_CLAIMS, Some("default"), Gates::default(), &claim).unwrap();
    Ok((claim, stderr))
}

/// The alternatives, each with its attribute and its selector.
fn alternatives(claim: &Value) -> Vec<(String, Option<String>, Option<String>)> {
    let devices = &claim["spec"]["devices"];
    let constraint = |name: &str| {
        let constraints = devices["constraints"].as_array().into_iter().flatten();
        let own = constraints.clone().find(|one| one["requests"] == json!([format!("gpus/{name}")]));
        own.map(|own| own["matchAttribute"].as_str().unwrap().to_owned())
    };
    let alternative = |request: &Value| {
        let name = request["name"].as_str().unwrap();
        let selector = request["selectors"][0]["cel"]["expression"].as_str();
        (name.to_owned(), constraint(name), selector.map(str::to_owned))
    };
    devices["requests"][0]["firstAvailable"].as_array().into_iter().flatten().map(alternative).collect()
}

#[test]
fn fleet_of_unlike_machines_has_one_order() {
    let mut text = String::new();
    for (nodes, size) in [
        (&["dgx1-v100", "pcie-8x-pix-pairs", "dgx-a100"][..], "2"),
        (&["dgx1-v100", "pcie-8x-pix-pairs", "dgx-a100"], "4"),
        (&["dgx1-v100", "dgx-h100", "hgx-h200"], "2"),
        (&["nvlink-bridge-pairs", "dgx1-v100", "workstation-a6000", "dgx-a100", "dgx-h100"], "2"),
    ] {
        let options: Vec<&str> = nodes.iter().flat_map(|node| ["--node", node]).collect();
        let (claim, stderr) = claim(&[&["--gpus", size], &options[..]].concat()).unwrap();
        text += &format!("{size} GPUs, {}\n{stderr}", options.join(" "));
        for (name, attribute, selector) in alternatives(&claim) {
            text += &format!("  {name}: {}", attribute.as_deref().unwrap_or("any"));
            let selected = |selector: String| format!(", {}", selector.rsplit(".productName ").next().unwrap());
            text += &(selector.map(selected).unwrap_or_default() + "\n");
        }
    }
    assert_golden("claim-fleet", &text);
}

#[test]
fn slices_and_machine_names_give_one_claim() {
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
        assert!(!read.1.contains("unknown"), "{}", read.1);
    }
}

/// The bandwidths of a machine that resembles no built-in one are unknown, unless its file is given.
#[test]
fn unknown_machine_comes_last_until_its_file_is_given() {
    // The model's name tries to end a string literal of CEL.
    let model = r#"Other "]\ || true"#;
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-a100.yaml");
    let text = std::fs::read_to_string(machine).unwrap().replace("NVIDIA A100-SXM4-40GB", &format!("'{model}'"));
    let node = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(node.path(), text).unwrap();
    let node = node.path().to_str().unwrap();
    let mut all = slices("dgx1-v100", "mesh");
    all.extend(slices(node, "other"));
    let all = file(&all, false);

    let (found, stderr) = claim(&["--gpus", "2", &cluster(&all)]).unwrap();
    assert!(stderr.contains("bandwidths unknown"), "{stderr}");
    let first = &alternatives(&found)[0];
    assert_eq!(first.1.as_deref(), Some("linkwise.dev/pair1a"));
    assert!(first.2.as_ref().is_some_and(|selector| selector.contains("V100")), "{first:?}");

    let (found, stderr) = claim(&["--gpus", "2", &cluster(&all), "--node", node]).unwrap();
    assert!(!stderr.contains("unknown"), "{stderr}");
    let first = &alternatives(&found)[0];
    let selector = first.2.as_deref().unwrap();
    assert!(selector.ends_with(r#"in ["Other \"]\\ || true"]"#), "{selector}");
}

/// The slices of a cluster with this many nodes of each machine.
pub fn nodes(machines: &[(&str, usize)]) -> Vec<Value> {
    let slices_of = |(machine, count): &(&str, usize)| -> Vec<Value> {
        (0..*count).flat_map(|number| slices(machine, &format!("{machine}-{number}"))).collect()
    };
    machines.iter().flat_map(slices_of).collect()
}

/// The attributes of the alternatives, in their order, and the command's standard error.
fn attributes(slices: &[Value], options: &[&str]) -> (Vec<String>, String) {
    let (found, stderr) = claim(&[&[cluster(&file(slices, false)).as_str()], options].concat()).unwrap();
    let alternatives = alternatives(&found).into_iter().filter_map(|(_, attribute, _)| attribute);
    (alternatives.map(|attribute| attribute.replace("linkwise.dev/", "")).collect(), stderr)
}

/// A node with a sick GPU has other groups, and still counts as one of the nodes with its model.
#[test]
fn node_with_a_sick_gpu_does_not_change_the_order() {
    let mut all = nodes(&[("dgx1-v100", 3), ("pcie-8x-pix-pairs", 2)]);
    for size in ["2", "4"] {
        let (healthy, _) = attributes(&all, &["--gpus", size]);
        let mut sick = slices("dgx1-v100", "sick");
        sick[0]["spec"]["devices"][0]["taints"] = json!([{"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}]);
        all.extend(sick);
        let (found, stderr) = attributes(&all, &["--gpus", size]);
        assert_eq!(found, healthy);
        assert!(stderr.contains("4 nodes with Tesla V100-SXM2-32GB") && !stderr.contains("unknown"), "{stderr}");
        all.truncate(5);
    }
}

/// The best machine comes first, even if it is rare.
#[test]
fn rare_machine_has_its_alternative() {
    let all = nodes(&[("pcie-8x-pix-pairs", 90), ("dgx-h100", 1)]);
    let (found, stderr) = attributes(&all, &["--gpus", "2"]);
    assert_eq!(found[..2], ["octet1a", "pair1a"]);
    assert!(stderr.starts_with("linkwise: gpus/octet1a: 370.8 GB/s or more, on 1 node of 8 NVIDIA H100"), "{stderr}");
}

#[test]
fn stderr_counts_ignored_nodes_and_names_equal_sets() {
    let mut mixed = slices("dgx-h100", "mixed");
    mixed[0]["spec"]["devices"][0]["attributes"]["productName"]["string"] = json!("Other");
    let mut all = nodes(&[("dgx1-v100", 1), ("dgx-a100", 1), ("gb200-nvl72-node", 2)]);
    all.extend(mixed);
    let (_, stderr) = attributes(&all, &["--gpus", "8"]);
    for part in ["2 nodes with too few GPUs", "1 node with GPUs of several models"] {
        assert!(stderr.contains(part) && !stderr.contains("unknown"), "{stderr}");
    }
    // If all sets have the same bandwidth, alternatives would only cost the scheduler time.
    let (found, stderr) = attributes(&nodes(&[("dgx-h100", 2), ("aws-p5", 1)]), &["--gpus", "2"]);
    assert!(found.is_empty() && stderr.contains("any 2 GPUs have the same bandwidth"), "{found:?} {stderr}");
    // Each node has another model: 64 kinds of node are read, and 16 models have alternatives.
    let many = (0..70).flat_map(|number| {
        let mut slices = slices("nvlink-bridge-pairs", &format!("n{number}"));
        for device in slices[0]["spec"]["devices"].as_array_mut().unwrap() {
            device["attributes"]["productName"]["string"] = json!(format!("Model {number:02}"));
        }
        slices
    });
    let (_, stderr) = attributes(&many.collect::<Vec<_>>(), &["--gpus", "2"]);
    assert!(stderr.contains("6 of the nodes are ignored"), "{stderr}");
    assert!(stderr.contains("48 nodes with further models"), "{stderr}");
}

/// A strict claim waits for a group, so it lists all groups of each machine that has any.
#[test]
fn strict_claim_names_the_groups_of_every_machine() {
    let listed = |args: &[&str]| {
        let (found, _) = claim(&[args, &["--strict"]].concat()).unwrap();
        alternatives(&found)
    };
    let same = listed(&["--gpus", "2", "--node", "dgx-h100", "--node", "dgx-h100"]);
    let both = listed(&["--gpus", "2", "--node", "dgx-h100", "--node", "dgx-a100"]);
    let selected: String = both.iter().filter_map(|(_, _, selector)| selector.clone()).collect();
    assert!(both.iter().any(|(_, _, selector)| selector.is_none()) || selected.contains("A100"), "{both:?}");
    let mesh = listed(&["--gpus", "4", "--node", "dgx-h100", "--node", "dgx1-v100"]);
    let names: Vec<&str> = mesh.iter().filter_map(|(_, attribute, _)| attribute.as_deref()).collect();
    for name in ["quad1a", "quad2a", "quad3a", "quad3b", "quad3c", "quad3d"] {
        assert!(names.contains(&format!("linkwise.dev/{name}").as_str()), "{names:?}");
    }
    for list in [same, both, mesh, listed(&["--gpus", "2", "--node", "dgx1-v100", "--node", "dgx-a100"])] {
        assert!(!list.is_empty() && list.iter().all(|(name, ..)| name != "any"), "{list:?}");
    }
}

#[test]
fn impossible_claims_for_a_fleet_are_refused_by_name() {
    let cases: &[(&[&str], &str)] = &[
        (&["--cluster", "--gpus", "2"], "no API server"),
        (&["--cluster=/none/slices.json", "--gpus", "2"], "cannot open /none/slices.json"),
        (&["--cluster", "--near", "nic"], "--cluster with --near"),
        (&["--cluster", "--rails", "0"], "--cluster with --rails"),
        (&["--cluster", "--mig", "1g.10gb"], "--cluster has no effect: only claims of whole GPUs"),
        (&["--cluster", "--shares", "2"], "--cluster has no effect: only claims of whole GPUs"),
        (&["--node", "dgx-a100", "--node", "none.yaml", "--gpus", "2"], "none.yaml"),
        (&["--node", "dgx-a100", "--node", "dgx-h100", "--rails", "0"], "--rails: one --node"),
        (&["--node", "dgx-a100", "--cluster", "--rails", "0"], "--cluster with --rails"),
        (&["--gpus", "9", "--node", "dgx1-v100", "--node", "dgx-a100", "--strict"], "the largest has 8"),
    ];
    assert_all_refused(&["claim"], cases);
}
