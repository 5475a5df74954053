//! Both doors of one node in half a million random steps. Pods start and end through the device plugin and through
//! claims, while processes die, processes with the other door follow, and GPUs go and come back. No two pods ever have
//! the same hardware, except as slots, and in the end each GPU is offered again.
//!
//! The state, with its ledger and doors, and `claims::plan` are real. The kubelet, the scheduler, the disk and
//! the API server, which is always available, are models. The test keeps its own record of what containers have
//! ([`books`]). The models rely on three things: a device that Allocate granted is in the kubelet's records within
//! 0.9 s; a pod that the kubelet's second or later list lacks has ended; a device plugin that starts while the kubelet
//! is away gets the holders before the kubelet asks it for devices.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test may panic"
)]

mod books;
mod kubelet;
mod process;
#[path = "../../../../tests/soak/random.rs"]
#[allow(dead_code, reason = "the soak test uses more of it")]
mod random;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{Door, Event, Health, MigStrategy, ResourcePlan, SharedResource, Sharing, SharingKind};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

use books::{Books, GPUS, Part};
use kubelet::{BOOKED_WITHIN, Devices, Kubelet};
use process::{Cluster, Disk, LATEST_LIST, LISTED_WITHIN, Process};
use random::Random;

const DRIVER: &str = "gpu.nvidia.com";
const POOL: &str = "n/gpu";

/// The number of histories, and the steps of each.
const HISTORIES: u64 = 250;
const STEPS: u32 = 2_000;

/// The number of slices, from the latest back, that a scheduler may still read.
const KEPT_SLICES: usize = 6;

/// A machine with two whole GPUs, and two in MIG mode.
static MACHINE: LazyLock<NodeObservation> = LazyLock::new(|| {
    let mixed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab/fake-nvml/machines/four-gpus-mig.yaml");
    let mut seen = machines::load(mixed).unwrap().observed;
    seen.gpus[1].mig = seen.gpus[0].mig.clone();
    seen
});

/// The state of a pod with a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodState {
    Waiting,
    Running,
    Ended,
}

struct World {
    random: Random,
    now: Duration,
    /// The door that the operator wants. It changes only when a process dies.
    door: Door,
    /// True if the operator wants GPUs to be shared. It changes at any time.
    is_shared: bool,
    /// Two flags of each GPU: true if it exists, and true if it is in MIG mode.
    gpus: [(bool, bool); GPUS as usize],
    kubelet: Kubelet,
    process: Option<Process>,
    disk: Disk,
    cluster: Cluster,
    /// The slices that the API server had at some moments, each with the number of the process that wrote it.
    slices: VecDeque<(u32, Vec<String>)>,
    /// The number of processes so far.
    processes: u32,
    /// The state of each claim's pod, by the claim's UID.
    claims: BTreeMap<String, PodState>,
    books: Books,
    made: u32,
    /// The number of times that each kind of step happened.
    counts: Counts,
    history: Vec<String>,
}

