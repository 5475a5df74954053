//! Writes an NCCL topology file of an observed machine, for NCCL_TOPO_FILE: the counterpart of [`super::parse`]. Pure.
//!
//! NCCL finds its own GPUs and NICs in the file by `busid`, leaves out devices that no rank of the job has, and asks
//! driver and kernel for attributes that an element lacks (src/graph/xml.cc). So attributes that differ from container
//! to container (a GPU's `dev` and a NIC's `net`) are not written, and neither are unobserved facts. If the host's tree
//! lacks GPUs, as in some VMs, NVML's levels become switches with invented addresses, as in the clouds' files.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::machines::cpus;
use linkwise_core::topology::{
    CpuObservation, Gpu, GpuObservation, HostBridgeObservation, HostObservation, NicKind, NodeObservation,
    NodeTopology, NumaNodeId, NvLinkRemote, PciAddress, PciKind, PciObservation, PcieLink, Rank, TopologyLevel,
};

/// PCI classes: a PCI bridge, a 3D controller, an InfiniBand and an Ethernet controller, an NVSwitch, a POWER
/// processor's bridge.
const BRIDGE: &str = "0x060400";
const GPU: &str = "0x030200";
const INFINIBAND: &str = "0x020700";
const ETHERNET: &str = "0x020000";
const NVSWITCH: &str = "0x068000";
const NPU: &str = "0x068001";

/// NVML's address of a switch in a VM that does not show it.
const HIDDEN_SWITCH: &str = "ffffffff:ff:ff.0";

/// The longest value that NCCL reads (`MAX_STR_LEN`).
const LONGEST_VALUE: usize = 255;

/// Returns the text of a topology file; equal observations give equal texts, so that texts can be compared.
pub fn topology_file(observed: &NodeObservation) -> String {
    let (topology, _) = NodeTopology::assemble(observed);
    let mut writer = Writer { observed, topology: &topology, made_up: 0 };
    let mut below: BTreeMap<Option<NumaNodeId>, Vec<Element>> = BTreeMap::new();
    let mut shown = Vec::new();
    for bridge in &observed.host.host_bridges {
        for device in &bridge.devices {
            for element in writer.device(device, None) {
                below.entry(writer.numa(&element, device, bridge)).or_default().push(element);
            }
        }
    }
    below.values().flatten().for_each(|element| element.gpus(&mut shown));
    for (numa, element) in writer.hidden(&shown) {
        below.entry(numa).or_default().push(element);
    }
    let mut text = "<system version=\"1\">\n".to_owned();
    for (numa, children) in below {
        Element { children, ..cpu(numa, &observed.host) }.write(1, &mut text);
    }
    text + "</system>\n"
}

/// An element with its attributes in order.
#[derive(Default)]
struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    children: Vec<Element>,
    gpu: Option<PciAddress>,
}

impl Element {
    fn new(name: &'static str) -> Self {
        Self { name, ..Self::default() }
    }

    /// Adds an attribute. Values that are too long, or that need an escape, which NCCL does not parse, are left out.
    fn with(self, attribute: &'static str, value: impl ToString) -> Self {
        self.maybe(attribute, Some(value))
    }

    fn maybe(mut self, attribute: &'static str, value: Option<impl ToString>) -> Self {
        let plain = |value: &String| value.chars().all(|c| c.is_ascii_alphanumeric() || " .,:/-_+".contains(c));
        let value = value.map(|value| value.to_string());
        let value = value.filter(|value| plain(value) && value.len() <= LONGEST_VALUE);
        self.attributes.extend(value.map(|value| (attribute, value)));
        self
    }

    fn pci(busid: impl ToString, class: &str, link: Option<PcieLink>) -> Self {
        let speed = link.map(|PcieLink { mts, .. }| format!("{}.{} GT/s PCIe", mts / 1000, mts % 1000 / 100));
        let element = Self::new("pci").with("busid", busid).with("class", class);
        element.maybe("link_speed", speed).maybe("link_width", link.map(|link| link.width))
    }

    fn gpus(&self, found: &mut Vec<PciAddress>) {
        found.extend(self.gpu);
        self.children.iter().for_each(|child| child.gpus(found));
    }

