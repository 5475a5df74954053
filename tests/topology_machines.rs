//! A machine whose GPUs have NUMA nodes of their own, without CPUs.

use linkwise_core::topology::{NodeObservation, NodeTopology, NumaNodeId, PackageId};
use linkwise_host::machines;

/// The memory of a GPU may be a NUMA node without CPUs. Then the GPU is beside the node of its package that has CPUs.
#[test]
fn gpu_on_memory_only_node_uses_its_package_cpus() {
    let mut node = machines::load("gb200-nvl72-node").unwrap().observed;
    let own = |node: &mut NodeObservation, gpu: usize, numa| {
        node.host.host_bridges[gpu].devices[0].numa = Some(NumaNodeId(numa));
        node.gpus[gpu].numa = Some(NumaNodeId(numa));
    };
    let seen = |node: &NodeObservation| {
        let (topology, warnings) = NodeTopology::assemble(node);
        assert!(warnings.is_empty(), "{warnings:?}");
        let beside: Vec<_> = topology.gpus().iter().map(|gpu| gpu.cpu_node.map(|numa| numa.0)).collect();
        (beside, [topology.rank(0, 1).number(), topology.rank(0, 2).number()])
    };
    let plain = (vec![Some(0), Some(0), Some(1), Some(1)], [3, 5]);
    assert_eq!(seen(&node), plain);
    for gpu in 0..4 {
        own(&mut node, gpu, [2, 10, 18, 26][gpu]);
    }
    assert_eq!(seen(&node), plain, "the host bridge's package was not used");
    node.gpus[1].numa = Some(NumaNodeId(0));
    assert_eq!(seen(&node), plain, "the GPU's memory and the CPUs beside it were taken as a contradiction");
    own(&mut node, 1, 10);
    let (topology, _) = NodeTopology::assemble(&node);
    assert_eq!(topology.gpus()[1].numa, Some(NumaNodeId(10)), "the kernel's value was not kept");

    // If the package has two nodes with CPUs, it is unknown which one is beside the GPU.
    node.host.numa_nodes[5].cpus = "200".to_owned();
    node.host.numa_nodes[5].package = Some(PackageId(0));
    assert_eq!(seen(&node), (vec![None, None, Some(1), Some(1)], [4, 5]));
    // A GPU on a node that the host does not list is beside no node.
    own(&mut node, 3, 99);
    assert_eq!(seen(&node).0, [None, None, Some(1), None]);
}
