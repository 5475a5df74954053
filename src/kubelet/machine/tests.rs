//! The machine in a simulated world: random events, simulated time, and what must hold whatever comes.
//!
//! The world below keeps its own books (which socket of ours the kubelet knows, which connections are open) from the
//! machine's actions and its own events alone; nothing here reads the machine's state but its phase and its timer.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;

mod beside;

const LIMITS: Limits = Limits {
    register: Duration::from_secs(15),
    stream: Duration::from_secs(10),
    confirm: Duration::from_secs(10),
    close: Duration::from_millis(500),
    longest_pause: Duration::from_secs(16),
};

const NOT_LISTED: &str = "PodResources does not list our devices, 10s after the kubelet opened ListAndWatch";

/// From any state, with a world that works: the longest deadline, then a close, then the longest pause, and the calls.
const RECOVERY: Duration = Duration::from_secs(15 + 1 + 16 + 1);
/// What a benign world takes for anything.
const BRISK: Duration = Duration::from_millis(10);

/// What can happen to us.
#[derive(Clone, Debug)]
enum Happening {
    Passes(u64),
    KubeletGone,
    KubeletNew,
    KubeletTouched,
    OwnGone,
    BindEnds(bool),
    /// As `BindEnds(true)`, with another plugin there.
    BindsBeside,
    /// The other plugin ends: its socket at once, its stream after so many milliseconds.
    PredecessorEnds(u64),
    UnnameEnds(bool),
    /// Another plugin registers after us, and ends.
    SuccessorEnds,
    RegisterEnds(bool),
    StreamOpens,
    StreamEnds,
    AskEnds(Listing),
    ServerEnds,
    ConnectionsClose,
    /// A registration that goes well.
    AllWell,
    /// The next time PodResources is asked, and what it answers.
    NextAsk(Listing),
    /// An input that the machine does not expect.
    Spurious(u8),
}

/// A socket of ours.
#[derive(Clone, Copy, Debug, Default)]
struct Socket {
    number: u64,
    stands: bool,
    /// Its server runs.
    served: bool,
    ended: bool,
    /// The kubelet that was there when it was registered.
    kubelet: Option<u64>,
    registered: bool,
    /// Of the kubelet's.
    streams: usize,
    /// What PodResources answered last: `Missing` twice in a row, with the last time it did not.
    missing: u32,
    asked: bool,
}

/// The plugin that was there before.
#[derive(Clone, Copy, Debug, Default)]
struct Predecessor {
    stands: bool,
    /// When the kubelet sees its stream end.
    stream_ends: Option<Duration>,
    streams: bool,
}

struct World {
    machine: Machine,
    now: Duration,
    kubelet: Option<u64>,
    /// The newest kubelet so far.
    kubelets: u64,
    /// The socket that is bound, or still has connections.
    socket: Option<Socket>,
    sockets: u64,
    binding: bool,
    registering: Option<u64>,
    asking: bool,
    unnaming: bool,
    predecessor: Predecessor,
    /// Whether the other plugin's end may end our session: it was not there any more when our socket was bound, or the
    /// kubelet did not forget the name.
    kept: bool,
    /// Kubelets up to 1.36: whether a client of ours is under the resource's name, which the end of any stream ends.
    named: bool,
    /// When each thing was done, for storms.
    done: Vec<(Duration, Action)>,
    /// The phase, and since when.
    phase: (Phase, Duration),
    jitter: u64,
}

impl World {
    fn new(jitter: u64) -> Self {
        Self {
            machine: Machine::new(LIMITS),
            now: Duration::ZERO,
            kubelet: None,
            kubelets: 0,
            socket: None,
            sockets: 0,
            binding: false,
            registering: None,
            asking: false,
            unnaming: false,
            predecessor: Predecessor::default(),
            named: false,
            kept: false,
            done: Vec::new(),
            phase: (Phase::WaitingForKubelet, Duration::ZERO),
            jitter,
        }
    }

