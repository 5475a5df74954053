//! Which NUMA nodes our devices claim. A kubelet with a Topology Manager decides by them before it asks us.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use serde::Serialize;

use crate::topology::{Gpu, NodeTopology, NumaNodeId};

/// What devices tell the kubelet of NUMA nodes; docs/topology-manager.md says when to use which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NumaHints {
    /// The GPU's own node, where it has CPUs.
    #[default]
    Node,
    /// Every node of the GPU's package that has CPUs; its own where the package is unknown.
    Package,
    /// None: the Topology Manager leaves our devices alone.
    Off,
}

impl NumaHints {
    /// The nodes that a GPU's device claims, in order. Nodes without CPUs are never among them: a machine may have
    /// dozens, and every one doubles what the kubelet has to try.
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
