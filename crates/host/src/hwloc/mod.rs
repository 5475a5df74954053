//! The host in hwloc's view: NUMA nodes, packages, the PCI tree down to GPUs and NICs.
//!
//! Owns the walk over hwloc's objects, and the facts that hwloc lacks and that come from sysfs: the greatest speed of a
//! PCI link (hwloc has the present one), a NUMA node of -1, a NIC's rate. Called by `src/run` and `src/commands` at start and
//! on rediscovery, never during an admission (10 to 30 ms). Knows nothing of NVML.

mod sysfs;

use std::path::Path;

use hwlocality::Topology;
use hwlocality::bitmap::Bitmap;
use hwlocality::errors::HybridError;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{ObjectAttributes, PCIDeviceAttributes, UpstreamAttributes};
use hwlocality::object::types::{BridgeType, OSDeviceType, ObjectType};
use hwlocality::topology::builder::{BuildFlags, TypeFilter};

use linkwise_core::topology::{
    CpuObservation, DisplayClass, Guid, HostBridgeObservation, HostObservation, NicKind, NicObservation, NumaNodeId,
    NumaNodeObservation, PackageId, PciAddress, PciKind, PciObservation, ProbeFailure, is_cpu_list,
};
use sysfs::Sysfs;

pub use sysfs::{BusGpus, PciBus, held_by_others, is_tegra, rdma_cm_node, rdma_nodes, wsl};

const NVIDIA: u16 = 0x10de;
/// PCI base class of display controllers (PCI Code and ID Assignment, class 03h).
const DISPLAY: u16 = 0x03;
/// PCI base class of network controllers, InfiniBand included (class 02h).
const NETWORK: u16 = 0x02;

/// Observes this host; `sysfs` is the path of its /sys. A fact that cannot be read is missing and becomes a
/// [`ProbeFailure`].
pub fn observe(sysfs: &Path) -> (HostObservation, Vec<ProbeFailure>) {
    match discover() {
        Ok(topology) => (walk(&topology, &Sysfs(sysfs.to_owned())), Vec::new()),
        Err(error) => {
            let (call, error) = ("hwloc_topology_load".to_owned(), error.to_string());
            (HostObservation::default(), vec![ProbeFailure { subject: "hwloc".to_owned(), call, error }])
        }
    }
}

fn discover() -> Result<Topology, Box<dyn std::error::Error>> {
    fn plain<E: std::error::Error + 'static>(error: HybridError<E>) -> Box<dyn std::error::Error> {
        error.to_string().into()
    }
    // A cpuset of the container hides the NUMA nodes of GPUs.
    let builder = Topology::builder().with_flags(BuildFlags::INCLUDE_DISALLOWED).map_err(plain)?;
    Ok(builder.with_io_type_filter(TypeFilter::KeepAll).map_err(plain)?.build()?)
}

/// The host of a hwloc topology and a sysfs beside it.
fn walk(topology: &Topology, sysfs: &Sysfs) -> HostObservation {
    let bridges = topology.objects_with_type(ObjectType::Bridge).filter(|bridge| is_host_bridge(bridge));
    let single = topology.objects_with_type(ObjectType::NUMANode).nth(1).is_none();
    let walk = Walk { sysfs, single };
    HostObservation {
        cpu: cpu(topology),
        numa_nodes: topology.objects_with_type(ObjectType::NUMANode).filter_map(numa_node).collect(),
        host_bridges: bridges.map(|bridge| walk.host_bridge(bridge)).filter(|seen| !seen.devices.is_empty()).collect(),
    }
}

fn numa_node(node: &TopologyObject) -> Option<NumaNodeObservation> {
    Some(NumaNodeObservation {
        id: NumaNodeId(u32::try_from(node.os_index()?).ok()?),
        package: package(node),
        cpus: node
            .cpuset()
            .map(|cpus| Bitmap::from(cpus.clone_target()).to_string())
            .filter(|cpus| is_cpu_list(cpus))
            .unwrap_or_default(),
    })
}

/// The package an object lies in.
fn package(object: &TopologyObject) -> Option<PackageId> {
    let is_package = object.object_type() == ObjectType::Package;
    let package = if is_package { Some(object) } else { object.first_ancestor_with_type(ObjectType::Package) };
    Some(PackageId(u32::try_from(package?.os_index()?).ok()?))
}

fn cpu(topology: &Topology) -> Option<CpuObservation> {
    let package = topology.objects_with_type(ObjectType::Package).next()?;
    let text = |object: &TopologyObject, key: &str| {
        object.info(key).and_then(|value| value.to_str().ok()).map(|value| value.trim().to_owned())
    };
    let number = |key: &str| text(package, key)?.parse().ok();
    Some(CpuObservation {
        arch: text(topology.root_object(), "Architecture").unwrap_or_default(),
        vendor: text(package, "CPUVendor"),
        family: number("CPUFamilyNumber"),
        model: number("CPUModelNumber"),
    })
}