    fn feed(&mut self, input: Input) {
        self.jitter = self.jitter.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = Moment { now: self.now, jitter: self.jitter >> 33 };
        let (machine, actions) = self.machine.clone().step(input, moment);
        self.machine = machine;
        for action in actions {
            self.done.push((self.now, action.clone()));
            self.perform(action);
        }
        self.check();
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Bind => {
                assert!(self.socket.is_none(), "a new socket while connections to the old one are open");
                assert!(!self.binding, "two sockets at once");
                self.binding = true;
            }
            Action::Register | Action::Renew => {
                let beside = self.machine.phase() == Phase::Beside;
                let socket = self.socket.as_mut().expect("registers a socket that is served");
                socket.kubelet = self.kubelet;
                assert!(!socket.ended && (beside || !socket.registered), "registers what has ended, or twice");
                assert_eq!(beside, action == Action::Renew);
                assert!(self.kubelet.is_some(), "registers without a kubelet");
                self.registering = Some(socket.number);
            }
            Action::Ask => {
                assert!(!self.asking, "asks twice at once");
                self.asking = true;
            }
            Action::Unname => {
                assert!(!self.unnaming && self.socket.is_some_and(|socket| socket.registered), "detaches too early");
                self.unnaming = true;
            }
            Action::End => {
                (self.binding, self.registering, self.asking, self.unnaming) = (false, None, false, false);
                if let Some(socket) = &mut self.socket {
                    (socket.ended, socket.stands) = (true, false);
                }
            }
            Action::Cut => {
                assert!(self.socket.is_some_and(|socket| socket.ended), "cuts what has not ended");
                self.close();
            }
            Action::ReportUnnamed(result) => self.kept |= result.is_err(),
            Action::ReportWaiting(_) | Action::ReportRegistered(_) | Action::ReportEnded(_) => {}
        }
    }

    fn check(&mut self) {
        let phase = self.machine.phase();
        if phase != self.phase.0 {
            self.phase = (phase, self.now);
        }
        let longest = match phase {
            Phase::Registering => LIMITS.register,
            Phase::WaitingForStream => LIMITS.stream,
            Phase::Confirming => LIMITS.confirm,
            Phase::Unnaming => LIMITS.register,
            Phase::Ending => LIMITS.close,
            Phase::Pausing => LIMITS.longest_pause,
            Phase::WaitingForKubelet | Phase::Binding | Phase::Beside | Phase::Serving => Duration::MAX,
        };
        assert!(self.machine.is_over() || self.now.saturating_sub(self.phase.1) <= longest, "too long in {phase:?}");
        if self.machine.phase().is_serving() {
            let socket = self.socket.expect("ready without a socket");
            assert!(socket.stands, "ready without a socket that anybody could dial");
            assert!(socket.served, "ready without a server");
            assert!(self.kubelet.is_some() && socket.kubelet == self.kubelet, "ready with a kubelet that is gone");
            assert!(!socket.ended, "ready while the session ends");
            assert!(socket.registered, "ready, and this very socket was not registered");
            assert!(socket.streams > 0, "ready without a stream of the kubelet's");
            assert!(socket.asked, "ready before PodResources was asked");
            assert!(socket.missing < 2, "ready though PodResources does not list our devices");
        }
        if let Some(wake) = self.machine.wake() {
            let longest = LIMITS.register.max(LIMITS.longest_pause).max(Duration::from_secs(30));
            assert!(wake <= self.now + longest, "waits for longer than anything may take: {wake:?}");
        }
        if self.machine.phase() == Phase::Pausing {
            let until = self.machine.wake().expect("a pause ends");
            assert!(until <= self.now + LIMITS.longest_pause, "a pause beyond the longest");
        }
    }

    /// All connections to a socket that has ended are closed.
    fn close(&mut self) {
        if self.socket.is_some_and(|socket| socket.ended) {
            self.socket = None;
            // Told later, like everything else.
        }
    }

    fn check_files(&mut self) {
        let kubelet = self.kubelet.map(FileId::numbered).ok_or_else(|| "there is none".to_owned());
        let own = self.socket.is_some_and(|socket| socket.stands);
        let predecessor = self.predecessor.stands;
        self.feed(Input::Checked { kubelet, own, predecessor });
    }

    /// The timer, if it is due.
    fn tick(&mut self) {
        if self.machine.wake().is_some_and(|wake| wake <= self.now) {
            self.feed(Input::Tick);
        }
    }

    fn streams(&mut self, change: impl FnOnce(usize) -> usize) {
        let Some(socket) = self.socket.as_mut().filter(|socket| !socket.ended) else { return };
        let open = change(socket.streams);
        socket.streams = open;
        self.feed(Input::Streams(open));
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Passes(millis) => {
                let until = self.now + Duration::from_millis(millis);
                // Timers go off when they are due, a few at most before something else has to happen.
                for _ in 0..1000 {
                    match self.machine.wake().filter(|wake| *wake <= until) {
                        Some(wake) => self.now = self.now.max(wake),
                        None => break,
                    }
                    self.predecessor_ends();
                    self.tick();
                    self.closed();
                }
                self.now = until;
                self.predecessor_ends();
            }
            Happening::BindsBeside => {
                if self.binding && self.predecessor.stream_ends.is_none() {
                    self.predecessor = Predecessor { stands: true, stream_ends: None, streams: true };
                }
                self.happens(Happening::BindEnds(true));
            }
            Happening::PredecessorEnds(after) => {
                if std::mem::take(&mut self.predecessor.stands) {
                    self.predecessor.stream_ends = Some(self.now + Duration::from_millis(after));
                    self.check_files();
                }
            }
            Happening::UnnameEnds(ok) => {
                if std::mem::take(&mut self.unnaming) {
                    self.named &= !ok;
                    self.kept |= !ok;
                    self.feed(Input::Unnamed(if ok { Ok(()) } else { Err("not today".to_owned()) }));
                }
            }
            Happening::SuccessorEnds => {
                self.named = false;
                self.feed(Input::Renew);
            }
            Happening::KubeletGone => {
                self.kubelet = None;
                self.check_files();
            }
            Happening::KubeletNew => {
                self.kubelets += 1;
                self.kubelet = Some(self.kubelets);
                self.check_files();
            }
            Happening::KubeletTouched => self.check_files(),
            Happening::OwnGone => {
                if let Some(socket) = &mut self.socket {
                    socket.stands = false;
                }
                self.check_files();
            }
            Happening::BindEnds(ok) => {
                if std::mem::take(&mut self.binding) {
                    let result = if ok {
                        self.sockets += 1;
                        self.kept = !self.predecessor.stands;
                        self.socket =
                            Some(Socket { number: self.sockets, stands: true, served: true, ..Socket::default() });
                        Ok(self.predecessor.stands)
                    } else {
                        Err("the disk is full".to_owned())
                    };
                    self.feed(Input::Bound(result));
                }
            }
            Happening::RegisterEnds(ok) => {
                if let (Some(number), Some(socket)) = (self.registering.take(), &mut self.socket) {
                    assert_eq!(number, socket.number);
                    socket.registered = ok;
                    self.named = ok;
                    self.feed(Input::Registered(if ok { Ok(()) } else { Err("not today".to_owned()) }));
                }
            }
            Happening::StreamOpens => self.streams(|open| open + 1),
            Happening::StreamEnds => self.streams(|open| open.saturating_sub(1)),
            Happening::AskEnds(listing) => {
                if std::mem::take(&mut self.asking)
                    && let Some(socket) = &mut self.socket
                {
                    // In doubt for one answer while we serve, and for none before.
                    let served = self.machine.phase().is_serving();
                    socket.missing = match listing {
                        Listing::Missing if served => socket.missing + 1,
                        Listing::Missing => 2,
                        Listing::Listed | Listing::Unknown => 0,
                    };
                    socket.asked = true;
                    self.feed(Input::Listed(listing));
                }
            }
            Happening::ServerEnds => {
                if let Some(socket) = &mut self.socket {
                    socket.served = false;
                    self.feed(Input::ServerEnded("no more".to_owned()));
                }
            }
            Happening::ConnectionsClose => {
                self.close();
                self.closed();
            }
            Happening::AllWell => {
                self.happens(Happening::BindEnds(true));
                self.happens(Happening::StreamOpens);
                self.happens(Happening::RegisterEnds(true));
                self.happens(Happening::AskEnds(Listing::Listed));
                self.happens(Happening::UnnameEnds(true));
            }
            Happening::NextAsk(listing) => {
                let wait = self.machine.wake().map_or(Duration::ZERO, |wake| wake.saturating_sub(self.now));
                self.happens(Happening::Passes(u64::try_from(wait.as_millis()).unwrap() + 1));
                self.happens(Happening::AskEnds(listing));
            }
            Happening::Spurious(which) => self.spurious(which),
        }
        self.closed();
    }

    /// A kubelet up to 1.36 sees the end of the other plugin's stream, and ends the client under the name.
    fn predecessor_ends(&mut self) {
        if self.predecessor.streams && self.predecessor.stream_ends.is_some_and(|end| end <= self.now) {
            self.predecessor = Predecessor::default();
            if std::mem::take(&mut self.named) {
                assert!(!self.machine.phase().is_serving() || self.kept, "did not outlast the plugin before us");
                self.streams(|_| 0);
            }
        }
    }

    /// Tells that the connections of an ended session are closed, once.
    fn closed(&mut self) {
        if self.machine.phase() == Phase::Ending && self.socket.is_none() {
            self.feed(Input::Closed);
        }
    }

    /// An unexpected answer, which must not change the stage.
    fn spurious(&mut self, which: u8) {
        let input = match which % 7 {
            0 if self.registering.is_none() => Input::Registered(Ok(())),
            1 if self.registering.is_none() => Input::Registered(Err("late".to_owned())),
            2 if !self.asking => Input::Listed(Listing::Listed),
            3 if !self.asking => Input::Listed(Listing::Missing),
            4 if !self.binding => Input::Bound(Ok(true)),
            5 if !self.unnaming => Input::Unnamed(Ok(())),
            _ => Input::Tick,
        };
        self.feed(input);
    }

    /// From now on everything around us works, and at once. What was begun before may be lost, though: a Register that
    /// hangs, a registration that is forgotten; and connections may stay open until they are cut.
    fn benign_until_serving(&mut self, lost: bool, close: bool) {
        if self.kubelet.is_none() {
            self.happens(Happening::KubeletNew);
        } else {
            self.check_files();
        }
        let (before, end) = (self.sockets, self.now + RECOVERY);
        while self.machine.phase() != Phase::Serving {
            assert!(self.now < end, "not registered in time: {:?}", self.machine.phase());
            self.happens(Happening::BindEnds(true));
            let lost = lost && self.socket.is_some_and(|socket| socket.number <= before);
            if !lost {
                self.happens(Happening::RegisterEnds(true));
                if self.socket.is_some_and(|socket| socket.registered && socket.streams == 0) {
                    self.happens(Happening::StreamOpens);
                }
            }
            self.happens(Happening::AskEnds(if lost { Listing::Missing } else { Listing::Listed }));
            self.happens(Happening::UnnameEnds(true));
            self.happens(Happening::PredecessorEnds(5));
            if close {
                self.happens(Happening::ConnectionsClose);
            }
            self.happens(Happening::Passes(u64::try_from(BRISK.as_millis()).unwrap()));
        }
    }

    /// No second of the whole story had more actions than these.
    fn no_storm(&self) {
        for kind in
            [Action::Bind, Action::Register, Action::Renew, Action::Unname, Action::Ask, Action::End, Action::Cut]
        {
            let times: Vec<Duration> = self.done.iter().filter(|(_, done)| *done == kind).map(|(at, _)| *at).collect();
            // 24: every tenth of a second a new kubelet, to each an attempt and its first retry, and the ends of both.
            for window in times.windows(25) {
                assert!(
                    window[24].saturating_sub(window[0]) >= Duration::from_secs(1),
                    "a storm of {kind:?}: {window:?}"
                );
            }
        }
    }
}

