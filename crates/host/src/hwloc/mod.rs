//! The host in hwloc's view: NUMA nodes, packages, the PCI tree down to GPUs and NICs.
//!
//! libhwloc writes what it discovers as XML, and `machines` reads that, as it reads a file of another host. This module
//! adds the facts that hwloc lacks and that sysfs has: the greatest speed of a PCI link (hwloc has the present one),
//! a device's NUMA node, which can be unknown (-1), its root bus, and a NIC's rate. Called by `crates/nvml`, `src/run`
//! and `src/commands`, never during an admission, because a scan takes 10 to 30 ms. Knows nothing of NVML.

mod sysfs;

use std::path::Path;

use hwlocality::Topology;
use hwlocality::topology::builder::{BuildFlags, TypeFilter};
use hwlocality::topology::export::xml::XMLExportFlags;

use crate::machines;
use linkwise_core::topology::{HostObservation, PciKind, PciObservation, ProbeFailure};
use sysfs::Sysfs;

pub use sysfs::{BusGpus, PciBus, held_by_others, is_tegra, rdma_cm_node, rdma_nodes, wsl};

/// Observes this host; `sysfs` is the path of its /sys. If hwloc fails, the host is empty, with a
/// [`ProbeFailure`]. A fact that sysfs lacks is unknown.
pub fn observe(sysfs: &Path) -> (HostObservation, Vec<ProbeFailure>) {
    let discovered = discover().map_err(|error| ("hwloc_topology_load", error));
    let read = |topology| read(&topology).map_err(|error| ("hwloc_topology_export_xmlbuffer", error));
    match discovered.and_then(read) {
        Ok(host) => (Sysfs(sysfs.to_owned()).completed(host), Vec::new()),
        Err((call, error)) => {
            let (subject, call, error) = ("hwloc".to_owned(), call.to_owned(), error.to_string());
            (HostObservation::default(), vec![ProbeFailure { subject, call, error }])
        }
    }
}

fn discover() -> Result<Topology, Box<dyn std::error::Error>> {
    // Without this flag, a cpuset of the container hides the NUMA nodes of GPUs.
    let builder = Topology::builder().with_flags(BuildFlags::INCLUDE_DISALLOWED);
    let builder = builder.map_err(|error| error.to_string())?.with_io_type_filter(TypeFilter::KeepAll);
    Ok(builder.map_err(|error| error.to_string())?.build()?)
}

/// The host of a hwloc topology. The facts that hwloc has of GPUs are dropped: NVML has better ones.
fn read(topology: &Topology) -> Result<HostObservation, Box<dyn std::error::Error>> {
    let xml = topology.export_xml(XMLExportFlags::empty())?;
    Ok(machines::of_hwloc(xml.as_str())?)
}

impl Sysfs {
    /// Adds the facts of sysfs to a host.
    fn completed(&self, mut host: HostObservation) -> HostObservation {
        host.host_bridges.retain_mut(|bridge| {
            bridge.devices.retain_mut(|device| self.complete(device));
            // All devices below a host bridge are below one root bus.
            let first = bridge.devices.iter().find_map(|device| device.pci);
            bridge.root = first.and_then(|pci| self.pcie_root(pci));
            !bridge.devices.is_empty()
        });
        host
    }

    /// Adds the facts of sysfs to a device and those below. Returns false if the device does not count: a virtual
    /// function of a NIC, or a bridge below which no device counts.
    fn complete(&self, device: &mut PciObservation) -> bool {
        device.devices.retain_mut(|below| self.complete(below));
        if let Some(pci) = device.pci {
            (device.link, device.numa) = (self.link(pci), self.numa(pci));
        }
        for nic in &mut device.nics {
            nic.mbps = self.nic_rate(nic);
        }
        match device.kind {
            PciKind::Gpu => true,
            PciKind::Nic => !device.pci.is_some_and(|pci| self.is_virtual_function(pci)),
            _ => !device.devices.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests;
