//! What the built-in machines show that simpler ones do not: NUMA nodes without CPUs, bus ids that repeat
//! across PCI domains, links of different width, NICs in another order than GPUs.

use linkwise_core::topology::{
    NodeObservation, NodeTopology, NumaNodeId, NvLinkRemote, PackageId, PciAddress, PcieLink,
};
use linkwise_host::machines;

/// GPUs whose memory is a NUMA node of its own, without CPUs: they are beside the node of their package.
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
    assert_eq!(seen(&node), plain, "the package is the host bridge's");
    node.gpus[1].numa = Some(NumaNodeId(0));
    assert_eq!(seen(&node), plain, "the GPU's memory and the CPUs beside it are no contradiction");
    own(&mut node, 1, 10);
    let (topology, _) = NodeTopology::assemble(&node);
    assert_eq!(topology.gpus()[1].numa, Some(NumaNodeId(10)), "the kernel's value is kept");

    // Two nodes with CPUs in the package: which of them is beside the GPU is unknown.
    node.host.numa_nodes[5].cpus = "200".to_owned();
    node.host.numa_nodes[5].package = Some(PackageId(0));
    assert_eq!(seen(&node), (vec![None, None, Some(1), Some(1)], [4, 5]));
    // A node of which nothing was seen is no node without CPUs.
    own(&mut node, 3, 99);
    assert_eq!(seen(&node).0, [None, None, Some(1), None]);
}

/// A bus id that repeats in other PCI domains is another place, for trees and NVLinks alike.
#[test]
fn bus_ids_repeat_across_domains() {
    let (topology, _) = NodeTopology::assemble(&machines::load("gb200-nvl72-node").unwrap().observed);
    assert!(topology.gpus().iter().all(|gpu| (gpu.pci.bus(), gpu.pci.device(), gpu.pci.function()) == (1, 0, 0)));
    assert_eq!(topology.gpus().iter().map(|gpu| gpu.pci.domain()).collect::<Vec<_>>(), [8, 9, 0x18, 0x19]);

    let mut node = machines::load("power9-v100").unwrap().observed;
    let (before, _) = NodeTopology::assemble(&node);
    // Give the second socket's GPUs the bus ids of the first's.
    let twins = ["0035:04:00.0", "0035:05:00.0"].map(|pci| pci.parse::<PciAddress>().unwrap());
    let old = [node.gpus[2].pci, node.gpus[3].pci];
    for (at, pci) in [(2, twins[0]), (3, twins[1])] {
        node.gpus[at].pci = pci;
        let other = NvLinkRemote::Gpu(twins[3 - at]);
        node.gpus[at].nvlinks.as_mut().unwrap()[0].remote = other;
    }
    let bridge = node.host.host_bridges.last_mut().unwrap();
    for (port, pci) in bridge.devices[0].devices[0].devices.iter_mut().zip(twins) {
        assert!(old.contains(&port.devices[0].pci.unwrap()));
        port.devices[0].pci = Some(pci);
    }
    let (after, warnings) = NodeTopology::assemble(&node);
    assert!(warnings.is_empty());
    for (a, b) in [(0, 1), (0, 2), (1, 3), (2, 3)] {
        assert_eq!(after.symbol(a, b), before.symbol(a, b));
        assert_eq!((after.rank(a, b), after.pcie(a, b)), (before.rank(a, b), before.pcie(a, b)));
    }
}

/// PCIe links of different width: the narrowest lane on the way counts, at either end of a link.
#[test]
fn narrowest_hop_sets_pcie_bandwidth() {
    let (topology, _) = NodeTopology::assemble(&machines::load("power9-v100").unwrap().observed);
    // V100 that can do Gen3 x16, at switch ports of two lanes; then an uplink of four, and NVLink beside it.
    assert_eq!((topology.pcie(0, 1), topology.pcie(0, 2)), (1_500, 1_500));
    assert_eq!((topology.nvlink(0, 1), topology.nvlink(0, 2)), (60_000, 0));
    // What a virtual switch claims, 2.5 GT/s x1, is not what it can do.
    let mut node = machines::load("azure-ndv4-a100").unwrap().observed;
    let (before, _) = NodeTopology::assemble(&node);
    for bridge in &mut node.host.host_bridges {
        bridge.devices[0].link = Some(PcieLink { mts: 2_500, width: 1 });
    }
    let (after, _) = NodeTopology::assemble(&node);
    assert_eq!((before.pcie(0, 1), after.pcie(0, 1)), (24_000, 24_000), "below one switch");
    assert_eq!((before.pcie(0, 2), after.pcie(0, 2)), (24_000, 12_000), "unknown, not 187");
}

/// The NICs nearest to a GPU are found by their place, whatever their order and that of the GPUs.
#[test]
fn nic_order_is_independent_of_gpu_order() {
    let nearest = |machine: &str| {
        let (topology, _) = NodeTopology::assemble(&machines::load(machine).unwrap().observed);
        let names = |gpu| topology.nearest_nics(gpu).into_iter().map(|nic| topology.nics()[nic].names[0].clone());
        (0..topology.gpus().len()).map(|gpu| names(gpu).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let h100 = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];
    assert_eq!(nearest("dgx-h100"), h100);
    let ndv4 = ["mlx5_ib0 mlx5_ib1", "mlx5_ib2 mlx5_ib3", "mlx5_ib4 mlx5_ib5", "mlx5_ib6 mlx5_ib7"];
    assert_eq!(nearest("azure-ndv4-a100"), ndv4.iter().flat_map(|nics| [*nics; 2]).collect::<Vec<_>>());
    assert_eq!(nearest("nvlink-bridge-pairs"), ["", "", "", "", "", "", "mlx5_0 mlx5_1", ""]);
}
