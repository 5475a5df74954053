//! The Topology Manager against the kubelet's, case by case. Each row names the function from which it was derived by
//! hand, in kubernetes 1.32 under pkg/kubelet/cm. The rows of `policy.go` also hold in the development branch after
//! 1.36.

use super::*;

/// One case. A resource is `"2 of 0 0* 1"`: the number of requested devices, then each device by its NUMA nodes. `0+1`
/// is on two nodes, `-` on none, and `*` marks a device that is not available.
struct Row {
    source: &'static str,
    policy: Policy,
    nodes: &'static [i64],
    resources: &'static [&'static str],
    /// The mask (`any` if there is none), `preferred` or nothing, `admitted` or `refused`.
    settled: &'static str,
}

const fn row(
    source: &'static str,
    policy: Policy,
    nodes: &'static [i64],
    resources: &'static [&'static str],
    settled: &'static str,
) -> Row {
    Row { source, policy, nodes, resources, settled }
}

const DEVICES: &str = "devicemanager/topology_hints.go generateDeviceTopologyHints";
const NO_TOPOLOGY: &str = "devicemanager/topology_hints.go deviceHasTopologyAlignment";
const PERMUTATION: &str = "topologymanager/policy.go mergePermutation";
const COMPARE: &str = "topologymanager/policy.go HintMerger.compare";
const MERGE: &str = "topologymanager/policy.go HintMerger.Merge";
const FILTER: &str = "topologymanager/policy.go filterProvidersHints";
const NARROWEST: &str = "topologymanager/bitmask/bitmask.go IsNarrowerThan";
const SINGLE: &str = "topologymanager/policy_single_numa_node.go Merge";
const SINGLE_FILTER: &str = "topologymanager/policy_single_numa_node.go filterSingleNumaHints";
const RESTRICTED: &str = "topologymanager/policy_restricted.go canAdmitPodResult";
const BEST_EFFORT: &str = "topologymanager/policy_best_effort.go Merge";

