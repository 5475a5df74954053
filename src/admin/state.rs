//! The answer to `GET /state` on the admin socket: what this node has and offers now. docs/operations.md documents it.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// The whole state, for a person or a script.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// The version that runs.
    pub version: &'static str,
    /// Whether the driver is released on an operator's order.
    pub driver_released: bool,
    /// Why no resource is offered, where none is.
    pub idle: Option<String>,
    /// The resources by name.
    pub resources: BTreeMap<String, ResourceState>,
    /// The other parts whose readiness counts, by name.
    pub parts: BTreeMap<String, PartState>,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuState>,
    /// The warnings about the node, each of which the log has once.
    pub warnings: Vec<String>,
}

/// One resource.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceState {
    /// Where its plugin is with the kubelet, in words.
    pub phase: &'static str,
    /// What keeps the plugin from serving.
    pub trouble: Option<String>,
    /// Devices on the kubelet's list that may be given out.
    pub healthy: usize,
    /// Devices on it that may not.
    pub unhealthy: usize,
}

/// One part of the node, of which some are plugins of resources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartState {
    /// Where it is, in words.
    pub phase: &'static str,
    /// Whether it is ready.
    pub ready: bool,
    /// What went wrong last, until the part is ready.
    pub trouble: Option<String>,
}

impl fmt::Display for PartState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phase)?;
        self.trouble.iter().try_for_each(|trouble| write!(f, "; {trouble}"))
    }
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuState {
    /// Its UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Its PCI address.
    pub pci: String,
    /// The product name.
    pub model: Option<String>,
    /// Through which API it is offered, on a node with DRA: `plugin`, `to-dra`, `dra`, `from-dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub door: Option<&'static str>,
    /// Whether it may be allocated.
    pub healthy: bool,
    /// Why it is unhealthy, in the order in which the reasons began.
    pub reasons: Vec<ReasonState>,
}

/// One reason for which a GPU is unhealthy.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonState {
    /// The reason in words.
    pub reason: String,
    /// The kind of reason, as docs/health.md and the metrics name it.
    pub kind: &'static str,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// What ends it: what to do, or what to wait for.
    pub ends_with: &'static str,
}
