//! The machine as a nested list: packages, NUMA nodes, host bridges, switches, GPUs, NICs.
//!
//! The tree and the pictures both draw the result of this one walk. Every GPU of the topology is in the list exactly
//! once, even if the host's PCI tree does not show it. The walk judges and draws nothing.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::topology::{
    HostBridgeObservation, NicKind, NicObservation, NodeObservation, NodeTopology, NumaNodeId, PackageId, PciAddress,
    PciKind, PciObservation,
};

/// The depth to which a tree is followed; real ones have six levels, a file may have any number.
const MAX_DEPTH: usize = 32;

/// A package, a NUMA node, a host bridge or a PCI function, and the parts below.
pub struct Part<'a> {
    /// The kind of the part.
    pub kind: PartKind<'a>,
    /// Its address in the host's PCI tree, if any.
    pub pci: Option<PciAddress>,
    /// The parts in it or below it.
    pub below: Vec<Self>,
}

/// The kind of a part.
#[derive(Clone, Copy)]
pub enum PartKind<'a> {
    /// A package; `None` if the package of a NUMA node or a host bridge is unknown.
    Package(Option<PackageId>),
    /// A NUMA node with its CPUs as a kernel list; `None` holds the host bridges whose NUMA node is unknown.
    Node(Option<NumaNodeId>, &'a str),
    /// A PCI host bridge.
    Bridge,
    /// A port with several devices. A port with one device is left out, and the device stands in its place.
    Port,
    /// A PCIe switch.
    Switch,
    /// A GPU, by its index in [`NodeTopology::gpus`].
    Gpu(usize),
    /// A GPU that the host shows and NVML does not.
    UnlistedGpu,
    /// A network card, with its interfaces.
    Nic(&'a [NicObservation]),
    /// A part deeper than the outline goes.
    Deeper,
    /// The GPUs that the host's PCI tree does not show.
    Unseen,
}

/// The whole machine: packages, and [`PartKind::Unseen`] if there are such GPUs.
pub fn outline<'a>(observed: &'a NodeObservation, topology: &NodeTopology) -> Vec<Part<'a>> {
    let mut walk = Walk { topology, seen: BTreeSet::new() };
    let mut parts = walk.packages(observed);
    let unseen = (0..topology.gpus().len()).filter(|place| !walk.seen.contains(place));
    let unseen: Vec<Part<'a>> = unseen.map(|place| Part::new(PartKind::Gpu(place), Vec::new())).collect();
    if !unseen.is_empty() {
        parts.push(Part::new(PartKind::Unseen, unseen));
    }
    parts
}

impl<'a> Part<'a> {
    fn new(kind: PartKind<'a>, below: Vec<Self>) -> Self {
        Self { kind, pci: None, below }
    }

    /// A line about the part; for a GPU only the address.
    pub fn label(&self) -> String {
        let address = self.pci.map(|pci| format!(" {pci}")).unwrap_or_default();
        match self.kind {
            PartKind::Package(id) => id.map_or("package unknown".to_owned(), |id| format!("package {id}")),
            PartKind::Node(id, _) => id.map_or("NUMA node unknown".to_owned(), |id| format!("NUMA node {id}")),
            PartKind::Bridge => "host bridge".to_owned(),
            PartKind::Port => format!("port{address}"),
            PartKind::Switch => format!("PCIe switch{address}"),
            PartKind::Gpu(_) => format!("GPU{address}"),
            PartKind::UnlistedGpu => format!("a GPU that NVML does not list{address}"),
            PartKind::Nic(nics) => {
                format!("NIC{address}  {}", nics.iter().map(nic_name).collect::<Vec<_>>().join(", "))
            }
            PartKind::Deeper => "...".to_owned(),
            PartKind::Unseen => "not in the host's PCI tree".to_owned(),
        }
    }

    /// The CPUs of a NUMA node; `None` for an unknown node, and for other parts.
    pub fn cpus(&self) -> Option<String> {
        match self.kind {
            PartKind::Node(Some(_), "") => Some("no CPUs".to_owned()),
            PartKind::Node(Some(_), cpus) => Some(format!("CPUs {cpus}")),
            _ => None,
        }
    }
}

struct Walk<'a> {
    topology: &'a NodeTopology,
    /// The GPUs that are in the outline.
    seen: BTreeSet<usize>,
}

