//! The kubelet's Topology Manager: chooses the NUMA nodes of a container or a pod before any plugin is called.
//!
//! `hints` gives the preferences of each resource, `merge` decides on one mask or refuses, and `refusal` explains. All
//! are pure. `admission` calls them through `affinity`, and gives the mask to `selection`. The scopes and the hints
//! were read in the kubelet's source of 1.32 (pkg/kubelet/cm/topologymanager, devicemanager/topology_hints.go). The
//! merge was read there and in the development branch after 1.36, which differs only by an alpha option that scores
//! equal masks.
//!
//! Absent: policy options (`prefer-closest-numa-nodes`, `max-allowable-numa-nodes`), the CPU Manager, the Memory
//! Manager, and init containers, which pass their devices on to the next container.

mod hints;
mod mask;
mod merge;
mod refusal;
#[cfg(test)]
mod tests;

use std::fmt;

pub use hints::{ResourceHints, TopologyHint};
pub use mask::NumaMask;
pub use refusal::Refusal;

pub(super) use hints::{DeviceMasks, device_hints};
pub(super) use merge::settle;

/// The strictness of the Topology Manager: the kubelet's `--topology-manager-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The Topology Manager does nothing.
    #[default]
    None,
    /// Takes the best mask and admits every pod.
    BestEffort,
    /// Admits a pod only if it gets as few nodes as it would need on an idle machine.
    Restricted,
    /// Admits a pod only if it fits one node.
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

/// The unit of alignment: the kubelet's `--topology-manager-scope`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Each container alone.
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

/// The Topology Manager's settings and its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyManager {
    /// The strictness.
    pub policy: Policy,
    /// The unit of alignment.
    pub scope: Scope,
    /// The kernel's numbers of the machine's NUMA nodes. Nodes without CPUs are included, as in a kubelet.
    pub numa_nodes: Vec<i64>,
}

impl Default for TopologyManager {
    /// A kubelet's default settings on a machine with one NUMA node: policy none, scope container.
    fn default() -> Self {
        Self { policy: Policy::None, scope: Scope::Container, numa_nodes: vec![0] }
    }
}

/// A machine on which a kubelet with a Topology Manager does not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedMachine {
    /// The kubelet does not start, because it would have to try 2^n masks.
    #[error(
        "policy {0}: unsupported on machines with more than {most} NUMA nodes; this one has {1}",
        most = TopologyManager::MAX_NODES
    )]
    TooManyNodes(Policy, usize),
    /// The kubelet starts, but dies when it merges the first pod's hints, because a mask has 64 bits.
    #[error("policy {0}: the kubelet cannot count NUMA node {1}, for its masks hold nodes 0 to 63")]
    NodeNumber(Policy, i64),
}

impl TopologyManager {
    /// The most NUMA nodes with which a kubelet starts under a policy other than none.
    pub const MAX_NODES: usize = 8;

    /// Checks that a kubelet with these settings works on this machine.
    pub fn check(&self) -> Result<(), UnsupportedMachine> {
        let policy = self.policy;
        if policy == Policy::None {
            return Ok(());
        }
        let found = self.numa_nodes.len();
        if found > Self::MAX_NODES {
            return Err(UnsupportedMachine::TooManyNodes(policy, found));
        }
        match self.numa_nodes.iter().find(|node| !(0..NumaMask::BITS).contains(*node)) {
            Some(node) => Err(UnsupportedMachine::NodeNumber(policy, *node)),
            None => Ok(()),
        }
    }

    pub(super) fn nodes(&self) -> NumaMask {
        NumaMask::new(self.numa_nodes.iter().copied())
    }
}
