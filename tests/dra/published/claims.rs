//! `linkwise claim`: manifests within the limits of `resource.k8s.io/v1` that ask for published attributes.

use std::collections::BTreeSet;

use linkwise_host::machines;
use serde_json::Value;

use super::fleet;
use super::golden::{assert_all_refused, assert_golden, linkwise};
use super::limits::published;

/// A claim that the API server accepts, printed with nothing on standard error.
fn claim(args: &[&str]) -> Value {
    let (claim, stderr) = fleet::claim(args).unwrap();
    assert_eq!(stderr, "", "{args:?}");
    claim
}

/// Checks that a claim asks for at most 32 devices, the most of an allocation. Returns the names of requests,
/// `request/alternative` for those with alternatives.
fn check(devices: &Value) -> Vec<String> {
    let (mut names, mut all) = (Vec::new(), 0);
    for request in devices["requests"].as_array().unwrap() {
        let name = request["name"].as_str().unwrap();
        if let Some(exactly) = request.get("exactly") {
            all += exactly["count"].as_u64().unwrap();
            names.push(name.to_owned());
            continue;
        }
        let alternatives = request["firstAvailable"].as_array().unwrap();
        all += alternatives[0]["count"].as_u64().unwrap();
        assert!(alternatives.iter().all(|one| one["count"] == alternatives[0]["count"]), "{request}");
        names.extend(alternatives.iter().map(|one| format!("{name}/{}", one["name"].as_str().unwrap())));
    }
    assert!(all <= 32, "{all} devices");
    names
}

#[test]
fn claims_of_every_size_are_within_the_limits() {
    for gpus in 1..=32 {
        let count = gpus.to_string();
        let devices = claim(&["--gpus", &count])["spec"]["devices"].clone();
        let names = check(&devices);
        let alternatives = match gpus {
            1 => 1,
            2 => 4,
            3..=8 => 3,
            _ => 2,
        };
        assert_eq!(names.len(), alternatives, "{gpus}: {names:?}");
        check(&claim(&["--gpus", &count, "--mig", "1g.10gb"])["spec"]["devices"]);
        if gpus <= 16 {
            for near in ["nic", "cpu"] {
                let devices = claim(&["--gpus", &count, "--near", near])["spec"]["devices"].clone();
                assert_eq!(check(&devices).len(), 2 * gpus);
                assert_eq!(devices["constraints"].as_array().unwrap().len(), gpus);
            }
        }
    }
}

/// A strict claim lists all groups of its size, those of the usual claim included, but not `any`.
#[test]
fn strict_claims_list_every_group_and_not_any() {
    for gpus in 1..=32 {
        let count = gpus.to_string();
        let listed = |args: &[&str]| -> Vec<String> {
            let devices = claim(&[&["--gpus", &count], args].concat())["spec"]["devices"].clone();
            check(&devices);
            let alternatives = devices["requests"][0]["firstAvailable"].as_array().cloned().unwrap_or_default();
            alternatives.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
        };
        let (mut usual, strict) = (listed(&[]), listed(&["--strict"]));
        assert_eq!(usual.pop().unwrap_or("any".to_owned()), "any", "{gpus}");
        let groups = match gpus {
            1 => 0,
            2..=8 => 7,
            _ => 1,
        };
        assert_eq!(strict.len(), groups, "{gpus}");
        assert!(usual.iter().all(|name| strict.contains(name)), "{usual:?} {strict:?}");
    }
}

#[test]
fn claims_find_every_group_that_machines_publish() {
    let mut known = BTreeSet::new();
    for gpus in ["2", "4", "8"] {
        let devices = claim(&["--gpus", gpus, "--strict"])["spec"]["devices"].clone();
        let constraints = devices["constraints"].as_array().unwrap();
        known.extend(constraints.iter().map(|constraint| constraint["matchAttribute"].as_str().unwrap().to_owned()));
    }
    for machine in machines::built_in() {
        for device in published(&machines::load(machine.name).unwrap().observed, &[]) {
            let is_group = |key: &&String| {
                let id = key.strip_prefix("linkwise.dev/").unwrap_or_default();
                ["pair", "quad", "octet"].iter().any(|word| id.starts_with(word))
            };
            for key in device.attributes.keys().filter(is_group) {
                assert!(known.contains(key), "{}: {key}", machine.name);
            }
        }
        let devices = claim(&["--gpus", "2", "--node", machine.name])["spec"]["devices"].clone();
        let published = published(&machines::load(machine.name).unwrap().observed, &[]);
        for constraint in devices["constraints"].as_array().into_iter().flatten() {
            let attribute = constraint["matchAttribute"].as_str().unwrap();
            assert!(published.iter().any(|device| device.attributes.contains_key(attribute)), "{}", machine.name);
        }
    }
}

