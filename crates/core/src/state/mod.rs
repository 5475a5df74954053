//! The state of this node: `apply(state, event, now) -> (state, effects)`.
//!
//! Pure: no I/O, no clock (`now` is an argument), no tasks, no logging. The runtime is the one caller of
//! [`NodeState::apply`], and the one writer; everybody else reads whole snapshots. Three parts, from the inside out:
//!
//! - [`Hardware`]: the graph, facts and health of GPUs and MIG devices, keyed by UUID.
//! - [`Ledger`]: which hardware is held, and through which door.
//! - [`Offers`]: plan × hardware × ledger -> resources, each with its devices and its choice.
//!
//! Which set of GPUs is best is decided in [`crate::allocation`].

mod admissions;
mod availability;
mod device;
mod doors;
mod event;
mod hardware;
mod health;
mod holdings;
mod ledger;
mod mps;
mod numa_hints;
mod offers;
mod opening;
mod plan;
mod poll;
mod problem;
mod reason;
mod record;
mod resource_name;
mod resources;
mod shares;
mod xid;
mod xid_log;

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use core::time::Duration;

use crate::allocation::{
    AllocationReport, AllocationRequest, AllocationTables, DeviceId, GpuSet, PreferredAllocation, preferred_allocation,
    preferred_units,
};
use crate::topology::{Gpu, GpuUuid, NodeTopology};
use availability::Held;
use health::GpuHealth;
use opening::Opening;

pub use admissions::{AdmissionRecord, FreeThen};
pub use availability::Availability;
pub use device::{Device, Health, Timestamp};
pub use doors::{DRA_GRACE, Door};
pub use event::{Effect, Event, MigInstance};
pub use hardware::{DriverVersions, Hardware};
pub use holdings::{ClaimedDevice, ContainerHoldings, ContainerName, Holdings, ResourceDevice};
pub use ledger::{DRA_DRIVER, Ledger, NAMES_KEPT, PreparedClaim, gpu_behind, gpu_of};
pub(crate) use mps::VOLTA;
pub use mps::{MpsGpu, MpsShare};
pub use numa_hints::NumaHints;
pub use offers::{Offers, Resource};
pub use plan::{
    DeviceSelector, DeviceSelectorError, DraGpus, Filter, GpuSelector, MigStrategy, NamePattern, Pattern, ResourcePlan,
    SharedDevices, SharedResource, Sharing, SharingKind,
};
pub use poll::{FabricHealth, HealthPoll, Reach, RecoveryAction, RowRemapping};
pub use problem::PlanProblem;
pub use reason::UnhealthyReason;
pub use record::{Accepted, GpuRecord, HealthRecord, KeptReason, LastSeen, NodeIdentity};
pub use resource_name::{ResourceName, ResourceNameError};
pub use resources::MOST_SLOTS;
pub use shares::{GpuShares, GpuSharing, wanted as dra_shares};
pub use xid::{XidClass, XidPolicy, XidSet};

/// One whole state of the node. Cheap to clone; a part that is shared is copied before it changes.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    hardware: Arc<Hardware>,
    ledger: Arc<Ledger>,
    offers: Arc<Offers>,
    opening: Opening,
    /// What the ledger says of this hardware. A change of it is published.
    held: Arc<Held>,
}

/// A GPU with devices on the kubelet's lists, and how it is.
#[derive(Clone, Debug)]
pub struct GpuStatus<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// Whether any device of it may be given out: a GPU may be many, slots and MIG devices, and the healthiest stands for it.
    pub is_healthy: bool,
    /// The reasons that stand against it or its MIG devices, in the order in which they began, each with its beginning; then
    /// what else keeps its devices from being given out, such as a pod that holds them under another name.
    pub reasons: Vec<(&'a UnhealthyReason, Timestamp)>,
    /// Who can have it now.
    pub availability: Availability,
}

/// Why a device cannot be given out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The resource has no such device.
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

impl NodeState {
    /// Nothing seen yet.
    pub fn new(numa_hints: NumaHints) -> Self {
        Self { offers: Arc::new(Offers::new(numa_hints)), ..Self::default() }
    }

    /// The same, with an operator's classes of XIDs.
    #[must_use]
    pub fn with_xids(mut self, xids: XidPolicy) -> Self {
        Arc::make_mut(&mut self.hardware).xids = xids;
        self
    }

