//! [`Admissions`]: what was free when GPUs were given, so that people can tell a bad choice from a full node.
//!
//! A part of the ledger, noted when the device plugin answers Allocate and when our DRA plugin prepares a claim, and kept
//! until the kubelet no longer lists it; over our restarts too. It decides nothing about devices. Until the kubelet
//! lists a container, its devices count as held for what is free.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::ResourceName;
use super::device::{Device, Health};
use super::hardware::Hardware;
use super::holdings::{Holdings, ResourceDevice};
use super::ledger::{Ledger, PreparedClaim, gpu_of};
use super::offers::Offers;
use crate::allocation::{DeviceId, GpuSet};

/// An admission that so many lists in a row did not have has ended: the first list of a kubelet that starts may lack
/// pods that run, and the first list after an Allocate may be older.
const MISSED: u8 = 2;

/// What so many GPUs could have had at an admission, MB/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeThen {
    /// The best collective of those that were free.
    pub free: u64,
    /// The best collective of those that were healthy, held or not.
    pub healthy: u64,
}

/// One admission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Admission {
    /// `None` for fewer than two GPUs, and where it is not known.
    then: Option<FreeThen>,
    /// Whether the kubelet has listed it.
    is_listed: bool,
    /// How many lists in a row did not have it.
    missed: u8,
}

impl Admission {
    fn seen(&mut self, in_list: bool) {
        self.is_listed |= in_list;
        self.missed = if in_list { 0 } else { self.missed.saturating_add(1) };
    }

    /// Whether the next list may be the first that has it.
    fn is_awaited(&self) -> bool {
        !self.is_listed && self.missed < MISSED
    }
}

/// The admissions that are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Admissions {
    /// By resource: what was given together. An id is in one of them at most.
    given: BTreeMap<ResourceName, BTreeMap<BTreeSet<DeviceId>, Admission>>,
    /// By the claim's UID.
    claims: BTreeMap<String, Admission>,
}

/// What is kept of an admission through the device plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionRecord {
    /// The resource.
    pub resource: String,
    /// The ids that were given.
    pub devices: BTreeSet<String>,
    /// What was free.
    pub then: FreeThen,
}

impl Admissions {
    /// Notes what was given together. What had one of these ids before has ended.
    pub fn give(&mut self, resource: ResourceName, devices: BTreeSet<DeviceId>, then: Option<FreeThen>) {
        let of_resource = self.given.entry(resource).or_default();
        of_resource.retain(|before, _| before.is_disjoint(&devices));
        of_resource.insert(devices, Admission { then, ..Admission::default() });
    }

    /// Follows what our DRA plugin has prepared: notes new claims, and forgets those that are gone. Whether anything new
    /// is known.
    pub fn prepare(&mut self, claims: BTreeMap<String, Option<FreeThen>>) -> bool {
        self.claims.retain(|uid, _| claims.contains_key(uid));
        let mut any_news = false;
        for (uid, then) in claims {
            self.claims.entry(uid).or_insert_with(|| {
                any_news |= then.is_some();
                Admission { then, ..Admission::default() }
            });
        }
        any_news
    }

    /// Follows a list. `names` has the name of each prepared claim, by UID.
    pub fn listed(&mut self, holdings: &Holdings, names: &BTreeMap<String, PreparedClaim>) {
        for (resource, given) in &mut self.given {
            given.retain(|devices, admission| {
                let mut keys = devices.iter().map(|id| (resource.clone(), id.clone()));
                admission.seen(keys.all(|key| holdings.has(&key)));
                admission.missed < MISSED
            });
        }
        self.given.retain(|_, given| !given.is_empty());
        for (uid, admission) in &mut self.claims {
            let name = names.get(uid).map(|prepared| prepared.claim.to_string());
            admission.seen(holdings.claims.iter().any(|claimed| Some(&claimed.claim) == name.as_ref()));
        }
    }

    /// Whether a list is awaited in which an admission may be for the first time.
    pub fn await_list(&self) -> bool {
        self.all().any(Admission::is_awaited)
    }

    fn all(&self) -> impl Iterator<Item = &Admission> {
        self.given.values().flat_map(BTreeMap::values).chain(self.claims.values())
    }

    /// The ids that were given and that no list had yet.
    pub fn unlisted(&self) -> impl Iterator<Item = (&ResourceName, &DeviceId)> {
        let given = self.given.iter().flat_map(|(resource, given)| given.iter().map(move |one| (resource, one)));
        let unlisted = given.filter(|(_, (_, admission))| !admission.is_listed);
        unlisted.flat_map(|(resource, (devices, _))| devices.iter().map(move |id| (resource, id)))
    }

