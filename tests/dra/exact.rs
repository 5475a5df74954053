//! `linkwise claim --exact`: which group it names for a machine, and what it says.

use std::process::{Command, Output};

use serde_json::Value;

use super::golden::{holds, linkwise};

fn claim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_linkwise")).env_clear().arg("claim").args(args).output().unwrap()
}

/// The attribute of the last constraint, and what goes to standard error.
fn named(args: &[&str]) -> (Option<String>, String) {
    let output = claim(&[&["--exact", "--format", "json"], args].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {said}");
    let claim: Value = serde_json::from_slice(&output.stdout).unwrap();
    let constraints = claim["spec"]["devices"]["constraints"].as_array();
    let last = constraints.and_then(|constraints| constraints.last());
    (last.map(|last| last["matchAttribute"].as_str().unwrap().to_owned()), said)
}

#[test]
fn exact_claims_are_printed_as_documented() {
    for (name, args) in
        [("exact", &["--gpus", "4"][..]), ("exact-nics", &["--gpus", "2", "--near", "nic", "--kind", "template"])]
    {
        holds(&format!("claim-{name}"), &linkwise(&[&["claim", "--exact"], args].concat()));
    }
    let said = |machine: &str| {
        let sizes = ["1", "2", "3", "4", "8"].map(|size| named(&["--gpus", size, "--node", machine]).1);
        sizes.concat()
    };
    holds("claim-exact-says", &["dgx1-v100", "aws-p5", "pcie-8x-pix-pairs"].map(said).join("\n"));
}

#[test]
fn one_gpu_needs_no_group() {
    assert_eq!(named(&["--gpus", "1", "--node", "dgx1-v100"]), (None, String::new()));
    assert_eq!(named(&["--gpus", "1"]).0, None);
    assert_eq!(named(&["--gpus", "9"]).0.as_deref(), Some("linkwise.dev/nvlinkDomain"));
}

#[test]
fn group_is_the_one_that_the_machine_meets_best() {
    for (machine, size, group) in [
        ("dgx1-v100", "4", "quad1a"),
        // Behind NVSwitches all GPUs are alike, and a larger group is free more often.
        ("dgx-h100", "4", "octet1a"),
        ("gb200-nvl72-node", "4", "quad1a"),
    ] {
        let (found, said) = named(&["--gpus", size, "--node", machine]);
        assert_eq!(found, Some(format!("linkwise.dev/{group}")), "{machine}: {said}");
    }
}

#[test]
fn impossible_exact_claims_are_refused_by_name() {
    for (args, named) in [
        (
            &["--exact", "--gpus", "9", "--node", "pcie-8x-pix-pairs"][..],
            "no group of 9 GPUs; pcie-8x-pix-pairs: pair1a of up to 2",
        ),
        (&["--exact", "--gpus", "8", "--node", "gb200-nvl72-node"], "nvlinkDomain of up to 4"),
        (&["--exact", "--gpus", "2", "--strict"], "--strict"),
        (&["--exact", "--mig", "1g.10gb"], "--mig"),
        (&["--exact", "--shares", "2"], "--shares"),
        (&["--exact", "--memory", "2Gi"], "--memory"),
        (&["--near", "nic", "--node", "dgx1-v100"], "--node with --near"),
    ] {
        let output = claim(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty() && error.contains(named), "{args:?}: {error}");
    }
}
