//! [`Ledger`]: the hardware that is held, and the door through which it is held.
//!
//! Two doors lead to a GPU: the device plugin API (containers, and init containers that have ended while their pod
//! runs) and DRA claims. Each names the same hardware differently; the ledger compares both by the GPU or MIG device
//! behind the name. The kubelet adapter reads the holders ([`Holdings`]). If it cannot, the ledger is unknown and not
//! empty: while the kubelet restarts, the pods of its last list may still hold their devices.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::admissions::Admissions;
use super::availability::Held;
use super::{
    ClaimName, ClaimedDevice, ContainerHoldings, ContainerName, Device, FreeThen, Holdings, Prepared, PreparedClaim,
    ResourceDevice, ResourceName, Timestamp, UnhealthyReason,
};
use crate::allocation::DeviceId;
use crate::quote::quoted;
use crate::topology::{Gpu, GpuUuid, MigDevice, MigUuid, NodeTopology, hardware_of, is_set};

/// The DRA driver whose devices are GPUs of this node: NVIDIA's, and linkwise in its place.
pub const DRA_DRIVER: &str = "gpu.nvidia.com";

/// The hardware that is held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The kubelet's last list.
    holdings: Holdings,
    /// The claims of the previous list. If the last list is a kubelet's first, also the claims of earlier lists.
    listed_before: BTreeSet<ClaimedDevice>,
    /// True if there is a last list, and it was not a kubelet's first.
    is_whole: bool,
    /// The time since which the kubelet has listed these holdings; `None` if it has never answered.
    pub(super) known_since: Option<Timestamp>,
    /// True if the kubelet answered at the last attempt.
    is_current: bool,
    /// The claims that our DRA plugin has prepared, by UID.
    prepared: BTreeMap<String, PreparedClaim>,
    /// The devices of each container in the last list; forgotten [`NAMES_KEPT`] after the last answer.
    by_container: BTreeMap<ContainerName, ContainerHoldings>,
    /// The time of the kubelet's last answer.
    answered: Option<Timestamp>,
    /// The admissions, with the best bandwidth that was free at each.
    pub(super) admissions: Admissions,
    /// True while the prepared claims are known.
    has_read_claims: bool,
    /// True if there is no socket on which the kubelet could be asked.
    pub(super) has_no_lists: bool,
}

/// The time that containers are shown as holders after the kubelet's last answer: longer than a kubelet takes to
/// restart, and short enough that no pod is shown for ever. Held devices count as held beyond that.
pub const NAMES_KEPT: Timestamp = Timestamp::from_secs(300);

/// A GPU by its place in the graph, and the MIG device on it; `None` for the whole GPU, or an unknown part of it.
type Part<'a> = (usize, Option<&'a MigDevice>);

/// A [`ResourceDevice`] by reference.
pub(super) type Key<'a> = (&'a ResourceName, &'a DeviceId);

/// A holder of a GPU or a part of it, with the reason that it gives to other devices of the GPU.
struct Holder<'a> {
    /// Its id, if it came through the device plugin API.
    key: Option<Key<'a>>,
    /// The MIG device, if the holder is known to hold no more of the GPU.
    mig: Option<&'a MigDevice>,
    /// True if the holder has a slot: other slots may share the hardware.
    is_slot: bool,
    since: Timestamp,
    reason: UnhealthyReason,
}

impl Holder<'_> {
    /// Returns true if the device would give another pod the hardware of this holder. Slots may share it.
    fn conflicts_with(&self, key: Key<'_>, device: &Device) -> bool {
        let is_apart = matches!((self.mig, &device.mig), (Some(held), Some(mig)) if held.uuid != mig.uuid);
        self.key != Some(key) && !(self.is_slot && device.slot.is_some()) && !is_apart
    }
}

impl Ledger {
    /// Applies the kubelet's present list; `None` if the kubelet cannot be asked. Returns true if anything changed.
    pub(super) fn update(&mut self, holdings: Option<Holdings>, now: Timestamp) -> bool {
        let is_current = holdings.is_some();
        let mut changed = is_current != self.is_current;
        self.is_current = is_current;
        if let Some(mut holdings) = holdings {
            self.answered = Some(now);
            self.admissions.listed(&holdings, &self.prepared);
            let by_container = core::mem::take(&mut holdings.by_container);
            changed |= by_container != self.by_container;
            self.by_container = by_container;
            let is_whole = !core::mem::take(&mut holdings.is_first);
            let mut before = self.holdings.claims.clone();
            if !is_whole {
                before.append(&mut self.listed_before.clone());
            }
            changed |= (&self.listed_before, self.is_whole) != (&before, is_whole);
            (self.listed_before, self.is_whole) = (before, is_whole);
            if self.known_since.is_none() || holdings != self.holdings {
                (self.holdings, self.known_since) = (holdings, Some(now));
                changed = true;
            }
        } else if self.answered.is_some_and(|answered| now.saturating_sub(answered) >= NAMES_KEPT) {
            changed |= !core::mem::take(&mut self.by_container).is_empty();
        }
        changed
    }

