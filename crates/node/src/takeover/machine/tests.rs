//! Two state machines and a wire between them: every interleaving of their steps, and the death of either at each step.
//!
//! The world keeps its own records (which process lives, has the lock, writes files, has claims and plugins) from
//! actions and duties alone. Only the state machines keep both processes from touching claims at the same time.

use std::collections::{BTreeSet, VecDeque};

use super::*;

const OWNER: usize = 0;
const STANDBY: usize = 1;

/// A process, as other processes see it.
#[derive(Clone, Debug)]
struct Process {
    machine: TakeoverMachine,
    lives: bool,
    holds_lock: bool,
    files: bool,
    /// True if the plugins have to run.
    plugins: bool,
    /// True once the plugins run, or have ended, as `plugins` demands.
    settled: bool,
    listens: bool,
    /// True if the kubelet can call its DRA plugin.
    registered: bool,
    /// True while the process prepares claims, or finishes calls that it has begun.
    has_claims: bool,
    reports: Vec<Outcome>,
}

impl Process {
    fn new(machine: TakeoverMachine, owns: bool) -> Self {
        Self {
            machine,
            lives: true,
            holds_lock: owns,
            files: owns,
            plugins: owns,
            settled: true,
            listens: owns,
            registered: owns,
            has_claims: owns,
            reports: Vec::new(),
        }
    }
}

/// A message on the wire, or the end of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sent {
    Message(Input),
    TakePlace,
    Eof,
}

#[derive(Clone, Debug)]
struct World {
    processes: [Process; 2],
    /// The wire to each process.
    wires: [VecDeque<Sent>; 2],
    /// True for a process that has the connection open.
    open: [bool; 2],
    /// True if the standby sees no GPU.
    is_blind: bool,
    /// True if the owner has no driver either.
    lacks_driver: bool,
    now: Duration,
}

/// A step of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Receives(usize),
    /// The process has started or ended its plugins, as it has to.
    Settles(usize),
    /// The process has met the condition of its stage.
    Meets(usize),
    /// The kubelet registers the process's DRA plugin.
    Registers(usize),
    TakesClaims(usize),
    /// The process has finished the calls for claims that it had begun.
    EndsClaims(usize),
    LooksForGpus,
    /// The owner's driver fails, or works again.
    OwnersDriver,
    Connects,
    TriesLock,
    Dies(usize),
    /// Time passes until the next timer.
    Waits,
}

impl World {
    fn new() -> Self {
        let owner = Process::new(TakeoverMachine::owner(), true);
        let standby = Process::new(TakeoverMachine::standby(true), false);
        Self {
            processes: [owner, standby],
            wires: Default::default(),
            open: [false; 2],
            is_blind: false,
            lacks_driver: false,
            now: Duration::ZERO,
        }
    }

    /// A world in which the standby sees no GPU.
    fn blind() -> Self {
        Self { is_blind: true, ..Self::new() }
    }

    fn feed(&mut self, who: usize, input: Input) {
        let actions = self.processes[who].machine.step(input, self.now);
        let process = &mut self.processes[who];
        let (stage, duties) = (process.machine.stage(), process.machine.duties());
        if !duties.files {
            // By now every write has ended.
            (process.files, process.has_claims) = (false, process.has_claims && duties.claims);
        }
        process.settled &= process.plugins == duties.plugins;
        process.plugins = duties.plugins;
        for action in actions {
            self.perform(who, action);
        }
        let process = &mut self.processes[who];
        process.files = duties.files;
        process.registered &= duties.dra;
        process.holds_lock &= !(process.machine.stands_by() || stage == Stage::Retired);
        process.listens |= stage == Stage::Owning;
        self.check();
    }

    fn send(&mut self, who: usize, sent: Sent) {
        if self.open[who] && self.open[1 - who] {
            self.wires[1 - who].push_back(sent);
        }
    }

    fn hang_up(&mut self, who: usize) {
        if std::mem::take(&mut self.open[who]) && self.open[1 - who] {
            self.wires[1 - who].push_back(Sent::Eof);
        }
        self.wires[who].clear();
    }