use Policy::{BestEffort as B, Restricted as R, SingleNumaNode as S};

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // The hints of the devices.
    row(DEVICES, B, &[0, 1], &["1 of 0 0 1 1"], "{0} preferred admitted"),
    row(DEVICES, B, &[0, 1], &["2 of 0* 0 1 1"], "{1} preferred admitted"),
    // The fewest nodes for a request are counted with all devices, even used and unhealthy ones ...
    row(DEVICES, B, &[0, 1], &["2 of 0* 0 1* 1"], "{0,1} admitted"),
    row(RESTRICTED, R, &[0, 1], &["2 of 0* 0 1* 1"], "{0,1} refused"),
    // ... so a request that never fits one node is preferred on two.
    row(RESTRICTED, R, &[0, 1], &["3 of 0 0 1 1"], "{0,1} preferred admitted"),
    row(DEVICES, B, &[0, 1, 2], &["2 of 0 1 2"], "{0,1} preferred admitted"),
    row(DEVICES, B, &[0, 1, 2], &["2 of 0* 1 2"], "{1,2} preferred admitted"),
    // A device of several nodes counts for a mask with one of them.
    row(DEVICES, S, &[0, 1, 2, 3], &["4 of 0+1 0+1 0+1 0+1 2+3 2+3"], "{0} preferred admitted"),
    // If another device has nodes, a device without nodes counts for no mask.
    row(DEVICES, R, &[0, 1], &["2 of 0 - -"], "{0,1} refused"),
    row(DEVICES, B, &[0, 1], &["2 of 0 - -"], "{0,1} admitted"),
    // If no device has nodes, the resource has no preference.
    row(NO_TOPOLOGY, R, &[0, 1], &["2 of - -"], "{0,1} preferred admitted"),
    row(NO_TOPOLOGY, S, &[0, 1], &["2 of - -"], "any preferred admitted"),
    // The numbers of nodes need not begin at 0, and may have gaps.
    row(DEVICES, S, &[0, 8], &["2 of 0* 0 8 8"], "{8} preferred admitted"),
    // A request for zero devices accepts any one node.
    row(DEVICES, S, &[0, 1], &["0 of 0 1"], "{0} preferred admitted"),

    // Too few devices: no mask can satisfy the request.
    row(FILTER, B, &[0, 1], &["3 of 0 1"], "{0,1} admitted"),
    row(FILTER, R, &[0, 1], &["3 of 0 1"], "{0,1} refused"),
    row(FILTER, S, &[0, 1], &["3 of 0 1"], "any refused"),
    // Such a request does not change the mask of another resource.
    row(FILTER, B, &[0, 1], &["3 of 0 1", "1 of 0* 1"], "{1} admitted"),
    // There is no request.
    row(FILTER, R, &[0, 1], &[], "{0,1} preferred admitted"),
    row(FILTER, S, &[0, 1], &[], "any preferred admitted"),

    // The result is the common nodes. It is preferred if both resources prefer the same nodes.
    row(PERMUTATION, B, &[0, 1], &["2 of 0 0 1 1", "2 of 0* 0 1 1"], "{1} preferred admitted"),
    row(PERMUTATION, R, &[0, 1], &["2 of 0 0 1* 1", "2 of 0* 0 1 1"], "{0} refused"),
    row(PERMUTATION, R, &[0, 1], &["3 of 0 0 1 1", "3 of 0 0 1 1"], "{0,1} preferred admitted"),
    row(PERMUTATION, R, &[0, 1], &["1 of 0 1", "3 of 0 0 1 1"], "{0,1} refused"),
    row(PERMUTATION, B, &[0, 1], &["1 of 0 1", "3 of 0 0 1 1"], "{0,1} admitted"),
    row(PERMUTATION, R, &[0, 1], &["2 of - -", "1 of 0* 1"], "{1} preferred admitted"),

    // Preferred masks come before narrow ones, narrow before wide, low before high.
    row(COMPARE, B, &[0, 1, 2], &["1 of 0 1 2", "1 of 0* 1* 2"], "{2} preferred admitted"),
    row(NARROWEST, B, &[0, 1, 2, 3], &["2 of 0* 0* 1 2 2 3 3"], "{2} preferred admitted"),
    row(NARROWEST, B, &[0, 1, 2, 3], &["3 of 0 0 1 1 2 2 3 3"], "{0,1} preferred admitted"),
    row(NARROWEST, B, &[0, 1, 2, 3], &["3 of 0* 0* 1* 1 2 2 3* 3"], "{1,2} preferred admitted"),
    // If no mask is preferred, the result has as many nodes as the resource that needs the most alone. It has the
    // lowest such nodes, even if another resource has no free device on them ...
    row(COMPARE, B, &[0, 1, 2, 3], &["2 of 0 0* 1 1* 2 2* 3 3*", "1 of 0* 1* 2* 3"], "{0,1} admitted"),
    row(COMPARE, B, &[0, 1, 2, 3], &["2 of 0 0* 1 1* 2 2* 3 3*", "1 of 0 1 2 3"], "{0,1} admitted"),
    // ... and not more.
    row(COMPARE, B, &[0, 1, 2, 3], &["2 of 0* 0* 1* 1 2 2* 3 3*"], "{1,2} admitted"),
    // Single-numa-node has no combination with a common node, best-effort has one.
    row(MERGE, S, &[0, 1], &["1 of 0 1*", "1 of 0* 1"], "any refused"),
    row(MERGE, B, &[0, 1], &["1 of 0 1*", "1 of 0* 1"], "{0} admitted"),

    // Policy single-numa-node admits on one node or not at all.
    row(SINGLE_FILTER, S, &[0, 1], &["3 of 0 0 1 1"], "any refused"),
    row(SINGLE_FILTER, S, &[0, 1], &["2 of 0 0* 1 1*"], "any refused"),
    row(SINGLE_FILTER, S, &[0, 1], &["2 of 0 0 1 1", "1 of 0* 1"], "{1} preferred admitted"),
    // On a machine with one node, a mask of that node constrains nothing.
    row(SINGLE, S, &[0], &["2 of 0 0 0"], "any preferred admitted"),
    row(BEST_EFFORT, B, &[0], &["2 of 0 0 0"], "{0} preferred admitted"),
];

