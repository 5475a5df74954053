//! The options of `linkwise mps-control-daemon`, and what the plugin has of them.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Flags, HostArgs, LogArgs, NvmlArgs};

/// Asks for [`MpsControlDaemonArgs::init`].
pub const INIT_FLAG: &str = "--init";

/// `linkwise mps-control-daemon`.
#[derive(Clone, Debug, Args)]
pub struct MpsControlDaemonArgs {
    /// What else to do than to run the daemons.
    #[command(subcommand)]
    pub command: Option<MpsCommand>,
    /// Be the first process of the container, and run the daemons in a child: what process 1 does unasked
    #[arg(long, hide = true)]
    pub init: bool,
    /// Where the MPS root is.
    #[command(flatten)]
    pub root: MpsRootArgs,
    /// What the configuration says, as far as flags say it: the plugin's, for both have to mean the same.
    #[command(flatten)]
    pub flags: Flags,
    /// How long NVML may take.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Where the plugin and the daemons meet.
#[derive(Clone, Debug, Args)]
pub struct MpsRootArgs {
    /// Where the host's MPS root is mounted in this container (--mps-root is where it is on the host)
    #[arg(
        long = "mps-container-root",
        value_name = "PATH",
        env = "LINKWISE_MPS_CONTAINER_ROOT",
        default_value = "/mps",
        global = true
    )]
    pub container_root: PathBuf,
}

/// What else `linkwise mps-control-daemon` does.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum MpsCommand {
    /// Mount the shared memory of MPS under the MPS root, where it is not mounted yet (the privileged init container)
    MountShm,
}
