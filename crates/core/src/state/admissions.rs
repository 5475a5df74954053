//! [`Admissions`]: what was free when GPUs were given, so that people can tell a bad choice from a full node.
//!
//! A part of the ledger, noted when the device plugin answers Allocate and when our DRA plugin prepares a claim, and kept
//! until the kubelet no longer lists it; over our restarts too. It decides nothing about devices. Until the kubelet
//! lists a container, its devices count as held for what is free.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::holdings::Holdings;
use super::prepared_claim::PreparedClaim;
use super::record::{AdmissionRecord, FreeThen};
use super::resource_name::ResourceName;
use crate::allocation::DeviceId;

/// An admission that so many lists in a row did not have has ended: the first list of a kubelet that starts may lack
/// pods that run, and the first list after an Allocate may be older.
const MISSED: u8 = 2;

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
