//! The answer to `GET /state` on the admin socket: what this node is and offers now. docs/operations.md documents it.

use std::collections::BTreeMap;

use serde::Serialize;

/// Everything at once, for a person or a script.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// The version that runs.
    pub version: &'static str,
    /// Whether linkwise lets go of the driver because an operator asked it to.
    pub driver_released: bool,
    /// Why nothing is offered, where nothing is.
    pub idle: Option<String>,
    /// The resources by name.
    pub resources: BTreeMap<String, ResourceState>,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuState>,
    /// What is odd about the node, as the log told once.
    pub warnings: Vec<String>,
}

/// One resource.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceState {
    /// Where it is with the kubelet, in words.
    pub phase: &'static str,
    /// What keeps it from serving.
    pub trouble: Option<String>,
    /// Devices on the kubelet's list that may be given out.
    pub healthy: usize,
    /// Devices on it that may not.
    pub unhealthy: usize,
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuState {
    /// Its name for everybody.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Where it is.
    pub pci: String,
    /// The product name.
    pub model: Option<String>,
    /// Whether it may be given to pods.
    pub healthy: bool,
    /// All that stands against it, in the order in which it began.
    pub reasons: Vec<ReasonState>,
}

/// One thing that stands against a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonState {
    /// What.
    pub reason: String,
    /// The kind of reason, as docs/health.md and the metrics name it.
    pub kind: &'static str,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// The evidence that would end it: what to do, or what to wait for.
    pub ends_with: &'static str,
}
