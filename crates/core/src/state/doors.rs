//! [`Doors`]: the GPUs that are offered through DRA, and the rules by which a GPU changes between the device plugin and
//! DRA.
//!
//! A part of [`super::offers`]. A GPU is offered through one door at a time, with all its MIG devices. It goes to DRA
//! when two lists in a row show that no pod holds it through the device plugin or by a claim that linkwise did not
//! prepare. It goes back when no claim holds it and none can be on its way ([`super::wait`]). A claim that comes even
//! later takes the GPU back: while our DRA plugin prepares it, the GPU goes to DRA whatever the plan is. Only the GPUs
//! of DRA are stored. Anything that a process did not store before it died is decided again from plan and ledger; a
//! holder that either knows keeps its GPU.
//!
//! Two lists are enough, and the kubelet's count of allocatable devices does not matter. From the snapshot on that
//! withdraws a GPU, `NodeState::allocate` refuses it, however old the list is from which the kubelet chose. So a list
//! can only lack a container whose Allocate was answered before that snapshot. The second list is requested a second or
//! more after the GPU was withdrawn (`kubelet::pod_resources`), and by then the kubelet has noted such a container.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::device::{Device, Health, Timestamp};
use super::door::{DRA_GRACE, Door};
use super::hardware::Hardware;
use super::ledger::Ledger;
use super::numa_hints::NumaHints;
use super::plan::ResourcePlan;
use super::reason::UnhealthyReason;
use super::shares::Shares;
use super::wait::Wait;
use crate::topology::{Gpu, GpuUuid};

/// The GPUs of DRA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Doors {
    /// The time that a GPU which leaves DRA stays.
    pub grace: Timestamp,
    /// The GPUs, each with its wait if it leaves; `None` for one that stays.
    gpus: BTreeMap<GpuUuid, Option<Wait>>,
    /// GPUs on their way to DRA, each with the number of lists of holders in a row without it; `None` while a pod has
    /// it, or if the holders are unknown.
    awaited: BTreeMap<GpuUuid, Option<u8>>,
    /// The devices of these GPUs: whole GPUs, and MIG devices of GPUs in MIG mode. The devices of a GPU that is gone
    /// stay.
    pub devices: Vec<Device>,
    /// The end of the first grace period that still runs. After it, a GPU waits for a list of holders or for claims.
    pub deadline: Option<Timestamp>,
}

impl Default for Doors {
    fn default() -> Self {
        let (gpus, awaited, devices) = Default::default();
        Self { grace: DRA_GRACE, gpus, awaited, devices, deadline: None }
    }
}

/// The facts that decide about doors.
pub(super) struct Facts<'a> {
    pub plan: &'a ResourcePlan,
    pub hardware: &'a Hardware,
    pub ledger: &'a Ledger,
    /// The GPUs behind the ids on the device plugin's lists.
    pub listed: BTreeSet<GpuUuid>,
    /// True if a new list of holders has just come.
    pub is_new_list: bool,
}

impl Facts<'_> {
    fn wants(&self, gpu: &Gpu) -> bool {
        self.plan.dra.include(gpu) && self.plan.filter.offers(gpu)
    }

    /// Returns true if a claim that our DRA plugin prepares takes a GPU back that has left DRA.
    fn takes_back(&self, gpu: &Gpu) -> bool {
        self.plan.filter.offers(gpu) && self.ledger.has_prepared_on(&gpu.uuid)
    }

    /// Returns true if a GPU is to be one of DRA's, for now or for good.
    fn goes_to_dra(&self, gpu: &Gpu) -> bool {
        self.wants(gpu) || self.takes_back(gpu)
    }

    fn wait(&self, before: Option<Wait>, gpu: &GpuUuid, grace: Timestamp, now: Timestamp) -> Wait {
        Wait::next(before, (self.hardware.topology(), gpu), self.ledger, grace, now)
    }

    /// Returns true if no pod can have the GPU through the device plugin, or through another DRA driver of our name.
    fn is_unheld(&self, gpu: &Gpu) -> bool {
        let topology = self.hardware.topology();
        self.ledger.is_known()
            && !self.listed.contains(&gpu.uuid)
            && self.ledger.plugin_holder(topology, &gpu.uuid).is_none()
            && !self.ledger.has_foreign_claim(topology, &gpu.uuid)
    }
}

