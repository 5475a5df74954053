//! The machine as a nested list: packages, NUMA nodes, host bridges, switches, GPUs, NICs.
//!
//! The one walk over what was observed of the host; the tree and the pictures draw what it returns. Every GPU of the
//! topology is in it exactly once, also where the host's PCI tree does not show it. Judges nothing, draws nothing.

use std::collections::{BTreeMap, BTreeSet};

use crate::topology::{
    HostBridgeObservation, NicKind, NicObservation, NodeObservation, NodeTopology, NumaNodeId, PackageId, PciAddress,
    PciKind, PciObservation,
};

/// How deep a tree is followed; real ones have six levels, a file may have any number.
const DEEPEST: usize = 32;

/// The whole machine.
pub(super) struct Outline<'a> {
    pub packages: Vec<Package<'a>>,
    /// GPUs that the host's PCI tree does not show, as places in [`NodeTopology::gpus`].
    pub unseen: Vec<usize>,
}

/// A package with its NUMA nodes.
pub(super) struct Package<'a> {
    /// `None` where the package of a NUMA node or a host bridge is unknown.
    pub id: Option<PackageId>,
    pub nodes: Vec<Node<'a>>,
}

impl Package<'_> {
    /// The NUMA nodes that have PCI devices, and the numbers of those without.
    pub fn by_devices(&self) -> (Vec<&Node<'_>>, Vec<u32>) {
        let (with, without): (Vec<_>, Vec<_>) = self.nodes.iter().partition(|node| !node.bridges.is_empty());
        (with, without.iter().filter_map(|node| node.id.map(|id| id.0)).collect())
    }
}

/// A NUMA node with the host bridges that are attached to it.
pub(super) struct Node<'a> {
    /// `None` holds the host bridges whose NUMA node is unknown.
    pub id: Option<NumaNodeId>,
    /// Its CPUs as a kernel list; empty for a memory-only node.
    pub cpus: &'a str,
    pub bridges: Bridges<'a>,
}

/// For each host bridge the devices on it.
pub(super) type Bridges<'a> = Vec<Vec<Device<'a>>>;

/// A PCI function and what hangs below.
pub(super) struct Device<'a> {
    pub what: What<'a>,
    pub pci: Option<PciAddress>,
    pub below: Vec<Self>,
}

/// What a function is to a person.
#[derive(Clone, Copy)]
pub(super) enum What<'a> {
    /// A port that several devices hang on; other ports are left out in favour of the device on them.
    Port,
    Switch,
    /// A GPU, by its place in [`NodeTopology::gpus`].
    Gpu(usize),
    /// A GPU that the host shows and NVML does not.
    UnlistedGpu,
    Nic(&'a [NicObservation]),
    /// Something below [`DEEPEST`].
    Deeper,
}

impl<'a> Outline<'a> {
    pub fn new(observed: &'a NodeObservation, topology: &NodeTopology) -> Self {
        let mut walk = Walk { topology, drawn: BTreeSet::new() };
        let packages = walk.packages(observed);
        let unseen = (0..topology.gpus().len()).filter(|place| !walk.drawn.contains(place)).collect();
        Self { packages, unseen }
    }
}

struct Walk<'a> {
    topology: &'a NodeTopology,
    drawn: BTreeSet<usize>,
}

impl Walk<'_> {
    fn packages<'a>(&mut self, observed: &'a NodeObservation) -> Vec<Package<'a>> {
        let nodes: BTreeMap<NumaNodeId, (Option<PackageId>, &str)> =
            observed.host.numa_nodes.iter().map(|node| (node.id, (node.package, node.cpus.as_str()))).collect();
        let package =
            |bridge: &HostBridgeObservation| bridge.numa.and_then(|numa| nodes.get(&numa)?.0).or(bridge.package);
        let mut places: BTreeMap<Option<PackageId>, BTreeMap<Option<NumaNodeId>, Bridges<'a>>> = BTreeMap::new();
        for (numa, (package, _)) in &nodes {
            places.entry(*package).or_default().entry(Some(*numa)).or_default();
        }
        for bridge in &observed.host.host_bridges {
            let below = bridge.devices.iter().filter_map(|device| self.device(device, 0)).collect();
            places.entry(package(bridge)).or_default().entry(bridge.numa).or_default().push(below);
        }
        let node = |(id, bridges): (Option<NumaNodeId>, Vec<Vec<Device<'a>>>)| Node {
            id,
            cpus: id.and_then(|id| nodes.get(&id)).map_or("", |(_, cpus)| cpus),
            bridges,
        };
        let packages = places.into_iter();
        packages.map(|(id, nodes)| Package { id, nodes: nodes.into_iter().map(node).collect() }).collect()
    }

    /// A device with what hangs below; `None` for a port without anything, and for a GPU that was met before.
    fn device<'a>(&mut self, device: &'a PciObservation, depth: usize) -> Option<Device<'a>> {
        let pci = device.pci;
        if depth > DEEPEST {
            return Some(Device { what: What::Deeper, pci, below: Vec::new() });
        }
        let mut below: Vec<Device<'a>> =
            device.devices.iter().filter_map(|device| self.device(device, depth + 1)).collect();
        let what = match device.kind {
            PciKind::RootPort | PciKind::DownstreamPort if below.len() < 2 => return below.pop(),
            PciKind::RootPort | PciKind::DownstreamPort => What::Port,
            PciKind::Switch | PciKind::UpstreamPort => What::Switch,
            PciKind::Gpu => self.gpu(pci)?,
            PciKind::Nic => What::Nic(&device.nics),
        };
        Some(Device { what, pci, below })
    }

    /// The GPU at an address, the first that was not met yet where several claim it.
    fn gpu(&mut self, pci: Option<PciAddress>) -> Option<What<'static>> {
        let mut here = self.topology.gpus().iter().enumerate().filter(|(_, gpu)| Some(gpu.pci) == pci).peekable();
        if here.peek().is_none() {
            return Some(What::UnlistedGpu);
        }
        here.map(|(place, _)| place).find(|place| self.drawn.insert(*place)).map(What::Gpu)
    }
}

