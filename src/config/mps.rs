//! The options of `linkwise mps-control-daemon`, and those that the plugin shares with it.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Flags, HostArgs, LogArgs, NvmlArgs};

/// The flag for [`MpsControlDaemonArgs::init`].
pub const INIT_FLAG: &str = "--init";

/// `linkwise mps-control-daemon`.
#[derive(Clone, Debug, Args)]
pub struct MpsControlDaemonArgs {
    /// Another task than running the daemons.
    #[command(subcommand)]
    pub command: Option<MpsCommand>,
    /// Be the first process of the container, and run the daemons in a child: what process 1 does unasked
    #[arg(long, hide = true)]
    pub init: bool,
    /// The MPS root.
    #[command(flatten)]
    pub root: MpsRootArgs,
    /// The settings' flags, which have to be the same as the plugin's.
    #[command(flatten)]
    pub flags: Flags,
    /// Deadlines and intervals.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The folder that the plugin and the daemons share.
#[derive(Clone, Debug, Args)]
pub struct MpsRootArgs {
    /// Where the host's MPS root is mounted in this container (--mps-root is its path on the host)
    #[arg(
        long = "mps-container-root",
        value_name = "PATH",
        env = "LINKWISE_MPS_CONTAINER_ROOT",
        default_value = "/mps",
        global = true
    )]
    pub container_root: PathBuf,
}

/// Other tasks of `linkwise mps-control-daemon`.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum MpsCommand {
    /// Mount the shared memory of MPS under the MPS root, if it is not mounted yet (in the privileged init container)
    MountShm,
}