    fn perform(&mut self, who: usize, action: Action) {
        let process = &mut self.processes[who];
        let sent = match action {
            Action::Ask if process.machine.takes_place() => Sent::TakePlace,
            Action::Ask => Sent::Message(Input::TakeOver),
            Action::Send(Message::Agreed) => Sent::Message(Input::Agreed),
            Action::Send(Message::Joined) => Sent::Message(Input::TheyJoined),
            Action::HandOver => {
                assert!(process.holds_lock && !process.files && !process.has_claims, "hands over too early");
                Sent::Message(Input::Record)
            }
            Action::Send(Message::Serving) => {
                assert!(process.plugins && process.settled);
                Sent::Message(Input::TheyServe)
            }
            Action::Send(Message::Back) => Sent::Message(Input::Refused),
            Action::Send(message) => unreachable!("the state machine sends {message:?}"),
            Action::Adopt => return assert!(process.holds_lock, "adopts without the lock"),
            Action::Renew => return assert!(process.plugins),
            Action::End(outcome) => {
                if outcome == Outcome::HandedOver {
                    assert!(!process.plugins && process.settled, "its plugins have not ended");
                }
                process.reports.push(outcome);
                return self.hang_up(who);
            }
        };
        self.send(who, sent);
    }

    fn check(&self) {
        let alive = || self.processes.iter().filter(|process| process.lives);
        // A standby that hung reads the refusal before it does anything else.
        let taken_back = self.wires.iter().any(|wire| wire.contains(&Sent::Message(Input::Refused)));
        let lock = alive().any(|process| process.holds_lock);
        for has in [|process: &Process| process.files, |process: &Process| process.has_claims] {
            let count = alive().filter(|process| has(process)).count();
            assert!(count <= 1 || taken_back, "two write the same files, or touch the same claims: {self:?}");
        }
        for process in alive() {
            assert!(lock || !process.plugins, "serves while any process could take the lock: {self:?}");
            assert!(!process.files || process.holds_lock, "writes without the lock: {self:?}");
            let is_retired = process.machine.stage() == Stage::Retired;
            assert!(!is_retired || !process.plugins && !process.holds_lock);
        }
    }

    /// Returns true if the kubelet finds a DRA plugin. Every call to such a plugin is answered in the end.
    fn is_called(&self) -> bool {
        self.processes.iter().any(|process| process.lives && process.registered)
    }

    /// Returns true if a living process has plugins that the kubelet knows.
    fn is_served(&self) -> bool {
        self.processes.iter().any(|process| process.lives && process.plugins && process.settled)
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for who in [OWNER, STANDBY] {
            let process = &self.processes[who];
            if !process.lives {
                continue;
            }
            let duties = process.machine.duties();
            let meets = match process.machine.stage() {
                Stage::Joining => process.registered,
                Stage::Draining => !process.has_claims,
                Stage::Starting | Stage::Ending => process.settled,
                _ => false,
            };
            let possible = [
                (self.open[who] && !self.wires[who].is_empty(), Move::Receives(who)),
                (!process.settled, Move::Settles(who)),
                (meets, Move::Meets(who)),
                (duties.dra && !process.registered, Move::Registers(who)),
                (duties.claims && !process.has_claims, Move::TakesClaims(who)),
                (!duties.claims && process.has_claims, Move::EndsClaims(who)),
            ];
            moves.extend(possible.into_iter().filter_map(|(is_possible, next)| is_possible.then_some(next)));
        }
        let (owner, standby) = (&self.processes[OWNER], &self.processes[STANDBY]);
        if standby.lives && standby.machine.stage() == Stage::StandingBy {
            if standby.machine.sees_gpus() != Some(!self.is_blind) {
                moves.push(Move::LooksForGpus);
            }
            // The owner answers a new connection only after the end of the previous one.
            let is_owned = owner.lives && owner.machine.stage() != Stage::Retired;
            if self.open == [false; 2] && is_owned && owner.listens {
                moves.push(Move::Connects);
            }
            if !(self.open[STANDBY] || owner.lives && owner.holds_lock) {
                moves.push(Move::TriesLock);
            }
        }
        moves
    }

