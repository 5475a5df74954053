//! hwloc's XML (`lstopo host.xml`), versions 1 to 3: the host, and the NVIDIA GPUs that hwloc recorded.
//!
//! Owns the meaning of its objects and attributes (source: hwloc's topology-xml.c), for the parts that linkwise uses.
//! Such a file has neither the greatest speeds of PCIe links nor the rates of NICs nor the numbers of NVLinks.
//! linkwise reads it without libhwloc, which reads no version later than its own and whose parser depends on the
//! installed libraries. Called by `load`, for files and for the XML that libhwloc makes of this host.

use std::collections::{BTreeMap, BTreeSet};

use super::xml::Notes;
use super::xml::{self, Element, Limits, XmlError, below};
use super::{Machine, VERSION, cpu_list, unnamed_gpu};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{
    CpuObservation, DisplayClass, GpuObservation, Guid, HostBridgeObservation, HostObservation, NicKind,
    NicObservation, NodeObservation, NumaNodeId, NumaNodeObservation, PackageId, PciAddress, PciKind, PciObservation,
};

/// The limits, enough for a host of thousands of CPUs, whose cores and caches nest less than 40 deep. Elements that are
/// not read may have text.
const LIMITS: Limits = Limits { depth: 128, elements: 1 << 17, can_have_text: true };
/// The most bridges inside of each other. Real ones stay below 12; a node file takes two levels for each, and its
/// reader stops at 64.
const MAX_BRIDGES: usize = 24;
/// PCI base classes (PCI Code and ID Assignment): display controllers, network controllers with InfiniBand.
const DISPLAY: &str = "03";
const NETWORK: &str = "02";
const NVIDIA: &str = "10de";
/// The ports of an RDMA device; no card has more.
const PORTS: [&str; 2] = ["1", "2"];