    /// The devices of each container by the kubelet's last answer; empty [`NAMES_KEPT`] after that.
    pub fn by_container(&self) -> &BTreeMap<ContainerName, ContainerHoldings> {
        &self.by_container
    }

    /// The GPUs of which a pod or a prepared claim has any part, including those that the machine no longer shows;
    /// `None` if the kubelet has never answered. `listed` gives the GPU of a device that is on a resource's list.
    pub(super) fn held<'a>(
        &'a self,
        topology: &NodeTopology,
        listed: impl Fn(&ResourceName, &DeviceId) -> Option<&'a GpuUuid>,
    ) -> Held {
        self.known_since?;
        let ids = self.devices().map(|(resource, id)| (resource, id)).chain(self.admissions.unlisted());
        let by_id = ids.filter_map(|(resource, id)| {
            listed(resource, id).cloned().or_else(|| gpu_behind(topology, id)?.parse().ok())
        });
        let by_claim = self.claimed(topology).map(|(_, gpu, _)| gpu.uuid.clone());
        let names = self.holdings.claims.iter().flat_map(|claimed| claimed.cdi_names.iter().map(move |n| (claimed, n)));
        let by_name = names.filter_map(|(claimed, name)| {
            let gpu = name.parse().ok()?;
            (!self.is_for_admin(claimed, &gpu)).then_some(gpu)
        });
        let prepared = self.prepared.values().flat_map(PreparedClaim::gpus).cloned();
        Some(by_id.chain(by_claim).chain(by_name).chain(prepared).collect())
    }

    /// Returns true if the next list may be the first with a recent admission.
    pub fn awaits_listing(&self) -> bool {
        self.admissions.awaits_list()
    }

    /// The best bandwidth that was free when a container was given these devices together; `None` if unknown.
    pub fn free_at_allocate(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> Option<FreeThen> {
        self.admissions.free_at_allocate(resource, devices)
    }

    /// The best bandwidth that was free when a listed claim was prepared; `None` if unknown.
    pub fn free_at_prepare(&self, claimed: &ClaimedDevice) -> Option<FreeThen> {
        let mut prepared = self.prepared_as(claimed);
        self.admissions.free_at_prepare(&prepared.next()?.claim.uid)
    }

    /// The places of the GPUs of a listed claim's device, each with true if the claim has the whole GPU, or an
    /// unknown part. GPUs that the claim has with admin access are left out.
    pub fn gpus_of_claimed(&self, topology: &NodeTopology, claimed: &ClaimedDevice) -> Vec<(usize, bool)> {
        let hardware = claimed_hardware(topology, claimed).into_iter();
        let taken = hardware
            .filter(|(place, _)| topology.gpus().get(*place).is_some_and(|gpu| !self.is_for_admin(claimed, &gpu.uuid)));
        taken.map(|(place, mig)| (place, mig.is_none())).collect()
    }

    /// Applies the claims that our DRA plugin has prepared. Returns true if anything changed.
    pub(super) fn prepare(&mut self, claims: Vec<PreparedClaim>) -> bool {
        let claims: BTreeMap<_, _> = claims.into_iter().map(|claim| (claim.claim.uid.clone(), claim)).collect();
        let is_news = !core::mem::replace(&mut self.has_read_claims, true);
        core::mem::replace(&mut self.prepared, claims) != self.prepared || is_news
    }

    /// Notes that another process prepares claims from now on. Returns true if this process prepared them until now.
    pub(super) fn hand_over_claims(&mut self) -> bool {
        core::mem::take(&mut self.has_read_claims)
    }

    /// Returns true if the ledger has all claims that are prepared here: the checkpoints were read, and no other
    /// process prepares claims.
    pub fn has_all_claims(&self) -> bool {
        self.has_read_claims
    }

    /// The claims that our DRA plugin has prepared in this boot, or is about to.
    pub fn claims(&self) -> impl Iterator<Item = (&ClaimName, &Prepared)> + Clone {
        let of_this_boot = self.prepared.values().filter(|claim| !claim.is_of_another_boot);
        of_this_boot.map(|claim| (&claim.claim, &claim.prepared))
    }

    /// All claims that our DRA plugin has prepared, with `entry` in place of the claim with this UID. `None` removes
    /// it.
    pub fn claims_with(&self, uid: &str, entry: Option<PreparedClaim>) -> Vec<PreparedClaim> {
        let others = self.prepared.iter().filter(|(other, _)| *other != uid);
        others.map(|(_, claim)| claim.clone()).chain(entry).collect()
    }

    /// Returns true if all claims with hardware are known.
    pub(super) fn knows_claims(&self) -> bool {
        self.has_read_claims && (self.is_current || self.has_no_lists)
    }

    /// The hardware that our DRA plugin has prepared for a claim, by its UID.
    pub fn prepared(&self, uid: &str) -> Option<&PreparedClaim> {
        self.prepared.get(uid)
    }

    /// The names of the MIG devices that our DRA plugin makes for claims, has made, or has not destroyed yet.
    pub fn made_mig(&self) -> impl Iterator<Item = &str> {
        self.prepared.values().flat_map(PreparedClaim::made)
    }

    /// Returns true if a claim has this GPU through a device that is a set of GPUs ([`is_set`]).
    pub fn is_in_set(&self, topology: &NodeTopology, gpu: &GpuUuid) -> bool {
        let prepared = |claim: &PreparedClaim| claim.has(gpu) && claim.names().any(is_set);
        self.claimed_on(topology, gpu).any(|claimed| is_set(&claimed.device)) || self.prepared.values().any(prepared)
    }

    /// Returns true if a pod is known to have this GPU through the device plugin, or by a listed claim that our DRA
    /// plugin has not prepared.
    pub(super) fn is_held_outside_dra(&self, topology: &NodeTopology, gpu: &GpuUuid) -> bool {
        let is_foreign = |claimed| self.prepared_as(claimed).next().is_none();
        self.plugin_holder(topology, gpu).is_some() || self.claimed_on(topology, gpu).any(is_foreign)
    }

    /// The holder of this GPU, apart from the claims of a pool: a pod through the device plugin API, or a claim of
    /// another DRA driver of the same name. Listed claims of the pool itself do not count, because they may have ended
    /// after the list.
    pub fn holder_beside(&self, topology: &NodeTopology, gpu: &GpuUuid, pool: &str) -> Option<String> {
        let by_plugin = self
            .plugin_holder(topology, gpu)
            .map(|(resource, id)| format!("a pod, as {resource} {}", quoted(id.as_str())));
        by_plugin.or_else(|| {
            let mut claims = self.claimed_on(topology, gpu);
            let other = claims.find(|claimed| claimed.driver == DRA_DRIVER && claimed.pool != pool)?;
            Some(format!("the claim {}, from the pool {}", other.claim, quoted(&other.pool)))
        })
    }

    /// An id of the device plugin API that a pod holds on this GPU.
    pub(super) fn plugin_holder(&self, topology: &NodeTopology, gpu: &GpuUuid) -> Option<&ResourceDevice> {
        self.devices().find(|(_, id)| gpu_behind(topology, id).as_deref() == Some(gpu.as_str()))
    }

    /// Returns true if our DRA plugin has prepared a claim with this GPU, or is about to.
    pub(super) fn has_prepared_on(&self, gpu: &GpuUuid) -> bool {
        self.prepared.values().any(|prepared| prepared.has(gpu))
    }

    /// The first by name of the claims that have this GPU or a part of it, as `namespace/name`: from the kubelet's list
    /// and from our DRA plugin.
    pub(super) fn claim_on(&self, topology: &NodeTopology, gpu: &GpuUuid) -> Option<String> {
        let listed = self.claimed_on(topology, gpu).map(|claimed| claimed.claim.clone());
        let prepared = self.prepared.values().filter(|prepared| prepared.has(gpu));
        listed.chain(prepared.map(|prepared| prepared.claim.to_string())).min()
    }

    /// Returns true if a claim has the device of this name in the pool: a GPU, or one MIG device of it.
    pub fn is_claimed(&self, topology: &NodeTopology, name: &str, gpu: &GpuUuid, mig: Option<&MigUuid>) -> bool {
        let place = topology.position(gpu);
        let is_apart = |(at, held): &Part<'_>| {
            Some(*at) == place && matches!((held, mig), (Some(held), Some(mig)) if held.uuid != *mig)
        };
        let listed = |claimed| !claimed_hardware(topology, claimed).iter().any(is_apart);
        let prepared = |claim: &PreparedClaim| claim.has(gpu) && claim.names().any(|own| own == name);
        self.claimed_on(topology, gpu).any(listed) || self.prepared.values().any(prepared)
    }

    /// The listed devices of claims that have this GPU or a part of it.
    fn claimed_on(&self, topology: &NodeTopology, gpu: &GpuUuid) -> impl Iterator<Item = &ClaimedDevice> {
        let place = topology.position(gpu);
        self.holdings.claims.iter().filter(move |claimed| {
            let by_name = claimed.cdi_names.iter().any(|name| name == gpu.as_str());
            let is_on = by_name || claimed_hardware(topology, claimed).iter().any(|(at, _)| Some(*at) == place);
            is_on && !self.is_for_admin(claimed, gpu)
        })
    }

    /// Returns true if a listed claim has a GPU only with admin access, so that other claims may have it: our DRA
    /// plugin has prepared the claim without this GPU.
    fn is_for_admin(&self, claimed: &ClaimedDevice, gpu: &GpuUuid) -> bool {
        let mut prepared = self.prepared_as(claimed).peekable();
        prepared.peek().is_some() && prepared.all(|prepared| !prepared.has(gpu))
    }

    /// The claims that our DRA plugin has prepared under the name of a listed claim.
    fn prepared_as(&self, claimed: &ClaimedDevice) -> impl Iterator<Item = &PreparedClaim> {
        self.prepared.values().filter(|prepared| prepared.claim.to_string() == claimed.claim)
    }

    /// Returns true if the kubelet could be asked for the holders at the last attempt.
    pub fn is_known(&self) -> bool {
        self.is_current
    }

    /// Everything that pods hold according to the kubelet's last answer, without [`Holdings::by_container`].
    pub fn holdings(&self) -> &Holdings {
        &self.holdings
    }

    /// The devices of claims in the last two lists. The first list of a kubelet that starts may lack pods that run: see
    /// [`Self::lists_all`].
    pub fn claimed_lately(&self) -> impl Iterator<Item = &ClaimedDevice> {
        self.holdings.claims.union(&self.listed_before)
    }

    /// Returns true if the kubelet could be asked at the last attempt, and not for the first time since it started.
    /// Then a claim that [`Self::claimed_lately`] lacks has no container.
    pub fn lists_all(&self) -> bool {
        self.is_current && self.is_whole
    }

    /// The ids that are held through the device plugin API.
    pub fn devices(&self) -> impl Iterator<Item = &ResourceDevice> {
        self.holdings.containers.union(&self.holdings.init_containers)
    }

    /// The listed devices of claims whose hardware is in the graph.
    fn claimed<'a>(
        &'a self,
        topology: &'a NodeTopology,
    ) -> impl Iterator<Item = (&'a ClaimedDevice, &'a Gpu, Option<&'a MigDevice>)> {
        let known = self.holdings.claims.iter().flat_map(move |claimed| {
            let hardware = claimed_hardware(topology, claimed).into_iter();
            hardware.filter_map(move |(place, mig)| Some((claimed, topology.gpus().get(place)?, mig)))
        });
        known.filter(|(claimed, gpu, _)| !self.is_for_admin(claimed, &gpu.uuid))
    }

    /// The number of held devices on each GPU, by its place in the graph: the devices of claims, and the ids for which
    /// `own` is false, such as ids of other resources or earlier plans.
    pub(super) fn used_otherwise(
        &self,
        topology: &NodeTopology,
        own: impl Fn(&ResourceDevice) -> bool,
    ) -> BTreeMap<usize, usize> {
        let ids = self.devices().filter(|key| !own(key)).filter_map(|(_, id)| Some(gpu_of(topology, id)?.0));
        let claims = self.claimed(topology).map(|(_, gpu, _)| gpu);
        let claims = claims.filter_map(|gpu| topology.position(&gpu.uuid));
        let mut used = BTreeMap::new();
        for place in ids.chain(claims) {
            *used.entry(place).or_default() += 1;
        }
        used
    }

    /// The devices that cannot be given out because their hardware is held under another name, each with the reason.
    /// `withdrawn` are ids that are no longer offered: a pod may have got one since the kubelet's last answer.
    pub(super) fn conflicts<'a>(
        &'a self,
        topology: &'a NodeTopology,
        withdrawn: impl Iterator<Item = (Key<'a>, Timestamp)>,
        devices: impl Iterator<Item = (Key<'a>, &'a Device)>,
    ) -> BTreeMap<Key<'a>, (UnhealthyReason, Timestamp)> {
        let known_since = match self.known_since {
            Some(known_since) => known_since,
            None if self.prepared.is_empty() => return BTreeMap::new(),
            None => Timestamp::ZERO,
        };
        // Keyed by the GPU's UUID: a holder may name a GPU that is not in the graph.
        let mut holders: BTreeMap<&str, Vec<Holder<'_>>> = BTreeMap::new();
        for (key, since) in self.devices().map(|(of, id)| ((of, id), known_since)).chain(withdrawn) {
            let (uuid, slot) = split_slot(key.1.as_str());
            let known = find_hardware(topology, uuid);
            let known = known.and_then(|(place, mig)| Some((topology.gpus().get(place)?.uuid.as_str(), mig)));
            let (gpu, mig) = known.unwrap_or((uuid, None));
            let reason = UnhealthyReason::HeldElsewhere { resource: key.0.to_string(), id: key.1.to_string() };
            let holder = Holder { key: Some(key), mig, is_slot: slot.is_some(), since, reason };
            holders.entry(gpu).or_default().push(holder);
        }
        let claimed = self.claimed(topology);
        let claimed = claimed.map(|(by, gpu, mig)| (&gpu.uuid, mig, by.claim.clone(), by.device.clone()));
        let prepared = self.prepared.values().flat_map(|prepared| prepared.gpus().map(move |gpu| (prepared, gpu)));
        let prepared = prepared.map(|(by, gpu)| (gpu, None, by.claim.to_string(), gpu.to_string()));
        for (gpu, mig, claim, device) in claimed.chain(prepared) {
            let reason = UnhealthyReason::Claimed { claim, device };
            let holder = Holder { key: None, mig, is_slot: false, since: known_since, reason };
            holders.entry(gpu.as_str()).or_default().push(holder);
        }
        let conflicts = devices.filter_map(|(key, device)| {
            let of_gpu = holders.get(device.gpu.uuid.as_str())?;
            let holder = of_gpu.iter().find(|holder| holder.conflicts_with(key, device))?;
            Some((key, (holder.reason.clone(), holder.since)))
        });
        conflicts.collect()
    }
}

