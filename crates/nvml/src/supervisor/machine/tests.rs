//! The state machine in a simulated world: random agents, files and operators, simulated time, and the invariants.
//!
//! The world keeps its own records (the running processes, and the events that they sent) from the state machine's
//! actions and inputs alone. It reads only those parts of the state machine that the executor reads. `cases` has the
//! table of the meanings of failures.

mod cases;

use proptest::prelude::*;
use proptest::test_runner::Config;

use std::collections::BTreeMap;

use super::super::host_probe::HostProbe;
use super::*;
use crate::protocol::CalledGpu;
use crate::scan::GpuScan;
use linkwise_core::state::{HealthPoll, Reach};

const PAUSE: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_secs(10);

/// The longest time to recover in a working world: the longest pause before a start, and 30 s to start.
const RECOVERY: Duration = Duration::from_secs(60 + 30);

fn settings(fail_on_init_error: Option<bool>) -> Settings {
    Settings {
        unhealthy_when_away: true,
        fail_on_init_error,
        pause: PAUSE,
        grace: GRACE,
        trial: Duration::from_secs(60),
        bus_look: POLL,
        poll: POLL,
        call: Duration::from_secs(30),
    }
}

/// Something that happens in the world. A `usize` chooses among the agents to which it can happen.
#[derive(Clone, Debug)]
enum Happening {
    /// Milliseconds pass.
    Passes(u64),
    /// A scan by the agent lists this number of GPUs.
    Ready(usize, u32),
    CannotCount(usize),
    /// The agent polls all its GPUs; the given GPU, if any, is lost.
    Polls(usize, Option<u32>),
    Xid(usize, u32),
    /// A call about a GPU ends the agent.
    Crashes(usize, u32),
    /// The agent is killed, and its process stays.
    Hangs(usize),
    /// The agent finds no driver.
    Leaves(usize),
    /// Before NVML is initialised the agent crashes, or is killed for its memory and its process stays (true).
    Fails(usize, bool),
    ProcessEnds(usize),
    Released(bool),
    Others(Others),
    Probed(Bus),
    ProbeBreaksOff,
    HostScanned(bool),
}

#[derive(Clone, Copy, Debug)]
enum Bus {
    Unknown,
    Empty,
    Gpus,
    OtherDriver,
    NewDriver,
}

#[derive(Debug, Default)]
struct Process {
    ready: bool,
    /// The time since which the process sends no messages, because it hangs or was killed.
    silent: Option<Duration>,
    /// The number of GPUs that the process has listed.
    gpus: u32,
}

impl Process {
    fn is_running(&self) -> bool {
        self.silent.is_none()
    }
}

struct World {
    machine: DriverMachine,
    now: Duration,
    /// Processes that have not ended.
    processes: BTreeMap<AgentId, Process>,
    released: bool,
    probing: bool,
    scanning: bool,
    /// The time before which no agent may be started.
    not_before: Duration,
    /// The number of loads of the driver.
    loads: u64,
    published: BTreeSet<GpuUuid>,
    /// The GPUs of the latest scan.
    listed: BTreeSet<GpuUuid>,
    /// The events of each GPU, by number.
    sent: BTreeMap<GpuUuid, Vec<u64>>,
    emitted: BTreeMap<GpuUuid, Vec<u64>>,
    events: u64,
    /// The time since which no agent is ready, although one was.
    down_since: Option<Duration>,
    has_worked: bool,
    /// True once an agent of this process or of the previous one has listed GPUs.
    has_listed: bool,
    away: bool,
    failed: bool,
    may_end: bool,
    /// True if NVML's last answer was that there is no driver, or no GPU.
    absent: bool,
}

fn uuid(number: u32) -> GpuUuid {
    format!("GPU-{number}").parse().unwrap()
}

fn scan(count: Option<u32>) -> NodeScan {
    let gpu = |number| GpuScan {
        minor: Ok(Some(number)),
        ..GpuScan::bare(number, uuid(number), format!("0000:0{number}:00.0").parse().unwrap())
    };
    let gpus = (0..count.unwrap_or(0)).map(gpu).collect();
    NodeScan { count, ..NodeScan::bare(gpus) }
}

