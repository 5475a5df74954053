//! The machine as text: the tree of packages, NUMA nodes, host bridges, switches, GPUs and NICs, and a matrix like that
//! of `nvidia-smi topo -m`.

use super::outline::{Part, PartKind, outline};
use super::style::clean;
use crate::machines::Machine;
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{HostObservation, NodeTopology};
use linkwise_system::output::table;

/// The legend of the symbols, which are those of `nvidia-smi topo -m`.
const LEGEND: &str = "
  NV#   # NVLinks (behind an NVSwitch: of the narrower port)
  PIX   one PCIe switch            PXB   several PCIe switches     PHB   one PCI host bridge
  NODE  one NUMA node              SYS   between NUMA nodes
";

/// A machine's title and tree.
pub fn machine_tree(machine: &Machine) -> String {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let gpu = |place: usize| {
        let Some(gpu) = topology.gpus().get(place) else { return String::new() };
        let model = gpu.model.as_deref().filter(|model| !model.is_empty()).map(|model| format!("  {model}"));
        format!("GPU {}  {}{}", gpu.index, gpu.pci, model.unwrap_or_default())
    };
    let mut text = format!("{}\n\n", clean(&machine.title));
    for part in &outline(&machine.observed, &topology) {
        text += &format!("{}\n", clean(&part.label()));
        draw(part, "", &gpu, &mut text);
    }
    text
}

/// Draws the parts below a part, a line for each with the branches to its left.
fn draw(above: &Part<'_>, indent: &str, gpu: &impl Fn(usize) -> String, text: &mut String) {
    // A machine can have dozens of NUMA nodes that only have memory: one line for them all.
    let is_memory = |part: &&Part<'_>| matches!(part.kind, PartKind::Node(Some(_), "")) && part.below.is_empty();
    let (memory, mut parts): (Vec<_>, Vec<_>) = above.below.iter().partition(is_memory);
    let mut all_memory = None;
    match memory.as_slice() {
        [first, .., last] => {
            all_memory = Some(format!("{} to {}, {} without CPUs", first.label(), last.label(), memory.len()));
        }
        few => parts.extend(few),
    }
    let label = |part: &Part<'_>| match (part.kind, part.cpus()) {
        (PartKind::Gpu(place), _) => gpu(place),
        (_, Some(cpus)) => format!("{}, {}", part.label(), excerpt(&cpus)),
        _ => part.label(),
    };
    let lines = parts.into_iter().map(|part| (label(part), Some(part))).chain(all_memory.map(|line| (line, None)));
    let mut lines = lines.peekable();
    while let Some((line, part)) = lines.next() {
        let (here, below) = if lines.peek().is_some() { ("├─ ", "│  ") } else { ("└─ ", "   ") };
        *text += &format!("{indent}{here}{}\n", clean(&line));
        if let Some(part) = part {
            draw(part, &format!("{indent}{below}"), gpu, text);
        }
    }
}

/// The matrix: a row for each GPU, with its links to GPUs and NICs, its CPUs, its NUMA node and, if there are rails,
/// its rail.
pub fn matrix(topology: &NodeTopology, host: &HostObservation) -> String {
    let gpus = topology.gpus();
    if gpus.is_empty() {
        return "no GPUs\n".to_owned();
    }
    let mut rows = Vec::new();
    let mut head = vec![String::new()];
    head.extend(gpus.iter().map(|gpu| format!("GPU{}", gpu.index)));
    head.extend((0..topology.nics().len()).map(|nic| format!("NIC{nic}")));
    let has_rails = !topology.rails().is_empty();
    head.extend(["CPUs", "NUMA", "Rail"].iter().take(if has_rails { 3 } else { 2 }).map(ToString::to_string));
    rows.push(head);
    for (a, gpu) in gpus.iter().enumerate() {
        let mut row = vec![format!("GPU{}", gpu.index)];
        row.extend((0..gpus.len()).map(|b| topology.symbol(a, b)));
        row.extend(topology.nics().iter().map(|nic| nic.level.get(a).map_or("", |rank| rank.symbol()).to_owned()));
        let cpus = host.numa_nodes.iter().find(|node| Some(node.id) == gpu.numa).map(|node| node.cpus.clone());
        row.push(cpus.filter(|cpus| !cpus.is_empty()).map_or_else(|| "-".to_owned(), |cpus| excerpt(&cpus)));
        row.push(gpu.numa.map_or("-".to_owned(), |numa| numa.to_string()));
        row.extend(has_rails.then(|| gpu.rail.map_or("-".to_owned(), |rail| rail.to_string())));
        rows.push(row);
    }
    let mut text = table(&rows);
    for (number, nic) in topology.nics().iter().enumerate() {
        text += &format!("\n  NIC{number}: {}", clean(&nic.names.join(", ")));
    }
    if !topology.nics().is_empty() {
        text.push('\n');
    }
    text + LEGEND
}
