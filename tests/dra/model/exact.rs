//! Exact claims: GPUs of one group, in the place of alternatives. Groups are read from the slices, and what they carry from
//! the oracle.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::dra::model::alignment::dranet;
use crate::dra::model::published::{Node, accepted, claim, list, node};
use crate::dra::published::golden::run;
use crate::oracle::{Oracle, Set, places, subsets};

/// A DGX-1, an HGX H100, a machine with bridges, and PCIe pairs.
const MACHINES: [&str; 4] = ["dgx1-v100", "aws-p5", "nvlink-bridge-pairs", "pcie-8x-pix-pairs"];

/// The exact claim for a machine, the attribute that it names, and what the command says.
fn exact(machine: &str, count: u32) -> (Value, String, String) {
    let args = ["claim", "--exact", "--format", "json", "--node", machine, "--gpus", &count.to_string()];
    let (printed, said) = run(&args).unwrap();
    let claim = accepted(&serde_json::from_str(&printed).unwrap(), Some("default"));
    let devices = &claim["spec"]["devices"];
    assert_eq!(devices["requests"][0]["exactly"]["count"], count);
    assert_eq!(
        (devices["requests"].as_array().unwrap().len(), devices["constraints"].as_array().unwrap().len()),
        (1, 1)
    );
    let attribute = devices["constraints"][0]["matchAttribute"].as_str().unwrap().to_owned();
    (claim, attribute, said)
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
            let (claim, attribute, said) = exact(name, count);
            let groups = groups(&node, &attribute);
            let of_groups = groups.iter().flat_map(|group| of_size(*group, count));
            let promised = of_groups.map(|set| oracle.collective(set)).min().unwrap();
            let all = (1 << node.gpus()) - 1;
            let best = of_size(all, count).map(|set| oracle.collective(set)).max().unwrap();
            // Of three GPUs of a four in a hybrid cube mesh two have single links.
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
            // What the command says of it.
            let tenths = promised / 100;
            let bandwidth =
                if tenths % 10 == 0 { format!("{}", tenths / 10) } else { format!("{}.{}", tenths / 10, tenths % 10) };
            assert!(
                said.contains(&format!(", each with {bandwidth} GB/s or more")),
                "{name}: {count}: {promised}: {said}"
            );
            let mille = waits * 1000 / states;
            let share = format!("waits in {}.{} % of the states", mille / 10, mille % 10);
            let share = if waits == 0 { "never waits".to_owned() } else { share };
            assert!(said.contains(&share), "{name}: {count}: {waits} of {states}: {said}");
            waiting += waits;
        }
        // Behind NVSwitches nothing is given up.
        assert_eq!(waiting == 0, name == "aws-p5", "{name}: {waiting}");
    }
}

/// Claims with alternatives of a gang may take GPUs that another of its pods needed (kubernetes#138765).
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
        let beside: Vec<Set> = nics.map(|nic| near[nic.parse::<usize>().unwrap()]).collect();
        assert!(beside.len() == 4 && beside.iter().all(|gpus| gpus & set != 0), "{allocation}");
    }
    // Three of a group and one of another are no group.
    let [first, second] = [0, 1].map(|at| places(groups[at]).collect::<Vec<_>>());
    let mixed = first[..3].iter().chain(&second[..1]).fold(0, |set: Set, gpu| set | 1 << gpu);
    assert_eq!(node.allocated(&cluster, mixed, &claim), None);
}
