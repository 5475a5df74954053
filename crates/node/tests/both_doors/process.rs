//! One process of linkwise: the state with its one writer, the snapshot that the doors read, and the DRA plugin. A call
//! of the DRA plugin is one step here, which no death interrupts: `tests/dra/door/crash.rs` tests deaths during calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::claims::{
    AllocatedDevice, Allocation, Claim, ClaimError, ClaimName, ClaimStatus, DeviceAllocation, DeviceRefusal,
    PlanInputs, Prepared, plan,
};
use linkwise_core::publish::injection::{CdiOptions, ChosenDevice, HostDevices, InjectionOptions};
use linkwise_core::state::{
    Effect, Event, Health, HealthRecord, Holdings, NodeState, NumaHints, ResourceDevice, UnhealthyReason,
};
use linkwise_kubelet::dra::Checkpoint;

use super::{DRIVER, POOL};

/// The longest time until the kubelet's lists have a claim that was entered or prepared (`listed_within` of
/// `dra::Settings`).
pub const LISTED_WITHIN: Duration = Duration::from_secs(90);

/// The longest time for an answer of PodResources: its deadline and that of reading the kubelet's checkpoint.
pub const LATEST_LIST: Duration = Duration::from_secs(4);

/// The files that a process leaves to the next one.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    pub record: HealthRecord,
    pub claims: BTreeMap<String, Checkpoint>,
}

impl Disk {
    pub fn prepared(&self) -> Event {
        Event::Prepared(self.claims.values().map(|record| record.entry(Some("boot"))).collect())
    }
}

/// The claims that the API server has, with the devices allocated to each.
pub type Cluster = BTreeMap<String, Vec<String>>;

fn read(cluster: &Cluster, uid: &str) -> Option<Claim> {
    let result = |device: &String| AllocatedDevice {
        request: "gpus".to_owned(),
        driver: DRIVER.to_owned(),
        pool: POOL.to_owned(),
        device: device.clone(),
        ..AllocatedDevice::default()
    };
    let results = cluster.get(uid)?.iter().map(result).collect();
    let allocation = Allocation { devices: DeviceAllocation { results, config: Vec::new() } };
    Some(Claim { metadata: name(uid), pod_claim_name: None, status: ClaimStatus { allocation: Some(allocation) } })
}

fn name(uid: &str) -> ClaimName {
    ClaimName { namespace: "default".to_owned(), name: uid.to_owned(), uid: uid.to_owned() }
}

#[derive(Debug)]
pub struct Process {
    state: NodeState,
    pub snapshot: NodeState,
    pub events: VecDeque<Event>,
    /// The time at which each claim was entered.
    entered: BTreeMap<String, Duration>,
    awaits_holders: bool,
    /// The health record for the next process, which is not on the disk yet.
    pub record: Option<HealthRecord>,
    /// The list that the kubelet will answer with, and the time of the request.
    pub request: Option<(Option<Holdings>, Duration)>,
    pub next_list: Duration,
    pause: Duration,
    /// True once a kubelet has answered.
    pub is_informed: bool,
    /// The healthy devices of DRA in a snapshot that was published since the last check.
    pub published: Option<Vec<String>>,
    /// True if the process prepares claims that have no checkpoint.
    serves: bool,
    /// The ids of the kubelet's last two lists; a plan, a scan or the kubelet's silence clears them.
    listed: Vec<BTreeSet<ResourceDevice>>,
}

impl Process {
    /// Starts from the files of the previous process. `events` come in the given order.
    pub fn start(disk: &Disk, events: Vec<Event>, serves: bool, now: Duration) -> Self {
        let state = NodeState::new(NumaHints::default())
            .awaiting(|first| (first.scan, first.holders, first.claims) = (true, true, true));
        let mut process = Self {
            snapshot: state.clone(),
            state,
            events: events.into(),
            entered: disk.claims.keys().map(|uid| (uid.clone(), now)).collect(),
            awaits_holders: false,
            record: None,
            request: None,
            next_list: now,
            pause: Duration::ZERO,
            is_informed: false,
            published: None,
            serves,
            listed: Vec::new(),
        };
        process.apply(Event::Restored(Box::new(disk.record.clone())), now);
        process
    }

