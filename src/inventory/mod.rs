//! What this node offers, as a state machine: `apply(state, event, now) -> (state, effects)`.
//!
//! Pure: no I/O, no clock (`now` is an argument), no tasks, no logging. The runtime is its one
//! caller and writer; everybody else reads whole snapshots. It owns devices, their health and the
//! resources they make up; which GPUs to choose is `allocation`'s.

mod device;
mod event;
mod numa_hints;
mod poll;
mod xid;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::allocation::{AllocationTables, DeviceId};
use crate::topology::{GpuUuid, NodeObservation, NodeTopology, TopologyWarning};

pub use device::{Device, Health, ResourceName, ResourceNameError, Timestamp, UnhealthyReason};
pub use event::{Effect, Event, MigInstance};
pub use numa_hints::NumaHints;
pub use poll::{FabricHealth, HealthPoll, Reach, RecoveryAction, RowRemapping};
pub use xid::XidClass;

/// One whole state of the node. Cheap to share, never changed in place.
#[derive(Clone, Debug)]
pub struct Inventory {
    tables: Arc<AllocationTables>,
    numa_hints: NumaHints,
    warnings: Vec<TopologyWarning>,
    resources: BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
}

/// Why a device cannot be given out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Nobody knows it.
    #[error("{resource} has no device '{id}' on this node")]
    Unknown {
        /// The resource asked.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
    },
    /// It is there, but not in health.
    #[error("device '{id}' of {resource} is unhealthy: {reason}")]
    Unhealthy {
        /// The resource asked.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// Why.
        reason: UnhealthyReason,
    },
    /// One device twice in one request.
    #[error("device '{id}' of {resource} is asked for twice")]
    Repeated {
        /// The resource asked.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
    },
}

impl Default for Inventory {
    /// Nothing seen yet; devices will claim their own NUMA nodes.
    fn default() -> Self {
        Self::new(NumaHints::default())
    }
}

impl Inventory {
    /// Nothing seen yet.
    pub fn new(numa_hints: NumaHints) -> Self {
        let tables = Arc::new(AllocationTables::new(Arc::default()));
        Self { tables, numa_hints, warnings: Vec::new(), resources: BTreeMap::new() }
    }

