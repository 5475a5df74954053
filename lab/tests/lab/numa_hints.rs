//! The NUMA nodes that linkwise's devices report, their effect on a kubelet's Topology Manager, and the metric of
//! narrowed requests.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::sync::Arc;

use linkwise_core::allocation::AllocationReport;
use linkwise_core::state::{Event, NumaHints};
use linkwise_core::topology::{NodeObservation, NumaNodeId, NumaNodeObservation, PackageId};
use linkwise_host::machines;
use linkwise_kubelet::device_plugin::Settings;
use linkwise_kubelet_box::{BoxError, KubeletBox, Options, Pod, Policy, Scope, TopologyManager};
use linkwise_lab::demo::numa_nodes;
use linkwise_node::metrics::Metrics;
use linkwise_node::node::{Node, NodeSettings};
use tokio::sync::watch;

const GPU: &str = "nvidia.com/gpu";

/// A DGX H100 in NPS4: four NUMA nodes in each package, and two GPUs on every second node.
fn nps4() -> NodeObservation {
    let mut seen = machines::load("dgx-h100").unwrap().observed;
    let node = |id| NumaNodeObservation {
        id: NumaNodeId(id),
        package: Some(PackageId(id / 4)),
        cpus: format!("{}-{}", 8 * id, 8 * id + 7),
    };
    seen.host.numa_nodes = (0..8).map(node).collect();
    // Without a PCI tree NVML's NUMA nodes count: GPUs 0 to 7 are on nodes 0, 0, 2, 2, 4, 4, 6, 6.
    seen.host.host_bridges.clear();
    for gpu in &mut seen.gpus {
        gpu.numa = Some(NumaNodeId(gpu.index / 2 * 2));
    }
    seen
}

/// The report of a node's latest choice.
pub type Report = watch::Receiver<Option<Arc<AllocationReport>>>;

/// Plays `script` on a node with this machine, policy and hints. Fails if a kubelet would not start with them.
pub async fn play_on<T>(
    seen: NodeObservation,
    policy: Policy,
    numa_hints: NumaHints,
    script: impl AsyncFnOnce(&KubeletBox, &Metrics, &Report) -> T,
) -> Result<T, BoxError> {
    let folder = tempfile::tempdir().unwrap();
    let mut options = Options::new(folder.path());
    let numa_nodes = numa_nodes(&seen.host);
    options.topology_manager = TopologyManager { policy, scope: Scope::Container, numa_nodes };
    let kubelet = KubeletBox::start(options)?;
    let settings = Settings::new(folder.path().join(Options::SOCKET));
    let node = Node::start(NodeSettings { numa_hints, ..NodeSettings::new(settings) }).await.unwrap();
    let (events, shutdown) = (node.events(), node.shutdown());
    let (metrics, report) = (node.metrics().clone(), node.last_report());
    let play = async {
        let gpus = seen.gpus.len();
        events.send(Event::Observed(Box::new(seen))).await.unwrap();
        kubelet.wait(|state| state.resources[GPU].healthy.len() == gpus).await.unwrap();
        let outcome = script(&kubelet, &metrics, &report).await;
        shutdown.cancel();
        outcome
    };
    let (served, outcome) = tokio::join!(node.serve(), play);
    served.unwrap();
    kubelet.stop().await.unwrap();
    Ok(outcome)
}

fn narrowed_requests(metrics: &Metrics) -> u64 {
    let text = metrics.encode().unwrap();
    let line = text.lines().find(|line| line.starts_with("linkwise_narrowed_requests_total{")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn numa_hints_decide_what_single_numa_node_admits() {
    let cases = [
        (NumaHints::Node, vec![vec![0], vec![2], vec![4], vec![6]], false),
        (NumaHints::Package, vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]], true),
        (NumaHints::Off, vec![vec![]], true),
    ];
    for (hints, reported, admitted) in cases {
        play_on(nps4(), Policy::SingleNumaNode, hints, async |kubelet, _, _| {
            let numa = kubelet.state().resources[GPU].numa.clone();
            let expected: BTreeSet<BTreeSet<i64>> =
                reported.into_iter().map(|nodes| nodes.into_iter().collect()).collect();
            assert_eq!(numa.into_values().collect::<BTreeSet<_>>(), expected, "{hints:?}");
            let pod = Pod::single("pod", GPU, 4);
            assert_eq!(kubelet.admit(&pod, None).await.is_ok(), admitted, "{hints:?}");
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn request_narrowed_by_topology_manager_is_counted() {
    for (policy, hints, counted) in [
        (Policy::None, NumaHints::Node, 0),
        (Policy::BestEffort, NumaHints::Off, 0),
        (Policy::BestEffort, NumaHints::Node, 1),
    ] {
        let seen = machines::load("dgx-h100").unwrap().observed;
        play_on(seen, policy, hints, async |kubelet, metrics, _| {
            // If hints count, a and b fill one NUMA node, and the kubelet offers the other for c. Once a has ended, it
            // offers the first for d, although linkwise knows of free GPUs on the other.
            for (pod, size) in [("a", 3), ("b", 1), ("c", 2)] {
                kubelet.admit(&Pod::single(pod, GPU, size), None).await.unwrap();
            }
            assert_eq!(narrowed_requests(metrics), 0, "{policy} {hints:?}: the other GPUs may be in use");
            kubelet.remove_pod("a");
            kubelet.admit(&Pod::single("d", GPU, 1), None).await.unwrap();
            assert_eq!(narrowed_requests(metrics), counted, "{policy} {hints:?}");
        })
        .await
        .unwrap();
    }
}
