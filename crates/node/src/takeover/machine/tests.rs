//! Two machines and a wire between them: every interleaving of what each does, and the death of either at each step.
//!
//! The world keeps its own books (who lives, who has the lock, whose files and plugins are on) from the actions alone.

use std::collections::{BTreeSet, VecDeque};

use super::*;

const OWNER: usize = 0;
const STANDBY: usize = 1;

/// One process, as far as others can see it.
#[derive(Clone, Debug)]
struct Process {
    machine: TakeoverMachine,
    lives: bool,
    holds_lock: bool,
    files: bool,
    /// Wanted, and whether that has been carried out.
    plugins: bool,
    settled: bool,
    listens: bool,
    retired: bool,
    /// Whether the kubelet can call its DRA plugin.
    registered: bool,
    /// Whether it has the lock on claims: it prepares claims, or ends what it has begun.
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
            retired: false,
            registered: owns,
            has_claims: owns,
            reports: Vec::new(),
        }
    }
}

/// What travels on the wire; the end of the connection too.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Word(Input),
    TakePlace,
    Eof,
}

#[derive(Clone, Debug)]
struct World {
    processes: [Process; 2],
    /// To each process.
    wires: [VecDeque<Said>; 2],
    /// Whether each has the connection open.
    open: [bool; 2],
    /// Whether the standby is of this version, and not of one before claims were handed over.
    joins: bool,
    /// Whether the standby sees no GPU.
    is_blind: bool,
    /// Whether the owner has no driver either.
    lacks_driver: bool,
    now: Duration,
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Hears(usize),
    Carries(usize),
    /// The kubelet registers its DRA plugin.
    Registers(usize),
    TakesClaims(usize),
    /// It ends what it has begun for claims.
    EndsClaims(usize),
    Able,
    Unable,
    /// The owner's driver fails, or is there again.
    OwnersDriver,
    Connects,
    TriesLock,
    Dies(usize),
    /// Time passes until the next timer.
    Waits,
}

impl World {
    fn new() -> Self {
        let limits = Limits::default();
        let owner = Process::new(TakeoverMachine::owner(limits), true);
        let standby = Process::new(TakeoverMachine::standby(limits, true), false);
        Self {
            processes: [owner, standby],
            wires: Default::default(),
            open: [false; 2],
            joins: true,
            is_blind: false,
            lacks_driver: false,
            now: Duration::ZERO,
        }
    }

    /// The standby sees no GPU.
    fn blind() -> Self {
        Self { is_blind: true, ..Self::new() }
    }

    fn feed(&mut self, who: usize, input: Input) {
        for action in self.processes[who].machine.step(input, self.now) {
            self.perform(who, action);
        }
        let process = &mut self.processes[who];
        process.registered &= process.machine.claims() != ClaimsTurn::Away;
        self.check();
    }

    fn say(&mut self, who: usize, word: Input) {
        if self.open[who] && self.open[1 - who] {
            self.wires[1 - who].push_back(Said::Word(word));
        }
    }

    fn hang_up(&mut self, who: usize) {
        if std::mem::take(&mut self.open[who]) && self.open[1 - who] {
            self.wires[1 - who].push_back(Said::Eof);
        }
        self.wires[who].clear();
    }

