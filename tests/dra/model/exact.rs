//! Exact claims: GPUs of one group, without alternatives. Tests take groups from slices, bandwidths from the oracle.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::dra::model::alignment::dranet;
use crate::dra::model::published::{Node, accepted, claim, list, node};
use crate::dra::published::golden::run;
use crate::oracle::{Oracle, Set, places, subsets};

/// A DGX-1, an HGX H100, pairs with NVLink bridges, and pairs below PCIe switches.
const MACHINES: [&str; 4] = ["dgx1-v100", "aws-p5", "nvlink-bridge-pairs", "pcie-8x-pix-pairs"];

/// The exact claim for a machine, the attribute that it names, and the command's standard error.
fn exact(machine: &str, count: u32) -> (Value, String, String) {
    let args = ["claim", "--exact", "--format", "json", "--node", machine, "--gpus", &count.to_string()];
    let (printed, stderr) = run(&args).unwrap();
    let claim = accepted(&serde_json::from_str(&printed).unwrap(), Some("default"));
    let devices = &claim["spec"]["devices"];
    assert_eq!(devices["requests"][0]["exactly"]["count"], count);
    let length = |key: &str| devices[key].as_array().unwrap().len();
    assert_eq!((length("requests"), length("constraints")), (1, 1));
    let attribute = devices["constraints"][0]["matchAttribute"].as_str().unwrap().to_owned();
    (claim, attribute, stderr)
}

/// The groups that an attribute makes of a node's GPUs.
fn groups(node: &Node, attribute: &str) -> Vec<Set> {
    let mut groups: BTreeMap<String, Set> = BTreeMap::new();
    for gpu in 0..node.devices.len() {
        if let Some(value) = node.attribute(gpu, attribute) {
            *groups.entry(value).or_default() |= 1 << gpu;
        }
    }
    groups.into_values().collect()
}

fn of_size(set: Set, count: u32) -> impl Iterator<Item = Set> {
    subsets(set).filter(move |set| set.count_ones() == count)
}

#[test]
fn exact_claim_gets_its_bandwidth_if_a_set_is_free() {
    for name in MACHINES {
        let (node, mut waiting) = (node(name), 0);
        let (oracle, cluster) = (Oracle::new(&node.topology), node.cluster(&[]));
        for count in [2, 3, 4, 8] {
            let (claim, attribute, stderr) = exact(name, count);
            let groups = groups(&node, &attribute);
            let of_groups = groups.iter().flat_map(|group| of_size(*group, count));
            let promised = of_groups.map(|set| oracle.collective(set)).min().unwrap();
            let all = (1 << node.gpus()) - 1;
            let best = of_size(all, count).map(|set| oracle.collective(set)).max().unwrap();
            // In a group of four of a hybrid cube mesh, some sets of three GPUs have two single links, others only one.
            assert_eq!(promised == best, (name, count) != ("dgx1-v100", 3), "{name}: {count}: {promised} of {best}");
            let (mut states, mut waits) = (0, 0);
            for free in node.availabilities().into_iter().filter(|free| free.count_ones() >= count) {
                let group = groups.iter().find(|group| (*group & free).count_ones() >= count);
                let chosen = node.chosen(&cluster, free, &claim);
                assert_eq!(chosen.is_some(), group.is_some(), "{name}: {count} of {:?}", list(free));
                if let Some(set) = chosen {
                    assert!(groups.iter().any(|group| set & !group == 0), "{name}: {:?}", list(set));
                    assert!(oracle.collective(set) >= promised, "{name}: {:?}", list(set));
                }
                (states, waits) = (states + 1, waits + u64::from(group.is_none()));
            }
            // GB/s; `{}` prints the decimal only if it is not 0.
            let bound = format!(", each with {} GB/s or more", (promised / 100) as f64 / 10.0);
            assert!(stderr.contains(&bound), "{name}: {count}: {promised}: {stderr}");
            let mille = waits * 1000 / states;
            let share = format!("waits in {}.{} % of the states", mille / 10, mille % 10);
            let share = if waits == 0 { "never waits".to_owned() } else { share };
            assert!(stderr.contains(&share), "{name}: {count}: {waits} of {states}: {stderr}");
            waiting += waits;
        }
        // Behind NVSwitches an exact claim never waits if enough GPUs are free.
        assert_eq!(waiting == 0, name == "aws-p5", "{name}: {waiting}");
    }
}

/// A claim with alternatives may take GPUs that another pod of its gang needs (kubernetes#138765).
#[test]
fn exact_claims_of_one_size_fill_every_group() {
    for name in ["dgx1-v100", "pcie-8x-pix-pairs"] {
        let node = node(name);
        let cluster = node.cluster(&[]);
        for count in [2, 4] {
            let (claim, attribute, _) = exact(name, count);
            let groups = groups(&node, &attribute);
            for free in node.availabilities() {
                let room: u32 = groups.iter().map(|group| (group & free).count_ones() / count).sum();
                let (mut left, mut placed) = (free, 0);
                while let Some(set) = node.chosen(&cluster, left, &claim) {
                    (left, placed) = (left & !set, placed + 1);
                }
                assert_eq!(placed, room, "{name}: {count} of {:?}", list(free));
            }
        }
    }
}

#[test]
fn exact_claim_near_nics_has_gpus_of_one_group() {
    let node = node("dgx-h100");
    let (nics, near) = dranet(&node);
    let (cluster, claim) = (node.cluster(&nics), claim(&["--exact", "--near", "nic", "--gpus", "4"]));
    let constraints = claim["spec"]["devices"]["constraints"].as_array().unwrap();
    let attribute = constraints.last().unwrap()["matchAttribute"].as_str().unwrap();
    let groups = groups(&node, attribute);
    for free in groups.iter().copied().chain([(1 << node.gpus()) - 1]) {
        let allocation = node.allocated(&cluster, free, &claim).unwrap();
        let set = node.set_of(&allocation);
        assert!(groups.iter().any(|group| set & !group == 0) && set.count_ones() == 4, "{:?}", list(set));
        let nics = allocation["devices"]["results"].as_array().unwrap().iter();
        let nics = nics.filter_map(|result| result["device"].as_str().unwrap().strip_prefix("nic-"));
        let near_nics: Vec<Set> = nics.map(|nic| near[nic.parse::<usize>().unwrap()]).collect();
        assert!(near_nics.len() == 4 && near_nics.iter().all(|gpus| gpus & set != 0), "{allocation}");
    }
    // Three GPUs of one group and one of another do not make a group.
    let [first, second] = [0, 1].map(|at| places(groups[at]).collect::<Vec<_>>());
    let mixed = first[..3].iter().chain(&second[..1]).fold(0, |set: Set, gpu| set | 1 << gpu);
    assert_eq!(node.allocated(&cluster, mixed, &claim), None);
}