impl World {
    fn new(fail_on_init_error: Option<bool>) -> Self {
        let mut world = Self {
            machine: DriverMachine::new(settings(fail_on_init_error)),
            now: Duration::from_secs(1000),
            processes: BTreeMap::new(),
            released: false,
            probing: false,
            scanning: false,
            not_before: Duration::ZERO,
            loads: 1,
            published: BTreeSet::new(),
            listed: BTreeSet::new(),
            sent: BTreeMap::new(),
            emitted: BTreeMap::new(),
            events: 0,
            down_since: None,
            has_worked: false,
            has_listed: false,
            away: false,
            failed: false,
            may_end: true,
            absent: false,
        };
        world.feed(Input::Released(false));
        world
    }

    fn feed(&mut self, input: Input) {
        if self.failed {
            return;
        }
        for action in self.machine.step(input, self.now) {
            self.perform(action);
        }
        self.check();
    }

    fn running(&self) -> usize {
        self.processes.values().filter(|process| process.is_running()).count()
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Start { id, .. } => {
                assert!(!self.released, "an agent is started while the driver is released");
                assert_eq!(self.running(), 0, "two agents at once");
                assert!(self.now >= self.not_before, "no pause after a failure");
                let ending = self.processes.len();
                assert!(ending <= 2, "an agent is started though {ending} processes have not ended");
                let waited = |process: &Process| process.silent.is_some_and(|since| self.now >= since + PAUSE);
                assert!(self.processes.values().all(waited), "an agent starts beside a process, without a pause");
                assert!(self.processes.insert(id, Process::default()).is_none(), "an id is used twice");
            }
            Action::Rescan(id) => assert!(self.processes[&id].is_running(), "an agent that is not running has to scan"),
            Action::Kill(id) => {
                let process = self.processes.get_mut(&id).expect("only a running agent can be killed");
                assert_eq!(process.silent.replace(self.now), None, "killed twice");
            }
            Action::Probe => assert!(!std::mem::replace(&mut self.probing, true), "two probes at once"),
            Action::ScanHost => assert!(!std::mem::replace(&mut self.scanning, true), "two scans at once"),
            Action::Emit(Event::Observed(node)) => self.published.extend(node.gpus.into_iter().map(|gpu| gpu.uuid)),
            Action::Emit(Event::Xid { gpu, code, .. }) => {
                let is_gone = !self.listed.contains(&gpu);
                assert!(self.published.contains(&gpu) || is_gone, "an event precedes the GPU it is about");
                self.emitted.entry(gpu).or_default().push(code);
            }
            Action::Emit(Event::DriverAway(..)) => {
                assert!(!std::mem::replace(&mut self.away, true), "an outage is reported twice");
                assert!(self.down_since.is_some_and(|since| self.now >= since + GRACE), "reported too early");
            }
            Action::Emit(Event::DriverBack) => {
                assert!(std::mem::replace(&mut self.away, false), "the end of an unreported outage is reported");
            }
            Action::Fail(cause) => {
                assert!(!self.has_listed, "linkwise ends although an agent has listed GPUs: {cause}");
                assert!(
                    !self.has_worked || cause.contains("lists no GPU"),
                    "linkwise ends though an agent has worked: {cause}"
                );
                assert!(self.may_end, "linkwise ends although another may hand over to it: {cause}");
                self.failed = true;
            }
            Action::Idle(Idle::NoGpu(reason)) => assert!(self.absent, "nothing says that there is no GPU: {reason}"),
            Action::Emit(_) | Action::Idle(_) | Action::CountEnd(_) | Action::CountFailure | Action::Unheard(_) => {}
        }
    }

    fn check(&mut self) {
        let is_up = self.processes.values().any(|process| process.ready && process.is_running());
        assert_eq!(self.machine.answering().is_some(), is_up, "{:?}", self.processes);
        assert!(!self.released || self.running() == 0, "an agent works while the driver is released");
        self.has_worked |= is_up;
        self.down_since = if is_up { None } else { self.down_since.or(self.has_worked.then_some(self.now)) };
        assert_eq!(self.machine.is_outage(), self.away, "outage and reports differ");
        assert_eq!(self.machine.unended(), self.processes.len() - self.running());
        // The events of each GPU are emitted once and in order. The last ones may wait for the scan that lists the GPU.
        for (gpu, emitted) in &self.emitted {
            assert!(self.sent[gpu].starts_with(emitted), "{gpu}: sent {:?}, emitted {emitted:?}", self.sent[gpu]);
        }
    }

    /// The agent that a number chooses among those that fit.
    fn chosen(&self, number: usize, of: impl Fn(&Process) -> bool) -> Option<AgentId> {
        let among: Vec<AgentId> = self.processes.iter().filter(|(_, it)| of(it)).map(|(id, _)| *id).collect();
        number.checked_rem(among.len()).map(|at| among[at])
    }

    fn running_agent(&self, number: usize) -> Option<AgentId> {
        self.chosen(number, Process::is_running)
    }

    /// Ends an agent. If it hangs, it is killed and its process stays.
    fn end(&mut self, id: AgentId, blamed: Option<u32>, reached: Reached, hangs: bool) {
        let blamed = blamed.map(|index| CalledGpu { place: Place { index, of: 4 }, uuid: None });
        self.absent = reached == Reached::NoDriver;
        self.not_before = self.now + PAUSE;
        self.processes.get_mut(&id).unwrap().silent = Some(self.now);
        self.feed(Input::Ended(id, AgentEnd { cause: Some("crashed"), why: "it ended".to_owned(), blamed, reached }));
        if !hangs {
            self.processes.remove(&id);
            self.feed(Input::Reaped(id));
        }
    }

    fn bus(&mut self, bus: Bus) -> HostFingerprint {
        let mut host = HostProbe::new("/nonexistent".into()).look().unwrap();
        let gpus = |driver: Option<&str>| {
            let gpu = |number| (format!("0000:0{number}:00.0").parse().unwrap(), driver.map(str::to_owned));
            Some((0..4).map(gpu).collect())
        };
        host.bus = match bus {
            Bus::Unknown => None,
            Bus::Empty => Some(BTreeMap::new()),
            Bus::Gpus | Bus::NewDriver => gpus(None),
            Bus::OtherDriver => gpus(Some("vfio-pci")),
        };
        self.loads += u64::from(matches!(bus, Bus::NewDriver));
        host.identity.driver = Some(format!("580, load {}", self.loads));
        host
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Passes(millis) => {
                let until = self.now + Duration::from_millis(millis);
                let (mut at, mut ticks) = (self.now, 0);
                while let Some(wake) = self.machine.wake().filter(|wake| *wake <= until && !self.failed) {
                    self.now = self.now.max(wake);
                    ticks = if self.now == at { ticks + 1 } else { 0 };
                    at = self.now;
                    assert!(ticks < 10, "the timer spins");
                    self.feed(Input::Tick);
                }
                self.now = until;
                let overdue = self.down_since.is_some_and(|since| self.now >= since + GRACE);
                assert!(!overdue || self.away || self.failed, "an outage is not reported");
            }
            Happening::Ready(number, gpus) => {
                let Some(id) = self.running_agent(number) else { return };
                let process = self.processes.get_mut(&id).unwrap();
                process.gpus = gpus;
                process.ready = true;
                self.ready(id, gpus);
            }
            Happening::CannotCount(number) => {
                let Some(id) = self.chosen(number, |process| process.is_running() && !process.ready) else { return };
                self.processes.get_mut(&id).unwrap().ready = true;
                self.feed(Input::Message(id, FromAgent::Ready(Box::new(scan(None)))));
            }
            Happening::Polls(number, lost) => {
                let Some(id) = self.chosen(number, |process| process.is_running() && process.ready) else { return };
                let reach = |gpu| match lost {
                    Some(lost) if gpu == lost => Reach::Lost { call: String::new() },
                    _ => Reach::Answers,
                };
                let poll = |gpu| (uuid(gpu), HealthPoll { reach: reach(gpu), ..HealthPoll::default() });
                let gpus = (0..self.processes[&id].gpus).map(poll).collect();
                let polled = FromAgent::Polled { gpus, missing: Vec::new(), unheard: 0, waiting_ms: 0 };
                self.feed(Input::Message(id, polled));
            }
            Happening::Xid(number, gpu) => {
                let Some(id) = self.chosen(number, |it| it.is_running() && it.ready && it.gpus > 0) else { return };
                let gpu = uuid(gpu % self.processes[&id].gpus);
                let code = self.events;
                self.events += 1;
                self.sent.entry(gpu.clone()).or_default().push(code);
                let xid = FromAgent::Xid { gpu, code, gpu_instance: None, compute_instance: None };
                self.feed(Input::Message(id, xid));
            }
            Happening::Crashes(number, gpu) => {
                if let Some(id) = self.running_agent(number) {
                    self.end(id, Some(gpu), Reached::Nvml, false);
                }
            }
            Happening::Hangs(number) => {
                if let Some(id) = self.running_agent(number) {
                    self.end(id, None, Reached::Nvml, true);
                }
            }
            Happening::Leaves(number) => {
                if let Some(id) = self.running_agent(number) {
                    self.end(id, None, Reached::NoDriver, false);
                }
            }
            Happening::Fails(number, memory) => {
                if let Some(id) = self.running_agent(number) {
                    let reached = if memory { Reached::OverMemory } else { Reached::Failure };
                    self.end(id, None, reached, memory);
                }
            }
            Happening::ProcessEnds(number) => {
                let Some(id) = self.chosen(number, |process| !process.is_running()) else { return };
                self.processes.remove(&id);
                self.feed(Input::Reaped(id));
            }
            Happening::Others(others) => {
                self.may_end = others == Others::None;
                self.has_listed |= matches!(others, Others::HandedOver { .. });
                if let Others::HandedOver { away } = others
                    && !std::mem::replace(&mut self.has_worked, true)
                {
                    self.down_since = Some(if away { self.now.saturating_sub(GRACE) } else { self.now });
                }
                self.feed(Input::Others(others));
            }
            Happening::Released(released) => {
                self.released = released;
                self.not_before = Duration::ZERO;
                self.feed(Input::Released(released));
            }
            Happening::Probed(bus) if std::mem::take(&mut self.probing) => {
                let host = self.bus(bus);
                // After a change of the driver or of the bus no pause is needed.
                self.not_before = Duration::ZERO;
                self.feed(Input::Probed(Some(host)));
            }
            Happening::ProbeBreaksOff if std::mem::take(&mut self.probing) => self.feed(Input::Probed(None)),
            Happening::HostScanned(ok) if std::mem::take(&mut self.scanning) => {
                self.feed(Input::HostScanned(ok.then(Default::default)));
            }
            Happening::Probed(_) | Happening::ProbeBreaksOff | Happening::HostScanned(_) => {}
        }
    }

    fn ready(&mut self, id: AgentId, gpus: u32) {
        self.absent = gpus == 0;
        self.listed = (0..gpus).map(uuid).collect();
        self.has_listed |= gpus > 0;
        // If the scan is of no use, the agent counts as failed, so a pause has to follow.
        self.not_before = self.now + PAUSE;
        self.feed(Input::Message(id, FromAgent::Ready(Box::new(scan(Some(gpus))))));
        if self.machine.answering().is_some() {
            self.not_before = Duration::ZERO;
        }
    }

    /// Makes everything work at once from now on.
    fn recover(&mut self) {
        self.happens(Happening::Released(false));
        let end = self.now + RECOVERY;
        while self.now < end && !self.failed {
            for id in self.processes.keys().copied().collect::<Vec<_>>() {
                let process = &self.processes[&id];
                if !process.is_running() {
                    self.processes.remove(&id);
                    self.feed(Input::Reaped(id));
                } else if !process.ready {
                    let process = self.processes.get_mut(&id).unwrap();
                    (process.ready, process.gpus) = (true, 4);
                    self.ready(id, 4);
                }
            }
            for happening in [Happening::Probed(Bus::Gpus), Happening::HostScanned(true)] {
                self.happens(happening);
            }
            self.happens(Happening::Passes(500));
        }
    }
}

