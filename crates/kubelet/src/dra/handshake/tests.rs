//! The registration's state machine with the DRA plugin's handshake: invariants after every random event of a simulated
//! world, and single stories.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;
use crate::registration::worlds::{self, LIMITS, Neighbour, happening};
use crate::registration::{Action, RegistrationMachine};

/// The time after which sockets are replaced that no kubelet registers.
const OFFER: Duration = Duration::from_secs(60);

type World = worlds::World<Kubelet>;
type Happening = worlds::Happening<Own>;

/// An event of the kubelet or of the GPUs.
#[derive(Clone, Debug)]
enum Own {
    /// The kubelet finds the socket and registers the plugin, or refuses it.
    Registers(bool),
    Connects,
    Disconnects,
    /// A registration that goes well.
    AllWell,
    /// The kubelet restarts in the same folder.
    Restarts,
    /// An input that the machine does not expect.
    Spurious(u8),
}

/// A kubelet, and its records of our sockets.
#[derive(Debug, Default)]
struct Kubelet {
    /// The last verdict on these sockets.
    verdict: Option<bool>,
    connections: usize,
    /// True if all connections have closed since the kubelet registered the plugin.
    away: bool,
}

fn does(world: &mut World, own: Own) -> Vec<Action<Infallible>> {
    let before = world.done.len();
    world.happens(Happening::Own(own));
    world.done[before..].iter().map(|(_, action)| action.clone()).collect()
}

fn connections(world: &mut World, open: usize) {
    let kubelet = &mut world.neighbour;
    if world.socket.is_some_and(|socket| !socket.ended) && kubelet.connections != open {
        kubelet.away = kubelet.verdict == Some(true) && open == 0;
        kubelet.connections = open;
        world.feed(Input::Own(Connections(open)));
    }
}

/// Feeds an unexpected input, which must not change the phase.
fn spurious(world: &mut World, which: u8) {
    let (before, open) = (world.phase(), world.neighbour.connections);
    let input = match which % 3 {
        0 if world.socket.is_none() => Input::Registered(Ok(())),
        1 if world.socket.is_none() => Input::Registered(Err("late".to_owned())),
        _ => Input::Own(Connections(open)),
    };
    world.feed(input);
    assert_eq!(world.phase(), before);
}

impl Neighbour for Kubelet {
    type Handshake = DraHandshake;
    type Happening = Own;

    const GOAL: Phase = Phase::Registered;
    // The deadline, the time to close, the longest pause, and the calls.
    const RECOVERY: Duration = Duration::from_secs(60 + 1 + 16 + 1);
    const MAX_WAIT: Duration = OFFER;

    fn machine(seed: u64) -> RegistrationMachine<DraHandshake> {
        RegistrationMachine::new(LIMITS, Phase::WaitingForKubelet, DraHandshake::new(OFFER), seed)
    }

    fn kubelet(_: u64) {}

    fn others(&self) {}

    fn longest(phase: Phase) -> Duration {
        match phase {
            Phase::Offered | Phase::Disconnected => OFFER,
            _ => Duration::MAX,
        }
    }

    fn bound(&mut self) {
        *self = Self::default();
    }

    fn ended(&mut self) {}

    fn perform(_: &mut World, action: &Infallible) {
        match *action {}
    }

    fn check(world: &World) {
        let (phase, kubelet) = (world.phase(), &world.neighbour);
        assert!(!phase.is_open() || kubelet.verdict != Some(false), "{phase:?}, and the kubelet refused these sockets");
        match phase {
            Phase::Offered => assert!(kubelet.verdict.is_none(), "waits for a verdict that the kubelet gave"),
            Phase::Registered => assert!(!kubelet.away, "registered with a kubelet that is away"),
            Phase::Disconnected => assert!(kubelet.away, "disconnected from a kubelet that is connected"),
            _ => return,
        }
        let socket = world.socket.expect("served without a socket");
        assert!(socket.stands && socket.served && !socket.ended, "{phase:?} with sockets that nobody serves");
        assert!(phase == Phase::Offered || kubelet.verdict == Some(true), "{phase:?}, and was not registered");
    }

