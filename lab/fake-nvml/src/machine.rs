//! The parts of a machine file that NVML reports. Other keys are ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct File {
    observed: Machine,
}

#[derive(Debug, Default, Deserialize)]
pub struct Machine {
    pub gpus: Vec<Gpu>,
    #[serde(default)]
    pub host: Host,
}

#[derive(Debug, Deserialize)]
pub struct Gpu {
    pub index: u32,
    pub uuid: String,
    pub pci: Pci,
    pub model: Option<String>,
    pub serial: Option<String>,
    pub minor: Option<u32>,
    pub compute_capability: Option<String>,
    pub brand: Option<String>,
    pub architecture: Option<String>,
    pub addressing_mode: Option<String>,
    pub memory_mib: Option<u64>,
    pub numa: Option<u32>,
    pub pcie: Option<PcieLink>,
    pub nvlinks: Option<Vec<NvLinks>>,
    pub c2c: Option<bool>,
    pub display: Option<bool>,
    pub mig: Option<Mig>,
    pub fabric: Option<Fabric>,
    #[serde(default)]
    pub common_ancestors: BTreeMap<u32, Level>,
    /// The reasons why the driver refuses P2P with other GPUs, by their index.
    #[serde(default)]
    pub p2p_refused: BTreeMap<u32, P2pRefusal>,
}

/// NVML's reasons for refusing P2P, with the numbers of `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pRefusal {
    Chipset = 1,
    Gpu = 2,
    Topology = 3,
    Setting = 4,
    NotSupported = 5,
    Unknown = 6,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub struct PcieLink {
    pub mts: u32,
    pub width: u32,
}

#[derive(Debug, Deserialize)]
pub struct NvLinks {
    pub links: Vec<u32>,
    pub remote: Remote,
    #[serde(default = "up")]
    pub active: bool,
}

fn up() -> bool {
    true
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Remote {
    Gpu(Pci),
    Switch(Option<Pci>),
    Cpu,
    Unknown,
}

#[derive(Debug, Deserialize)]
pub struct Fabric {
    pub cluster: String,
    pub clique: u32,
}

/// The MIG layout of a GPU, in machine files and in the command `mig`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    pub enabled: bool,
    #[serde(default)]
    pub devices: Vec<MigDevice>,
    /// The profiles. An empty list stands for all but 6_SLICE and 8_SLICE, each with sizes of zero and no placement.
    #[serde(default)]
    pub profiles: Vec<MigProfile>,
    /// GPU instances without a compute instance.
    #[serde(default)]
    pub bare: Vec<BareInstance>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    pub id: u32,
    /// `NVML_GPU_INSTANCE_PROFILE_*`.
    pub number: u32,
    pub gpu_slices: u32,
    pub memory_mib: u64,
    pub instances: u32,
    pub engines: Engines,
    pub placements: Vec<Placement>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BareInstance {
    pub id: u32,
    pub profile_id: u32,
    pub placement: Placement,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    pub index: u32,
    pub uuid: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub gpu_slices: u32,
    pub compute_slices: u32,
    pub memory_mib: u64,
    pub profile_id: Option<u32>,
    pub placement: Option<Placement>,
    /// `none`, `media`, `all-media`, `graphics` or `no-media`.
    pub extension: Option<String>,
    pub engines: Option<Engines>,
}

/// The memory slices of the GPU that an instance takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub start: u32,
    pub size: u32,
}

/// The engines of a MIG device. If a file has none, they are 14 multiprocessors for each compute slice and a copy
/// engine for each GPU slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engines {
    pub multiprocessors: u32,
    pub copy: u32,
    pub decoder: u32,
    pub encoder: u32,
    pub jpeg: u32,
    pub ofa: u32,
}

impl Mig {
    /// The MIG device with this index.
    pub fn device(&self, index: u32) -> Option<&MigDevice> {
        self.devices.iter().find(|device| device.index == index)
    }

    /// The first MIG device of a GPU instance.
    pub fn instance(&self, id: u32) -> Option<&MigDevice> {
        self.devices.iter().find(|device| device.gpu_instance == id)
    }
}

/// NVML's topology levels, with the numbers of `nvmlGpuTopologyLevel_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    Internal = 0,
    Single = 10,
    Multiple = 20,
    HostBridge = 30,
    Node = 40,
    System = 50,
}

#[derive(Debug, Default, Deserialize)]
pub struct Host {
    #[serde(default)]
    pub host_bridges: Vec<HostBridge>,
}