/// Reads a file by its root element; `name` becomes the machine's name.
pub(super) fn parse(name: &str, topology: Element<'_>) -> Result<Machine, XmlError> {
    xml::check(topology, &LIMITS)?;
    let version = version(topology)?;
    let Some(root) = objects(topology).find(|object| ["Machine", "System"].contains(&kind(*object))) else {
        return Err(XmlError::at(topology, "no Machine object in the hwloc XML"));
    };
    let mut notes = Notes::new("hwloc XML");
    let all = |is_wanted: fn(Element<'_>) -> bool| root.descendants().filter(move |object| is_wanted(*object));
    let inside = packages_inside(root);
    let nodes =
        all(|object| kind(object) == "NUMANode").filter_map(|node| numa_node(node, &inside, &mut notes)).collect();
    let bridges = all(is_host_bridge).filter_map(|bridge| host_bridge(bridge, version, &inside, &mut notes)).collect();
    let package = all(is_package).next();
    let mut host = HostObservation { cpu: package.map(cpu), numa_nodes: nodes, host_bridges: bridges };
    // Before version 2, a host with a single NUMA node had no such object.
    if host.numa_nodes.is_empty() {
        host.numa_nodes.push(NumaNodeObservation { id: NumaNodeId(0), package: None, cpus: cpus(root) });
    }
    if host.numa_nodes.len() == 1 {
        // hwloc gives a host's only NUMA node to each bridge, even where the kernel knows none.
        host.host_bridges.iter_mut().for_each(|bridge| bridge.numa = None);
    }
    if let Some(cpu) = &mut host.cpu {
        // The architecture is a fact of the machine before version 3, and of the whole topology from then on.
        cpu.arch = info([root, topology], "Architecture").map(excerpt).unwrap_or_default();
    }
    let gpus = gpus_in_order(all(is_gpu), &mut notes);
    Ok(Machine {
        version: VERSION,
        name: name.to_owned(),
        title: format!("{name}: {} GPUs by a hwloc XML", gpus.len()),
        source: vec!["hwloc XML".to_owned()],
        reconstructed: vec![
            "UUIDs are made from PCI addresses where hwloc has none".to_owned(),
            "NVLinks and the greatest speeds of PCIe links are unknown: not read from hwloc XML".to_owned(),
        ],
        observed: NodeObservation { gpus, host, failures: notes.into_failures(), ..NodeObservation::default() },
    })
}

/// The major version; 1 if there is none, because hwloc 1 did not write it.
fn version(topology: Element<'_>) -> Result<u32, XmlError> {
    let Some(found) = topology.attribute("version") else { return Ok(1) };
    let major = found.split('.').next().and_then(|major| major.parse().ok());
    major
        .filter(|major| (1..=3).contains(major))
        .ok_or_else(|| XmlError::version(topology, "hwloc XML", found, "versions 1 to 3"))
}

fn numa_node(node: Element<'_>, inside: &BTreeMap<u32, Option<u32>>, notes: &mut Notes) -> Option<NumaNodeObservation> {
    let Some(id) = os_index(node).map(NumaNodeId) else {
        return notes.none(node, "a NUMA node without a number; left out");
    };
    Some(NumaNodeObservation { id, package: package(node, inside), cpus: cpus(node) })
}

fn host_bridge(
    bridge: Element<'_>,
    version: u32,
    inside: &BTreeMap<u32, Option<u32>>,
    notes: &mut Notes,
) -> Option<HostBridgeObservation> {
    let below = objects(bridge).filter_map(|below| device(below, PciKind::RootPort, 1, version, notes));
    let devices: Vec<_> = below.collect();
    // The parent object lists the NUMA nodes local to the bridge. A list of one node is a number.
    let nodes = bridge.parent_element().and_then(|local| cpu_list(local.attribute("nodeset")?));
    let numa = nodes.and_then(|nodes| nodes.parse().ok()).map(NumaNodeId);
    let package = package(bridge, inside);
    (!devices.is_empty()).then_some(HostBridgeObservation { numa, package, root: None, devices })
}

/// A GPU or NIC, or a bridge with such devices below. Upstream and downstream ports alternate on the way down; `port`
/// is the kind of port that a bridge at this depth is.
fn device(object: Element<'_>, port: PciKind, depth: usize, version: u32, notes: &mut Notes) -> Option<PciObservation> {
    let (kind, nics, devices) = match kind(object) {
        "Bridge" if depth > MAX_BRIDGES => {
            return notes.none(object, format!("bridges nest deeper than {MAX_BRIDGES}; left out"));
        }
        "Bridge" => {
            let below = match port {
                PciKind::UpstreamPort => PciKind::DownstreamPort,
                _ => PciKind::UpstreamPort,
            };
            let devices = objects(object).filter_map(|object| device(object, below, depth + 1, version, notes));
            (port, Vec::new(), devices.collect())
        }
        "PCIDev" if is_gpu(object) => (PciKind::Gpu, Vec::new(), Vec::new()),
        "PCIDev" if pci_type(object).starts_with(NETWORK) => {
            let nics = objects(object).filter_map(|device| nic(device, version)).collect();
            (PciKind::Nic, NicObservation::without_ipoib(class_number(object).unwrap_or(0), nics), Vec::new())
        }
        _ => return None,
    };
    if kind != PciKind::Gpu && nics.is_empty() && devices.is_empty() {
        return None;
    }
    let pci = address(object);
    if pci.is_none() {
        notes.add(object, "without a PCI address");
    }
    let class = class_number(object).filter(|_| kind == PciKind::Gpu).and_then(DisplayClass::new);
    Some(PciObservation { class, nics, devices, ..PciObservation::new(pci, kind) })
}

fn nic(device: Element<'_>, version: u32) -> Option<NicObservation> {
    let number: u32 = device.attribute("osdev_type")?.parse().ok()?;
    // The value is a number before version 3, and a set from then on: bit 4 is a network interface, bit 5 an RDMA
    // device.
    let kind = match (version, number) {
        (..=2, 3) => NicKind::Rdma,
        (..=2, 2) => NicKind::Ethernet,
        (3.., set) if set & 1 << 5 != 0 => NicKind::Rdma,
        (3.., set) if set & 1 << 4 != 0 => NicKind::Ethernet,
        _ => return None,
    };
    let name = device.attribute("name").filter(|name| !name.is_empty())?;
    // Only a port of InfiniBand has a LID that is not 0.
    let guid = |port: &str| {
        info([device], &format!("Port{port}LID")).filter(|lid| *lid != "0x0")?;
        Guid::of_gid(info([device], &format!("Port{port}GID0"))?)
    };
    Some(NicObservation {
        system_guid: info([device], "SysImageGUID").and_then(|guid| guid.parse().ok()),
        port_guids: PORTS.into_iter().filter_map(guid).collect(),
        ..NicObservation::new(excerpt(name), kind)
    })
}

/// The GPUs with the facts of their NVML and CUDA devices, in NVML's order if hwloc recorded it, otherwise by PCI
/// address.
fn gpus_in_order<'d>(functions: impl Iterator<Item = Element<'d>>, notes: &mut Notes) -> Vec<GpuObservation> {
    let nvml_index = |function: Element<'_>| {
        let mut names = objects(function).filter_map(|device| device.attribute("name"));
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
        let gpu = unnamed_gpu(index, pci);
        let uuid = info(objects(function), "NVIDIAUUID").and_then(|uuid| uuid.parse().ok());
        let model = info(objects(function), "GPUModel").map(excerpt);
        GpuObservation { uuid: uuid.unwrap_or(gpu.uuid), model, ..gpu }
    });
    gpus.collect()
}

