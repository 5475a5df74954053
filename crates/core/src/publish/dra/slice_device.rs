//! [`SliceDevice`]: a device of a resource slice as the API server has it, and [`DraProblem`].

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::Serialize;

use crate::quote::quoted;
use crate::state::GpuShares;

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
    /// What it takes of the counters of its pool while it is allocated: devices over one counter exclude each other.
    #[serde(rename = "consumesCounters", skip_serializing_if = "Vec::is_empty")]
    pub consumes_counters: Vec<CounterConsumption>,
    /// What keeps it from being allocated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Whether several claims may have it at once, each a part of its capacity. Never together with counters:
    /// kube-scheduler up to 1.37 miscounts them.
    #[serde(rename = "allowMultipleAllocations", skip_serializing_if = "core::ops::Not::not")]
    pub allow_multiple_allocations: bool,
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
    /// What a claim may take of it, where several may have the device. Without one a claim takes all.
    #[serde(rename = "requestPolicy", skip_serializing_if = "Option::is_none")]
    pub request_policy: Option<RequestPolicy>,
}

impl Capacity {
    /// An amount that a claim gets whole.
    pub fn whole(value: impl ToString) -> Self {
        Self { value: value.to_string(), request_policy: None }
    }
}

/// What a claim may take of a capacity (`CapacityRequestPolicy`): canonical quantities.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPolicy {
    /// What a claim takes that does not say how much.
    pub default: String,
    /// What a claim may ask for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_range: Option<ValidRange>,
}

/// Amounts from `min` to `max` (the whole, where it is absent), in steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValidRange {
    /// The least.
    pub min: String,
    /// The most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<String>,
    /// Amounts between are rounded up to the next step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Counters of a pool, such as one for each GPU (`CounterSet`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CounterSet {
    /// A DNS label.
    pub name: String,
    /// The counters by name, DNS labels.
    pub counters: BTreeMap<String, Counter>,
}

/// What a device takes of a counter set (`DeviceCounterConsumption`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CounterConsumption {
    /// The set.
    pub counter_set: String,
    /// How much of its counters.
    pub counters: BTreeMap<String, Counter>,
}

/// What a counter has, or a device takes of it: a canonical quantity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counter {
    /// Such as `1`.
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

/// What is odd about the devices of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum DraProblem {
    /// A value that the API server would refuse.
    #[error(
        "attribute {attribute} of {device} left out: {} is no version, or longer than 64 characters",
        quoted(value)
    )]
    Dropped {
        /// The device.
        device: String,
        /// The attribute.
        attribute: String,
        /// The value.
        value: String,
    },
    /// A GPU that is not shared as the plan says, because a claim may have it as it is.
    #[error(
        "{device} stays {} until no claim has it, and takes no new one; then it is {}",
        shared(*.now),
        shared(*.next)
    )]
    SharingWaits {
        /// The device.
        device: String,
        /// How it is shared; `None` for one claim.
        now: Option<GpuShares>,
        /// How the plan shares it.
        next: Option<GpuShares>,
    },
    /// A device that nothing tells from another one.
    #[error("{hardware} is not offered through DRA: another device has its name")]
    NoName {
        /// The GPU's or MIG device's UUID.
        hardware: String,
    },
}

fn shared(shares: Option<GpuShares>) -> String {
    shares.map_or_else(|| "one claim's".to_owned(), |shares| shares.to_string())
}
