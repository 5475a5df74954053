//! Reads the host without NVML: the PCI bus and the driver's version.
//!
//! The executor (`mod.rs`) calls [`HostProbe`] before each start of an agent, after each poll, and every `bus_look` on
//! a node without GPUs; on a thread of its own, because a file of a device in trouble may never answer.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linkwise_core::state::NodeIdentity;
use linkwise_core::topology::PciAddress;
use linkwise_host::hwloc::{BusGpus, PciBus, held_by_others, is_tegra};

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The state of the host around the agents. A change may require another agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostFingerprint {
    /// The NVIDIA GPUs on the PCI bus; `None` if the kernel does not list the bus here.
    pub bus: Option<BusGpus>,
    /// The ids of the machine, of this boot and of this load of the driver.
    pub identity: NodeIdentity,
    /// Set if the host is a Tegra, whose own GPU is on no PCI bus.
    pub is_tegra: bool,
}

impl HostFingerprint {
    /// Returns true if the GPUs on the bus changed, or if another driver took or left one.
    pub fn has_other_bus(&self, before: &Self) -> bool {
        (self.gpus(), self.foreign()) != (before.gpus(), before.foreign())
    }

    /// The GPUs that another driver holds, with that driver: they are not served.
    pub fn foreign(&self) -> Vec<(PciAddress, String)> {
        let foreign = self.bus.iter().flat_map(held_by_others);
        foreign.map(|(pci, driver)| (pci, driver.to_owned())).collect()
    }

    /// The GPUs that can be served once NVIDIA's driver holds them.
    pub fn gpus(&self) -> Vec<PciAddress> {
        let foreign = self.foreign();
        let gpus = self.bus.iter().flat_map(BusGpus::keys).copied();
        gpus.filter(|pci| !foreign.iter().any(|(other, _)| other == pci)).collect()
    }
}

/// Reads the host again and again.
#[derive(Debug)]
pub(super) struct HostProbe {
    sysfs: PathBuf,
    bus: PciBus,
}

impl HostProbe {
    /// A probe of the host with this /sys.
    pub fn new(sysfs: PathBuf) -> Self {
        Self { sysfs, bus: PciBus::default() }
    }

    /// Reads the host; `None` if the driver's version is empty: a read that hung may end so.
    pub fn look(&mut self) -> Option<HostFingerprint> {
        let version = version(&self.sysfs);
        if version.as_ref().is_some_and(String::is_empty) {
            return None;
        }
        let identity = identity_with(&self.sysfs, version);
        Some(HostFingerprint { bus: self.bus.gpus(&self.sysfs), identity, is_tegra: is_tegra(&self.sysfs) })
    }
}

/// The ids of the machine, of this boot and of this load of the driver: sysfs gives each folder it makes a new inode
/// number. (The folder's times change when a process first reads it.) Reads files, which may hang.
pub fn identity(sysfs: &Path) -> NodeIdentity {
    identity_with(sysfs, version(sysfs))
}

/// The version of the driver that the kernel has loaded.
fn version(sysfs: &Path) -> Option<String> {
    line(&sysfs.join("module/nvidia/version"))
}

fn identity_with(sysfs: &Path, version: Option<String>) -> NodeIdentity {
    let driver = std::fs::metadata(sysfs.join("module/nvidia")).ok().map(|folder| {
        let version = version.unwrap_or_else(|| "unknown version".to_owned());
        format!("{version}, load {}", folder.ino())
    });
    // Only root may read this file.
    let machine = line(&sysfs.join("class/dmi/id/product_uuid")).filter(|uuid| !uuid.is_empty());
    NodeIdentity { boot: boot(), driver, machine }
}

/// The id of this boot.
pub fn boot() -> Option<String> {
    line(Path::new(BOOT_ID))
}

/// Returns true if the PCI bus is listed and has no GPU that NVIDIA's driver could serve. It reads files, which may
/// hang.
pub fn has_no_gpu(sysfs: &Path) -> bool {
    let host = HostProbe::new(sysfs.to_owned()).look();
    host.is_some_and(|host| host.bus.is_some() && host.gpus().is_empty())
}

fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
