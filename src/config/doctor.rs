//! The options of `linkwise doctor`.

use std::path::PathBuf;

use clap::Args;

use super::settings::{KUBELET_SOCKET, POD_RESOURCES_SOCKET};
use super::{ApiServerArgs, Format, HostArgs, word};
use linkwise_core::state::NumaHints;

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
    /// How long each check may take; one that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
}
