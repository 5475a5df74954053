//! The command line, the environment and the configuration file: the one place that reads them.
//!
//! Owns the options, their names, defaults and help texts. Called by `main`; what it makes is plain data
//! from which the composition roots build live objects.

mod admin;
mod check;
mod doctor;
pub mod file;
mod list;
mod mps;
mod nvml;
mod program;
pub mod settings;
mod simulate;
mod subcommands;
mod topology_manager;
mod watch;
mod xids;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use serde::Serialize;

use crate::allocation::AllocationPolicy;

pub use admin::{AdminArgs, AdminOrder};
pub use check::{ConfigArgs, ConfigCheckArgs, ConfigCommand, ConfigShowArgs};
pub use doctor::DoctorArgs;
pub use list::{GpuName, UnitName};
pub use mps::{MpsCommand, MpsControlDaemonArgs, MpsRootArgs};
pub use nvml::NvmlArgs;
pub use settings::{Environment, Flags, Settings};
pub use simulate::{SimulateArgs, SimulatePolicy};
pub use topology_manager::{NumaHintsArg, ScopeArg, TopologyPolicyArg};
pub use watch::FileWatch;
pub use xids::XidArgs;

/// A topology-aware Kubernetes device plugin for NVIDIA GPUs.
///
/// Pods ask for nvidia.com/gpu: N, the kubelet asks linkwise which N, and linkwise answers with the set whose
/// members are really close: NVLink, PCIe switch, NUMA node, NIC. And it says why.
#[derive(Debug, Parser)]
#[command(name = "linkwise", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do; `subcommands` has the words.
#[derive(Debug)]
pub enum Command {
    /// `linkwise run`.
    Run(Box<RunArgs>),
    /// `linkwise demo`.
    Demo(DemoArgs),
    /// `linkwise topology`.
    Topology(TopologyArgs),
    /// `linkwise allocate`.
    Allocate(AllocateArgs),
    /// `linkwise simulate`.
    Simulate(SimulateArgs),
    /// `linkwise snapshot`.
    Snapshot(SnapshotArgs),
    /// `linkwise doctor`.
    Doctor(DoctorArgs),
    /// `linkwise admin`.
    Admin(AdminArgs),
    /// `linkwise mps-control-daemon`.
    MpsControlDaemon(Box<MpsControlDaemonArgs>),
    /// `linkwise config`.
    Config(ConfigArgs),
    /// `linkwise nvml-agent`.
    NvmlAgent(AgentArgs),
}

/// How to reach the driver and the host.
#[derive(Clone, Debug, Args)]
pub struct HostArgs {
    /// The driver's NVML library, instead of libnvidia-ml.so.1 on the library path; or the root folder under which a
    /// driver is installed, where it is looked for in the usual places each time it is needed
    #[arg(long, value_name = "PATH", env = "LINKWISE_NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,
    /// Where the host's /sys is
    #[arg(long, value_name = "PATH", env = "LINKWISE_SYSFS", default_value = "/sys")]
    pub sysfs: PathBuf,
    /// Where the kernel's /proc is; the numbers of MIG devices' nodes are in its driver/nvidia-caps
    #[arg(long, value_name = "PATH", env = "LINKWISE_PROCFS", default_value = "/proc", hide = true)]
    pub procfs: PathBuf,
}

