//! The command line, the environment and the configuration file: only this module reads them.
//!
//! Owns the options, their names, defaults and help texts. Called by `main`, `src/run` and `src/commands`, which build live
//! objects from its plain data.

mod admin;
mod api_server;
mod benchmark;
mod check;
mod config_manager;
mod doctor;
mod documents;
mod dra;
mod labels;
mod list;
mod metrics;
mod mps;
mod nvml;
mod program;
mod rails;
mod removed;
pub mod settings;
mod subcommands;
mod wait;
mod watch;
mod xids;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, ValueEnum};
use linkwise_system::log::LogFormat;

use linkwise_core::allocation::AllocationPolicy;
use linkwise_core::state::GpuSelector;
use linkwise_core::words::Words;

pub use admin::{AdminArgs, AdminOrder, TopArgs};
pub use api_server::ApiServerArgs;
pub use benchmark::{ExpectArgs, PodArgs, VerifyArgs};
pub use check::{ConfigArgs, ConfigCheckArgs, ConfigCommand, ConfigShowArgs};
pub use config_manager::{ConfigDefaults, ConfigManagerArgs, ConfigManagerError, ConfigManagerSettings, Fallback};
pub use doctor::DoctorArgs;
pub use documents::{CompletionsArgs, MACHINE_NAMES, ManArgs, Shell, completable, documented};
pub use dra::{ClaimArgs, ClaimKind, DraArgs, FleetArgs, ManifestFormat, Near};
pub use labels::{ApiArgs, LabelsArgs};
pub use list::UnitName;
pub use metrics::ConfigMetrics;
pub use mps::{INIT_FLAG, MpsCommand, MpsControlDaemonArgs, MpsRootArgs};
pub use nvml::NvmlArgs;
pub use rails::Rails;
pub use settings::{Environment, Flags, Interval, Settings};
pub use subcommands::Command;
pub use wait::WaitArgs;
pub use watch::FileWatch;
pub use xids::XidArgs;

/// A topology-aware Kubernetes device plugin for NVIDIA GPUs.
///
/// A pod requests nvidia.com/gpu: N, the kubelet asks linkwise which N, and linkwise answers with the set of GPUs that
/// are closest by NVLink, PCIe switch, NUMA node and NIC, and explains why.
#[derive(Debug, Parser)]
#[command(name = "linkwise", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The default of [`HostArgs::nvml_memory_mib`]. Two agents that leak, one of which is to take over, fit with linkwise
/// itself into 128 MiB, the container's limit in manifests and chart (docs/nvml.md has the sum).
const AGENT_MEMORY_MIB: u64 = 48;

/// The most that [`HostArgs::nvml_memory_mib`] can be, 1 TiB: no bound.
const MOST_AGENT_MEMORY_MIB: u64 = 1 << 20;

/// The driver and the host.
#[derive(Clone, Debug, Args)]
pub struct HostArgs {
    /// The driver's NVML library, instead of libnvidia-ml.so.1 on the library path; or the root folder of a driver's
    /// installation, which is searched at the usual places each time the library is loaded
    #[arg(long, value_name = "PATH", env = "LINKWISE_NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,
    /// How much memory that the kernel cannot take back the process that calls NVML may have, in MiB: with more it is
    /// killed and replaced
    #[arg(
        long,
        value_name = "N",
        env = "LINKWISE_NVML_MEMORY_MIB",
        default_value_t = AGENT_MEMORY_MIB,
        value_parser = clap::value_parser!(u64).range(1..=MOST_AGENT_MEMORY_MIB)
    )]
    pub nvml_memory_mib: u64,
    /// A file that gets a line for each call of NVML, for a report of a machine
    #[arg(long, value_name = "FILE", env = "LINKWISE_NVML_CALLS", hide = true)]
    pub nvml_calls: Option<PathBuf>,
    /// The host's /sys
    #[arg(long, value_name = "PATH", env = "LINKWISE_SYSFS", default_value = "/sys")]
    pub sysfs: PathBuf,
    /// The kernel's /proc; its driver/nvidia-caps has the numbers of MIG devices' nodes
    #[arg(long, value_name = "PATH", env = "LINKWISE_PROCFS", default_value = "/proc", hide = true)]
    pub procfs: PathBuf,
}

