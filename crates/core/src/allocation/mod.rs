//! The choice: takes topology, request and policy, and returns the best set of GPUs and a report.
//!
//! Pure: no I/O, no clock, no environment, no logging, no floats. It cannot panic on any request. Budgets count
//! compared sets, never time. The core's `state` and `publish` call it for a snapshot, and commands call it. Of the
//! core's layers it uses `topology` alone.

mod choose;
mod collective;
mod remaining;
mod report;
mod search;
mod set;
mod shared;
mod tables;
mod tree;

use crate::prelude::*;
use alloc::sync::Arc;

use serde::Serialize;

use crate::topology::GpuUuid;

pub use choose::preferred_allocation;
pub use report::{
    AllocationReport, ChosenGpu, Explanation, FallbackReason, NearestNics, Offer, RunnerUp, Value, Values,
};
pub use set::GpuSet;
pub(crate) use set::{components, neighbours, subsets};
pub use shared::{Units, preferred_units};
pub use tables::AllocationTables;

/// The kubelet's name of a device.
///
/// A whole GPU has its UUID, a slot `UUID::N`, a MIG device the MIG device's UUID. Any text is possible: the kubelet
/// may name devices that are gone. Cheap to clone.
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

/// A request for a set of devices. The order of its lists does not matter, nor do repetitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationRequest {
    /// The devices that may be taken.
    pub available: Vec<DeviceId>,
    /// The devices that must be in the answer, available or not.
    pub must_include: Vec<DeviceId>,
    /// The number of devices.
    pub size: usize,
}

/// The rule by which devices are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllocationPolicy {
    /// Units of distinct GPUs first; among equals the best set of GPUs, by the order of `Value`.
    #[default]
    BestEffort,
    /// Units of distinct GPUs first, the least used GPUs first; among equals the best set of GPUs.
    Distributed,
    /// The most used GPU filled first; among equals the best set of GPUs.
    Packed,
}

/// The answer: ids of the request, by PCI address; after a fallback by id, those of `must_include` first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreferredAllocation {
    /// The devices to take.
    pub devices: Vec<DeviceId>,
}