    fn make(&mut self, next: Move) {
        match next {
            Move::Receives(who) => match self.wires[who].pop_front() {
                Some(Sent::Message(message)) => {
                    if message == Input::Record {
                        self.processes[who].holds_lock = true;
                    }
                    self.feed(who, message);
                }
                // The executor asks whether the owner has the driver.
                Some(Sent::TakePlace) if self.lacks_driver => self.feed(who, Input::TakeOver),
                Some(Sent::TakePlace) => self.send(who, Sent::Message(Input::Refused)),
                Some(Sent::Eof) => {
                    self.open[who] = false;
                    let other = &self.processes[1 - who];
                    let is_free = self.processes[who].machine.stands_by() && !(other.lives && other.holds_lock);
                    self.processes[who].holds_lock |= is_free;
                    self.feed(who, if is_free { Input::Free } else { Input::Lost });
                }
                None => {}
            },
            Move::Settles(who) => self.processes[who].settled = true,
            Move::Meets(who) => self.feed(who, Input::Met),
            Move::Registers(who) => self.processes[who].registered = true,
            Move::TakesClaims(who) => {
                self.processes[who].has_claims = true;
                self.check();
            }
            Move::EndsClaims(who) => self.processes[who].has_claims = false,
            Move::LooksForGpus => self.feed(STANDBY, Input::SeesGpus(!self.is_blind)),
            Move::OwnersDriver => self.lacks_driver = !self.lacks_driver,
            Move::Connects => {
                self.open = [true; 2];
                self.wires = Default::default();
                self.feed(STANDBY, Input::Connected);
            }
            Move::TriesLock => {
                self.processes[STANDBY].holds_lock = true;
                self.feed(STANDBY, Input::Free);
            }
            Move::Dies(who) => {
                self.hang_up(who);
                let process = &mut self.processes[who];
                (process.lives, process.holds_lock, process.has_claims) = (false, false, false);
            }
            Move::Waits => {
                let wakes = self.processes.iter().filter(|process| process.lives);
                if let Some(wake) = wakes.filter_map(|process| process.machine.wake()).min() {
                    self.now = self.now.max(wake);
                    for who in [OWNER, STANDBY] {
                        if self.processes[who].lives {
                            self.feed(who, Input::Tick);
                        }
                    }
                }
            }
        }
    }

    /// Makes possible moves until none is left; no time passes.
    fn settle(mut self) -> Self {
        for _ in 0..200 {
            match self.moves().first() {
                Some(next) => self.make(*next),
                None => return self,
            }
        }
        panic!("not at rest after 200 moves: {self:?}");
    }

    fn key(&self) -> String {
        format!("{self:?}")
    }
}

/// Calls `visit` with every world that can be reached; returns their number.
fn walk(extra: impl Fn(&World) -> Vec<Move>, visit: impl FnMut(&World)) -> usize {
    walk_from(World::new(), extra, visit)
}

fn walk_from(world: World, extra: impl Fn(&World) -> Vec<Move>, mut visit: impl FnMut(&World)) -> usize {
    let (mut seen, mut waiting) = (BTreeSet::new(), vec![world]);
    while let Some(world) = waiting.pop() {
        if !seen.insert(world.key()) {
            continue;
        }
        visit(&world);
        for next in world.moves().into_iter().chain(extra(&world)) {
            let mut then = world.clone();
            then.make(next);
            waiting.push(then);
        }
    }
    seen.len()
}