impl Doors {
    /// The GPUs, for the record of this process.
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        self.gpus.keys().cloned().collect()
    }

    /// Returns true if a GPU is one of DRA's.
    pub fn has(&self, gpu: &GpuUuid) -> bool {
        self.gpus.contains_key(gpu)
    }

    /// Takes over the GPUs that the last process offered through DRA. Another device plugin or DRA driver may have
    /// served the node since. A claim is therefore not prepared with a GPU that the kubelet lists as theirs.
    pub fn restore(&mut self, gpus: &BTreeSet<GpuUuid>) {
        for gpu in gpus {
            self.gpus.entry(gpu.clone()).or_default();
        }
    }

    /// The door of a GPU; `None` if the GPU is not offered.
    pub fn of(&self, plan: &ResourcePlan, hardware: &Hardware, uuid: &GpuUuid) -> Option<Door> {
        match self.gpus.get(uuid) {
            Some(None) => return Some(Door::Dra),
            Some(Some(wait)) => return Some(Door::FromDra(wait.since)),
            None => {}
        }
        let topology = hardware.topology();
        let gpu = topology.gpus().get(topology.position(uuid)?).filter(|gpu| plan.filter.offers(gpu))?;
        Some(if plan.dra.include(gpu) || self.awaits(uuid) { Door::ToDra } else { Door::Plugin })
    }

    /// The wait of a GPU that leaves DRA.
    pub fn wait_of(&self, gpu: &GpuUuid) -> Option<Wait> {
        *self.gpus.get(gpu)?
    }

    /// Returns true if a GPU is on its way to DRA.
    pub fn awaits(&self, gpu: &GpuUuid) -> bool {
        self.awaited.contains_key(gpu)
    }

    /// The GPUs on their way to DRA.
    pub fn awaited(&self) -> impl Iterator<Item = &GpuUuid> {
        self.awaited.keys()
    }

    /// Returns true if a new list of holders could let a GPU change its door.
    pub fn awaits_holders(&self) -> bool {
        !self.awaited.is_empty() || self.gpus.values().any(Option::is_some)
    }

    /// Returns true if GPUs are on their way to DRA.
    pub fn awaits_gpus(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Returns true if a GPU that no pod holds is on its way to DRA.
    pub fn awaits_unheld_gpus(&self) -> bool {
        self.awaited.values().any(Option::is_some)
    }

    /// The GPUs of DRA, and those on their way.
    pub fn concerned(&self) -> impl Iterator<Item = &GpuUuid> {
        self.gpus.keys().chain(self.awaited.keys())
    }

    /// The doors after an event; `None` if nothing changes. As long as no GPU is observed, nothing is decided.
    pub fn next(&self, facts: &Facts<'_>, now: Timestamp) -> Option<Self> {
        let gpus = facts.hardware.topology().gpus();
        let idle = self.gpus.is_empty() && self.awaited.is_empty() && !gpus.iter().any(|gpu| facts.goes_to_dra(gpu));
        if idle || gpus.is_empty() {
            return self.deadline.map(|_| Self { deadline: None, ..self.clone() });
        }
        let (mut next, mut deadlines) = (self.clone(), Vec::new());
        next.gpus.retain(|uuid, leaves| {
            let wanted = gpus.iter().any(|gpu| gpu.uuid == *uuid && facts.wants(gpu));
            if wanted {
                *leaves = None;
                return true;
            }
            let wait = facts.wait(*leaves, uuid, self.grace, now);
            *leaves = Some(wait);
            deadlines.extend(wait.deadline());
            !wait.ends((facts.hardware.topology(), uuid), facts.ledger)
        });
        next.awaited.clear();
        for gpu in gpus.iter().filter(|gpu| facts.goes_to_dra(gpu) && !self.has(&gpu.uuid)) {
            let before = self.awaited.get(&gpu.uuid).copied().flatten().unwrap_or(0);
            let lists = facts.is_unheld(gpu).then(|| before.saturating_add(facts.is_new_list.into()));
            // The kubelet that answers next may be a new one, which knows fewer pods at first: two lists are needed.
            if lists.is_some_and(|lists| lists >= 2) {
                let wait = (!facts.wants(gpu)).then(|| facts.wait(None, &gpu.uuid, self.grace, now));
                deadlines.extend(wait.and_then(Wait::deadline));
                next.gpus.insert(gpu.uuid.clone(), wait);
            } else {
                next.awaited.insert(gpu.uuid.clone(), lists);
            }
        }
        next.deadline = deadlines.into_iter().min();
        (next != *self).then_some(next)
    }

    /// Makes the devices again from the hardware. The devices of a GPU that is gone stay as they were.
    pub fn make(&mut self, hardware: &Hardware, hints: NumaHints) {
        let topology = hardware.topology();
        let mut made: Vec<Device> = Vec::new();
        for (place, gpu) in topology.gpus().iter().enumerate().filter(|(_, gpu)| self.has(&gpu.uuid)) {
            let whole = Device::new(topology, gpu, hints);
            if gpu.mig_enabled {
                let of_gpu = topology.mig_devices().iter().filter(|mig| mig.parent == place);
                made.extend(of_gpu.map(|mig| Device { mig: Some(mig.clone()), ..whole.clone() }));
            } else {
                made.push(whole);
            }
        }
        let gone =
            |device: &Device| topology.position(&device.gpu.uuid).is_none() && self.gpus.contains_key(&device.gpu.uuid);
        let gone: Vec<Device> = self.devices.iter().filter(|device| gone(device)).cloned().collect();
        made.extend(gone);
        self.devices = made;
    }

    /// The devices whose health changed, as places in the list, each with its new health.
    pub fn changed_health(&self, hardware: &Hardware, ledger: &Ledger, shares: &Shares) -> Vec<(usize, Health)> {
        let now = |device: &Device| {
            let since = match &device.health {
                Health::Unhealthy { since, .. } => *since,
                Health::Healthy => ledger.known_since.unwrap_or_default(),
            };
            if !hardware.has(device) {
                return Health::Unhealthy { reason: UnhealthyReason::Gone, since };
            }
            // Unhealthy for new claims only: the claims that have it keep it.
            let leaves = self.wait_of(&device.gpu.uuid).map(|wait| wait.since);
            if let Some(since) = leaves.or_else(|| shares.changing_since(&device.gpu.uuid)) {
                return Health::Unhealthy { reason: UnhealthyReason::Withdrawn, since };
            }
            let health = hardware.health(&device.gpu.uuid, device.instance()).unwrap_or(Health::Healthy);
            match ledger.plugin_holder(hardware.topology(), &device.gpu.uuid) {
                Some((resource, id)) if health == Health::Healthy => {
                    let (resource, id) = (resource.to_string(), id.to_string());
                    let reason = UnhealthyReason::HeldElsewhere { resource, id };
                    match &device.health {
                        Health::Unhealthy { reason: before, .. } if *before == reason => device.health.clone(),
                        _ => Health::Unhealthy { reason, since: ledger.known_since.unwrap_or_default() },
                    }
                }
                _ => health,
            }
        };
        let all = self.devices.iter().enumerate().map(|(place, device)| (place, device, now(device)));
        all.filter(|(_, device, health)| device.health != *health).map(|(place, _, health)| (place, health)).collect()
    }
}