fn is_host_bridge(object: &TopologyObject) -> bool {
    match object.attributes() {
        Some(ObjectAttributes::Bridge(bridge)) => bridge.upstream_type() == BridgeType::Host,
        _ => false,
    }
}

fn address(pci: &PCIDeviceAttributes) -> Option<PciAddress> {
    PciAddress::new(u32::from(pci.domain()), pci.bus_id(), pci.bus_device(), pci.function())
}

struct Walk<'a> {
    sysfs: &'a Sysfs,
    /// Set if there is only one NUMA node: then it is no evidence that a device is on it.
    single: bool,
}

impl Walk<'_> {
    fn host_bridge(&self, bridge: &TopologyObject) -> HostBridgeObservation {
        let devices: Vec<_> = bridge.io_children().filter_map(|below| self.device(below, PciKind::RootPort)).collect();
        // I/O objects have no nodes of their own; hwloc attaches them to the object whose CPUs are local to them.
        let local = bridge.first_non_io_ancestor();
        let numa = local.filter(|_| !self.single).and_then(|local| {
            let nodes = local.nodeset()?;
            let first = nodes.iter_set().next()?;
            (nodes.weight() == Some(1)).then_some(NumaNodeId(u32::try_from(usize::from(first)).ok()?))
        });
        // All devices below a host bridge are below one root bus.
        let root = devices.iter().find_map(|device| device.pci).and_then(|pci| self.sysfs.pcie_root(pci));
        HostBridgeObservation { numa, package: local.and_then(package), root, devices }
    }

    /// A GPU or a NIC, or a bridge with such devices below. `port` is the kind of a bridge at this place.
    ///
    /// Ports alternate on the way down: a root port, then a switch's upstream port, its downstream ports, the next
    /// switch's upstream port. The depth is bounded: a PCI domain has 256 buses.
    fn device(&self, object: &TopologyObject, port: PciKind) -> Option<PciObservation> {
        match object.attributes()? {
            ObjectAttributes::Bridge(bridge) => {
                let below = match port {
                    PciKind::UpstreamPort => PciKind::DownstreamPort,
                    _ => PciKind::UpstreamPort,
                };
                let devices: Vec<_> = object.io_children().filter_map(|child| self.device(child, below)).collect();
                let UpstreamAttributes::PCI(pci) = bridge.upstream_attributes()?;
                (!devices.is_empty()).then(|| PciObservation { devices, ..self.function(pci, port) })
            }
            ObjectAttributes::PCIDevice(pci) => match pci.class_id() >> 8 {
                DISPLAY if pci.vendor_id() == NVIDIA => Some(self.function(pci, PciKind::Gpu)),
                NETWORK if !address(pci).is_some_and(|pci| self.sysfs.is_virtual_function(pci)) => {
                    let nics = object.io_children().filter_map(|nic| self.nic(nic)).collect();
                    let nics = NicObservation::without_ipoib(pci.class_id(), nics);
                    (!nics.is_empty()).then(|| PciObservation { nics, ..self.function(pci, PciKind::Nic) })
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn function(&self, pci: &PCIDeviceAttributes, kind: PciKind) -> PciObservation {
        let class = (kind == PciKind::Gpu).then(|| DisplayClass::new(pci.class_id())).flatten();
        let pci = address(pci);
        let link = pci.and_then(|pci| self.sysfs.link(pci));
        let numa = pci.and_then(|pci| self.sysfs.numa(pci));
        PciObservation { class, link, numa, ..PciObservation::new(pci, kind) }
    }

    fn nic(&self, object: &TopologyObject) -> Option<NicObservation> {
        let Some(ObjectAttributes::OSDevice(device)) = object.attributes() else { return None };
        let name = object.name()?.to_str().ok()?.to_owned();
        let (kind, mbps) = match device.device_type() {
            OSDeviceType::OpenFabrics => (NicKind::Rdma, self.sysfs.rdma_rate(&name)),
            OSDeviceType::Network => (NicKind::Ethernet, self.sysfs.network_rate(&name)),
            _ => return None,
        };
        // hwloc reads these of an RDMA device in /sys/class/infiniband.
        let text = |key: &str| object.info(key).and_then(|value| value.to_str().ok());
        let system_guid = text("SysImageGUID").and_then(|guid| guid.parse().ok());
        let ports = (1..).map_while(|port| Some((port, text(&format!("Port{port}LID"))?)));
        // A RoCE port has no LID, and a GID of its MAC address.
        let ports = ports.filter(|(_, lid)| *lid != "0x0").map(|(port, _)| text(&format!("Port{port}GID0")));
        let port_guids = ports.flatten().filter_map(Guid::of_gid).collect();
        Some(NicObservation { mbps, system_guid, port_guids, ..NicObservation::new(name, kind) })
    }
}

#[cfg(test)]
mod tests;
