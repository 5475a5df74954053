//! `linkwise claim` for a fleet of unlike machines: the alternatives, what is said of them, and what is refused.

use std::path::Path;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use serde_json::{Value, json};

use super::exact::{cluster, file, slices};
use super::golden::{are_refused, holds, run};

/// The claim, and what goes to standard error.
pub fn claim(args: &[&str]) -> Result<(Value, String), String> {
    let (printed, said) = run(&[&["claim", "--format", "json"], args].concat())?;
    let claim: Value = serde_json::from_str(&printed).unwrap();
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
        let named: Vec<&str> = nodes.iter().flat_map(|node| ["--node", node]).collect();
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
    holds("claim-fleet", &told);
}

/// The slices of a cluster and its machines by name give one claim.
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

/// A machine that no known one is like comes last, and a file of it says what its groups carry.
#[test]
fn unknown_machine_comes_last_until_its_file_is_given() {
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
    assert!(said.contains("bandwidths unknown"), "{said}");
    let first = &alternatives(&found)[0];
    assert_eq!(first.1.as_deref(), Some("linkwise.dev/pair1a"));
    assert!(first.2.as_ref().is_some_and(|selector| selector.contains("V100")), "{first:?}");

    let (found, said) = claim(&["--gpus", "2", &cluster(&all), "--node", node]).unwrap();
    assert!(!said.contains("unknown"), "{said}");
    let first = &alternatives(&found)[0];
    let selector = first.2.as_deref().unwrap();
    assert!(selector.ends_with(r#"in ["Other \"]\\ || true"]"#), "{selector}");
}

/// So many nodes of each machine.
pub fn nodes(machines: &[(&str, usize)]) -> Vec<Value> {
    let of = |(machine, count): &(&str, usize)| -> Vec<Value> {
        (0..*count).flat_map(|number| slices(machine, &format!("{machine}-{number}"))).collect()
    };
    machines.iter().flat_map(of).collect()
}

/// The attributes of the alternatives, in their order.
fn attributes(slices: &[Value], options: &[&str]) -> (Vec<String>, String) {
    let (found, said) = claim(&[&[cluster(&file(slices, false)).as_str()], options].concat()).unwrap();
    let alternatives = alternatives(&found).into_iter().filter_map(|(_, attribute, _)| attribute);
    (alternatives.map(|attribute| attribute.replace("linkwise.dev/", "")).collect(), said)
}

/// A node that lacks a GPU has groups of its own. It is taken for the others with its model.
#[test]
fn node_with_a_sick_gpu_does_not_change_the_order() {
    let mut all = nodes(&[("dgx1-v100", 3), ("pcie-8x-pix-pairs", 2)]);
    for size in ["2", "4"] {
        let (healthy, _) = attributes(&all, &["--gpus", size]);
        let mut sick = slices("dgx1-v100", "sick");
        sick[0]["spec"]["devices"][0]["taints"] = json!([{"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}]);
        all.extend(sick);
        let (found, said) = attributes(&all, &["--gpus", size]);
        assert_eq!(found, healthy);
        assert!(said.contains("4 nodes with Tesla V100-SXM2-32GB") && !said.contains("unknown"), "{said}");
        all.truncate(5);
    }
}

/// The best machine is first however rare it is.
#[test]
fn rare_machine_has_its_alternative() {
    let all = nodes(&[("pcie-8x-pix-pairs", 90), ("dgx-h100", 1)]);
    let (found, said) = attributes(&all, &["--gpus", "2"]);
    assert_eq!(found[..2], ["octet1a", "pair1a"]);
    assert!(said.starts_with("linkwise: gpus/octet1a: 370.8 GB/s or more, on 1 node of 8 NVIDIA H100"), "{said}");
}

#[test]
fn ignored_nodes_are_counted_on_stderr() {
    let mut mixed = slices("dgx-h100", "mixed");
    mixed[0]["spec"]["devices"][0]["attributes"]["productName"]["string"] = json!("Other");
    let mut all = nodes(&[("dgx1-v100", 1), ("dgx-a100", 1), ("gb200-nvl72-node", 2)]);
    all.extend(mixed);
    let (_, said) = attributes(&all, &["--gpus", "8"]);
    assert!(
        said.contains("2 nodes with too few GPUs") && said.contains("1 node with GPUs of several models"),
        "{said}"
    );
    assert!(!said.contains("unknown"), "{said}");
    // Where all sets are alike, alternatives would only cost.
    let (found, said) = attributes(&nodes(&[("dgx-h100", 2), ("aws-p5", 1)]), &["--gpus", "2"]);
    assert!(found.is_empty() && said.contains("any 2 GPUs have the same bandwidth"), "{found:?} {said}");
    // A kind for each node: those beyond the most are left out, and counted.
    let many: Vec<Value> = (0..70)
        .flat_map(|number| {
            let mut slices = slices("nvlink-bridge-pairs", &format!("n{number}"));
            for device in slices[0]["spec"]["devices"].as_array_mut().unwrap() {
                device["attributes"]["productName"]["string"] = json!(format!("Model {number:02}"));
            }
            slices
        })
        .collect();
    let (_, said) = attributes(&many, &["--gpus", "2"]);
    assert!(said.contains("6 of the nodes are ignored") && said.contains("48 nodes with further models"), "{said}");
}

/// A strict claim waits for a group: each machine that has one is in it, with all of them.
#[test]
fn strict_claim_names_the_groups_of_every_machine() {
    let listed = |args: &[&str]| {
        let (found, _) = claim(&[args, &["--strict"]].concat()).unwrap();
        alternatives(&found)
    };
    let same = listed(&["--gpus", "2", "--node", "dgx-h100", "--node", "dgx-h100"]);
    let both = listed(&["--gpus", "2", "--node", "dgx-h100", "--node", "dgx-a100"]);
    let selected: String = both.iter().filter_map(|of| of.2.clone()).collect();
    assert!(both.iter().any(|of| of.2.is_none()) || selected.contains("A100"), "{both:?}");
    let mesh = listed(&["--gpus", "4", "--node", "dgx-h100", "--node", "dgx1-v100"]);
    let names: Vec<&str> = mesh.iter().filter_map(|of| of.1.as_deref()).collect();
    for name in ["quad1a", "quad2a", "quad3a", "quad3b", "quad3c", "quad3d"] {
        assert!(names.contains(&format!("linkwise.dev/{name}").as_str()), "{names:?}");
    }
    for list in [same, both, mesh, listed(&["--gpus", "2", "--node", "dgx1-v100", "--node", "dgx-a100"])] {
        assert!(!list.is_empty() && list.iter().all(|of| of.0 != "any"), "{list:?}");
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
    are_refused(&["claim"], cases);
}
