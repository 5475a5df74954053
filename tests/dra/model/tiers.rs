//! Claims with alternatives, which name the groups of each tier, the best first.

use crate::dra::model::published::{Node, claim, list, node, nodes};
use crate::oracle::{Oracle, Set, subsets};
use serde_json::Value;

/// The share of states in which a claim gets the best free set, and its mean share of that set's collective; per mille.
fn rate(node: &Node, count: u32) -> (u64, u64) {
    rate_of(node, count, &claim(&["--gpus", &count.to_string()]))
}

fn rate_of(node: &Node, count: u32, claim: &Value) -> (u64, u64) {
    let (oracle, cluster) = (Oracle::new(&node.topology), node.cluster(&[]));
    let (mut states, mut best_ones, mut shares) = (0, 0, 0);
    for free in node.availabilities() {
        let best = subsets(free).filter(|set| set.count_ones() == count).map(|set| oracle.collective(set)).max();
        let chosen: Option<Set> = node.chosen(&cluster, free, claim);
        assert_eq!(chosen.is_some(), best.is_some(), "{}: {:?}", node.name, list(free));
        if let (Some(chosen), Some(best)) = (chosen, best) {
            let got = oracle.collective(chosen);
            states += 1;
            best_ones += u64::from(got == best);
            shares += (got * 1000).checked_div(best).unwrap_or(1000);
        }
    }
    (best_ones * 1000 / states, shares / states)
}

/// A claim for a fleet of this machine: one `--node` names no fleet.
fn fleet(node: &Node, count: u32) -> Value {
    claim(&["--gpus", &count.to_string(), "--node", node.name, "--node", node.name])
}

#[test]
fn claim_for_two_always_gets_the_best_pair() {
    for node in nodes() {
        assert_eq!(rate(&node, 2), (1000, 1000), "{}", node.name);
        if node.gpus() >= 4 {
            assert_eq!(rate_of(&node, 2, &fleet(&node, 2)), (1000, 1000), "{}", node.name);
        }
    }
}

/// Sets of four GPUs of a hybrid cube mesh have five tiers; the 16 sets of the third overlap too much for eight
/// alternatives. A claim for any machine lists the first two tiers, and one for this machine lists all its groups. A
/// claim for a fleet of the machine gets no less than one for any machine.
#[test]
fn claim_for_four_gets_the_best_four_or_nearly() {
    for node in nodes().filter(|node| node.gpus() >= 4) {
        let of_node = claim(&["--gpus", "4", "--node", node.name]);
        let least_mean = if node.name == "azure-ndv2-v100" { 950 } else { 945 };
        let (usual, fleet) = (rate(&node, 4), rate_of(&node, 4, &fleet(&node, 4)));
        assert!(fleet.0 >= usual.0 && fleet.1 >= usual.1, "{}: {fleet:?}", node.name);
        for ((best, mean), least) in [(usual, (840, 900)), (rate_of(&node, 4, &of_node), (920, least_mean))] {
            match node.name {
                "dgx1-v100" | "azure-ndv2-v100" => {
                    assert!(best >= least.0 && mean >= least.1, "{}: {best}, {mean}", node.name);
                }
                _ => assert_eq!((best, mean), (1000, 1000), "{}", node.name),
            }
        }
    }
}

#[test]
fn strict_claim_takes_the_same_group_or_waits() {
    for (name, count) in [("dgx1-v100", 4), ("nvlink-bridge-pairs", 2), ("workstation-a6000", 2), ("dgx-h100", 8)] {
        let node = node(name);
        let (cluster, count) = (node.cluster(&[]), format!("{count}"));
        let (usual, strict) = (claim(&["--gpus", &count, "--node", name]), claim(&["--gpus", &count, "--strict"]));
        let (mut taken, mut waits) = (0, 0);
        for free in node.availabilities() {
            let outcome = |claim| node.allocated(&cluster, free, claim);
            match (outcome(&strict), outcome(&usual)) {
                (Some(strict), usual) => {
                    assert_eq!(Some(strict), usual, "{name}: {:?}", list(free));
                    taken += 1;
                }
                (None, Some(usual)) => {
                    assert_eq!(usual["devices"]["results"][0]["request"], "gpus/any", "{name}: {:?}", list(free));
                    waits += 1;
                }
                (None, None) => {}
            }
        }
        // If all sets are equally good, a strict claim waits only when the usual one does.
        let is_uniform = ["workstation-a6000", "dgx-h100"].contains(&name);
        assert!(taken > 0 && (waits == 0) == is_uniform, "{name}: {taken} taken, {waits} wait");
    }
}
