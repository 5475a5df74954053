//! Observations: raw facts as NVML, hwloc and the kernel gave them.
//!
//! The adapters and the node files make these values; `topology` derives everything else. Nothing derived (a level, a
//! bandwidth) is kept here, and unknown stays `None`.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt::Display;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::address::{GpuUuid, Guid, NumaNodeId, PackageId, PciAddress};
use super::level::TopologyLevel;
use super::mig::MigObservation;
use super::warning::P2pRefusal;
use crate::quote::{ParseError, quoted};

/// All facts observed of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeObservation {
    /// The GPUs, in NVML's order; each has an index of its own.
    #[serde(deserialize_with = "gpus")]
    pub gpus: Vec<GpuObservation>,
    /// The host around them; empty if nothing of it could be read.
    #[serde(default)]
    pub host: HostObservation,
    /// The driver's version, such as `580.95.05` (`nvmlSystemGetDriverVersion`).
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub driver_version: Option<String>,
    /// The newest CUDA version that the driver supports (`nvmlSystemGetCudaDriverVersion`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_version: Option<CudaVersion>,
    /// The calls that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<ProbeFailure>,
    /// The number of orders about MIG that the driver had answered before this was observed, since linkwise started.
    #[serde(skip)]
    pub mig_orders: u64,
}

/// Reads GPUs. Refuses two with one index, because commands and requests name GPUs by their indices.
fn gpus<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<GpuObservation>, D::Error> {
    let gpus = Vec::<GpuObservation>::deserialize(from)?;
    let mut indices = BTreeSet::new();
    match gpus.iter().find(|gpu| !indices.insert(gpu.index)) {
        Some(gpu) => Err(D::Error::custom(format!("two GPUs have the index {}", gpu.index))),
        None => Ok(gpus),
    }
}

/// A CUDA version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaVersion {
    /// The 13 of 13.0.
    pub major: u32,
    /// The 0 of 13.0.
    pub minor: u32,
}

/// One GPU as NVML describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuObservation {
    /// NVML's index, which nvidia-smi prints.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// Its PCI address.
    pub pci: PciAddress,
    /// The product name, such as `NVIDIA H100 80GB HBM3`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub model: Option<String>,
    /// The board's serial number (`nvmlDeviceGetSerial`). Node files leave it out, because they are given to strangers.
    #[serde(skip)]
    pub serial: Option<String>,
    /// The N of /dev/nvidiaN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// The CUDA compute capability; it decides the rate of an NVLink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// The brand, such as `Nvidia` or `Tesla` (`nvmlDeviceGetBrand`, by the names of NVIDIA's go-nvlib).
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub brand: Option<String>,
    /// The architecture, such as `Hopper` (`nvmlDeviceGetArchitecture`, by the same names).
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub architecture: Option<String>,
    /// The way in which it addresses memory of the host (`nvmlDeviceGetAddressingMode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addressing_mode: Option<AddressingMode>,
    /// The memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "memory_if_known")]
    pub memory_mib: Option<u64>,
    /// The NUMA node that NVML calls nearest, if NVML names exactly one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// The maximum of the GPU's PCIe link (NVML's maxima), not its present state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The lanes of the GPU's PCIe link now (`nvmlDeviceGetCurrPcieLinkWidth`). Node files leave it out,
    /// because it changes.
    #[serde(skip)]
    pub pcie_width_now: Option<u32>,
    /// The NVLinks grouped by remote end; `None` if NVML does not report them, empty if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "nvlinks")]
    pub nvlinks: Option<Vec<NvLinkObservation>>,
    /// True if NVLink-C2C joins it to a processor, as on Grace machines (`nvmlDeviceGetC2cModeInfoV`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c2c: Option<bool>,
    /// True if a display is set up on it (`nvmlDeviceGetDisplayActive`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<bool>,
    /// MIG, on GPUs and drivers that have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigObservation>,
    /// The NVLink fabric the GPU has joined, where the driver reports one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricObservation>,
    /// NVML's common ancestor with other GPUs, by their NVML index.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub common_ancestors: BTreeMap<u32, TopologyLevel>,
    /// The driver's refusals of P2P with other GPUs, by their NVML index (`nvmlDeviceGetP2PStatus`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub p2p_refused: BTreeMap<u32, P2pRefusal>,
}

impl GpuObservation {
    /// Makes a GPU of which only the index, the UUID and the address are known.
    pub fn new(index: u32, uuid: GpuUuid, pci: PciAddress) -> Self {
        Self { index, uuid, pci, ..Self::default() }
    }

