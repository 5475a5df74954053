//! What this node offers, as a state machine: `apply(state, event, now) -> (state, effects)`.
//!
//! Pure: no I/O, no clock (`now` is an argument), no tasks, no logging. The runtime is its one
//! caller and writer; everybody else reads whole snapshots. It owns devices, their health and the
//! resources they make up; which GPUs to choose is `allocation`'s.

mod absent;
mod device;
mod elsewhere;
mod event;
mod health;
mod judge;
mod mps;
mod numa_hints;
mod offer;
mod plan;
mod poll;
mod problem;
mod quiet;
mod reason;
mod record;
mod resource_name;
mod resources;
mod xid;

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use core::time::Duration;

use crate::allocation::{AllocationTables, DeviceId};
use crate::topology::{GpuUuid, NodeObservation, NodeTopology, TopologyWarning};
use resources::Choice;

use health::GpuHealth;
use judge::GoneDevice;
use mps::Mps;
use quiet::Quiet;

pub use device::{Device, Health, Timestamp};
pub use event::{Effect, Event, MigInstance};
pub use mps::{MpsGpu, MpsShare};
pub use numa_hints::NumaHints;
pub use plan::{
    DeviceSelector, DeviceSelectorError, Filter, GpuSelector, MigStrategy, NamePattern, Pattern, ResourcePlan,
    SharedDevices, SharedResource, Sharing, SharingKind,
};
pub use poll::{FabricHealth, HealthPoll, Reach, RecoveryAction, RowRemapping};
pub use problem::PlanProblem;
pub use reason::UnhealthyReason;
pub use record::{Accepted, GpuRecord, HealthRecord, KeptReason, LastSeen, NodeIdentity};
pub use resource_name::{ResourceName, ResourceNameError};
pub use resources::MOST_SLOTS;
pub use xid::{XidClass, XidPolicy, XidSet};

/// One whole state of the node. Cheap to share, never changed in place.
#[derive(Clone, Debug)]
pub struct NodeState {
    tables: Arc<AllocationTables>,
    numa_hints: NumaHints,
    warnings: Vec<TopologyWarning>,
    /// What an operator wants, and what is carried out: the last plan that could be, where the wanted one cannot.
    wanted: Arc<ResourcePlan>,
    plan: Arc<ResourcePlan>,
    problems: Vec<PlanProblem>,
    held: Arc<BTreeSet<(ResourceName, DeviceId)>>,
    /// Since when the kubelet says so; `None` where it says nothing.
    holders_since: Option<Timestamp>,
    resources: BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
    choices: Arc<BTreeMap<ResourceName, Choice>>,
    xids: XidPolicy,
    /// The first hold; see `health`.
    hold: Duration,
    health: BTreeMap<GpuUuid, GpuHealth>,
    /// The devices that are listed though they are no longer there, or no longer offered; of some nothing else is known.
    gone: BTreeMap<(ResourceName, DeviceId), GoneDevice>,
    mps: Mps,
    /// What people were told of each GPU last.
    told: BTreeMap<GpuUuid, Health>,
    quiet: Quiet,
    identity: NodeIdentity,
    /// What the runtime was asked to keep last.
    kept: HealthRecord,
    listing: Listing,
    awaited: Awaited,
}

/// What the first list still waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Awaited {
    /// The first poll.
    poll: bool,
    /// The first word of who holds what.
    holders: bool,
}