/// The log's levels and form.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Log level: error, warn, info, debug, or levels by module, such as warn,linkwise=debug
    #[arg(long, value_name = "FILTER", env = "LINKWISE_LOG", default_value = "info")]
    pub log: String,
    /// Form of the log lines
    #[arg(long, value_name = "FORMAT", env = "LINKWISE_LOG_FORMAT", default_value = "text", value_parser = word::<LogFormat>())]
    pub log_format: LogFormat,
}

/// `linkwise run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The settings' flags.
    #[command(flatten)]
    pub flags: Flags,
    /// Deadlines and intervals.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The folder in which the GPUs' health is stored for the next start, as linkwise_health.json; by default the
    /// folder linkwise beside the kubelet's socket
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// The node's name, for --write-labels-file and --dra-gpus
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// The API server, for --dra-gpus.
    #[command(flatten)]
    pub api: ApiServerArgs,
    /// The UID of this process's pod, by which a container that starts again does not take over a second time
    #[arg(long, value_name = "UID", env = "LINKWISE_POD_UID", default_value = "")]
    pub pod_uid: String,
    /// The MPS root.
    #[command(flatten)]
    pub mps: MpsRootArgs,
    /// Serve gRPC's health service (grpc.health.v1.Health, the services "" and "liveness") on this port too, as
    /// NVIDIA's DRA driver does for the GPU Operator's probes; 0 takes a free port, which is logged
    #[arg(long, value_name = "PORT", env = "LINKWISE_HEALTHCHECK_PORT")]
    pub healthcheck_port: Option<u16>,
    /// The lists of XIDs.
    #[command(flatten)]
    pub xids: XidArgs,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The machine of a command.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file (`linkwise snapshot` writes one), an
    /// NCCL topology dump (NCCL_TOPO_DUMP_FILE) or a hwloc XML; by default this machine
    #[arg(long, value_name = "NAME|FILE")]
    pub node: Option<String>,
    /// Take the host around the GPUs from a hwloc XML (lstopo host.xml) instead
    #[arg(long = "host", value_name = "FILE")]
    pub host_xml: Option<String>,
    /// The driver and the host, used without --node.
    #[command(flatten)]
    pub host: HostArgs,
}

/// The form of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    Text,
    /// JSON for scripts.
    Json,
}

/// The form in which a machine is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopologyFormat {
    /// For people: tree and matrix.
    Text,
    /// For scripts.
    Json,
    /// A picture, for a browser.
    Svg,
    /// A topology file, for NCCL's NCCL_TOPO_FILE.
    Nccl,
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
    /// Text for people, JSON for scripts, a picture (svg, for a browser), or a topology file for NCCL
    #[arg(long, default_value = "text")]
    pub format: TopologyFormat,
    /// GPUs in use, as indices or UUIDs with commas: pictures colour them, the text marks them; not for json and nccl
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "list", value_parser = list::gpu)]
    pub allocated: Option<Vec<GpuSelector>>,
}

