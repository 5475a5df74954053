//! The machine as a tree: packages, NUMA nodes, host bridges, switches, GPUs, NICs.

use std::collections::BTreeMap;

use crate::topology::{
    Gpu, HostBridgeObservation, NicKind, NodeObservation, NodeTopology, NumaNodeId, PackageId, PciAddress, PciKind,
    PciObservation,
};

/// One line of the tree and what hangs below it.
struct Branch {
    label: String,
    below: Vec<Self>,
}

/// Draws the tree; `note` says what else is known of a GPU, such as who holds it.
pub fn tree(observed: &NodeObservation, topology: &NodeTopology, note: impl Fn(&Gpu) -> String) -> String {
    let drawing = Drawing { topology, note: &note };
    let mut roots = drawing.packages(observed);
    let seen: Vec<PciAddress> = addresses(observed);
    let unseen: Vec<Branch> = topology
        .gpus()
        .iter()
        .filter(|gpu| !seen.contains(&gpu.pci))
        .map(|gpu| Branch { label: drawing.gpu(gpu), below: Vec::new() })
        .collect();
    if !unseen.is_empty() {
        roots.push(Branch { label: "not in the host's PCI tree".to_owned(), below: unseen });
    }
    let mut text = String::new();
    draw(&roots, "", true, &mut text);
    text
}

fn addresses(observed: &NodeObservation) -> Vec<PciAddress> {
    let mut open: Vec<&PciObservation> = observed.host.host_bridges.iter().flat_map(|bridge| &bridge.devices).collect();
    let mut all = Vec::new();
    while let Some(device) = open.pop() {
        all.extend(device.pci);
        open.extend(&device.devices);
    }
    all
}

/// Lines with the branches to the left; the first level stands without.
fn draw(branches: &[Branch], indent: &str, root: bool, text: &mut String) {
    for (number, branch) in branches.iter().enumerate() {
        let last = number + 1 == branches.len();
        let (here, below) = match (root, last) {
            (true, _) => ("", ""),
            (false, true) => ("└─ ", "   "),
            (false, false) => ("├─ ", "│  "),
        };
        *text += &format!("{indent}{here}{}\n", branch.label);
        draw(&branch.below, &format!("{indent}{below}"), false, text);
    }
}

/// How deep a tree is drawn; real ones have six levels, and a file from a stranger may have any number.
const DEEPEST: usize = 32;

struct Drawing<'a> {
    topology: &'a NodeTopology,
    note: &'a dyn Fn(&Gpu) -> String,
}

impl Drawing<'_> {
    fn packages(&self, observed: &NodeObservation) -> Vec<Branch> {
        let nodes: BTreeMap<NumaNodeId, Option<PackageId>> =
            observed.host.numa_nodes.iter().map(|node| (node.id, node.package)).collect();
        let package = |bridge: &HostBridgeObservation| {
            bridge.numa.and_then(|numa| nodes.get(&numa).copied().flatten()).or(bridge.package)
        };
        let mut places: BTreeMap<Option<PackageId>, BTreeMap<Option<NumaNodeId>, Vec<Branch>>> = BTreeMap::new();
        for (numa, package) in &nodes {
            places.entry(*package).or_default().entry(Some(*numa)).or_default();
        }
        for bridge in &observed.host.host_bridges {
            let below = bridge.devices.iter().filter_map(|device| self.device(device, 0)).collect();
            let branch = Branch { label: "host bridge".to_owned(), below };
            places.entry(package(bridge)).or_default().entry(bridge.numa).or_default().push(branch);
        }
        let numa_label = |numa: Option<NumaNodeId>| match numa {
            None => "NUMA node unknown".to_owned(),
            Some(numa) => {
                let node = observed.host.numa_nodes.iter().find(|node| node.id == numa);
                let cpus = node.map(|node| node.cpus.as_str()).filter(|cpus| !cpus.is_empty());
                cpus.map_or(format!("NUMA node {numa}, no CPUs"), |cpus| format!("NUMA node {numa}, CPUs {cpus}"))
            }
        };
        let has_cpus = |numa: Option<NumaNodeId>| {
            observed.host.numa_nodes.iter().any(|node| Some(node.id) == numa && !node.cpus.is_empty())
        };
        let branch = |(package, nodes): (Option<PackageId>, BTreeMap<Option<NumaNodeId>, Vec<Branch>>)| {
            // A machine can have dozens of nodes that are memory and nothing else: one line for all of them.
            let idle = |(numa, below): &(Option<NumaNodeId>, Vec<Branch>)| below.is_empty() && !has_cpus(*numa);
            let (idle, nodes): (Vec<_>, Vec<_>) = nodes.into_iter().partition(idle);
            let mut below: Vec<Branch> =
                nodes.into_iter().map(|(numa, below)| Branch { label: numa_label(numa), below }).collect();
            let label = match (idle.as_slice(), idle.last()) {
                ([(first, _)], _) => Some(numa_label(*first)),
                ([(Some(first), _), ..], Some((Some(last), _))) => {
                    Some(format!("{} NUMA nodes from {first} to {last}, no CPUs", idle.len()))
                }
                _ => None,
            };
            below.extend(label.map(|label| Branch { label, below: Vec::new() }));
            let label = package.map_or("package unknown".to_owned(), |package| format!("package {package}"));
            Branch { label, below }
        };
        places.into_iter().map(branch).collect()
    }

    /// A device with what hangs below; a port is drawn only where it stands for a switch.
    fn device(&self, device: &PciObservation, depth: usize) -> Option<Branch> {
        if depth > DEEPEST {
            return Some(Branch { label: "...".to_owned(), below: Vec::new() });
        }
        let address = device.pci.map(|pci| format!(" {pci}")).unwrap_or_default();
        let mut below: Vec<Branch> =
            device.devices.iter().filter_map(|device| self.device(device, depth + 1)).collect();
        let label = match device.kind {
            PciKind::RootPort | PciKind::DownstreamPort => {
                // What matters is the device on the port.
                return match below.len() {
                    0 | 1 => below.pop(),
                    _ => Some(Branch { label: format!("port{address}"), below }),
                };
            }
            PciKind::Switch | PciKind::UpstreamPort => format!("PCIe switch{address}"),
            PciKind::Gpu => match self.topology.gpus().iter().find(|gpu| Some(gpu.pci) == device.pci) {
                Some(gpu) => self.gpu(gpu),
                None => format!("a GPU that NVML does not list{address}"),
            },
            PciKind::Nic => nic(device, &address),
        };
        Some(Branch { label, below })
    }

    fn gpu(&self, gpu: &Gpu) -> String {
        let model = gpu.model.as_deref().map(|model| format!("  {model}")).unwrap_or_default();
        let note = (self.note)(gpu);
        let note = if note.is_empty() { note } else { format!("  {note}") };
        format!("GPU {}  {}{model}{note}", gpu.index, gpu.pci)
    }
}

fn nic(device: &PciObservation, address: &str) -> String {
    let name = |nic: &crate::topology::NicObservation| {
        let kind = match nic.kind {
            NicKind::Rdma => "",
            NicKind::Ethernet => " (Ethernet)",
        };
        let rate = nic.mbps.map(|mbps| format!(" {} Gb/s", mbps / 1000)).unwrap_or_default();
        format!("{}{rate}{kind}", nic.name)
    };
    let names: Vec<String> = device.nics.iter().map(name).collect();
    format!("NIC{address}  {}", names.join(", "))
}