    fn write(&self, depth: usize, text: &mut String) {
        let blanks = "  ".repeat(depth);
        // Writing to a text cannot fail.
        _ = write!(text, "{blanks}<{}", self.name);
        for (attribute, value) in &self.attributes {
            _ = write!(text, " {attribute}=\"{value}\"");
        }
        if self.children.is_empty() {
            text.push_str("/>\n");
            return;
        }
        text.push_str(">\n");
        self.children.iter().for_each(|child| child.write(depth + 1, text));
        _ = writeln!(text, "{blanks}</{}>", self.name);
    }
}

struct Writer<'o> {
    observed: &'o NodeObservation,
    topology: &'o NodeTopology,
    /// The number of invented addresses.
    made_up: u32,
}

impl Writer<'_> {
    /// The elements of a device; `port` is the link of the port above it. NCCL models switches, neither their ports
    /// nor root ports.
    fn device(&mut self, device: &PciObservation, port: Option<PcieLink>) -> Vec<Element> {
        let link = lesser(device.link, port);
        match device.kind {
            PciKind::RootPort | PciKind::DownstreamPort => {
                device.devices.iter().flat_map(|below| self.device(below, device.link)).collect()
            }
            PciKind::UpstreamPort | PciKind::Switch => {
                let children: Vec<Element> = device.devices.iter().flat_map(|below| self.device(below, None)).collect();
                if children.is_empty() {
                    return children;
                }
                let busid = device.pci.map_or_else(|| self.address(), |pci| pci.to_string());
                vec![Element { children, ..Element::pci(busid, BRIDGE, link) }]
            }
            PciKind::Gpu => device.pci.and_then(|pci| Some(self.gpu(self.observed(pci)?, link))).into_iter().collect(),
            PciKind::Nic => {
                let rdma = device.nics.iter().any(|nic| nic.kind == NicKind::Rdma);
                let class = if rdma { INFINIBAND } else { ETHERNET };
                // Without its address NCCL would never find the device.
                device.pci.map(|pci| Element::pci(pci, class, link)).into_iter().collect()
            }
        }
    }

    fn observed(&self, pci: PciAddress) -> Option<&GpuObservation> {
        self.observed.gpus.iter().find(|gpu| gpu.pci == pci)
    }

    fn gpu(&self, gpu: &GpuObservation, link: Option<PcieLink>) -> Element {
        let function = Element::pci(gpu.pci, GPU, link.or(gpu.pcie));
        // With unknown links, NCCL has to ask for the whole `gpu` element: a `gpu` without links would be read as one
        // that has none.
        let Some(groups) = &gpu.nvlinks else { return Element { gpu: Some(gpu.pci), ..function } };
        let sm = gpu.compute_capability.map(|sm| u64::from(sm.major) * 10 + u64::from(sm.minor));
        let mut element = Element::new("gpu").maybe("sm", sm);
        for group in groups.iter().filter(|group| group.active && !group.links.is_empty()) {
            let (target, class) = match group.remote {
                NvLinkRemote::Gpu(pci) => (pci.to_string(), GPU),
                NvLinkRemote::Switch(Some(pci)) => (pci.to_string(), NVSWITCH),
                NvLinkRemote::Switch(None) => (HIDDEN_SWITCH.to_owned(), NVSWITCH),
                NvLinkRemote::Cpu => (HIDDEN_SWITCH.to_owned(), NPU),
                NvLinkRemote::Unknown => continue,
            };
            let nvlink = Element::new("nvlink").with("target", target).with("count", group.links.len());
            element.children.push(nvlink.with("tclass", class));
        }
        Element { gpu: Some(gpu.pci), children: vec![element], ..function }
    }

    /// The NUMA node of a device directly below a host bridge: that of its first GPU, which has two sources.
    fn numa(&self, element: &Element, device: &PciObservation, bridge: &HostBridgeObservation) -> Option<NumaNodeId> {
        let mut gpus = Vec::new();
        element.gpus(&mut gpus);
        let first = gpus.first().and_then(|pci| self.topology.gpus().iter().find(|gpu| gpu.pci == *pci));
        first.and_then(numa).or(device.numa).or(bridge.numa)
    }

    /// The GPUs that are not in the host's tree: below switches if NVML's levels imply them, otherwise below their NUMA
    /// node.
    fn hidden(&mut self, shown: &[PciAddress]) -> Vec<(Option<NumaNodeId>, Element)> {
        let all = self.topology.gpus();
        let places: Vec<usize> =
            (0..all.len()).filter(|place| all.get(*place).is_some_and(|gpu| !shown.contains(&gpu.pci))).collect();
        let mut elements = Vec::new();
        for wide in self.together(&places, Rank::HOST_BRIDGE) {
            let numa = wide.first().and_then(|place| all.get(*place)).and_then(numa);
            let parts = self.together(&wide, Rank::new(TopologyLevel::Multiple, false));
            let switched = parts.len() > 1;
            let mut switches = Vec::new();
            for part in parts {
                let observed = part.iter().filter_map(|place| self.observed(all.get(*place)?.pci));
                let gpus: Vec<Element> = observed.map(|gpu| self.gpu(gpu, None)).collect();
                // A path through several switches makes PXB, even if each switch has one GPU.
                if switched || gpus.len() > 1 {
                    switches.push(self.switch(gpus));
                } else {
                    switches.extend(gpus);
                }
            }
            let top = if switched { vec![self.switch(switches)] } else { switches };
            elements.extend(top.into_iter().map(|element| (numa, element)));
        }
        elements
    }

    /// Splits these GPUs into parts, in order: each has all GPUs that are nearer to its first one than `below`.
    fn together(&self, places: &[usize], below: Rank) -> Vec<Vec<usize>> {
        let mut parts: Vec<Vec<usize>> = Vec::new();
        for &place in places {
            let near =
                |part: &&mut Vec<usize>| part.first().is_some_and(|first| self.topology.rank(*first, place) < below);
            match parts.iter_mut().find(near) {
                Some(part) => part.push(place),
                None => parts.push(vec![place]),
            }
        }
        parts
    }

    /// A switch that was not observed.
    fn switch(&mut self, children: Vec<Element>) -> Element {
        Element { children, ..Element::pci(self.address(), BRIDGE, None) }
    }

    /// An address that no machine has: bus 255 of the last domain; device 31 is used last.
    fn address(&mut self) -> String {
        let number = self.made_up;
        self.made_up = self.made_up.saturating_add(1);
        let bus = 0xff_u32.saturating_sub(number / 256);
        format!("ffff:{bus:02x}:{:02x}.{}", number % 256 / 8, number % 8)
    }
}

