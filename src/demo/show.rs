//! What is printed of a pod: which GPUs it got, over which links, where, and why these.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocation::AllocationReport;
use crate::topology::{Gpu, NodeTopology};

/// A pod that was admitted.
pub(super) fn pod(
    name: &str,
    size: u32,
    topology: &NodeTopology,
    gpus: &[(usize, &Gpu)],
    report: Option<&AllocationReport>,
) -> String {
    let indices = gpus.iter().map(|(_, gpu)| gpu.index.to_string()).collect::<Vec<_>>().join(",");
    let nodes: BTreeSet<String> =
        gpus.iter().map(|(_, gpu)| gpu.numa.map_or("unknown".to_owned(), |numa| numa.to_string())).collect();
    let nodes = nodes.into_iter().collect::<Vec<_>>().join(",");
    let mut text = format!("● {name} wants {size}: gets GPU {indices}, NUMA node {nodes}");
    let links = links(topology, gpus);
    if !links.is_empty() {
        text += &format!(", links {links}");
    }
    match report {
        Some(report) => text + &format!("\n  why: {report}\n"),
        None => text + "\n  why: the kubelet did not ask, these were all there was\n",
    }
}

/// The links between all pairs: `NV2`, or `2x NV2, 4x SYS`.
fn links(topology: &NodeTopology, gpus: &[(usize, &Gpu)]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (number, (a, _)) in gpus.iter().enumerate() {
        for (b, _) in gpus.iter().skip(number + 1) {
            *counts.entry(topology.symbol(*a, *b)).or_default() += 1;
        }
    }
    match counts.len() {
        1 => counts.into_keys().collect(),
        _ => counts.iter().map(|(symbol, count)| format!("{count}x {symbol}")).collect::<Vec<_>>().join(", "),
    }
}