    fn happens(world: &mut World, happening: Own) {
        let socket = world.socket.filter(|socket| socket.stands && socket.served);
        let (open, can_find) = (world.neighbour.connections, socket.is_some() && world.kubelet.is_some());
        match happening {
            Own::Registers(ok) if can_find => {
                world.neighbour.verdict = Some(ok);
                world.neighbour.away = false;
                world.feed(Input::Registered(if ok { Ok(()) } else { Err("no".to_owned()) }));
            }
            Own::Registers(_) => {}
            Own::Connects => connections(world, open + 1),
            Own::Disconnects => connections(world, open.saturating_sub(1)),
            Own::AllWell => {
                world.happens(Happening::BindEnds(true));
                does(world, Own::Registers(true));
                does(world, Own::Connects);
            }
            Own::Restarts => {
                connections(world, 0);
                does(world, Own::Registers(true));
                does(world, Own::Connects);
            }
            Own::Spurious(which) => spurious(world, which),
        }
    }

    /// The socket goes with its folder, and a new kubelet has none of the previous one's connections.
    fn kubelet_changed(world: &mut World) {
        match (&mut world.socket, world.kubelet) {
            (Some(socket), None) => socket.stands = false,
            (_, Some(_)) => connections(world, 0),
            (None, None) => {}
        }
    }

    /// Answers everything well. If `lost`, the kubelet misses the socket or does not come back.
    fn works(world: &mut World, lost: bool) {
        if !lost && world.phase().is_open() {
            if world.neighbour.verdict.is_none() {
                does(world, Own::Registers(true));
            }
            if world.neighbour.connections == 0 {
                does(world, Own::Connects);
            }
        }
    }

    fn happening() -> BoxedStrategy<Own> {
        prop_oneof![
            6 => prop::bool::weighted(0.8).prop_map(Own::Registers),
            6 => Just(Own::Connects),
            4 => Just(Own::Disconnects),
            6 => Just(Own::AllWell),
            3 => Just(Own::Restarts),
            2 => any::<u8>().prop_map(Own::Spurious),
        ]
        .boxed()
    }
}

proptest! {
    #![proptest_config(Config { cases: 512, failure_persistence: None, ..Config::default() })]

    /// The invariants hold after every input. Then the world recovers, and the kubelet registers the plugin in time.
    #[test]
    fn invariants_hold_and_plugin_registers_again(
        story in prop::collection::vec(happening::<Kubelet>(), 0..80),
        seed in any::<u64>(),
        lost in any::<bool>(),
        close in any::<bool>(),
    ) {
        let mut world = World::after(story, seed);
        world.check_no_storm(&[]);
        world.benign_until_registered(lost, close);
    }
}

proptest! {
    #![proptest_config(Config { cases: 64, failure_persistence: None, ..Config::default() })]

    /// Steps that fail without delay cause only a few actions a second.
    #[test]
    fn instant_failures_make_no_storm(
        fails in prop::collection::vec(0_u8..6, 1..4),
        seed in any::<u64>(),
    ) {
        let mut world = World::new(seed);
        world.happens(Happening::KubeletNew);
        for round in 0..1000 {
            let fail = match fails[round % fails.len()] {
                0 => Happening::KubeletGone,
                1 => Happening::BindEnds(false),
                2 => Happening::SocketGone,
                3 => Happening::ServerEnds,
                4 => Happening::Own(Own::Restarts),
                _ => Happening::Own(Own::Registers(false)),
            };
            world.happens(fail);
            world.happens(Happening::KubeletNew);
            world.happens(Happening::BindEnds(!fails.contains(&1) || round % 2 == 0));
            does(&mut world, Own::Registers(true));
            does(&mut world, Own::Connects);
            does(&mut world, Own::Registers(round % 3 == 0));
            world.happens(Happening::ConnectionsClose);
            world.happens(Happening::Passes(5));
        }
        world.check_no_storm(&[]);
    }

    /// A shutdown from any state ends once the connections are closed, within half a second.
    #[test]
    fn shutdown_ends_from_any_state(story in prop::collection::vec(happening::<Kubelet>(), 0..60)) {
        World::after(story, 0).check_shutdown();
    }
}