    /// The next time at which something changes without an event: the state, or the list of holders.
    pub fn deadline(&self) -> Duration {
        let list = self.request.as_ref().map_or(self.next_list, |(_, sent)| *sent + LATEST_LIST);
        self.state.next_deadline().map_or(list, |deadline| deadline.min(list))
    }

    /// Applies an event, as the node's loop does.
    pub fn apply(&mut self, event: Event, now: Duration) {
        match &event {
            Event::Holders(Some(held)) => {
                self.listed.truncate(1);
                self.listed.insert(0, held.containers.union(&held.init_containers).cloned().collect());
            }
            Event::Holders(None) | Event::Planned(_) | Event::Observed(_) => self.listed.clear(),
            _ => {}
        }
        let (state, effects) = std::mem::take(&mut self.state).apply(event, now);
        self.state = state;
        let awaits = self.state.offers().awaits_holders();
        if std::mem::replace(&mut self.awaits_holders, awaits) != awaits && self.request.is_none() {
            (self.next_list, self.pause) = (now, Duration::ZERO);
        }
        for effect in effects {
            match effect {
                Effect::Keep => self.record = Some(self.state.record()),
                Effect::Publish => self.publish(),
                _ => {}
            }
        }
    }

    /// Checks the lists of devices. Each id that a pod holds is on the list of its resource. An unhealthy id is on no
    /// list if two lists of the kubelet in a row lack it and its hardware is not offered.
    pub fn check_lists(&self) -> Result<(), String> {
        for (name, resource) in self.state.offers().resources() {
            let devices = resource.devices().iter().map(|(id, device)| (id, device.health.clone()));
            let all: BTreeMap<&DeviceId, Health> = devices.chain(resource.unknown()).collect();
            let held = self.listed.first().into_iter().flatten().filter(|(of, _)| of == name);
            if let Some((_, id)) = held.into_iter().find(|(_, id)| !all.contains_key(id)) {
                return Err(format!("{id} of {name} is held, and not on the list"));
            }
            let is_over = |health: &Health| {
                matches!(health, Health::Unhealthy { reason, .. }
                if [UnhealthyReason::Gone, UnhealthyReason::Withdrawn].contains(reason))
            };
            let lacks = |id: &DeviceId| self.listed.iter().all(|ids| !ids.contains(&(name.clone(), id.clone())));
            let stays = all.iter().find(|(id, health)| is_over(health) && self.listed.len() == 2 && lacks(id));
            if let Some((id, _)) = stays {
                return Err(format!("{id} of {name} is on the list, and no pod holds it"));
            }
        }
        Ok(())
    }

    /// Applies the kubelet's list, or its silence. While holders are awaited, each list doubles the pause, up to 30 s.
    pub fn listed(&mut self, held: Option<Holdings>, now: Duration) {
        let [first, longest] = [1, 30].map(Duration::from_secs);
        self.pause = match (&held, self.awaits_holders) {
            (None, _) => first,
            (Some(_), true) => (self.pause * 2).clamp(first, longest),
            (Some(_), false) => longest,
        };
        self.next_list = now + self.pause;
        // The kubelet may have started just before, so the first list may be incomplete.
        let held = held.map(|held| Holdings { is_first: held.is_first || !self.is_informed, ..held });
        self.is_informed |= held.is_some();
        self.apply(Event::Holders(held), now);
    }

