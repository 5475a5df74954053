//! Facts that the kernel has and hwloc lacks, most of them from /sys; a missing file gives no fact.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use linkwise_core::topology::{NicKind, NicObservation, NumaNodeId, PciAddress, PcieLink, thousandths};

pub(super) struct Sysfs(pub PathBuf);

const NVIDIA: u32 = 0x10de;
/// PCI base class of display controllers (PCI Code and ID Assignment, class 03h).
const DISPLAY: u32 = 0x03;
/// The kernel driver whose GPUs linkwise serves.
const DRIVER: &str = "nvidia";

/// The NVIDIA GPUs on the PCI bus, each with the kernel driver it is bound to.
pub type BusGpus = BTreeMap<PciAddress, Option<String>>;

/// The GPUs that another driver than NVIDIA's holds, such as vfio-pci or nouveau, with that driver. linkwise does not
/// serve them. A GPU that no driver holds is not among them, because NVIDIA's driver may still take it.
pub fn held_by_others(gpus: &BusGpus) -> impl Iterator<Item = (PciAddress, &str)> {
    let others = gpus.iter().filter_map(|(pci, driver)| Some((*pci, driver.as_deref()?)));
    others.filter(|(_, driver)| *driver != DRIVER)
}

/// Returns true for a GPU of NVIDIA; `None` while the device's files cannot be read.
fn is_nvidia_gpu(path: &Path) -> Option<bool> {
    let hex = |path: PathBuf| {
        let text = fs::read_to_string(path).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    Some(hex(path.join("vendor"))? == NVIDIA && hex(path.join("class"))? >> 16 == DISPLAY)
}

/// The PCI bus, read repeatedly; vendor and class of a device are read once.
#[derive(Debug, Default)]
pub struct PciBus {
    is_gpu: BTreeMap<OsString, bool>,
}

impl PciBus {
    /// The NVIDIA GPUs on the bus; `None` if the bus cannot be listed here.
    pub fn gpus(&mut self, sysfs: &Path) -> Option<BusGpus> {
        let devices = sysfs.join("bus/pci/devices");
        let mut now = BTreeMap::new();
        for entry in fs::read_dir(&devices).ok()? {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let known = self.is_gpu.get(&name).copied();
            now.extend(known.or_else(|| is_nvidia_gpu(&entry.path())).map(|gpu| (name, gpu)));
        }
        self.is_gpu = now;
        let gpus = self.is_gpu.iter().filter(|(_, gpu)| **gpu);
        Some(gpus.filter_map(|(name, _)| Some((name.to_str()?.parse().ok()?, bound_to(&devices.join(name))))).collect())
    }
}

fn bound_to(device: &Path) -> Option<String> {
    let link = fs::read_link(device.join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

/// The path, below one of these roots, that shows that this is WSL2: the paravirtual GPU's node, or the driver's
/// library in the folder that only WSL has. The GPUs of WSL2 are on no PCI bus and have no device nodes of their own.
pub fn wsl<'r>(roots: impl IntoIterator<Item = &'r Path>) -> Option<PathBuf> {
    let signs = |root: &'r Path| ["dev/dxg", "usr/lib/wsl/lib/libnvidia-ml.so.1"].map(|sign| root.join(sign));
    roots.into_iter().flat_map(signs).find(|sign| sign.exists())
}

/// Returns true if this host is one of NVIDIA's Tegra systems (Jetson), by the kernel's name for the SoC. The GPU of
/// a Tegra is on no PCI bus, and NVML does not list it.
pub fn is_tegra(sysfs: &Path) -> bool {
    fs::read_to_string(sysfs.join("devices/soc0/family")).is_ok_and(|family| family.to_lowercase().starts_with("tegra"))
}

/// The RDMA devices of this host with their device nodes, such as `mlx5_0` with `/dev/infiniband/uverbs0`.
pub fn rdma_nodes(sysfs: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(sysfs.join("class/infiniband_verbs")).into_iter().flatten().flatten();
    let nodes = entries.filter_map(|entry| {
        let device = fs::read_to_string(entry.path().join("ibdev")).ok()?;
        let node = entry.file_name().into_string().ok()?;
        Some((device.trim().to_owned(), format!("/dev/infiniband/{node}")))
    });
    nodes.collect()
}

/// The node of the RDMA connection manager, if the host has one.
pub fn rdma_cm_node(sysfs: &Path) -> Option<String> {
    sysfs.join("class/misc/rdma_cm").exists().then(|| "/dev/infiniband/rdma_cm".to_owned())
}

impl Sysfs {
    /// The greatest speed of a function's link, not the present one.
    pub fn link(&self, pci: PciAddress) -> Option<PcieLink> {
        let mts = PcieLink::megatransfers(&self.pci(pci, "max_link_speed")?)?;
        let width = self.pci(pci, "max_link_width")?.parse().ok()?;
        PcieLink::new(mts, width)
    }

    /// A function's NUMA node; the kernel's -1 counts as unknown.
    pub fn numa(&self, pci: PciAddress) -> Option<NumaNodeId> {
        self.pci(pci, "numa_node")?.parse().ok().map(NumaNodeId)
    }

    /// The root bus above a function, by the kernel's name: the first folder below /sys/devices, such as `pci0000:17`.
    /// Kubernetes' `resource.kubernetes.io/pcieRoot` is that name. `None` if the folder is not a PCI root, as in a
    /// Hyper-V guest.
    pub fn pcie_root(&self, pci: PciAddress) -> Option<String> {
        let folder = fs::canonicalize(self.0.join(format!("bus/pci/devices/{pci}"))).ok()?;
        let below = folder.strip_prefix(fs::canonicalize(self.0.join("devices")).ok()?).ok()?;
        let first = below.components().next()?.as_os_str().to_str()?;
        first.starts_with("pci").then(|| first.to_owned())
    }

    /// Returns true for a virtual function of an SR-IOV card.
    pub fn is_virtual_function(&self, pci: PciAddress) -> bool {
        self.0.join(format!("bus/pci/devices/{pci}/physfn")).exists()
    }

    /// The rate of a NIC, in Mbit/s.
    pub fn nic_rate(&self, nic: &NicObservation) -> Option<u32> {
        match nic.kind {
            NicKind::Rdma => self.rdma_rate(&nic.name),
            // The rate is unknown (-1, or an error) while the link is down.
            NicKind::Ethernet => {
                NicObservation::rate(self.read(&format!("class/net/{}/speed", nic.name))?.parse().ok()?)
            }
        }
    }

    /// The sum of the rates of an RDMA device's ports whose links are up, in Mbit/s; unknown if no link is up.
    fn rdma_rate(&self, name: &str) -> Option<u32> {
        let ports = fs::read_dir(self.0.join(format!("class/infiniband/{name}/ports"))).ok()?;
        let rate = |port: PathBuf| {
            // "4: ACTIVE"; a link that is down has the rate of its slowest form.
            let state = fs::read_to_string(port.join("state")).ok();
            if state.is_some_and(|state| !state.contains("ACTIVE")) {
                return None;
            }
            // The file has "200 Gb/sec (4X HDR)" or "2.5 Gb/sec (1X SDR)": the number is in Gbit/s.
            let text = fs::read_to_string(port.join("rate")).ok()?;
            thousandths(text.split_whitespace().next()?)?.try_into().ok()
        };
        let rates: Vec<u32> = ports.flatten().filter_map(|port| rate(port.path())).collect();
        rates.iter().copied().reduce(u32::saturating_add).and_then(NicObservation::rate)
    }

    fn pci(&self, pci: PciAddress, file: &str) -> Option<String> {
        self.read(&format!("bus/pci/devices/{pci}/{file}"))
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.0.join(path)).ok().map(|text| text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_that_no_link_has_is_unknown() {
        let sysfs = tempfile::tempdir().unwrap();
        let file = sysfs.path().join("class/net/eth0/speed");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        for (speed, rate) in [("100000\n", Some(100_000)), ("-1\n", None), ("0\n", None), ("4294967295\n", None)] {
            fs::write(&file, speed).unwrap();
            let nic = NicObservation::new("eth0".to_owned(), NicKind::Ethernet);
            assert_eq!(Sysfs(sysfs.path().to_owned()).nic_rate(&nic), rate, "{speed}");
        }
    }

    #[test]
    fn only_gpu_of_another_driver_counts_as_held() {
        let sysfs = tempfile::tempdir().unwrap();
        let device = |pci: &str, class: &str, driver: Option<&str>| {
            let path = sysfs.path().join("bus/pci/devices").join(pci);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("vendor"), "0x10de\n").unwrap();
            fs::write(path.join("class"), class).unwrap();
            if let Some(driver) = driver {
                std::os::unix::fs::symlink(format!("../../drivers/{driver}"), path.join("driver")).unwrap();
            }
        };
        assert_eq!(PciBus::default().gpus(sysfs.path()), None);
        device("0000:01:00.0", "0x030200\n", Some("nvidia"));
        device("0000:02:00.0", "0x030000\n", Some("vfio-pci"));
        device("0000:03:00.0", "0x030200\n", None);
        device("0000:04:00.0", "0x040300\n", Some("snd_hda_intel"));
        let gpus = PciBus::default().gpus(sysfs.path()).unwrap();
        assert_eq!(gpus.len(), 3);
        let others: Vec<_> = held_by_others(&gpus).map(|(pci, driver)| (pci.to_string(), driver)).collect();
        assert_eq!(others, [("0000:02:00.0".to_owned(), "vfio-pci")]);
    }

    #[test]
    fn pcie_root_is_first_folder_of_device_path() {
        let folder = tempfile::tempdir().unwrap();
        let sysfs = Sysfs(folder.path().to_owned());
        fs::create_dir_all(folder.path().join("bus/pci/devices")).unwrap();
        let device = |pci: &str, above: &str| {
            fs::create_dir_all(folder.path().join("devices").join(above).join(pci)).unwrap();
            let link = folder.path().join("bus/pci/devices").join(pci);
            std::os::unix::fs::symlink(format!("../../../devices/{above}/{pci}"), link).unwrap();
        };
        device("0000:1b:00.0", "pci0000:17/0000:17:01.0/0000:18:00.0");
        device("0001:00:00.0", "LNXSYSTM:00/VMBUS:00/pci0001:00");
        let root = |pci: &str| sysfs.pcie_root(pci.parse().unwrap());
        assert_eq!(root("0000:1b:00.0").as_deref(), Some("pci0000:17"));
        assert_eq!(root("0001:00:00.0"), None, "a Hyper-V guest");
        assert_eq!(root("0000:99:00.0"), None);
    }
}
