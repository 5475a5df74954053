//! The registration's state machine with the device plugin's handshake in a simulated world: random events, simulated
//! time, and invariants that hold after every input.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;
use crate::registration::worlds::{self, LIMITS as COMMON, Neighbour, happening};
use crate::registration::{Action, RegistrationMachine};

mod overlap;

const LIMITS: Limits = Limits { register: Duration::from_secs(15), stream: Duration::from_secs(10) };

const NOT_LISTED: &str = "PodResources has not listed our devices within 10s";

type World = worlds::World<Kubelet>;
type Happening = worlds::Happening<Own>;

/// A happening that only this handshake has.
#[derive(Clone, Debug)]
enum Own {
    /// Our socket is bound, while another plugin exists.
    BindsWithPredecessor,
    /// The other plugin ends: its socket goes at once, its stream ends after this many milliseconds.
    PredecessorEnds(u64),
    DetachEnds(bool),
    /// Another plugin registers after us, and ends.
    SuccessorEnds,
    RegisterEnds(bool),
    StreamOpens,
    StreamEnds,
    AskEnds(Listing),
    /// A registration that goes well.
    AllWell,
    /// The next time PodResources is asked, and its answer.
    NextAsk(Listing),
    /// An input that the state machine does not expect.
    Spurious(u8),
}

/// The kubelet's records of our socket.
#[derive(Clone, Copy, Debug, Default)]
struct Records {
    /// The kubelet with which the socket was registered.
    kubelet: Option<u64>,
    registered: bool,
    /// The streams that the kubelet holds.
    streams: usize,
    /// The number of answers `Missing` in a row; an answer while we do not serve counts as 2.
    missing: u32,
    was_asked: bool,
}

/// The plugin that registered before ours.
#[derive(Clone, Copy, Debug, Default)]
struct Predecessor {
    stands: bool,
    /// The time at which the kubelet sees the plugin's stream end.
    stream_ends: Option<Duration>,
    has_stream: bool,
}

#[derive(Debug, Default)]
struct Kubelet {
    records: Records,
    registering: bool,
    asking: bool,
    detaching: bool,
    predecessor: Predecessor,
    /// True if the other plugin's end may end our session: that plugin was gone when our socket was bound, or Detach
    /// failed.
    may_lose_session: bool,
    /// True if a kubelet up to 1.36 has a client of ours under the resource's name, which the end of any stream ends.
    named: bool,
    /// True from the end of that client to the next Register: no stream opens for it.
    disconnected: bool,
}

fn does(world: &mut World, own: Own) {
    world.happens(Happening::Own(own));
}

fn own_input(world: &mut World, input: OwnInput) {
    world.feed(Input::Own(input));
}

fn streams(world: &mut World, change: impl FnOnce(usize) -> usize) {
    if world.socket.is_none_or(|socket| socket.ended) {
        return;
    }
    let open = change(world.neighbour.records.streams);
    world.neighbour.records.streams = open;
    own_input(world, OwnInput::Streams(open));
}

/// Feeds an answer for which no call waits; a tick if such a call waits.
fn spurious(world: &mut World, which: u8) {
    let kubelet = &world.neighbour;
    let input = match which % 5 {
        0 if !kubelet.registering => Input::Registered(Ok(())),
        1 if !kubelet.registering => Input::Registered(Err("late".to_owned())),
        2 if !kubelet.asking => Input::Own(OwnInput::Listed(Listing::Listed)),
        3 if !kubelet.asking => Input::Own(OwnInput::Listed(Listing::Missing)),
        4 if !kubelet.detaching => Input::Own(OwnInput::Detached(Ok(()))),
        _ => Input::Tick,
    };
    world.feed(input);
}

fn result_of(ok: bool) -> Result<(), String> {
    if ok { Ok(()) } else { Err("not today".to_owned()) }
}

impl Neighbour for Kubelet {
    type Handshake = DevicePluginHandshake;
    type Happening = Own;

    const GOAL: Phase = Phase::Serving;
    // The longest deadline, the time to close, the longest pause, and the calls.
    const RECOVERY: Duration = Duration::from_secs(15 + 1 + 16 + 1);
    const MAX_WAIT: Duration = MAX_OVERLAP;

