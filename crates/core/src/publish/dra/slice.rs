//! [`SliceDevice`]: a device of a resource slice in the API's form. [`Pool`] packs devices into resource slices, within
//! the limits of `resource.k8s.io/v1`.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::Serialize;

use crate::quote::quoted;
use crate::state::{DRA_DRIVER, GpuShares};

/// The most devices of a slice (Kubernetes 1.36, `ResourceSliceMaxDevices`).
pub const MAX_DEVICES: usize = 128;

/// The most devices of a slice in which any has taints or consumes counters (1.35 and later,
/// `ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
pub const MAX_DEVICES_WITH_TAINTS: usize = 64;

/// The most counter sets of a slice (1.35 and later, `ResourceSliceMaxCounterSets`).
pub const MAX_COUNTER_SETS: usize = 8;

/// Everything that a node publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// The node's name.
    pub node: String,
    /// The pool's name, unique in the cluster.
    pub name: String,
    /// The counters that devices consume.
    pub counters: Vec<CounterSet>,
    /// The devices, the best first.
    pub devices: Vec<SliceDevice>,
}

/// The specification of one slice, by its JSON names (`ResourceSliceSpec`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceSpec {
    /// The DRA driver.
    pub driver: String,
    /// The node.
    pub node_name: String,
    /// The pool that it is a part of.
    pub pool: SlicePool,
    /// Its counters; a slice with counters has no devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared_counters: Vec<CounterSet>,
    /// Its devices; empty if the node has none. `None` in a slice of counters, where the API server refuses even an
    /// empty list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<SliceDevice>>,
}

/// The pool of a slice (`ResourcePool`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicePool {
    /// The pool's name.
    pub name: String,
    /// The generation of the pool to which this slice belongs; the scheduler reads only the newest.
    pub generation: u64,
    /// The number of the pool's slices.
    pub resource_slice_count: usize,
}

impl Pool {
    /// Makes the pool of a node: `<node>/gpu`, a name that no other driver's pool has. (kube-scheduler up to 1.36.3
    /// mixes up the counters of pools of one name.)
    pub fn new(node: impl Into<String>, devices: Vec<SliceDevice>) -> Self {
        let node = node.into();
        Self { name: format!("{node}/gpu"), node, counters: Vec::new(), devices }
    }

    /// The slices of one generation, in the order in which the scheduler is to read them: slices with counters first.
    /// There is at least one slice for devices, because an empty slice shows that the driver works. If the devices fit
    /// into one slice, there is no second one for devices, because Kubernetes up to 1.35 reads slices in any order.
    ///
    /// If they do not fit, each slice has at most [`MAX_DEVICES_WITH_TAINTS`] devices even without taints, so that
    /// a taint moves no device to another slice.
    pub fn slices(&self, generation: u64) -> Vec<SliceSpec> {
        let is_limited = |device: &SliceDevice| !device.taints.is_empty() || !device.consumes_counters.is_empty();
        let fits_one = self.devices.len() <= MAX_DEVICES && !self.devices.iter().any(is_limited);
        let max_devices = if fits_one { MAX_DEVICES } else { MAX_DEVICES_WITH_TAINTS };
        let counters = self.counters.chunks(MAX_COUNTER_SETS).map(|counters| (counters.to_vec(), None));
        let mut parts: Vec<(Vec<CounterSet>, Option<Vec<SliceDevice>>)> = counters.collect();
        parts.extend(self.devices.chunks(max_devices).map(|devices| (Vec::new(), Some(devices.to_vec()))));
        if self.devices.is_empty() {
            parts.push((Vec::new(), Some(Vec::new())));
        }
        let pool = SlicePool { name: self.name.clone(), generation, resource_slice_count: parts.len() };
        let (driver, node_name) = (DRA_DRIVER.to_owned(), self.node.clone());
        let of_pool = SliceSpec { driver, node_name, pool, shared_counters: Vec::new(), devices: None };
        let slice = |(shared_counters, devices)| SliceSpec { shared_counters, devices, ..of_pool.clone() };
        parts.into_iter().map(slice).collect()
    }
}

