//! hwloc's XML (`lstopo host.xml`), versions 1 to 3: the host, and the NVIDIA GPUs that hwloc recorded.
//!
//! Owns what its objects and attributes mean (source: hwloc's topology-xml.c), as far as linkwise uses them. Such a
//! file has neither what PCIe links can do nor what NICs carry nor NVLinks. It is read here and not by libhwloc, which
//! reads no version later than its own and whose parser depends on what is installed. Called by `load`.

use std::collections::BTreeSet;

use super::notes::Notes;
use super::xml::{self, Element, Limits, XmlError, XmlFault};
use super::{Machine, bare_gpu, cpu_list};
use crate::quote::excerpt;
use crate::topology::{
    CpuObservation, DisplayClass, GpuObservation, HostBridgeObservation, HostObservation, NicKind, NicObservation,
    NodeObservation, NumaNodeId, NumaNodeObservation, PackageId, PciAddress, PciKind, PciObservation,
};

/// A host of some thousand CPUs: cores and caches nest below 40 deep. Text stands in lists that are not read.
const LIMITS: Limits = Limits { depth: 128, elements: 1 << 17, bytes: 16 << 20, text: true };
/// Bridges inside of each other. Real ones stay below 12; a node file takes two levels for each, and its reader stops
/// at 64.
const MAX_BRIDGES: usize = 24;
/// PCI base classes (PCI Code and ID Assignment): display controllers, network controllers with InfiniBand.
const DISPLAY: &str = "03";
const NETWORK: &str = "02";
/// NVIDIA's PCI vendor id.
const NVIDIA: &str = "10de";

/// Reads a file; `name` is what the machine is called.
pub(super) fn parse(name: &str, text: &str) -> Result<Machine, XmlError> {
    let topology = xml::tree(text, &LIMITS)?;
    let version = version(&topology)?;
    let Some(root) = objects(&topology).find(|object| is(object, &["Machine", "System"])) else {
        return Err(XmlError { line: topology.line, fault: XmlFault::NoMachine });
    };
    let mut walk = Walk { version, notes: Notes::new("hwloc XML"), host: HostObservation::default(), gpus: Vec::new() };
    walk.object(root, Place::default());
    let Walk { mut notes, mut host, gpus, .. } = walk;
    // Before version 2 a host with a single NUMA node had no such object.
    if host.numa_nodes.is_empty() {
        host.numa_nodes.push(NumaNodeObservation { id: NumaNodeId(0), package: None, cpus: cpus(root) });
    }
    if host.numa_nodes.len() == 1 {
        // Beside the only NUMA node is no evidence of being on it.
        host.host_bridges.iter_mut().for_each(|bridge| bridge.numa = None);
    }
    if let Some(cpu) = &mut host.cpu {
        // A fact of the machine before version 3, then one of the whole topology.
        cpu.arch = info([root, &topology], "Architecture").unwrap_or_default().to_owned();
    }
    let gpus = gpus_in_order(gpus, &mut notes);
    Ok(Machine {
        name: name.to_owned(),
        title: format!("{name}: {} GPUs by a hwloc XML", gpus.len()),
        source: vec!["hwloc XML".to_owned()],
        reconstructed: vec![
            "UUIDs are made from PCI addresses where hwloc has none".to_owned(),
            "NVLinks, and what PCIe links can do, are unknown: hwloc does not record them".to_owned(),
        ],
        observed: NodeObservation { gpus, host, failures: notes.into_failures(), ..NodeObservation::default() },
    })
}

/// The major version, which hwloc 1 did not write.
fn version(topology: &Element) -> Result<u32, XmlError> {
    let Some(found) = topology.get("version") else { return Ok(1) };
    let major = found.split('.').next().and_then(|major| major.parse().ok());
    major.filter(|major| (1..=3).contains(major)).ok_or_else(|| {
        let (format, known) = ("hwloc XML", "versions 1 to 3");
        XmlError { line: topology.line, fault: XmlFault::Version { format, found: excerpt(found), known } }
    })
}

/// Where in the machine an object hangs.
#[derive(Clone, Copy, Default)]
struct Place<'d> {
    /// The object whose CPUs are local: the innermost that is no device.
    local: Option<&'d Element>,
    package: Option<PackageId>,
}