    fn machine(seed: u64) -> RegistrationMachine<DevicePluginHandshake> {
        RegistrationMachine::new(COMMON, Phase::WaitingForKubelet, DevicePluginHandshake::new(LIMITS), seed)
    }

    fn kubelet(number: u64) -> FileId {
        FileId::numbered(number)
    }

    fn others(&self) -> bool {
        self.predecessor.stands
    }

    fn longest(phase: Phase) -> Duration {
        match phase {
            Phase::Registering | Phase::Detaching => LIMITS.register,
            Phase::WaitingForStream => LIMITS.stream,
            Phase::Confirming => CONFIRM_TIMEOUT,
            Phase::Overlapping => MAX_OVERLAP + LIMITS.register,
            _ => Duration::MAX,
        }
    }

    fn bound(&mut self) -> bool {
        self.may_lose_session = !self.predecessor.stands;
        self.records = Records::default();
        self.predecessor.stands
    }

    fn ended(&mut self) {
        (self.registering, self.asking, self.detaching) = (false, false, false);
    }

    fn perform(world: &mut World, action: &OwnAction) {
        let (overlaps, kubelet) = (world.phase() == Phase::Overlapping, &mut world.neighbour);
        match action {
            OwnAction::Register | OwnAction::Renew => {
                let socket = world.socket.expect("registers without a socket");
                kubelet.records.kubelet = world.kubelet;
                let twice = !overlaps && kubelet.records.registered;
                assert!(!socket.ended && !twice, "registers an ended socket, or one twice");
                assert_eq!(overlaps, *action == OwnAction::Renew);
                assert!(world.kubelet.is_some(), "registers without a kubelet");
                (kubelet.registering, kubelet.disconnected) = (true, false);
            }
            OwnAction::Ask => assert!(!std::mem::replace(&mut kubelet.asking, true), "asks twice at once"),
            OwnAction::Detach => {
                assert!(!kubelet.detaching && kubelet.records.registered, "detaches too early");
                kubelet.detaching = true;
            }
            OwnAction::ReportDetached(result) => kubelet.may_lose_session |= result.is_err(),
        }
    }

    fn check(world: &World) {
        if !world.phase().is_serving() {
            return;
        }
        let (socket, records) = (world.socket.expect("ready without a socket"), &world.neighbour.records);
        assert!(socket.stands, "ready without a socket that the kubelet can dial");
        assert!(socket.served, "ready without a server");
        assert!(world.kubelet.is_some() && records.kubelet == world.kubelet, "ready with a kubelet that is gone");
        assert!(!socket.ended, "ready while the session ends");
        assert!(records.registered, "ready before this socket was registered");
        assert!(records.streams > 0, "ready without a stream of the kubelet");
        assert!(records.was_asked, "ready before PodResources was asked");
        assert!(records.missing < 2, "ready though PodResources does not list our devices");
        // While two plugins overlap, the kubelet has no client under the name, for a limited time.
        let is_named = world.neighbour.named || world.phase() == Phase::Overlapping;
        assert!(is_named, "the kubelet would not notice our end");
    }

