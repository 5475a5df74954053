//! The options of an operator's commands: `admin`, `top`, `doctor`, `wait`, `clear-condition`, `config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::settings::{DRA_REGISTRY, KUBELET_SOCKET, POD_RESOURCES_SOCKET};
use super::{ApiServerArgs, Flags, Format, HostArgs, word};
use linkwise_core::state::NumaHints;
use linkwise_core::topology::GpuUuid;

/// `linkwise admin`.
#[derive(Clone, Debug, Args)]
pub struct AdminArgs {
    /// The admin socket of the running linkwise (its --admin-socket)
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    pub socket: PathBuf,
    /// The request or order.
    #[command(subcommand)]
    pub order: AdminOrder,
}

/// A request or an order.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum AdminOrder {
    /// Print the node's state: GPUs, their health and holders, the offered resources, the last choices
    State {
        /// JSON for scripts, or text for people
        #[arg(long, default_value = "json")]
        format: Format,
    },
    /// Release the driver in all processes of linkwise on this node until resume, for a driver upgrade or a GPU reset.
    /// Pods are still admitted, by the last known state
    Release,
    /// Use the driver again after a release
    Resume,
    /// Clear a GPU's faults, so that it is healthy and offered to pods again
    Clear {
        /// The GPU's UUID
        #[arg(value_name = "UUID")]
        gpu: GpuUuid,
    },
    /// Give a GPU, its MIG devices and its slots to no new pod until uncordon, over restarts and reboots. Pods that
    /// have the GPU keep it
    Cordon {
        /// The GPU's UUID
        #[arg(value_name = "UUID")]
        gpu: GpuUuid,
        /// The reason, which is shown with the GPU
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// The name of the person who orders it; by default the user of this command
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
        /// Evict the pods that have the GPU by a claim (under DRA, by a NoExecute taint of the device)
        #[arg(long)]
        evict: bool,
    },
    /// Accept the hardware as it is: GPUs, NVLinks, lanes and memory that the node lacks are no longer reported
    Accept,
    /// Give a GPU to pods again after a cordon
    Uncordon {
        /// The GPU's UUID
        #[arg(value_name = "UUID")]
        gpu: GpuUuid,
    },
}

/// `linkwise top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// The admin socket of the running linkwise (its --admin-socket)
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    pub socket: PathBuf,
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,
    /// Print the state once and end; to a pipe or a file it is printed once in any case
    #[arg(long)]
    pub once: bool,
    /// Text is the only format; json, which earlier versions had, is refused with what to do instead
    #[arg(long, hide = true, value_parser = ["text"])]
    pub format: Option<String>,
}

/// `linkwise doctor`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exits with 0 if no check failed (there may be warnings), with 1 if one failed, with 2 if the command \
                        line is wrong."
)]
pub struct DoctorArgs {
    /// The kubelet's registration socket
    #[arg(long, value_name = "PATH", env = "KUBELET_SOCKET", default_value = KUBELET_SOCKET)]
    pub kubelet_socket: PathBuf,
    /// The kubelet's PodResources socket
    #[arg(long, value_name = "PATH", env = "LINKWISE_POD_RESOURCES_SOCKET", default_value = POD_RESOURCES_SOCKET)]
    pub pod_resources_socket: PathBuf,
    /// The admin socket of the running linkwise, if it has one; the faults of GPUs are read from there
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    pub admin_socket: PathBuf,
    /// The folder in which linkwise stores the GPUs' health; by default the folder linkwise beside the kubelet's socket
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// The folder with the host's /dev, /proc, /etc/cdi and /var/run/cdi
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub root: PathBuf,
    /// The --numa-hints of the running linkwise (see docs/topology-manager.md)
    #[arg(
        long,
        value_name = "HINTS",
        env = "LINKWISE_NUMA_HINTS",
        default_value = "node",
        value_parser = word::<NumaHints>()
    )]
    pub numa_hints: NumaHints,
    /// The node's name, for its objects of the API server
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// The API server.
    #[command(flatten)]
    pub api: ApiServerArgs,
    /// The longest time for each check; a check that takes longer fails
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `linkwise wait`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exits with 0 once the kubelet has devices of linkwise or linkwise's DRA driver listens, with 1 if \
                        neither happens in time, with 2 if the command line is wrong."
)]
pub struct WaitArgs {
    /// The kubelet's registration socket; linkwise's own sockets are beside it
    #[arg(long, value_name = "PATH", env = "KUBELET_SOCKET", default_value = KUBELET_SOCKET)]
    pub kubelet_socket: PathBuf,
    /// The kubelet's PodResources socket
    #[arg(long, value_name = "PATH", env = "LINKWISE_POD_RESOURCES_SOCKET", default_value = POD_RESOURCES_SOCKET)]
    pub pod_resources_socket: PathBuf,
    /// The folder in which the kubelet finds DRA drivers
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_DRA_REGISTRY_DIR", default_value = DRA_REGISTRY)]
    pub dra_registry_dir: PathBuf,
    /// The node's name, for the answer
    #[arg(long, value_name = "NAME", env = "NODE_NAME", default_value = "this node", hide_default_value = true)]
    pub node_name: String,
    /// The longest time to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
}

/// `linkwise clear-condition`.
#[derive(Clone, Debug, Args)]
pub struct ClearConditionArgs {
    /// The type of the condition
    #[arg(
        long = "type",
        value_name = "TYPE",
        env = "LINKWISE_NODE_CONDITION_TYPE",
        default_value = "linkwise.dev/GPUsReady"
    )]
    pub kind: String,
    /// The API server.
    #[command(flatten)]
    pub api: ApiServerArgs,
}

/// `linkwise config`.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// The subcommands of `linkwise config`.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Report all problems of a configuration file, unknown keys included; exits with 1 if there is one
    Check {
        /// The configuration file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Show the effective configuration of these flags, the environment and the file, and where each value comes from
    Show {
        /// The settings' flags.
        #[command(flatten)]
        flags: Flags,
        /// Text for people or JSON for scripts
        #[arg(long, default_value = "text")]
        format: Format,
    },
}
