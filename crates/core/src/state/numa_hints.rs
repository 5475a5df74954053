//! [`NumaHints`]: the NUMA nodes that our devices report. A kubelet with a Topology Manager aligns pods by them before
//! it asks us.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use serde::Serialize;

use crate::topology::{Gpu, NodeTopology, NumaNodeId};

/// The NUMA nodes that devices report to the kubelet. docs/topology-manager.md tells when to use which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NumaHints {
    /// The GPU's own node, if it has CPUs.
    #[default]
    Node,
    /// Every node with CPUs of the GPU's package; if the package is unknown, the GPU's own node.
    Package,
    /// No node: the Topology Manager ignores our devices.
    Off,
}

impl NumaHints {
    /// The nodes that a GPU's device reports, in order. Nodes without CPUs are left out: a machine may have dozens, and
    /// every one doubles the combinations that the kubelet tries.
    pub fn nodes(self, topology: &NodeTopology, gpu: &Gpu) -> Vec<NumaNodeId> {
        let own = gpu.cpu_node;
        match self {
            Self::Off => Vec::new(),
            Self::Node => own.into_iter().collect(),
            Self::Package => {
                let nodes = topology.cpu_nodes().iter();
                let near = nodes.filter(|(_, package)| package.is_some() && **package == gpu.package);
                let near: BTreeSet<NumaNodeId> = near.map(|(id, _)| *id).chain(own).collect();
                near.into_iter().collect()
            }
        }
    }
}