    /// The graph of the node.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        self.tables.topology()
    }

    /// What the choice is made from.
    pub fn tables(&self) -> &Arc<AllocationTables> {
        &self.tables
    }

    /// What was odd about the node.
    pub fn warnings(&self) -> &[TopologyWarning] {
        &self.warnings
    }

    /// The resources this node offers, with their devices by id.
    pub fn resources(&self) -> &BTreeMap<ResourceName, BTreeMap<DeviceId, Device>> {
        &self.resources
    }

    /// The devices of one resource, by id.
    pub fn devices(&self, resource: &ResourceName) -> impl Iterator<Item = (&DeviceId, &Device)> + use<'_> {
        self.resources.get(resource).into_iter().flatten()
    }

    /// Whether there is such a device, in health.
    pub fn is_healthy(&self, resource: &ResourceName, id: &DeviceId) -> bool {
        let device = self.resources.get(resource).and_then(|devices| devices.get(id));
        device.is_some_and(|device| device.health == Health::Healthy)
    }

    /// The devices that an order names, in the order of their PCI addresses: all of them, or the first thing
    /// wrong with the order.
    pub fn allocate(&self, resource: &ResourceName, ids: &[DeviceId]) -> Result<Vec<&Device>, AllocateError> {
        let devices = self.resources.get(resource);
        let mut taken: BTreeMap<&DeviceId, &Device> = BTreeMap::new();
        for id in ids {
            let (resource, name) = (resource.clone(), id.clone());
            let Some(device) = devices.and_then(|devices| devices.get(id)) else {
                return Err(AllocateError::Unknown { resource, id: name });
            };
            if let Health::Unhealthy { reason, .. } = &device.health {
                return Err(AllocateError::Unhealthy { resource, id: name, reason: reason.clone() });
            }
            if taken.insert(id, device).is_some() {
                return Err(AllocateError::Repeated { resource, id: name });
            }
        }
        let mut taken: Vec<&Device> = taken.into_values().collect();
        taken.sort_by_key(|device| device.gpu.pci);
        Ok(taken)
    }

    /// The next state after an event, and what has to be done about it.
    pub fn apply(mut self, event: Event, now: Timestamp) -> (Self, Vec<Effect>) {
        let effects = match event {
            Event::Observed(observed) => self.observed(&observed, now),
            Event::Xid { gpu, code, .. } => match XidClass::of(code) {
                XidClass::Application => vec![Effect::XidIgnored { gpu, code }],
                XidClass::Gpu => self.fail(&gpu, &UnhealthyReason::Xid { code }, now),
            },
            Event::DoubleBitEcc { gpu } => self.fail(&gpu, &UnhealthyReason::DoubleBitEcc, now),
            Event::GpuLost { gpu, call } => self.fail(&gpu, &UnhealthyReason::Lost { call }, now),
            Event::Polled(polls) => {
                let lost = polls.into_iter().filter_map(|(gpu, poll)| match poll.reach {
                    Reach::Lost { call } => Some((gpu, UnhealthyReason::Lost { call })),
                    _ => None,
                });
                lost.collect::<Vec<_>>().iter().flat_map(|(gpu, reason)| self.fail(gpu, reason, now)).collect()
            }
            Event::LeftOut { .. }
            | Event::TakenBackIn { .. }
            | Event::DriverAway { .. }
            | Event::DriverBack
            | Event::Cleared { .. }
            | Event::Holders(_)
            | Event::Tick => Vec::new(),
        };
        (self, effects)
    }

    /// A complete new look at the node: what is new is added, what is gone stays as unhealthy.
    ///
    /// The kubelet dereferences ids that pods hold, so an id once advertised does not leave the list.
    fn observed(&mut self, observed: &NodeObservation, now: Timestamp) -> Vec<Effect> {
        let (topology, warnings) = NodeTopology::assemble(observed);
        let mut effects: Vec<Effect> =
            warnings.iter().filter(|warning| !self.warnings.contains(warning)).cloned().map(Effect::Warn).collect();
        self.warnings = warnings;
        if topology != **self.topology() {
            self.tables = Arc::new(AllocationTables::new(Arc::new(topology)));
        }
        let topology = Arc::clone(self.topology());
        let mut fresh: BTreeMap<DeviceId, Device> = topology
            .gpus()
            .iter()
            .map(|gpu| (DeviceId::from(&gpu.uuid), Device::new(&topology, gpu, self.numa_hints)))
            .collect();
        let resource = ResourceName::gpu();
        for (id, known) in self.resources.get(&resource).into_iter().flatten() {
            match (fresh.get_mut(id), &known.health) {
                // Gone and back is the evidence that ends a disappearance.
                (Some(_), Health::Unhealthy { reason: UnhealthyReason::Gone, .. }) => {
                    effects.push(Effect::HealthChanged { gpu: known.gpu.uuid.clone(), health: Health::Healthy });
                }
                (Some(device), _) => device.health = known.health.clone(),
                (None, Health::Unhealthy { .. }) => {
                    fresh.insert(id.clone(), known.clone());
                }
                (None, Health::Healthy) => {
                    let health = Health::Unhealthy { reason: UnhealthyReason::Gone, since: now };
                    effects.push(Effect::HealthChanged { gpu: known.gpu.uuid.clone(), health: health.clone() });
                    fresh.insert(id.clone(), Device { health, ..known.clone() });
                }
            }
        }
        if !fresh.is_empty() {
            self.resources.insert(resource, fresh);
        }
        effects.push(Effect::Publish);
        effects
    }

    /// One GPU is in trouble; the first reason stands until its own evidence ends it.
    fn fail(&mut self, gpu: &GpuUuid, reason: &UnhealthyReason, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        for device in self.resources.values_mut().flat_map(BTreeMap::values_mut) {
            if device.gpu.uuid == *gpu && device.health == Health::Healthy {
                let health = Health::Unhealthy { reason: reason.clone(), since: now };
                device.health = health.clone();
                effects.push(Effect::HealthChanged { gpu: gpu.clone(), health });
                effects.push(Effect::Publish);
            }
        }
        effects
    }
}

#[cfg(test)]
mod tests;
