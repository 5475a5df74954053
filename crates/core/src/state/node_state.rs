//! [`NodeState`]: one whole state of the node, and its readers.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use core::time::Duration;

use super::availability::{self, Availability, Held};
use super::device::{Device, Health, Timestamp};
use super::door::{Door, DraWait};
use super::gpu_shares::GpuSharing;
use super::hardware::Hardware;
use super::ledger::Ledger;
use super::mps_share::MpsShare;
use super::numa_hints::NumaHints;
use super::offers::Offers;
use super::opening::Opening;
use super::reason::UnhealthyReason;
use super::record::HealthRecord;
use super::resource_name::ResourceName;
use super::wait::Wait;
use super::xid::XidPolicy;
use crate::allocation::{
    AllocationReport, AllocationRequest, AllocationTables, DeviceId, GpuSet, PreferredAllocation, preferred_allocation,
    preferred_units,
};
use crate::topology::{Gpu, GpuUuid, NodeTopology};

/// One whole state of the node. It is cheap to clone: the clones share its parts until one changes.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    pub(super) hardware: Arc<Hardware>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) offers: Arc<Offers>,
    pub(super) opening: Opening,
    /// The GPUs that are held, by the ledger and this hardware. A change is published.
    pub(super) held: Arc<Held>,
}

/// A GPU that is offered, with its health and availability.
#[derive(Clone, Debug)]
pub struct GpuStatus<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// True if any of its devices may be given out: slots and MIG devices make several, and the healthiest counts.
    pub is_healthy: bool,
    /// The standing reasons of the GPU or its MIG devices, in the order in which they began, each with its beginning.
    /// Then the other reasons that keep its devices from being given out, such as a pod that holds them under another
    /// name.
    pub reasons: Vec<(&'a UnhealthyReason, Timestamp)>,
    /// The use that can be made of it now.
    pub availability: Availability,
}

/// The reason why a device cannot be given out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The resource has no such device.
    #[error("{0} has no device '{1}' on this node")]
    Unknown(ResourceName, DeviceId),
    /// The device is unhealthy.
    #[error("device '{1}' of {0} is unhealthy: {2}")]
    Unhealthy(ResourceName, DeviceId, UnhealthyReason),
    /// The request has several slots of shared devices, and the plan allows one.
    #[error("{1} devices of {0} are asked for, which is shared: a container may have 1")]
    OneSlot(ResourceName, usize),
    /// The request has one device twice.
    #[error("device '{1}' of {0} is asked for twice")]
    Repeated(ResourceName, DeviceId),
}

impl NodeState {
    /// Makes a state without any observation.
    pub fn new(numa_hints: NumaHints) -> Self {
        Self { offers: Arc::new(Offers::new(numa_hints)), ..Self::default() }
    }

    /// Sets the operator's classes of XIDs.
    #[must_use]
    pub fn with_xids(mut self, xids: XidPolicy) -> Self {
        Arc::make_mut(&mut self.hardware).xids = xids;
        self
    }

    /// Sets another first hold time than 60 s. The longest hold time is sixty times the first.
    #[must_use]
    pub fn with_hold(mut self, hold: Duration) -> Self {
        Arc::make_mut(&mut self.hardware).hold = hold;
        self
    }

    /// Sets another time than [`DRA_GRACE`](super::DRA_GRACE).
    #[must_use]
    pub fn with_dra_grace(mut self, grace: Duration) -> Self {
        Arc::make_mut(&mut self.offers).doors.grace = grace;
        self
    }

    /// Lets GPUs that leave DRA, or are to be shared otherwise, wait for the API server's answers:
    /// [`Event::SlicesStored`](super::Event::SlicesStored) and [`Event::Allocations`](super::Event::Allocations).
    #[must_use]
    pub fn asking_for_allocations(mut self) -> Self {
        Arc::make_mut(&mut self.ledger).allocations.are_read = true;
        self
    }

    /// Takes the graph and the tables of `other`. The next scan makes them again only if the graph differs.
    #[must_use]
    pub fn with_tables_of(mut self, other: &Self) -> Self {
        Arc::make_mut(&mut self.hardware).adopt_tables(&other.hardware);
        self
    }