    fn perform(&mut self, who: usize, action: Action) {
        match action {
            Action::SayTakeOver => self.say(who, Input::TakeOver { joins: self.joins }),
            Action::SayTakePlace => {
                if self.open == [true; 2] {
                    self.wires[1 - who].push_back(Said::TakePlace);
                }
            }
            Action::SayAgreed => self.say(who, Input::Agreed),
            Action::SayJoined => self.say(who, Input::TheyJoined),
            Action::SayRecord => {
                assert!(self.processes[who].holds_lock && !self.processes[who].files, "hands over what it has not");
                assert!(!(self.joins && self.processes[who].has_claims), "a claim is written to: {self:?}");
                self.say(who, Input::Record);
            }
            Action::SayServing => {
                assert!(self.processes[who].plugins && self.processes[who].settled);
                self.say(who, Input::TheyServe);
            }
            Action::SayEnded => {
                assert!(!self.processes[who].plugins && self.processes[who].settled);
                self.say(who, Input::Ended);
            }
            Action::SayDone => self.say(who, Input::TheyAreDone),
            Action::SayFailed => self.say(who, Input::TheyFailed),
            Action::SayBack => self.say(who, Input::Back),
            Action::HangUp => self.hang_up(who),
            Action::Adopt => assert!(self.processes[who].holds_lock, "adopts without the lock"),
            Action::Files(on) => self.processes[who].files = on,
            Action::Plugins(on) => {
                let process = &mut self.processes[who];
                process.settled &= process.plugins == on;
                process.plugins = on;
            }
            Action::Renew => assert!(self.processes[who].plugins),
            Action::Listen => self.processes[who].listens = true,
            Action::LetGo => self.processes[who].holds_lock = false,
            Action::Retire => self.processes[who].retired = true,
            Action::Report(outcome) => self.processes[who].reports.push(outcome),
        }
    }

    fn check(&self) {
        let alive = || self.processes.iter().filter(|process| process.lives);
        // One that hung hears it before it goes on.
        let taken_back = self.wires.iter().any(|wire| wire.contains(&Said::Word(Input::Back)));
        let writers = alive().filter(|process| process.files).count();
        assert!(writers <= 1 || taken_back, "two write the same files: {self:?}");
        let lock = alive().any(|process| process.holds_lock);
        for process in alive() {
            assert!(lock || !process.plugins, "serves while anybody could take the lock: {self:?}");
            assert!(!process.files || process.holds_lock, "writes without the lock: {self:?}");
            assert!(!process.retired || !process.plugins && !process.holds_lock);
        }
        assert!(alive().filter(|process| process.has_claims).count() <= 1);
    }

    /// Whether the kubelet finds a DRA plugin, all of whose calls are answered in the end.
    fn is_called(&self) -> bool {
        self.processes.iter().any(|process| process.lives && process.registered)
    }

