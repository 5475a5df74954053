//! The printed text about a pod: its GPUs, their links and places, and the reasons for the choice.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::allocation::AllocationReport;
use linkwise_core::state::Health;
use linkwise_core::topology::{Gpu, NodeTopology, NumaNodeId};
use linkwise_kubelet_box::TopologyHint;

/// The text about an admitted pod.
pub(super) fn pod(
    name: &str,
    size: u32,
    topology: &NodeTopology,
    gpus: &[(usize, &Gpu)],
    (manager, report): (Option<String>, Option<&AllocationReport>),
) -> String {
    let indices = gpus.iter().map(|(_, gpu)| gpu.index.to_string()).collect::<Vec<_>>().join(",");
    let mut text = format!("● {name} wants {size}: gets GPU {indices}, {}", where_they_are(topology, gpus));
    if let Some(manager) = manager {
        text += &format!("\n  NUMA: {manager}");
    }
    match report {
        // Each part of the report has a line of its own, because lines have at most 100 columns.
        Some(report) => text + &format!("\n  why: {}\n", report.to_string().replace("; ", "\n       ")),
        None => text + "\n  why: the kubelet did not ask, because there was no choice\n",
    }
}

/// The Topology Manager's decision, and what the plugin sees of it: `offered` has the numbers of GPUs that
/// GetPreferredAllocation had as available and as required; `None` if the kubelet did not call it.
pub(super) fn hint(hint: &TopologyHint, offered: Option<(usize, usize)>) -> String {
    let settled = match (hint.mask, hint.preferred) {
        (None, _) => "the Topology Manager leaves it open".to_owned(),
        (Some(nodes), true) => format!("the Topology Manager wants {nodes}"),
        (Some(nodes), false) => format!("the Topology Manager takes {nodes} for want of better"),
    };
    match offered {
        None => format!("{settled}; no more GPUs than the pod wants"),
        Some((offered, 0)) => format!("{settled}; {offered} to choose from"),
        Some((offered, required)) => format!("{settled}; {offered} to choose from, {required} of them required"),
    }
}

/// Cuts lines to 100 columns.
pub(super) fn cut(text: &str) -> String {
    let cut = |line: &str| match line.char_indices().nth(99) {
        Some((end, _)) if line.chars().count() > 100 => line.get(..end).unwrap_or(line).to_owned() + "…",
        _ => line.to_owned(),
    };
    text.lines().map(cut).collect::<Vec<_>>().join("\n") + "\n"
}

/// The GPUs with their holders: lines of at most four GPUs, grouped by NUMA node.
pub(super) fn holders(topology: &NodeTopology, note: impl Fn(&Gpu) -> String) -> String {
    let mut nodes: BTreeMap<Option<NumaNodeId>, Vec<String>> = BTreeMap::new();
    for gpu in topology.gpus() {
        nodes.entry(gpu.numa).or_default().push(format!("{:<20}", format!("GPU {} {}", gpu.index, note(gpu))));
    }
    let mut text = String::new();
    for (numa, gpus) in nodes {
        let mut label = numa.map_or("NUMA node unknown".to_owned(), |numa| format!("NUMA node {numa}"));
        for four in gpus.chunks(4) {
            text += &format!("  {label:<18}{}\n", four.join("").trim_end());
            label.clear();
        }
    }
    text
}

/// The note of a GPU in [`holders`]: the reason why it is unhealthy, the pod that holds it, or `free`.
pub(super) fn holder(health: Option<&Health>, pod: Option<&String>) -> String {
    match (health, pod) {
        (Some(Health::Unhealthy { reason, .. }), _) => format!("✗ {reason}"),
        (_, Some(pod)) => format!("● {pod}"),
        _ => "○ free".to_owned(),
    }
}

/// The NUMA nodes of GPUs and the links between them.
pub(super) fn where_they_are(topology: &NodeTopology, gpus: &[(usize, &Gpu)]) -> String {
    let nodes: BTreeSet<String> =
        gpus.iter().map(|(_, gpu)| gpu.numa.map_or("unknown".to_owned(), |numa| numa.to_string())).collect();
    let mut text = format!("NUMA node {}", nodes.into_iter().collect::<Vec<_>>().join(","));
    let links = links(topology, gpus);
    if !links.is_empty() {
        text += &format!(", links {links}");
    }
    text
}

/// The links between all pairs of GPUs: `NV2`, or `2x NV2, 4x SYS`.
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