fn happening() -> impl Strategy<Value = Happening> {
    let agent = || 0_usize..4;
    let bus = prop_oneof![
        1 => Just(Bus::Unknown),
        1 => Just(Bus::Empty),
        6 => Just(Bus::Gpus),
        1 => Just(Bus::OtherDriver),
        1 => Just(Bus::NewDriver),
    ];
    let others = prop_oneof![
        Just(Others::None),
        Just(Others::MayHandOver),
        any::<bool>().prop_map(|away| Others::HandedOver { away }),
    ];
    prop_oneof![
        6 => (0_u64..2000).prop_map(Happening::Passes),
        2 => (0_u64..200_000).prop_map(Happening::Passes),
        8 => (agent(), 0_u32..5).prop_map(|(agent, gpus)| Happening::Ready(agent, gpus)),
        1 => agent().prop_map(Happening::CannotCount),
        4 => (agent(), prop::option::weighted(0.3, 0_u32..4)).prop_map(|(agent, lost)| Happening::Polls(agent, lost)),
        5 => (agent(), 0_u32..4).prop_map(|(agent, gpu)| Happening::Xid(agent, gpu)),
        2 => (agent(), 0_u32..4).prop_map(|(agent, gpu)| Happening::Crashes(agent, gpu)),
        1 => agent().prop_map(Happening::Hangs),
        1 => agent().prop_map(Happening::Leaves),
        1 => (agent(), any::<bool>()).prop_map(|(agent, memory)| Happening::Fails(agent, memory)),
        3 => agent().prop_map(Happening::ProcessEnds),
        2 => any::<bool>().prop_map(Happening::Released),
        1 => others.prop_map(Happening::Others),
        8 => bus.prop_map(Happening::Probed),
        1 => Just(Happening::ProbeBreaksOff),
        5 => any::<bool>().prop_map(Happening::HostScanned),
    ]
}

