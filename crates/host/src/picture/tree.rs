//! The machine as a tree: packages, NUMA nodes, host bridges, switches, GPUs, NICs.

use crate::machines::Machine;
use crate::picture::outline::{Part, What, outline};
use linkwise_core::topology::{Gpu, NodeObservation, NodeTopology};

/// Text for people: a machine's title and tree.
pub fn machine_tree(machine: &Machine) -> String {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    format!("{}\n\n{}", machine.title, tree(&machine.observed, &topology, |_| String::new()))
}

/// Draws the tree; `note` is an addition to a GPU's line, such as the pod that holds it.
pub fn tree(observed: &NodeObservation, topology: &NodeTopology, note: impl Fn(&Gpu) -> String) -> String {
    let gpu = |place: usize| {
        let Some(gpu) = topology.gpus().get(place) else { return String::new() };
        let words = [Some(format!("GPU {}", gpu.index)), Some(gpu.pci.to_string()), gpu.model.clone(), Some(note(gpu))];
        words.into_iter().flatten().filter(|word| !word.is_empty()).collect::<Vec<_>>().join("  ")
    };
    let mut text = String::new();
    for part in &outline(observed, topology) {
        text += &format!("{}\n", part.label());
        draw(part, "", &gpu, &mut text);
    }
    text
}

/// Draws the parts below a part, a line for each with the branches to its left.
fn draw(above: &Part<'_>, indent: &str, gpu: &impl Fn(usize) -> String, text: &mut String) {
    // A machine can have dozens of NUMA nodes that only have memory: one line for them all.
    let is_memory = |part: &&Part<'_>| matches!(part.what, What::Node(Some(_), "")) && part.below.is_empty();
    let (memory, mut parts): (Vec<_>, Vec<_>) = above.below.iter().partition(is_memory);
    let mut all_memory = None;
    match memory.as_slice() {
        [first, .., last] => {
            all_memory = Some(format!("{} to {}, {} without CPUs", first.label(), last.label(), memory.len()));
        }
        few => parts.extend(few),
    }
    let label = |part: &Part<'_>| match (part.what, part.cpus()) {
        (What::Gpu(place), _) => gpu(place),
        (_, Some(cpus)) => format!("{}, {cpus}", part.label()),
        _ => part.label(),
    };
    let lines = parts.into_iter().map(|part| (label(part), Some(part))).chain(all_memory.map(|line| (line, None)));
    let mut lines = lines.peekable();
    while let Some((line, part)) = lines.next() {
        let (here, below) = if lines.peek().is_some() { ("├─ ", "│  ") } else { ("└─ ", "   ") };
        *text += &format!("{indent}{here}{line}\n");
        if let Some(part) = part {
            draw(part, &format!("{indent}{below}"), gpu, text);
        }
    }
}
