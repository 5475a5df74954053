//! The life of the plugin, input by input; the time is the tests' own.

use super::*;

const LIMITS: Limits = Limits {
    offer: Duration::from_secs(60),
    close: Duration::from_millis(500),
    longest_pause: Duration::from_secs(16),
};

/// A machine and the time.
struct World {
    machine: Machine,
    now: Duration,
}

impl World {
    fn new() -> Self {
        let mut world = Self { machine: Machine::new(LIMITS), now: Duration::ZERO };
        world.feed(checked(true));
        world
    }

    /// Bound and served.
    fn offered() -> Self {
        let mut world = Self::new();
        assert_eq!(world.feed(Input::Ready), [Action::Bind]);
        assert_eq!(world.feed(Input::Bound(Ok(()))), []);
        assert_eq!(world.phase(), Phase::Offered);
        world
    }

    /// Registered, and the kubelet is connected.
    fn registered() -> Self {
        let mut world = Self::offered();
        assert_eq!(world.feed(Input::Notified(Ok(()))), [Action::ReportRegistered(Ok(()))]);
        world.feed(Input::Connections(1));
        assert_eq!(world.phase(), Phase::Registered);
        world
    }

    fn phase(&self) -> Phase {
        self.machine.phase()
    }

    fn feed(&mut self, input: Input) -> Vec<Action> {
        let moment = Moment { now: self.now, jitter: 0 };
        let (machine, actions) = self.machine.clone().step(input, moment);
        self.machine = machine;
        actions
    }

    /// Goes to the moment at which time alone changes something.
    fn wait(&mut self) -> Vec<Action> {
        self.now = self.machine.wake().expect("something is due");
        self.feed(Input::Tick)
    }
}

fn checked(registry: bool) -> Input {
    let registry = if registry { Ok(()) } else { Err("there is no folder".to_owned()) };
    Input::Checked { registry, own: true }
}

#[test]
fn nothing_is_bound_before_gpus_are_seen() {
    let mut world = World::new();
    assert_eq!((world.feed(checked(true)), world.phase()), (vec![], Phase::WaitingForGpus));
    assert_eq!(world.machine.wake(), None);
    assert_eq!(world.feed(Input::Ready), [Action::Bind]);
    assert_eq!(world.feed(Input::Ready), [], "it is binding already");
}

#[test]
fn missing_folder_is_waited_for_and_reported_once() {
    let mut world = World::new();
    world.feed(checked(false));
    assert_eq!(world.feed(Input::Ready), [Action::ReportWaiting("there is no folder".to_owned())]);
    assert_eq!((world.feed(checked(false)), world.phase()), (vec![], Phase::WaitingForKubelet));
    assert_eq!(world.feed(checked(true)), [Action::Bind]);
}

#[test]
fn kubelet_that_restarts_registers_the_same_sockets() {
    let mut world = World::registered();
    assert_eq!((world.feed(Input::Connections(0)), world.phase()), (vec![], Phase::Disconnected));
    assert_eq!(world.feed(Input::Notified(Ok(()))), [Action::ReportRegistered(Ok(()))]);
    world.feed(Input::Connections(1));
    assert_eq!((world.phase(), world.machine.wake()), (Phase::Registered, None));
}

#[test]
fn idle_connection_that_comes_back_is_registered() {
    let mut world = World::registered();
    world.feed(Input::Connections(0));
    world.feed(Input::Connections(1));
    assert_eq!((world.phase(), world.machine.wake()), (Phase::Registered, None));
}

#[test]
fn kubelet_that_misses_the_socket_gets_another() {
    for mut world in [World::offered(), {
        let mut world = World::registered();
        world.feed(Input::Connections(0));
        world
    }] {
        let actions = world.wait();
        assert!(matches!(actions.as_slice(), [Action::ReportWaiting(_), Action::End]), "{actions:?}");
        assert_eq!(world.feed(Input::Closed), [Action::Bind], "at once: the session had lasted");
        world.feed(Input::Bound(Ok(())));
        // The kubelet is still away: nothing new to report.
        let actions = world.wait();
        assert!(actions.last() == Some(&Action::End) && actions.len() <= 2, "{actions:?}");
    }
}

#[test]
fn refused_registration_is_tried_again_with_pauses() {
    let mut world = World::offered();
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let actions = world.feed(Input::Notified(Err("no".to_owned())));
        assert_eq!(actions.last(), Some(&Action::End));
        assert_eq!(actions.first(), Some(&Action::ReportRegistered(Err("no".to_owned()))));
        let before = world.now;
        let mut actions = world.feed(Input::Closed);
        while actions != [Action::Bind] {
            assert_eq!(world.phase(), Phase::Pausing);
            actions = world.wait();
        }
        pauses.push(world.now.saturating_sub(before).as_millis());
        world.feed(Input::Bound(Ok(())));
    }
    // The first retry waits for the least gap between two binds alone.
    assert_eq!(pauses, [100, 250, 500, 1000, 2000, 4000, 8000, 16000, 16000]);
    world.feed(Input::Notified(Ok(())));
    world.feed(Input::Notified(Err("no".to_owned())));
    world.now += GAP;
    assert_eq!(world.feed(Input::Closed), [Action::Bind], "a registration ends the pauses");
}

#[test]
fn deleted_socket_is_made_anew() {
    let mut world = World::registered();
    world.now += SETTLED;
    let actions = world.feed(Input::Checked { registry: Ok(()), own: false });
    assert!(matches!(actions.as_slice(), [Action::ReportEnded(why), Action::End] if why.contains("sockets are gone")));
    assert_eq!(world.feed(Input::Closed), [Action::Bind]);
}

#[test]
fn connections_that_stay_open_are_cut() {
    let mut world = World::registered();
    let actions = world.feed(Input::ServerEnded("broken".to_owned()));
    assert_eq!(actions, [Action::ReportEnded("the server ended: broken".to_owned()), Action::End]);
    assert_eq!((world.wait(), world.machine.wake()), (vec![Action::Cut], None));
}

#[test]
fn shutdown_ends_from_every_phase() {
    for mut world in [World::new(), World::offered(), World::registered()] {
        assert_eq!(world.feed(Input::Shutdown), [Action::End]);
        if !world.machine.is_over() {
            assert_eq!(world.wait(), [Action::Cut]);
            assert_eq!(world.feed(Input::Closed), []);
        }
        assert!(world.machine.is_over());
    }
}
