//! [`NodeState`]: one whole state of the node, and what readers ask of it.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use core::time::Duration;

use super::availability::{self, Availability, Held};
use super::device::{Device, Health, Timestamp};
use super::door::Door;
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
use super::xid::XidPolicy;
use crate::allocation::{
    AllocationReport, AllocationRequest, AllocationTables, DeviceId, GpuSet, PreferredAllocation, preferred_allocation,
    preferred_units,
};
use crate::topology::{Gpu, GpuUuid, NodeTopology};

/// One whole state of the node. Cheap to clone; a part that is shared is copied before it changes.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    pub(super) hardware: Arc<Hardware>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) offers: Arc<Offers>,
    pub(super) opening: Opening,
    /// What the ledger says of this hardware. A change of it is published.
    pub(super) held: Arc<Held>,
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
}
