//! [`Hardware`]: the graph of the node, and the facts and health of each GPU and MIG device.
//!
//! One of the three parts of the node's state. It knows neither resources nor pods. Each GPU has a state machine
//! ([`super::health`]) that decides about events of this GPU. Two decisions need more than one GPU and are made here:
//! trouble of every GPU at once is blamed on the node, and a dead NVLink is blamed on the GPU at its far end if no link
//! reaches that GPU.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use core::time::Duration;

use super::health::{self, GpuHealth};
use super::inventory::{Inventory, Lack};
use super::xid::DOUBLE_BIT_ECC;
use super::{
    Device, Effect, Expectation, FabricHealth, Health, HealthPoll, HealthRecord, MigInstance, NodeIdentity, Reach,
    RecoveryAction, Shortfall, Timestamp, UnhealthyReason, XidClass, XidPolicy, XidSet,
};
use crate::allocation::AllocationTables;
use crate::reported::Reported;
use crate::topology::{
    CudaVersion, GpuUuid, HostObservation, MigUuid, NodeObservation, NodeTopology, NvLinkRemote, PciAddress,
    PciObservation, TopologyWarning,
};

/// The shortest time between two log lines for one XID of one GPU that changes nothing.
const XID_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The most such XIDs, each of one GPU, that are logged in one interval. Only the metrics count further ones.
const MAX_LOGGED_XIDS: usize = 1024;

/// The GPUs of the node.
#[derive(Clone, Debug, Default)]
pub struct Hardware {
    pub(super) tables: Arc<AllocationTables>,
    warnings: Vec<TopologyWarning>,
    versions: DriverVersions,
    /// As in [`NodeObservation`].
    mig_orders: u64,
    identity: NodeIdentity,
    /// The operator's classes of XIDs.
    pub(super) xids: XidPolicy,
    /// The first hold time, if it is not [`health::HOLD_TIME`]; see [`super::health`].
    pub(super) hold: Option<Duration>,
    /// The health of every GPU that was ever scanned, or that the record names.
    health: BTreeMap<GpuUuid, GpuHealth>,
    /// The address of each GPU at its last scan.
    addresses: BTreeMap<GpuUuid, PciAddress>,
    /// The health that was last reported, by GPU and MIG device.
    reported: BTreeMap<(GpuUuid, Option<MigUuid>), Health>,
    unknown_actions: Reported<(GpuUuid, RecoveryAction)>,
    /// The XIDs that changed nothing, with the time of their last line in the log.
    ignored_xids: BTreeMap<(GpuUuid, u64), Timestamp>,
    /// The standing reasons that do not count, each as the GPU and the reason's label.
    uncounted: BTreeSet<(GpuUuid, &'static str)>,
    /// The GPUs that the node had.
    inventory: Inventory,
    /// The GPUs that the configuration expects.
    pub(super) expected: Expectation,
    /// True if the node booted, or the driver was loaded, and no GPU has been scanned since.
    renewed: bool,
    /// The record as of the last [`Effect::Keep`].
    kept: HealthRecord,
}

/// The versions that NVML reported at the last scan; `None` if it did not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverVersions {
    /// The driver's version, such as `580.82.07` (`nvmlSystemGetDriverVersion`).
    pub driver: Option<String>,
    /// The newest CUDA that the driver supports (`nvmlSystemGetCudaDriverVersion`).
    pub cuda: Option<CudaVersion>,
}

impl DriverVersions {
    /// Reads the versions of a scan.
    pub fn of(observed: &NodeObservation) -> Self {
        Self { driver: observed.driver_version.clone(), cuda: observed.cuda_version }
    }
}

