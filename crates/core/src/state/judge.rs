//! From events to the health of devices: which GPU an event is about, what its devices may be given out for now, and what
//! people have to be told. What a GPU's health is, is `health`'s.

use crate::prelude::*;
use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};

use super::device::{Health, ResourceName, Timestamp};
use super::event::{Effect, MigInstance};
use super::health::GpuHealth;
use super::poll::{FabricHealth, HealthPoll, Reach};
use super::reason::UnhealthyReason;
use super::record::{HealthRecord, NodeIdentity};
use super::{Awaited, Listing, NodeState};
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, HostObservation, NodeObservation, PciAddress, PciObservation};

/// How long the first list waits for the first poll. A child that has seen the GPUs polls them at once; one that does not
/// is in trouble, and the kubelet has waited long enough.
pub(super) const FIRST_POLL: Timestamp = Timestamp::from_secs(20);
/// The double-bit ECC event is this XID by another way: what is said of the one holds for the other.
const DOUBLE_BIT_ECC: u64 = 48;

/// A device that is no longer there, or no longer offered.
#[derive(Clone, Debug)]
pub(super) struct GoneDevice {
    pub(super) since: Timestamp,
    pub(super) why: UnhealthyReason,
    /// Whether this process offered it: then a pod may have got it since the kubelet was asked last.
    pub(super) offered: bool,
    /// The kubelet listed nobody who holds it. It is asked twice: the first answer may be older than the last pod.
    unheld: bool,
}

impl GoneDevice {
    /// One that we never offered, and that a pod holds.
    pub(super) fn held(since: Timestamp, why: UnhealthyReason) -> Self {
        Self { since, why, offered: false, unheld: false }
    }

    pub(super) fn health(&self) -> Health {
        Health::Unhealthy { reason: self.why.clone(), since: self.since }
    }
}

impl NodeState {
    /// An XID.
    pub(super) fn xid(
        &mut self,
        gpu: GpuUuid,
        code: u64,
        instance: Option<MigInstance>,
        now: Timestamp,
    ) -> Vec<Effect> {
        if self.xids.class(code).fails() {
            return self.failed(&gpu, UnhealthyReason::Xid { code, instance }, now);
        }
        self.quiet.heard(gpu, code, now).into_iter().collect()
    }

    /// The driver's event of an uncorrectable error.
    pub(super) fn double_bit_ecc(&mut self, gpu: &GpuUuid, now: Timestamp) -> Vec<Effect> {
        let counts = self.xids.class(DOUBLE_BIT_ECC).fails();
        if counts { self.failed(gpu, UnhealthyReason::DoubleBitEcc, now) } else { Vec::new() }
    }

    /// Something is wrong with one GPU. The same again is no news, however often it comes.
    pub(super) fn failed(&mut self, gpu: &GpuUuid, reason: UnhealthyReason, now: Timestamp) -> Vec<Effect> {
        let news = self.health.get_mut(gpu).is_some_and(|health| health.fail(reason, now));
        if news { self.settle(false) } else { Vec::new() }
    }

    /// Something is wrong with the node, and no GPU's fault.
    pub(super) fn away(&mut self, why: &str, now: Timestamp) -> Vec<Effect> {
        for health in self.health.values_mut() {
            health.suffer(UnhealthyReason::DriverAway { why: why.to_owned() }, now);
        }
        self.settle(false)
    }

    /// Something about one GPU.
    pub(super) fn about(&mut self, gpu: &GpuUuid, what: impl FnOnce(&mut GpuHealth)) -> Vec<Effect> {
        let Some(health) = self.health.get_mut(gpu) else { return Vec::new() };
        what(health);
        self.settle(false)
    }

    /// NVML answers again.
    pub(super) fn driver_back(&mut self) -> Vec<Effect> {
        self.health.values_mut().for_each(GpuHealth::driver_back);
        self.settle(false)
    }

    /// A round of looks.
    pub(super) fn polled(&mut self, polls: &BTreeMap<GpuUuid, HealthPoll>, now: Timestamp) -> Vec<Effect> {
        let node_wide = self.hits_all(polls);
        for (gpu, poll) in polls {
            if let Some(health) = self.health.get_mut(gpu) {
                health.poll(poll, node_wide, self.hold, now);
            }
        }
        if matches!(self.listing, Listing::Awaiting { .. }) && !polls.is_empty() {
            self.awaited.poll = false;
        }
        let opens = self.opens();
        self.settle(opens)
    }

    /// Whether the list, which waited, waits for nothing any more.
    pub(super) fn opens(&mut self) -> bool {
        let opens = matches!(self.listing, Listing::Awaiting { .. }) && self.awaited == Awaited::default();
        if opens {
            self.listing = Listing::Open;
        }
        opens
    }

