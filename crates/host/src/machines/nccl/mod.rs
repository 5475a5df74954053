//! NCCL topology dumps: the XML that NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.
//!
//! Owns the meaning of its elements and attributes (source: NCCL's src/graph/xml.cc and topo.cc), and the facts that a
//! dump lacks: host bridges, packages, UUIDs. Topology files that clouds ship are such dumps made by hand: they leave
//! out `gpu` and `net`, and then the PCI class decides. An oddity becomes a warning (a [`ProbeFailure`]) that names the
//! line; only a text that is not a dump at all is an error. `write` makes such a file. Called by `machines`.
//!
//! [`ProbeFailure`]: linkwise_core::topology::ProbeFailure

mod cpu;
mod gpu;
mod net;
mod pci;
mod write;

use super::Machine;
use super::notes::Notes;
use super::xml::{self, Element, Limits, XmlError, below, name};
use gpu::Candidate;
use linkwise_core::topology::{HostObservation, NodeObservation};
pub use write::topology_file;

/// The version of the format (NCCL's `NCCL_TOPO_XML_VERSION`).
const VERSION: &str = "1";

/// The limits of a dump. A node file takes two levels for each PCI device in another, and its reader stops at 64; real
/// dumps stay below 12. NCCL itself stops at a few thousand elements.
const LIMITS: Limits = Limits { depth: 28, elements: 1 << 14, text: false };

/// The devices found on the way through the PCI tree.
struct Found<'d> {
    notes: Notes,
    gpus: Vec<Candidate<'d>>,
    /// Set if a NIC had to be named after its address.
    unnamed_nics: bool,
}

/// Reads a dump by its root element; `title` becomes the machine's title.
pub(super) fn parse(title: &str, system: Element<'_>) -> Result<Machine, XmlError> {
    xml::check(system, &LIMITS)?;
    let mut found = Found { notes: Notes::new("NCCL dump"), gpus: Vec::new(), unnamed_nics: false };
    match system.attribute("version") {
        Some(VERSION) => {}
        Some(other) => return Err(XmlError::version(system, "NCCL topology", other, "version 1")),
        None => found.notes.add(system, "no version; taken as version 1"),
    }
    let mut host = HostObservation::default();
    for cpu in this_host(system, &mut found.notes) {
        let numa = cpu::observe(cpu, &mut host, &mut found.notes);
        for element in below(cpu) {
            host.host_bridges.extend(pci::below_cpu(element, numa, &mut found));
        }
    }
    let mut reconstructed = vec![
        "UUIDs are made from PCI addresses: a dump has none".to_owned(),
        "a host bridge for each device below a CPU: a dump shows none, NODE may be PHB".to_owned(),
        "packages are unknown: a dump does not have which NUMA nodes share one".to_owned(),
    ];
    if found.gpus.iter().any(|gpu| gpu.element.is_none()) {
        found.notes.add(system, "GPUs without a gpu element: their NVLinks are unknown, levels are those of PCIe");
        reconstructed.push("GPUs are recognised by their PCI class, their order is that of their addresses".to_owned());
    }
    if found.unnamed_nics {
        reconstructed.push("NICs without a name are called by their PCI address".to_owned());
    }
    let gpus = gpu::observe(found.gpus, &mut found.notes);
    if gpus.is_empty() {
        found.notes.add(system, "no GPU in it; NCCL_TOPO_DUMP_FILE, on the running machine, writes them");
    }
    Ok(Machine {
        version: super::VERSION,
        name: title.to_owned(),
        title: format!("{title}: {} GPUs by an NCCL topology dump", gpus.len()),
        source: vec!["NCCL topology dump".to_owned()],
        reconstructed,
        observed: NodeObservation { gpus, host, failures: found.notes.into_failures(), ..NodeObservation::default() },
    })
}

/// The `cpu` elements of the first host: a dump of a multi-node NVLink domain holds several.
fn this_host<'d>(system: Element<'d>, notes: &mut Notes) -> Vec<Element<'d>> {
    let mut cpus: Vec<Element<'_>> = Vec::new();
    for element in below(system) {
        if name(element) == "cpu" {
            cpus.push(element);
        } else {
            notes.add(element, "not expected below <system>; left out");
        }
    }
    let Some(first) = cpus.first().copied() else { return cpus };
    let other = |cpu: &Element<'_>| cpu.attribute("host_hash") != first.attribute("host_hash");
    if let Some(cpu) = cpus.iter().find(|cpu| other(cpu)) {
        notes.add(*cpu, "of another host than the first one; other hosts are left out");
    }
    cpus.retain(|cpu| !other(cpu));
    cpus
}

#[cfg(test)]
mod tests;