proptest! {
    #![proptest_config(Config { cases: 256, failure_persistence: None, ..Config::default() })]

    /// The invariants hold after every input. Then the world recovers, an agent works in time, and no event is lost.
    #[test]
    fn invariants_hold_and_an_agent_works_in_the_end(
        story in prop::collection::vec(happening(), 0..120),
        fail_on_init_error in prop_oneof![Just(None), Just(Some(false)), Just(Some(true))],
    ) {
        let mut world = World::new(fail_on_init_error);
        for happening in story {
            world.happens(happening);
        }
        world.recover();
        prop_assert!(world.failed || world.machine.answering().is_some(), "no agent works");
        let (emitted, sent) = (&world.emitted, &world.sent);
        prop_assert!(!world.away && (world.failed || emitted == sent), "{emitted:?} {sent:?}");
    }
}

/// A world in which one agent works, and its GPUs are published.
fn working() -> World {
    let mut world = World::new(None);
    for happening in
        [Happening::Passes(0), Happening::Probed(Bus::Gpus), Happening::Ready(0, 4), Happening::HostScanned(true)]
    {
        world.happens(happening);
    }
    assert!(world.machine.answering().is_some() && world.published.len() == 4);
    world
}

impl World {
    /// Ends every process that has to end, and has the next agent list the GPUs.
    fn settle(&mut self, gpus: u32) {
        while let Some(ending) = self.chosen(0, |process| !process.is_running()) {
            self.processes.remove(&ending);
            self.feed(Input::Reaped(ending));
        }
        self.happens(Happening::Passes(0));
        self.happens(Happening::Probed(Bus::Gpus));
        if self.machine.answering().is_none() {
            self.happens(Happening::Ready(0, gpus));
        }
        self.happens(Happening::HostScanned(true));
    }

