//! The options of `linkwise admin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::topology::GpuUuid;

/// `linkwise admin`.
#[derive(Clone, Debug, Args)]
pub struct AdminArgs {
    /// The socket of the linkwise that runs (its --admin-socket)
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    pub socket: PathBuf,
    /// What to ask or to order.
    #[command(subcommand)]
    pub order: AdminOrder,
}

/// What to ask or to order.
#[derive(Clone, Debug, Subcommand)]
pub enum AdminOrder {
    /// Print what the node is and offers now, as JSON
    State,
    /// Let go of the driver, until resume: for an upgrade or a reset. Pods are admitted from what was last known
    Release,
    /// Take the driver up again
    Resume,
    /// Vouch for a GPU: what is held against it ends, and it is given to pods again
    Clear {
        /// The GPU's UUID
        #[arg(value_name = "UUID")]
        gpu: GpuUuid,
    },
}