#[derive(Debug, Deserialize)]
pub struct HostBridge {
    pub numa: Option<u32>,
    #[serde(default)]
    pub devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
pub struct Device {
    pub pci: Option<Pci>,
    pub kind: String,
    pub numa: Option<u32>,
    #[serde(default)]
    pub devices: Vec<Device>,
}

/// A PCI address, `domain:bus:device.function`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pci {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
    pub function: u32,
}

impl TryFrom<String> for Pci {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let hex = |part: &str| u32::from_str_radix(part, 16).ok();
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let parts: Vec<&str> = rest.split(':').collect();
            let (domain, bus, device) = match parts[..] {
                [domain, bus, device] => (domain, bus, device),
                [bus, device] => ("0", bus, device),
                _ => return None,
            };
            Some(Self { domain: hex(domain)?, bus: hex(bus)?, device: hex(device)?, function: hex(function)? })
        };
        parse().ok_or_else(|| format!("'{text}' is not a PCI address"))
    }
}

impl Machine {
    /// Reads a machine file.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_saphyr::from_str(text).map(|file: File| file.observed).map_err(|error| error.to_string())
    }

    /// The position of the GPU that an index or a UUID names.
    pub fn position(&self, name: &str) -> Option<usize> {
        let index = name.parse::<u32>().ok();
        self.gpus.iter().position(|gpu| Some(gpu.index) == index || gpu.uuid == name)
    }

    /// The NVLinks of a GPU, and those of other GPUs that lead to it, each by the GPU's position and the link's number.
    pub fn links_of(&self, gpu: usize) -> Vec<(usize, u32)> {
        let to = self.gpus.get(gpu).map(|gpu| Remote::Gpu(gpu.pci));
        let ends = self.gpus.iter().enumerate().flat_map(|(at, gpu)| {
            gpu.nvlinks.iter().flatten().flat_map(move |end| end.links.iter().map(move |link| (at, *link, end.remote)))
        });
        ends.filter(|(at, _, remote)| *at == gpu || Some(*remote) == to).map(|(at, link, _)| (at, link)).collect()
    }

    /// The common ancestor of two GPUs, by position: the file's entry for the pair, or else the level in the host's
    /// tree. `None` if a GPU is not in the tree.
    pub fn common_ancestor(&self, a: usize, b: usize) -> Option<Level> {
        let (a, b) = (self.gpus.get(a)?, self.gpus.get(b)?);
        if let Some(level) = a.common_ancestors.get(&b.index).or_else(|| b.common_ancestors.get(&a.index)) {
            return Some(*level);
        }
        let (one, two) = (self.path(a.pci)?, self.path(b.pci)?);
        if one.bridge != two.bridge {
            let same_node = one.numa.is_some() && one.numa == two.numa;
            return Some(if same_node { Level::Node } else { Level::System });
        }
        let shared = one.steps.iter().zip(&two.steps).take_while(|(x, y)| std::ptr::eq(**x, **y)).count();
        let switches = |steps: &[&Device]| steps.iter().filter(|step| step.is_switch()).count();
        Some(match shared.checked_sub(1) {
            None => Level::HostBridge,
            Some(last) => {
                let crossed = switches(&one.steps[last..]) + switches(&two.steps[shared..]);
                if crossed > 1 { Level::Multiple } else { Level::Single }
            }
        })
    }

    fn path(&self, pci: Pci) -> Option<Path<'_>> {
        self.host.host_bridges.iter().enumerate().find_map(|(number, bridge)| {
            let mut steps = Vec::new();
            descend(&bridge.devices, pci, &mut steps).then(|| {
                let numa = steps.iter().rev().find_map(|step| step.numa).or(bridge.numa);
                Path { bridge: number, numa, steps }
            })
        })
    }
}

/// The path from a host bridge down to a GPU, the GPU included.
struct Path<'a> {
    bridge: usize,
    numa: Option<u32>,
    steps: Vec<&'a Device>,
}

impl Device {
    /// Returns true for a switch as a whole or for its upstream port, so that each switch counts once.
    fn is_switch(&self) -> bool {
        matches!(self.kind.as_str(), "upstream-port" | "switch")
    }
}

fn descend<'a>(devices: &'a [Device], pci: Pci, steps: &mut Vec<&'a Device>) -> bool {
    devices.iter().any(|device| {
        steps.push(device);
        let found = device.pci == Some(pci) || descend(&device.devices, pci, steps);
        if !found {
            steps.pop();
        }
        found
    })
}