    /// The same, with another first hold than 60 s; the longest one is its sixtyfold.
    #[must_use]
    pub fn with_hold(mut self, hold: Duration) -> Self {
        Arc::make_mut(&mut self.hardware).hold = hold;
        self
    }

    /// The same, with another time than [`DRA_GRACE`].
    #[must_use]
    pub fn with_dra_grace(mut self, grace: Duration) -> Self {
        Arc::make_mut(&mut self.offers).set_dra_grace(grace);
        self
    }

    /// The same, with the graph of `other` and what a choice is made from: the next scan builds it only where it differs.
    #[must_use]
    pub fn with_tables_of(mut self, other: &Self) -> Self {
        Arc::make_mut(&mut self.hardware).adopt_tables(&other.hardware);
        self
    }

    /// The same, publishing nothing before a complete snapshot: a scan of the node, and a first [`Event::Polled`] of its
    /// GPUs. Where that does not come, [`Self::next_deadline`] ends the wait.
    #[must_use]
    pub fn awaiting_the_first_poll(mut self) -> Self {
        self.opening.await_poll();
        self
    }

    /// The same, publishing nothing before a first [`Event::Holders`], be it that the kubelet cannot be asked: the first list
    /// has the ids that pods hold. The wait ends as that for the first poll.
    #[must_use]
    pub fn awaiting_the_holders(mut self) -> Self {
        self.opening.await_holders();
        self
    }

    /// The GPUs: graph, facts, health.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// Who holds which hardware.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The resources.
    pub fn offers(&self) -> &Offers {
        &self.offers
    }