    /// The number of its active NVLinks. `None` if NVML does not report them, and in MIG mode, in which the driver
    /// shuts them down.
    pub fn active_nvlinks(&self) -> Option<u32> {
        let has_mig = self.mig.as_ref().is_some_and(|mig| mig.enabled);
        let ends = self.nvlinks.as_ref().filter(|_| !has_mig)?;
        u32::try_from(ends.iter().filter(|end| end.active).map(|end| end.links.len()).sum::<usize>()).ok()
    }
}

/// The way in which a GPU addresses the memory of the host (`nvmlDeviceAddressingModeType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AddressingMode {
    /// Neither HMM nor ATS.
    None,
    /// Heterogeneous Memory Management: by the kernel's page tables, in software.
    #[serde(rename = "HMM")]
    Hmm,
    /// Address Translation Services: by the processor's page tables, in hardware.
    #[serde(rename = "ATS")]
    Ats,
}

impl AddressingMode {
    /// Reads NVML's number of a mode; `None` for a number that NVML 13 does not define.
    pub fn from_nvml(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            1 => Some(Self::Hmm),
            2 => Some(Self::Ats),
            _ => None,
        }
    }
}

/// A CUDA compute capability, written `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    /// The 9 of 9.0.
    pub major: u32,
    /// The 0 of 9.0.
    pub minor: u32,
}

impl TryFrom<String> for ComputeCapability {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        const WHY: &str = "is not a compute capability (expected a quoted major.minor, such as \"9.0\")";
        let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let capability = parts.map(|(major, minor)| Self { major, minor });
        capability.ok_or_else(|| ParseError::new(&text, WHY))
    }
}

impl From<ComputeCapability> for String {
    fn from(capability: ComputeCapability) -> Self {
        format!("{}.{}", capability.major, capability.minor)
    }
}

/// A PCIe link: a rate for each lane and a number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// Megatransfers a second and lane: 2500, 5000, 8000, 16000, 32000, 64000 for Gen1 to Gen6.
    #[serde(deserialize_with = "at_most::<{ PcieLink::MAX_MTS }, _>")]
    pub mts: u32,
    /// Lanes.
    #[serde(deserialize_with = "at_most::<{ PcieLink::MAX_WIDTH }, _>")]
    pub width: u32,
}

/// The most characters of a name or a version: NVML's longest have 96 bytes, the kernel's 255.
const MAX_TEXT: usize = 256;

/// The most memory that is believed, MiB: 1 PiB, far above the 288 GiB of today's largest GPU.
pub const MAX_MEMORY_MIB: u64 = 1 << 30;

/// The most NVLinks of a GPU that are believed: today's GPUs have 18.
pub const MAX_NVLINKS: u32 = 64;

/// Refuses a value above its limit.
fn limited<T: PartialOrd + Display, E: Error>(what: &str, value: T, max: T) -> Result<T, E> {
    if value <= max { Ok(value) } else { Err(E::custom(format!("{what}{value} is more than {max}"))) }
}

fn at_most<'de, const MAX: u32, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    limited("", u32::deserialize(from)?, MAX)
}

pub(super) fn memory<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    limited("", u64::deserialize(from)?, MAX_MEMORY_MIB)
}

fn memory_if_known<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    Option::<u64>::deserialize(from)?.map(|mib| limited("", mib, MAX_MEMORY_MIB)).transpose()
}

fn limited_text<E: Error>(text: String) -> Result<String, E> {
    limited("a length of ", text.chars().count(), MAX_TEXT).map(|_| text)
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    limited_text(String::deserialize(from)?)
}

fn text_if_known<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Option::<String>::deserialize(from)?.map(limited_text).transpose()
}

fn nvlinks<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<NvLinkObservation>>, D::Error> {
    let groups = Option::<Vec<NvLinkObservation>>::deserialize(from)?;
    let links = groups.iter().flatten().map(|group| group.links.len()).sum();
    limited("a count of ", links, MAX_NVLINKS as usize).map(|_| groups)
}

impl PcieLink {
    /// The rate of Gen7.
    pub const MAX_MTS: u32 = 128_000;

    /// The most lanes that PCI Express defines.
    pub const MAX_WIDTH: u32 = 32;

    /// Makes a link; `None` above the limits of PCI Express.
    pub fn new(mts: u32, width: u32) -> Option<Self> {
        (mts <= Self::MAX_MTS && width <= Self::MAX_WIDTH).then_some(Self { mts, width })
    }

    /// Reads the rate as the kernel writes it: "16.0 GT/s PCIe", on older kernels "8 GT/s".
    pub fn megatransfers(text: &str) -> Option<u32> {
        let (number, unit) = text.split_once(' ')?;
        u32::try_from(thousandths(number).filter(|_| unit.starts_with("GT/s"))?).ok()
    }
}