/// `linkwise allocate`.
#[derive(Clone, Debug, Args)]
pub struct AllocateArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// How many GPUs; with --replicas, how many slots
    #[arg(long, value_name = "N")]
    pub size: usize,
    /// The available GPUs, as indices or UUIDs with commas; by default all. With --replicas, slots as INDEX::SLOT or
    /// UUID::SLOT, or GPUs with all their slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub available: Option<Vec<UnitName>>,
    /// The GPUs that must be in the answer, as indices or UUIDs with commas; with --replicas, slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub must_include: Vec<UnitName>,
    /// Share each GPU: choose among N slots of each (time-slicing, MPS), numbered from 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub replicas: Option<u16>,
    /// The allocation policy: best-effort takes the best set (default), distributed the slots of the least used GPUs
    /// (default with --replicas), packed those of the most used GPU. Of whole GPUs all three choose the best set
    #[arg(long, value_name = "POLICY", value_parser = word::<AllocationPolicy>())]
    pub policy: Option<AllocationPolicy>,
    /// Explain the choice: its values beside the runner-up's and the idle machine's best set, the GPUs that stay free
    /// and the best sets among those, the nearest NICs
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
    /// The machine's name; by default the host's name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Replace what identifies this machine by made-up values: the UUIDs of GPUs and of the NVLink fabric, the host's
    /// name. PCI addresses, models and NIC names stay
    #[arg(long)]
    pub redact: bool,
}

/// `linkwise nvml-agent`.
#[derive(Clone, Debug, Args)]
pub struct AgentArgs {
    /// What its parent wants of it, as JSON
    pub command: String,
}

/// A parser for the words of an enum.
fn word<T: Words + Send + Sync>() -> impl TypedValueParser<Value = T> {
    one_of(T::WORDS)
}

/// A parser for one of these words.
fn one_of<T: Copy + Send + Sync + 'static>(words: &'static [(&'static str, T)]) -> impl TypedValueParser<Value = T> {
    let value = |text: String| words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word))
        .try_map(move |text| value(text).ok_or("unknown word"))
}

impl Cli {
    /// Reads argv and the environment. Prints help, version or errors, and exits, if that is requested or needed.
    pub fn read() -> Self {
        Self::try_parse_from(command_line()).unwrap_or_else(|error| removed::explained(error).exit())
    }
}

/// Returns argv, the program first and then the subcommand, even if the program's name stands for it.
pub fn command_line() -> impl Iterator<Item = OsString> {
    #[expect(clippy::disallowed_methods, reason = "this is the door that the ban points to")]
    let (words, variable) = (std::env::args_os(), |name: &str| std::env::var(name).ok());
    program::words(words, variable).into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn booleans_are_read_as_by_the_nvidia_plugin() {
        let run = |args: &[&str]| {
            let args = ["linkwise", "run"].iter().chain(args);
            let flags = match Cli::try_parse_from(args).map(|cli| cli.command) {
                Ok(Command::Run(run)) => run.flags,
                other => panic!("{other:?}"),
            };
            let (settings, _) = Settings::build(&flags, &Environment::default(), "");
            (settings.pass_device_specs.value, settings.fail_on_init_error.value)
        };
        assert_eq!(run(&[]), (false, None));
        assert_eq!(run(&["--pass-device-specs", "--fail-on-init-error"]), (true, Some(true)));
        assert_eq!(run(&["--pass-device-specs=true", "--fail-on-init-error=false"]), (true, Some(false)));
        assert_eq!(run(&["--pass-device-specs=1", "--fail-on-init-error=False"]), (true, Some(false)));
    }

    #[test]
    fn lists_name_gpus_by_index_or_uuid() {
        let cli = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,GPU-a,3::10,GPU-a::0"])
            .unwrap();
        let Command::Allocate(allocate) = cli.command else { panic!("{cli:?}") };
        let unit = |gpu, slot| UnitName { gpu, slot };
        let uuid = || GpuSelector::Uuid("GPU-a".parse().unwrap());
        let expected = [
            unit(GpuSelector::Index(0), None),
            unit(uuid(), None),
            unit(GpuSelector::Index(3), Some(10)),
            unit(uuid(), Some(0)),
        ];
        assert_eq!(allocate.available, Some(expected.to_vec()));
        let error = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,?"]).unwrap_err();
        assert!(error.to_string().contains("'?' is neither a GPU index nor a GPU UUID"), "{error}");
    }
}
