//! `pci`: GPUs, NICs and switches, recognised by what they contain and else by their PCI class.
//!
//! NCCL takes every second port on the way up, so that one element stands for a whole switch.

use super::gpu::Candidate;
use super::{Found, Notes, net};
use crate::machines::xml::Element;
use crate::quote::{excerpt, quoted};
use crate::topology::{DisplayClass, HostBridgeObservation, NumaNodeId, PciAddress, PciKind, PciObservation, PcieLink};

/// NVIDIA's PCI vendor id, as the kernel writes it.
const NVIDIA: &str = "0x10de";

/// What an element directly below a `cpu` is: a host bridge of its own.
pub(super) fn below_cpu<'d>(
    element: &'d Element,
    numa: Option<NumaNodeId>,
    found: &mut Found<'d>,
) -> Option<HostBridgeObservation> {
    match element.name.as_str() {
        "pci" => {
            let device = observe(element, found)?;
            Some(HostBridgeObservation { numa, package: None, devices: vec![device] })
        }
        // A NIC without a PCI function: NCCL hangs it on its first CPU, wherever it is.
        "nic" => {
            let nics = net::interfaces(element, None, &mut found.notes);
            let device = PciObservation { nics, ..function(None, PciKind::Nic) };
            (!device.nics.is_empty()).then(|| HostBridgeObservation {
                numa: None,
                package: None,
                devices: vec![device],
            })
        }
        _ => {
            found.notes.add(element, "not expected below <cpu>; left out");
            None
        }
    }
}

fn function(pci: Option<PciAddress>, kind: PciKind) -> PciObservation {
    PciObservation { pci, kind, class: None, link: None, numa: None, nics: Vec::new(), devices: Vec::new() }
}

/// A GPU, NIC or switch with what hangs below. The depth is that of the document, which is bounded.
fn observe<'d>(element: &'d Element, found: &mut Found<'d>) -> Option<PciObservation> {
    let pci = address(element, "busid", &mut found.notes);
    let link = link(element, &mut found.notes);
    let (mut gpu, mut nics, mut devices) = (None, Vec::new(), Vec::new());
    for child in &element.children {
        match child.name.as_str() {
            "pci" => devices.extend(observe(child, found)),
            "gpu" if gpu.is_none() => gpu = Some(child),
            "nic" => nics.extend(net::interfaces(child, Some(element), &mut found.notes)),
            // A shortcut between switches, which changes no level.
            "pcilink" => {}
            _ => found.notes.add(child, "not expected here; left out"),
        }
    }
    let has_below = element.children.iter().any(|child| child.name == "pci");
    let kind = kind(element, gpu.is_some(), !nics.is_empty(), has_below, found)?;
    match kind {
        PciKind::Gpu => match pci {
            Some(pci) => found.gpus.push(Candidate { pci, link, function: element, element: gpu }),
            None => {
                found.notes.add(element, "a GPU without a PCI address; left out");
                return None;
            }
        },
        PciKind::Nic if nics.is_empty() => {
            found.unnamed_nics = true;
            nics.push(net::unnamed(element, pci));
        }
        _ => {}
    }
    let empty = kind == PciKind::Switch && devices.is_empty();
    let class = (kind == PciKind::Gpu).then(|| class(element)).flatten();
    (!empty).then(|| PciObservation { class, link, nics, devices, ..function(pci, kind) })
}

/// A GPU's class; unknown where NCCL wrote a bare 0x03.
fn class(element: &Element) -> Option<DisplayClass> {
    let digits = element.get("class")?.strip_prefix("0x")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok().and_then(DisplayClass::new)
}

/// What a function is; `None` for one that is no GPU, NIC or switch.
fn kind(element: &Element, gpu: bool, nic: bool, has_below: bool, found: &mut Found<'_>) -> Option<PciKind> {
    let class = element.get("class").unwrap_or_default().to_ascii_lowercase();
    // As in NCCL the beginning decides: it writes a bare 0x03 or 0x02 where sysfs gave no class.
    let is = |prefix: &str| class.starts_with(prefix);
    let foreign = element.get("vendor").is_some_and(|vendor| !vendor.eq_ignore_ascii_case(NVIDIA));
    Some(match () {
        () if gpu => PciKind::Gpu,
        () if nic => PciKind::Nic,
        // A display adapter of a server's management controller.
        () if is("0x03") && foreign => return None,
        () if is("0x0300") || is("0x0302") || class == "0x03" => PciKind::Gpu,
        () if is("0x02") => PciKind::Nic,
        // Bridges, and the data-direct functions of ConnectX-8, are switches where something hangs below.
        () if is("0x0604") || is("0x0801") || is("0x0680") => PciKind::Switch,
        () if has_below => {
            if !class.is_empty() {
                let class = excerpt(&class);
                found.notes.add(element, format!("class {class} with devices below; taken as a switch"));
            }
            PciKind::Switch
        }
        () if class.is_empty() => {
            found.notes.add(element, "without a class, a gpu or a nic; left out");
            return None;
        }
        () => {
            found.notes.add(element, format!("class {} is neither GPU, NIC nor bridge; left out", excerpt(&class)));
            return None;
        }
    })
}

/// A PCI address; an invalid one is noted.
fn address(element: &Element, attribute: &str, notes: &mut Notes) -> Option<PciAddress> {
    let Some(text) = element.get(attribute) else {
        notes.add(element, format!("without a {attribute}"));
        return None;
    };
    let address = text.parse().ok();
    if address.is_none() {
        notes.add(element, format!("{attribute} {} is no PCI address; taken as unknown", quoted(text)));
    }
    address
}

/// What a link can do: to NCCL the lesser of both ends' maxima. No speed or no width is an unknown link.
fn link(element: &Element, notes: &mut Notes) -> Option<PcieLink> {
    let speed = element.get("link_speed").filter(|speed| !speed.is_empty() && !speed.starts_with("Unknown"));
    let mts = speed.and_then(|speed| {
        let mts = megatransfers(speed);
        if mts.is_none() {
            notes.add(element, format!("link_speed {} is no speed; taken as unknown", quoted(speed)));
        }
        mts
    });
    let width = notes.number(element, "link_width").filter(|width| *width > 0);
    Some(PcieLink { mts: mts?, width: width? })
}

/// "16.0 GT/s PCIe", on older kernels "8 GT/s": the number in megatransfers.
fn megatransfers(text: &str) -> Option<u32> {
    let (number, unit) = text.split_once(' ')?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let tenths = |digit: &str| digit.parse::<u32>().ok().filter(|_| digit.len() == 1);
    let part = tenths(part)?.checked_mul(100)?;
    let mts = whole.parse::<u32>().ok()?.checked_mul(1_000)?.checked_add(part)?;
    unit.starts_with("GT/s").then_some(mts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_speeds_parse_as_kernels_and_clouds_write_them() {
        for (text, mts) in
            [("16.0 GT/s PCIe", 16_000), ("8 GT/s", 8_000), ("2.5 GT/s PCIe", 2_500), ("32 GT/s PCIe/s", 32_000)]
        {
            assert_eq!(megatransfers(text), Some(mts), "{text}");
        }
        for text in ["", "16", "16.x GT/s", "16 Gb/s", "99999999 GT/s", "1.23 GT/s"] {
            assert_eq!(megatransfers(text), None, "{text}");
        }
    }
}