/// Reads digits with an optional fraction and multiplies the number by a thousand; digits of the fraction beyond the
/// third are dropped. `None` for signs, exponents, blanks, and numbers that do not fit.
pub fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) {
        return None;
    }
    let part = fraction.bytes().chain(*b"000").take(3).fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    whole.parse::<u64>().ok()?.checked_mul(1_000)?.checked_add(part)
}

/// The NVLinks of one GPU that end at one remote and are in one state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinkObservation {
    /// NVML's link numbers.
    pub links: Vec<u32>,
    /// The device at the other end.
    pub remote: NvLinkRemote,
    /// True if NVML calls them enabled.
    #[serde(default = "up", skip_serializing_if = "Clone::clone")]
    pub active: bool,
}

fn up() -> bool {
    true
}

/// The far end of an NVLink, by `nvmlDeviceGetNvLinkRemoteDeviceType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NvLinkRemote {
    /// Another GPU.
    Gpu(PciAddress),
    /// An NVSwitch; VMs and some machines give no address for it.
    Switch(Option<PciAddress>),
    /// The processor (POWER's NPU).
    Cpu,
    /// NVML does not know.
    Unknown,
}

/// The NVLink fabric a GPU has joined (`nvmlDeviceGetGpuFabricInfo`, state completed).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricObservation {
    /// The cluster's UUID; all zeros on a machine that is a fabric of its own.
    #[serde(deserialize_with = "text")]
    pub cluster: String,
    /// The clique; GPUs of one clique reach each other over NVLink.
    pub clique: u32,
}

impl FabricObservation {
    /// The fabric of several machines, as `<cluster's UUID>.<clique>`. A machine that is a fabric of its own has none.
    pub(crate) fn shared(&self) -> Option<String> {
        let is_shared = self.cluster.contains(|c| c != '0' && c != '-');
        is_shared.then(|| format!("{}.{}", self.cluster, self.clique))
    }
}

/// The host as hwloc and the kernel describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostObservation {
    /// The processor; machines mix no models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuObservation>,
    /// The NUMA nodes, those without CPUs included (GPU memory as the kernel sees it on POWER9 and Grace).
    #[serde(default)]
    pub numa_nodes: Vec<NumaNodeObservation>,
    /// The PCI host bridges with the devices below them.
    #[serde(default)]
    pub host_bridges: Vec<HostBridgeObservation>,
}

/// A processor, in CPUID's terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuObservation {
    /// `x86_64`, `aarch64`, `ppc64le`: the kernel's name of the architecture.
    #[serde(deserialize_with = "text")]
    pub arch: String,
    /// CPUID's vendor, such as `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub vendor: Option<String>,
    /// The display family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<u32>,
    /// The display model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<u32>,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNodeObservation {
    /// The kernel's number.
    pub id: NumaNodeId,
    /// The package that it belongs to, if exactly one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<PackageId>,
    /// Its CPUs as a kernel list (`0-15,32-47`); empty for a memory-only node.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "cpus")]
    pub cpus: String,
}

/// The most CPUs of a machine: `NR_CPUS` of the largest kernels (`CONFIG_MAXSMP`).
pub const MAX_CPUS: u32 = 8_192;

/// Returns true for a kernel list of CPUs: numbers and ranges, ascending.
pub fn is_cpu_list(list: &str) -> bool {
    let mut next = 0;
    let mut follows = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else { return false };
        let is_ascending = (next..=last).contains(&first) && last < MAX_CPUS;
        next = last.saturating_add(1);
        is_ascending
    };
    list.is_empty() || list.split(',').all(&mut follows)
}

fn cpus<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let list = String::deserialize(from)?;
    if is_cpu_list(&list) {
        return Ok(list);
    }
    let why = format!("is not a list of CPUs below {MAX_CPUS} (expected ascending numbers, such as 0-15,32-47)");
    Err(D::Error::custom(format!("{} {why}", quoted(&list))))
}

/// A PCI host bridge (root complex) and its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostBridgeObservation {
    /// The NUMA node it is attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// Its package, if its NUMA node does not give it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<PackageId>,
    /// The kernel's name of its root bus, such as `pci0000:17`: the folder in /sys/devices with the devices below it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "text_if_known")]
    pub root: Option<String>,
    /// The devices directly below.
    #[serde(default)]
    pub devices: Vec<PciObservation>,
}

/// One PCI function that matters here: a port, a switch, a GPU, a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciObservation {
    /// Its address; `None` if the source does not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// Its kind.
    pub kind: PciKind,
    /// The PCI class of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<DisplayClass>,
    /// The maximum of its link towards the CPU; for a port that faces down, towards the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PcieLink>,
    /// The NUMA node of this function, if it differs from that of its host bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// The network interfaces it offers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicObservation>,
    /// The devices below, for a port or a switch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PciObservation>,
}

