//! Sets as devices: what plain pods with `linkwise.dev/gpu-x4: 1` get, and claims with tiers.

use linkwise::machines;
use linkwise_scheduler_box::Cluster;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::oracle::{Oracle, Set, subsets};
use crate::published::{Node, accepted, gpus, list, node, node_with};

/// Built-in machines with sets, of so many GPUs at most.
fn nodes(most: u32) -> impl Iterator<Item = Node> {
    let nodes = machines::built_in().map(|machine| node_with(machine.name, &["--dra-sets", "on"]));
    nodes.filter(move |node| node.gpus() <= most)
}

/// The claim that the scheduler makes for a pod with this resource.
fn extended(cluster: &Cluster, size: u32) -> Value {
    let resource = format!("linkwise.dev/gpu-x{size}");
    cluster.extended_claim("default", "pod", &[vec![(resource.as_str(), 1)]]).expect("a class has this resource")
}

/// As docs/dra.md has it: the best tier that some node can give.
fn tiered(size: u32) -> Value {
    let class = format!("gpu-x{size}.linkwise.dev");
    let mut asks: Vec<Value> = (1..4)
        .map(|tier| {
            let expression = format!("device.attributes['linkwise.dev'].tier == {tier}");
            let selectors = json!([{"cel": {"expression": expression}}]);
            json!({"name": format!("tier{tier}"), "deviceClassName": class, "count": 1, "selectors": selectors})
        })
        .collect();
    asks.push(json!({"name": "any", "deviceClassName": class, "count": 1}));
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [{"name": "gpus", "firstAvailable": asks}]}},
    });
    accepted(&claim, Some("default"))
}

#[test]
fn set_is_always_the_best_that_is_free() {
    let mut states = 0;
    for node in nodes(8) {
        let (oracle, cluster) = (Oracle::new(&node.topology), node.cluster(&[]));
        for size in [2, 4, 8].into_iter().filter(|size| *size <= node.gpus()) {
            let mut claims = vec![extended(&cluster, size)];
            // One mesh of many tiers stands for the others: each tier is an attempt of its own.
            claims.extend((node.name == "dgx1-v100").then(|| tiered(size)));
            for free in node.availabilities() {
                let collective = |set: Set| oracle.collective(set);
                let best = subsets(free).filter(|set| set.count_ones() == size).map(collective).max();
                for claim in &claims {
                    let chosen = node.chosen(&cluster, free, claim);
                    assert!(chosen.is_none_or(|chosen| chosen & !free == 0 && chosen.count_ones() == size));
                    assert_eq!(chosen.map(collective), best, "{}: {size} of {:?}", node.name, list(free));
                    states += 1;
                }
            }
        }
    }
    assert!(states > 5_000, "{states}");
}

#[test]
fn whole_machine_of_sixteen_is_given_out_in_sets() {
    for node in nodes(64).filter(|node| node.gpus() > 8) {
        for size in [2, 4, 8] {
            let mut cluster = node.cluster(&[]);
            let claim = extended(&cluster, size);
            for number in 0..node.gpus() / size {
                let placement = cluster.allocate(node.name, std::slice::from_ref(&claim));
                let placement = placement.unwrap_or_else(|why| panic!("{}: {number} of {size}: {why}", node.name));
                cluster.occupy(&placement.allocations[0]).unwrap();
            }
        }
    }
}

/// A claim with tiers compares nodes: each gives its best, and the scheduler takes the better one.
#[test]
fn tiers_find_the_better_node() {
    let names = ["dgx1-v100", "dgx-h100"];
    let nodes = names.map(|name| node_with(name, &["--dra-sets", "on"]));
    let slices: Vec<Value> = nodes.iter().flat_map(|node| node.slices.clone()).collect();
    let mut cluster = Cluster::new(&slices, &crate::published::classes(), &[]).unwrap();
    // On the first only pairs across are free; the second is idle.
    for gpu in ["gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-5", "gpu-6"] {
        let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "dgx1-v100/gpu", "device": gpu});
        cluster.occupy(&json!({"devices": {"results": [result]}})).unwrap();
    }
    let [worse, better] = names.map(|name| cluster.allocate(name, &[tiered(2)]).unwrap().score);
    assert!(worse < better, "{worse} {better}");
}

#[test]
fn claims_for_gpus_see_no_set() {
    for name in ["dgx1-v100", "pcie-8x-pix-pairs"] {
        let (plain, sets) = (node(name), node_with(name, &["--dra-sets", "on"]));
        for count in [1, 2, 4] {
            let claim = gpus(count, None);
            let of = |node: &Node| {
                let cluster = node.cluster(&[]);
                node.availabilities().into_iter().map(|free| node.chosen(&cluster, free, &claim)).collect::<Vec<_>>()
            };
            assert_eq!(of(&plain), of(&sets), "{name}: {count}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_gpu_is_in_two_claims_of_sets_and_gpus(
        machine in prop::sample::select(vec!["dgx1-v100", "pcie-8x-pix-pairs", "power9-v100"]),
        steps in prop::collection::vec((0..6_usize, any::<prop::sample::Index>(), any::<bool>()), 1..20),
    ) {
        let node = node_with(machine, &["--dra-sets", "on"]);
        let mut cluster = node.cluster(&[]);
        let [two, four, eight] = [2, 4, 8].map(|size| extended(&cluster, size));
        let asks = [gpus(1, None), gpus(2, None), two, four, tiered(4), eight];
        let mut held: Vec<Value> = Vec::new();
        for (ask, which, ends) in steps {
            if ends && !held.is_empty() {
                let ended = held.swap_remove(which.index(held.len()));
                cluster.release(&ended).unwrap();
            }
            if let Ok(placement) = cluster.allocate(node.name, &[asks[ask].clone()]) {
                cluster.occupy(&placement.allocations[0]).unwrap();
                held.extend(placement.allocations);
            }
            held.iter().map(|allocation| node.set_of(allocation)).fold(0, |all, set| {
                assert_eq!(all & set, 0, "{machine}: a GPU in two claims");
                all | set
            });
        }
    }
}