fn listing() -> impl Strategy<Value = Listing> {
    prop_oneof![Just(Listing::Listed), Just(Listing::Missing), Just(Listing::Unknown)]
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0_u64..400).prop_map(Happening::Passes),
        2 => (0_u64..40_000).prop_map(Happening::Passes),
        1 => Just(Happening::KubeletGone),
        3 => Just(Happening::KubeletNew),
        1 => Just(Happening::KubeletTouched),
        1 => Just(Happening::OwnGone),
        6 => prop::bool::weighted(0.8).prop_map(Happening::BindEnds),
        3 => Just(Happening::BindsBeside),
        3 => (0_u64..900).prop_map(Happening::PredecessorEnds),
        3 => prop::bool::weighted(0.8).prop_map(Happening::UnnameEnds),
        1 => Just(Happening::SuccessorEnds),
        6 => prop::bool::weighted(0.8).prop_map(Happening::RegisterEnds),
        6 => Just(Happening::StreamOpens),
        2 => Just(Happening::StreamEnds),
        5 => listing().prop_map(Happening::AskEnds),
        1 => Just(Happening::ServerEnds),
        3 => Just(Happening::ConnectionsClose),
        6 => Just(Happening::AllWell),
        4 => listing().prop_map(Happening::NextAsk),
        2 => any::<u8>().prop_map(Happening::Spurious),
    ]
}

