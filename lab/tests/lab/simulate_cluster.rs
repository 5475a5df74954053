//! `linkwise-lab simulate --nodes N`, as a person or a script runs it.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use crate::{lab, stdout};

fn simulate(args: &[&str]) -> Command {
    lab(&[&["simulate"], args].concat())
}

/// The standard output of a simulation.
fn printed(args: &[&str]) -> String {
    stdout(&mut simulate(args))
}

/// Compares a text with FOLDER/NAME.snap.
pub fn check_snapshot(folder: &str, name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(folder);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

const SMALL: [&str; 6] = ["--nodes", "6", "--mix", "dgx1-v100=2,pcie-8x-pix-pairs=1", "--jobs", "400"];

#[test]
fn figures_of_a_small_cluster_are_golden() {
    check_snapshot("snapshots", "simulate-cluster", &printed(&SMALL));
    let json: Value = serde_json::from_str(&printed(&[&SMALL[..], &["--format", "json"]].concat())).unwrap();
    check_snapshot("snapshots", "simulate-cluster-json", &serde_json::to_string_pretty(&json).unwrap());
}

#[test]
fn docs_explain_every_figure() {
    let page = include_str!("../../../docs/scale.md");
    let text = printed(&SMALL);
    let table = text.lines().skip_while(|line| !line.starts_with(' ')).skip(1).take_while(|line| !line.is_empty());
    let lines: Vec<&str> = table.map(|line| line.get(..36).unwrap_or_default().trim()).collect();
    assert!(lines.len() > 12, "{lines:?}");
    // The page explains lines of one subject in one row.
    for label in lines.iter().map(|line| line.split([',', ':']).next().unwrap()) {
        let subject = label.split(" of ").next().unwrap();
        assert!(page.contains(&format!("| {subject}")) || page.contains(&format!(", {subject}")), "{label}");
    }
    let json: Value = serde_json::from_str(&printed(&[&SMALL[..], &["--format", "json"]].concat())).unwrap();
    let figures = json["doors"][0].as_object().unwrap();
    for field in figures.keys().filter(|field| !["door", "jobs", "several"].contains(&field.as_str())) {
        assert!(page.contains(&format!("`{field}`")), "{field}");
    }
    // The page's commands work.
    for line in page.lines().filter_map(|line| line.strip_prefix("    linkwise-lab ")) {
        let mut args: Vec<&str> = line.split('#').next().unwrap().split_whitespace().skip(1).collect();
        args.retain(|arg| !arg.ends_with(".csv") && *arg != "--trace");
        let mix = args.iter().map(|arg| arg.trim_end_matches(",mine.yaml=1")).collect::<Vec<_>>();
        let output = printed(&[&mix[..], &["--jobs", "40"]].concat());
        assert!(output.contains("allocator steps"), "{line}");
    }
}

#[test]
fn docs_have_the_figures_of_rails() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/traces/pods.csv");
    let doors = ["--trace", trace, "--door", "plugin,plugin-rails,dra-rails"];
    let page = include_str!("../../../docs/scale.md");
    let page = page.split("## Jobs of several pods").nth(1).unwrap().split("\n## ").next().unwrap();
    let documented: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("    ")).skip(2).collect();
    for machine in ["dgx-h100", "dgx1-v100"] {
        let text = printed(&[&["--nodes", "16", "--node", machine][..], &doors].concat());
        assert!(documented.len() == 2 && text.contains("idle machine's           100.0 %       100.0 %       100.0 %"));
        assert!(documented.iter().all(|row| text.contains(&format!("\n{row}\n"))), "{machine}: {text}");
    }
}

/// Each start and each end of a pod is a line, and no two pods have a device at once.
#[test]
fn choices_are_lines_of_csv() {
    let text = printed(&[&SMALL[..], &["--door", "dra-groups,dra-fleet", "--format", "choices"]].concat());
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("door,second,event,job,node,machine,devices,score,collective,best"));
    let (mut held, mut shares) = (BTreeMap::new(), BTreeMap::new());
    for line in lines {
        let [door, _, event, job, node, machine, devices, score, got, best] = line.split(',').collect::<Vec<_>>()[..]
        else {
            panic!("{line}");
        };
        assert!(["dgx1-v100", "pcie-8x-pix-pairs"].contains(&machine), "{line}");
        for device in devices.split(' ') {
            match event {
                "start" => assert_eq!(held.insert((door, node, device), job), None, "{line}"),
                _ => assert_eq!(held.remove(&(door, node, device)), Some(job), "{line}"),
            }
        }
        let several = event == "start" && devices.contains(' ');
        assert_eq!((got.is_empty(), best.is_empty(), score.is_empty()), (!several, !several, event == "end"), "{line}");
        if several {
            let (got, best): (u64, u64) = (got.parse().unwrap(), best.parse().unwrap());
            let (sum, count) = shares.entry(door).or_insert((0, 0));
            (*sum, *count) = (*sum + got * 1000 / best, *count + 1);
        }
    }
    assert!(held.is_empty(), "{held:?}");
    // Claims for this cluster's machines get more of the best collective than claims for any machine.
    let [groups, fleet] = ["dra-groups", "dra-fleet"].map(|door| shares[door].0 / shares[door].1);
    assert!(groups < fleet && fleet > 950, "{groups} {fleet}");
}

