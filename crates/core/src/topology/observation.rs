//! What was seen: raw facts as NVML, hwloc and the kernel gave them.
//!
//! The adapters and the node files make these values; `topology` derives everything else.
//! Nothing derived (a level, a bandwidth) is ever kept here, and unknown stays `None`.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::address::{GpuUuid, NumaNodeId, PackageId, PciAddress};
use super::level::TopologyLevel;
use super::mig::MigObservation;
use crate::quote::quoted;

/// Everything that was seen of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeObservation {
    /// The GPUs, in NVML's order.
    pub gpus: Vec<GpuObservation>,
    /// The host around them; empty where nothing of it could be read.
    #[serde(default)]
    pub host: HostObservation,
    /// The driver's version, such as `580.95.05` (`nvmlSystemGetDriverVersion`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The newest CUDA version that the driver supports (`nvmlSystemGetCudaDriverVersion_v2`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_version: Option<CudaVersion>,
    /// What was asked and not answered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<ProbeFailure>,
}

/// A CUDA version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaVersion {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

/// One GPU as NVML describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuObservation {
    /// NVML's index, which nvidia-smi prints.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// Where it sits on the PCI bus.
    pub pci: PciAddress,
    /// The product name, such as `NVIDIA H100 80GB HBM3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// N of /dev/nvidiaN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// The CUDA compute capability; it decides the rate of an NVLink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// The memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// The one NUMA node that NVML calls nearest, where it names exactly one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// What the GPU's PCIe link can do (NVML's maxima), not what it does now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The NVLinks grouped by remote end; `None` when NVML could not say, empty when it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlinks: Option<Vec<NvLinkObservation>>,
    /// Whether NVLink-C2C joins it to a processor, as on Grace machines (`nvmlDeviceGetC2cModeInfoV`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c2c: Option<bool>,
    /// Whether a display is set up on it (`nvmlDeviceGetDisplayActive`).
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
}

/// A CUDA compute capability, written `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    /// 9 of 9.0.
    pub major: u32,
    /// 0 of 9.0.
    pub minor: u32,
}

impl TryFrom<String> for ComputeCapability {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        match parts {
            Some((major, minor)) => Ok(Self { major, minor }),
            None => Err(format!(
                "{} is not a compute capability (expected a quoted major.minor, such as \"9.0\")",
                quoted(&text)
            )),
        }
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
    pub mts: u32,
    /// Lanes.
    pub width: u32,
}

/// The NVLinks of one GPU that end at one remote and are in one state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinkObservation {
    /// NVML's link numbers.
    pub links: Vec<u32>,
    /// What is at the other end.
    pub remote: NvLinkRemote,
    /// Whether NVML calls them enabled.
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
    pub cluster: String,
    /// GPUs of one clique reach each other over NVLink.
    pub clique: u32,
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
    /// The PCI host bridges with what hangs below.
    #[serde(default)]
    pub host_bridges: Vec<HostBridgeObservation>,
}

/// A processor, in CPUID's terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuObservation {
    /// `x86_64`, `aarch64`, `ppc64le`: the kernel's name of the architecture.
    pub arch: String,
    /// CPUID's vendor, such as `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
    /// The package it belongs to, where it belongs to exactly one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<PackageId>,
    /// Its CPUs as a kernel list (`0-15,32-47`); empty for a memory-only node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cpus: String,
}

/// A PCI host bridge (root complex) and its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostBridgeObservation {
    /// The NUMA node it is attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// Its package, where the NUMA node does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<PackageId>,
    /// What hangs directly below.
    #[serde(default)]
    pub devices: Vec<PciObservation>,
}

/// One PCI function that matters here: a port, a switch, a GPU, a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciObservation {
    /// Its address; `None` where the source does not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// What it is.
    pub kind: PciKind,
    /// The PCI class of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<DisplayClass>,
    /// What its link towards the CPU (for a port that faces down: towards the device) can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PcieLink>,
    /// The NUMA node of this function, where the kernel gives it one that differs from its host bridge's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaNodeId>,
    /// The network interfaces it offers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicObservation>,
    /// What hangs below, for a port or a switch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PciObservation>,
}

/// What a PCI function is.
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
    /// A network card; its interfaces are in `nics`.
    Nic,
}

/// The PCI class of a GPU (PCI Code and ID Assignment, base class 03h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisplayClass {
    /// A VGA controller, 0300h: a GPU with display outputs.
    #[serde(rename = "vga")]
    Vga,
    /// A 3D controller, 0302h: a GPU without.
    #[serde(rename = "3d")]
    ThreeD,
    /// Any other display controller.
    #[serde(rename = "other")]
    Other,
}

impl DisplayClass {
    /// The base class of display controllers.
    const BASE: u16 = 0x03;

    /// Of base class and subclass; `None` for what is no display controller.
    pub fn new(class: u16) -> Option<Self> {
        match class {
            0x0300 => Some(Self::Vga),
            0x0302 => Some(Self::ThreeD),
            _ => (class >> 8 == Self::BASE).then_some(Self::Other),
        }
    }
}

/// A network interface of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicObservation {
    /// The kernel's name, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// RDMA or plain network.
    pub kind: NicKind,
    /// The link's rate in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mbps: Option<u32>,
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

/// A question that a probe asked and that was not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeFailure {
    /// What was asked about: a PCI address, `GPU 3`, `hwloc`.
    pub subject: String,
    /// The call, such as `nvmlDeviceGetUUID`.
    pub call: String,
    /// What came back.
    pub error: String,
}