proptest! {
    #![proptest_config(Config { cases: 512, failure_persistence: None, ..Config::default() })]

    /// The invariants of docs/life-cycle.md, after every input; then the world mends, and we serve in time.
    #[test]
    fn invariants_hold_and_it_registers_again(
        story in prop::collection::vec(happening(), 0..80),
        jitter in any::<u64>(),
        lost in any::<bool>(),
        close in any::<bool>(),
    ) {
        let mut world = World::new(jitter);
        world.check_files();
        for happening in story {
            world.happens(happening);
        }
        world.no_storm();
        world.benign_until_serving(lost, close);
    }

}

proptest! {
    #![proptest_config(Config { cases: 64, failure_persistence: None, ..Config::default() })]

    /// A world that answers everything at once and badly, as fast as it can: a few actions a second, however long.
    #[test]
    fn instant_failures_make_no_storm(
        fails in prop::collection::vec(0_u8..6, 1..4),
        jitter in any::<u64>(),
    ) {
        let mut world = World::new(jitter);
        world.happens(Happening::KubeletNew);
        for round in 0..1000 {
            match fails[round % fails.len()] {
                0 => world.happens(Happening::KubeletNew),
                1 => world.happens(Happening::BindEnds(false)),
                2 => world.happens(Happening::OwnGone),
                3 => world.happens(Happening::ServerEnds),
                4 => world.happens(Happening::StreamEnds),
                _ => world.happens(Happening::RegisterEnds(false)),
            }
            world.happens(Happening::BindEnds(round % 2 == 0));
            world.happens(Happening::RegisterEnds(round % 3 == 0));
            world.happens(Happening::StreamOpens);
            world.happens(Happening::AskEnds(Listing::Missing));
            world.happens(Happening::ConnectionsClose);
            world.happens(Happening::Passes(5));
        }
        world.no_storm();
    }

    /// Asked to end, it is over as soon as its connections are closed, half a second at the latest, wherever it was.
    #[test]
    fn shutdown_ends_from_any_state(story in prop::collection::vec(happening(), 0..60)) {
        let mut world = World::new(0);
        world.check_files();
        for happening in story {
            world.happens(happening);
        }
        let begin = world.now;
        world.feed(Input::Shutdown);
        world.happens(Happening::Passes(500));
        prop_assert!(world.machine.is_over() && world.now <= begin + LIMITS.close);
        prop_assert!(!world.binding && world.registering.is_none() && !world.asking);
        world.happens(Happening::KubeletNew);
        prop_assert!(world.machine.is_over() && !world.binding);
    }
}

