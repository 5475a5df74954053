//! [`Offers`]: the resources of this node, made from plan × hardware × ledger, each with its devices and the units
//! to choose from.
//!
//! One of the three parts of the node's state. An id that was on the kubelet's list stays on it while a pod may hold
//! it, because the kubelet looks up the ids that pods hold. An id that stays only for this reason is an [`Orphan`], and
//! unhealthy. It leaves the list when the ledger shows no holder twice in a row.

use crate::prelude::*;
use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use super::doors::Doors;
use super::ledger::{Key, find_hardware, split_slot};
use super::mps::Mps;
use super::resources::Resources;
use super::shares;
use super::{
    Device, Door, Effect, Hardware, Health, Ledger, MAX_SLOTS, NumaHints, PlanProblem, ResourceDevice, ResourceName,
    ResourcePlan, Timestamp, UnhealthyReason, gpu_of,
};
use crate::allocation::{DeviceId, Units};
use crate::topology::{Gpu, GpuUuid, NodeTopology};

/// The resources and DRA devices that the node offers.
#[derive(Clone, Debug, Default)]
pub struct Offers {
    numa_hints: NumaHints,
    /// The operator's plan.
    wanted: Arc<ResourcePlan>,
    /// The plan in effect. If the wanted plan cannot be carried out, it is the last one that could.
    plan: Arc<ResourcePlan>,
    problems: Vec<PlanProblem>,
    pub(super) mps: Mps,
    pub(super) doors: Doors,
    resources: BTreeMap<ResourceName, Resource>,
    /// The resources that the device plugin would offer; empty unless the door is DRA.
    names: BTreeSet<ResourceName>,
}

/// One resource.
#[derive(Clone, Debug, Default)]
pub struct Resource {
    /// The devices on the kubelet's list, with orphans of known hardware.
    devices: BTreeMap<DeviceId, Device>,
    /// The ids on the list whose hardware is gone, or is no longer offered as this resource.
    orphans: BTreeMap<DeviceId, Orphan>,
    /// The units to choose from, unless all devices are whole GPUs.
    pub(super) units: Option<Units>,
}

/// An id that stays on a list only because a pod may hold it.
#[derive(Clone, Debug)]
struct Orphan {
    since: Timestamp,
    why: UnhealthyReason,
    /// True if this process offered it: then a pod may have got it since the kubelet's last answer.
    was_offered: bool,
    /// True if the last list of holders did not have it. Two lists are needed, because the first may be older than the
    /// last pod.
    unheld_once: bool,
}

impl Orphan {
    fn health(&self) -> Health {
        Health::Unhealthy { reason: self.why.clone(), since: self.since }
    }
}

impl Resource {
    /// The devices on the kubelet's list, by id, with the devices of orphans whose hardware the node has or had.
    pub fn devices(&self) -> &BTreeMap<DeviceId, Device> {
        &self.devices
    }

    /// The ids on the list without a device: pods hold them, and this node does not have them. All are unhealthy.
    pub fn unknown(&self) -> impl Iterator<Item = (&DeviceId, Health)> {
        let unknown = self.orphans.iter().filter(|(id, _)| !self.devices.contains_key(*id));
        unknown.map(|(id, orphan)| (id, orphan.health()))
    }

    /// The numbers of healthy and unhealthy devices on the list.
    pub fn counts(&self) -> (usize, usize) {
        let healthy = self.devices.values().filter(|device| device.health == Health::Healthy).count();
        (healthy, self.len() - healthy)
    }

    /// The number of unhealthy devices on the list for each reason that occurs.
    pub fn unhealthy(&self) -> BTreeMap<&'static str, usize> {
        let known = self.devices.values().filter_map(|device| device.health.reason().map(UnhealthyReason::label));
        let unknown = self.unknown().filter_map(|(_, health)| health.reason().map(UnhealthyReason::label));
        let mut counts = BTreeMap::new();
        for reason in known.chain(unknown) {
            *counts.entry(reason).or_default() += 1;
        }
        counts
    }

    /// The reason why an id on the list cannot be given out; `None` if it can, or is not on the list.
    pub(super) fn refusal(&self, id: &DeviceId) -> Option<&UnhealthyReason> {
        match self.devices.get(id) {
            Some(device) => device.health.reason(),
            None => self.orphans.get(id).map(|orphan| &orphan.why),
        }
    }

    /// Keeps on the list, as orphans, the devices that are no longer offered.
    fn keep_orphans(&mut self, before: BTreeMap<DeviceId, Device>, hardware: &Hardware, now: Timestamp) {
        for (id, device) in before {
            if let Entry::Vacant(free) = self.devices.entry(id.clone()) {
                let why = if hardware.has(&device) { UnhealthyReason::Withdrawn } else { UnhealthyReason::Gone };
                let orphan = Orphan { since: now, why, was_offered: true, unheld_once: false };
                self.orphans.entry(id).or_insert(orphan);
                free.insert(device);
            }
        }
    }

    /// The number of ids on the list.
    fn len(&self) -> usize {
        self.devices.len() + self.unknown().count()
    }
}

