//! The options of `linkwise expect` and `linkwise verify`.

use std::path::PathBuf;

use clap::Args;

use super::{Format, NodeArgs, list};
use linkwise_core::state::GpuSelector;

/// `linkwise expect`.
#[derive(Clone, Debug, Args)]
pub struct ExpectArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs, as indices or UUIDs with commas; by default all
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = list::gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// `linkwise verify`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Exits with 0 if the bandwidth is as expected, or no claim is made; with 1 if it is not, or \
                        cannot be read; with 2 if the command line is wrong.")]
pub struct VerifyArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs of the run, as indices or UUIDs with commas; by default those that the text lists by their PCI
    /// addresses, or all of a machine that has as many
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = list::gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// What all_reduce_perf of nccl-tests printed, with NCCL's log or without (- for standard input)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}