/// A package as people call it.
pub(super) fn package_name(id: Option<PackageId>) -> String {
    id.map_or("package unknown".to_owned(), |id| format!("package {id}"))
}

/// A NUMA node as people call it.
pub(super) fn node_name(id: Option<NumaNodeId>) -> String {
    id.map_or("NUMA node unknown".to_owned(), |id| format!("NUMA node {id}"))
}

/// The CPUs of a NUMA node; nothing for a node that is unknown itself.
pub(super) fn node_cpus(node: &Node<'_>) -> Option<String> {
    node.id?;
    Some(if node.cpus.is_empty() { "no CPUs".to_owned() } else { format!("CPUs {}", node.cpus) })
}

/// An interface with its rate: `mlx5_0 100 Gb/s`, `eth0 (Ethernet)`.
pub(super) fn nic_name(nic: &NicObservation) -> String {
    let kind = match nic.kind {
        NicKind::Rdma => "",
        NicKind::Ethernet => " (Ethernet)",
    };
    let rate = nic.mbps.map(|mbps| format!(" {} Gb/s", mbps / 1000)).unwrap_or_default();
    format!("{}{rate}{kind}", nic.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::HostObservation;

    /// A GPU observation: index and address.
    fn gpu(index: u32, pci: &str) -> crate::topology::GpuObservation {
        serde_json::from_value(serde_json::json!({"index": index, "uuid": format!("GPU-{index}"), "pci": pci})).unwrap()
    }

    fn function(kind: PciKind, pci: &str) -> PciObservation {
        serde_json::from_value(serde_json::json!({"kind": kind, "pci": pci})).unwrap()
    }

    fn gpus(devices: &[Device<'_>], found: &mut Vec<usize>) {
        for device in devices {
            if let What::Gpu(place) = device.what {
                found.push(place);
            }
            gpus(&device.below, found);
        }
    }

    #[test]
    fn each_gpu_appears_once_in_outline() {
        let twice = function(PciKind::Gpu, "0000:01:00.0");
        let mut deep = function(PciKind::Gpu, "0000:03:00.0");
        for _ in 0..40 {
            deep = PciObservation { pci: None, devices: vec![deep], ..function(PciKind::Switch, "0000:10:00.0") };
        }
        let wrong = function(PciKind::Nic, "0000:02:00.0");
        let stranger = function(PciKind::Gpu, "0000:09:00.0");
        let bridge =
            HostBridgeObservation { devices: vec![twice.clone(), twice, deep, wrong, stranger], ..Default::default() };
        let observed = NodeObservation {
            // Two claim one address, one is where the host has a NIC, one is too deep, one is nowhere.
            gpus: vec![
                gpu(0, "0000:01:00.0"),
                gpu(1, "0000:01:00.0"),
                gpu(2, "0000:02:00.0"),
                gpu(3, "0000:03:00.0"),
                gpu(4, "0000:04:00.0"),
            ],
            host: HostObservation { host_bridges: vec![bridge], ..Default::default() },
            ..NodeObservation::default()
        };
        let (topology, _) = NodeTopology::assemble(&observed);
        let outline = Outline::new(&observed, &topology);
        let mut found = Vec::new();
        for node in outline.packages.iter().flat_map(|package| &package.nodes) {
            node.bridges.iter().for_each(|bridge| gpus(bridge, &mut found));
        }
        assert_eq!((found, outline.unseen), (vec![0, 1], vec![2, 3, 4]));
    }
}