#[test]
fn first_retry_is_at_once_then_pauses_double() {
    for jitter in [0, 7, 511, 512, u64::MAX] {
        let (mut now, kubelet) = (Duration::ZERO, FileId::numbered(1));
        let checked = Input::Checked { kubelet: Ok(kubelet), own: false, predecessor: false };
        let (mut machine, actions) = Machine::new(LIMITS).step(checked, Moment { now, jitter });
        assert_eq!(actions, [Action::Bind]);
        for full in [0, 250, 500, 1000, 2000, 4000, 8000, 16_000, 16_000].map(Duration::from_millis) {
            let (failed, actions) = machine.step(Input::Bound(Err("full".to_owned())), Moment { now, jitter });
            machine = failed;
            if full.is_zero() {
                assert!(actions.contains(&Action::Bind), "{actions:?}");
                continue;
            }
            let pause = machine.wake().unwrap().saturating_sub(now);
            assert!(pause <= full && pause >= full / 2, "{full:?}: {pause:?}");
            now += pause;
            let (next, actions) = machine.step(Input::Tick, Moment { now, jitter });
            assert_eq!(actions, [Action::Bind]);
            machine = next;
        }
    }
}

/// One registration that goes well, step by step.
#[test]
fn phases_from_kubelet_to_serving() {
    let mut world = World::new(1);
    let mut phases = vec![world.machine.phase()];
    world.check_files();
    for happening in [
        Happening::KubeletNew,
        Happening::BindEnds(true),
        // The kubelet dials back, and opens the stream, before it answers.
        Happening::StreamOpens,
        Happening::RegisterEnds(true),
        Happening::AskEnds(Listing::Missing),
        Happening::Passes(100),
        Happening::AskEnds(Listing::Listed),
        Happening::StreamEnds,
        Happening::ConnectionsClose,
    ] {
        world.happens(happening);
        if phases.last() != Some(&world.machine.phase()) {
            phases.push(world.machine.phase());
        }
    }
    let road = [
        Phase::WaitingForKubelet,
        Phase::Binding,
        Phase::Registering,
        Phase::Confirming,
        Phase::Serving,
        Phase::Ending,
        Phase::Binding,
    ];
    assert_eq!(phases, road);
}