/// What was found on the way through the objects.
struct Walk<'d> {
    version: u32,
    notes: Notes,
    host: HostObservation,
    /// The PCI functions that are NVIDIA GPUs.
    gpus: Vec<&'d Element>,
}

impl<'d> Walk<'d> {
    fn object(&mut self, object: &'d Element, mut place: Place<'d>) {
        match kind(object) {
            "Bridge" if object.get("bridge_type").is_some_and(|kind| kind.starts_with("0-")) => {
                return self.host_bridge(object, place);
            }
            // Recorded without bridges: which switches and ports they share is unknown.
            "PCIDev" if is_gpu(object) => self.gpus.push(object),
            "Package" | "Socket" => {
                place.package = os_index(object).map(PackageId);
                self.host.cpu.get_or_insert_with(|| cpu(object));
            }
            "NUMANode" => {
                place.package = place.package.or_else(|| only_package_below(object));
                match os_index(object) {
                    Some(id) => self.host.numa_nodes.push(NumaNodeObservation {
                        id: NumaNodeId(id),
                        package: place.package,
                        cpus: cpus(object),
                    }),
                    None => self.notes.add(object, "a NUMA node without a number; left out"),
                }
            }
            _ => {}
        }
        place.local = Some(object);
        objects(object).for_each(|below| self.object(below, place));
    }

    fn host_bridge(&mut self, bridge: &'d Element, place: Place<'d>) {
        let below = objects(bridge).filter_map(|below| self.device(below, PciKind::RootPort, 1));
        let devices: Vec<_> = below.collect();
        if !devices.is_empty() {
            // A list of one node is a number.
            let nodes = place.local.and_then(|local| list(local.get("nodeset")?));
            let numa = nodes.and_then(|nodes| nodes.parse().ok()).map(NumaNodeId);
            self.host.host_bridges.push(HostBridgeObservation { numa, package: place.package, devices });
        }
    }

    /// A GPU or NIC, or a bridge with such devices below. Ports alternate on the way down; `port` is what a bridge
    /// here is.
    fn device(&mut self, object: &'d Element, port: PciKind, depth: usize) -> Option<PciObservation> {
        let (port, nics, devices) = match kind(object) {
            "Bridge" if depth > MAX_BRIDGES => {
                self.notes.add(object, format!("bridges nest deeper than {MAX_BRIDGES}; left out"));
                return None;
            }
            "Bridge" => {
                let below = match port {
                    PciKind::UpstreamPort => PciKind::DownstreamPort,
                    _ => PciKind::UpstreamPort,
                };
                let devices = objects(object).filter_map(|object| self.device(object, below, depth + 1)).collect();
                (port, Vec::new(), devices)
            }
            "PCIDev" if is_gpu(object) => {
                self.gpus.push(object);
                return Some(self.function(object, PciKind::Gpu));
            }
            "PCIDev" if class(object).starts_with(NETWORK) => {
                (PciKind::Nic, objects(object).filter_map(|device| self.nic(device)).collect(), Vec::new())
            }
            _ => return None,
        };
        let empty = nics.is_empty() && devices.is_empty();
        (!empty).then(|| PciObservation { nics, devices, ..self.function(object, port) })
    }

    fn function(&mut self, object: &Element, kind: PciKind) -> PciObservation {
        let pci = address(object);
        if pci.is_none() {
            self.notes.add(object, "without a PCI address");
        }
        let number = class(object).get(..4).and_then(|class| u16::from_str_radix(class, 16).ok());
        let class = number.filter(|_| kind == PciKind::Gpu).and_then(DisplayClass::new);
        PciObservation { pci, kind, class, link: None, numa: None, nics: Vec::new(), devices: Vec::new() }
    }

    fn nic(&self, device: &Element) -> Option<NicObservation> {
        let number: u32 = device.get("osdev_type")?.parse().ok()?;
        // A number before version 3, then a set: bit 4 is a network interface, bit 5 an RDMA device.
        let kind = match (self.version, number) {
            (..=2, 3) => NicKind::Rdma,
            (..=2, 2) => NicKind::Ethernet,
            (3.., set) if set & 1 << 5 != 0 => NicKind::Rdma,
            (3.., set) if set & 1 << 4 != 0 => NicKind::Ethernet,
            _ => return None,
        };
        let name = device.get("name").filter(|name| !name.is_empty())?;
        Some(NicObservation { name: excerpt(name), kind, mbps: None })
    }
}

