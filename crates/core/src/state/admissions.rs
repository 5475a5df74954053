//! [`Admissions`]: the best bandwidth that was free when GPUs were given, so that people can tell a bad choice from a
//! full node.
//!
//! The ledger keeps admissions. An admission is noted when the device plugin answers Allocate and when our DRA plugin
//! prepares a claim. It is kept until the kubelet no longer lists the devices or the claim is unprepared, over our
//! restarts too if its bandwidth is known. Admissions decide only that devices count as held until the kubelet lists
//! their container.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{AdmissionRecord, FreeThen, Holdings, PreparedClaim, ResourceName};
use crate::allocation::DeviceId;

/// The number of lists in a row without a container's admission after which it has ended. One is not enough: the first
/// list of a kubelet that starts may lack pods that run, and the first list after an Allocate may be older.
const MAX_MISSED: u8 = 2;

/// An admission of a container or claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Admission {
    /// The best bandwidth that was free; `None` for fewer than two GPUs, and if it is unknown.
    then: Option<FreeThen>,
    /// True if the kubelet has listed it.
    is_listed: bool,
    /// The number of lists in a row without it.
    missed: u8,
}

impl Admission {
    /// Notes a list of the kubelet. `in_list` is true if the list has the admission.
    fn note_list(&mut self, in_list: bool) {
        self.is_listed |= in_list;
        self.missed = if in_list { 0 } else { self.missed.saturating_add(1) };
    }

    /// Returns true if the next list may be the first with the admission.
    fn is_awaited(&self) -> bool {
        !self.is_listed && self.missed < MAX_MISSED
    }
}

/// The known admissions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Admissions {
    /// The admissions of devices of a resource that were given together. An id is in at most one of them.
    given: BTreeMap<(ResourceName, BTreeSet<DeviceId>), Admission>,
    /// The admissions of claims, by the claim's UID.
    claims: BTreeMap<String, Admission>,
}

impl Admissions {
    /// Notes devices that were given together. Earlier admissions with one of these ids have ended.
    pub fn give(&mut self, resource: ResourceName, devices: BTreeSet<DeviceId>, then: Option<FreeThen>) {
        self.given.retain(|(of, before), _| *of != resource || before.is_disjoint(&devices));
        self.given.insert((resource, devices), Admission { then, ..Admission::default() });
    }

    /// Follows the claims that our DRA plugin has prepared: notes new ones and forgets those that are gone. Returns
    /// true if that added anything to the record.
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

    /// Follows a list of the kubelet. `prepared` has the claims by UID.
    pub fn listed(&mut self, holdings: &Holdings, prepared: &BTreeMap<String, PreparedClaim>) {
        self.given.retain(|(resource, devices), admission| {
            let mut keys = devices.iter().map(|id| (resource.clone(), id.clone()));
            admission.note_list(keys.all(|key| holdings.has(&key)));
            admission.missed < MAX_MISSED
        });
        for (uid, admission) in &mut self.claims {
            let name = prepared.get(uid).map(|known| known.claim.to_string());
            admission.note_list(holdings.claims.iter().any(|claimed| Some(&claimed.claim) == name.as_ref()));
        }
    }

    /// Returns true if the next list may be the first with some admission.
    pub fn awaits_list(&self) -> bool {
        self.given.values().chain(self.claims.values()).any(Admission::is_awaited)
    }

    /// The ids that were given and that no list has contained yet.
    pub fn unlisted(&self) -> impl Iterator<Item = (&ResourceName, &DeviceId)> {
        let unlisted = self.given.iter().filter(|(_, admission)| !admission.is_listed);
        unlisted.flat_map(|((resource, devices), _)| devices.iter().map(move |id| (resource, id)))
    }

    /// The best bandwidth that was free when these devices were given together.
    pub fn free_at_allocate(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> Option<FreeThen> {
        self.given.get(&(resource.clone(), devices.clone()))?.then
    }

    /// The best bandwidth that was free when a claim was prepared, by its UID.
    pub fn free_at_prepare(&self, uid: &str) -> Option<FreeThen> {
        self.claims.get(uid)?.then
    }

    /// The records for our next process: of devices, and of claims by UID.
    pub fn record(&self) -> (Vec<AdmissionRecord>, BTreeMap<String, FreeThen>) {
        let given = self.given.iter().filter_map(|((resource, devices), admission)| {
            let devices = devices.iter().map(ToString::to_string).collect();
            Some(AdmissionRecord { resource: resource.to_string(), devices, then: admission.then? })
        });
        let claims = self.claims.iter().filter_map(|(uid, admission)| Some((uid.clone(), admission.then?)));
        (given.collect(), claims.collect())
    }

    /// Applies the record of our last process.
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