    fn newest(&self) -> AgentId {
        *self.processes.keys().last().unwrap()
    }
}

#[test]
fn lost_gpu_is_retried_after_growing_pauses() {
    let mut world = working();
    let (mut starts, mut newest) = (Vec::new(), 1);
    let begin = world.now;
    let passes = |world: &mut World, lost| {
        world.happens(Happening::Passes(10_000));
        world.settle(4);
        world.happens(Happening::Polls(0, lost));
        world.happens(Happening::Probed(Bus::Gpus));
    };
    while world.now < begin + Duration::from_secs(9 * 3600) {
        passes(&mut world, Some(3));
        if world.newest() != newest {
            let minutes = world.now.saturating_sub(begin).as_secs() / 60;
            (newest, starts) = (world.newest(), [starts, vec![minutes]].concat());
        }
    }
    let pauses: Vec<u64> = starts.windows(2).map(|two| two[1] - two[0]).collect();
    assert_eq!(pauses[..6], [2, 4, 8, 16, 32, 60], "{starts:?}");
    assert!(starts[0] == 1 && pauses[6..].iter().all(|pause| *pause == 60), "{starts:?}");
    // Once the GPU answers, no agent is started. After a second loss the pauses begin again.
    for _ in 0..400 {
        passes(&mut world, None);
    }
    assert_eq!(world.newest(), newest);
    for _ in 0..9 {
        passes(&mut world, Some(3));
    }
    assert_eq!(world.newest(), newest + 1);
}