/// Splits a device id into the UUID and the slot, if it has one.
pub(super) fn split_slot(id: &str) -> (&str, Option<&str>) {
    id.split_once("::").map_or((id, None), |(uuid, slot)| (uuid, Some(slot)))
}

/// Finds the GPU or MIG device with a UUID.
pub(super) fn find_hardware<'a>(topology: &'a NodeTopology, uuid: &str) -> Option<Part<'a>> {
    let gpu = topology.gpus().iter().position(|gpu| gpu.uuid.as_str() == uuid);
    let mig = || topology.mig_devices().iter().find(|mig| mig.uuid.as_str() == uuid);
    gpu.map(|place| (place, None)).or_else(|| mig().map(|mig| (mig.parent, Some(mig))))
}

/// The place of the GPU behind a device id ([`Device::id`]), with true if the id can name the whole GPU. The id of a
/// MIG device cannot.
pub fn gpu_of(topology: &NodeTopology, id: &DeviceId) -> Option<(usize, bool)> {
    find_hardware(topology, split_slot(id.as_str()).0).map(|(place, mig)| (place, mig.is_none()))
}

/// The UUID of the GPU behind a device id, even if the machine has no such GPU now.
pub fn gpu_behind(topology: &NodeTopology, id: &DeviceId) -> Option<String> {
    let (uuid, _) = split_slot(id.as_str());
    match find_hardware(topology, uuid) {
        Some((place, Some(_))) => topology.gpus().get(place).map(|gpu| gpu.uuid.to_string()),
        _ => uuid.starts_with("GPU-").then(|| uuid.to_owned()),
    }
}

/// The hardware behind a claimed device, by the UUIDs among its CDI names, otherwise, with [`DRA_DRIVER`], by its name.
/// If these do not show which MIG device it is, the whole GPU with the minor number in the name counts.
fn claimed_hardware<'a>(topology: &'a NodeTopology, claimed: &ClaimedDevice) -> Vec<Part<'a>> {
    let known: Vec<_> = claimed.cdi_names.iter().filter_map(|name| find_hardware(topology, name)).collect();
    if !known.is_empty() || claimed.driver != DRA_DRIVER {
        return known;
    }
    named_hardware(topology, &claimed.device).into_iter().collect()
}

fn named_hardware<'a>(topology: &'a NodeTopology, name: &str) -> Option<Part<'a>> {
    if let Some((place, mig)) = hardware_of(topology, name) {
        return Some((place, mig.and_then(|mig| topology.mig_devices().get(mig))));
    }
    let number = name.strip_prefix("gpu-")?;
    let minor: u32 = number.split('-').next()?.parse().ok()?;
    Some((topology.gpus().iter().position(|gpu| gpu.facts.minor == Some(minor))?, None))
}
