//! The options of `linkwise wait`.

use std::path::PathBuf;

use clap::Args;

use super::settings::{KUBELET_SOCKET, POD_RESOURCES_SOCKET};

/// `linkwise wait`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exits with 0 once the kubelet has devices of linkwise, or its DRA driver listens, with 1 if it \
                        does not in time, with 2 if the command line is wrong."
)]
pub struct WaitArgs {
    /// The kubelet's registration socket; linkwise's own sockets are beside it
    #[arg(long, value_name = "PATH", env = "KUBELET_SOCKET", default_value = KUBELET_SOCKET)]
    pub kubelet_socket: PathBuf,
    /// The kubelet's PodResources socket
    #[arg(long, value_name = "PATH", env = "LINKWISE_POD_RESOURCES_SOCKET", default_value = POD_RESOURCES_SOCKET)]
    pub pod_resources_socket: PathBuf,
    /// The folder in which the kubelet finds DRA drivers
    #[arg(
        long,
        value_name = "DIR",
        env = "LINKWISE_DRA_REGISTRY_DIR",
        default_value = "/var/lib/kubelet/plugins_registry"
    )]
    pub dra_registry_dir: PathBuf,
    /// The node's name, for the answer
    #[arg(long, value_name = "NAME", env = "NODE_NAME", default_value = "this node", hide_default_value = true)]
    pub node_name: String,
    /// Seconds to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
}
