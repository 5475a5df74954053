//! The devices that a node publishes through DRA (`resource.k8s.io/v1`): its GPUs and MIG devices as devices of
//! resource slices, with attributes by which the scheduler finds GPUs that belong together.
//!
//! Pure: [`devices`] makes the same devices from the same [`DraFacts`]. [`GpuLayout`] has the order and the groups of
//! the GPUs, `attributes` describes a device; taints keep an unhealthy device from being allocated. [`mod@slice`] packs
//! devices into slices within the API's limits. The writer of slices (`crates/cluster`) owns pool generations and
//! object names.

mod attributes;
mod dynamic_mig;
pub mod exact;
mod facts;
mod families;
mod layout;
pub mod slice;
#[cfg(test)]
mod tests;

use crate::prelude::*;

use crate::allocation::GpuSet;
use crate::state::GpuSharing;
use attributes::Draft;

pub use crate::topology::{device_name, hardware_of};
pub use dynamic_mig::counters as mig_counters;
pub use facts::{DraDevice, DraFacts, DraSettings, ServerVersion, offered_now};
pub use families::{Family, Group, GroupSize};
pub use layout::{GpuLayout, LayoutCache};
pub use slice::{
    Attribute, Capacity, Counter, CounterConsumption, CounterSet, DraProblem, RequestPolicy, SliceDevice, Taint,
    TaintEffect, ValidRange,
};

/// Makes the devices that a node publishes, in the order in which the scheduler is to try them, and reports problems.
///
/// The order: whole GPUs for one claim, the best sets first; GPUs that several claims may have; MIG devices, GPU by
/// GPU; GPUs that are gone and that a claim may still have; with the setting `dynamic_mig`, MIG devices that are made
/// when a claim gets them. A GPU in MIG mode is published by its MIG devices only, as NVIDIA's DRA driver does,
/// whatever the plan's MIG strategy is. If the API server drops taints, an unhealthy device is left out unless a claim
/// holds it alone.
pub fn devices(facts: &DraFacts<'_>) -> (Vec<SliceDevice>, Vec<DraProblem>) {
    let (mut devices, mut problems) = (Vec::new(), Vec::new());
    let settings = facts.settings;
    let mut sorted: Vec<&DraDevice<'_>> = facts.devices.iter().collect();
    sorted.sort_by_cached_key(|device| {
        let in_order = facts.layout.order.iter().position(|place| Some(*place) == device.place);
        let mig = device.mig.map(|mig| (mig.facts.placement.map(|placement| placement.start), mig.index));
        let kind = (device.mig.is_some(), device.sharing.now.is_some());
        (device.place.is_none(), kind, in_order, device.gpu.pci, mig, device.gpu.uuid.clone())
    });
    let sick = sorted.iter().filter(|device| device.mig.is_none() && !device.reasons.is_empty());
    let sick: GpuSet = sick.filter_map(|device| device.place).collect();
    for device in sorted {
        let Some(name) = device.name.clone() else {
            let hardware = device.mig.map_or(device.gpu.uuid.to_string(), |mig| mig.uuid.to_string());
            problems.push(DraProblem::NoName(hardware));
            continue;
        };
        // `dynamic_mig::add` publishes a MIG device that was made for a claim.
        if settings.dynamic_mig && device.place.is_some() && facts.made.contains(&name) {
            continue;
        }
        let GpuSharing { now, next } = device.sharing;
        if now != next {
            problems.push(DraProblem::SharingWaits { device: name.clone(), now, next });
        }
        let mut taints = attributes::taints(&device.reasons, settings.evict_from_lost);
        let is_held = facts.held.contains(&name);
        // A GPU that is gone is published only for the claim that may still have it.
        let is_left_out = if settings.taints_survive { device.place.is_none() } else { !taints.is_empty() };
        // Without a taint, other claims could get the free shares of an unhealthy GPU.
        let stays_for_holder = is_held && (settings.taints_survive || device.sharing.now.is_none());
        if is_left_out && !stays_for_holder {
            continue;
        }
        if !settings.taints_survive {
            taints.clear();
        }
        let mut draft =
            Draft { device: SliceDevice { name, taints, ..Default::default() }, problems: &mut problems, facts };
        match device.mig {
            Some(mig) => draft.mig(device, mig),
            None => {
                draft.gpu(device);
                draft.groups(device.place, sick);
                draft.order(devices.len());
            }
        }
        devices.push(draft.device);
    }
    dynamic_mig::add(facts, &mut devices, &mut problems);
    (devices, problems)
}