    /// Publishes nothing until the snapshot is complete: a scan of the node and a first
    /// [`Event::Polled`](super::Event::Polled) of its GPUs. [`Self::next_deadline`] ends the wait if these do not come.
    #[must_use]
    pub fn awaiting_the_first_poll(mut self) -> Self {
        self.opening.await_poll();
        self
    }

    /// Publishes as soon as there is a scan of the node.
    #[must_use]
    pub fn awaiting_a_scan_alone(mut self) -> Self {
        self.opening.await_scan_alone();
        self
    }

    /// Does not wait for a first poll: the GPUs are those that another process has seen.
    #[must_use]
    pub fn awaiting_no_poll(mut self) -> Self {
        self.opening.await_no_poll();
        self
    }

    /// Publishes nothing until the first [`Event::Holders`](super::Event::Holders), even if that says that the kubelet
    /// cannot be asked. The first list then has the ids that pods hold. The wait ends as that for the first poll does.
    #[must_use]
    pub fn awaiting_the_holders(mut self) -> Self {
        self.opening.await_holders();
        self
    }

    /// The GPUs: graph, facts, health.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// The ledger: the hardware that is held.
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

    /// The tables from which choices are made.
    pub fn tables(&self) -> &Arc<AllocationTables> {
        self.hardware.tables()
    }

    /// The door of a GPU: the API through which it is offered; `None` if it is not offered.
    pub fn door(&self, gpu: &GpuUuid) -> Option<Door> {
        self.offers.door(&self.hardware, gpu)
    }

    /// The sharing of a GPU through DRA.
    pub fn dra_sharing(&self, gpu: &GpuUuid) -> GpuSharing {
        self.offers.shares.of(gpu)
    }

    /// Returns true if this node uses DRA: GPUs are offered through it, or will be.
    pub fn has_dra(&self) -> bool {
        !self.offers.doors.gpus().is_empty() || self.offers.doors.awaits_gpus()
    }

    /// The GPUs that leave DRA, each with the claims that have it.
    pub fn leaving_dra(&self) -> BTreeMap<GpuUuid, BTreeSet<String>> {
        let leaves = |gpu: &GpuUuid| matches!(self.door(gpu), Some(Door::FromDra(..)));
        let gpus = self.offers.doors.gpus().into_iter().filter(leaves);
        let claims = |gpu: GpuUuid| (self.ledger.claims_on(self.topology(), &gpu), gpu);
        gpus.map(claims).map(|(claims, gpu)| (gpu, claims)).collect()
    }

    /// The GPUs that are to go to DRA, to leave it or to be shared otherwise there, each with the reason why it has not
    /// changed.
    pub fn dra_waits(&self) -> BTreeMap<GpuUuid, DraWait> {
        let why = |(gpu, wait): (GpuUuid, Wait)| {
            let claims = self.ledger.claims_on(self.topology(), &gpu);
            let why = match wait.until {
                _ if !claims.is_empty() => DraWait::Held(claims),
                None => DraWait::Slices,
                Some(until) if !wait.is_over() => DraWait::Claims(until),
                Some(_) if !self.ledger.is_known() => DraWait::Holders,
                Some(_) => DraWait::ApiServer,
            };
            (gpu, why)
        };
        let to_dra = self.offers.doors.awaited().map(|gpu| (gpu.clone(), self.wait_to_dra(gpu)));
        self.offers.waits().map(why).chain(to_dra).collect()
    }

    fn wait_to_dra(&self, gpu: &GpuUuid) -> DraWait {
        let ledger = &self.ledger;
        match ledger.plugin_holder(self.topology(), gpu) {
            _ if !ledger.is_known() => DraWait::Holders,
            Some(device) if ledger.holdings().containers.contains(device) => DraWait::Pod(device.clone()),
            Some(device) => DraWait::Checkpoint(device.clone()),
            None if ledger.has_foreign_claim(self.topology(), gpu) => {
                DraWait::Held(ledger.claims_on(self.topology(), gpu))
            }
            None => DraWait::Holders,
        }
    }

    /// The devices that the API server's slices offer to new claims, by name, as far as this state knows.
    pub fn offered_by_slices(&self) -> Option<&BTreeSet<String>> {
        self.ledger.allocations.offered.as_ref()
    }