impl Offers {
    /// Makes offers without any resource.
    pub(super) fn new(numa_hints: NumaHints) -> Self {
        Self { numa_hints, ..Self::default() }
    }

    /// The plan in effect.
    pub fn plan(&self) -> &ResourcePlan {
        &self.plan
    }

    /// The parts of the operator's plan that this node cannot offer.
    pub fn problems(&self) -> &[PlanProblem] {
        &self.problems
    }

    /// The problems that are faults: a display that the plan leaves out is not.
    pub fn faults(&self) -> impl Iterator<Item = &PlanProblem> {
        let is_display =
            |problem: &PlanProblem| matches!(problem, PlanProblem::DisplayAdapter(..) | PlanProblem::Display(..));
        self.problems.iter().filter(move |problem| !is_display(problem))
    }

    /// The resources by name.
    pub fn resources(&self) -> &BTreeMap<ResourceName, Resource> {
        &self.resources
    }

    /// The devices on the list of one resource, by id.
    pub fn of(&self, resource: &ResourceName) -> impl Iterator<Item = (&DeviceId, &Device)> + use<'_> {
        self.resources.get(resource).into_iter().flat_map(|resource| &resource.devices)
    }

    fn device(&self, resource: &ResourceName, id: &DeviceId) -> Option<&Device> {
        self.resources.get(resource)?.devices.get(id)
    }

    /// The GPU of a device on the list of a resource.
    pub(super) fn gpu_of(&self, resource: &ResourceName, id: &DeviceId) -> Option<&GpuUuid> {
        self.device(resource, id).map(|device| &device.gpu.uuid)
    }

    /// The devices of all resources, by resource and id.
    pub fn devices(&self) -> impl Iterator<Item = &Device> + Clone {
        self.resources.values().flat_map(|resource| resource.devices.values())
    }

    /// The devices of all resources, each with true if it is an orphan, and those of DRA, each with true if it is gone.
    pub(super) fn listed(&self) -> impl Iterator<Item = (&Device, bool)> + Clone {
        let through_plugin = self.resources.values().flat_map(|resource| {
            resource.devices.iter().map(|(id, device)| (device, resource.orphans.contains_key(id)))
        });
        let is_gone = |device: &Device| device.health.reason() == Some(&UnhealthyReason::Gone);
        through_plugin.chain(self.doors.devices.iter().map(move |device| (device, is_gone(device))))
    }

    /// Gives GPUs to DRA and takes them back, and shares the GPUs of DRA. Returns the effects to report; `None` if
    /// nothing changed and the resources can stay.
    pub(super) fn update_doors(
        self: &mut Arc<Self>,
        hardware: &Hardware,
        ledger: &Ledger,
        is_new_list: bool,
        now: Timestamp,
    ) -> Option<Vec<Effect>> {
        let doors = self.doors.next(&self.plan, hardware, ledger, is_new_list, now)?;
        let gpus: BTreeSet<&GpuUuid> = self.doors.gpus.keys().chain(doors.gpus.keys()).collect();
        let changed = gpus.into_iter().filter(|gpu| doors.has(gpu) != self.doors.has(gpu));
        let effects = changed.map(|gpu| Effect::DoorChanged(gpu.clone(), doors.has(gpu))).collect();
        Arc::make_mut(self).doors = doors;
        Some(effects)
    }

    /// The devices that are offered through DRA, or that its claims hold: whole GPUs, and MIG devices of GPUs in MIG
    /// mode. A device of a GPU that is gone stays while a claim may have it.
    pub fn through_dra(&self) -> &[Device] {
        &self.doors.devices
    }

    /// The devices that are to be offered through DRA and that a pod may still hold through the device plugin.
    pub fn withheld(&self) -> &[Device] {
        &self.doors.withheld
    }

    /// Returns true if the resource has the device and it is healthy.
    pub fn is_healthy(&self, resource: &ResourceName, id: &DeviceId) -> bool {
        self.device(resource, id).is_some_and(|device| device.health == Health::Healthy)
    }

    /// Returns true if a new list of holders could change something.
    pub fn awaits_holders(&self) -> bool {
        let orphans = self.resources.values().any(|resource| !resource.orphans.is_empty());
        orphans
            || self.doors.awaits_holders()
            || self
                .devices()
                .chain(&self.doors.devices)
                .filter_map(|device| device.health.reason())
                .any(|reason| matches!(reason, UnhealthyReason::HeldElsewhere { .. } | UnhealthyReason::Claimed { .. }))
    }

    /// Sets the plan that the operator wants; [`Self::make`] carries it out. While no GPU is known, it takes
    /// effect at once, because nothing can rule it out yet.
    pub(super) fn set_plan(&mut self, plan: ResourcePlan, hardware: &Hardware) {
        self.wanted = Arc::new(plan);
        if hardware.topology().gpus().is_empty() {
            self.plan = Arc::clone(&self.wanted);
        }
    }

    /// Sets the NUMA nodes of the resources' devices again, orphans included.
    pub(super) fn set_numa_hints(&mut self, hints: NumaHints, hardware: &Hardware) {
        self.numa_hints = hints;
        for device in self.resources.values_mut().flat_map(|resource| resource.devices.values_mut()) {
            device.numa_nodes = hints.nodes(hardware.topology(), &device.gpu);
        }
    }

    /// Makes the resources of the plan on the present machine. If the wanted plan cannot be carried out, the last plan
    /// that could be stays in effect. If a resource of the plan in effect cannot be made any more, its devices stay as
    /// long as their hardware is there.
    pub(super) fn make(&mut self, hardware: &Hardware, ledger: &Ledger, now: Timestamp) -> Vec<Effect> {
        let topology = hardware.topology();
        let doors = &self.doors;
        let is_dra = |gpu: &Gpu| doors.has(&gpu.uuid);
        let mut made = Resources::make(topology, &self.wanted, self.numa_hints, is_dra);
        if self.wanted == self.plan || made.withheld.is_empty() {
            self.plan = Arc::clone(&self.wanted);
        } else {
            let wanted = core::mem::replace(&mut made, Resources::make(topology, &self.plan, self.numa_hints, is_dra));
            let mut problems = wanted.problems;
            let of_old_plan = made.problems.iter().filter(|problem| !problems.contains(problem)).cloned();
            problems.extend(of_old_plan.collect::<Vec<_>>());
            problems.push(PlanProblem::OldPlanStays);
            made.problems = problems;
        }
        made.problems.extend(shares::wanted(topology, &self.plan).1);
        self.names = match self.plan.door {
            Door::Plugin => BTreeSet::new(),
            Door::Dra => {
                let plan = ResourcePlan { door: Door::Plugin, ..(*self.plan).clone() };
                Resources::make(topology, &plan, self.numa_hints, |_| false).devices.into_keys().collect()
            }
        };
        let news = made.problems.iter().filter(|problem| !self.problems.contains(problem));
        let mut effects: Vec<Effect> = news.cloned().map(Effect::PlanProblem).collect();
        self.problems = made.problems;
        for (name, resource) in self.resources.iter().filter(|(name, _)| made.withheld.contains(*name)) {
            let stays =
                |(id, device): &(&DeviceId, &Device)| !resource.orphans.contains_key(*id) && hardware.has(device);
            let staying = resource.devices.iter().filter(stays).map(|(id, device)| (id.clone(), device.clone()));
            made.devices.entry(name.clone()).or_default().extend(staying);
        }
        let listed = |name: &ResourceName, id: &DeviceId| {
            self.resources.get(name).is_some_and(|resource| resource.devices.contains_key(id))
        };
        let by_mps = self.plan.is_shared_by_mps();
        self.mps.hold_back(by_mps, topology.gpus().len(), &mut made.devices, listed, now);
        self.replace_devices(made.devices, hardware, now);
        self.doors.make(hardware, self.numa_hints);
        effects.extend(self.follow_ledger(hardware, ledger, now));
        effects
    }

    /// Follows a change of the ledger or of the resources: adds ids that pods hold and no list has, and updates the
    /// units, because the use of the GPUs decides which devices are preferred.
    pub(super) fn follow_ledger(&mut self, hardware: &Hardware, ledger: &Ledger, now: Timestamp) -> Vec<Effect> {
        let effects = self.adopt(hardware, ledger, now);
        self.update_units(hardware, ledger);
        effects
    }

    /// Replaces the devices by new ones. Ids that are on a list and are not made again become orphans.
    fn replace_devices(
        &mut self,
        mut fresh: BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
        hardware: &Hardware,
        now: Timestamp,
    ) {
        for name in fresh.keys() {
            self.resources.entry(name.clone()).or_default();
        }
        for (name, resource) in &mut self.resources {
            let before = core::mem::replace(&mut resource.devices, fresh.remove(name).unwrap_or_default());
            resource.orphans.retain(|id, _| !resource.devices.contains_key(id));
            resource.keep_orphans(before, hardware, now);
        }
        self.forget_empty();
    }

    /// Removes the resources whose lists are empty.
    fn forget_empty(&mut self) {
        self.resources.retain(|_, resource| resource.len() > 0);
    }

    /// Removes the orphans without a holder in two lists of holders in a row. Returns true if it removed any.
    pub(super) fn drop_unheld(&mut self, ledger: &Ledger) -> bool {
        let mut dropped = false;
        for (name, resource) in &mut self.resources {
            resource.orphans.retain(|id, orphan| {
                // If the kubelet cannot be asked, the count starts again: a kubelet that has just started knows fewer
                // pods.
                let unheld = ledger.is_known() && !ledger.holdings().has(&(name.clone(), id.clone()));
                let leaves = unheld && orphan.unheld_once;
                orphan.unheld_once = unheld;
                if leaves {
                    resource.devices.remove(id);
                    dropped = true;
                }
                !leaves
            });
        }
        self.forget_empty();
        dropped
    }

    /// Adds ids that pods hold to the lists of our resources if they are missing, because the hardware went or the plan
    /// changed while no process of ours ran. If the hardware is there, the device keeps its NUMA nodes, because a
    /// kubelet that starts aligns its pods by them. With the door DRA, a resource that the device plugin would offer is
    /// made for such ids alone: the kubelet goes on looking the ids up, and takes pods that have ended out of its
    /// checkpoint only when a plugin sends it a list. A resource of any other name may belong to another plugin.
    fn adopt(&mut self, hardware: &Hardware, ledger: &Ledger, now: Timestamp) -> Vec<Effect> {
        let topology = hardware.topology();
        for name in ledger.devices().map(|(name, _)| name).filter(|name| self.names.contains(name)) {
            self.resources.entry(name.clone()).or_default();
        }
        let mut effects = Vec::new();
        for (name, resource) in &mut self.resources {
            let max_slots = usize::try_from(MAX_SLOTS).unwrap_or(usize::MAX);
            let mut room = max_slots.saturating_sub(resource.len());
            let mut adopted = Vec::new();
            for (_, id) in ledger.devices().filter(|(of, _)| of == name) {
                if resource.devices.contains_key(id) {
                    continue;
                }
                let is_there = gpu_of(topology, id).is_some();
                let why = if is_there { UnhealthyReason::Withdrawn } else { UnhealthyReason::Gone };
                match resource.orphans.entry(id.clone()) {
                    // The GPU may be back and offered under another name.
                    Entry::Occupied(known) => known.into_mut().why = why,
                    // No kubelet accepts a longer id, and an absurd answer must not make an endless list.
                    Entry::Vacant(_) if room == 0 || id.as_str().len() > GpuUuid::MAX => continue,
                    Entry::Vacant(free) => {
                        room -= 1;
                        free.insert(Orphan { since: now, why, was_offered: false, unheld_once: false });
                        adopted.push(id.clone());
                    }
                }
                let device = device_of(topology, id, self.numa_hints);
                resource.devices.extend(device.map(|device| (id.clone(), device)));
            }
            if !adopted.is_empty() {
                effects.push(Effect::HeldUnoffered(name.clone(), adopted));
            }
        }
        self.forget_empty();
        effects
    }

    /// Makes the units of each resource again from its devices and the ledger.
    fn update_units(&mut self, hardware: &Hardware, ledger: &Ledger) {
        let topology = hardware.topology();
        for (name, resource) in &mut self.resources {
            let offered = || resource.devices.iter().filter(|(id, _)| !resource.orphans.contains_key(*id));
            let has_parts = offered().any(|(_, device)| device.mig.is_some() || device.slot.is_some());
            resource.units = has_parts.then(|| {
                let place = |device: &Device| topology.position(&device.gpu.uuid);
                let units = offered().filter_map(|(id, device)| Some((id.clone(), place(device)?)));
                let is_own = |(of, id): &ResourceDevice| {
                    of == name && resource.devices.contains_key(id) && !resource.orphans.contains_key(id)
                };
                Units::new(units, ledger.used_otherwise(topology, is_own))
            });
        }
    }

    /// Updates the devices' health from the hardware and the ledger. Returns true if any changed, with the conflicts to
    /// report.
    pub(super) fn refresh_health(self: &mut Arc<Self>, hardware: &Hardware, ledger: &Ledger) -> (bool, Vec<Effect>) {
        let mut changed: Vec<(ResourceDevice, Health)> = Vec::new();
        let mut hindered: BTreeMap<(GpuUuid, ResourceName), UnhealthyReason> = BTreeMap::new();
        let mut conflicts = self.conflicts(hardware, ledger);
        for (name, resource) in &self.resources {
            for (id, device) in &resource.devices {
                let mut health =
                    resource.orphans.get(id).map_or_else(|| self.health_of(name, device, hardware), Orphan::health);
                if let (Health::Healthy, Some((reason, since))) = (&health, conflicts.remove(&(name, id))) {
                    health = Health::Unhealthy { reason: reason.clone(), since };
                    if device.health != health {
                        hindered.insert((device.gpu.uuid.clone(), name.clone()), reason);
                    }
                }
                let health = hardware.for_new_work(device, health);
                if device.health != health {
                    changed.push(((name.clone(), id.clone()), health));
                }
            }
        }
        let doors = self.doors.refreshed(&self.plan, hardware, ledger);
        let any = !changed.is_empty() || doors.is_some();
        if any {
            // Copied only now: a published part is copied before it changes, and most polls change nothing.
            let offers = Arc::make_mut(self);
            if let Some(doors) = doors {
                offers.doors = doors;
            }
            for ((name, id), health) in changed {
                let resource = offers.resources.get_mut(&name);
                if let Some(device) = resource.and_then(|resource| resource.devices.get_mut(&id)) {
                    device.health = health;
                }
            }
        }
        let held = |((gpu, resource), reason)| Effect::HeldElsewhere { gpu, resource, reason };
        (any, hindered.into_iter().map(held).collect())
    }

    /// The health of an offered device, its holders disregarded.
    fn health_of(&self, resource: &ResourceName, device: &Device, hardware: &Hardware) -> Health {
        let health = hardware.health(&device.gpu.uuid, device.instance()).unwrap_or(Health::Healthy);
        match self.mps.waiting_since(resource, device) {
            Some(since) if health == Health::Healthy => {
                Health::Unhealthy { reason: UnhealthyReason::MpsNotReady, since }
            }
            _ => health,
        }
    }

    /// The devices whose hardware is held under another name.
    fn conflicts<'a>(
        &'a self,
        hardware: &'a Hardware,
        ledger: &'a Ledger,
    ) -> BTreeMap<Key<'a>, (UnhealthyReason, Timestamp)> {
        let resources = self.resources.iter();
        let devices = resources
            .clone()
            .flat_map(|(name, resource)| resource.devices.iter().map(move |(id, device)| ((name, id), device)));
        let withdrawn = resources.flat_map(|(name, resource)| {
            // A GPU that went may be back and offered under another name.
            let offered = resource.orphans.iter().filter(|(_, orphan)| orphan.was_offered);
            offered.map(move |(id, orphan)| ((name, id), orphan.since))
        });
        ledger.conflicts(hardware.topology(), withdrawn, devices)
    }
}

/// The device of an id as it would be offered, if its hardware is there.
fn device_of(topology: &NodeTopology, id: &DeviceId, hints: NumaHints) -> Option<Device> {
    let (uuid, slot) = split_slot(id.as_str());
    let slot = slot.map(str::parse).transpose().ok()?;
    let (place, mig) = find_hardware(topology, uuid)?;
    let device = Device { mig: mig.cloned(), slot, ..Device::new(topology, topology.gpus().get(place)?, hints) };
    // `GPU-1::01` was never offered: the id is not ours, though its hardware is.
    (device.id() == *id).then_some(device)
}
