//! One process of linkwise: the state with its one writer, the snapshot that the doors read, and the DRA plugin's steps
//! between which it may die. State, ledger, doors and `claims::plan` are the real ones; the order of steps is that of
//! `crates/kubelet/src/dra/claim_manager`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use linkwise_core::claims::{
    AllocatedDevice, Allocation, Claim, ClaimError, ClaimName, ClaimStatus, DeviceAllocation, DeviceRefusal, Node,
    Prepared, plan,
};
use linkwise_core::publish::injection::{CdiOptions, HostDevices, InjectionOptions};
use linkwise_core::state::{Effect, Event, Health, HealthRecord, Holdings, NodeState, NumaHints};
use linkwise_kubelet::dra::Checkpoint;

use super::{DRIVER, POOL};

/// How long after a claim was entered or prepared the kubelet's lists have it (`listed_within` of `dra::Settings`).
pub const LISTED_WITHIN: Duration = Duration::from_secs(90);

/// How long an answer of PodResources takes at most: its deadline, and that of the kubelet's checkpoint.
pub const LATEST_LIST: Duration = Duration::from_secs(4);

/// What a process leaves to the next.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    pub record: HealthRecord,
    pub claims: BTreeMap<String, Checkpoint>,
}

/// The claims that the API server has, with the devices of their written allocation.
#[derive(Debug, Default)]
pub struct Cluster {
    pub is_away: bool,
    pub claims: BTreeMap<String, Vec<String>>,
}

impl Cluster {
    fn read(&self, uid: &str) -> Option<Claim> {
        let result = |device: &String| AllocatedDevice {
            request: "gpus".to_owned(),
            driver: DRIVER.to_owned(),
            pool: POOL.to_owned(),
            device: device.clone(),
            ..AllocatedDevice::default()
        };
        let results = self.claims.get(uid)?.iter().map(result).collect();
        let allocation = Allocation { devices: DeviceAllocation { results, config: Vec::new() } };
        Some(Claim { metadata: name(uid), status: ClaimStatus { allocation: Some(allocation) } })
    }

    fn has_no(&self, uid: &str) -> bool {
        !self.is_away && !self.claims.contains_key(uid)
    }
}

fn name(uid: &str) -> ClaimName {
    ClaimName { namespace: "default".to_owned(), name: uid.to_owned(), uid: uid.to_owned() }
}

/// Work on one claim, as far as it is done.
#[derive(Debug)]
enum Work {
    Read,
    Reserve(Claim),
    Start(Checkpoint),
    Complete(Checkpoint),
    Remove,
    Forget,
}

/// A claim that the plugin works on.
#[derive(Debug)]
struct Task {
    uid: String,
    work: Work,
    before: Option<Checkpoint>,
}

/// What the kubelet is told.
#[derive(Debug)]
pub enum Answer {
    Prepared(Prepared),
    Refused,
    Unprepared,
}

#[derive(Debug)]
pub struct Agent {
    state: NodeState,
    pub snapshot: NodeState,
    pub events: VecDeque<Event>,
    door: BTreeMap<String, (Checkpoint, Duration)>,
    tasks: Vec<Task>,
    awaits: bool,
    /// What the next process is to know, on its way to the disk.
    pub record: Option<HealthRecord>,
    /// The list that was asked for, and when.
    pub asked: Option<(Option<Holdings>, Duration)>,
    pub next_list: Duration,
    pause: Duration,
    /// Whether a kubelet has answered it.
    pub is_informed: bool,
    /// Healthy devices of DRA, once more for each snapshot.
    pub published: Vec<Vec<String>>,
    /// Whether it prepares claims that have no checkpoint.
    serves: bool,
}

