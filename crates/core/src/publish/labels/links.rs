//! `linkwise.dev/*` and `nvidia.com/gpu.clique`: the links between a node's GPUs, for schedulers that choose nodes.
//!
//! Our own labels are static facts. Each is on every GPU node or on none, because Kueue, KAI and kube-scheduler skip
//! nodes without the label of a topology level. A node with unknown NVLinks lacks only the labels about them.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{LINKWISE, LabelProblem, LabelSettings, Labels};
use crate::allocation::{GpuSet, neighbours};
use crate::topology::{FabricObservation, NodeTopology, Rank};

/// The most sets that the search for the largest island tries, far more than 16 GPUs can need. After them the search
/// takes the largest island found so far.
const MAX_SETS: u32 = 1 << 16;

pub(super) fn labels(topology: &NodeTopology, settings: &LabelSettings, labels: &mut Labels) {
    let clique = clique(topology, labels);
    if settings.clique {
        labels.put_known("nvidia.com/gpu.clique", clique.clone());
    }
    let Some(own) = &settings.own_fabric else { return labels.problems.push(LabelProblem::NoNodeName) };
    let models: BTreeSet<_> = topology.gpus().iter().map(|gpu| gpu.model.as_deref()).collect();
    let mut put = |name: &str, value: String| labels.put(format!("{LINKWISE}/{name}"), value);
    put("nvlink-fabric", clique.filter(|clique| super::is_value(clique)).unwrap_or_else(|| own.clone()));
    if topology.knows_nvlinks() {
        let (link, size) = island(topology);
        put("gpu.link", link.to_owned());
        put("gpu.island-size", size.to_string());
    }
    put("gpu.per-numa", max_count(topology.gpus().iter().filter_map(|gpu| gpu.cpu_node)).to_string());
    put("gpu.models", models.len().to_string());
    put("gpu.rails", topology.rails().len().to_string());
    put("gpu.per-rail", topology.gpus_per_rail().to_string());
    labels.problems.extend((!topology.knows_nvlinks()).then_some(LabelProblem::NvLinksUnknown));
}

/// The NVLink clique that the GPUs have joined, as `<cluster's UUID>.<clique>`.
fn clique(topology: &NodeTopology, labels: &mut Labels) -> Option<String> {
    let fabrics = topology.gpus().iter().filter_map(|gpu| gpu.facts.fabric.as_ref());
    let cliques: BTreeSet<String> = fabrics.filter_map(FabricObservation::shared).collect();
    if cliques.len() > 1 {
        labels.problems.push(LabelProblem::CliquesDiffer(cliques.into_iter().collect()));
        return None;
    }
    cliques.into_iter().next()
}

/// The best kind of link on the node, and the size of the largest set in which every two GPUs have such a link.
fn island(topology: &NodeTopology) -> (&'static str, usize) {
    let gpus = topology.gpus().len();
    let within = |rank: Rank| largest_linked_set(gpus, |a, b| topology.rank(a, b) <= rank);
    let switched = max_count(topology.gpus().iter().filter_map(|gpu| gpu.nvswitch_plane));
    let meshed = largest_linked_set(gpus, |a, b| topology.nvlink(a, b) > 0);
    match within(Rank::PCIE_SWITCHES) {
        _ if gpus == 1 => ("single", 1),
        _ if switched > 1 && switched == meshed => ("nvswitch", switched),
        _ if meshed == gpus => ("nvlink-mesh", meshed),
        _ if meshed > 1 => ("nvlink-partial", meshed),
        below_switch if below_switch > 1 => ("pcie-switch", below_switch),
        _ => ("pcie-host", within(Rank::HOST_BRIDGE)),
    }
}

/// The size of the largest set of GPUs in which every two are linked.
fn largest_linked_set(gpus: usize, linked: impl Fn(usize, usize) -> bool) -> usize {
    let neighbours = neighbours(gpus, linked);
    let (mut best, mut looked_at) = (0, 0);
    // The size of a set, and the GPUs that are linked with all of it.
    let mut open = vec![(0_usize, (0..gpus).collect::<GpuSet>())];
    while let Some((size, candidates)) = open.pop() {
        looked_at += 1;
        best = best.max(size);
        if size + candidates.len() <= best || looked_at > MAX_SETS {
            continue;
        }
        // The last pushed is tried first: the set with the first candidate comes before the set without it.
        let first = candidates.lowest();
        let of_first = first.places().next().and_then(|place| neighbours.get(place)).copied().unwrap_or_default();
        open.push((size, candidates.without(first)));
        open.push((size + 1, candidates.intersection(of_first)));
    }
    best
}

/// The most times that a value occurs; 0 if there is none.
fn max_count<T: Ord>(values: impl Iterator<Item = T>) -> usize {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_default() += 1;
    }
    counts.into_values().max().unwrap_or(0)
}