/// The NUMA node of a GPU: one with CPUs if there is one.
fn numa(gpu: &Gpu) -> Option<NumaNodeId> {
    gpu.cpu_node.or(gpu.numa)
}

/// The lesser end of a link, if both ends are known.
fn lesser(a: Option<PcieLink>, b: Option<PcieLink>) -> Option<PcieLink> {
    let carries = |link: &PcieLink| u64::from(link.mts) * u64::from(link.width);
    [a, b].into_iter().flatten().filter(|link| carries(link) > 0).min_by_key(carries)
}

fn cpu(numa: Option<NumaNodeId>, host: &HostObservation) -> Element {
    let id = numa.map_or("-1".to_owned(), |numa| numa.to_string());
    let node = host.numa_nodes.iter().find(|node| Some(node.id) == numa);
    let element = Element::new("cpu").with("numaid", id).maybe("affinity", node.and_then(|node| mask(&node.cpus)));
    let Some(CpuObservation { arch, vendor, family, model }) = &host.cpu else { return element };
    let arch = match arch.as_str() {
        "aarch64" => "arm64",
        "ppc64le" => "ppc64",
        other => other,
    };
    // NCCL reads both or neither from the processor, and counts the extended family 16-fold.
    let (family, model) = family.zip(*model).unzip();
    let family = family.map(|family| family.checked_sub(0xf).map_or(family, |more| more.saturating_mul(16) | 0xf));
    let element = element.with("arch", arch).maybe("vendor", vendor.as_ref());
    element.maybe("familyid", family).maybe("modelid", model)
}

/// The kernel's mask (words of 32 bits, the highest first) of its list (`0-15,32-47`). `None` for no CPU, or for more
/// than a value has room for: then NCCL reads the mask itself.
fn mask(list: &str) -> Option<String> {
    let cpus = cpus(list)?;
    let word =
        |number: u32| (0..32).filter(|bit| cpus.contains(&(number * 32 + bit))).fold(0, |word, bit| word | 1u32 << bit);
    let words = (0..=cpus.last()? / 32).rev().map(|number| format!("{:08x}", word(number)));
    Some(words.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests;
