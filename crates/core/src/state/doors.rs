//! The rule about doors: a GPU that the filter offers is offered through the node's [`Door`], unless it is held through
//! the other one.
//!
//! A part of [`super::offers`]. The plan says which door the node has. [`Doors`] has the GPUs of DRA:
//!
//! - With the door DRA, a pod may still have a GPU through the device plugin or another DRA plugin. DRA gets the GPU
//!   when two lists of the kubelet in a row show no such pod, and then keeps it, over our restarts too
//!   ([`super::HealthRecord::dra`]). One list is not enough, because it may be older than the last pod, and a kubelet
//!   that has just started knows fewer pods. Without a PodResources socket ([`super::NodeState::without_lists`]), DRA
//!   gets the GPU at once.
//! - With the door of the device plugin, DRA keeps its GPUs until their claims end, and has those of claims that our
//!   DRA plugin has prepared. A claim that the kubelet lists on any other GPU makes that GPU's devices unhealthy
//!   ([`super::ledger`]).
//!
//! A GPU changes its door together with all its MIG devices.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::shares::{self, Form};
use super::{Device, Door, GpuShares, Hardware, Health, Ledger, NumaHints, ResourcePlan, Timestamp, UnhealthyReason};
use crate::topology::{GpuUuid, NodeTopology};

/// The number of lists in a row without a holder that give a GPU to DRA.
const REQUIRED_LISTS: u8 = 2;

/// The GPUs of DRA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Doors {
    /// The GPUs that DRA offers, or that its claims hold, each shared or not.
    pub gpus: BTreeMap<GpuUuid, Form>,
    /// The GPUs that DRA is to offer, each with the number of lists in a row without a holder.
    pub waiting: BTreeMap<GpuUuid, u8>,
    /// The devices of `gpus`: whole GPUs, and MIG devices of GPUs in MIG mode. The devices of a GPU that is gone stay.
    pub devices: Vec<Device>,
    /// The devices of `waiting`.
    pub withheld: Vec<Device>,
}

impl Doors {
    /// Returns true if DRA offers a GPU, or its claims hold it.
    pub fn has(&self, gpu: &GpuUuid) -> bool {
        self.gpus.contains_key(gpu)
    }

    /// Returns true if a new list of holders could give DRA a GPU, or change the sharing of a GPU.
    pub fn awaits_holders(&self) -> bool {
        !self.waiting.is_empty() || self.gpus.values().any(|form| form.next.is_some())
    }

    /// Returns true if the next lists may let DRA offer a GPU that is not known to be held.
    pub fn may_gain_gpu(&self, topology: &NodeTopology, ledger: &Ledger) -> bool {
        self.waiting.keys().any(|gpu| !ledger.is_known() || !ledger.is_held_outside_dra(topology, gpu))
    }

    /// Takes over the GPUs that the last process offered through DRA, and which of them were shared. Another device
    /// plugin may have served the node since: a claim does not get a GPU that a pod has through that plugin.
    pub fn restore(&mut self, gpus: &BTreeSet<GpuUuid>, shared: &BTreeMap<GpuUuid, GpuShares>) {
        for gpu in gpus {
            self.gpus.entry(gpu.clone()).or_insert_with(|| Form { now: shared.get(gpu).copied(), next: None });
        }
    }

    /// The doors after an event; `None` if nothing changes. `is_new_list` is true if a list of holders, not an early
    /// one, has just come. As long as no GPU is observed, no GPU changes its door.
    pub fn next(
        &self,
        plan: &ResourcePlan,
        hardware: &Hardware,
        ledger: &Ledger,
        is_new_list: bool,
        now: Timestamp,
    ) -> Option<Self> {
        let topology = hardware.topology();
        let none_observed = topology.gpus().is_empty();
        let has_claim = |uuid: &GpuUuid| ledger.claim_on(topology, uuid).is_some();
        let stays = |uuid: &&GpuUuid| none_observed || topology.position(uuid).is_none() && has_claim(uuid);
        let mut gpus: BTreeSet<GpuUuid> = self.gpus.keys().filter(stays).cloned().collect();
        let mut waiting = if none_observed { self.waiting.clone() } else { BTreeMap::new() };
        for gpu in topology.gpus() {
            let uuid = gpu.uuid.clone();
            let is_offered = plan.offers_through_dra(gpu);
            if ledger.has_prepared_on(&uuid) || self.has(&uuid) && (is_offered || has_claim(&uuid)) {
                gpus.insert(uuid);
            } else if is_offered {
                let before = self.waiting.get(&uuid).copied().unwrap_or_default();
                let is_unheld = ledger.is_known() && !ledger.is_held_outside_dra(topology, &uuid);
                let lists = if is_unheld { before.saturating_add(is_new_list.into()) } else { 0 };
                if lists >= REQUIRED_LISTS || ledger.has_no_lists {
                    gpus.insert(uuid);
                } else {
                    waiting.insert(uuid, lists);
                }
            }
        }
        let (wanted, _) = shares::wanted(topology, plan);
        let form = |uuid: &GpuUuid| {
            let wants = wanted.get(uuid).copied();
            let there = topology.position(uuid).and_then(|place| topology.gpus().get(place));
            let is_offered = there.is_some_and(|gpu| plan.offers_through_dra(gpu));
            match self.gpus.get(uuid) {
                // A GPU that is gone, or not offered any more, keeps its form.
                Some(form) if form.now == wants || !is_offered => Form { next: None, ..*form },
                Some(form) if !ledger.knows_claims() || has_claim(uuid) => {
                    let since = form.next.map_or(now, |(_, since)| since.min(now));
                    Form { next: Some((wants, since)), ..*form }
                }
                _ => Form { now: wants, next: None },
            }
        };
        let gpus = gpus.into_iter().map(|uuid| (uuid.clone(), form(&uuid))).collect();
        let changed = gpus != self.gpus || waiting != self.waiting;
        changed.then(|| Self { gpus, waiting, devices: self.devices.clone(), withheld: self.withheld.clone() })
    }

