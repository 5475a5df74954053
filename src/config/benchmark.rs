//! The options of `linkwise expect` and `linkwise verify`.

use std::convert::Infallible;
use std::path::PathBuf;

use clap::Args;

use super::machine::gpu;
use super::{Format, NodeArgs};
use linkwise_core::quote::quoted;
use linkwise_core::state::GpuSelector;

/// `linkwise expect`.
#[derive(Clone, Debug, Args)]
pub struct ExpectArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs, as indices, UUIDs or PCI addresses with commas; by default all
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// The pod that has the GPUs.
    #[command(flatten)]
    pub pod: PodArgs,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// `linkwise verify`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exits with 0 if the bandwidth is as expected or cannot be judged; with 1 if it is not as expected, \
                        if nccl-tests counted wrong values, or if the text cannot be read; with 2 if the command \
                        line is wrong."
)]
pub struct VerifyArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs of the run, as indices, UUIDs or PCI addresses with commas; by default those whose PCI addresses the
    /// text lists, or all GPUs of the machine if the run had as many
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// The pod that has the GPUs.
    #[command(flatten)]
    pub pod: PodArgs,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// The output of all_reduce_perf of nccl-tests, with or without NCCL's log (- for standard input)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// The GPUs of a pod of this node, as the running linkwise has them.
#[derive(Clone, Debug, Args)]
pub struct PodArgs {
    /// The GPUs of a pod of this node, of all its containers or of one
    #[arg(long, value_name = "NAMESPACE/POD[/CONTAINER]", conflicts_with = "gpus", value_parser = pod)]
    pub pod: Option<String>,
    /// The admin socket of the running linkwise (its --admin-socket), which knows the pods
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    // clap would refuse an empty variable, also for a command that needs no socket.
    #[arg(value_parser = |text: &str| Ok::<_, Infallible>(PathBuf::from(text)))]
    pub socket: PathBuf,
}

/// Takes `NAMESPACE/POD` and `NAMESPACE/POD/CONTAINER`.
fn pod(text: &str) -> Result<String, String> {
    let parts: Vec<&str> = text.split('/').collect();
    match parts.contains(&"") || !(2..=3).contains(&parts.len()) {
        true => Err(format!("{} is not NAMESPACE/POD or NAMESPACE/POD/CONTAINER", quoted(text))),
        false => Ok(text.to_owned()),
    }
}
