//! NCCL topology dumps: the XML that NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.
//!
//! Owns the meaning of its elements and attributes (source: NCCL's src/graph/xml.cc and topo.cc), and the facts that a
//! dump lacks: host bridges, packages, UUIDs. Topology files that clouds ship are such dumps made by hand: they leave
//! out `gpu` and `net`, so that the PCI class tells a device's kind. An oddity becomes a warning (a [`ProbeFailure`])
//! that names the line; a dump of RCCL, of another version or beyond the limits is an error. Called by `load`.
//!
//! [`ProbeFailure`]: linkwise_core::topology::ProbeFailure

mod pci;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use super::xml::{self, Element, Limits, Notes, XmlError, below, name};
use super::{Machine, cpu_list, unnamed_gpu};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{
    ComputeCapability, CpuObservation, GpuObservation, Guid, HostObservation, MAX_NVLINKS, NicKind, NicObservation,
    NodeObservation, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote, PciAddress, PcieLink,
};

/// The version of the format (NCCL's `NCCL_TOPO_XML_VERSION`).
const VERSION: &str = "1";

/// The limits of a dump. Each PCI device below another takes two levels of a node file, whose reader stops at 64. Real
/// dumps stay below 12. NCCL itself stops at a few thousand elements.
const LIMITS: Limits = Limits { depth: 28, elements: 1 << 14, can_have_text: false };

/// The devices found in the PCI tree.
struct Found<'d> {
    notes: Notes,
    gpus: Vec<Candidate<'d>>,
    /// True if a NIC had to be named after its address.
    has_unnamed_nics: bool,
}

/// Reads a dump by its root element; `name` becomes the machine's name, and begins its title.
pub(super) fn parse(name: &str, system: Element<'_>) -> Result<Machine, XmlError> {
    xml::check(system, &LIMITS)?;
    // RCCL's dumps have NCCL's elements, and these (rccl/src/graph/xml.cc).
    if let Some(of_amd) = system.descendants().find(|it| it.has_tag_name("xgmi") || it.attribute("gcn").is_some()) {
        return Err(XmlError::at(of_amd, "a dump of RCCL: linkwise does not support AMD GPUs"));
    }
    let mut found = Found { notes: Notes::new("NCCL dump"), gpus: Vec::new(), has_unnamed_nics: false };
    match system.attribute("version") {
        Some(VERSION) => {}
        Some(other) => return Err(XmlError::version(system, "NCCL topology", other, "version 1")),
        None => found.notes.add(system, "no version; taken as version 1"),
    }
    let mut host = HostObservation::default();
    for cpu in this_host(system, &mut found.notes) {
        let numa = observe_numa(cpu, &mut host, &mut found.notes);
        for element in below(cpu) {
            host.host_bridges.extend(pci::below_cpu(element, numa, &mut found));
        }
    }
    let mut reconstructed = vec![
        "UUIDs are made from PCI addresses: a dump has none".to_owned(),
        "a host bridge for each device below a CPU: a dump has none, so NODE may stand for PHB".to_owned(),
        "packages are unknown: a dump does not say which NUMA nodes share one".to_owned(),
    ];
    if found.gpus.iter().any(|gpu| gpu.element.is_none()) {
        found.notes.add(system, "GPUs without a gpu element: their NVLinks are unknown, levels are those of PCIe");
        reconstructed.push("GPUs are recognised by their PCI class, and ordered by their addresses".to_owned());
    }
    if found.has_unnamed_nics {
        reconstructed.push("NICs without a name are called by their PCI address".to_owned());
    }
    let gpus = observe_gpus(found.gpus, &mut found.notes);
    if gpus.is_empty() {
        found.notes.add(system, "no GPU in the dump; write one with NCCL_TOPO_DUMP_FILE on the running machine");
    }
    Ok(Machine {
        version: super::VERSION,
        name: name.to_owned(),
        title: format!("{name}: {} GPUs by an NCCL topology dump", gpus.len()),
        source: vec!["NCCL topology dump".to_owned()],
        reconstructed,
        observed: NodeObservation { gpus, host, failures: found.notes.into_failures(), ..NodeObservation::default() },
    })
}

/// The `cpu` elements of the first host: a dump of a multi-node NVLink domain has several hosts.
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
    let is_other_host = |cpu: &Element<'_>| cpu.attribute("host_hash") != first.attribute("host_hash");
    if let Some(cpu) = cpus.iter().find(|cpu| is_other_host(cpu)) {
        notes.add(*cpu, "belongs to another host than the first CPU; other hosts are left out");
    }
    cpus.retain(|cpu| !is_other_host(cpu));
    cpus
}