/// What the log says and how.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug, or levels by module, such as warn,linkwise=debug
    #[arg(long, value_name = "FILTER", env = "LINKWISE_LOG", default_value = "info")]
    pub log: String,
    /// How to log
    #[arg(long, value_name = "FORMAT", env = "LINKWISE_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `linkwise run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// What the configuration says, as far as flags say it.
    #[command(flatten)]
    pub flags: Flags,
    /// How long NVML may take.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// Where the GPUs' health is kept for the next start, as linkwise_health.json; without it, in the folder linkwise beside
    /// the kubelet's socket
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where the MPS root is.
    #[command(flatten)]
    pub mps: MpsRootArgs,
    /// Which XIDs count.
    #[command(flatten)]
    pub xids: XidArgs,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// `linkwise demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file, an NCCL topology dump
    /// (NCCL_TOPO_DUMP_FILE) or a hwloc XML
    #[arg(long, value_name = "NAME|FILE", default_value = "dgx-h100")]
    pub machine: String,
    /// The kubelet's Topology Manager: how strict it is
    #[arg(long, value_name = "POLICY", default_value = "none")]
    pub topology_manager_policy: TopologyPolicyArg,
    /// What the Topology Manager aligns as one
    #[arg(long, value_name = "SCOPE", default_value = "container")]
    pub scope: ScopeArg,
    /// Which NUMA nodes devices claim (see docs/topology-manager.md)
    #[arg(long, value_name = "HINTS", env = "LINKWISE_NUMA_HINTS", default_value = "node")]
    pub numa_hints: NumaHintsArg,
    /// Plain text, also on a terminal
    #[arg(long, env = "NO_COLOR", action = clap::ArgAction::SetTrue, value_parser = clap::builder::FalseyValueParser::new())]
    pub no_color: bool,
    /// Keep serving after the script, until interrupted; prints where /metrics is
    #[arg(long)]
    pub hold: bool,
    /// Where /metrics, /livez and /readyz are served; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub metrics_address: SocketAddr,
    /// The log; the demo itself is on standard output, the log on standard error.
    #[arg(long, value_name = "FILTER", env = "LINKWISE_LOG", default_value = "error")]
    pub log: String,
}

/// Which machine a command looks at.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file (`linkwise snapshot` writes one), an
    /// NCCL topology dump (NCCL_TOPO_DUMP_FILE) or a hwloc XML; without it, this one
    #[arg(long, value_name = "NAME|FILE")]
    pub node: Option<String>,
    /// Take the host around the GPUs from a hwloc XML (lstopo host.xml) instead
    #[arg(long = "host", value_name = "FILE")]
    pub host_xml: Option<String>,
    /// The driver and the host, where no node is named.
    #[command(flatten)]
    pub host: HostArgs,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For scripts.
    Json,
}

/// The form of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopologyFormat {
    /// For people: tree and matrix.
    Text,
    /// For scripts.
    Json,
    /// A picture, for a browser.
    Svg,
    /// A picture, for Graphviz.
    Dot,
    /// A topology file, for NCCL's NCCL_TOPO_FILE.
    Nccl,
}

/// `linkwise topology`.
#[derive(Clone, Debug, Args)]
pub struct TopologyArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// List the built-in machines, one a line, its name first
    #[arg(long, conflicts_with = "node")]
    pub list: bool,
    /// For people, for scripts, a picture (for a browser: svg, for Graphviz: dot), or a topology file for NCCL
    #[arg(long, default_value = "text")]
    pub format: TopologyFormat,
    /// The GPUs that are held, as indices or UUIDs with commas: pictures colour them, the text says so; not for json and nccl
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "list")]
    pub allocated: Option<Vec<GpuName>>,
}

/// `linkwise allocate`.
#[derive(Clone, Debug, Args)]
pub struct AllocateArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// How many GPUs; with --replicas, how many slots
    #[arg(long, value_name = "N", required_unless_present = "requests")]
    pub size: Option<usize>,
    /// The GPUs that are free, as indices or UUIDs with commas; without it, all. With --replicas, slots as INDEX::SLOT or
    /// UUID::SLOT, or GPUs with all their slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub available: Option<Vec<UnitName>>,
    /// The GPUs that must be in the answer, as indices or UUIDs with commas; with --replicas, slots
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub must_include: Vec<UnitName>,
    /// Share each GPU: choose among N slots of each (time-slicing, MPS), numbered from 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub replicas: Option<u16>,
    /// How to choose: the best set (default), or among slots the least used GPUs first (default with --replicas) or the
    /// most used GPU first; of whole GPUs none is more used than another, and all three choose the best set
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<PolicyArg>,
    /// Take requests from a file (- for standard input), a JSON object a line such as
    /// {"size": 2, "available": [0, 1, 4], "must_include": []}, and answer each with one JSON line
    #[arg(long, value_name = "FILE", conflicts_with_all = ["size", "available", "must_include"])]
    pub requests: Option<PathBuf>,
    /// Explain the choice: its values beside the runner-up's and the idle machine's best, what stays free and what that
    /// can still offer, the nearest NICs
    #[arg(long, conflicts_with = "requests")]
    pub explain: bool,
    /// For people or for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// How to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyArg {
    /// The best set of distinct GPUs, however used they are
    BestEffort,
    /// Distinct GPUs, the least used first
    Distributed,
    /// The most used GPU first
    Packed,
}