    /// The graph of the node.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        self.hardware.topology()
    }

    /// What a choice is made from.
    pub fn tables(&self) -> &Arc<AllocationTables> {
        self.hardware.tables()
    }

    /// The door of a GPU: the API through which it is offered; `None` for one that nobody offers.
    pub fn door(&self, gpu: &GpuUuid) -> Option<Door> {
        self.offers.door(&self.hardware, gpu)
    }

    /// How a GPU is shared through DRA.
    pub fn dra_sharing(&self, gpu: &GpuUuid) -> GpuSharing {
        self.offers.shares().of(gpu)
    }

    /// Whether this node has anything to do with DRA: GPUs that are offered through it, or are to be.
    pub fn has_dra(&self) -> bool {
        !self.offers.dra_gpus().is_empty() || self.offers.awaits_dra()
    }

    /// The GPUs that leave DRA, each with the claims that have it.
    pub fn leaving_dra(&self) -> BTreeMap<GpuUuid, BTreeSet<String>> {
        let leaves = |gpu: &GpuUuid| matches!(self.door(gpu), Some(Door::FromDra { .. }));
        let gpus = self.offers.dra_gpus().into_iter().filter(leaves);
        let claims = |gpu: GpuUuid| (self.ledger.claims_on(self.topology(), &gpu), gpu);
        gpus.map(claims).map(|(claims, gpu)| (gpu, claims)).collect()
    }

    /// Whether the next two lists of holders may let a GPU go to DRA. One that a pod has through the device plugin may
    /// take days.
    pub fn may_soon_offer_through_dra(&self) -> bool {
        self.offers.awaits_dra() && (!self.ledger.is_known() || self.offers.awaits_unheld_gpus())
    }

    /// Whether any GPU is offered, through either door.
    pub fn offers_any(&self) -> bool {
        !self.offers.resources().is_empty() || !self.offers.dra_gpus().is_empty()
    }

    /// What the next process of ours has to know; [`Effect::Keep`] says when it changed.
    pub fn record(&self) -> HealthRecord {
        let (admissions, claim_admissions) = self.ledger.admissions().record();
        HealthRecord {
            admissions,
            claim_admissions,
            dra: self.offers.dra_gpus(),
            dra_shares: self.offers.shares().record(),
            ..self.hardware.record()
        }
    }

    /// The resources that are shared by MPS, offered or not, with what each takes of the node.
    pub fn mps_shares(&self) -> &BTreeMap<ResourceName, MpsShare> {
        &self.offers.mps.shares
    }

    /// The GPUs that have devices on the kubelet's lists or are offered through DRA, by PCI address and UUID.
    pub fn gpus(&self) -> Vec<GpuStatus<'_>> {
        let by_gpu = availability::by_gpu(self.offers.devices().chain(self.offers.through_dra()));
        by_gpu.iter().filter_map(|devices| self.status(devices)).collect()
    }

    /// How the GPU of these devices is.
    fn status<'a>(&'a self, devices: &[&'a Device]) -> Option<GpuStatus<'a>> {
        let gpu = &devices.first()?.gpu;
        let mut reasons: Vec<_> = self.hardware.standing(&gpu.uuid).collect();
        let mut is_healthy = false;
        for device in devices {
            match &device.health {
                Health::Healthy => is_healthy = true,
                Health::Unhealthy { reason, since } if !reasons.iter().any(|(known, _)| known.is(reason)) => {
                    reasons.push((reason, *since));
                }
                Health::Unhealthy { .. } => {}
            }
        }
        let availability = Availability::of(&gpu.uuid, devices, self.topology(), &self.held);
        Some(GpuStatus { gpu, is_healthy, reasons, availability })
    }

    /// Whether the kubelet has said who holds what.
    pub fn knows_holders(&self) -> bool {
        self.held.is_some()
    }

    /// The GPUs that requests can have whole now ([`Availability::Free`]), for each resource and for DRA: one request
    /// gets all of its GPUs from one of these sets. `None` where it is not known who holds what.
    pub fn free_gpus(&self) -> Option<Vec<GpuSet>> {
        let held = self.held.as_ref().as_ref()?;
        let is_free = |device: &&Device| {
            device.mig.is_none() && device.health == Health::Healthy && !held.contains(&device.gpu.uuid)
        };
        let free = |devices: &mut dyn Iterator<Item = &Device>| {
            let free = devices.filter(is_free).filter_map(|device| self.topology().position(&device.gpu.uuid));
            free.collect()
        };
        let resources = self.offers.resources().values();
        let by_resource = resources.map(|resource| free(&mut resource.devices().values()));
        Some(by_resource.chain([free(&mut self.offers.through_dra().iter())]).collect())
    }

    /// The next moment at which time alone changes something: then [`Event::Tick`] is due. Health is not among it: a hold
    /// is as long as polls that pass, and ends with one.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let doors = self.offers.deadline();
        self.opening.deadline().into_iter().chain(self.hardware.xid_log.deadline()).chain(doors).min()
    }

    /// The best devices of a resource for a request, and why: whole GPUs as such, slots and MIG devices by the GPUs
    /// behind them. Never fails.
    pub fn preferred(
        &self,
        resource: &ResourceName,
        request: &AllocationRequest,
    ) -> (PreferredAllocation, AllocationReport) {
        let choice = self.offers.resources().get(resource).map(|resource| resource.choice.clone()).unwrap_or_default();
        match &choice.units {
            Some(units) => preferred_units(self.tables(), units, request, choice.policy),
            None => preferred_allocation(self.tables(), request, choice.policy),
        }
    }

    /// The devices that an order names, in the order of their PCI addresses: all of them, or the first thing
    /// wrong with the order.
    pub fn allocate(&self, resource: &ResourceName, ids: &[DeviceId]) -> Result<Vec<&Device>, AllocateError> {
        let listed = self.offers.resources().get(resource);
        let mut taken: BTreeMap<&DeviceId, &Device> = BTreeMap::new();
        for id in ids {
            let (resource, name) = (resource.clone(), id.clone());
            let Some(device) = listed.and_then(|listed| listed.devices().get(id)) else {
                return Err(match listed.and_then(|listed| listed.refusal(id)).cloned() {
                    Some(reason) => AllocateError::Unhealthy { resource, id: name, reason },
                    None => AllocateError::Unknown { resource, id: name },
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
        let one_slot = listed.is_some_and(|listed| listed.choice.one_slot);
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
        let mut effects = Vec::new();
        // Whether the resources have to be made anew, and whether the lists changed otherwise than by a device's health.
        let (mut remake, mut publish) = (false, false);
        let is_new_list = matches!(event, Event::Holders(_));
        let hardware = Arc::make_mut(&mut self.hardware);
        match event {
            Event::Observed(observed) => {
                effects.extend(hardware.scanned(&observed));
                self.opening.scanned(!observed.gpus.is_empty(), now);
                remake = true;
            }
            Event::Planned(plan) => {
                Arc::make_mut(&mut self.offers).want(*plan, hardware);
                remake = true;
            }
            Event::MpsReady(ready) => {
                Arc::make_mut(&mut self.offers).mps.ready = ready;
                remake = true;
            }
            Event::Holders(holdings) => {
                let changed = Arc::make_mut(&mut self.ledger).update(holdings, now);
                let offers = Arc::make_mut(&mut self.offers);
                publish = offers.drop_unheld(&self.ledger) | self.opening.holders_known() | changed;
                if changed {
                    effects.extend(offers.follow_ledger(hardware, &self.ledger, now));
                }
            }
            Event::Allocated { resource, devices, offered } => {
                let given =
                    admissions::at_allocate((hardware, &self.ledger, &self.offers), &resource, &devices, &offered);
                Arc::make_mut(&mut self.ledger).admissions_mut().give(resource, devices, given);
                // No device's health depends on what no list has.
                effects.extend(given.map(|_| Effect::Keep));
                if self.note_held() && self.opening.is_open() {
                    effects.push(Effect::Publish);
                }
                return (self, effects);
            }
            Event::Prepared(claims) => {
                let at_prepare = admissions::at_prepare((hardware, &self.ledger, &self.offers), &claims);
                let ledger = Arc::make_mut(&mut self.ledger);
                if ledger.admissions_mut().prepare(at_prepare) {
                    effects.push(Effect::Keep);
                }
                publish = ledger.prepare(claims);
            }
            Event::NumaHints(hints) => {
                Arc::make_mut(&mut self.offers).set_numa_hints(hints, hardware);
                publish = true;
            }
            Event::Polled(polls) => {
                effects.extend(hardware.polled(&polls, now));
                publish = !polls.is_empty() && self.opening.polled();
            }
            Event::Xid { gpu, code, instance } => effects.extend(hardware.xid(gpu, code, instance, now)),
            Event::DoubleBitEcc { gpu } => hardware.double_bit_ecc(&gpu, now),
            Event::Quarantined { gpu, why } => {
                hardware.change(&gpu, |health| health.fail(UnhealthyReason::Quarantined { why }, now));
            }
            Event::ReleasedFromQuarantine { gpu } => hardware.change(&gpu, GpuHealth::released),
            Event::DriverAway { why } => hardware.driver_away(&why, now),
            Event::DriverBack => hardware.driver_back(),
            Event::Cleared { gpu } => hardware.change(&gpu, GpuHealth::cleared),
            Event::Identified(identity) => hardware.identified(&identity),
            Event::Restored(record) => {
                effects.extend(hardware.restored(&record));
                let admissions = Arc::make_mut(&mut self.ledger).admissions_mut();
                admissions.restore(&record.admissions, &record.claim_admissions);
                if !record.dra.is_empty() {
                    Arc::make_mut(&mut self.offers).restore(&record.dra, &record.dra_shares);
                }
            }
            Event::Tick => {}
        }
        effects.extend(hardware.xid_log.report(now));
        if remake {
            effects.extend(Arc::make_mut(&mut self.offers).make(hardware, &self.ledger, now));
        }
        if let Some(turned) = self.offers.turn_doors(hardware, &self.ledger, is_new_list, now) {
            remake = true;
            effects.extend(turned);
            effects.extend(Arc::make_mut(&mut self.offers).make(hardware, &self.ledger, now));
            effects.push(Effect::Keep);
        }
        publish |= remake | self.opening.tick(now);
        let (changed, conflicts) = Offers::refresh_health(&mut self.offers, hardware, &self.ledger);
        effects.extend(hardware.report(self.offers.listed()));
        effects.extend(conflicts);
        let (uncounted_changed, uncounted) = hardware.report_uncounted();
        effects.extend(uncounted);
        let keep = hardware.keep();
        publish |= changed | uncounted_changed | self.note_held();
        if publish && self.opening.is_open() {
            effects.push(Effect::Publish);
        }
        effects.extend(keep);
        (self, effects)
    }

    /// Follows which GPUs are held, after any event. Whether that changed.
    fn note_held(&mut self) -> bool {
        let held = self.ledger.held(self.hardware.topology(), |resource, id| self.offers.gpu_of(resource, id));
        let changed = held != *self.held;
        if changed {
            self.held = Arc::new(held);
        }
        changed
    }
}

#[cfg(test)]
mod tests;
