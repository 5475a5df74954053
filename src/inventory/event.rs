//! What happens to the node, and what has to be done about it.

use crate::topology::{GpuUuid, NodeObservation, TopologyWarning};

use super::device::Health;
use super::numa_hints::NumaHints;

/// Something that happened, as a plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A complete look at the node.
    Observed(Box<NodeObservation>),
    /// The driver reported an XID.
    Xid {
        /// The GPU.
        gpu: GpuUuid,
        /// The number, as NVIDIA's XID catalog lists it.
        code: u64,
    },
    /// The driver reported an uncorrectable ECC error.
    DoubleBitEcc {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A call said that the GPU is lost.
    GpuLost {
        /// The GPU.
        gpu: GpuUuid,
        /// The NVML call.
        call: String,
    },
    /// The operator wants devices to claim other NUMA nodes.
    NumaHints(NumaHints),
}

/// Something to do, by the runtime: the inventory itself touches nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Hand the new state to everybody who follows it.
    Publish,
    /// Tell people that a GPU's health changed.
    HealthChanged {
        /// The GPU.
        gpu: GpuUuid,
        /// What it is now.
        health: Health,
    },
    /// Tell people that an XID was an application's fault and changes nothing.
    XidIgnored {
        /// The GPU.
        gpu: GpuUuid,
        /// The number.
        code: u64,
    },
    /// Tell people what is odd about the node, once.
    Warn(TopologyWarning),
}
