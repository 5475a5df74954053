//! The options of `linkwise admin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

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
    /// Print the node's GPUs, their health and the offered resources, as JSON
    State,
    /// Release the driver in all processes of linkwise on this node until resume, for a driver upgrade or a GPU reset.
    /// Pods are still admitted, by the last known state
    Release,
    /// Use the driver again after a release
    Resume,
    /// Clear a GPU's faults: it is healthy, and offered to pods again
    Clear {
        /// The GPU's UUID
        #[arg(value_name = "UUID")]
        gpu: GpuUuid,
    },
}