    fn happens(world: &mut World, happening: Own) {
        let serving = world.phase().is_serving();
        let kubelet = &mut world.neighbour;
        match happening {
            Own::BindsWithPredecessor => {
                if world.binding && kubelet.predecessor.stream_ends.is_none() {
                    kubelet.predecessor = Predecessor { stands: true, stream_ends: None, has_stream: true };
                }
                world.happens(Happening::BindEnds(true));
            }
            Own::PredecessorEnds(after) => {
                if std::mem::take(&mut kubelet.predecessor.stands) {
                    kubelet.predecessor.stream_ends = Some(world.now + Duration::from_millis(after));
                    world.check_files();
                }
            }
            Own::DetachEnds(ok) => {
                if std::mem::take(&mut kubelet.detaching) {
                    kubelet.named &= !ok;
                    kubelet.may_lose_session |= !ok;
                    own_input(world, OwnInput::Detached(result_of(ok)));
                }
            }
            Own::SuccessorEnds => {
                kubelet.named = false;
                own_input(world, OwnInput::Renew);
            }
            Own::RegisterEnds(ok) => {
                if std::mem::take(&mut kubelet.registering) && world.socket.is_some() {
                    (kubelet.records.registered, kubelet.named) = (ok, ok);
                    world.feed(Input::Registered(result_of(ok)));
                }
            }
            Own::StreamOpens if kubelet.disconnected => {}
            Own::StreamOpens => streams(world, |open| open + 1),
            Own::StreamEnds => streams(world, |open| open.saturating_sub(1)),
            Own::AskEnds(listing) => {
                if std::mem::take(&mut kubelet.asking) && world.socket.is_some() {
                    // While we serve, a single answer without our devices may be wrong. Before that it counts.
                    kubelet.records.missing = match listing {
                        Listing::Missing if serving => kubelet.records.missing + 1,
                        Listing::Missing => 2,
                        Listing::Listed | Listing::Unknown => 0,
                    };
                    kubelet.records.was_asked = true;
                    own_input(world, OwnInput::Listed(listing));
                }
            }
            Own::AllWell => {
                world.happens(Happening::BindEnds(true));
                let road = [Own::StreamOpens, Own::RegisterEnds(true), Own::AskEnds(Listing::Listed)];
                road.into_iter().chain([Own::DetachEnds(true)]).for_each(|own| does(world, own));
            }
            Own::NextAsk(listing) => {
                let wait = world.machine.wake().map_or(Duration::ZERO, |wake| wake.saturating_sub(world.now));
                world.happens(Happening::Passes(u64::try_from(wait.as_millis()).unwrap() + 1));
                does(world, Own::AskEnds(listing));
            }
            Own::Spurious(which) => spurious(world, which),
        }
    }

    /// Lets a kubelet up to 1.36 see the end of the other plugin's stream and end the client under the name.
    fn passed(world: &mut World) {
        let (now, serving) = (world.now, world.phase().is_serving());
        let kubelet = &mut world.neighbour;
        if kubelet.predecessor.has_stream && kubelet.predecessor.stream_ends.is_some_and(|end| end <= now) {
            kubelet.predecessor = Predecessor::default();
            if std::mem::take(&mut kubelet.named) {
                assert!(!serving || kubelet.may_lose_session, "did not outlast the plugin before us");
                kubelet.disconnected = true;
                streams(world, |_| 0);
            }
        }
    }

    /// Answers everything well. If `lost`, Register hangs, or the registration is forgotten.
    fn works(world: &mut World, lost: bool) {
        if !lost {
            does(world, Own::RegisterEnds(true));
            let records = &world.neighbour.records;
            if world.socket.is_some() && records.registered && records.streams == 0 {
                does(world, Own::StreamOpens);
            }
        }
        does(world, Own::AskEnds(if lost { Listing::Missing } else { Listing::Listed }));
        does(world, Own::DetachEnds(true));
        does(world, Own::PredecessorEnds(5));
    }

    fn happening() -> BoxedStrategy<Own> {
        let listing = || prop_oneof![Just(Listing::Listed), Just(Listing::Missing), Just(Listing::Unknown)];
        prop_oneof![
            3 => Just(Own::BindsWithPredecessor),
            3 => (0_u64..900).prop_map(Own::PredecessorEnds),
            3 => prop::bool::weighted(0.8).prop_map(Own::DetachEnds),
            1 => Just(Own::SuccessorEnds),
            6 => prop::bool::weighted(0.8).prop_map(Own::RegisterEnds),
            6 => Just(Own::StreamOpens),
            2 => Just(Own::StreamEnds),
            5 => listing().prop_map(Own::AskEnds),
            6 => Just(Own::AllWell),
            4 => listing().prop_map(Own::NextAsk),
            2 => any::<u8>().prop_map(Own::Spurious),
        ]
        .boxed()
    }
}

/// The actions that must not come in a storm, in addition to those of every plugin.
const CALLS: [OwnAction; 4] = [OwnAction::Register, OwnAction::Renew, OwnAction::Detach, OwnAction::Ask];

proptest! {
    #![proptest_config(Config { cases: 512, failure_persistence: None, ..Config::default() })]

    /// The invariants of docs/life-cycle.md hold after every input. Then the world recovers, and we serve in time.
    #[test]
    fn invariants_hold_and_plugin_registers_again(
        story in prop::collection::vec(happening::<Kubelet>(), 0..80),
        seed in any::<u64>(),
        lost in any::<bool>(),
        close in any::<bool>(),
    ) {
        let mut world = World::after(story, seed);
        world.check_no_storm(&CALLS);
        world.benign_until_registered(lost, close);
    }

}