#[test]
fn same_seed_gives_same_figures() {
    let with = |seed| printed(&[&SMALL[..], &["--door", "dra-groups", "--seed", seed, "--format", "json"]].concat());
    assert_eq!(with("1"), with("1"));
    assert_ne!(with("1"), with("2"));
}

#[test]
fn trace_is_replayed_through_every_named_door() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/traces/sample.csv");
    let args = ["--nodes", "2", "--node", "dgx-h100", "--trace", trace, "--format", "json"];
    let doors = ["--door", "dra-groups", "--door", "plugin,dra-groups", "--cpu", "none"];
    let json: Value = serde_json::from_str(&printed(&[&args[..], &doors].concat())).unwrap();
    let names: Vec<&Value> = json["doors"].as_array().unwrap().iter().map(|door| &door["door"]).collect();
    assert_eq!(names, ["dra-groups", "plugin"]);
    for door in json["doors"].as_array().unwrap() {
        // All jobs of a trace count. Behind NVSwitches every set has the best collective.
        assert_eq!(
            (&door["jobs"], &door["several"], &door["best_of_cluster"]),
            (&200.into(), &118.into(), &1000.into())
        );
    }
    assert!(json["load"].is_null() && json["cpu"] == "none" && json["machines"][0]["nodes"] == 2);
}

#[test]
fn bad_input_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let trace = file("large.csv", "size,duration_seconds\n16,10\n");
    let bare = file("bare.yaml", "version: 1\nname: bare\nobserved: {gpus: []}\n");
    let cases: [(&[&str], &[&str]); 15] = [
        (&["--nodes", "0"], &["'0'", "--nodes"]),
        (&["--nodes", "100001"], &["100001", "100000"]),
        (&["--nodes", "2", "--mix", "dgx-h200=1"], &["'dgx-h200'", "dgx-h100"]),
        (&["--nodes", "2", "--mix", "dgx-h100=0"], &["weight of dgx-h100", "from 1 to"]),
        (&["--nodes", "2", "--mix", "dgx-h100=many"], &["weight of dgx-h100"]),
        (&["--nodes", "2", "--mix", "=2"], &["no machine before"]),
        (&["--nodes", "2", "--mix", "dgx-h100=1,dgx-h100=2"], &["dgx-h100 twice"]),
        (&["--nodes", "2", "--mix", &bare], &["bare.yaml' has no whole GPU"]),
        (&["--nodes", "2", "--mix", "dgx-h100", "--node", "dgx-a100"], &["--mix", "--node"]),
        (&["--nodes", "2", "--trace", &trace], &["trace /", "large.csv: no job fits", "the largest serves 8 GPUs"]),
        (&["--nodes", "2", "--trace", &trace, "--load", "0.5"], &["--load", "--trace"]),
        (&["--nodes", "2", "--load", "1.5"], &["'1.5'", "0.01 to 1"]),
        (&["--nodes", "2", "--jobs", "0"], &["'0'", "--jobs"]),
        (&["--nodes", "2", "--policy", "random"], &["--policy", "--nodes"]),
        (&["--nodes", "2", "--door", "window"], &["'window'", "dra-groups"]),
    ];
    for (args, named) in cases {
        let output = simulate(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}: {error}");
        assert!(named.iter().all(|name| error.contains(name)), "{args:?}: not all of {named:?} in {error}");
    }
    // The options of a cluster need --nodes, and without --nodes a trace is needed.
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/traces/sample.csv");
    for (args, named) in [
        (&["--trace", "-", "--door", "plugin"][..], "--nodes"),
        (&["--node", "dgx-h100", "--trace", sample, "--format", "choices"], "add --nodes"),
        (&[], "--trace"),
    ] {
        let error = String::from_utf8(simulate(args).output().unwrap().stderr).unwrap();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn docs_have_the_figures_of_exact_claims() {
    let page = include_str!("../../../docs/schedulers.md");
    let command = page.lines().find_map(|line| line.strip_prefix("    linkwise-lab simulate ")).unwrap();
    for machine in ["dgx1-v100", "aws-p5", "nvlink-bridge-pairs", "pcie-8x-pix-pairs"] {
        let args: Vec<&str> = command.split(' ').map(|arg| if arg == "dgx1-v100" { machine } else { arg }).collect();
        let json: Value = serde_json::from_str(&printed(&[&args[..], &["--format", "json"]].concat())).unwrap();
        let mut row = format!("| {machine} |");
        for (door, name) in json["doors"].as_array().unwrap().iter().zip(["dra-singles", "dra-exact", "dra-groups"]) {
            assert_eq!((&door["door"], &door["jobs"]), (&name.into(), &60.into()));
            let mille = door["collective_of_cluster"].as_u64().unwrap();
            row += &format!(" {}.{} %, {} s |", mille / 10, mille % 10, door["mean_wait_seconds"]);
        }
        assert!(page.contains(&row), "{row}");
    }
}