/// A device of a resource slice, by the JSON names of `resource.k8s.io/v1` (`Device`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SliceDevice {
    /// The name: a DNS label of at most 63 characters, such as `gpu-0` or `gpu-0-mig-1g10gb-19-0`.
    pub name: String,
    /// Attributes by `domain/name`, or `name` in the driver's own domain.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name, like the attributes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, Capacity>,
    /// The amounts that it takes of its pool's counters while it is allocated. The scheduler allocates no further
    /// device for which a counter has too little left.
    #[serde(rename = "consumesCounters", skip_serializing_if = "Vec::is_empty")]
    pub consumes_counters: Vec<CounterConsumption>,
    /// The taints that keep it from being allocated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// True if several claims may have it at once, each a part of its capacity. It is never true for a device that
    /// consumes counters, because kube-scheduler up to 1.37 then miscounts them.
    #[serde(rename = "allowMultipleAllocations", skip_serializing_if = "core::ops::Not::not")]
    pub allow_multiple_allocations: bool,
}

/// The value of an attribute: `{"int": 0}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attribute {
    /// A whole number.
    Int(i64),
    /// At most 64 bytes.
    String(String),
    /// A semantic version of three numbers without leading zeros.
    Version(String),
}

/// An amount of something, as a canonical Kubernetes quantity: `{"value": "81559Mi"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capacity {
    /// The quantity, such as `81559Mi` or `1`.
    pub value: String,
    /// The amounts that a claim may take, if several may have the device. Without it a claim takes all.
    #[serde(rename = "requestPolicy", skip_serializing_if = "Option::is_none")]
    pub request_policy: Option<RequestPolicy>,
}

impl Capacity {
    /// Makes an amount that a claim gets whole.
    pub fn whole(value: impl ToString) -> Self {
        Self { value: value.to_string(), request_policy: None }
    }
}

/// The amounts that a claim may take of a capacity (`CapacityRequestPolicy`): canonical quantities.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPolicy {
    /// The amount for a claim that asks for none.
    pub default: String,
    /// The amounts that a claim may ask for.
    pub valid_range: ValidRange,
}

/// Amounts from `min` to `max`, in steps. Without `max`, up to the whole capacity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValidRange {
    /// The least amount.
    pub min: String,
    /// The largest amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<String>,
    /// The step; an amount between two steps is rounded up.
    pub step: String,
}

/// A set of a pool's counters, such as those of one GPU (`CounterSet`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CounterSet {
    /// The name, a DNS label.
    pub name: String,
    /// The counters by name; names are DNS labels.
    pub counters: BTreeMap<String, Counter>,
}

/// The amounts that a device takes of a counter set (`DeviceCounterConsumption`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CounterConsumption {
    /// The set.
    pub counter_set: String,
    /// The amount of each of its counters.
    pub counters: BTreeMap<String, Counter>,
}

/// The amount of a counter, or the amount that a device takes of it: a canonical quantity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counter {
    /// The quantity, such as `1`.
    pub value: String,
}

/// The reason why the scheduler avoids a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Taint {
    /// The key, such as `gpu.nvidia.com/xid`.
    pub key: String,
    /// A detail, such as the number of the XID.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// The effect.
    pub effect: TaintEffect,
}

/// The effect of a taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum TaintEffect {
    /// No new claim gets the device.
    NoSchedule,
    /// No new claim gets the device, and pods that have it are evicted.
    NoExecute,
}

/// A problem with the devices of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum DraProblem {
    /// The API server would refuse a value.
    #[error(
        "attribute {attribute} of {device} left out: {} is not a version, or is longer than 64 bytes",
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
    /// A GPU is not shared as in the plan yet, because a claim may have it with its present sharing.
    #[error(
        "{device} accepts no new claim until its claims end: it is {} now, and will be {}",
        shared(*.now),
        shared(*.next)
    )]
    SharingWaits {
        /// The device.
        device: String,
        /// Its present sharing; `None` for one claim.
        now: Option<GpuShares>,
        /// Its sharing in the plan.
        next: Option<GpuShares>,
    },
    /// Other devices have all names that this device could have.
    #[error("{0} is not offered through DRA: another device has its name")]
    NoName(String),
}

fn shared(shares: Option<GpuShares>) -> String {
    shares.map_or_else(|| "exclusive to one claim".to_owned(), |shares| shares.to_string())
}