/// Records the processor model and the NUMA node of a `cpu`; returns the node's number, `None` if it is unknown.
fn observe_numa(cpu: Element<'_>, host: &mut HostObservation, notes: &mut Notes) -> Option<NumaNodeId> {
    let model = model(cpu, notes);
    match (&host.cpu, &model) {
        (None, Some(_)) => host.cpu = model,
        (Some(first), Some(other)) if first != other => {
            notes.add(cpu, "the processor model differs from the first; the first is taken for all");
        }
        _ => {}
    }
    let id = match cpu.attribute("numaid") {
        // The kernel writes -1 for an unknown node.
        Some("-1") => return None,
        Some(_) => NumaNodeId(notes.number(cpu, "numaid")?),
        None => return notes.none(cpu, "without a numaid; its NUMA node is unknown"),
    };
    if host.numa_nodes.iter().any(|node| node.id == id) {
        notes.add(cpu, format!("NUMA node {id} twice; taken as one, with the CPUs of the first"));
        return Some(id);
    }
    let affinity = cpu.attribute("affinity").unwrap_or_default();
    let cpus = cpu_list(affinity).unwrap_or_else(|| {
        notes.add(cpu, format!("affinity '{}' is not a CPU mask; its CPUs are unknown", excerpt(affinity)));
        String::new()
    });
    host.numa_nodes.push(NumaNodeObservation { id, package: None, cpus });
    Some(id)
}

fn model(cpu: Element<'_>, notes: &mut Notes) -> Option<CpuObservation> {
    let arch = match cpu.attribute("arch")? {
        "arm64" => "aarch64",
        // NVIDIA's driver on POWER is little-endian only.
        "ppc64" => "ppc64le",
        other => other,
    };
    // NCCL adds 16 times CPUID's extended family. The kernel adds it once, and only to family 15.
    let family = notes.number(cpu, "familyid").map(|id| if id & 0xf == 0xf { 0xf + (id >> 4) } else { id });
    Some(CpuObservation {
        arch: excerpt(arch),
        vendor: cpu.attribute("vendor").map(excerpt),
        family,
        model: notes.number(cpu, "modelid"),
    })
}

struct Candidate<'d> {
    pub pci: PciAddress,
    pub link: Option<PcieLink>,
    /// The GPU's `pci` element.
    pub function: Element<'d>,
    /// The GPU's `gpu` element, which hand-made files leave out.
    pub element: Option<Element<'d>>,
}

/// The GPUs in the order of their indices.
fn observe_gpus(mut candidates: Vec<Candidate<'_>>, notes: &mut Notes) -> Vec<GpuObservation> {
    // GPUs without an index get indices by PCI address, as NVML numbers GPUs.
    candidates.sort_by_key(|gpu| (gpu.pci, gpu.function.range().start));
    let mut addresses = BTreeSet::new();
    candidates.retain(|gpu| {
        let first = addresses.insert(gpu.pci);
        if !first {
            notes.add(gpu.function, "another GPU at this PCI address; the first is kept");
        }
        first
    });
    let indices = indices(&candidates, notes);
    let gpu = |(gpu, index): (&Candidate<'_>, u32)| GpuObservation {
        compute_capability: gpu.element.and_then(|element| capability(element, notes)),
        pcie: gpu.link,
        nvlinks: gpu.element.map(|element| nvlinks(element, &addresses, notes)),
        // NCCL writes c2c if it found such links; an older NCCL never checks.
        c2c: gpu.element.and_then(|element| below(element).any(|child| name(child) == "c2c").then_some(true)),
        ..unnamed_gpu(index, gpu.pci)
    };
    let mut gpus: Vec<GpuObservation> = candidates.iter().zip(indices).map(gpu).collect();
    gpus.sort_by_key(|gpu| gpu.index);
    gpus
}

/// An index for each GPU: its own if no GPU before it has the same, otherwise the next free one.
fn indices(candidates: &[Candidate<'_>], notes: &mut Notes) -> Vec<u32> {
    let mut taken = BTreeSet::new();
    let mut claim = |gpu: &Candidate<'_>| {
        let element = gpu.element?;
        let index = notes.number(element, "dev");
        match index {
            None => notes.add(element, "without a dev; the GPU gets the next free index"),
            Some(index) if !taken.insert(index) => {
                notes.add(element, format!("another GPU has dev {index} too; this GPU gets the next free index"));
                return None;
            }
            Some(_) => {}
        }
        index
    };
    let claimed: Vec<Option<u32>> = candidates.iter().map(&mut claim).collect();
    let mut free = (0..u32::MAX).filter(|index| !taken.contains(index));
    claimed.into_iter().map(|index| index.or_else(|| free.next()).unwrap_or(u32::MAX)).collect()
}

/// The compute capability: `sm` has it without its dot, such as 80 or 103.
fn capability(gpu: Element<'_>, notes: &mut Notes) -> Option<ComputeCapability> {
    let sm = notes.number(gpu, "sm")?;
    Some(ComputeCapability { major: sm / 10, minor: sm % 10 })
}

