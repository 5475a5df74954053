//! [`NodeState`]: one whole state of the node, and the methods that set it up and read it.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::time::Duration;

use super::availability::Held;
use super::free_at_admission::healthy_whole_gpus;
use super::{
    Availability, Device, Door, Event, Expectation, GpuSharing, Hardware, Health, HealthRecord, Ledger, MpsShare,
    NumaHints, Offers, Opening, ResourceName, ResourcePlan, Timestamp, UnhealthyReason, XidPolicy,
};
use crate::allocation::{
    AllocationReport, AllocationRequest, AllocationTables, DeviceId, GpuSet, PreferredAllocation, preferred_allocation,
    preferred_units,
};
use crate::topology::{Gpu, GpuUuid, NodeObservation, NodeTopology};

/// One whole state of the node. It is cheap to clone: the clones share its parts until one changes.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    pub(super) hardware: Arc<Hardware>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) offers: Arc<Offers>,
    pub(super) opening: Opening,
    /// The GPUs that are held, computed from the three parts. Each change publishes a snapshot.
    pub(super) held: Arc<Held>,
}

/// A GPU of the node, with its health and availability.
#[derive(Clone, Debug)]
pub struct GpuStatus<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// True if any of its devices is healthy or only cordoned: a GPU with slots or MIG devices has several. A GPU
    /// without devices, or whose MIG devices are all gone, is healthy if it has no standing reason.
    pub is_healthy: bool,
    /// The standing reasons of the GPU and its MIG devices, each with its beginning, in the order in which they began.
    /// Then the other reasons that keep its devices from being given out, such as a pod that holds them under another
    /// name. A cordon is last.
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
    #[error("cannot allocate {1} devices of {0}: it is shared, and a container may have 1; request 1")]
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

    /// The state of a machine on which no GPU is held or unhealthy.
    pub fn of_machine(observed: NodeObservation, plan: ResourcePlan) -> Self {
        let events = [Event::Planned(Box::new(plan)), Event::Observed(Box::new(observed))];
        events.into_iter().fold(Self::default().without_lists(), |state, event| state.apply(event, Timestamp::ZERO).0)
    }

    /// Sets the operator's classes of XIDs.
    #[must_use]
    pub fn with_xids(mut self, xids: XidPolicy) -> Self {
        Arc::make_mut(&mut self.hardware).xids = xids;
        self
    }

    /// Sets the hardware that is expected of the node.
    #[must_use]
    pub fn expecting(mut self, expected: Expectation) -> Self {
        Arc::make_mut(&mut self.hardware).expected = expected;
        self
    }

    /// Sets the first hold time, by default 60 s; the longest is sixty times the first.
    #[must_use]
    pub fn with_hold(mut self, hold: Duration) -> Self {
        Arc::make_mut(&mut self.hardware).hold = Some(hold);
        self
    }

    /// Takes over the graph, the tables and the plan of `other`; the plan decides the door of each GPU in the graph.
    /// The next scan makes graph and tables again only if the graph differs.
    #[must_use]
    pub fn with_tables_of(mut self, other: &Self) -> Self {
        Arc::make_mut(&mut self.offers).set_plan(other.offers.plan().clone(), &self.hardware);
        Arc::make_mut(&mut self.hardware).tables = Arc::clone(other.tables());
        self
    }

    /// Changes which facts the first list waits for. After the node's scan, the wait lasts until
    /// [`Self::next_deadline`] at most.
    #[must_use]
    pub fn awaiting(mut self, change: impl FnOnce(&mut Opening)) -> Self {
        change(&mut self.opening);
        self
    }

    /// Makes DRA wait for no list of holders, because there is no PodResources socket: it gets its GPUs at once. Only
    /// the claims that our DRA plugin has prepared are known then.
    #[must_use]
    pub fn without_lists(mut self) -> Self {
        Arc::make_mut(&mut self.ledger).has_no_lists = true;
        self
    }

    /// Returns true if the state may be published: the first list waits for nothing any more.
    pub fn is_open(&self) -> bool {
        self.opening.is_open()
    }

    /// The GPUs: graph, facts, health.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// The ledger: the hardware that is held.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The offers: the resources and the devices of DRA.
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

    /// The door of a GPU; `None` if a filter leaves the GPU out, or it is gone.
    pub fn door(&self, gpu: &GpuUuid) -> Option<Door> {
        let topology = self.topology();
        let gpu = topology.gpus().get(topology.position(gpu)?)?;
        let plan = self.offers.plan();
        plan.filter.offers(gpu).then_some(plan.door)
    }

    /// Returns true if DRA offers a GPU, or its claims hold it.
    pub fn is_with_dra(&self, gpu: &GpuUuid) -> bool {
        self.offers.doors.has(gpu)
    }

    /// The sharing of a GPU through DRA.
    pub fn dra_sharing(&self, gpu: &GpuUuid) -> GpuSharing {
        let Some(form) = self.offers.doors.gpus.get(gpu) else { return GpuSharing::default() };
        GpuSharing { now: form.now, next: form.next.map_or(form.now, |(next, _)| next) }
    }

    /// Returns true if this node uses DRA: its door is DRA, or claims hold GPUs.
    pub fn has_dra(&self) -> bool {
        self.offers.plan().door == Door::Dra || !self.offers.doors.gpus.is_empty()
    }

    /// The GPUs that are or may be held through the other door, each with the reason of one of its devices. The node's
    /// own door does not offer them until their holders end.
    pub fn held_through_other_door(&self) -> BTreeMap<&GpuUuid, &UnhealthyReason> {
        let of_claims = self.offers.through_dra().iter().filter(|_| self.offers.plan().door == Door::Plugin);
        let held = self.offers.withheld().iter().chain(of_claims);
        held.filter_map(|device| Some((&device.gpu.uuid, device.health.reason()?))).collect()
    }

    /// Returns true if the next two lists of holders may let DRA offer a GPU. A GPU that a pod is known to hold does
    /// not count, because the pod may run for days.
    pub fn may_soon_offer_through_dra(&self) -> bool {
        self.offers.doors.may_gain_gpu(self.topology(), &self.ledger)
    }

    /// Returns true if this process serves any GPU, even if pods or claims hold all of them.
    pub fn offers_any(&self) -> bool {
        let Offers { doors, .. } = &*self.offers;
        !self.offers.resources().is_empty() || !doors.gpus.is_empty() || !doors.waiting.is_empty()
    }

    /// The record for our next process. [`Effect::Keep`](super::Effect::Keep) is the order to write it.
    pub fn record(&self) -> HealthRecord {
        let (admissions, claim_admissions) = self.ledger.admissions.record();
        let of_dra = || self.offers.doors.gpus.iter();
        HealthRecord {
            admissions,
            claim_admissions,
            dra: of_dra().map(|(gpu, _)| gpu.clone()).collect(),
            dra_shares: of_dra().filter_map(|(gpu, form)| Some((gpu.clone(), form.now?))).collect(),
            ..self.hardware.record()
        }
    }

    /// The resources that are shared by MPS, offered or not, each with its GPUs.
    pub fn mps_shares(&self) -> &BTreeMap<ResourceName, MpsShare> {
        &self.offers.mps.shares
    }

    /// The GPUs that the plan does not leave out, and those that have devices on the kubelet's lists or for DRA, in the
    /// order of PCI address and UUID.
    pub fn gpus<'a>(&'a self) -> Vec<GpuStatus<'a>> {
        let plan = self.offers.plan();
        let present = self.topology().gpus().iter().filter(|gpu| plan.filter.offers(gpu));
        let of_dra = self.offers.through_dra().iter().chain(self.offers.withheld());
        let key = |gpu: &'a Gpu| (gpu.pci, &gpu.uuid);
        let mut by_gpu: BTreeMap<_, _> = present.map(|gpu| (key(gpu), (gpu, Vec::new()))).collect();
        for device in self.offers.devices().chain(of_dra) {
            let (_, devices) = by_gpu.entry(key(&device.gpu)).or_insert((&device.gpu, Vec::new()));
            devices.push(device);
        }
        by_gpu.into_values().map(|(gpu, devices)| self.status(gpu, devices)).collect()
    }

    /// The status of the GPU that has these devices.
    fn status<'a>(&'a self, gpu: &'a Gpu, mut devices: Vec<&'a Device>) -> GpuStatus<'a> {
        let mut reasons: Vec<_> = self.hardware.reasons(&gpu.uuid).collect();
        devices.retain(|device| !self.hardware.has_lost(device));
        let mut is_healthy = reasons.is_empty() && devices.is_empty();
        for device in &devices {
            match &device.health {
                Health::Healthy => is_healthy = true,
                // The cordon itself is added to the reasons below.
                Health::Unhealthy { .. } if device.is_cordoned() => is_healthy = true,
                Health::Unhealthy { reason, since } if !reasons.iter().any(|(known, _)| known.is(reason)) => {
                    reasons.push((reason, *since));
                }
                Health::Unhealthy { .. } => {}
            }
        }
        reasons.extend(self.hardware.cordon(&gpu.uuid));
        let availability = Availability::of(&gpu.uuid, &devices, self.topology(), &self.held);
        GpuStatus { gpu, is_healthy, reasons, availability }
    }

    /// Returns true if the kubelet has listed the holders.
    pub fn knows_holders(&self) -> bool {
        self.held.is_some()
    }

    /// The GPUs that requests can have whole now ([`Availability::Free`]), one set for each resource and one for DRA. A
    /// request gets all of its GPUs from one of these sets. `None` if the holders are unknown.
    pub fn free_gpus(&self) -> Option<Vec<GpuSet>> {
        let held = self.held.as_ref().as_ref()?;
        let held: GpuSet = held.iter().filter_map(|gpu| self.topology().position(gpu)).collect();
        let resources = self.offers.resources().values();
        let by_resource = resources.map(|resource| healthy_whole_gpus(&self.hardware, resource.devices().values()));
        let of_dra = healthy_whole_gpus(&self.hardware, self.offers.through_dra().iter());
        Some(by_resource.chain([of_dra]).map(|free| free.without(held)).collect())
    }

    /// The next moment at which time alone changes something; [`Event::Tick`](super::Event::Tick) is due then. Health
    /// is not included: a hold time passes with polls and ends with one.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.opening.deadline()
    }

    /// Chooses the best devices of a resource for a request, and reports why. Compares slots and MIG devices by the
    /// GPUs behind them. Never fails.
    pub fn preferred(
        &self,
        resource: &ResourceName,
        request: &AllocationRequest,
    ) -> (PreferredAllocation, AllocationReport) {
        let units = self.offers.resources().get(resource).and_then(|resource| resource.units.as_ref());
        let policy = self.offers.plan().policy(units.is_some());
        match units {
            Some(units) => preferred_units(self.tables(), units, request, policy),
            None => preferred_allocation(self.tables(), request, policy),
        }
    }

    /// Finds the devices that Allocate names, in the order of PCI address, MIG index and slot.
    ///
    /// # Errors
    ///
    /// The first fault of the request. No device is given out in this case.
    pub fn allocate(&self, resource: &ResourceName, ids: &[DeviceId]) -> Result<Vec<&Device>, AllocateError> {
        let listed = self.offers.resources().get(resource);
        let mut taken: BTreeMap<&DeviceId, &Device> = BTreeMap::new();
        for id in ids {
            let (resource, name) = (resource.clone(), id.clone());
            if let Some(reason) = listed.and_then(|listed| listed.refusal(id)) {
                return Err(AllocateError::Unhealthy(resource, name, reason.clone()));
            }
            let Some(device) = listed.and_then(|listed| listed.devices().get(id)) else {
                return Err(AllocateError::Unknown(resource, name));
            };
            if taken.insert(id, device).is_some() {
                return Err(AllocateError::Repeated(resource, name));
            }
        }
        let mut taken: Vec<&Device> = taken.into_values().collect();
        let has_slots = taken.iter().any(|device| device.slot.is_some());
        if self.offers.plan().allows_only_one_slot() && taken.len() > 1 && has_slots {
            return Err(AllocateError::OneSlot(resource.clone(), taken.len()));
        }
        taken.sort_by_key(|device| (device.gpu.pci, device.mig.as_ref().map(|mig| mig.index), device.slot));
        Ok(taken)
    }
}
