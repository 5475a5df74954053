//! `linkwise claim --exact`: the group that it names for a machine and for a cluster, and its report.

use std::io::Write as _;

use serde_json::{Value, json};

use super::fleet::nodes;
use super::golden::{assert_all_refused, assert_golden, linkwise, run};

/// The attribute of the claim's last constraint, and the command's standard error.
fn named(args: &[&str]) -> (Option<String>, String) {
    let (printed, stderr) = run(&[&["claim", "--exact", "--format", "json"], args].concat()).unwrap();
    let claim: Value = serde_json::from_str(&printed).unwrap();
    let constraints = claim["spec"]["devices"]["constraints"].as_array();
    let last = constraints.and_then(|constraints| constraints.last());
    (last.map(|last| last["matchAttribute"].as_str().unwrap().to_owned()), stderr)
}

/// The slices of a node.
pub fn slices(machine: &str, node: &str) -> Vec<Value> {
    let list = linkwise(&["dra", "--node", machine, "--node-name", node]);
    serde_json::from_str::<Value>(&list).unwrap()["items"].as_array().unwrap().clone()
}

pub fn file(slices: &[Value], as_yaml: bool) -> tempfile::NamedTempFile {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": slices});
    let text = if as_yaml { serde_saphyr::to_string(&list).unwrap() } else { list.to_string() };
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

pub fn cluster(file: &tempfile::NamedTempFile) -> String {
    format!("--cluster={}", file.path().display())
}

#[test]
fn exact_claims_are_printed_as_documented() {
    for (name, args) in
        [("exact", &["--gpus", "4"][..]), ("exact-nics", &["--gpus", "2", "--near", "nic", "--kind", "template"])]
    {
        assert_golden(&format!("claim-{name}"), &linkwise(&[&["claim", "--exact"], args].concat()));
    }
    let reports =
        |machine: &str| ["1", "2", "3", "4", "8"].map(|size| named(&["--gpus", size, "--node", machine]).1).concat();
    assert_golden("claim-exact-says", &["dgx1-v100", "aws-p5", "pcie-8x-pix-pairs"].map(reports).join("\n"));
}

#[test]
fn several_gpus_need_a_group_but_one_needs_none() {
    assert_eq!(named(&["--gpus", "1", "--node", "dgx1-v100"]), (None, String::new()));
    assert_eq!(named(&["--gpus", "1"]).0, None);
    assert_eq!(named(&["--gpus", "9"]).0.as_deref(), Some("linkwise.dev/nvlinkDomain"));
}

#[test]
fn exact_claim_names_the_group_best_on_most_nodes() {
    for (kinds, size, group) in [
        (&[("dgx1-v100", 2)][..], "4", "quad1a"),
        // Behind NVSwitches all sets are equally good, and a larger group has free GPUs more often.
        (&[("dgx-h100", 2)], "4", "octet1a"),
        // The best group of three nodes counts more than that of one.
        (&[("dgx-h100", 1), ("dgx1-v100", 3)], "4", "quad1a"),
        (&[("dgx-h100", 3), ("dgx1-v100", 1)], "2", "pair1a"),
        (&[("dgx-h100", 1), ("gb200-nvl72-node", 1)], "4", "nvlinkDomain"),
    ] {
        let slices = nodes(kinds);
        let (json, yaml) = (file(&slices, false), file(&slices, true));
        let (found, stderr) = named(&["--gpus", size, &cluster(&json)]);
        assert_eq!(found, Some(format!("linkwise.dev/{group}")), "{kinds:?}: {stderr}");
        assert_eq!(named(&["--gpus", size, &cluster(&yaml)]), (found, stderr));
    }
}

#[test]
fn nodes_without_the_group_are_named() {
    let mut all = slices("dgx1-v100", "mesh");
    all.extend(slices("gb200-nvl72-node", "tray"));
    let (group, stderr) = named(&["--gpus", "8", &cluster(&file(&all, false))]);
    assert_eq!(group.as_deref(), Some("linkwise.dev/octet1a"));
    assert!(stderr.contains("on 1 of 2 nodes") && stderr.contains("(tray): no linkwise.dev/octet1a"), "{stderr}");
}

/// If a machine resembles no built-in one, linkwise chooses by the tiers in the groups' names, without bandwidths.
#[test]
fn unknown_machine_is_described_by_groups_alone() {
    let mut all = slices("dgx-h100", "n");
    for device in all[0]["spec"]["devices"].as_array_mut().unwrap() {
        device["attributes"]["productName"]["string"] = json!("Other\u{1b}[2J");
    }
    let (group, stderr) = named(&["--gpus", "4", &cluster(&file(&all, false))]);
    assert_eq!(group.as_deref(), Some("linkwise.dev/quad1a"));
    assert!(stderr.contains("1 node of 8 Other") && !stderr.contains("GB/s") && !stderr.contains('\u{1b}'), "{stderr}");
}

/// The scheduler does not give such devices to claims, so they are in no group.
#[test]
fn sick_old_and_incomplete_devices_do_not_count() {
    let (whole, mut sick) = (slices("dgx1-v100", "n"), slices("dgx1-v100", "n"));
    sick[0]["spec"]["devices"][0]["taints"] = json!([{"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}]);
    let (_, stderr) = named(&["--gpus", "8", "--near", "nic", &cluster(&file(&whole, false))]);
    assert!(stderr.contains("room for 1 claim of 8"), "{stderr}");
    let refused = |slices: &[Value], error: &str| {
        assert_all_refused(&["claim", "--exact", "--gpus", "8"], &[(&[&cluster(&file(slices, false))], error)]);
    };
    refused(&sick, "no group has 8 GPUs (1 node of 7");
    // The newer generation of the pool is still being written.
    let mut newer = sick[0].clone();
    newer["metadata"]["name"] = json!("newer");
    newer["spec"]["pool"]["generation"] = json!(2);
    newer["spec"]["pool"]["resourceSliceCount"] = json!(2);
    refused(&[whole[0].clone(), newer], "no node publishes whole GPUs");
}

#[test]
fn impossible_exact_claims_are_refused_by_name() {
    let other = file(&[json!({"kind": "Pod"})], false);
    let (other, missing) = (cluster(&other), "--cluster=/none/slices.json");
    let cases: &[(&[&str], &str)] = &[
        (&["--exact", "--gpus", "9", "--node", "pcie-8x-pix-pairs"], "the largest has 8"),
        (&["--exact", "--gpus", "8", "--node", "gb200-nvl72-node"], "the largest has 4"),
        (&["--exact", "--gpus", "2", "--strict"], "--strict"),
        (&["--exact", "--mig", "1g.10gb"], "--mig"),
        (&["--exact", "--shares", "2"], "--shares"),
        (&["--exact", "--memory", "2Gi"], "--memory"),
        (&["--near", "nic", "--node", "dgx1-v100"], "--node with --near"),
        (&["--exact", "--gpus", "2", "--cluster"], "no API server"),
        (&["--exact", "--gpus", "2", missing], "cannot open /none/slices.json"),
        (&["--exact", "--gpus", "2", &other], "is not a list of ResourceSlices"),
    ];
    assert_all_refused(&["claim"], cases);
}
