//! Predicts the work of a kubelet's Topology Manager with this node's GPUs, and recommends --numa-hints.

use std::collections::BTreeMap;

use super::finding::Findings;
use super::kubelet_policy::Policy;
use linkwise_core::quote::excerpt;
use linkwise_core::state::NumaHints;
use linkwise_core::topology::{NodeObservation, NodeTopology, NumaNodeId};
use linkwise_core::words::count;

/// The most NUMA nodes with which a kubelet starts under a policy other than none (pkg/kubelet/cm/topologymanager,
/// maxAllowableNUMANodes).
const MOST_NODES: usize = 8;

/// The numbers of GPUs that pods usually request, beside one.
const USUAL: [usize; 3] = [2, 4, 8];

/// Checks NUMA nodes, packages, and the places of GPUs.
pub(super) fn check(
    found: &mut Findings,
    observed: &NodeObservation,
    topology: &NodeTopology,
    (hints, policy): (NumaHints, Option<&Policy>),
) {
    found.check = "topology manager";
    let gpus = topology.gpus();
    if gpus.is_empty() {
        return found.skipped("no GPU is known: nothing to align", None);
    }
    let nodes = observed.host.numa_nodes.len();
    let without = observed.host.numa_nodes.iter().filter(|node| node.cpus.is_empty()).count();
    if nodes > MOST_NODES {
        found.warning(
            format!(
                "{nodes} NUMA nodes, {without} of them without CPUs: more than the {MOST_NODES} that a kubelet aligns"
            ),
            "run the kubelet with --topology-manager-policy=none: under another policy it does not start",
        );
    } else {
        found.ok(format!("{} of which {without} without CPUs", count(nodes, "NUMA node")));
    }
    if let Some(policy) = policy {
        check_policy(found, policy, topology, hints);
    }
    let unknown = gpus.iter().filter(|gpu| gpu.numa.is_none()).count();
    if unknown == gpus.len() {
        found.ok("no GPU has a NUMA node (-1): the Topology Manager leaves GPUs to linkwise");
    } else if unknown > 0 && hints != NumaHints::Off {
        found.warning(
            format!("{unknown} of {} have no NUMA node (-1)", count(gpus.len(), "GPU")),
            "a Topology Manager never calls these aligned, and uses them last: set --numa-hints=off",
        );
    }
    // NVML may report a node that this host does not list: a container or a virtual machine may see only a part of
    // them.
    let listed = |id| observed.host.numa_nodes.iter().any(|node| node.id == id);
    let unlisted: Vec<_> = gpus.iter().filter_map(|gpu| gpu.numa).filter(|id| !listed(*id)).collect();
    let silent =
        gpus.iter().filter(|gpu| gpu.numa.is_some_and(listed) && hints.nodes(topology, gpu).is_empty()).count();
    if let Some(node) = unlisted.first()
        && hints != NumaHints::Off
    {
        let (some, all) = (unlisted.len(), count(gpus.len(), "GPU"));
        found.warning(
            format!("{some} of {all} are on NUMA nodes that this host does not list (such as {node}), and claim none"),
            "this container or virtual machine sees fewer NUMA nodes than NVML: mount the host's /sys, or set --numa-hints=off",
        );
    }
    if silent > 0 && hints != NumaHints::Off {
        found.warning(
            format!("{silent} of {} are on NUMA nodes without CPUs, and claim none", count(gpus.len(), "GPU")),
            "set --numa-hints=package, or off",
        );
    }
    if hints == NumaHints::Node && several_to_a_package(topology) {
        found.warning(
            "packages have several NUMA nodes with CPUs, and GPUs on more than one of them",
            "under a Topology Manager set --numa-hints=package, or pods of several GPUs are spread or refused \
             (docs/topology-manager.md); under policy none nothing is to be done",
        );
    }
}

/// Reports usual requests that the kubelet's policy never admits. Only single-numa-node refuses for ever: restricted
/// takes as few nodes as a request needs on an idle machine, however many these are.
fn check_policy(found: &mut Findings, Policy { name, source }: &Policy, topology: &NodeTopology, hints: NumaHints) {
    found.ok(format!("the kubelet's policy is {} ({source})", excerpt(name)));
    let mut on_node: BTreeMap<NumaNodeId, usize> = BTreeMap::new();
    for node in topology.gpus().iter().flat_map(|gpu| hints.nodes(topology, gpu)) {
        *on_node.entry(node).or_default() += 1;
    }
    // If no GPU names a node, the Topology Manager does not constrain GPUs.
    let Some(most) = on_node.into_values().max().filter(|_| name == "single-numa-node") else { return };
    let refused = USUAL.into_iter().filter(|size| (most + 1..=topology.gpus().len()).contains(size));
    let refused: Vec<String> = refused.map(|size| size.to_string()).collect();
    if !refused.is_empty() {
        let (sizes, most) = (refused.join(" or "), count(most, "GPU"));
        found.warning(
            format!("a pod of {sizes} GPUs can never be admitted here: under {name} it needs one NUMA node, and none has more than {most}"),
            "run the kubelet with --topology-manager-policy=restricted or best-effort, or set --numa-hints=off \
             (docs/topology-manager.md); else keep such pods off this node",
        );
    }
}

/// Returns true if GPUs of one package are on more than one of its nodes.
fn several_to_a_package(topology: &NodeTopology) -> bool {
    let places: Vec<_> = topology.gpus().iter().filter_map(|gpu| Some((gpu.package?, gpu.cpu_node?))).collect();
    places.iter().any(|(package, node)| places.iter().any(|(other, beside)| package == other && node != beside))
}