impl Agent {
    /// Starts with what the last process left. `events` come in the order given.
    pub fn start(disk: &Disk, events: Vec<Event>, serves: bool, now: Duration) -> Self {
        let state = NodeState::new(NumaHints::default())
            .awaiting(|first| (first.scan, first.holders, first.claims) = (true, true, true));
        let door: BTreeMap<_, _> =
            disk.claims.iter().map(|(uid, record)| (uid.clone(), (record.clone(), now))).collect();
        let mut agent = Self {
            snapshot: state.clone(),
            state,
            events: events.into(),
            door,
            tasks: Vec::new(),
            awaits: false,
            record: None,
            asked: None,
            next_list: now,
            pause: Duration::ZERO,
            is_informed: false,
            published: Vec::new(),
            serves,
        };
        agent.apply(Event::Restored(Box::new(disk.record.clone())), now);
        agent
    }

    /// When time alone changes something: the state, or what is known of holders.
    pub fn deadline(&self) -> Duration {
        let list = self.asked.as_ref().map_or(self.next_list, |(_, asked)| *asked + LATEST_LIST);
        self.state.next_deadline().map_or(list, |deadline| deadline.min(list))
    }

    /// What the runtime's loop does with an event.
    pub fn apply(&mut self, event: Event, now: Duration) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, now);
        self.state = state;
        let awaits = self.state.offers().awaits_holders();
        if std::mem::replace(&mut self.awaits, awaits) != awaits && self.asked.is_none() {
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

    /// The list comes, or nobody answers; the next follows ever later, as long as the kubelet answers.
    pub fn listed(&mut self, held: Option<Holdings>, now: Duration) {
        let [first, longest] = [1, 30].map(Duration::from_secs);
        self.pause = match (&held, self.awaits) {
            (None, _) => first,
            (Some(_), true) => (self.pause * 2).clamp(first, longest),
            (Some(_), false) => longest,
        };
        self.next_list = now + self.pause;
        self.is_informed |= held.is_some();
        self.apply(Event::Holders(held), now);
    }

    fn publish(&mut self) {
        self.snapshot = self.state.clone();
        let names = linkwise_core::claims::devices(self.snapshot.topology());
        let healthy = self.snapshot.offers().through_dra().iter().filter(|device| device.health == Health::Healthy);
        let mig = |device: &linkwise_core::state::Device| device.mig.as_ref().map(|mig| mig.uuid.clone());
        let named = healthy.filter_map(|device| {
            let is = |chosen: &linkwise_core::publish::injection::ChosenDevice<'_>| {
                chosen.gpu.uuid == device.gpu.uuid && chosen.mig.map(|mig| mig.uuid.clone()) == mig(device)
            };
            names.iter().find(|(_, chosen)| is(chosen)).map(|(name, _)| name.clone())
        });
        self.published.push(named.collect());
    }

    fn put(&mut self, uid: &str, record: Option<Checkpoint>, now: Duration) {
        let entry = record.as_ref().map(|record| record.entry(Some("boot")));
        match record {
            Some(record) => drop(self.door.insert(uid.to_owned(), (record, now))),
            None => drop(self.door.remove(uid)),
        }
        self.apply(Event::Prepared(self.state.ledger().claims_with(uid, entry)), now);
    }

    pub fn claims(&self) -> Event {
        Event::Prepared(self.door.values().map(|(record, _)| record.entry(Some("boot"))).collect())
    }

    pub fn works_on(&self, uid: &str) -> bool {
        self.tasks.iter().any(|task| task.uid == uid)
    }

    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// The kubelet asks to prepare a claim that nothing is done with, or to unprepare it.
    pub fn ask(&mut self, uid: &str, prepare: bool) {
        let work = if prepare { Work::Read } else { Work::Remove };
        let before = self.door.get(uid).map(|(record, _)| record.clone());
        self.tasks.push(Task { uid: uid.to_owned(), work, before });
    }

    /// Does the next step of a task.
    pub fn advance(
        &mut self,
        at: usize,
        cluster: &Cluster,
        disk: &mut Disk,
        now: Duration,
    ) -> Option<(String, Answer)> {
        if !self.state.ledger().has_all_claims() {
            // Calls wait until the checkpoints are entered.
            return None;
        }
        let Task { uid, work, before } = self.tasks.swap_remove(at);
        let next = match work {
            Work::Read => match &before {
                Some(record) if record.is_completed_in(Some("boot")) => {
                    return Some((uid, Answer::Prepared(record.prepared.clone())));
                }
                None if !self.serves => return Some((uid, Answer::Refused)),
                _ if cluster.is_away => return Some((uid, Answer::Refused)),
                before => match cluster.read(&uid) {
                    Some(claim) => Work::Reserve(claim),
                    None => {
                        if before.is_some() && self.is_unused(&uid, now) {
                            self.undo(&uid, disk, now);
                        }
                        return Some((uid, Answer::Refused));
                    }
                },
            },
            // Hardware is given once the holders are known.
            Work::Reserve(claim) if !self.state.is_open() => Work::Reserve(claim),
            Work::Reserve(claim) => match self.reserve(&uid, &claim, cluster, disk, now) {
                Some(record) => Work::Start(record),
                None => return Some((uid, Answer::Refused)),
            },
            Work::Start(record) => {
                disk.claims.insert(uid.clone(), record.clone());
                Work::Complete(record)
            }
            Work::Complete(record) => {
                let record = record.completed();
                disk.claims.insert(uid.clone(), record.clone());
                self.put(&uid, Some(record.clone()), now);
                return Some((uid, Answer::Prepared(record.prepared)));
            }
            Work::Remove => {
                disk.claims.remove(&uid);
                Work::Forget
            }
            Work::Forget => {
                self.put(&uid, None, now);
                return Some((uid, Answer::Unprepared));
            }
        };
        self.tasks.push(Task { uid, work: next, before });
        None
    }

    fn reserve(
        &mut self,
        uid: &str,
        claim: &Claim,
        cluster: &Cluster,
        disk: &mut Disk,
        now: Duration,
    ) -> Option<Checkpoint> {
        let cdi = Some(CdiOptions { kind: "nvidia.com/gpu".to_owned(), annotation_prefix: None, cri: true });
        let injection = InjectionOptions { cdi, ..InjectionOptions::default() };
        loop {
            let node = Node {
                pool: POOL,
                state: &self.state,
                injection: &injection,
                host: &HostDevices::default(),
                makes_mig: false,
                common_shm: &BTreeSet::new(),
            };
            match plan(claim, &name(uid), node) {
                Ok(prepared) => {
                    let record = Checkpoint::started(Some("boot".to_owned()), name(uid), prepared);
                    self.put(uid, Some(record.clone()), now);
                    return Some(record);
                }
                Err(ClaimError::Device { why: DeviceRefusal::Taken(holder), .. }) => {
                    let other = holder.0.uid;
                    if self.works_on(&other) || !cluster.has_no(&other) || !self.is_unused(&other, now) {
                        return None;
                    }
                    self.undo(&other, disk, now);
                }
                Err(_) => return None,
            }
        }
    }

    /// Looks whether a claim is gone.
    pub fn sweep(&mut self, cluster: &Cluster, disk: &mut Disk, now: Duration) {
        if !self.state.ledger().has_all_claims() {
            return;
        }
        let gone = |uid: &&String| !self.works_on(uid) && cluster.has_no(uid) && self.is_unused(uid, now);
        if let Some(uid) = self.door.keys().find(gone).cloned() {
            self.undo(&uid, disk, now);
        }
    }

    fn is_unused(&self, uid: &str, now: Duration) -> bool {
        let ledger = self.snapshot.ledger();
        let listed = ledger.claimed_lately().any(|held| held.claim == format!("default/{uid}"));
        let is_old = self.door.get(uid).is_some_and(|(_, since)| now >= *since + LISTED_WITHIN);
        ledger.is_known() && is_old && !listed
    }

    fn undo(&mut self, uid: &str, disk: &mut Disk, now: Duration) {
        disk.claims.remove(uid);
        self.put(uid, None, now);
    }
}
