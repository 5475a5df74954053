//! The options of the commands about a machine: `topology`, `allocate`, `snapshot`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::{Format, word};
use linkwise_core::allocation::AllocationPolicy;
use linkwise_core::quote::quoted;
use linkwise_core::state::GpuSelector;

/// The default of [`HostArgs::nvml_memory_mib`]. linkwise itself and two leaking agents, the second of which replaces
/// the first, fit into 128 MiB, the container's limit in manifests and chart.
const AGENT_MEMORY_MIB: u64 = 48;

/// The largest value of [`HostArgs::nvml_memory_mib`], 1 TiB: no limit in practice.
const MAX_AGENT_MEMORY_MIB: u64 = 1 << 20;

/// The driver and the host.
#[derive(Clone, Debug, Args)]
pub struct HostArgs {
    /// The driver's NVML library, instead of libnvidia-ml.so.1 on the library path; or the root folder of a driver's
    /// installation, which is searched at the usual places each time the library is loaded
    #[arg(long, value_name = "PATH", env = "LINKWISE_NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,
    /// The most memory in MiB of the process that calls NVML, not counting what the kernel can reclaim: with more it is
    /// killed and replaced
    #[arg(
        long,
        value_name = "N",
        env = "LINKWISE_NVML_MEMORY_MIB",
        default_value_t = AGENT_MEMORY_MIB,
        value_parser = clap::value_parser!(u64).range(1..=MAX_AGENT_MEMORY_MIB)
    )]
    pub nvml_memory_mib: u64,
    /// A file that gets a line for each call of NVML, for a report of a machine
    #[arg(long, value_name = "FILE", env = "LINKWISE_NVML_CALLS", hide = true)]
    pub nvml_calls: Option<PathBuf>,
    /// The host's /sys
    #[arg(long, value_name = "PATH", env = "LINKWISE_SYSFS", default_value = "/sys")]
    pub sysfs: PathBuf,
    /// The kernel's /proc; its driver/nvidia-caps has the minor numbers of MIG devices
    #[arg(long, value_name = "PATH", env = "LINKWISE_PROCFS", default_value = "/proc", hide = true)]
    pub procfs: PathBuf,
}

/// The machine of a command.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file (`linkwise snapshot` writes one), an
    /// NCCL topology dump (NCCL_TOPO_DUMP_FILE), a hwloc XML or the text of `nvidia-smi topo -m` (- for standard
    /// input); by default this machine
    #[arg(long, value_name = "NAME|FILE")]
    pub node: Option<String>,
    /// The model, such as "NVIDIA A100-SXM4-80GB", of GPUs for which the file has none. It gives their links a rate
    #[arg(long, value_name = "MODEL", requires = "node")]
    pub gpu_model: Option<String>,
    /// The driver and the host, used without --node.
    #[command(flatten)]
    pub host: HostArgs,
}

/// The form in which a machine is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopologyFormat {
    /// Tree and matrix, for people.
    Text,
    /// JSON, for scripts.
    Json,
    /// A picture, for a browser.
    Svg,
}

/// `linkwise topology`.
#[derive(Clone, Debug, Args)]
pub struct TopologyArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// List the built-in machines, one per line, with the name first
    #[arg(long, conflicts_with = "node")]
    pub list: bool,
    /// Text for people, JSON for scripts, or a picture (svg, for a browser)
    #[arg(long, default_value = "text")]
    pub format: TopologyFormat,
}

/// `linkwise allocate`.
#[derive(Clone, Debug, Args)]
pub struct AllocateArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Number of GPUs; with --replicas, of slots
    #[arg(long, value_name = "N")]
    pub size: usize,
    /// The available GPUs, as indices, UUIDs or PCI addresses with commas; by default all. With --replicas, slots as
    /// GPU::SLOT, or GPUs with all their slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub available: Option<Vec<UnitName>>,
    /// The GPUs that must be in the answer, as indices, UUIDs or PCI addresses with commas; with --replicas, slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub must_include: Vec<UnitName>,
    /// Share each GPU: choose among N slots of each (time-slicing, MPS), numbered from 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16_384))]
    pub replicas: Option<u16>,
    /// The allocation policy: best-effort takes the best set (default), distributed the slots of the least used GPUs
    /// (default with --replicas), packed those of the most used GPU. For whole GPUs all three choose the best set
    #[arg(long, value_name = "POLICY", value_parser = word::<AllocationPolicy>())]
    pub policy: Option<AllocationPolicy>,
    /// Explain the choice: its values, those of the runner-up and of the idle machine's best set, the GPUs that stay
    /// free, the best sets of these, the nearest NICs
    #[arg(long)]
    pub explain: bool,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// `linkwise snapshot`.
#[derive(Clone, Debug, Args)]
pub struct SnapshotArgs {
    /// The machine; with --node FILE, another format is converted into a node file.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Write to this file instead of standard output, in one step
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace the file if there is one
    #[arg(long, requires = "output")]
    pub force: bool,
    /// The machine's name; by default the host's, with --node the file's, with --redact node
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Replace the values that identify this machine by made-up ones: the UUIDs of GPUs, MIG devices and the NVLink
    /// fabric, the GUIDs of NICs, the host's name. PCI addresses, models and NIC names stay
    #[arg(long)]
    pub redact: bool,
}

/// A GPU, or one slot of a shared GPU: `0`, `0::3`, `GPU-...`, `GPU-...::3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitName {
    /// The GPU.
    pub gpu: GpuSelector,
    /// The slot, from 0; `None`: the whole GPU.
    pub slot: Option<usize>,
}

/// One GPU by index, UUID or PCI address.
pub(super) fn gpu(text: &str) -> Result<GpuSelector, String> {
    let text = text.trim();
    match GpuSelector::from(text) {
        // Node files may have UUIDs that do not begin with GPU-.
        GpuSelector::Model(_) => {
            let problem = |_| format!("{} is neither index, UUID nor PCI address of a GPU", quoted(text));
            text.parse().map(GpuSelector::Uuid).map_err(problem)
        }
        gpu => Ok(gpu),
    }
}

impl FromStr for UnitName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let slot = text.rsplit_once("::").and_then(|(gpu, slot)| Some((gpu, Some(slot.trim().parse().ok()?))));
        let (text, slot) = slot.unwrap_or((text, None));
        Ok(Self { gpu: gpu(text)?, slot })
    }
}