#[test]
fn gpu_on_the_bus_but_unlisted_gets_a_new_agent() {
    let mut world = working();
    // An agent crashes; the next one counts one GPU less, although all are on the bus.
    world.happens(Happening::Crashes(0, 0));
    world.happens(Happening::Passes(2000));
    world.settle(3);
    for _ in 0..6 {
        world.happens(Happening::Polls(0, None));
        world.happens(Happening::Probed(Bus::Gpus));
        assert_eq!(world.running(), 1);
        world.happens(Happening::Passes(10_000));
    }
    assert_eq!(world.running(), 0, "the agent was not killed, although a new one may list the GPU");
}

#[test]
fn killed_agents_that_linger_delay_the_next_start() {
    let mut world = working();
    for _ in 0..3 {
        world.happens(Happening::Hangs(0));
        world.happens(Happening::Passes(60_000));
        world.happens(Happening::Probed(Bus::Gpus));
        world.happens(Happening::Ready(0, 4));
    }
    assert_eq!((world.machine.unended(), world.running()), (3, 0));
    world.happens(Happening::Passes(3_600_000));
    assert_eq!(world.running(), 0);
    world.happens(Happening::ProcessEnds(0));
    world.happens(Happening::Probed(Bus::Gpus));
    assert_eq!(world.running(), 1);
}

/// A GPU that hangs agents would hang each agent that tries it, until no more agents could be started.
#[test]
fn agent_is_not_replaced_while_another_one_hangs() {
    let mut world = working();
    for _ in 0..2 {
        let id = world.running_agent(0).unwrap();
        world.end(id, Some(3), Reached::Nvml, true);
        world.happens(Happening::Passes(60_000));
        world.happens(Happening::Probed(Bus::Gpus));
        world.happens(Happening::Ready(0, 4));
    }
    world.happens(Happening::Polls(0, None));
    let works = world.machine.answering();
    assert!(works.is_some() && world.machine.unended() == 2);
    world.happens(Happening::Passes(3 * 3_600_000));
    assert_eq!(world.machine.answering(), works, "a trial although two agents hang");
    world.happens(Happening::ProcessEnds(0));
    assert_eq!(world.machine.answering(), works, "a trial although one agent hangs");
    world.happens(Happening::ProcessEnds(0));
    assert_eq!((world.machine.answering(), world.running()), (None, 0), "the GPU is not tried");
}
