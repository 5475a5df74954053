//! The options of `linkwise-lab simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use linkwise_core::quote::excerpt;

/// The arguments of `linkwise-lab simulate`.
#[derive(Clone, Debug, Args)]
pub struct SimulateArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file (`linkwise snapshot` writes one), an
    /// NCCL topology dump (NCCL_TOPO_DUMP_FILE) or a hwloc XML
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "nodes")]
    pub node: Option<String>,
    /// The jobs (- for standard input): CSV with a header and whole numbers. The columns are size (GPUs),
    /// duration_seconds and, if jobs do not all arrive at once, arrival_seconds; with --nodes also pods (of size GPUs
    /// each). docs/traces/sample.csv is an example
    #[arg(long, value_name = "FILE", required_unless_present = "nodes")]
    pub trace: Option<PathBuf>,
    /// The policies to compare, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "best-effort,first-fit,random",
        conflicts_with = "nodes"
    )]
    pub policy: Vec<SimulatePolicy>,
    /// The seed of the policy random, and of the jobs that --nodes generates; the same seed gives the same figures
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// A cluster in place of one machine.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Text for people, JSON for scripts, or with --nodes each choice of the scheduler
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// The options of a cluster.
#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    /// Simulate a cluster of N nodes, up to 100000, with the choices of kube-scheduler and its allocator of DRA devices
    /// (see docs/scale.md); the nodes are machines of --node or --mix
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub nodes: Option<u32>,
    /// The machines of the nodes, as built-in names or files, and the weight of each in the mix
    #[arg(
        long,
        value_name = "MACHINE=WEIGHT,...",
        value_delimiter = ',',
        value_parser = weighted,
        requires = "nodes",
        conflicts_with = "node",
        default_value = "dgx-h100=4,hgx-h200=2,dgx-a100=2,dgx1-v100=1,pcie-8x-pix-pairs=1"
    )]
    pub mix: Vec<MachineWeight>,
    /// The doors to compare, separated by commas or repeated: the ways in which pods get GPUs
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        requires = "nodes",
        default_value = "plugin,dra-singles,dra-groups"
    )]
    pub door: Vec<Door>,
    /// The requests of pods besides GPUs. The scheduler spreads pods by them, as its default LeastAllocated does
    #[arg(long, value_name = "WHAT", requires = "nodes", default_value = "share")]
    pub cpu: CpuRequests,
    /// Without --trace: the share of the cluster's GPUs that the jobs would keep busy, from 0.01 to 1. Of 10 jobs five
    /// take 1 GPU, two 2, two 4 and one 8; they run for 5 min, 15 min, 1 h or 4 h and arrive at random
    #[arg(
        long,
        value_name = "SHARE",
        requires = "nodes",
        conflicts_with = "trace",
        value_parser = per_mille,
        default_value = "0.8"
    )]
    pub load: u32,
    /// Without --trace: the number of jobs, up to 5000000; by default 20 for each node, at least 1000. The first
    /// quarter fills the cluster and is not in the figures
    #[arg(
        long,
        value_name = "N",
        requires = "nodes",
        conflicts_with = "trace",
        value_parser = clap::value_parser!(u32).range(1..=5_000_000)
    )]
    pub jobs: Option<u32>,
}

/// A kind of node, and its weight among the kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineWeight {
    /// A built-in name or a file.
    pub machine: String,
    /// The weight, 1 to 1000000.
    pub weight: u32,
}

/// The way in which pods get GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Door {
    /// The device plugin: the scheduler counts free GPUs, the kubelet takes the set that linkwise prefers
    Plugin,
    /// DRA, claims of N single GPUs: the scheduler takes the first in published order
    DraSingles,
    /// DRA, claims as `linkwise claim` prints them: tiered groups as alternatives
    DraGroups,
    /// DRA, claims as `linkwise claim --cluster` prints them: alternatives in the order of their bandwidth in this
    /// cluster
    DraFleet,
    /// DRA, claims as `linkwise claim --exact` prints them: GPUs of one group, or none
    DraExact,
    /// The device plugin with a choice that linkwise does not offer: of sets with equal values, the lowest rails
    PluginRails,
    /// DRA, claims as `linkwise claim --rails` prints them for jobs of several pods (the column pods of a trace): jobs
    /// take turns at the rails. Other jobs get the claims of dra-groups
    DraRails,
}

/// The requests of pods besides GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CpuRequests {
    /// CPU and memory in proportion to the GPUs
    Share,
    /// No CPU and memory: nodes differ for the scheduler only by the devices that a claim would get
    None,
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
}

/// The spelling of a value on the command line.
pub fn word_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn weighted(text: &str) -> Result<MachineWeight, String> {
    const MAX_WEIGHT: u32 = 1_000_000;
    let (machine, weight) = text.rsplit_once('=').unwrap_or((text, "1"));
    if machine.is_empty() {
        return Err("no machine before the '='".to_owned());
    }
    match weight.parse() {
        Ok(weight) if (1..=MAX_WEIGHT).contains(&weight) => Ok(MachineWeight { machine: machine.to_owned(), weight }),
        _ => Err(format!("the weight of {} is not a whole number from 1 to {MAX_WEIGHT}", excerpt(machine))),
    }
}

fn per_mille(text: &str) -> Result<u32, String> {
    let share = text.parse().ok().filter(|share: &f64| (0.01..=1.0).contains(share));
    // Rounds the share to whole per mille.
    share
        .and_then(|share| (10..=1000).find(|mille| (share * 1000.0 - f64::from(*mille)).abs() <= 0.5))
        .ok_or_else(|| "expected a number from 0.01 to 1".to_owned())
}

/// The form of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    Text,
    /// JSON for scripts.
    Json,
    /// A line of CSV for each pod that starts or ends; needs --nodes.
    Choices,
}