    /// Whether the same trouble is every GPU's: then it is the node's.
    fn hits_all(&self, polls: &BTreeMap<GpuUuid, HealthPoll>) -> bool {
        let known = || polls.iter().filter_map(|(gpu, poll)| Some((self.health.get(gpu)?, poll)));
        let all = |trouble: fn(&GpuHealth, &HealthPoll) -> bool| known().all(|(health, poll)| trouble(health, poll));
        let silent = |_: &GpuHealth, poll: &HealthPoll| matches!(poll.reach, Reach::Failed { .. } | Reach::Lost { .. });
        let fabric = |_: &GpuHealth, poll: &HealthPoll| matches!(poll.fabric, Some(FabricHealth::Failed { .. }));
        known().nth(1).is_some() && (all(silent) || all(fabric) || all(GpuHealth::loses_links))
    }

    /// Which boot and driver this is.
    pub(super) fn identified(&mut self, identity: &NodeIdentity) -> Vec<Effect> {
        if identity.differs_from(&self.identity) {
            self.health.values_mut().for_each(GpuHealth::renewed);
        }
        self.identity = NodeIdentity {
            boot: identity.boot.clone().or(self.identity.boot.take()),
            driver: identity.driver.clone().or(self.identity.driver.take()),
        };
        self.settle(false)
    }

    /// What was kept when we ended last.
    pub(super) fn restored(&mut self, record: &HealthRecord) -> Vec<Effect> {
        if record.version != HealthRecord::VERSION {
            return vec![Effect::RecordIgnored { version: record.version }];
        }
        let renewed = self.identity.differs_from(&record.identity);
        for (gpu, kept) in &record.gpus {
            self.health.entry(gpu.clone()).or_insert_with(|| {
                let mut health = GpuHealth::restored(kept);
                if renewed {
                    health.renewed();
                }
                health
            });
        }
        if self.identity == NodeIdentity::default() {
            self.identity = record.identity.clone();
        }
        self.settle(false)
    }

    /// Follows a look at the node: who is there, who is not.
    pub(super) fn follow(&mut self, observed: &NodeObservation, now: Timestamp) {
        let bus = addresses(&observed.host);
        let present: BTreeSet<&GpuUuid> = observed.gpus.iter().map(|gpu| &gpu.uuid).collect();
        for gpu in &observed.gpus {
            let links = gpu.nvlinks.iter().flatten().filter(|link| link.active);
            let links = links.flat_map(|link| link.links.iter().copied());
            let off_bus = !bus.is_empty() && !bus.contains(&gpu.pci);
            self.health.entry(gpu.uuid.clone()).or_default().observed(links, off_bus);
        }
        let places: BTreeMap<&GpuUuid, PciAddress> = self
            .resources
            .values()
            .flat_map(BTreeMap::values)
            .map(|device| (&device.gpu.uuid, device.gpu.pci))
            .collect();
        for (gpu, health) in self.health.iter_mut().filter(|(gpu, _)| !present.contains(gpu)) {
            // NVML may fail to list a GPU that is there. One that the bus has not either is really gone.
            let off_bus = !bus.is_empty() && places.get(gpu).is_some_and(|pci| !bus.contains(pci));
            health.missed(off_bus);
        }
        if matches!(self.listing, Listing::NotYet) {
            self.listing = Listing::Awaiting { since: now };
            if present.is_empty() {
                // There is nobody to poll, and nothing to hold.
                self.awaited = Awaited::default();
            }
            self.opens();
        }
    }

    /// Puts the devices of a new look in the place of the old ones. An id once advertised stays: the kubelet
    /// dereferences ids that pods hold.
    pub(super) fn list(
        &mut self,
        mut fresh: BTreeMap<ResourceName, BTreeMap<DeviceId, super::Device>>,
        now: Timestamp,
    ) {
        self.gone.retain(|(resource, id), _| !fresh.get(resource).is_some_and(|devices| devices.contains_key(id)));
        for (resource, devices) in core::mem::take(&mut self.resources) {
            let listed = fresh.entry(resource.clone()).or_default();
            for (id, known) in devices {
                let key = (resource.clone(), id.clone());
                if let Entry::Vacant(place) = listed.entry(id) {
                    let why = if self.is_there(&known) { UnhealthyReason::Withdrawn } else { UnhealthyReason::Gone };
                    self.gone.entry(key).or_insert(GoneDevice { since: now, why, offered: true, unheld: false });
                    place.insert(known);
                }
            }
        }
        self.resources = fresh;
        self.forget_empty();
    }

    /// A resource is one as long as anything is on its list.
    fn forget_empty(&mut self) {
        let listed: BTreeSet<&ResourceName> = self.gone.keys().map(|(resource, _)| resource).collect();
        self.resources.retain(|resource, devices| !devices.is_empty() || listed.contains(resource));
    }

