//! The `pci` elements: GPUs, NICs and switches, recognised by their content or else by their PCI class.
//!
//! NCCL writes every second bridge between a device and its CPU, so that one element stands for both ports of a switch.

use super::Candidate;
use super::{Found, Notes};
use crate::machines::nccl;
use crate::machines::xml::{Element, below, name};
use linkwise_core::quote::{excerpt, quoted};
use linkwise_core::topology::{
    DisplayClass, HostBridgeObservation, NumaNodeId, PciAddress, PciKind, PciObservation, PcieLink,
};

/// NVIDIA's PCI vendor id, as the kernel writes it.
const NVIDIA: &str = "0x10de";

/// Reads an element directly below a `cpu`, as a host bridge of its own.
pub(super) fn below_cpu<'d>(
    element: Element<'d>,
    numa: Option<NumaNodeId>,
    found: &mut Found<'d>,
) -> Option<HostBridgeObservation> {
    match name(element) {
        "pci" => {
            let device = observe(element, found)?;
            Some(HostBridgeObservation { numa, package: None, root: None, devices: vec![device] })
        }
        // NCCL writes these for virtual interfaces, such as bridges and tunnels, which have no place in the tree.
        "nic" => found.notes.none(element, "a NIC without a PCI function is virtual; left out"),
        _ => found.notes.none(element, "not expected below <cpu>; left out"),
    }
}

/// A GPU, NIC or switch with the devices below. The recursion is as deep as the document, whose depth is bounded.
fn observe<'d>(element: Element<'d>, found: &mut Found<'d>) -> Option<PciObservation> {
    let pci = address(element, "busid", &mut found.notes);
    let link = link(element, &mut found.notes);
    let (mut gpu, mut nics, mut devices) = (None, Vec::new(), Vec::new());
    for child in below(element) {
        match name(child) {
            "pci" => devices.extend(observe(child, found)),
            "gpu" if gpu.is_none() => gpu = Some(child),
            "gpu" if child.has_attribute("mlopart") => {
                found.notes.add(child, "a part of a GPU that is divided by MLOPart; the parts are taken as one GPU");
            }
            "nic" => nics.extend(nccl::interfaces(child, Some(element), &mut found.notes)),
            // A link between switches changes no level.
            "pcilink" => {}
            _ => found.notes.add(child, "not expected here; left out"),
        }
    }
    let has_below = below(element).any(|child| name(child) == "pci");
    let kind = kind(element, gpu.is_some(), !nics.is_empty(), has_below, found)?;
    match kind {
        PciKind::Gpu => match pci {
            Some(pci) => found.gpus.push(Candidate { pci, link, function: element, element: gpu }),
            None => return found.notes.none(element, "a GPU without a PCI address; left out"),
        },
        PciKind::Nic if nics.is_empty() => {
            found.has_unnamed_nics = true;
            nics.push(nccl::unnamed_nic(element, pci));
        }
        _ => {}
    }
    let empty = kind == PciKind::Switch && devices.is_empty();
    let class = (kind == PciKind::Gpu).then(|| class(element)).flatten();
    (!empty).then(|| PciObservation { class, link, nics, devices, ..PciObservation::new(pci, kind) })
}

/// A GPU's class; unknown if NCCL wrote a bare 0x03.
fn class(element: Element<'_>) -> Option<DisplayClass> {
    let digits = element.attribute("class")?.strip_prefix("0x")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok().and_then(DisplayClass::new)
}

/// The kind of a function; `None` for one that is not a GPU, NIC or switch.
fn kind(element: Element<'_>, has_gpu: bool, has_nic: bool, has_below: bool, found: &mut Found<'_>) -> Option<PciKind> {
    let class = element.attribute("class").unwrap_or_default().to_ascii_lowercase();
    // The first digits decide, as in NCCL, which writes a bare 0x03 or 0x02 if sysfs gave no class.
    let is = |prefix: &str| class.starts_with(prefix);
    let is_foreign = element.attribute("vendor").is_some_and(|vendor| !vendor.eq_ignore_ascii_case(NVIDIA));
    Some(match () {
        () if has_gpu => PciKind::Gpu,
        () if has_nic => PciKind::Nic,
        // A display controller of another vendor belongs to the server's management controller.
        () if is("0x03") && is_foreign => return None,
        () if is("0x0300") || is("0x0302") || class == "0x03" => PciKind::Gpu,
        () if is("0x02") => PciKind::Nic,
        // Bridges, and the data-direct functions of ConnectX-8, are switches if a device is below them.
        () if is("0x0604") || is("0x0801") || is("0x0680") => PciKind::Switch,
        () if has_below => {
            if !class.is_empty() {
                let class = excerpt(&class);
                found.notes.add(element, format!("class {class} with devices below; taken as a switch"));
            }
            PciKind::Switch
        }
        () if class.is_empty() => return found.notes.none(element, "without a class, a gpu or a nic; left out"),
        () => {
            let class = excerpt(&class);
            return found.notes.none(element, format!("class {class} is neither GPU, NIC nor bridge; left out"));
        }
    })
}

/// A PCI address; a missing or invalid one is noted.
fn address(element: Element<'_>, attribute: &str, notes: &mut Notes) -> Option<PciAddress> {
    let Some(text) = element.attribute(attribute) else {
        return notes.none(element, format!("without a {attribute}"));
    };
    let address = text.parse().ok();
    if address.is_none() {
        notes.add(element, format!("{attribute} {} is not a PCI address; taken as unknown", quoted(text)));
    }
    address
}

/// The greatest speed of a link: NCCL takes the lesser of both ends' maxima. A link without speed or width is unknown.
fn link(element: Element<'_>, notes: &mut Notes) -> Option<PcieLink> {
    let speed = element.attribute("link_speed").filter(|speed| !speed.is_empty() && !speed.starts_with("Unknown"));
    let mts = speed.and_then(|speed| {
        let mts = PcieLink::megatransfers(speed);
        if mts.is_none() {
            notes.add(element, format!("link_speed {} is not a speed; taken as unknown", quoted(speed)));
        }
        mts
    });
    let width = notes.number(element, "link_width").filter(|width| *width > 0);
    let (mts, width) = (mts?, width?);
    let link = PcieLink::new(mts, width);
    if link.is_none() {
        notes.add(element, format!("{mts} MT/s x{width} is not a PCIe link; taken as unknown"));
    }
    link
}
