//! The options of `linkwise admin` and `linkwise top`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Format;
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
    /// Clear a GPU's faults: it is healthy, and offered to pods again
    Clear {
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
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,
    /// Look once, print and end; text that goes to a pipe or a file is printed once in any case
    #[arg(long)]
    pub once: bool,
    /// Text is all that there is; the JSON of earlier versions is refused by name
    #[arg(long, hide = true, value_parser = ["text"])]
    pub format: Option<String>,
}