/// The links, in the order of the file.
fn nvlinks(gpu: Element<'_>, gpus: &BTreeSet<PciAddress>, notes: &mut Notes) -> Vec<NvLinkObservation> {
    let mut next: u32 = 0;
    let mut seen = Vec::new();
    for element in below(gpu) {
        match name(element) {
            "nvlink" => {}
            // NVLink-C2C leads to the processor of a superchip, not to another GPU.
            "c2c" => continue,
            _ => {
                notes.add(element, "not expected below <gpu>; left out");
                continue;
            }
        }
        let count = notes.number(element, "count").unwrap_or(0);
        let Some(end) = next.checked_add(count).filter(|end| count > 0 && *end <= MAX_NVLINKS) else {
            let count = element.attribute("count").map_or("none".to_owned(), excerpt);
            notes.add(element, format!("{count} is not a number of links (1 to {MAX_NVLINKS} for a GPU); left out"));
            continue;
        };
        let remote = remote(element, gpus, notes);
        seen.push(NvLinkObservation { links: (next..end).collect(), remote, active: true });
        next = end;
    }
    seen
}

/// The other end of a link, by its PCI class (`tclass`) and address (`target`).
fn remote(link: Element<'_>, gpus: &BTreeSet<PciAddress>, notes: &mut Notes) -> NvLinkRemote {
    // In VMs a switch has no address: NVML reports FFFFFFFF:FF:FF.0.
    let target: Option<PciAddress> = link.attribute("target").and_then(|target| target.parse().ok());
    let class = link.attribute("tclass").unwrap_or_default().to_ascii_lowercase();
    match (class.as_str(), target) {
        // This is the class of the bridge of a POWER processor.
        (class, _) if class.starts_with("0x068001") => NvLinkRemote::Cpu,
        (class, target) if class.starts_with("0x0680") => NvLinkRemote::Switch(target),
        (class, Some(target)) if class.starts_with("0x03") => NvLinkRemote::Gpu(target),
        ("", Some(target)) if gpus.contains(&target) => NvLinkRemote::Gpu(target),
        (class, _) => {
            let target = link.attribute("target").map_or("nowhere".to_owned(), excerpt);
            let class = if class.is_empty() { "unknown".to_owned() } else { excerpt(class) };
            notes.add(link, format!("leads to {target}, of class {class}: neither GPU, NVSwitch nor processor"));
            NvLinkRemote::Unknown
        }
    }
}

/// The first parts of the kernel's names of RDMA devices, by driver.
const RDMA_NAMES: [&str; 11] =
    ["mlx", "rdma", "efa", "bnxt_re", "irdma", "ib", "roce", "hns", "erdma", "cxgb4_", "qedr"];
const INFINIBAND: &str = "0x0207";
/// The vendors whose network functions in a GPU machine do RDMA: all of Mellanox's, and Amazon's with an EFA id.
const MELLANOX: &str = "0x15b3";
const AMAZON: &str = "0x1d0f";
const EFA: &str = "0xefa";

/// The interfaces of a `nic`; `function` is its PCI function.
fn interfaces(nic: Element<'_>, function: Option<Element<'_>>, notes: &mut Notes) -> Vec<NicObservation> {
    let mut interfaces = Vec::new();
    for net in below(nic) {
        if name(net) != "net" {
            // A collective offload engine (`coll`) carries no traffic of its own.
            if name(net) != "coll" {
                notes.add(net, "not expected below <nic>; left out");
            }
            continue;
        }
        let Some(name) = net.attribute("name").filter(|name| !name.is_empty()) else {
            notes.add(net, "without a name; left out");
            continue;
        };
        let system_guid = net.attribute("guid").and_then(system_guid);
        let is_rdma = function.is_some_and(is_rdma)
            || system_guid.is_some()
            || RDMA_NAMES.iter().any(|rdma| name.starts_with(rdma));
        let kind = if is_rdma { NicKind::Rdma } else { NicKind::Ethernet };
        let mbps = notes.number(net, "speed").and_then(NicObservation::rate);
        interfaces.push(NicObservation { mbps, system_guid, ..NicObservation::new(excerpt(name), kind) });
    }
    interfaces
}

/// The interface of a card of which the dump lists only the PCI function.
fn unnamed_nic(function: Element<'_>, pci: Option<PciAddress>) -> NicObservation {
    let kind = if is_rdma(function) { NicKind::Rdma } else { NicKind::Ethernet };
    let name = pci.map_or_else(|| "unnamed".to_owned(), |pci| pci.to_string());
    NicObservation::new(name, kind)
}

fn is_rdma(function: Element<'_>) -> bool {
    let starts = |attribute: &str, prefix: &str| {
        function.attribute(attribute).is_some_and(|value| value.to_ascii_lowercase().starts_with(prefix))
    };
    starts("class", INFINIBAND) || starts("vendor", MELLANOX) || (starts("vendor", AMAZON) && starts("device", EFA))
}

/// The system image GUID of an interface; `None` for the small numbers that NCCL's socket transport writes instead.
fn system_guid(text: &str) -> Option<Guid> {
    let number = u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
    // NCCL prints the GUID as the verbs library has it, in network byte order.
    Guid::new(number.swap_bytes()).filter(|_| number > u64::from(u16::MAX))
}