fn manager(policy: Policy, nodes: &[i64]) -> TopologyManager {
    TopologyManager { policy, numa_nodes: nodes.to_vec(), ..TopologyManager::default() }
}

fn hints(manager: &TopologyManager, text: &str) -> ResourceHints {
    let (requested, words) = text.split_once(" of ").unwrap();
    let mut devices = DeviceMasks::default();
    for word in words.split_whitespace() {
        let nodes = word.trim_end_matches('*');
        let mask = NumaMask::new(nodes.split('+').filter(|node| *node != "-").map(|node| node.parse().unwrap()));
        devices.all.push(mask);
        if !word.ends_with('*') {
            devices.available.push(mask);
        }
    }
    let requested = requested.parse().unwrap();
    let hints = device_hints(manager, "r", requested, &devices);
    // A provider with too few devices fails before it checks masks (GetTopologyHints).
    let too_few = devices.available.len() < requested;
    ResourceHints { hints: hints.hints.map(|hints| if too_few { Vec::new() } else { hints }), ..hints }
}

fn settled(manager: &TopologyManager, resources: &[ResourceHints]) -> String {
    let settled = settle(manager, resources);
    let mask = settled.hint.mask.map_or("any".to_owned(), |mask| mask.to_string());
    let preferred = if settled.hint.preferred { " preferred" } else { "" };
    format!("{mask}{preferred} {}", if settled.admitted { "admitted" } else { "refused" })
}

#[test]
fn policies_settle_as_in_a_kubelet() {
    for row in ROWS {
        let manager = manager(row.policy, row.nodes);
        let mut resources: Vec<_> = row.resources.iter().map(|text| hints(&manager, text)).collect();
        let result = settled(&manager, &resources);
        assert_eq!(result, row.settled, "{} {:?} ({})", row.policy, row.resources, row.source);
        resources.reverse();
        assert_eq!(settled(&manager, &resources), row.settled, "in reverse order: {:?}", row.resources);
    }
}

#[test]
fn policy_is_refused_on_unsupported_machines() {
    let nine: Vec<i64> = (0..9).collect();
    let refusal = |policy, nodes: &[i64]| manager(policy, nodes).check().unwrap_err().to_string();
    for policy in [B, R, S] {
        assert!(manager(policy, &nine[..8]).check().is_ok());
        assert!(refusal(policy, &nine).ends_with("more than 8 NUMA nodes; this one has 9"));
        assert!(refusal(policy, &[0, 8, 252]).contains("NUMA node 252"));
    }
    assert!(manager(Policy::None, &[0, 8, 252, 253, 254, 255, 256, 257, 258]).check().is_ok());
}

#[test]
fn refusal_names_the_obstacle() {
    let refusal = |policy, texts: &[&str]| {
        let manager = manager(policy, &[0, 1]);
        let resources: Vec<_> = texts.iter().map(|text| hints(&manager, text)).collect();
        let (pod, container) = ("p".to_owned(), Some("main".to_owned()));
        Refusal { pod, container, policy, resources }.to_string()
    };
    let head = "pod p, container main: TopologyAffinityError under policy";
    assert_eq!(
        refusal(R, &["2 of 0 0* 1 1*"]),
        format!("{head} restricted; 2 r would fit 1 NUMA node, but what is free needs {{0,1}}")
    );
    assert_eq!(
        refusal(S, &["3 of 0 0 1 1"]),
        format!("{head} single-numa-node; 3 r need 2 NUMA nodes, such as {{0,1}}")
    );
    assert_eq!(refusal(R, &["3 of 0 1"]), format!("{head} restricted; 3 r: on no set of NUMA nodes are so many free"));
    assert_eq!(
        refusal(R, &["1 of 0 1*", "1 of 0* 1"]),
        format!("{head} restricted; no set of NUMA nodes suits all: 1 r on {{0}}, 1 r on {{1}}")
    );
}
