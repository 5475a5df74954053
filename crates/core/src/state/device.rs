//! Devices, their health, and the names under which they are offered.

use crate::prelude::*;
use core::fmt;
use core::str::FromStr;
use core::time::Duration;

use serde::Serialize;
use thiserror::Error;

use super::event::MigInstance;
use super::numa_hints::NumaHints;
use super::reason::UnhealthyReason;
use crate::allocation::DeviceId;
use crate::topology::{Gpu, MigDevice, MigProfile, NodeTopology, NumaNodeId};

/// A moment: time since the Unix epoch. The runtime reads the wall clock once, at its start, and adds what a monotonic clock
/// says has passed: moments of one process are in order, and hold durations of it are true.
pub type Timestamp = Duration;

/// One device on the kubelet's list: a whole GPU, a MIG device of one, or a slot on either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The GPU.
    pub gpu: Gpu,
    /// The MIG device, where it is not the whole GPU.
    pub mig: Option<MigDevice>,
    /// The slot, from 0, where it is shared.
    pub slot: Option<u32>,
    /// The NUMA nodes the kubelet is told of: CPU-bearing ones only, none when unknown.
    pub numa_nodes: Vec<NumaNodeId>,
    /// Whether it may be given to a pod.
    pub health: Health,
}

impl Device {
    /// A healthy whole GPU.
    pub fn new(topology: &NodeTopology, gpu: &Gpu, hints: NumaHints) -> Self {
        let numa_nodes = hints.nodes(topology, gpu);
        Self { gpu: gpu.clone(), mig: None, slot: None, numa_nodes, health: Health::Healthy }
    }

    /// Its name for the kubelet, as the NVIDIA plugin has it: [`Self::uuid`], for a slot `UUID::N`.
    pub fn id(&self) -> DeviceId {
        Self::id_of(&self.gpu, self.mig.as_ref(), self.slot)
    }

    pub(super) fn id_of(gpu: &Gpu, mig: Option<&MigDevice>, slot: Option<u32>) -> DeviceId {
        let uuid = mig.map_or(gpu.uuid.as_str(), |mig| mig.uuid.as_str());
        DeviceId::from(slot.map_or_else(|| uuid.to_owned(), |slot| format!("{uuid}::{slot}")))
    }

    /// What a container gets, by UUID: the MIG device, or else the GPU. All slots of it have the same.
    pub fn uuid(&self) -> &str {
        self.mig.as_ref().map_or(self.gpu.uuid.as_str(), |mig| mig.uuid.as_str())
    }

    /// The MIG instance it is; none for a whole GPU, or a slot on one.
    pub fn instance(&self) -> Option<MigInstance> {
        let mig = self.mig.as_ref()?;
        Some(MigInstance { gpu_instance: mig.gpu_instance, compute_instance: Some(mig.compute_instance) })
    }
}

/// Whether a device may be given to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It may.
    Healthy,
    /// It may not.
    Unhealthy {
        /// Why.
        reason: UnhealthyReason,
        /// Since when.
        since: Timestamp,
    },
}

impl Health {
    /// Whether people who were told the one know the other: it differs in details at most.
    pub(super) fn tells_the_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Healthy, Self::Healthy) => true,
            (Self::Unhealthy { reason, .. }, Self::Unhealthy { reason: other, .. }) => reason.is(other),
            _ => false,
        }
    }
}

/// The name of an extended resource, `domain/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ResourceName(String);

/// Why a text is no resource name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{text}' is not an extended resource name (expected domain/name, such as nvidia.com/gpu)")]
pub struct ResourceNameError {
    text: String,
}

impl ResourceName {
    /// `nvidia.com/gpu`, the whole GPUs of a node.
    pub fn gpu() -> Self {
        Self("nvidia.com/gpu".to_owned())
    }

    /// The MIG devices of one profile, as the NVIDIA plugin names them: `nvidia.com/mig-1g.10gb.me`.
    pub fn mig(profile: &MigProfile) -> Self {
        Self(format!("nvidia.com/mig-{}", profile.to_string().replace('+', ".")))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ResourceName {
    type Err = ResourceNameError;

    /// Kubernetes' rules for a qualified name: a DNS domain, a slash, and at most 63 letters, digits,
    /// `-`, `_` and `.`, letters and digits first and last.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let edges = |part: &str| {
            let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
            edge(part.bytes().next()) && edge(part.bytes().last())
        };
        let domain = |part: &str| {
            let bytes = |label: &str| label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
            part.len() <= 253 && part.split('.').all(|label| label.len() <= 63 && edges(label) && bytes(label))
        };
        let name = |part: &str| {
            let bytes = part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
            part.len() <= 63 && edges(part) && bytes
        };
        match text.split_once('/') {
            Some((before, after)) if domain(before) && name(after) => Ok(Self(text.to_owned())),
            _ => Err(ResourceNameError { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
