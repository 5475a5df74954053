//! The options of `linkwise simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Format, NodeArgs};

/// `linkwise simulate`.
#[derive(Clone, Debug, Args)]
pub struct SimulateArgs {
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The jobs (- for standard input): CSV with a header, the columns size (GPUs) and duration_seconds and, if jobs
    /// come one after the other, arrival_seconds; whole numbers. docs/traces/sample.csv is one
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// The policies to compare, with commas. Of whole GPUs none is more used than another: distributed and packed
    /// choose as best-effort does
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "best-effort,first-fit,random")]
    pub policy: Vec<SimulatePolicy>,
    /// The seed of the policy random: the same seed gives the same choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// A policy to choose the GPUs of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SimulatePolicy {
    /// The best set
    BestEffort,
    /// The free GPUs with the lowest PCI addresses
    FirstFit,
    /// Any free GPUs
    Random,
    /// The best set of the least used GPUs: of whole GPUs, the best set
    Distributed,
    /// The best set of the most used GPUs: of whole GPUs, the best set
    Packed,
}