    /// Who holds what: what is gone, and held by nobody in two answers in a row, leaves the list. Whether anything did.
    pub(super) fn held(&mut self, held: Option<&BTreeSet<(ResourceName, DeviceId)>>) -> bool {
        let Some(held) = held else {
            // The kubelet may be another one when it answers next, and know less at first.
            self.gone.values_mut().for_each(|gone| gone.unheld = false);
            return false;
        };
        let mut leaving = Vec::new();
        for (key, gone) in &mut self.gone {
            let unheld = !held.contains(key);
            if unheld && gone.unheld {
                leaving.push(key.clone());
            }
            gone.unheld = unheld;
        }
        for key in &leaving {
            self.gone.remove(key);
            let (resource, id) = key;
            if let Some(devices) = self.resources.get_mut(resource) {
                devices.remove(id);
            }
        }
        self.forget_empty();
        !leaving.is_empty()
    }

    /// What time alone brings.
    pub(super) fn tick(&mut self, now: Timestamp) -> Vec<Effect> {
        let mut effects = self.quiet.tell(now);
        // A clock that went back would make us wait for longer than anybody should.
        if let Listing::Awaiting { since } = self.listing
            && (now < since || now.saturating_sub(since) >= FIRST_POLL)
        {
            self.listing = Listing::Open;
            effects.extend(self.settle(true));
        }
        effects
    }

    /// Brings the devices' health up to date; says what changed, and publishes it, or in any case where `publish`.
    pub(super) fn settle(&mut self, publish: bool) -> Vec<Effect> {
        let (mut effects, mut changed) = (Vec::new(), publish);
        let (mut elsewhere, mut hindered) = (self.held_elsewhere(), BTreeMap::new());
        let mut whole: BTreeMap<GpuUuid, Health> = BTreeMap::new();
        for (resource, devices) in &mut self.resources {
            for (id, device) in devices {
                let key = (resource.clone(), id.clone());
                let gone = self.gone.get(&key);
                let own = self.health.get(&device.gpu.uuid);
                let mut health = match gone {
                    Some(gone) => gone.health(),
                    None => match (own.map(|own| own.verdict(device.instance())), self.mps.waits(resource, device)) {
                        (None | Some(Health::Healthy), Some(since)) => {
                            Health::Unhealthy { reason: UnhealthyReason::MpsNotReady, since }
                        }
                        (own, _) => own.unwrap_or(Health::Healthy),
                    },
                };
                if let (Health::Healthy, Some((reason, since))) = (&health, elsewhere.remove(&key)) {
                    health = Health::Unhealthy { reason: reason.clone(), since };
                    if device.health != health {
                        hindered.insert((device.gpu.uuid.clone(), resource.clone()), reason);
                    }
                }
                changed |= device.health != health;
                // Of a GPU people are told as a whole: gone once all its devices are.
                let all = match (gone, own) {
                    (None, Some(own)) => own.verdict(None),
                    _ => health.clone(),
                };
                let gone = |health: &Health| match health {
                    Health::Unhealthy { reason, .. } => {
                        matches!(reason, UnhealthyReason::Gone | UnhealthyReason::Withdrawn)
                    }
                    Health::Healthy => false,
                };
                match whole.get_mut(&device.gpu.uuid) {
                    Some(told) if gone(told) => *told = all,
                    Some(_) => {}
                    None => drop(whole.insert(device.gpu.uuid.clone(), all)),
                }
                device.health = health;
            }
        }
        for (gpu, health) in &whole {
            if !self.told.get(gpu).unwrap_or(&Health::Healthy).tells_the_same(health) {
                effects.push(Effect::HealthChanged { gpu: gpu.clone(), health: health.clone() });
            }
        }
        let held = |((gpu, resource), reason)| Effect::HeldElsewhere { gpu, resource, reason };
        effects.extend(hindered.into_iter().map(held));
        self.told = whole;
        if changed && self.listing == Listing::Open {
            effects.push(Effect::Publish);
        }
        let record = self.record();
        if record.gpus != self.kept.gpus || (record.identity != self.kept.identity && !record.gpus.is_empty()) {
            self.kept = record;
            effects.push(Effect::Keep);
        }
        effects
    }
}

/// The addresses on the host's PCI bus.
fn addresses(host: &HostObservation) -> BTreeSet<PciAddress> {
    // A stack instead of recursion: a file from a stranger may nest as deep as it likes.
    let mut stack: Vec<&PciObservation> = host.host_bridges.iter().flat_map(|bridge| &bridge.devices).collect();
    let mut found = BTreeSet::new();
    while let Some(device) = stack.pop() {
        found.extend(device.pci);
        stack.extend(&device.devices);
    }
    found
}