type Checked = Result<(), String>;
type Counts = BTreeMap<&'static str, u32>;

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: Random::new(seed),
            now: Duration::from_secs(1_000_000),
            door: Door::Plugin,
            is_shared: false,
            gpus: [(true, false), (true, false), (true, true), (true, true)],
            kubelet: Kubelet { runs: true, lists: 2, ..Kubelet::default() },
            process: None,
            disk: Disk::default(),
            cluster: Cluster::default(),
            slices: VecDeque::new(),
            processes: 0,
            claims: BTreeMap::new(),
            books: Books::default(),
            made: 0,
            counts: Counts::new(),
            history: Vec::new(),
        };
        world.start_process();
        world
    }

    fn note(&mut self, what: String) {
        self.history.push(format!("{} {what}", self.now.as_millis()));
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn observed(&self) -> Event {
        let mut seen = MACHINE.clone();
        for (gpu, (_, in_mig)) in seen.gpus.iter_mut().zip(self.gpus) {
            if !in_mig {
                gpu.mig = MACHINE.gpus[0].mig.clone();
            }
        }
        let mut there = self.gpus.iter().map(|(is_there, _)| *is_there);
        seen.gpus.retain(|_| there.next().unwrap());
        Event::Observed(Box::new(seen))
    }

    fn planned(&self) -> Event {
        let whole = SharedResource::new("nvidia.com/gpu".parse().unwrap(), 2);
        let sharing = self.is_shared.then(|| Sharing::new(SharingKind::TimeSlicing, vec![whole]));
        let (door, mig_strategy) = (self.door, MigStrategy::Mixed);
        Event::Planned(Box::new(ResourcePlan { door, mig_strategy, sharing, ..ResourcePlan::default() }))
    }

    fn start_process(&mut self) {
        // By now the kubelet has recorded what the previous process granted.
        self.kubelet.pods.values_mut().for_each(|pod| pod.granted = None);
        let mut events = vec![self.planned(), self.observed()];
        let at = usize::try_from(self.random.within(0..3)).unwrap();
        events.insert(at, self.disk.prepared());
        self.processes += 1;
        self.process = Some(Process::start(&self.disk, events, self.door == Door::Dra, self.now));
        self.kubelet.healthy.clear();
    }

    /// Checks the lists of devices, keeps a published slice, and checks that no hardware is offered through both doors.
    fn check(&mut self) -> Checked {
        let Some(process) = self.process.as_mut() else { return Ok(()) };
        process.check_lists()?;
        if let Some(slice) = process.published.take() {
            match self.slices.back_mut() {
                Some((by, last)) if *last == slice => *by = self.processes,
                _ => self.slices.push_back((self.processes, slice)),
            }
        }
        while self.slices.len() > KEPT_SLICES {
            self.slices.pop_front();
        }
        let Some((by, last)) = self.slices.back() else { return Ok(()) };
        // A process does not know what the previous one offered if the previous one's record never reached the disk.
        if *by != self.processes {
            return Ok(());
        }
        let through_dra: Vec<Part> = last.iter().map(|device| Part::of_device(device)).collect();
        for (id, _) in healthy(process) {
            let (part, _) = Part::of_id(&id);
            if let Some(twice) = through_dra.iter().find(|other| other.overlaps(part)) {
                return Err(format!("{id} is offered by the device plugin, and {twice:?} through DRA"));
            }
        }
        Ok(())
    }

    fn drain(&mut self) {
        if let Some(process) = &mut self.process {
            while let Some(event) = process.events.pop_front() {
                process.apply(event, self.now);
            }
        }
    }

    fn pick(&mut self, among: usize) -> Option<usize> {
        let among = u32::try_from(among).unwrap();
        (among > 0).then(|| usize::try_from(self.random.within(0..among)).unwrap())
    }

    fn pick_pod(&mut self, is_wanted: impl Fn(&Devices) -> bool) -> Option<String> {
        let pods: Vec<String> =
            self.kubelet.pods.iter().filter(|(_, pod)| is_wanted(pod)).map(|(name, _)| name.clone()).collect();
        self.pick(pods.len()).map(|at| pods[at].clone())
    }

    fn pick_claim(&mut self, is_wanted: impl Fn(&Self, &str, PodState) -> bool) -> Option<String> {
        let claims = self.claims.iter().filter(|(uid, state)| is_wanted(self, uid, **state));
        let claims: Vec<String> = claims.map(|(uid, _)| uid.clone()).collect();
        self.pick(claims.len()).map(|at| claims[at].clone())
    }

    fn pass(&mut self, time: Duration) -> Checked {
        let end = self.now + time;
        loop {
            self.drain();
            let booked = self.kubelet.pods.values().filter_map(|pod| Some(pod.granted? + BOOKED_WITHIN)).min();
            let deadline = self.process.as_ref().map(Process::deadline);
            let next = booked.into_iter().chain(deadline).min();
            let next = next.map_or(end, |next| next.clamp(self.now, end));
            self.now = next;
            for pod in self.kubelet.pods.values_mut() {
                pod.granted = pod.granted.filter(|granted| *granted + BOOKED_WITHIN > self.now);
            }
            if let Some(process) = &mut self.process {
                process.apply(Event::Tick, self.now);
                let is_late = process.request.as_ref().is_some_and(|(_, sent)| *sent + LATEST_LIST <= self.now);
                if is_late {
                    self.answer_list();
                }
                self.ask_for_list();
            }
            self.check()?;
            if next >= end {
                return Ok(());
            }
        }
    }

    /// The kubelet admits a pod with devices of its list, which may be old.
    fn admit(&mut self) -> Checked {
        let resources: Vec<String> = self.kubelet.healthy.keys().cloned().collect();
        let Some(at) = self.pick(resources.len()) else { return Ok(()) };
        let mut free = self.kubelet.free(&resources[at]);
        let mut ids = Vec::new();
        for _ in 0..1 + self.random.within(0..2) {
            if let Some(at) = self.pick(free.len()) {
                ids.push(free.swap_remove(at));
            }
        }
        let Some(process) = &self.process else { return Ok(()) };
        if ids.is_empty() || !self.kubelet.runs {
            return Ok(());
        }
        let request: Vec<DeviceId> = ids.iter().map(|id| DeviceId::from(id.clone())).collect();
        if process.snapshot.allocate(&resources[at].parse().unwrap(), &request).is_err() {
            self.count("refused pods");
            return Ok(());
        }
        self.made += 1;
        let (pod, by_init) = (format!("p{}", self.made), self.random.one_in(8));
        self.note(format!("{pod} is granted {ids:?}"));
        self.books.take(&pod, ids.iter().map(|id| Part::of_id(id)).collect())?;
        self.count("pods of the device plugin");
        let resource = resources[at].clone();
        let devices = Devices { resource, ids, by_init, granted: Some(self.now), ended: false };
        self.kubelet.pods.insert(pod, devices);
        Ok(())
    }

    /// The scheduler allocates devices that no claim has, from the latest slice or from an older one.
    fn schedule(&mut self) {
        let Some(at) = self.pick(self.slices.len()) else { return };
        let at = if self.random.one_in(4) { at } else { self.slices.len() - 1 };
        let taken: BTreeSet<&String> = self.cluster.values().flatten().collect();
        let mut free: Vec<String> =
            self.slices[at].1.iter().filter(|device| !taken.contains(device)).cloned().collect();
        let mut devices = Vec::new();
        for _ in 0..1 + self.random.within(0..2) {
            if let Some(at) = self.pick(free.len()) {
                devices.push(free.swap_remove(at));
            }
        }
        if !devices.is_empty() {
            self.made += 1;
            let uid = format!("c{}", self.made);
            self.note(format!("{uid} is allocated {devices:?}"));
            self.cluster.insert(uid.clone(), devices);
            self.claims.insert(uid, PodState::Waiting);
            self.count("scheduled claims");
        }
    }

    /// The kubelet asks linkwise to prepare the claim of a waiting pod.
    fn prepare(&mut self) -> Checked {
        let Some(uid) = self.pick_claim(|_, _, state| state == PodState::Waiting) else { return Ok(()) };
        let Some(process) = &mut self.process else { return Ok(()) };
        let Some(prepared) = process.prepare(&uid, &self.cluster, &mut self.disk, self.now) else {
            self.count("refused claims");
            if self.random.one_in(4) {
                self.end_claim(uid);
            }
            return Ok(());
        };
        self.note(format!("{uid}: {prepared:?}"));
        for device in &prepared.devices {
            let uuid = device.mig.as_ref().map_or(device.gpu.as_str(), |mig| mig.as_str());
            if Part::of_device(&device.device).uuid() != uuid {
                return Err(format!("{uid} gets {uuid} for {}", device.device));
            }
        }
        let devices: Vec<String> = prepared.devices.into_iter().map(|device| device.device).collect();
        self.books.take(&uid, devices.iter().map(|device| (Part::of_device(device), false)).collect())?;
        self.claims.insert(uid.clone(), PodState::Running);
        self.kubelet.claims.insert(uid, devices);
        self.count("prepared claims");
        Ok(())
    }

    /// The kubelet asks linkwise to unprepare the claim of a pod that has ended. The claim's controller then frees the
    /// devices.
    fn unprepare(&mut self) {
        if let Some(uid) = self.pick_claim(|_, _, state| state == PodState::Ended)
            && let Some(process) = &mut self.process
            && process.unprepare(&uid, &mut self.disk, self.now)
        {
            self.claims.remove(&uid);
            self.cluster.remove(&uid);
        }
    }

    /// A pod with a claim ends; a waiting pod is deleted.
    fn end_claim(&mut self, uid: String) {
        self.note(format!("{uid} ends"));
        self.books.release(&uid);
        self.kubelet.claims.remove(&uid);
        self.claims.insert(uid, PodState::Ended);
    }

    fn restart_kubelet(&mut self) {
        for pod in self.kubelet.restart() {
            self.books.release(&pod);
        }
        // A claim that was deleted by force has no pod in the API server, so the kubelet kills the pod's containers.
        let is_gone = |world: &Self, uid: &str, state| state == PodState::Running && !world.cluster.contains_key(uid);
        while let Some(uid) = self.pick_claim(is_gone) {
            self.end_claim(uid);
        }
    }

    fn answer_list(&mut self) {
        let Some(process) = &mut self.process else { return };
        let Some((held, _)) = process.request.take() else { return };
        process.listed(held, self.now);
    }

    fn ask_for_list(&mut self) {
        let Some(process) = &mut self.process else { return };
        if process.request.is_none() && self.now >= process.next_list {
            let listed = self.kubelet.list();
            process.request = Some((listed, self.now));
        }
    }

    fn change_plan(&mut self) {
        self.is_shared = !self.is_shared;
        self.note(format!("GPUs are shared: {}", self.is_shared));
        self.count("plans");
        let planned = self.planned();
        if let Some(process) = &mut self.process {
            process.events.push_back(planned);
        }
    }

    /// A GPU goes or comes back, or a GPU without a pod changes its MIG mode. The process applies this at once, because
    /// otherwise pods could be given a MIG device that no longer exists, with which no container starts.
    fn change_gpu(&mut self) {
        let gpu = self.random.of(&[0, 1, 2, 3]);
        let is_lost = self.random.one_in(4);
        let changes_mode = gpu >= 2 && !self.books.is_held(gpu) && self.random.one_in(8);
        let (is_there, in_mig) = &mut self.gpus[usize::from(gpu)];
        if !*is_there || is_lost {
            *is_there = !*is_there;
        } else if changes_mode {
            *in_mig = !*in_mig;
        } else {
            return;
        }
        self.note(format!("GPUs: {:?}", self.gpus));
        let observed = self.observed();
        if let Some(process) = &mut self.process {
            process.events.push_back(observed);
        }
        self.drain();
    }

    fn step(&mut self) -> Checked {
        match self.random.within(0..320) {
            0..2 => self.change_plan(),
            2..8 => self.change_gpu(),
            8..10 if self.process.is_some() => {
                self.note("linkwise dies".to_owned());
                self.count("deaths of linkwise");
                self.drain();
                self.process = None;
                self.kubelet.healthy.clear();
                if self.random.one_in(3) {
                    self.door = if self.door == Door::Dra { Door::Plugin } else { Door::Dra };
                    self.note(format!("the next has the door {:?}", self.door));
                    self.count("changes of doors");
                }
                if self.random.one_in(2) {
                    self.start_process();
                }
            }
            8..30 if self.process.is_none() => self.start_process(),
            10..12 => {
                self.note("the kubelet restarts".to_owned());
                self.restart_kubelet();
                self.kubelet.runs = !self.random.one_in(4);
                self.count("restarts of the kubelet");
            }
            12..30 => self.kubelet.runs = true,
            30..65 => {
                if let Some(process) = &self.process
                    && self.kubelet.runs
                    && process.is_informed
                {
                    self.kubelet.follow(&process.snapshot);
                }
            }
            65..85 => self.admit()?,
            85..88 => {
                if let Some(pod) = self.pick_pod(|pod| pod.granted.is_some()) {
                    self.kubelet.pods.get_mut(&pod).unwrap().granted = None;
                }
            }
            88..145 => {
                if let Some(pod) = self.pick_pod(|pod| pod.granted.is_none() && !pod.ended) {
                    self.note(format!("{pod} ends"));
                    self.books.release(&pod);
                    self.kubelet.pods.get_mut(&pod).unwrap().ended = true;
                }
            }
            145..170 => self.ask_for_list(),
            170..195 => self.answer_list(),
            195..220 => self.schedule(),
            220..250 => {
                if self.random.one_in(2) {
                    self.drain();
                }
                self.prepare()?;
            }
            250..258 => {
                if let Some(uid) = self.pick_claim(|_, _, state| state != PodState::Ended) {
                    self.end_claim(uid);
                }
            }
            // A claim is deleted once its pod has ended, or earlier by force.
            258..266 => {
                let is_forced = self.random.one_in(8);
                let gone = |_: &Self, _: &str, state| state == PodState::Ended || is_forced;
                if let Some(uid) = self.pick_claim(gone) {
                    self.note(format!("{uid} is deleted"));
                    self.cluster.remove(&uid);
                }
            }
            266..274 => self.unprepare(),
            274..277 => {
                if let Some(process) = &mut self.process {
                    process.sweep(&self.cluster, &mut self.disk, self.now);
                }
            }
            277..284 => self.keep(),
            284..300 => self.drain(),
            which => {
                let milliseconds = match which {
                    300..308 => 1..2_000,
                    308..316 => 2_000..20_000,
                    316..318 => 20_000..100_000,
                    _ => 100_000..800_000,
                };
                let time = self.random.milliseconds(milliseconds);
                self.pass(time)?;
            }
        }
        self.check()
    }

    /// Ends all pods and brings all GPUs back. Then each GPU has to be offered through the door that the plan names.
    fn settle(&mut self) -> Checked {
        self.gpus.iter_mut().for_each(|(is_there, _)| *is_there = true);
        (self.kubelet.runs, self.kubelet.lists) = (true, 1);
        if self.process.is_none() {
            self.start_process();
        }
        let observed = self.observed();
        self.process.as_mut().unwrap().events.push_back(observed);
        self.pass(BOOKED_WITHIN * 2)?;
        for (pod, devices) in &mut self.kubelet.pods {
            self.books.release(pod);
            devices.ended = true;
        }
        while let Some(uid) = self.pick_claim(|_, _, state| state != PodState::Ended) {
            self.end_claim(uid);
        }
        self.cluster.clear();
        while !self.claims.is_empty() {
            self.pass(Duration::from_millis(100))?;
            self.unprepare();
        }
        for _ in 0..3 {
            self.pass(LISTED_WITHIN * 2)?;
            let process = self.process.as_mut().unwrap();
            process.sweep(&self.cluster, &mut self.disk, self.now);
        }
        self.keep();
        let process = self.process.as_ref().unwrap();
        let parts = |door: Door| -> BTreeSet<Part> {
            let of_door = (0..GPUS).zip(self.gpus).filter(|_| self.door == door);
            of_door.flat_map(|(gpu, (_, in_mig))| Part::all_of(gpu, in_mig)).collect()
        };
        let dra: BTreeSet<Part> =
            self.slices.back().into_iter().flat_map(|(.., it)| it).map(|it| Part::of_device(it)).collect();
        let plugin: BTreeSet<Part> = healthy(process).map(|(id, _)| Part::of_id(&id).0).collect();
        if dra != parts(Door::Dra) || plugin != parts(Door::Plugin) {
            return Err(format!("in the end the plugin offers {plugin:?} and DRA {dra:?}; the door: {:?}", self.door));
        }
        for gpu in 0..GPUS {
            let uuid = Part { gpu, mig: None }.uuid().parse().unwrap();
            if process.snapshot.door(&uuid) != Some(self.door) {
                return Err(format!("the door of GPU {gpu} is {:?}", process.snapshot.door(&uuid)));
            }
        }
        if self.disk.claims.is_empty() { Ok(()) } else { Err(format!("left on the disk: {:?}", self.disk.claims)) }
    }

    /// Writes the health record to the disk.
    fn keep(&mut self) {
        if let Some(record) = self.process.as_mut().and_then(|process| process.record.take()) {
            self.disk.record = record;
        }
    }
}

