//! [`Allocations`]: the API server's facts about claims for GPUs that are to change: which GPUs its slices offer, and
//! which claims have them allocated.
//!
//! A part of the ledger. A process that prepares no new claims reads none of this: then time alone decides.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use crate::topology::{GpuUuid, NodeTopology};

/// The API server's facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Allocations {
    /// True if the API server is asked before a GPU changes.
    pub are_read: bool,
    /// The devices that the stored slices offer to new claims, by name; `None` before the slices are known.
    pub offered: Option<BTreeSet<String>>,
    /// The claims that have a GPU allocated, as `namespace/name`, of each GPU about which the API server was asked.
    pub written: BTreeMap<GpuUuid, BTreeSet<String>>,
}

impl Allocations {
    /// Returns true if a stored slice may offer a GPU to new claims.
    pub fn may_offer(&self, topology: &NodeTopology, gpu: &GpuUuid) -> bool {
        let offers = |names: &BTreeSet<String>| names.iter().any(|name| may_be(topology, name, gpu));
        self.are_read && self.offered.as_ref().is_none_or(offers)
    }

    /// The claims that have a GPU allocated.
    pub fn of(&self, gpu: &GpuUuid) -> impl Iterator<Item = &String> {
        self.written.get(gpu).into_iter().flatten()
    }

    /// Returns true if the API server was asked, and no claim has the GPU allocated.
    pub fn has_no_claim_on(&self, gpu: &GpuUuid) -> bool {
        !self.are_read || self.written.get(gpu).is_some_and(BTreeSet::is_empty)
    }
}

/// The claims of each GPU, from the devices that are allocated to claims.
pub(super) fn by_gpu(
    topology: &NodeTopology,
    gpus: &BTreeSet<GpuUuid>,
    claims: &BTreeMap<String, BTreeSet<String>>,
) -> BTreeMap<GpuUuid, BTreeSet<String>> {
    let claims_on = |gpu: &GpuUuid| -> BTreeSet<String> {
        let has = |devices: &BTreeSet<String>| devices.iter().any(|name| may_be(topology, name, gpu));
        claims.iter().filter(|(_, devices)| has(devices)).map(|(claim, _)| claim.clone()).collect()
    };
    gpus.iter().map(|gpu| (gpu.clone(), claims_on(gpu))).collect()
}

/// Returns true if a device may be a GPU or a part of it, by its name. An unknown name may be any GPU that is gone.
fn may_be(topology: &NodeTopology, name: &str, gpu: &GpuUuid) -> bool {
    let place = super::ledger::place_of_device(topology, name);
    place == topology.position(gpu)
}