fn offered() -> World {
    let mut world = World::new(0);
    world.happens(Happening::KubeletNew);
    assert!(matches!(world.done.last(), Some((_, Action::Bind))), "{:?}", world.done);
    world.happens(Happening::BindEnds(true));
    assert_eq!(world.phase(), Phase::Offered);
    world
}

fn registered() -> World {
    let mut world = offered();
    assert_eq!(does(&mut world, Own::Registers(true)), [Action::ReportRegistered(Ok(()))]);
    does(&mut world, Own::Connects);
    assert_eq!(world.phase(), Phase::Registered);
    world
}

fn disconnected() -> World {
    let mut world = registered();
    assert_eq!(does(&mut world, Own::Disconnects), []);
    assert_eq!(world.phase(), Phase::Disconnected);
    world
}

#[test]
fn missing_folder_is_waited_for_and_reported_once() {
    let mut world = World::new(0);
    for _ in 0..2 {
        world.happens(Happening::KubeletTouched);
        let reported: Vec<_> = world.done.iter().map(|(_, action)| action.clone()).collect();
        assert_eq!(reported, [Action::ReportWaiting("there is none".to_owned())]);
    }
    assert_eq!(world.phase(), Phase::WaitingForKubelet);
    world.happens(Happening::KubeletNew);
    assert!(world.binding);
}

#[test]
fn idle_connection_that_comes_back_keeps_registration() {
    let mut world = disconnected();
    does(&mut world, Own::Connects);
    assert_eq!((world.phase(), world.machine.wake()), (Phase::Registered, None));
}

#[test]
fn kubelet_that_misses_the_socket_gets_another() {
    for mut world in [offered(), disconnected()] {
        let actions = world.wait();
        assert!(matches!(actions.as_slice(), [Action::ReportWaiting(_), Action::End]), "{actions:?}");
        world.happens(Happening::ConnectionsClose);
        assert!(world.binding, "pauses after a session that had lasted");
        world.happens(Happening::BindEnds(true));
        // A cause that was just reported is not reported again.
        let actions = world.wait();
        assert!(actions.last() == Some(&Action::End) && actions.len() <= 2, "{actions:?}");
    }
}

#[test]
fn refused_registration_is_tried_again_with_pauses() {
    let mut world = offered();
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let actions = does(&mut world, Own::Registers(false));
        assert_eq!(actions.first(), Some(&Action::ReportRegistered(Err("no".to_owned()))));
        assert_eq!(actions.last(), Some(&Action::End));
        let before = world.now;
        world.happens(Happening::ConnectionsClose);
        while !world.binding {
            assert_eq!(world.phase(), Phase::Pausing);
            world.wait();
        }
        pauses.push(world.now.saturating_sub(before));
        world.happens(Happening::BindEnds(true));
    }
    // The first retry waits only for the shortest gap between two binds. Jitter shortens a pause by up to a half.
    for (pause, full) in pauses.iter().zip([100, 250, 500, 1000, 2000, 4000, 8000, 16_000, 16_000]) {
        let full = Duration::from_millis(full);
        assert!(*pause <= full && *pause >= full / 2, "{pause:?} of {full:?}");
    }
    assert_eq!(pauses[0], Duration::from_millis(100));
    does(&mut world, Own::Registers(true));
    does(&mut world, Own::Registers(false));
    world.now += Duration::from_millis(100);
    world.happens(Happening::ConnectionsClose);
    assert!(world.binding, "pauses after a registration");
}

#[test]
fn deleted_socket_is_made_again() {
    let mut world = registered();
    world.now += Duration::from_secs(10);
    world.happens(Happening::SocketGone);
    assert!(world.has_ended_with("our sockets are gone or were replaced"));
    world.happens(Happening::ConnectionsClose);
    assert!(world.binding);
}

#[test]
fn connections_that_stay_open_are_cut() {
    let mut world = registered();
    world.happens(Happening::ServerEnds);
    assert!(world.has_ended_with("the server ended: no more"));
    assert_eq!((world.wait(), world.machine.wake()), (vec![Action::Cut], None));
}
