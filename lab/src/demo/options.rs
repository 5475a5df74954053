//! The options of `linkwise-lab demo`.

use std::net::SocketAddr;

use clap::Args;
use clap::builder::{FalseyValueParser, PossibleValuesParser, TypedValueParser};
use linkwise_core::state::NumaHints;
use linkwise_core::words::Words;
use linkwise_kubelet_box::{Policy, Scope};

/// The arguments of `linkwise-lab demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// The machine: a built-in name (see `linkwise topology --list`), a node file, an NCCL topology dump
    /// (NCCL_TOPO_DUMP_FILE) or a hwloc XML
    #[arg(long, value_name = "NAME|FILE", default_value = "dgx-h100")]
    pub machine: String,
    /// GPUs go through DRA: pods have claims, which an API server and a model of kube-scheduler serve
    #[arg(long, conflicts_with_all = ["topology_manager_policy", "scope", "numa_hints"])]
    pub dra: bool,
    /// The policy of the kubelet's Topology Manager
    #[arg(long, value_name = "POLICY", default_value = "none", value_parser = one_of(&TOPOLOGY_MANAGER_POLICIES))]
    pub topology_manager_policy: Policy,
    /// The scope of the Topology Manager
    #[arg(long, value_name = "SCOPE", default_value = "container", value_parser = one_of(&SCOPES))]
    pub scope: Scope,
    /// The NUMA nodes that devices report (see docs/topology-manager.md)
    #[arg(
        long,
        value_name = "HINTS",
        env = "LINKWISE_NUMA_HINTS",
        default_value = "node",
        value_parser = one_of(NumaHints::WORDS)
    )]
    pub numa_hints: NumaHints,
    /// No colours, also on a terminal
    #[arg(long, env = "NO_COLOR", action = clap::ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub no_color: bool,
    /// Keep serving after the script, until interrupted; prints the address of the node's page
    #[arg(long)]
    pub hold: bool,
    /// Wait for Enter before each step, so that the node's page can be watched; prints its address
    #[arg(long, conflicts_with = "dra")]
    pub step: bool,
    /// The address of the node's page, /metrics, /livez and /readyz; port 0 takes a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub metrics_address: SocketAddr,
    /// Log level; the demo prints to standard output, the log goes to standard error
    #[arg(long, value_name = "FILTER", env = "LINKWISE_LOG", default_value = "error")]
    pub log: String,
}

/// The kubelet's `--topology-manager-policy`.
const TOPOLOGY_MANAGER_POLICIES: [(&str, Policy); 4] = [
    ("none", Policy::None),
    ("best-effort", Policy::BestEffort),
    ("restricted", Policy::Restricted),
    ("single-numa-node", Policy::SingleNumaNode),
];

/// The kubelet's `--topology-manager-scope`.
const SCOPES: [(&str, Scope); 2] = [("container", Scope::Container), ("pod", Scope::Pod)];

/// A parser for one of these words.
fn one_of<T: Copy + Send + Sync + 'static>(words: &'static [(&'static str, T)]) -> impl TypedValueParser<Value = T> {
    let value = |text: String| words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word))
        .try_map(move |text| value(text).ok_or("unknown word"))
}