impl From<PolicyArg> for AllocationPolicy {
    fn from(policy: PolicyArg) -> Self {
        match policy {
            PolicyArg::BestEffort => Self::BestEffort,
            PolicyArg::Distributed => Self::Distributed,
            PolicyArg::Packed => Self::Packed,
        }
    }
}

/// `linkwise snapshot`.
#[derive(Clone, Debug, Args)]
pub struct SnapshotArgs {
    /// The machine; another kind of file is so turned into a node file.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Write to this file instead of standard output; it is there whole or not at all
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace the file if there is one
    #[arg(long, requires = "output")]
    pub force: bool,
    /// What the machine is called; without it, by the host's name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Replace what names this very machine by made-up values: the UUIDs of GPUs and of the NVLink fabric, the host's
    /// name. PCI addresses, models and NIC names stay
    #[arg(long)]
    pub redact: bool,
}

/// `linkwise nvml-agent`.
#[derive(Clone, Debug, Args)]
pub struct AgentArgs {
    /// The driver's NVML library
    #[arg(long, value_name = "PATH")]
    pub library: Option<PathBuf>,
    /// Where the kernel's /proc is
    #[arg(long, value_name = "PATH", default_value = "/proc")]
    pub procfs: PathBuf,
    /// How long from one round of cheap calls to the next, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub poll_ms: u64,
    /// How much memory of its own it may have, in MiB
    #[arg(long, value_name = "N", default_value_t = 96)]
    pub memory_mib: u64,
    /// A GPU that is not to be touched: its index, and of how many
    #[arg(long, value_name = "INDEX/COUNT")]
    pub skip: Vec<String>,
}

impl Cli {
    /// Reads argv and the environment; prints help, version or what is wrong with them and ends where asked for.
    pub fn read() -> Self {
        #[expect(clippy::disallowed_methods, reason = "this is the door that the ban points to")]
        let words = std::env::args_os();
        Self::parse_from(program::words(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn booleans_read_as_the_nvidia_plugin_reads_them() {
        let run = |args: &[&str]| {
            let args = ["linkwise", "run"].iter().chain(args);
            let flags = match Cli::try_parse_from(args).map(|cli| cli.command) {
                Ok(Command::Run(run)) => run.flags,
                other => panic!("{other:?}"),
            };
            let file = &file::File::parse("").0;
            let sources = settings::Sources { flags: &flags, environment: &Environment::default(), file };
            let settings = Settings::build(&sources, &mut Vec::new());
            (settings.pass_device_specs.value, settings.fail_on_init_error.value)
        };
        assert_eq!(run(&[]), (false, None));
        assert_eq!(run(&["--pass-device-specs", "--fail-on-init-error"]), (true, Some(true)));
        assert_eq!(run(&["--pass-device-specs=true", "--fail-on-init-error=false"]), (true, Some(false)));
        assert_eq!(run(&["--pass-device-specs=1", "--fail-on-init-error=False"]), (true, Some(false)));
    }

    #[test]
    fn uids_are_a_list_of_numbers() {
        let run = |args: &[&str]| Cli::try_parse_from(["linkwise", "run"].iter().chain(args));
        assert!(run(&["--allowed-uids", "1000,65534"]).is_ok());
        for wrong in ["root", "-1", "1000,,5", "4294967296"] {
            let error = run(&[&format!("--allowed-uids={wrong}")]).unwrap_err().to_string();
            assert!(error.contains("--allowed-uids"), "{error}");
        }
    }

    #[test]
    fn lists_name_gpus_by_index_or_uuid() {
        let cli = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,GPU-a,3::10,GPU-a::0"])
            .unwrap();
        let Command::Allocate(allocate) = cli.command else { panic!("{cli:?}") };
        let unit = |gpu, slot| UnitName { gpu, slot };
        let uuid = || GpuName::Uuid("GPU-a".parse().unwrap());
        let expected = [
            unit(GpuName::Index(0), None),
            unit(uuid(), None),
            unit(GpuName::Index(3), Some(10)),
            unit(uuid(), Some(0)),
        ];
        assert_eq!(allocate.available, Some(expected.to_vec()));
        let error = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,?"]).unwrap_err();
        assert!(error.to_string().contains("'?' is neither a GPU index nor a GPU UUID"), "{error}");
    }
}