proptest! {
    #![proptest_config(Config { cases: 64, failure_persistence: None, ..Config::default() })]

    /// A world in which everything fails immediately causes at most 24 actions of a kind a second.
    #[test]
    fn instant_failures_make_no_storm(
        fails in prop::collection::vec(0_u8..6, 1..4),
        seed in any::<u64>(),
    ) {
        let mut world = World::new(seed);
        world.happens(Happening::KubeletNew);
        for round in 0..1000 {
            match fails[round % fails.len()] {
                0 => world.happens(Happening::KubeletNew),
                1 => world.happens(Happening::BindEnds(false)),
                2 => world.happens(Happening::SocketGone),
                3 => world.happens(Happening::ServerEnds),
                4 => does(&mut world, Own::StreamEnds),
                _ => does(&mut world, Own::RegisterEnds(false)),
            }
            world.happens(Happening::BindEnds(round % 2 == 0));
            does(&mut world, Own::RegisterEnds(round % 3 == 0));
            does(&mut world, Own::StreamOpens);
            does(&mut world, Own::AskEnds(Listing::Missing));
            world.happens(Happening::ConnectionsClose);
            world.happens(Happening::Passes(5));
        }
        world.check_no_storm(&CALLS);
    }

    /// A shutdown from any state ends once the connections are closed, within half a second.
    #[test]
    fn shutdown_ends_from_any_state(story in prop::collection::vec(happening::<Kubelet>(), 0..60)) {
        World::after(story, 0).check_shutdown();
    }
}

#[test]
fn first_retry_is_at_once_then_pauses_double() {
    for seed in [0, 7, 511, 512, u64::MAX] {
        let (mut now, mut machine) = (Duration::ZERO, Kubelet::machine(seed));
        let checked = Input::Checked { kubelet: Ok(FileId::numbered(1)), has_sockets: false, others: false };
        assert_eq!(machine.step(checked, now), [Action::Bind]);
        for full in [0, 250, 500, 1000, 2000, 4000, 8000, 16_000, 16_000].map(Duration::from_millis) {
            let actions = machine.step(Input::Bound(Err("full".to_owned())), now);
            if full.is_zero() {
                assert!(actions.contains(&Action::Bind), "{actions:?}");
                continue;
            }
            let pause = machine.wake().unwrap().saturating_sub(now);
            assert!(pause <= full && pause >= full / 2, "{full:?}: {pause:?}");
            now += pause;
            assert_eq!(machine.step(Input::Tick, now), [Action::Bind]);
        }
    }
}

#[test]
fn phases_from_kubelet_to_second_bind() {
    let mut world = World::new(1);
    let mut phases = vec![world.phase()];
    for happening in [
        Happening::KubeletNew,
        Happening::BindEnds(true),
        // The kubelet dials back and opens the stream before it answers Register.
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::AskEnds(Listing::Missing)),
        Happening::Passes(100),
        Happening::Own(Own::AskEnds(Listing::Listed)),
        Happening::Own(Own::StreamEnds),
        Happening::ConnectionsClose,
    ] {
        world.happens(happening);
        if phases.last() != Some(&world.phase()) {
            phases.push(world.phase());
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

/// A registration can be lost with its stream still open.
#[test]
fn unlisted_devices_end_readiness_then_session() {
    let mut world = World::after(vec![Happening::KubeletNew, Happening::Own(Own::AllWell)], 1);
    does(&mut world, Own::NextAsk(Listing::Missing));
    assert_eq!(world.phase(), Phase::Serving, "a device may just have changed its health");
    does(&mut world, Own::NextAsk(Listing::Listed));
    does(&mut world, Own::NextAsk(Listing::Missing));
    does(&mut world, Own::NextAsk(Listing::Missing));
    assert_eq!(world.phase(), Phase::Confirming);
    does(&mut world, Own::NextAsk(Listing::Listed));
    assert_eq!(world.phase(), Phase::Serving);
    for _ in 0..200 {
        does(&mut world, Own::NextAsk(Listing::Missing));
    }
    assert!(world.has_ended_with(NOT_LISTED));
}