#[test]
fn takeover_leaves_no_gap_in_service() {
    let mut done = 0;
    walk(
        |_| Vec::new(),
        |world| {
            assert!(world.is_served() && world.is_called(), "{world:?}");
            if world.moves().is_empty() {
                let [owner, standby] = &world.processes;
                assert_eq!((owner.machine.stage(), standby.machine.stage()), (Stage::Retired, Stage::Owning));
                assert!(
                    standby.holds_lock && standby.files && standby.plugins && standby.listens && standby.has_claims
                );
                assert_eq!(
                    (&*owner.reports, &*standby.reports),
                    (&[Outcome::HandedOver][..], &[Outcome::TookOver][..])
                );
                done += 1;
            }
        },
    );
    assert!(done > 0);
}

#[test]
fn death_at_any_step_leaves_one_that_serves() {
    let mut deaths = 0;
    walk(
        |_| Vec::new(),
        |world| {
            for who in [OWNER, STANDBY] {
                let mut world = world.clone();
                let is_over = world.processes[OWNER].machine.stage() == Stage::Retired;
                world.make(Move::Dies(who));
                let world = world.settle();
                // Once the owner's plugins have ended, the takeover is over.
                if !(is_over && who == STANDBY) {
                    let left = &world.processes[1 - who];
                    assert!(world.is_served() && left.files && left.holds_lock && left.listens, "{world:?}");
                    assert!(left.registered && left.has_claims, "{world:?}");
                    assert_eq!(left.machine.stage(), Stage::Owning);
                    deaths += 1;
                }
            }
        },
    );
    assert!(deaths > 20, "{deaths}");
}

#[test]
fn side_that_hangs_leaves_one_owner_that_serves() {
    // At any step time may pass instead of the next move.
    walk(
        |world| if world.now > Duration::from_secs(200) { Vec::new() } else { vec![Move::Waits] },
        |world| {
            let world = world.clone().settle();
            let owners = world.processes.iter().filter(|process| process.machine.stage() == Stage::Owning);
            assert!(world.is_served() && owners.count() == 1, "{world:?}");
        },
    );
}

#[test]
fn process_that_handed_over_waits_for_the_lock() {
    let mut world = World::new();
    world.processes[STANDBY].machine = TakeoverMachine::standby(false);
    world.make(Move::LooksForGpus);
    world.make(Move::Connects);
    world = world.settle();
    assert_eq!(world.processes[STANDBY].machine.stage(), Stage::StandingBy);
    world.make(Move::Dies(OWNER));
    world = world.settle();
    assert_eq!(world.processes[STANDBY].machine.stage(), Stage::Owning);
    assert!(world.is_served());
}

#[test]
fn retired_process_stays_retired() {
    let mut machine = TakeoverMachine::owner();
    for input in [Input::TakeOver, Input::TheyJoined, Input::Met, Input::TheyServe, Input::Met] {
        machine.step(input, Duration::ZERO);
    }
    assert_eq!((machine.stage(), machine.duties()), (Stage::Retired, Duties::default()));
    let later = [
        Input::Free,
        Input::SeesGpus(true),
        Input::Connected,
        Input::Record,
        Input::TakeOver,
        Input::Met,
        Input::Lost,
        Input::Tick,
    ];
    for input in later {
        assert_eq!(machine.step(input, Duration::from_secs(1000)), []);
        assert_eq!(machine.stage(), Stage::Retired);
    }
}

#[test]
fn owner_with_a_driver_keeps_its_place() {
    let waits = |world: &World| if world.now < Duration::from_secs(20) { vec![Move::Waits] } else { Vec::new() };
    let mut refused = 0;
    walk_from(World::blind(), waits, |world| {
        let [owner, standby] = &world.processes;
        assert!(owner.machine.stage() == Stage::Owning && owner.files && owner.plugins, "{world:?}");
        assert!(standby.machine.stands_by() && !standby.holds_lock, "{world:?}");
        if standby.machine.wake().is_some() && standby.machine.stage() == Stage::StandingBy {
            // The standby may end: the kubelet restarts its container, which asks again.
            assert!(standby.machine.may_end());
            refused += 1;
        }
    });
    assert!(refused > 0);
}