    fn publish(&mut self) {
        self.snapshot = self.state.clone();
        let names = linkwise_core::claims::devices(self.snapshot.topology());
        let healthy = self.snapshot.offers().through_dra().iter().filter(|device| device.health == Health::Healthy);
        let named = healthy.filter_map(|device| {
            let mig = device.mig.as_ref().map(|mig| &mig.uuid);
            let is = |chosen: &ChosenDevice<'_>| {
                chosen.gpu.uuid == device.gpu.uuid && chosen.mig.map(|mig| &mig.uuid) == mig
            };
            names.iter().find(|(_, chosen)| is(chosen)).map(|(name, _)| name.clone())
        });
        self.published = Some(named.collect());
    }

    /// Enters a claim, or forgets it.
    fn put(&mut self, uid: &str, record: Option<Checkpoint>, disk: &mut Disk, now: Duration) {
        let entry = record.as_ref().map(|record| record.entry(Some("boot")));
        match record {
            Some(record) => {
                self.entered.insert(uid.to_owned(), now);
                disk.claims.insert(uid.to_owned(), record);
            }
            None => {
                self.entered.remove(uid);
                disk.claims.remove(uid);
            }
        }
        self.apply(Event::Prepared(self.state.ledger().claims_with(uid, entry)), now);
    }

    /// Prepares a claim; `None` if it is refused, or has to wait.
    pub fn prepare(&mut self, uid: &str, cluster: &Cluster, disk: &mut Disk, now: Duration) -> Option<Prepared> {
        if !self.state.ledger().has_all_claims() {
            // Calls wait until the checkpoints are entered.
            return None;
        }
        if let Some(record) = disk.claims.get(uid) {
            return Some(record.prepared.clone());
        }
        // Hardware is given once the state is open.
        let claim = read(cluster, uid).filter(|_| self.serves && self.state.is_open())?;
        let cdi = Some(CdiOptions { kind: "nvidia.com/gpu".to_owned(), annotation_prefix: None, cri: true });
        let injection = InjectionOptions { cdi, ..InjectionOptions::default() };
        loop {
            let node = PlanInputs {
                pool: POOL,
                state: &self.state,
                injection: &injection,
                host: &HostDevices::default(),
                makes_mig: false,
                common_shm: &BTreeSet::new(),
            };
            match plan(&claim, &name(uid), node) {
                Ok(prepared) => {
                    let record = Checkpoint::started(Some("boot".to_owned()), name(uid), prepared.clone());
                    self.put(uid, Some(record.completed()), disk, now);
                    return Some(prepared);
                }
                Err(ClaimError::Device { why: DeviceRefusal::Taken(holder), .. })
                    if self.is_gone(&holder.uid, cluster, now) =>
                {
                    self.put(&holder.uid, None, disk, now);
                }
                Err(_) => return None,
            }
        }
    }

    /// Unprepares a claim; false if that has to wait.
    pub fn unprepare(&mut self, uid: &str, disk: &mut Disk, now: Duration) -> bool {
        let has_all = self.state.ledger().has_all_claims();
        if has_all {
            self.put(uid, None, disk, now);
        }
        has_all
    }

    /// Forgets a claim that is gone, if there is one.
    pub fn sweep(&mut self, cluster: &Cluster, disk: &mut Disk, now: Duration) {
        let gone = disk.claims.keys().find(|uid| self.is_gone(uid, cluster, now)).cloned();
        if let Some(uid) = gone.filter(|_| self.state.ledger().has_all_claims()) {
            self.put(&uid, None, disk, now);
        }
    }

    /// Returns true if the API server no longer has the claim, and no pod uses it.
    fn is_gone(&self, uid: &str, cluster: &Cluster, now: Duration) -> bool {
        let ledger = self.snapshot.ledger();
        let listed = ledger.claimed_lately().any(|held| held.claim == format!("default/{uid}"));
        let is_old = self.entered.get(uid).is_some_and(|since| now >= *since + LISTED_WITHIN);
        !cluster.contains_key(uid) && ledger.lists_all() && is_old && !listed
    }
}
