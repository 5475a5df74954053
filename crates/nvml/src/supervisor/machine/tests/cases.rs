//! The meaning of a failure of NVML for a node on which no agent has worked yet, case by case, as in docs/nvml.md.

use super::*;

/// The result for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// The process ends, so that its container restarts.
    Ends,
    /// The node has no GPUs, which its labels show: it idles until the bus has one.
    Idle,
    /// The node is not ready: labels stay, and linkwise tries again.
    Waits,
}

/// The end of an agent, or an agent that lists no GPU.
#[derive(Clone, Copy, Debug)]
enum Case {
    /// No library loads, or DRIVER_NOT_LOADED.
    NoDriver,
    ListsNone,
    /// Another code, a crash, a hang, or an agent that was killed from outside or not started.
    Failure,
    OverMemory,
}

/// The bus, as columns of the table: with a GPU, without one, with GPUs of another driver, not listed, hanging.
const BUSES: [Option<Bus>; 5] = [Some(Bus::Gpus), Some(Bus::Empty), Some(Bus::OtherDriver), Some(Bus::Unknown), None];

fn becomes(case: Case, bus: Option<Bus>, fail_on_init_error: Option<bool>, others: Others) -> Becomes {
    let mut world = World::new(fail_on_init_error);
    world.happens(Happening::Others(others));
    world.happens(Happening::Passes(0));
    match bus {
        Some(bus) => world.happens(Happening::Probed(bus)),
        // The start waits only a limited time for the bus.
        None => world.happens(Happening::Passes(600)),
    }
    let id = *world.processes.keys().next().expect("an agent is started");
    let end = AgentEnd::not_started("it failed".to_owned());
    let input = match case {
        Case::NoDriver => Input::Ended(id, AgentEnd { reached: Reached::NoDriver, ..end }),
        Case::ListsNone => Input::Message(id, FromAgent::Ready(Box::new(scan(Some(0))))),
        Case::Failure => Input::Ended(id, AgentEnd { cause: Some("crashed"), ..end }),
        Case::OverMemory => Input::Ended(id, AgentEnd { reached: Reached::OverMemory, ..end }),
    };
    let actions = world.machine.step(input, world.now);
    let outcomes = actions.into_iter().filter_map(|action| match action {
        Action::Fail(_) => Some(Becomes::Ends),
        Action::Idle(Idle::NoGpu(_)) => Some(Becomes::Idle),
        Action::Idle(Idle::Waiting(_)) => Some(Becomes::Waits),
        _ => None,
    });
    let outcome = outcomes.last().expect("the node gets an outcome");
    // A node that waits tries again; an idle node only looks at the bus. The agent that lists no GPU keeps running.
    let starts = world.machine.wake().is_some_and(|wake| wake <= world.now + PAUSE);
    assert!(matches!(case, Case::ListsNone) || starts == (outcome == Becomes::Waits), "{case:?} {bus:?}");
    outcome
}

#[test]
fn library_failure_is_not_absence_of_gpus() {
    use Becomes::{Ends as E, Idle as I, Waits as W};
    let table: [(Case, Option<bool>, [Becomes; 5]); 12] = [
        // The columns: a GPU, none, one of another driver, not listed, hanging.
        (Case::NoDriver, None, [E, I, I, I, W]),
        (Case::NoDriver, Some(false), [W, I, I, I, W]),
        (Case::NoDriver, Some(true), [E, E, E, E, E]),
        (Case::ListsNone, None, [W, I, I, I, W]),
        (Case::ListsNone, Some(false), [W, I, I, I, W]),
        (Case::ListsNone, Some(true), [E, I, I, I, W]),
        (Case::Failure, None, [E, W, W, W, W]),
        (Case::Failure, Some(false), [W, W, W, W, W]),
        (Case::Failure, Some(true), [E, E, E, E, E]),
        (Case::OverMemory, None, [W, W, W, W, W]),
        (Case::OverMemory, Some(false), [W, W, W, W, W]),
        (Case::OverMemory, Some(true), [E, E, E, E, E]),
    ];
    for (case, option, row) in table {
        let found = BUSES.map(|bus| becomes(case, bus, option, Others::None));
        assert_eq!(found, row, "{case:?}, --fail-on-init-error {option:?}");
        // A process to which another linkwise may hand over does not end.
        let standing_by = BUSES.map(|bus| becomes(case, bus, option, Others::MayHandOver));
        let waits = row.map(|end| if end == E { W } else { end });
        assert_eq!(standing_by, waits, "{case:?}, --fail-on-init-error {option:?}");
    }
}

/// A standby goes on until no other process can hand over to it.
#[test]
fn standby_ends_for_unlisted_gpus_later() {
    let mut world = World::new(None);
    world.happens(Happening::Others(Others::MayHandOver));
    world.happens(Happening::Passes(0));
    world.happens(Happening::Probed(Bus::Gpus));
    world.happens(Happening::Ready(0, 0));
    let ends = |actions: Vec<Action>| actions.iter().any(|action| matches!(action, Action::Fail(_)));
    let late = world.now + GRACE;
    assert!(!ends(world.machine.step(Input::Tick, late)));
    assert!(world.machine.wake().is_none_or(|wake| wake > late), "the timer spins");
    assert!(ends(world.machine.step(Input::Others(Others::None), late)));
}

#[test]
fn tegra_idles_whatever_its_library_does() {
    let end = || AgentEnd { cause: Some("crashed"), ..AgentEnd::not_started("it crashed".to_owned()) };
    let counts_one = || FromAgent::Ready(Box::new(NodeScan { gpus: Vec::new(), ..scan(Some(1)) }));
    for crashes in [true, false] {
        let mut world = World::new(None);
        world.happens(Happening::Passes(0));
        world.probing = false;
        let host = HostFingerprint { is_tegra: true, ..world.bus(Bus::Empty) };
        world.feed(Input::Probed(Some(host)));
        let id = *world.processes.keys().next().expect("an agent is started");
        let input = if crashes { Input::Ended(id, end()) } else { Input::Message(id, counts_one()) };
        let actions = world.machine.step(input, world.now);
        let idles = |action: &Action| matches!(action, Action::Idle(Idle::NoGpu(reason)) if reason.contains("Tegra"));
        assert!(actions.iter().any(idles), "{actions:?}");
        assert!(actions.contains(&Action::Emit(Event::Observed(Box::default()))), "GPUs that the node had are kept");
    }
}

#[test]
fn uncounted_or_unidentified_gpus_are_not_absent() {
    for (count, why) in [(None, "cannot count"), (Some(8), "counts 8 GPU(s)")] {
        let mut world = World::new(None);
        for happening in [Happening::Passes(0), Happening::Probed(Bus::Empty)] {
            world.happens(happening);
        }
        let id = *world.processes.keys().next().expect("an agent is started");
        let none = NodeScan { gpus: Vec::new(), ..scan(count) };
        let actions = world.machine.step(Input::Message(id, FromAgent::Ready(Box::new(none))), world.now);
        let waits = |action: &Action| matches!(action, Action::Idle(Idle::Waiting(reason)) if reason.contains(why));
        assert!(actions.iter().any(waits), "{actions:?}");
    }
}