impl Hardware {
    /// The graph.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        self.tables.topology()
    }

    /// The tables from which choices are made.
    pub fn tables(&self) -> &Arc<AllocationTables> {
        &self.tables
    }

    /// The warnings of the last scan.
    pub fn warnings(&self) -> &[TopologyWarning] {
        &self.warnings
    }

    /// The versions that NVML reports.
    pub fn versions(&self) -> &DriverVersions {
        &self.versions
    }

    /// The health of a GPU, or with `instance` of a MIG device on it; `None` if neither a scan nor the record has the
    /// GPU.
    pub fn health(&self, gpu: &GpuUuid, instance: Option<MigInstance>) -> Option<Health> {
        Some(self.health.get(gpu)?.verdict(&self.xids, |reason| reason.concerns(instance)))
    }

    /// An operator's cordon of a GPU, and its beginning.
    pub fn cordon(&self, gpu: &GpuUuid) -> Option<(&UnhealthyReason, Timestamp)> {
        self.health.get(gpu)?.cordoned()
    }

    /// The health of a device for new work: a healthy device of a cordoned GPU becomes unhealthy.
    pub(super) fn for_new_work(&self, device: &Device, health: Health) -> Health {
        match (health, self.cordon(&device.gpu.uuid)) {
            (Health::Healthy, Some((reason, since))) => Health::Unhealthy { reason: reason.clone(), since },
            (health, _) => health,
        }
    }

    /// The standing reasons of a GPU and its MIG devices, in the order in which they began, each with its beginning.
    pub fn reasons(&self, gpu: &GpuUuid) -> impl Iterator<Item = (&UnhealthyReason, Timestamp)> + use<'_> {
        self.health.get(gpu).into_iter().flat_map(GpuHealth::reasons)
    }

    /// The standing reasons that make a GPU or its MIG devices unhealthy, in the order in which they began.
    pub fn counting_reasons(&self, gpu: &GpuUuid) -> impl Iterator<Item = &UnhealthyReason> + use<'_> {
        self.reasons(gpu).map(|(reason, _)| reason).filter(|reason| self.xids.counts(reason))
    }

    /// The hardware that the node lacks, compared with earlier scans and with the configured expectation.
    pub fn shortfalls(&self) -> impl Iterator<Item = &Shortfall> {
        // NVLinks that went down in this boot are left out: the reason of the GPU's health says more.
        self.inventory.shortfalls.iter().filter(|shortfall| match (&shortfall.gpu, &shortfall.lack) {
            (Some((gpu, _)), Lack::NvLinks { .. }) => {
                !self.counting_reasons(gpu).any(|reason| matches!(reason, UnhealthyReason::LinksDown { .. }))
            }
            _ => true,
        })
    }

    /// Applies an operator's order to accept these shortfalls.
    pub(super) fn accepted(&mut self, shortfalls: &[Shortfall]) -> Vec<Effect> {
        self.inventory.accept(shortfalls).into_iter().map(|shortfall| Effect::Shortfall(shortfall, false)).collect()
    }

    /// The GPUs' health, the inventory and the identity, as the record for our next process has them.
    pub fn record(&self) -> HealthRecord {
        let gpus = self.health.iter().filter_map(|(gpu, health)| Some((gpu.clone(), health.kept()?)));
        HealthRecord {
            version: HealthRecord::VERSION,
            identity: self.identity.clone(),
            gpus: gpus.collect(),
            inventory: self.inventory.clone(),
            ..Default::default()
        }
    }

    /// Returns true if the machine has the GPU or MIG device behind a device.
    pub(super) fn has(&self, device: &Device) -> bool {
        let topology = self.topology();
        match &device.mig {
            Some(mig) => topology.mig_devices().iter().any(|there| there.uuid == mig.uuid),
            None => topology.position(&device.gpu.uuid).is_some(),
        }
    }

    /// Returns true if the device is a MIG device that is gone from a GPU that is there, which is not the GPU's fault.
    pub(super) fn has_lost(&self, device: &Device) -> bool {
        let is_gone = device.mig.is_some() && device.health.reason() == Some(&UnhealthyReason::Gone);
        is_gone && self.topology().position(&device.gpu.uuid).is_some()
    }

    /// The number of MIG orders that the driver had answered before the last scan, since linkwise started.
    pub fn mig_orders(&self) -> u64 {
        self.mig_orders
    }

    /// Applies a scan of the whole node.
    pub(super) fn scanned(&mut self, observed: &NodeObservation, now: Timestamp) -> Vec<Effect> {
        let (topology, warnings) = NodeTopology::assemble(observed);
        let news = warnings.iter().filter(|warning| !self.warnings.contains(warning));
        let mut effects: Vec<Effect> = news.cloned().map(Effect::Warn).collect();
        self.warnings = warnings;
        if topology != **self.topology() {
            self.tables = Arc::new(AllocationTables::new(Arc::new(topology)));
        }
        self.versions = DriverVersions::of(observed);
        self.mig_orders = observed.mig_orders;
        let bus = addresses(&observed.host);
        let off_bus = |pci: &PciAddress| !bus.is_empty() && !bus.contains(pci);
        let by_address: BTreeMap<PciAddress, &GpuUuid> = observed.gpus.iter().map(|gpu| (gpu.pci, &gpu.uuid)).collect();
        for gpu in &observed.gpus {
            let active = gpu.nvlinks.iter().flatten().filter(|link| link.active);
            let links = active.flat_map(|end| {
                let far_end = match end.remote {
                    NvLinkRemote::Gpu(pci) => by_address.get(&pci).map(|uuid| (*uuid).clone()),
                    NvLinkRemote::Switch(_) | NvLinkRemote::Cpu | NvLinkRemote::Unknown => None,
                };
                end.links.iter().map(move |link| (*link, far_end.clone()))
            });
            self.health.entry(gpu.uuid.clone()).or_default().scanned(links, off_bus(&gpu.pci));
            self.addresses.insert(gpu.uuid.clone(), gpu.pci);
        }
        let present: BTreeSet<&GpuUuid> = observed.gpus.iter().map(|gpu| &gpu.uuid).collect();
        for (gpu, health) in self.health.iter_mut().filter(|(gpu, _)| !present.contains(gpu)) {
            // NVML may fail to list a GPU that is there. A GPU that the bus does not list either is gone.
            health.missed(self.addresses.get(gpu).is_some_and(off_bus));
        }
        // If NVML could not list the GPUs, none is known to be missing.
        if observed.gpus.is_empty() && !observed.failures.is_empty() {
            return effects;
        }
        // Agents do not scan a GPU in quarantine, so its absence from a scan does not show that it is missing.
        let is_quarantined = |gpu: &GpuUuid| self.health.get(gpu).is_some_and(GpuHealth::is_quarantined);
        let [began, ended] = self.inventory.scanned(observed, &self.expected, self.renewed, is_quarantined, now);
        self.renewed &= observed.gpus.is_empty();
        effects.extend(began.into_iter().map(|shortfall| Effect::Shortfall(shortfall, true)));
        effects.extend(ended.into_iter().map(|shortfall| Effect::Shortfall(shortfall, false)));
        effects
    }

    /// Applies an XID. Its class decides whether the GPU fails or the XID is only logged.
    pub(super) fn xid(
        &mut self,
        gpu: GpuUuid,
        code: u64,
        instance: Option<MigInstance>,
        now: Timestamp,
    ) -> Option<Effect> {
        let class = self.xids.class(code);
        let has_action = || self.health.get(&gpu).is_some_and(GpuHealth::has_recovery_action);
        if !class.fails() || class == XidClass::RecoveryAction && has_action() {
            return self.note_ignored_xid((gpu.clone(), code), now).then_some(Effect::XidIgnored { gpu, code });
        }
        self.change(&gpu, |health| health.fail(UnhealthyReason::Xid { code, instance }, now));
        None
    }

    /// Notes an XID that changes nothing. Returns true if it is to be logged: a storm of one XID gets a line a minute.
    fn note_ignored_xid(&mut self, xid: (GpuUuid, u64), now: Timestamp) -> bool {
        // A clock that went back ends the interval too.
        let is_recent = |since: &Timestamp| now >= *since && now.saturating_sub(*since) < XID_LOG_INTERVAL;
        if self.ignored_xids.len() >= MAX_LOGGED_XIDS {
            self.ignored_xids.retain(|_, since| is_recent(since));
        }
        let is_quiet = self.ignored_xids.get(&xid).map_or(self.ignored_xids.len() >= MAX_LOGGED_XIDS, is_recent);
        if !is_quiet {
            self.ignored_xids.insert(xid, now);
        }
        !is_quiet
    }

    /// Applies the driver's event of a double-bit ECC error.
    pub(super) fn double_bit_ecc(&mut self, gpu: &GpuUuid, now: Timestamp) {
        if self.xids.class(DOUBLE_BIT_ECC).fails() {
            self.change(gpu, |health| health.fail(UnhealthyReason::DoubleBitEcc, now));
        }
    }

    /// Changes the health of a GPU, if it is known.
    pub(super) fn change(&mut self, gpu: &GpuUuid, change: impl FnOnce(&mut GpuHealth)) {
        self.health.get_mut(gpu).map(change);
    }

    /// Notes that NVML has been unavailable for the grace period. It is not the fault of any GPU.
    pub(super) fn driver_away(&mut self, why: &str, now: Timestamp) {
        for health in self.health.values_mut() {
            health.fail(UnhealthyReason::DriverAway { why: why.to_owned() }, now);
        }
    }

    /// Notes that NVML answers again.
    pub(super) fn driver_back(&mut self) {
        self.health.values_mut().for_each(GpuHealth::driver_back);
    }

    /// Applies one poll of the GPUs.
    pub(super) fn polled(&mut self, polls: &BTreeMap<GpuUuid, HealthPoll>, now: Timestamp) -> Vec<Effect> {
        let is_node_wide = self.is_node_wide(polls);
        let unreachable: BTreeSet<GpuUuid> =
            self.health.keys().filter(|gpu| self.is_unreachable(gpu, polls.get(gpu))).cloned().collect();
        let hold = self.hold.unwrap_or(health::HOLD_TIME);
        for (gpu, poll) in polls {
            if let Some(health) = self.health.get_mut(gpu) {
                health.poll(poll, &unreachable, is_node_wide, hold, now);
            }
        }
        let unknown = polls.iter().filter_map(|(gpu, poll)| match poll.recovery_action {
            Some(action @ RecoveryAction::Other(_)) => Some((gpu.clone(), action)),
            _ => None,
        });
        let news = self.unknown_actions.replace(unknown);
        news.into_iter().map(|(gpu, action)| Effect::UnknownRecoveryAction(gpu, action)).collect()
    }

    /// Returns true if no NVLink reaches a GPU: a standing reason or this poll shows it, the last scan did not list the
    /// GPU, or the GPU is in MIG mode, in which the driver shuts its links down.
    fn is_unreachable(&self, gpu: &GpuUuid, poll: Option<&HealthPoll>) -> bool {
        let shown = poll.is_some_and(|poll| {
            matches!(poll.reach, Reach::Lost { .. } | Reach::ResetRequired { .. }) || poll.on_bus == Some(false)
        });
        let stands = self.health.get(gpu).is_some_and(GpuHealth::is_unreachable);
        let topology = self.topology();
        let listed = topology.position(gpu).and_then(|place| topology.gpus().get(place));
        shown || stands || listed.is_none_or(|gpu| gpu.mig_enabled)
    }

    /// Returns true if all GPUs, at least two, have the same trouble, which is then blamed on the node.
    fn is_node_wide(&self, polls: &BTreeMap<GpuUuid, HealthPoll>) -> bool {
        let known = || polls.iter().filter_map(|(gpu, poll)| Some((self.health.get(gpu)?, poll)));
        let all = |trouble: fn(&GpuHealth, &HealthPoll) -> bool| known().all(|(health, poll)| trouble(health, poll));
        let silent = |_: &GpuHealth, poll: &HealthPoll| matches!(poll.reach, Reach::Failed { .. } | Reach::Lost { .. });
        let fabric = |_: &GpuHealth, poll: &HealthPoll| matches!(poll.fabric, Some(FabricHealth::Failed { .. }));
        known().nth(1).is_some() && (all(silent) || all(fabric) || all(GpuHealth::loses_links))
    }

    /// Applies the identity of the boot and of the driver's load.
    pub(super) fn identified(&mut self, identity: &NodeIdentity) {
        if identity.differs_from(&self.identity) {
            self.health.values_mut().for_each(GpuHealth::renewed);
            self.renewed = true;
        }
        if identity.is_another_machine(&self.identity) {
            self.inventory = Inventory::default();
        }
        self.identity = NodeIdentity {
            machine: identity.machine.clone().or(self.identity.machine.take()),
            boot: identity.boot.clone().or(self.identity.boot.take()),
            driver: identity.driver.clone().or(self.identity.driver.take()),
        };
    }

    /// Applies the record of our last process. A record of another version is refused.
    pub(super) fn restored(&mut self, record: &HealthRecord) -> Option<Effect> {
        if record.version != HealthRecord::VERSION {
            return Some(Effect::RecordIgnored(record.version));
        }
        let renewed = self.identity.differs_from(&record.identity);
        self.renewed |= renewed;
        if self.inventory == Inventory::default() && !self.identity.is_another_machine(&record.identity) {
            self.inventory = record.inventory.clone();
        }
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
        None
    }

    /// Reports each GPU and each MIG device whose own health changed. `listed` are all devices on the kubelet's lists
    /// and of DRA, each with true if it is gone or no longer offered. If none of a GPU's devices is offered, the first
    /// one's health is reported, or the GPU's own if it only lost that MIG device.
    pub(super) fn report<'a>(&mut self, listed: impl Iterator<Item = (&'a Device, bool)> + Clone) -> Vec<Effect> {
        let mut instances: BTreeMap<&GpuUuid, BTreeSet<MigInstance>> = BTreeMap::new();
        let offered = || listed.clone().filter(|(_, is_orphan)| !is_orphan).map(|(device, _)| device);
        for device in offered() {
            if let Some(instance) = device.instance() {
                instances.entry(&device.gpu.uuid).or_default().insert(instance);
            }
        }
        let mut now: BTreeMap<(GpuUuid, Option<MigUuid>), Health> = BTreeMap::new();
        let is_of = |reason: &UnhealthyReason, instance: &MigInstance| {
            matches!(reason, UnhealthyReason::Xid { instance: Some(_), .. }) && reason.concerns(Some(*instance))
        };
        for device in offered() {
            let uuid = &device.gpu.uuid;
            let Some(health) = self.health.get(uuid) else { continue };
            if let (Some(instance), Some(mig)) = (device.instance(), &device.mig) {
                let own = health.verdict(&self.xids, |reason| is_of(reason, &instance));
                now.insert((uuid.clone(), Some(mig.uuid.clone())), own);
            }
            now.entry((uuid.clone(), None)).or_insert_with(|| {
                let of_gpu = || instances.get(uuid).into_iter().flatten();
                health.verdict(&self.xids, |reason| !of_gpu().any(|instance| is_of(reason, instance)))
            });
        }
        let of_gpu = |reason: &UnhealthyReason| !matches!(reason, UnhealthyReason::Xid { instance: Some(_), .. });
        for (device, _) in listed {
            let health = self.health.get(&device.gpu.uuid).filter(|_| self.has_lost(device));
            let health = health.map(|health| health.verdict(&self.xids, of_gpu));
            now.entry((device.gpu.uuid.clone(), None))
                .or_insert_with(|| health.unwrap_or_else(|| device.health.clone()));
        }
        let changed = now.iter().filter(|(unit, health)| {
            let before = self.reported.get(unit).unwrap_or(&Health::Healthy);
            !before.has_same_reason(health)
        });
        let effects = changed.map(|((gpu, mig), health)| Effect::HealthChanged {
            gpu: gpu.clone(),
            mig: mig.clone(),
            health: health.clone(),
        });
        let effects = effects.collect();
        self.reported = now;
        effects
    }

    /// Reports each reason that does not count because health checks are disabled, once while it lasts. Returns true if
    /// these reasons changed.
    pub(super) fn report_uncounted(&mut self) -> (bool, Vec<Effect>) {
        if self.xids.disabled != XidSet::All {
            return (false, Vec::new());
        }
        let standing =
            self.health.iter().flat_map(|(gpu, health)| health.reasons().map(move |(reason, _)| (gpu, reason)));
        let uncounted = standing.filter(|(_, reason)| !self.xids.counts(reason));
        let now: BTreeMap<_, _> =
            uncounted.map(|(gpu, reason)| ((gpu.clone(), reason.label()), reason.clone())).collect();
        let changed = !now.keys().eq(self.uncounted.iter());
        let before = core::mem::replace(&mut self.uncounted, now.keys().cloned().collect());
        let news = now.into_iter().filter(|(key, _)| !before.contains(key));
        (changed, news.map(|((gpu, _), reason)| Effect::NotCounted(gpu, reason)).collect())
    }

    /// Returns the order to keep the record if it changed. A new identity alone counts only if a GPU has a record.
    pub(super) fn keep(&mut self) -> Option<Effect> {
        let record = self.record();
        let identity_matters = record.identity != self.kept.identity && !record.gpus.is_empty();
        if record.gpus == self.kept.gpus && record.inventory == self.kept.inventory && !identity_matters {
            return None;
        }
        self.kept = record;
        Some(Effect::Keep)
    }
}

/// The addresses on the host's PCI bus.
fn addresses(host: &HostObservation) -> BTreeSet<PciAddress> {
    // A stack instead of recursion, because a node file may nest to any depth.
    let mut stack: Vec<&PciObservation> = host.host_bridges.iter().flat_map(|bridge| &bridge.devices).collect();
    let mut found = BTreeSet::new();
    while let Some(device) = stack.pop() {
        found.extend(device.pci);
        stack.extend(&device.devices);
    }
    found
}
