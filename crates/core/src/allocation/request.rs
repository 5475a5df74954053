//! What is asked and what is answered.

use crate::prelude::*;
use alloc::sync::Arc;
use core::fmt;

use serde::Serialize;

use crate::topology::GpuUuid;

/// The kubelet's name of a device.
///
/// For a whole GPU it is its UUID, for a slot `UUID::N`, for a MIG device the MIG device's UUID. It may be any text:
/// the kubelet may name devices that are gone. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for DeviceId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl From<&GpuUuid> for DeviceId {
    fn from(uuid: &GpuUuid) -> Self {
        Self(uuid.text())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A question for a set of devices. The order of its lists, and repetitions in them, mean nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationRequest {
    /// What may be taken.
    pub available: Vec<DeviceId>,
    /// What must be in the answer, available or not.
    pub must_include: Vec<DeviceId>,
    /// How many devices.
    pub size: usize,
}

/// How to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllocationPolicy {
    /// The best set of whole GPUs, by the order of [`super::Value`].
    #[default]
    BestEffort,
    /// Units of distinct GPUs first, the least used GPUs first; among equals the best set of GPUs.
    Distributed,
    /// The most used GPU filled first; among equals the best set of GPUs.
    Packed,
}

/// The answer: ids of the request, in the order of their PCI addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreferredAllocation {
    /// The devices to take.
    pub devices: Vec<DeviceId>,
}
