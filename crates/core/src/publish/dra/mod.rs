//! What is published through DRA (`resource.k8s.io/v1`): the GPUs and MIG devices of this node as devices of resource
//! slices, with attributes by which the scheduler finds GPUs that belong together.
//!
//! Pure, and the same for the same snapshot. [`slice`] packs devices into slices within the API's limits; the writer of
//! slices (`crates/cluster`) owns pool generations and object names.

pub mod slice;

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::Serialize;

/// A device of a resource slice, by the JSON names of `resource.k8s.io/v1` (`Device`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SliceDevice {
    /// A DNS label of at most 63 characters, such as `gpu-0` or `gpu-0-mig-1g10gb-19-0`.
    pub name: String,
    /// Attributes by `domain/name`, or `name` in the driver's own domain.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name, as those.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, Capacity>,
    /// What keeps it from being allocated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
}

/// The value of an attribute: `{"int": 0}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attribute {
    /// A whole number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// At most 64 characters.
    String(String),
    /// A semantic version of three numbers without leading zeros.
    Version(String),
}

/// An amount of something, as a canonical Kubernetes quantity: `{"value": "81559Mi"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capacity {
    /// Such as `81559Mi` or `1`.
    pub value: String,
}

/// Why the scheduler leaves a device alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Taint {
    /// Such as `gpu.nvidia.com/xid`.
    pub key: String,
    /// More about it, such as the number of the XID.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// What it does.
    pub effect: TaintEffect,
}

/// What a taint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum TaintEffect {
    /// Nothing: it informs.
    None,
    /// No new claim gets the device.
    NoSchedule,
    /// Pods that have it are evicted too.
    NoExecute,
}