/// Whether the kubelet may see the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    /// It may.
    Open,
    /// Not before the node was looked at.
    NotYet,
    /// Not before what it waits for has come, or that took too long.
    Awaiting { since: Timestamp },
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
    /// More than one slot of shared devices, where the plan allows one.
    #[error("{size} devices of {resource} are asked for, which is shared: a container may have 1")]
    OneSlot {
        /// The resource asked.
        resource: ResourceName,
        /// How many.
        size: usize,
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

impl Default for NodeState {
    /// Nothing seen yet; devices will claim their own NUMA nodes.
    fn default() -> Self {
        Self::new(NumaHints::default())
    }
}

impl NodeState {
    /// Nothing seen yet.
    pub fn new(numa_hints: NumaHints) -> Self {
        let tables = Arc::new(AllocationTables::new(Arc::default()));
        Self {
            tables,
            numa_hints,
            warnings: Vec::new(),
            wanted: Arc::default(),
            plan: Arc::default(),
            problems: Vec::new(),
            held: Arc::default(),
            holders_since: None,
            resources: BTreeMap::new(),
            choices: Arc::default(),
            xids: XidPolicy::default(),
            hold: health::HOLD,
            health: BTreeMap::new(),
            gone: BTreeMap::new(),
            mps: Mps::default(),
            told: BTreeMap::new(),
            quiet: Quiet::default(),
            identity: NodeIdentity::default(),
            kept: HealthRecord::default(),
            listing: Listing::Open,
            awaited: Awaited::default(),
        }
    }

    /// The same, with an operator's word on XIDs.
    #[must_use]
    pub fn with_xids(self, xids: XidPolicy) -> Self {
        Self { xids, ..self }
    }

    /// The same, with another first hold than 60 s; the longest one is its sixtyfold.
    #[must_use]
    pub fn with_hold(self, hold: Duration) -> Self {
        Self { hold, ..self }
    }

    /// The same, publishing nothing before a complete snapshot: a look at the node, and a first [`Event::Polled`] of
    /// its GPUs. Where that does not come, [`Self::next_deadline`] ends the wait.
    #[must_use]
    pub fn awaiting_the_first_poll(self) -> Self {
        Self { listing: Listing::NotYet, awaited: Awaited { poll: true, ..self.awaited }, ..self }
    }

    /// The same, publishing nothing before a first [`Event::Holders`], if only that nobody knows: the first list has
    /// what pods hold. The wait ends as that for the first poll.
    #[must_use]
    pub fn awaiting_the_holders(self) -> Self {
        Self { listing: Listing::NotYet, awaited: Awaited { holders: true, ..self.awaited }, ..self }
    }

    /// The reasons that stand against a GPU, in the order in which they began, each with its beginning.
    pub fn standing(&self, gpu: &GpuUuid) -> impl Iterator<Item = (&UnhealthyReason, Timestamp)> + use<'_> {
        self.health.get(gpu).into_iter().flat_map(GpuHealth::standing)
    }

    /// What the next process of ours has to know of the GPUs' health; [`Effect::Keep`] says when it changed.
    pub fn record(&self) -> HealthRecord {
        let gpus = self.health.iter().filter_map(|(gpu, health)| Some((gpu.clone(), health.kept()?)));
        HealthRecord { version: HealthRecord::VERSION, identity: self.identity.clone(), gpus: gpus.collect() }
    }

    /// The next moment at which time alone changes something: then [`Event::Tick`] is due. Health is not among it: a hold
    /// is as long as polls that pass, and ends with one.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let first_poll = match self.listing {
            Listing::Awaiting { since } => Some(since.saturating_add(judge::FIRST_POLL)),
            Listing::Open | Listing::NotYet => None,
        };
        first_poll.into_iter().chain(self.quiet.deadline()).min()
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

    /// What is made of the GPUs.
    pub fn plan(&self) -> &ResourcePlan {
        &self.plan
    }

    /// What an operator asked for and cannot have on this node.
    pub fn problems(&self) -> &[PlanProblem] {
        &self.problems
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
                let key = (resource, name);
                let gone = self.gone.get(&key).map(|gone| gone.why.clone());
                let (resource, id) = key;
                return Err(match gone {
                    Some(reason) => AllocateError::Unhealthy { resource, id, reason },
                    None => AllocateError::Unknown { resource, id },
                });
            };
            if let Health::Unhealthy { reason, .. } = &device.health {
                return Err(AllocateError::Unhealthy { resource, id: name, reason: reason.clone() });
            }
            if taken.insert(id, device).is_some() {
                return Err(AllocateError::Repeated { resource, id: name });
            }
        }
        let mut taken: Vec<&Device> = taken.into_values().collect();
        let one_slot = self.choices.get(resource).is_some_and(|choice| choice.one_slot);
        if one_slot && taken.len() > 1 && taken.iter().any(|device| device.slot.is_some()) {
            return Err(AllocateError::OneSlot { resource: resource.clone(), size: taken.len() });
        }
        taken.sort_by_key(|device| (device.gpu.pci, device.mig.as_ref().map(|mig| mig.index), device.slot));
        Ok(taken)
    }

    /// The next state after an event, and what has to be done about it.
    ///
    /// `now` may be any clock; one that jumps makes `since` wrong and nothing else. The runtime gives one that does not.
    pub fn apply(mut self, event: Event, now: Timestamp) -> (Self, Vec<Effect>) {
        let mut effects = match event {
            Event::Observed(observed) => self.observed(&observed, now),
            Event::Planned(plan) => self.planned(*plan, now),
            Event::MpsReady(ready) => self.mps_ready(ready, now),
            Event::Xid { gpu, code, instance } => self.xid(gpu, code, instance, now),
            Event::DoubleBitEcc { gpu } => self.double_bit_ecc(&gpu, now),
            Event::Polled(polls) => self.polled(&polls, now),
            Event::LeftOut { gpu, why } => self.failed(&gpu, UnhealthyReason::LeftOut { why }, now),
            Event::TakenBackIn { gpu } => self.about(&gpu, GpuHealth::taken_back_in),
            Event::DriverAway { why } => self.away(&why, now),
            Event::DriverBack => self.driver_back(),
            Event::Cleared { gpu } => self.about(&gpu, GpuHealth::cleared),
            Event::Holders(held) => self.holders(held, now),
            Event::Identified(identity) => self.identified(&identity),
            Event::Restored(record) => self.restored(&record),
            Event::NumaHints(hints) => self.hinted(hints),
            Event::Tick => Vec::new(),
        };
        effects.extend(self.tick(now));
        (self, effects)
    }

    /// A complete new look at the node: what is new is added, what is gone stays as unhealthy.
    fn observed(&mut self, observed: &NodeObservation, now: Timestamp) -> Vec<Effect> {
        let (topology, warnings) = NodeTopology::assemble(observed);
        let mut effects: Vec<Effect> =
            warnings.iter().filter(|warning| !self.warnings.contains(warning)).cloned().map(Effect::Warn).collect();
        self.warnings = warnings;
        if topology != **self.topology() {
            self.tables = Arc::new(AllocationTables::new(Arc::new(topology)));
        }
        self.follow(observed, now);
        effects.extend(self.offer(now));
        effects
    }

    /// All devices claim their NUMA nodes anew, those of GPUs that are gone included: they are on the list too.
    fn hinted(&mut self, hints: NumaHints) -> Vec<Effect> {
        let topology = Arc::clone(self.topology());
        self.numa_hints = hints;
        for device in self.resources.values_mut().flat_map(BTreeMap::values_mut) {
            device.numa_nodes = hints.nodes(&topology, &device.gpu);
        }
        self.settle(true)
    }
}

#[cfg(test)]
mod tests;
