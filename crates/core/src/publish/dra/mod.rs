//! What is published through DRA (`resource.k8s.io/v1`): the GPUs and MIG devices of this node as devices of resource
//! slices, with attributes by which the scheduler finds GPUs that belong together.
//!
//! Pure, and the same for the same snapshot: [`devices`] makes them of [`DraFacts`]. [`GpuLayout`] has the order and
//! the groups of the GPUs, `attributes` what a device is described by, `taints` what keeps a sick one from being
//! allocated. [`mod@slice`] packs devices into slices within the API's limits; the writer of slices (`crates/cluster`)
//! owns pool generations and object names.

mod attributes;
mod dynamic_mig;
mod facts;
mod families;
mod group_size;
mod layout;
mod order;
mod server_version;
pub mod slice;
mod taints;
#[cfg(test)]
mod tests;

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::Serialize;

use crate::allocation::GpuSet;
use crate::quote::quoted;
use crate::state::{GpuShares, GpuSharing};
use attributes::Draft;

pub use crate::topology::{device_name, hardware_of};
pub use dynamic_mig::counters as mig_counters;
pub use facts::{DraDevice, DraFacts, DraSettings, offered, offered_now};
pub use families::{Family, Group};
pub use group_size::{GroupSize, GroupSizes, GroupSizesError};
pub use layout::{GpuLayout, LayoutCache};
pub use server_version::ServerVersion;

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

/// The devices that a node publishes, in the order in which the scheduler is to try them, and what is odd about them.
///
/// Whole GPUs, the best sets first; then those that several claims may have; then MIG devices, GPU by GPU; then GPUs
/// that are gone and that a claim may have; then MIG devices that are made when a claim has them, where the settings have
/// it. A GPU in MIG mode is published by its MIG devices only, as NVIDIA's DRA driver does, whatever the plan's MIG
/// strategy is. Where taints do not survive, a sick device is left out, unless a claim holds it.
pub fn devices(facts: &DraFacts<'_>) -> (Vec<SliceDevice>, Vec<DraProblem>) {
    let (mut devices, mut problems) = (Vec::new(), Vec::new());
    let settings = facts.settings;
    let mut sorted: Vec<&DraDevice<'_>> = facts.devices.iter().collect();
    sorted.sort_by_cached_key(|device| {
        let in_order = facts.layout.order.iter().position(|place| Some(*place) == device.place);
        let mig = device.mig.map(|mig| (mig.placement.map(|placement| placement.start), mig.index));
        let kind = (device.mig.is_some(), device.sharing.now.is_some());
        (device.place.is_none(), kind, in_order, device.gpu.pci, mig, device.gpu.uuid.clone())
    });
    let sick = sorted.iter().filter(|device| device.mig.is_none() && !device.reasons.is_empty());
    let sick: GpuSet = sick.filter_map(|device| device.place).collect();
    for device in sorted {
        let Some(name) = device.name.clone() else {
            let hardware = device.mig.map_or(device.gpu.uuid.to_string(), |mig| mig.uuid.to_string());
            problems.push(DraProblem::NoName { hardware });
            continue;
        };
        // One that was made for a claim stays the device that it was before.
        if settings.dynamic_mig && device.place.is_some() && facts.made.contains(&name) {
            continue;
        }
        let GpuSharing { now, next } = device.sharing;
        if now != next {
            problems.push(DraProblem::SharingWaits { device: name.clone(), now, next });
        }
        let mut taints = taints::taints(device.reasons.iter(), settings.evict_from_lost);
        let is_held = facts.held.contains(&name);
        // A claim that has a GPU that is gone may end at any time; a new one cannot have it.
        let is_left_out = if settings.taints_survive { device.place.is_none() } else { !taints.is_empty() };
        // Other claims could get the shares that are left, and with no taint nothing else says that they must not.
        let stays_for_holder = is_held && (settings.taints_survive || device.sharing.now.is_none());
        if is_left_out && !stays_for_holder {
            continue;
        }
        if !settings.taints_survive {
            taints.clear();
        }
        let mut draft = Draft { device: SliceDevice { name, taints, ..Default::default() }, problems: &mut problems };
        match device.mig {
            Some(mig) => draft.mig(facts.topology, device, mig, facts.versions),
            None => {
                draft.gpu(facts.topology, device, facts.versions);
                draft.groups(facts.topology, device.place, facts.layout, sick);
                draft.order(devices.len());
            }
        }
        devices.push(draft.device);
    }
    dynamic_mig::add(facts, &mut devices, &mut problems);
    (devices, problems)
}
