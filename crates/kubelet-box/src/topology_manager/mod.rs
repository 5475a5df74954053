//! The kubelet's Topology Manager: which NUMA nodes a container or a pod is to come from, before any plugin is asked.
//!
//! `hints` gives what each resource prefers, `merge` settles on one mask or refuses, `refusal` explains; all
//! pure. `admission` calls them through [`super::devices::Book`], and hands the mask to `selection`. Read in the
//! kubelet's source: the scopes and the hints of 1.32 (pkg/kubelet/cm/topologymanager, devicemanager/topology_hints.go,
//! cpumanager/policy_static.go), the merge there and in the development branch after 1.36, which scores equal masks
//! where an alpha option asks for it and is the same otherwise.
//!
//! What it does not have: policy options (`prefer-closest-numa-nodes`, `max-allowable-numa-nodes`), the Memory
//! Manager, init containers and so devices that a container hands on to the next, CPUs reserved for the system.

mod cpus;
mod hints;
mod mask;
mod merge;
mod refusal;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;

pub use hints::{ResourceHints, TopologyHint};
pub use mask::NumaMask;
pub use refusal::Refusal;

pub(super) use cpus::CpuBook;
pub(super) use hints::{CPU, Units, cpu_hints, device_hints};
pub(super) use merge::settle;

/// How strict the Topology Manager is: the kubelet's `--topology-manager-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// It does nothing.
    #[default]
    None,
    /// It takes the best mask and admits every pod.
    BestEffort,
    /// It admits a pod that gets as few nodes as the machine would need if it were idle.
    Restricted,
    /// It admits a pod that fits one node.
    SingleNumaNode,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        })
    }
}

/// What is aligned as one: the kubelet's `--topology-manager-scope`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Each container for itself.
    #[default]
    Container,
    /// All containers of the pod together.
    Pod,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Container => "container",
            Self::Pod => "pod",
        })
    }
}

/// A NUMA node as the kubelet sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The kernel's number.
    pub id: i64,
    /// Its CPUs; none for a node that is memory only.
    pub cpus: BTreeSet<u32>,
}

/// The Topology Manager's settings, and the machine it works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyManager {
    /// How strict it is.
    pub policy: Policy,
    /// What is aligned as one.
    pub scope: Scope,
    /// The machine's NUMA nodes, memory-only ones included, as a kubelet counts them.
    pub numa_nodes: Vec<NumaNode>,
    /// The static CPU manager: containers that ask for CPUs get whole ones of their own.
    pub static_cpus: bool,
}

impl Default for TopologyManager {
    /// A kubelet's own settings on a machine with one NUMA node: policy none, scope container, no CPU manager.
    fn default() -> Self {
        let numa_nodes = vec![NumaNode { id: 0, cpus: BTreeSet::new() }];
        Self { policy: Policy::None, scope: Scope::Container, numa_nodes, static_cpus: false }
    }
}

/// A machine on which a kubelet with a Topology Manager does not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedMachine {
    /// Every mask is tried, and there are 2^n of them: the kubelet does not start.
    #[error(
        "policy {policy}: unsupported on machines with more than {} NUMA nodes; this one has {found}",
        TopologyManager::MAX_NODES
    )]
    TooManyNodes {
        /// The policy.
        policy: Policy,
        /// The nodes.
        found: usize,
    },
    /// A mask has 64 bits: a kubelet starts, and dies when it merges the first pod's hints.
    #[error("policy {policy}: the kubelet cannot count NUMA node {id}, for its masks hold nodes 0 to 63")]
    NodeNumber {
        /// The policy.
        policy: Policy,
        /// The first such node.
        id: i64,
    },
}

impl TopologyManager {
    /// The most NUMA nodes with which a kubelet starts under a policy other than none.
    pub const MAX_NODES: usize = 8;

    /// Whether a kubelet with these settings works on this machine.
    pub fn check(&self) -> Result<(), UnsupportedMachine> {
        let policy = self.policy;
        if policy == Policy::None {
            return Ok(());
        }
        let found = self.numa_nodes.len();
        if found > Self::MAX_NODES {
            return Err(UnsupportedMachine::TooManyNodes { policy, found });
        }
        match self.numa_nodes.iter().find(|node| !(0..NumaMask::BITS).contains(&node.id)) {
            Some(node) => Err(UnsupportedMachine::NodeNumber { policy, id: node.id }),
            None => Ok(()),
        }
    }

    /// All NUMA nodes.
    pub(super) fn nodes(&self) -> NumaMask {
        NumaMask::new(self.numa_nodes.iter().map(|node| node.id))
    }
}