fn cpu(package: Element<'_>) -> CpuObservation {
    let text = |key: &str| info([package], key).map(|value| excerpt(value.trim()));
    let number = |key: &str| text(key)?.parse().ok();
    CpuObservation {
        arch: String::new(),
        vendor: text("CPUVendor"),
        family: number("CPUFamilyNumber"),
        model: number("CPUModelNumber"),
    }
}

/// The number of the only package inside of each NUMA node, by the id of the node's element. In version 1 a package
/// lies inside of its NUMA node if both have the same CPUs.
fn packages_inside(root: Element<'_>) -> BTreeMap<u32, Option<u32>> {
    let mut inside = BTreeMap::new();
    for package in root.descendants().filter(|object| is_package(*object)) {
        for node in package.ancestors().filter(|above| kind(*above) == "NUMANode") {
            inside.entry(node.id().get()).and_modify(|only| *only = None).or_insert(os_index(package));
        }
    }
    inside
}

/// The package that an object lies in, or that lies in its NUMA node.
fn package(object: Element<'_>, inside: &BTreeMap<u32, Option<u32>>) -> Option<PackageId> {
    let inside = |above: Element<'_>| inside.get(&above.id().get()).copied().flatten();
    let of = |above| if is_package(above) { os_index(above) } else { inside(above) };
    object.ancestors().find_map(of).map(PackageId)
}

/// The objects right below an element.
fn objects(element: Element<'_>) -> impl Iterator<Item = Element<'_>> {
    below(element).filter(|child| child.has_tag_name("object"))
}

/// The kind of an object; empty for an element that is not an object.
fn kind(object: Element<'_>) -> &str {
    object.attribute("type").filter(|_| object.has_tag_name("object")).unwrap_or_default()
}

fn is_package(object: Element<'_>) -> bool {
    ["Package", "Socket"].contains(&kind(object))
}

/// Returns true for a bridge whose upstream side is the host, and which is not right below another bridge.
fn is_host_bridge(object: Element<'_>) -> bool {
    let from_host = object.attribute("bridge_type").is_some_and(|kind| kind.starts_with("0-"));
    from_host && object.parent_element().is_some_and(|above| kind(above) != "Bridge")
}

fn os_index(object: Element<'_>) -> Option<u32> {
    object.attribute("os_index")?.parse().ok()
}

fn address(function: Element<'_>) -> Option<PciAddress> {
    function.attribute("pci_busid")?.parse().ok()
}

/// Class, vendor and device, subsystem, revision: `0302 [10de:1db8] [10de:131d] a1`.
fn pci_type(function: Element<'_>) -> &str {
    function.attribute("pci_type").unwrap_or_default()
}

/// Base class and subclass.
fn class_number(function: Element<'_>) -> Option<u16> {
    u16::from_str_radix(pci_type(function).get(..4)?, 16).ok()
}

fn is_gpu(function: Element<'_>) -> bool {
    let ids = pci_type(function).split_once('[').and_then(|(_, ids)| ids.split_once(':'));
    let is_nvidia = ids.is_some_and(|(vendor, _)| vendor == NVIDIA);
    kind(function) == "PCIDev" && pci_type(function).starts_with(DISPLAY) && is_nvidia
}

/// The first non-empty value of a key among the infos of these elements.
fn info<'d>(elements: impl IntoIterator<Item = Element<'d>>, key: &str) -> Option<&'d str> {
    let infos = elements.into_iter().flat_map(below);
    let mut values = infos.filter(|info| info.has_tag_name("info") && info.attribute("name") == Some(key));
    values.find_map(|info| info.attribute("value").filter(|value| !value.is_empty()))
}

/// The CPUs of an object, as the kernel lists them.
fn cpus(object: Element<'_>) -> String {
    object.attribute("cpuset").and_then(cpu_list).unwrap_or_default()
}

#[cfg(test)]
mod tests;