/// The ids that the device plugin offers as healthy, each with its resource.
fn healthy(process: &Process) -> impl Iterator<Item = (String, String)> {
    process.snapshot.offers().resources().iter().flat_map(|(name, resource)| {
        let healthy = resource.devices().iter().filter(|(_, device)| device.health == Health::Healthy);
        healthy.map(|(id, _)| (id.to_string(), name.to_string()))
    })
}

/// Plays histories and panics at the first that fails. Returns the counts of each.
fn played(seeds: impl Iterator<Item = u64>) -> Vec<Counts> {
    let play = |seed| {
        let mut world = World::new(seed);
        let outcome = (0..STEPS).try_for_each(|_| world.step()).and_then(|()| world.settle());
        if let Err(wrong) = outcome {
            panic!("seed {seed}:\n{}\n{wrong}", world.history.join("\n"));
        }
        world.counts
    };
    seeds.map(play).collect()
}

#[test]
fn no_hardware_is_given_twice_or_lost() {
    let cores = thread::available_parallelism().unwrap().get();
    let played: Vec<Counts> = thread::scope(|scope| {
        let each = |core| scope.spawn(move || played((0..HISTORIES).skip(core).step_by(cores)));
        let threads: Vec<_> = (0..cores).map(each).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut counts = Counts::new();
    for (what, times) in played.into_iter().flatten() {
        *counts.entry(what).or_default() += times;
    }
    println!("{counts:#?}");
    assert!(counts.len() == 9 && counts.values().all(|times| *times > 50), "{counts:?}");
}