#[test]
fn never_listed_devices_end_the_session() {
    let mut world = World::new(1);
    for happening in
        [Happening::KubeletNew, Happening::BindEnds(true), Happening::RegisterEnds(true), Happening::StreamOpens]
    {
        world.happens(happening);
    }
    for round in 0..200 {
        world.happens(Happening::AskEnds(Listing::Missing));
        // An answer to no question counts for nothing.
        world.happens(Happening::Spurious(2));
        assert!(round > 0 || world.machine.phase() == Phase::Confirming);
        world.happens(Happening::Passes(100));
    }
    assert!(world.done.iter().any(|(_, done)| *done == Action::ReportEnded(NOT_LISTED.to_owned())));
}

/// A registration can be lost with its stream still open.
#[test]
fn unlisted_devices_end_readiness_then_session() {
    let mut world = World::new(1);
    for happening in [Happening::KubeletNew, Happening::AllWell, Happening::NextAsk(Listing::Missing)] {
        world.happens(happening);
    }
    assert_eq!(world.machine.phase(), Phase::Serving, "a device may just have changed its health");
    world.happens(Happening::NextAsk(Listing::Listed));
    world.happens(Happening::NextAsk(Listing::Missing));
    world.happens(Happening::NextAsk(Listing::Missing));
    assert_eq!(world.machine.phase(), Phase::Confirming);
    world.happens(Happening::NextAsk(Listing::Listed));
    assert_eq!(world.machine.phase(), Phase::Serving);
    for _ in 0..200 {
        world.happens(Happening::NextAsk(Listing::Missing));
    }
    assert!(world.done.iter().any(|(_, done)| *done == Action::ReportEnded(NOT_LISTED.to_owned())));
}