    /// Makes the devices again from the hardware. The devices of a GPU that is gone stay as they were.
    pub fn make(&mut self, hardware: &Hardware, hints: NumaHints) {
        let topology = hardware.topology();
        let is_gone = |device: &Device| topology.position(&device.gpu.uuid).is_none() && self.has(&device.gpu.uuid);
        let gone: Vec<Device> = self.devices.iter().filter(|device| is_gone(device)).cloned().collect();
        let (mut devices, mut withheld) = (Vec::new(), Vec::new());
        for (place, gpu) in topology.gpus().iter().enumerate() {
            let list = if self.has(&gpu.uuid) {
                &mut devices
            } else if self.waiting.contains_key(&gpu.uuid) {
                &mut withheld
            } else {
                continue;
            };
            let whole = Device::new(topology, gpu, hints);
            if gpu.mig_enabled {
                let of_gpu = topology.mig_devices().iter().filter(|mig| mig.parent == place);
                list.extend(of_gpu.map(|mig| Device { mig: Some(mig.clone()), ..whole.clone() }));
            } else {
                list.push(whole);
            }
        }
        devices.extend(gone);
        (self.devices, self.withheld) = (devices, withheld);
    }

    /// The doors with the devices' health as it is now; `None` if no health changed.
    pub fn refreshed(&self, plan: &ResourcePlan, hardware: &Hardware, ledger: &Ledger) -> Option<Self> {
        let health = |device: &Device, waiting| self.health(device, waiting, plan, hardware, ledger);
        let is_same = |list: &[Device], waiting| list.iter().all(|device| device.health == health(device, waiting));
        if is_same(&self.devices, false) && is_same(&self.withheld, true) {
            return None;
        }
        let mut next = self.clone();
        for (devices, is_waiting) in [(&mut next.devices, false), (&mut next.withheld, true)] {
            for device in devices {
                device.health = health(device, is_waiting);
            }
        }
        Some(next)
    }

    /// The health of a device of DRA. `is_waiting` is true if DRA does not offer it yet.
    fn health(
        &self,
        device: &Device,
        is_waiting: bool,
        plan: &ResourcePlan,
        hardware: &Hardware,
        ledger: &Ledger,
    ) -> Health {
        let (topology, uuid) = (hardware.topology(), &device.gpu.uuid);
        let unhealthy = |reason: UnhealthyReason| match &device.health {
            Health::Unhealthy { reason: before, .. } if *before == reason => device.health.clone(),
            Health::Unhealthy { since, .. } if reason == UnhealthyReason::Gone => {
                Health::Unhealthy { reason, since: *since }
            }
            _ => Health::Unhealthy { reason, since: ledger.known_since.unwrap_or_default() },
        };
        if !hardware.has(device) {
            return unhealthy(UnhealthyReason::Gone);
        }
        let by_claim = || {
            let claim = ledger.claim_on(topology, uuid)?;
            Some(UnhealthyReason::Claimed { claim, device: uuid.to_string() })
        };
        if plan.door == Door::Plugin {
            return unhealthy(by_claim().unwrap_or(UnhealthyReason::Withdrawn));
        }
        // The device is unhealthy for new claims only: the claims that have it keep it.
        if let Some((_, since)) = self.gpus.get(uuid).and_then(|form| form.next) {
            return Health::Unhealthy { reason: UnhealthyReason::Withdrawn, since };
        }
        if !plan.offers_through_dra(&device.gpu) {
            return unhealthy(UnhealthyReason::Withdrawn);
        }
        let health = hardware.health(uuid, device.instance()).unwrap_or(Health::Healthy);
        if health != Health::Healthy {
            return health;
        }
        if let Some((resource, id)) = ledger.plugin_holder(topology, uuid) {
            return unhealthy(UnhealthyReason::HeldElsewhere { resource: resource.to_string(), id: id.to_string() });
        }
        match by_claim().filter(|_| is_waiting) {
            Some(reason) => unhealthy(reason),
            None if is_waiting => unhealthy(UnhealthyReason::HoldersUnknown),
            None => hardware.for_new_work(device, Health::Healthy),
        }
    }
}