/// The GPUs in NVML's order where hwloc recorded it, else by PCI address, with what their NVML and CUDA devices have.
fn gpus_in_order(functions: Vec<&Element>, notes: &mut Notes) -> Vec<GpuObservation> {
    let nvml_index = |function: &Element| {
        let mut names = objects(function).filter_map(|device| device.get("name"));
        names.find_map(|name| name.strip_prefix("nvml")?.parse::<u32>().ok())
    };
    let (mut found, mut addresses) = (Vec::new(), BTreeSet::new());
    for function in functions {
        match address(function) {
            Some(pci) if addresses.insert(pci) => found.push((nvml_index(function), pci, function)),
            Some(_) => notes.add(function, "another GPU at this PCI address; the first is kept"),
            None => notes.add(function, "a GPU without a PCI address; left out"),
        }
    }
    found.sort_by_key(|(index, pci, _)| (index.is_none(), *index, *pci));
    let gpus = found.into_iter().zip(0..).map(|((_, pci, function), index)| {
        let gpu = bare_gpu(index, pci);
        let uuid = info(objects(function), "NVIDIAUUID").and_then(|uuid| uuid.parse().ok());
        let model = info(objects(function), "GPUModel").map(excerpt);
        GpuObservation { uuid: uuid.unwrap_or(gpu.uuid), model, ..gpu }
    });
    gpus.collect()
}

fn cpu(package: &Element) -> CpuObservation {
    let text = |key: &str| info([package], key).map(|value| value.trim().to_owned());
    let number = |key: &str| text(key)?.parse().ok();
    CpuObservation {
        arch: String::new(),
        vendor: text("CPUVendor"),
        family: number("CPUFamilyNumber"),
        model: number("CPUModelNumber"),
    }
}

/// In version 1 a package lies inside of its NUMA node where both have the same CPUs.
fn only_package_below(node: &Element) -> Option<PackageId> {
    fn collect(object: &Element, packages: &mut Vec<Option<u32>>) {
        for below in objects(object) {
            if is(below, &["Package", "Socket"]) {
                packages.push(os_index(below));
            } else {
                collect(below, packages);
            }
        }
    }
    let mut packages = Vec::new();
    collect(node, &mut packages);
    packages.first().copied().flatten().filter(|_| packages.len() == 1).map(PackageId)
}

/// The objects right below an element.
fn objects(element: &Element) -> impl Iterator<Item = &Element> {
    element.children.iter().filter(|child| child.name == "object")
}

fn kind(object: &Element) -> &str {
    object.get("type").unwrap_or_default()
}

fn is(object: &Element, kinds: &[&str]) -> bool {
    kinds.contains(&kind(object))
}

fn os_index(object: &Element) -> Option<u32> {
    object.get("os_index")?.parse().ok()
}

fn address(function: &Element) -> Option<PciAddress> {
    function.get("pci_busid")?.parse().ok()
}

/// Class, vendor and device, subsystem, revision: `0302 [10de:1db8] [10de:131d] a1`.
fn class(function: &Element) -> &str {
    function.get("pci_type").unwrap_or_default()
}

fn is_gpu(function: &Element) -> bool {
    let vendor = class(function).split_once('[').and_then(|(_, ids)| ids.split_once(':')).map(|(vendor, _)| vendor);
    class(function).starts_with(DISPLAY) && vendor == Some(NVIDIA)
}

/// The first value that is not empty of a key among the infos of these elements.
fn info<'d>(elements: impl IntoIterator<Item = &'d Element>, key: &str) -> Option<&'d str> {
    let infos = elements.into_iter().flat_map(|element| &element.children);
    let mut values = infos.filter(|info| info.name == "info" && info.get("name") == Some(key));
    values.find_map(|info| info.get("value").filter(|value| !value.is_empty()))
}

/// The CPUs of an object, as the kernel lists them.
fn cpus(object: &Element) -> String {
    object.get("cpuset").and_then(list).unwrap_or_default()
}

/// `0-15,32-47` of `0x0000ffff,0x0000ffff`; words of zeros may be empty.
fn list(mask: &str) -> Option<String> {
    cpu_list(mask, |word| match word.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => word.is_empty().then_some(0),
    })
}

#[cfg(test)]
mod tests;