    /// The GPUs about which the API server is to be asked now: which claims have them allocated. No further allocation
    /// comes, and no claim holds them.
    pub fn awaiting_allocations(&self) -> BTreeSet<GpuUuid> {
        let waits = self.offers.waits().filter(|(gpu, wait)| {
            wait.is_over()
                && !self.ledger.has_claim_on(self.topology(), gpu)
                && !self.ledger.allocations.has_no_claim_on(gpu)
        });
        waits.map(|(gpu, _)| gpu).collect()
    }

    /// Returns true if the next two lists of holders may let a GPU go to DRA. A GPU that a pod has through the device
    /// plugin may take days.
    pub fn may_soon_offer_through_dra(&self) -> bool {
        self.offers.doors.awaits_gpus() && (!self.ledger.is_known() || self.offers.doors.awaits_unheld_gpus())
    }

    /// Returns true if any GPU is offered, through either door.
    pub fn offers_any(&self) -> bool {
        !self.offers.resources().is_empty() || !self.offers.doors.gpus().is_empty()
    }

    /// The record for our next process. [`Effect::Keep`](super::Effect::Keep) reports each change.
    pub fn record(&self) -> HealthRecord {
        let (admissions, claim_admissions) = self.ledger.admissions.record();
        HealthRecord {
            admissions,
            claim_admissions,
            dra: self.offers.doors.gpus(),
            dra_shares: self.offers.shares.record(),
            ..self.hardware.record()
        }
    }

    /// The resources that are shared by MPS, offered or not, each with its share of the node.
    pub fn mps_shares(&self) -> &BTreeMap<ResourceName, MpsShare> {
        &self.offers.mps.shares
    }

    /// The GPUs that have devices on the kubelet's lists or are offered through DRA, by PCI address and UUID.
    pub fn gpus(&self) -> Vec<GpuStatus<'_>> {
        let by_gpu = availability::by_gpu(self.offers.devices().chain(self.offers.through_dra()));
        by_gpu.iter().filter_map(|devices| self.status(devices)).collect()
    }

    /// The status of the GPU that has these devices.
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

    /// Returns true if the kubelet has listed the holders.
    pub fn knows_holders(&self) -> bool {
        self.held.is_some()
    }

    /// The GPUs that requests can have whole now ([`Availability::Free`]), one set for each resource and one for DRA. A
    /// request gets all of its GPUs from one of these sets. `None` if the holders are unknown.
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

    /// The next moment at which time alone changes something; [`Event::Tick`](super::Event::Tick) is due then. Health
    /// is not included: a hold time passes with polls and ends with one.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let doors = self.offers.deadline();
        self.opening.deadline().into_iter().chain(self.hardware.xid_log.deadline()).chain(doors).min()
    }

    /// Chooses the best devices of a resource for a request, and reports why: whole GPUs as such, slots and MIG devices
    /// by the GPUs behind them. Never fails.
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

    /// Finds the devices that Allocate names, in the order of their PCI addresses.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong with the request. No device is given out then.
    pub fn allocate(&self, resource: &ResourceName, ids: &[DeviceId]) -> Result<Vec<&Device>, AllocateError> {
        let listed = self.offers.resources().get(resource);
        let mut taken: BTreeMap<&DeviceId, &Device> = BTreeMap::new();
        for id in ids {
            let (resource, name) = (resource.clone(), id.clone());
            let Some(device) = listed.and_then(|listed| listed.devices().get(id)) else {
                return Err(match listed.and_then(|listed| listed.refusal(id)).cloned() {
                    Some(reason) => AllocateError::Unhealthy(resource, name, reason),
                    None => AllocateError::Unknown(resource, name),
                });
            };
            if let Health::Unhealthy { reason, .. } = &device.health {
                return Err(AllocateError::Unhealthy(resource, name, reason.clone()));
            }
            if taken.insert(id, device).is_some() {
                return Err(AllocateError::Repeated(resource, name));
            }
        }
        let mut taken: Vec<&Device> = taken.into_values().collect();
        let one_slot = listed.is_some_and(|listed| listed.choice.one_slot);
        if one_slot && taken.len() > 1 && taken.iter().any(|device| device.slot.is_some()) {
            return Err(AllocateError::OneSlot(resource.clone(), taken.len()));
        }
        taken.sort_by_key(|device| (device.gpu.pci, device.mig.as_ref().map(|mig| mig.index), device.slot));
        Ok(taken)
    }
}