    /// Whether a living process has plugins that the kubelet knows.
    fn is_served(&self) -> bool {
        self.processes.iter().any(|process| process.lives && process.plugins && process.settled)
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for who in [OWNER, STANDBY] {
            let process = &self.processes[who];
            if process.lives && self.open[who] && !self.wires[who].is_empty() {
                moves.push(Move::Hears(who));
            }
            let stage = process.machine.stage();
            let joins = stage == Stage::Joining && process.registered;
            let drained = stage == Stage::Draining && !process.has_claims;
            let waits = matches!(stage, Stage::Starting | Stage::Settling | Stage::Ending) || joins || drained;
            if process.lives && (!process.settled || waits) {
                moves.push(Move::Carries(who));
            }
            let claims = process.machine.claims();
            if process.lives && claims != ClaimsTurn::Away && !process.registered {
                moves.push(Move::Registers(who));
            }
            let other = &self.processes[1 - who];
            let is_free = !(process.has_claims || other.lives && other.has_claims);
            if process.lives && claims == ClaimsTurn::Holds && is_free {
                moves.push(Move::TakesClaims(who));
            }
            if process.lives && claims != ClaimsTurn::Holds && process.has_claims {
                moves.push(Move::EndsClaims(who));
            }
        }
        let (owner, standby) = (&self.processes[OWNER], &self.processes[STANDBY]);
        if standby.lives && matches!(standby.machine.stage(), Stage::StandingBy) {
            match standby.machine {
                TakeoverMachine { able: false, .. } if !self.is_blind => moves.push(Move::Able),
                TakeoverMachine { unable: false, .. } if self.is_blind => moves.push(Move::Unable),
                _ => {}
            }
            // Another connection of the same process would be refused.
            if self.open == [false; 2] && owner.lives && owner.listens && !owner.retired {
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
            Move::Hears(who) => match self.wires[who].pop_front() {
                Some(Said::Word(word)) => {
                    if word == Input::Record {
                        self.processes[who].holds_lock = true;
                    }
                    self.feed(who, word);
                }
                // The executor asks whether the owner has the driver.
                Some(Said::TakePlace) if self.lacks_driver && self.processes[who].machine.stage() == Stage::Owning => {
                    self.feed(who, Input::TakeOver { joins: true });
                }
                Some(Said::TakePlace) => self.say(who, Input::PlaceKept),
                Some(Said::Eof) => {
                    self.open[who] = false;
                    self.feed(who, Input::Lost);
                }
                None => {}
            },
            Move::Carries(who) => {
                self.processes[who].settled = true;
                let other_serves = self.processes[1 - who].lives && self.processes[1 - who].plugins;
                match self.processes[who].machine.stage() {
                    Stage::Starting => self.feed(who, Input::Serving),
                    Stage::Settling if !other_serves => self.feed(who, Input::Alone),
                    Stage::Ending => self.feed(who, Input::PluginsEnded),
                    Stage::Joining => self.feed(who, Input::Joined),
                    Stage::Draining => self.feed(who, Input::ClaimsEnded),
                    _ => {}
                }
            }
            Move::Registers(who) => self.processes[who].registered = true,
            Move::TakesClaims(who) => self.processes[who].has_claims = true,
            Move::EndsClaims(who) => self.processes[who].has_claims = false,
            Move::Able => self.feed(STANDBY, Input::Able),
            Move::Unable => self.feed(STANDBY, Input::Unable),
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

    /// Lets everything happen that happens without time; somebody must serve then.
    fn settle(mut self) -> Self {
        for _ in 0..200 {
            match self.moves().first() {
                Some(next) => self.make(*next),
                None => return self,
            }
        }
        panic!("never at rest: {self:?}");
    }

    fn key(&self) -> String {
        format!("{self:?}")
    }
}

/// Walks every reachable world; `and` sees each.
fn walk(extra: impl Fn(&World) -> Vec<Move>, and: impl FnMut(&World)) -> usize {
    walk_from(World::new(), extra, and)
}

fn walk_from(world: World, extra: impl Fn(&World) -> Vec<Move>, mut and: impl FnMut(&World)) -> usize {
    let (mut seen, mut waiting) = (BTreeSet::new(), vec![world]);
    while let Some(world) = waiting.pop() {
        if !seen.insert(world.key()) {
            continue;
        }
        and(&world);
        for next in world.moves().into_iter().chain(extra(&world)) {
            let mut then = world.clone();
            then.make(next);
            waiting.push(then);
        }
    }
    seen.len()
}

#[test]
fn somebody_serves_all_the_while() {
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
fn standby_of_an_older_version_takes_over_without_joining() {
    let world = World { joins: false, ..World::new() };
    let none = |_: &World| Vec::new();
    walk_from(world, none, |world| {
        assert!(world.is_served(), "{world:?}");
        let [owner, standby] = &world.processes;
        // Its DRA plugin begins when the owner has let go; so the owner's prepares claims until then.
        assert!(owner.retired || owner.has_claims || owner.machine.claims() == ClaimsTurn::Holds, "{world:?}");
        assert!(!world.moves().is_empty() || standby.has_claims && standby.registered);
    });
}

#[test]
fn death_at_any_step_leaves_one_that_serves() {
    let mut deaths = 0;
    walk(
        |_| Vec::new(),
        |world| {
            for who in [OWNER, STANDBY] {
                let mut world = world.clone();
                let is_over = world.processes[STANDBY].machine.stage() == Stage::Owning;
                world.make(Move::Dies(who));
                let world = world.settle();
                // Once the standby has said that it has all, its death is no part of the takeover.
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
fn side_that_hangs_ends_the_takeover() {
    // Time passes at any step instead of what should come next.
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
fn pod_that_handed_over_asks_nothing_and_serves_once_the_lock_is_free() {
    let mut world = World::new();
    world.processes[STANDBY].machine = TakeoverMachine::standby(Limits::default(), false);
    world.make(Move::Able);
    world.make(Move::Connects);
    world = world.settle();
    assert_eq!(world.processes[STANDBY].machine.stage(), Stage::StandingBy);
    world.make(Move::Dies(OWNER));
    world = world.settle();
    assert_eq!(world.processes[STANDBY].machine.stage(), Stage::Owning);
    assert!(world.is_served());
}

#[test]
fn retired_process_stays_so() {
    let mut machine = TakeoverMachine::owner(Limits::default());
    for input in [Input::TakeOver { joins: false }, Input::TheyServe, Input::PluginsEnded, Input::TheyAreDone] {
        assert!(!machine.step(input, Duration::ZERO).is_empty());
    }
    let all = [
        Input::Free,
        Input::Able,
        Input::Connected,
        Input::Record,
        Input::TakeOver { joins: true },
        Input::Lost,
        Input::Tick,
    ];
    for input in all {
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
            // Its container is made anew, and it asks again.
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
            } else if standby.machine.connected {
                assert!(!standby.machine.may_end(), "its container would be made anew in the middle: {world:?}");
            }
        },
    );
    assert!(done > 0);
}

/// The driver comes and goes at the owner, either side hangs or dies: somebody owns the node in the end.
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
            let is_over = world.processes[STANDBY].machine.stage() == Stage::Owning;
            let world = world.settle();
            let owners = world.processes.iter().filter(|process| process.lives && process.holds_lock && process.files);
            assert!(is_over && dies == Some(STANDBY) || owners.count() == 1, "{dies:?} {world:?}");
        }
    });
}

#[test]
fn failed_takeovers_come_after_growing_pauses() {
    let mut machine = TakeoverMachine::standby(Limits::default(), true);
    let mut now = Duration::ZERO;
    machine.step(Input::Able, now);
    for pause in [10, 20, 40, 80, 160, 320, 600, 600] {
        assert_eq!(machine.step(Input::Connected, now), [Action::SayTakeOver]);
        machine.step(Input::Record, now);
        now += Limits::default().start;
        let actions = machine.step(Input::Tick, now);
        assert!(actions.contains(&Action::Report(Outcome::Failed)), "{actions:?}");
        // The owner listens again at once; it is asked when the pause is over.
        assert_eq!(machine.step(Input::Connected, now), []);
        assert_eq!(machine.wake(), Some(now + Duration::from_secs(pause)));
        now += Duration::from_secs(pause);
        assert_eq!(machine.step(Input::Tick, now), [Action::SayTakeOver]);
        machine.step(Input::Lost, now);
    }
    // One that takes over starts anew.
    machine.step(Input::Free, now);
    assert!(!machine.pauses.is_failing());
}

#[test]
fn owner_without_the_lock_stands_by_for_the_one_that_has_it() {
    for successor in [false, true] {
        let mut machine = TakeoverMachine::owner(Limits::default());
        let now = Duration::from_secs(5);
        let actions = machine.step(Input::Held { successor }, now);
        assert_eq!(actions[..2], [Action::Files(false), Action::Plugins(false)]);
        assert_eq!((machine.stage(), machine.claims()), (Stage::StandingBy, ClaimsTurn::Away));
        assert_eq!(machine.step(Input::Connected, now), [], "not at once");
        let asks = machine.step(Input::Tick, machine.wake().unwrap());
        assert_eq!(asks.contains(&Action::SayTakeOver), successor);
        // A lock that is free brings all of it back.
        machine.step(Input::Lost, now);
        assert!(machine.step(Input::Free, now).contains(&Action::Plugins(true)));
    }
}

#[test]
fn standby_learns_late_that_it_takes_over() {
    let mut machine = TakeoverMachine::standby(Limits::default(), false);
    machine.step(Input::Able, Duration::ZERO);
    assert_eq!(machine.step(Input::Held { successor: true }, Duration::ZERO), []);
    assert_eq!(machine.step(Input::Connected, Duration::ZERO), [Action::SayTakeOver]);
}
