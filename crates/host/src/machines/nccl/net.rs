//! `nic` and `net`: network cards and their interfaces.

use super::Notes;
use crate::machines::xml::{Element, below, name};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{Guid, NicKind, NicObservation, PciAddress};

/// The first parts of the kernel's names of RDMA devices, by driver.
const RDMA_NAMES: [&str; 11] =
    ["mlx", "rdma", "efa", "bnxt_re", "irdma", "ib", "roce", "hns", "erdma", "cxgb4_", "qedr"];
const INFINIBAND: &str = "0x0207";
/// The vendors whose network functions in a GPU machine all do RDMA: Mellanox, and Amazon by its EFA ids.
const MELLANOX: &str = "0x15b3";
const AMAZON: &str = "0x1d0f";
const EFA: &str = "0xefa";

/// The interfaces of a `nic`; `function` is its PCI function.
pub(super) fn interfaces(nic: Element<'_>, function: Option<Element<'_>>, notes: &mut Notes) -> Vec<NicObservation> {
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
        let rdma = function.is_some_and(is_rdma)
            || system_guid.is_some()
            || RDMA_NAMES.iter().any(|rdma| name.starts_with(rdma));
        let kind = if rdma { NicKind::Rdma } else { NicKind::Ethernet };
        let mbps = notes.number(net, "speed").filter(|mbps| *mbps > 0);
        interfaces.push(NicObservation { mbps, system_guid, ..NicObservation::new(excerpt(name), kind) });
    }
    interfaces
}

/// The interface of a card with only its PCI function listed.
pub(super) fn unnamed(function: Element<'_>, pci: Option<PciAddress>) -> NicObservation {
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

/// The system image GUID of an interface. NCCL's socket transport counts from 0 in its place.
fn system_guid(text: &str) -> Option<Guid> {
    let number = u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
    // NCCL prints the GUID as the verbs library has it, in network byte order.
    Guid::new(number.swap_bytes()).filter(|_| number > u64::from(u16::MAX))
}
