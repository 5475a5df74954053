//! The options around the kubelet's Topology Manager, by the names that a kubelet gives them.

use clap::ValueEnum;
use serde::Serialize;

use crate::state::NumaHints;

/// `--numa-hints`: which NUMA nodes devices claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NumaHintsArg {
    /// The GPU's own node
    Node,
    /// All nodes of the GPU's package that have CPUs
    Package,
    /// None: the Topology Manager leaves GPUs alone
    Off,
}

impl From<NumaHintsArg> for NumaHints {
    fn from(hints: NumaHintsArg) -> Self {
        match hints {
            NumaHintsArg::Node => Self::Node,
            NumaHintsArg::Package => Self::Package,
            NumaHintsArg::Off => Self::Off,
        }
    }
}

/// `--topology-manager-policy`, as the kubelet's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopologyPolicyArg {
    /// The Topology Manager does nothing
    None,
    /// It aligns where it can
    BestEffort,
    /// It refuses what gets more NUMA nodes than it would on an idle machine
    Restricted,
    /// It refuses what does not fit one NUMA node
    SingleNumaNode,
}

/// `--scope`, the kubelet's `--topology-manager-scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScopeArg {
    /// Each container for itself
    Container,
    /// All containers of a pod together
    Pod,
}