impl PciObservation {
    /// Makes a function of which nothing else is known.
    pub const fn new(pci: Option<PciAddress>, kind: PciKind) -> Self {
        Self { pci, kind, class: None, link: None, numa: None, nics: Vec::new(), devices: Vec::new() }
    }
}

/// The kind of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciKind {
    /// A root port of the host bridge; it faces down.
    RootPort,
    /// The upstream port of a switch; its downstream ports hang below.
    UpstreamPort,
    /// A downstream port of a switch; one device hangs below.
    DownstreamPort,
    /// A whole switch, in sources that do not list its ports.
    Switch,
    /// A GPU.
    Gpu,
    /// A NIC; its interfaces are in `nics`.
    Nic,
}

/// The PCI class of a GPU (PCI Code and ID Assignment, base class 03h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisplayClass {
    /// A VGA controller, 0300h: a GPU with display outputs.
    #[serde(rename = "vga")]
    Vga,
    /// A 3D controller, 0302h: a GPU without display outputs.
    #[serde(rename = "3d")]
    ThreeD,
    /// Any other display controller.
    #[serde(rename = "other")]
    Other,
}

impl DisplayClass {
    /// Reads base class and subclass; `None` for anything but a display controller (base class 03h).
    pub fn new(class: u16) -> Option<Self> {
        match class {
            0x0300 => Some(Self::Vga),
            0x0302 => Some(Self::ThreeD),
            0x0301..=0x03ff => Some(Self::Other),
            _ => None,
        }
    }
}

/// A network interface of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicObservation {
    /// The kernel's name, such as `mlx5_0` or `eth0`.
    #[serde(deserialize_with = "text")]
    pub name: String,
    /// RDMA or plain network.
    pub kind: NicKind,
    /// The link's rate in Mbit/s; `None` also while the link is down.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "rate")]
    pub mbps: Option<u32>,
    /// The GUID of an RDMA device's card, the same for all its functions (`sys_image_guid`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_guid: Option<Guid>,
    /// The GUIDs of its InfiniBand ports, by which the fabric's subnet manager knows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_guids: Vec<Guid>,
}

fn rate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    at_most::<{ NicObservation::MAX_MBPS }, _>(from).map(Some)
}

impl NicObservation {
    /// The highest rate that is believed, Mbit/s: far above the 800 Gbit/s of today's fastest port.
    pub const MAX_MBPS: u32 = 10_000_000;

    /// Makes an interface of which nothing else is known.
    pub const fn new(name: String, kind: NicKind) -> Self {
        Self { name, kind, mbps: None, system_guid: None, port_guids: Vec::new() }
    }

    /// Returns the rate if a link can have it; `None` for 0 and for the number that a driver gives for an unknown rate.
    pub fn rate(mbps: u32) -> Option<u32> {
        (1..=Self::MAX_MBPS).contains(&mbps).then_some(mbps)
    }

    /// Leaves out IP over InfiniBand: a network device that runs over the RDMA device of the same PCI function is not
    /// another interface. `class` is base class and subclass of the function.
    pub fn without_ipoib(class: u16, mut nics: Vec<Self>) -> Vec<Self> {
        let has_rdma = nics.iter().any(|nic| nic.kind == NicKind::Rdma);
        nics.retain(|nic| nic.kind == NicKind::Rdma || class != Self::INFINIBAND || !has_rdma);
        nics
    }

    /// The PCI class of an InfiniBand controller.
    const INFINIBAND: u16 = 0x0207;
}

/// The two kinds of network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// An RDMA device (/sys/class/infiniband): InfiniBand, RoCE, EFA.
    Rdma,
    /// A network device (/sys/class/net).
    Ethernet,
}

/// A call to NVML, hwloc or the kernel that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeFailure {
    /// The subject: a PCI address, `GPU 3`, `hwloc`.
    pub subject: String,
    /// The call, such as `nvmlDeviceGetUUID`.
    pub call: String,
    /// The error that came back.
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_speeds_are_read_as_kernels_write_them() {
        for (text, mts) in [
            ("16.0 GT/s PCIe", 16_000),
            ("8 GT/s", 8_000),
            ("2.5 GT/s PCIe", 2_500),
            ("32 GT/s PCIe/s", 32_000),
            ("64.0 GT/s PCIe", 64_000),
        ] {
            assert_eq!(PcieLink::megatransfers(text), Some(mts), "{text}");
        }
        for text in ["Unknown", "Unknown speed", "", "16", "16.x GT/s", "16 Gb/s", "99999999 GT/s"] {
            assert_eq!(PcieLink::megatransfers(text), None, "{text}");
        }
    }
}
