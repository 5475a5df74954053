//! Ids that pods hold of a resource of ours and that are none of its devices: they went, or the plan changed, while no
//! process of ours looked. The kubelet dereferences what its pods hold, so they are on the list, unhealthy.
//!
//! Part of [`NodeState`]. It knows what the kubelet said of holders. A resource of which nothing else is offered is not
//! made of them: without a list of ours there is none that lacks them, and the name may be another plugin's by now.

use crate::prelude::*;
use alloc::sync::Arc;

use super::NodeState;
use super::device::{Device, Health, ResourceName, Timestamp};
use super::event::Effect;
use super::judge::GoneDevice;
use super::numa_hints::NumaHints;
use super::reason::UnhealthyReason;
use super::resources::{MOST_SLOTS, place};
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, NodeTopology};

impl NodeState {
    /// The ids on the list of a resource behind which there is no [`Device`]: pods hold them, and this node does not have
    /// them. None is healthy.
    pub fn absent(&self, resource: &ResourceName) -> impl Iterator<Item = (&DeviceId, Health)> + use<'_> {
        let devices = self.resources.get(resource);
        let of = resource.clone();
        let absent = self.gone.iter().filter(move |((resource, id), _)| {
            *resource == of && !devices.is_some_and(|devices| devices.contains_key(id))
        });
        absent.map(|((_, id), gone)| (id, gone.health()))
    }

    /// Takes what pods hold of the resources that are offered onto their lists, where it is not there yet. What the
    /// hardware is still there for keeps its NUMA nodes: a kubelet that starts anew aligns its pods again by them.
    pub(super) fn adopt(&mut self, now: Timestamp) -> Vec<Effect> {
        let (topology, held, hints) = (Arc::clone(self.topology()), Arc::clone(&self.held), self.numa_hints);
        let mut effects = Vec::new();
        let resources: Vec<ResourceName> = self.resources.keys().cloned().collect();
        for resource in resources {
            let absent = self.absent(&resource).count();
            let Some(devices) = self.resources.get_mut(&resource) else { continue };
            let mut room = most().saturating_sub(devices.len().saturating_add(absent));
            let mut ids = Vec::new();
            for key in held.iter().filter(|(of, _)| *of == resource) {
                let id = &key.1;
                if devices.contains_key(id) {
                    continue;
                }
                let there = place(&topology, id).is_some();
                let why = if there { UnhealthyReason::Withdrawn } else { UnhealthyReason::Gone };
                match self.gone.get_mut(key) {
                    // Its GPU may be back, and offered otherwise.
                    Some(gone) => gone.why = why,
                    // A longer id is none that a kubelet took; of a mad answer not all is believed.
                    None if room == 0 || id.as_str().len() > GpuUuid::MAX => continue,
                    None => {
                        room -= 1;
                        self.gone.insert(key.clone(), GoneDevice::held(now, why));
                        ids.push(id.clone());
                    }
                }
                devices.extend(known(&topology, id, hints).map(|device| (id.clone(), device)));
            }
            if !ids.is_empty() {
                effects.push(Effect::HeldUnoffered { resource, ids });
            }
        }
        effects
    }
}

/// The longest list of a resource.
fn most() -> usize {
    usize::try_from(MOST_SLOTS).unwrap_or(usize::MAX)
}

/// The device of this id as it would be offered, where its hardware is there.
fn known(topology: &NodeTopology, id: &DeviceId, hints: NumaHints) -> Option<Device> {
    let (uuid, slot) = match id.as_str().split_once("::") {
        Some((uuid, slot)) => (uuid, Some(slot.parse().ok()?)),
        None => (id.as_str(), None),
    };
    let gpu = topology.gpus().get(place(topology, id)?)?;
    let mig = topology.mig_devices().iter().find(|mig| mig.uuid.as_str() == uuid).cloned();
    let device = Device { mig, slot, ..Device::new(topology, gpu, hints) };
    // `GPU-1::01` is nothing that we ever offered.
    (device.id() == *id).then_some(device)
}
