//! The machine as a tree: packages, NUMA nodes, host bridges, switches, GPUs, NICs.

use super::outline::{Device, Node, Outline, What, nic_name, node_cpus, node_name, package_name};
use crate::topology::{Gpu, NodeObservation, NodeTopology};

/// One line of the tree and what hangs below it.
struct Branch {
    label: String,
    below: Vec<Self>,
}

/// Draws the tree; `note` is an addition to a GPU's line, such as the pod that holds it.
pub fn tree(observed: &NodeObservation, topology: &NodeTopology, note: impl Fn(&Gpu) -> String) -> String {
    let outline = Outline::new(observed, topology);
    let drawing = Drawing { topology, note: &note };
    let mut roots: Vec<Branch> = outline
        .packages
        .iter()
        .map(|package| Branch { label: package_name(package.id), below: drawing.nodes(&package.nodes) })
        .collect();
    if !outline.unseen.is_empty() {
        let below = outline.unseen.iter().map(|place| Branch { label: drawing.gpu(*place), below: Vec::new() });
        roots.push(Branch { label: "not in the host's PCI tree".to_owned(), below: below.collect() });
    }
    let mut text = String::new();
    draw(&roots, "", true, &mut text);
    text
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

struct Drawing<'a> {
    topology: &'a NodeTopology,
    note: &'a dyn Fn(&Gpu) -> String,
}

impl Drawing<'_> {
    /// The NUMA nodes of a package. A machine can have dozens that are memory and nothing else: one line for them all.
    fn nodes(&self, nodes: &[Node<'_>]) -> Vec<Branch> {
        let (idle, busy): (Vec<_>, Vec<_>) =
            nodes.iter().partition(|node| node.id.is_some() && node.cpus.is_empty() && node.bridges.is_empty());
        let mut branches: Vec<Branch> = busy.into_iter().map(|node| self.node(node)).collect();
        match idle.as_slice() {
            [] => {}
            [only] => branches.push(self.node(only)),
            [first, .., last] => {
                let count = idle.len();
                let label = format!("{} to {}, {count} without CPUs", node_name(first.id), node_name(last.id));
                branches.push(Branch { label, below: Vec::new() });
            }
        }
        branches
    }

    fn node(&self, node: &Node<'_>) -> Branch {
        let bridge = |devices: &Vec<Device<'_>>| Branch {
            label: "host bridge".to_owned(),
            below: devices.iter().map(|device| self.device(device)).collect(),
        };
        let cpus = node_cpus(node).map(|cpus| format!(", {cpus}")).unwrap_or_default();
        Branch { label: node_name(node.id) + &cpus, below: node.bridges.iter().map(bridge).collect() }
    }

    fn device(&self, device: &Device<'_>) -> Branch {
        let address = device.pci.map(|pci| format!(" {pci}")).unwrap_or_default();
        let label = match device.what {
            What::Port => format!("port{address}"),
            What::Switch => format!("PCIe switch{address}"),
            What::Gpu(place) => self.gpu(place),
            What::UnlistedGpu => format!("a GPU that NVML does not list{address}"),
            What::Nic(nics) => {
                let names: Vec<String> = nics.iter().map(nic_name).collect();
                format!("NIC{address}  {}", names.join(", "))
            }
            What::Deeper => "...".to_owned(),
        };
        Branch { label, below: device.below.iter().map(|device| self.device(device)).collect() }
    }

    fn gpu(&self, place: usize) -> String {
        let Some(gpu) = self.topology.gpus().get(place) else { return String::new() };
        let model = gpu.model.as_deref().map(|model| format!("  {model}")).unwrap_or_default();
        let note = (self.note)(gpu);
        let note = if note.is_empty() { note } else { format!("  {note}") };
        format!("GPU {}  {}{model}{note}", gpu.index, gpu.pci)
    }
}