#[test]
fn claims_are_printed_as_documented() {
    for (name, args) in [
        ("gpus", &["--gpus", "4"][..]),
        ("gpus-of-node", &["--gpus", "2", "--node", "dgx1-v100"]),
        ("nic", &["--near", "nic", "--kind", "template"]),
        ("strict-deployment", &["--gpus", "8", "--strict", "--node", "nvlink-bridge-pairs", "--kind", "deployment"]),
        ("share-beside-nic", &["--shares", "2", "--memory", "40Gi", "--near", "nic"]),
        ("cpus", &["--near", "cpu", "--gpus", "2"]),
        ("rails", &["--gpus", "4", "--rails", "0,2", "--kind", "template"]),
        ("mig-pod", &["--mig", "1g.10gb", "--kind", "pod", "--name", "small"]),
    ] {
        assert_golden(&format!("claim-{name}"), &linkwise(&[&["claim"], args].concat()));
    }
    let yaml = linkwise(&["claim", "--gpus", "4", "--kind", "pod"]);
    let json = linkwise(&["claim", "--gpus", "4", "--kind", "pod", "--format", "json"]);
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), serde_json::from_str::<Value>(&json).unwrap());
}

#[test]
fn claims_on_rails_ask_for_equally_many_gpus_on_each() {
    for (gpus, rails, numbers) in [(4, "0-3", &[0, 1, 2, 3][..]), (8, "0-3", &[0, 1, 2, 3]), (2, "7,5", &[7, 5])] {
        let args = ["--gpus", &gpus.to_string(), "--rails", rails];
        let devices = claim(&args)["spec"]["devices"].clone();
        let requests: Vec<String> = numbers.iter().map(|rail| format!("rail-{rail}")).collect();
        assert_eq!(check(&devices), requests, "{rails}");
        for (request, rail) in devices["requests"].as_array().unwrap().iter().zip(numbers) {
            let exactly = &request["exactly"];
            assert_eq!(exactly["count"], gpus / numbers.len());
            let selector = exactly["selectors"][0]["cel"]["expression"].as_str().unwrap();
            assert!(selector.ends_with(&format!(".rail == {rail}")), "{selector}");
        }
    }
    let for_any_machine = claim(&["--gpus", "8", "--rails", "0-3"]);
    assert_eq!(claim(&["--gpus", "8", "--rails", "0-3", "--node", "dgx1-v100"]), for_any_machine);
}

#[test]
fn impossible_claims_are_refused_by_name() {
    let cases: &[(&[&str], &str)] = &[
        (&["--gpus", "0"], "'0' for '--gpus"),
        (&["--gpus", "33"], "'33' for '--gpus"),
        (&["--gpus", "four"], "'four' for '--gpus"),
        (&["--mig", "1g"], "'1g' is not a MIG profile"),
        (&["--mig", "1g.10gb' || true"], "is not a MIG profile"),
        (&["--gpus", "17", "--near", "nic"], "--gpus 17 with --near"),
        (&["--near", "switch"], "'switch' for '--near"),
        (&["--gpus", "4", "--rails", "0-x"], "'x' is not a rail"),
        (&["--gpus", "4", "--rails", "3-0"], "3-0 goes backwards"),
        (&["--gpus", "4", "--rails", "0-64"], "'64' is not a rail"),
        (&["--gpus", "4", "--rails", "0-2,1"], "rail 1 is given twice"),
        (&["--rails", "0-3"], "--gpus 1 with --rails 0-3: 4 rails for 1 GPUs; add --gpus 4"),
        (&["--gpus", "5", "--rails", "0-3"], "5 GPUs cannot be divided equally among 4 rails"),
        (&["--gpus", "4", "--rails", "4-7", "--node", "dgx1-v100"], "dgx1-v100 has no rail 4 (it has 0-3)"),
        (&["--gpus", "4", "--rails", "0,1", "--node", "dgx-h100"], "dgx-h100 has 1 of 2 GPUs on rail 0"),
        (&["--gpus", "1", "--rails", "0", "--node", "workstation-a6000"], "has no rail 0 (it has none)"),
        (&["--gpus", "4", "--rails", "0-3", "--strict"], "--strict"),
        (&["--gpus", "4", "--rails", "0-3", "--near", "nic"], "--near"),
        (&["--near", "cpu", "--strict"], "--strict"),
        (&["--gpus", "9", "--strict", "--node", "pcie-8x-pix-pairs"], "the largest has 8"),
        (&["--gpus", "9", "--node", "dgx-h100"], "a claim gets its GPUs on one machine"),
        (&["--gpus", "9", "--exact", "--node", "dgx-h100", "--node", "aws-p5"], "the largest has 8"),
        (&["--node", "-", "--cluster=slices.json"], "standard input can be read once only; name a file"),
        (&["--shares", "0"], "'0' for '--shares"),
        (&["--shares", "2", "--strict"], "--strict"),
        (&["--memory", "20Gb"], "'20Gb' for '--memory"),
        (&["--memory", "0"], "a quantity above 0, such as 20Gi"),
        (&["--mig", "1g.10gb", "--near", "nic"], "--near"),
        (&["--name", "A_B"], "'A_B' for '--name"),
        (&["--gpus", "2", "--node", "no-such-machine"], "no machine is called 'no-such-machine'"),
    ];
    assert_all_refused(&["claim"], cases);
}