impl Walk<'_> {
    fn packages<'a>(&mut self, observed: &'a NodeObservation) -> Vec<Part<'a>> {
        let nodes: BTreeMap<NumaNodeId, (Option<PackageId>, &str)> =
            observed.host.numa_nodes.iter().map(|node| (node.id, (node.package, node.cpus.as_str()))).collect();
        let package =
            |bridge: &HostBridgeObservation| bridge.numa.and_then(|numa| nodes.get(&numa)?.0).or(bridge.package);
        let mut places: BTreeMap<Option<PackageId>, BTreeMap<Option<NumaNodeId>, Vec<Part<'a>>>> = BTreeMap::new();
        for (numa, (package, _)) in &nodes {
            places.entry(*package).or_default().entry(Some(*numa)).or_default();
        }
        for bridge in &observed.host.host_bridges {
            let below = bridge.devices.iter().filter_map(|device| self.device(device, 0)).collect();
            let node = places.entry(package(bridge)).or_default().entry(bridge.numa).or_default();
            node.push(Part::new(PartKind::Bridge, below));
        }
        let cpus = |id: Option<NumaNodeId>| id.and_then(|id| nodes.get(&id)).map_or("", |(_, cpus)| cpus);
        let node = |(id, bridges)| Part::new(PartKind::Node(id, cpus(id)), bridges);
        let package =
            |(id, nodes): (_, BTreeMap<_, _>)| Part::new(PartKind::Package(id), nodes.into_iter().map(node).collect());
        places.into_iter().map(package).collect()
    }

    /// A device with the parts below; `None` for a port without devices, and for a GPU that is in the outline already.
    fn device<'a>(&mut self, device: &'a PciObservation, depth: usize) -> Option<Part<'a>> {
        let pci = device.pci;
        if depth > MAX_DEPTH {
            return Some(Part { pci, ..Part::new(PartKind::Deeper, Vec::new()) });
        }
        let mut below: Vec<Part<'a>> =
            device.devices.iter().filter_map(|device| self.device(device, depth + 1)).collect();
        let kind = match device.kind {
            PciKind::RootPort | PciKind::DownstreamPort if below.len() < 2 => return below.pop(),
            PciKind::RootPort | PciKind::DownstreamPort => PartKind::Port,
            PciKind::Switch | PciKind::UpstreamPort => PartKind::Switch,
            PciKind::Gpu => self.gpu(pci)?,
            PciKind::Nic => PartKind::Nic(&device.nics),
        };
        Some(Part { kind, pci, below })
    }

    /// The GPU at an address; if several claim it, the first that is not in the outline yet.
    fn gpu(&mut self, pci: Option<PciAddress>) -> Option<PartKind<'static>> {
        let mut here = self.topology.gpus().iter().enumerate().filter(|(_, gpu)| Some(gpu.pci) == pci).peekable();
        if here.peek().is_none() {
            return Some(PartKind::UnlistedGpu);
        }
        here.map(|(place, _)| place).find(|place| self.seen.insert(*place)).map(PartKind::Gpu)
    }
}

/// An interface with its rate: `mlx5_0 100 Gb/s`, `eth0 (Ethernet)`.
fn nic_name(nic: &NicObservation) -> String {
    let kind = if nic.kind == NicKind::Ethernet { " (Ethernet)" } else { "" };
    let rate = nic.mbps.map(|mbps| format!(" {} Gb/s", mbps / 1000)).unwrap_or_default();
    format!("{}{rate}{kind}", nic.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::topology::HostObservation;

    /// A GPU observation: index and address.
    fn gpu(index: u32, pci: &str) -> linkwise_core::topology::GpuObservation {
        serde_json::from_value(serde_json::json!({"index": index, "uuid": format!("GPU-{index}"), "pci": pci})).unwrap()
    }

    fn function(kind: PciKind, pci: &str) -> PciObservation {
        serde_json::from_value(serde_json::json!({"kind": kind, "pci": pci})).unwrap()
    }

    fn gpus(parts: &[Part<'_>]) -> Vec<usize> {
        let place = |part: &Part<'_>| if let PartKind::Gpu(place) = part.kind { Some(place) } else { None };
        parts.iter().flat_map(|part| place(part).into_iter().chain(gpus(&part.below))).collect()
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
            // Two GPUs claim one address, one has a NIC's address, one is too deep, one is not in the tree.
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
        let mut parts = outline(&observed, &topology);
        let unseen = parts.pop().unwrap();
        assert_eq!((gpus(&parts), gpus(&unseen.below)), (vec![0, 1], vec![2, 3, 4]));
    }
}