    /// What was free when these devices were given together.
    pub fn then(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> Option<FreeThen> {
        self.given.get(resource)?.get(devices)?.then
    }

    /// What was free when a claim was prepared, by its UID.
    pub fn then_for_claim(&self, uid: &str) -> Option<FreeThen> {
        self.claims.get(uid)?.then
    }

    /// What the next process of ours has to know.
    pub fn record(&self) -> (Vec<AdmissionRecord>, BTreeMap<String, FreeThen>) {
        let given = self.given.iter().flat_map(|(resource, given)| given.iter().map(move |one| (resource, one)));
        let record = |(resource, (devices, admission)): (&ResourceName, (&BTreeSet<DeviceId>, &Admission))| {
            let devices = devices.iter().map(ToString::to_string).collect();
            Some(AdmissionRecord { resource: resource.to_string(), devices, then: admission.then? })
        };
        let claims = self.claims.iter().filter_map(|(uid, admission)| Some((uid.clone(), admission.then?)));
        (given.filter_map(record).collect(), claims.collect())
    }

    /// What the last process knew.
    pub fn restore(&mut self, given: &[AdmissionRecord], claims: &BTreeMap<String, FreeThen>) {
        for record in given {
            if let Ok(resource) = record.resource.parse() {
                let devices = record.devices.iter().map(|id| DeviceId::from(id.clone())).collect();
                self.give(resource, devices, Some(record.then));
            }
        }
        let claims = claims.iter().map(|(uid, then)| (uid.clone(), Some(*then)));
        self.prepare(claims.collect());
    }
}

/// The GPUs of healthy devices that are not MIG devices.
fn whole<'a>(hardware: &Hardware, devices: impl Iterator<Item = &'a Device>) -> GpuSet {
    let whole = devices.filter(|device| device.mig.is_none() && device.health == Health::Healthy);
    whole.filter_map(|device| hardware.topology().position(&device.gpu.uuid)).collect()
}

/// What as many GPUs as `given` could have had, when those of `free` were free beside them.
fn then(hardware: &Hardware, given: GpuSet, free: GpuSet) -> Option<FreeThen> {
    let (tables, gpus) = (hardware.tables(), hardware.topology().gpus());
    let own = tables.collective(given)?;
    let is_healthy = |place: &usize| gpus.get(*place).is_some_and(|gpu| hardware.standing(&gpu.uuid).next().is_none());
    let healthy: GpuSet = (0..gpus.len()).filter(is_healthy).collect();
    let best = |of: GpuSet| tables.best_collective(of.union(given), given.len()).map(|best| best.max(own));
    Some(FreeThen { free: best(free)?, healthy: best(healthy)? })
}

/// What was free when devices of a resource were given. `offered` are those from which the kubelet let us choose.
pub(super) fn at_allocate(
    (hardware, ledger, offers): (&Hardware, &Ledger, &Offers),
    resource: &ResourceName,
    devices: &BTreeSet<DeviceId>,
    offered: &[DeviceId],
) -> Option<FreeThen> {
    let topology = hardware.topology();
    let place = |id: &DeviceId| gpu_of(topology, id).filter(|(_, is_whole)| *is_whole).map(|(place, _)| place);
    let given: GpuSet = devices.iter().map(place).collect::<Option<_>>()?;
    if given.len() < 2 || !ledger.is_known() {
        return None;
    }
    let is_held = |id: &DeviceId| {
        let key: ResourceDevice = (resource.clone(), id.clone());
        ledger.holdings().has(&key) || ledger.admissions().unlisted().any(|unlisted| unlisted == (resource, id))
    };
    // A pod may have ended since the last list; the kubelet knows, and offers its devices.
    let is_offered: BTreeSet<&DeviceId> = offered.iter().collect();
    let free = offers.of(resource).filter(|(id, _)| is_offered.contains(id) || !is_held(id));
    then(hardware, given, whole(hardware, free.map(|(_, device)| device)))
}

/// What was free when our DRA plugin began to prepare claims, by UID; `None` for those that a pod has already: then our
/// last process prepared them.
pub(super) fn at_prepare(
    (hardware, ledger, offers): (&Hardware, &Ledger, &Offers),
    claims: &[PreparedClaim],
) -> BTreeMap<String, Option<FreeThen>> {
    let topology = hardware.topology();
    let held = ledger.held(topology, |resource, id| offers.gpu_of(resource, id)).filter(|_| ledger.is_known());
    let mut occupied: Option<GpuSet> = held.map(|held| held.iter().filter_map(|gpu| topology.position(gpu)).collect());
    let mut at_prepare = |prepared: &PreparedClaim| {
        let given: GpuSet = prepared.gpus.iter().filter_map(|gpu| topology.position(gpu)).collect();
        let name = prepared.claim.to_string();
        let is_new = ledger.prepared(&prepared.claim.uid).is_none();
        let is_listed = ledger.holdings().claims.iter().any(|claimed| claimed.claim == name);
        let occupied = occupied.as_mut().filter(|_| is_new && !is_listed)?;
        let free = whole(hardware, offers.through_dra().iter()).without(*occupied);
        *occupied = occupied.union(given);
        then(hardware, given, free)
    };
    claims.iter().map(|prepared| (prepared.claim.uid.clone(), at_prepare(prepared))).collect()
}