#[test]
fn owner_without_a_driver_gives_up_its_place() {
    let mut done = 0;
    walk_from(
        World { lacks_driver: true, ..World::blind() },
        |_| Vec::new(),
        |world| {
            assert!(world.is_served() && world.is_called(), "{world:?}");
            let [owner, standby] = &world.processes;
            if world.moves().is_empty() {
                assert_eq!((owner.machine.stage(), standby.machine.stage()), (Stage::Retired, Stage::Owning));
                assert!(standby.machine.takes_place() && standby.holds_lock && standby.listens);
                done += 1;
            } else if standby.machine.is_connected {
                assert!(!standby.machine.may_end(), "its container would restart during the takeover: {world:?}");
            }
        },
    );
    assert!(done > 0);
}

/// The owner's driver fails and works again, and either side hangs or dies: in the end one process owns the node.
#[test]
fn place_is_taken_or_kept_whatever_the_driver_does() {
    let extra = |world: &World| match world.now > Duration::from_secs(40) {
        true => vec![Move::OwnersDriver],
        false => vec![Move::OwnersDriver, Move::Waits],
    };
    walk_from(World::blind(), extra, |world| {
        for dies in [None, Some(OWNER), Some(STANDBY)] {
            let mut world = world.clone();
            dies.into_iter().for_each(|who| world.make(Move::Dies(who)));
            let is_over = world.processes[OWNER].machine.stage() == Stage::Retired;
            let world = world.settle();
            let owners = world.processes.iter().filter(|process| process.lives && process.holds_lock && process.files);
            assert!(is_over && dies == Some(STANDBY) || owners.count() == 1, "{dies:?} {world:?}");
        }
    });
}

#[test]
fn pauses_grow_with_failed_takeovers() {
    let asks = [Action::Ask];
    let mut machine = TakeoverMachine::standby(true);
    let mut now = Duration::ZERO;
    machine.step(Input::SeesGpus(true), now);
    machine.step(Input::Connected, now);
    for pause in [10, 20, 40, 80, 160, 320, 600, 600] {
        for input in [Input::Agreed, Input::Met, Input::Record] {
            machine.step(input, now);
        }
        now += START_TIMEOUT;
        assert_eq!(machine.step(Input::Tick, now), [Action::End(Outcome::Failed)]);
        // The standby reconnects to the owner at once, and asks when the pause is over.
        assert_eq!(machine.step(Input::Connected, now), []);
        assert_eq!(machine.wake(), Some(now + Duration::from_secs(pause)));
        now += Duration::from_secs(pause);
        assert_eq!(machine.step(Input::Tick, now), asks);
    }
    // A process that has become the owner forgets its failures.
    machine.step(Input::Lost, now);
    machine.step(Input::Free, now);
    assert!(!machine.pauses.is_failing());
}

#[test]
fn owner_without_the_lock_stands_by() {
    for can_take_over in [false, true] {
        let mut machine = TakeoverMachine::owner();
        let now = Duration::from_secs(5);
        assert_eq!(machine.step(Input::Held { can_take_over }, now), [Action::End(Outcome::Failed)]);
        assert_eq!((machine.stage(), machine.duties()), (Stage::StandingBy, Duties::default()));
        assert_eq!(machine.step(Input::Connected, now), [], "asks before the pause is over");
        let asks = machine.step(Input::Tick, machine.wake().unwrap());
        assert_eq!(asks.contains(&Action::Ask), can_take_over);
        // The process becomes the owner again when the lock is free.
        machine.step(Input::Lost, now);
        machine.step(Input::Free, now);
        assert_eq!(machine.stage(), Stage::Owning);
    }
}

#[test]
fn standby_learns_late_that_it_can_take_over() {
    let mut machine = TakeoverMachine::standby(false);
    machine.step(Input::SeesGpus(true), Duration::ZERO);
    assert_eq!(machine.step(Input::Held { can_take_over: true }, Duration::ZERO), []);
    assert_eq!(machine.step(Input::Connected, Duration::ZERO), [Action::Ask]);
}
