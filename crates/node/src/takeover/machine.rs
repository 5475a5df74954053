//! The machine of a takeover, for both sides: `step(input, now) -> actions`. A process stands by, takes over, serves,
//! and is taken over from.
//!
//! Pure: no I/O, no clock. The node is its one caller: it feeds inputs and performs actions. docs/life-cycle.md has
//! the picture; the tests beside this file let two machines speak over a wire that loses the end of everything.

use std::time::Duration;

use linkwise_core::backoff::Backoff;
use linkwise_kubelet::dra::ClaimsTurn;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The owner's time to answer.
    pub answer: Duration,
    /// The time for the kubelet to register our DRA plugin beside the owner's. After it the takeover goes on without.
    pub join: Duration,
    /// The owner's time to finish the calls for claims that it has begun, longer than the kubelet waits for one.
    pub drain: Duration,
    /// The time between the owner's answer and the registration of our plugins.
    pub start: Duration,
    /// The time that the owner allows for that.
    pub patience: Duration,
    /// The pauses after takeovers that failed.
    pub pauses: Backoff,
    /// The pause after an owner's refusal.
    pub refused: Duration,
    /// The pause after an owner kept its place: its driver may fail later.
    pub place_kept: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            answer: seconds(5),
            join: seconds(5),
            drain: seconds(60),
            start: seconds(30),
            patience: seconds(60),
            pauses: Backoff::new(seconds(10), seconds(600)),
            refused: Duration::from_millis(500),
            place_kept: seconds(5),
        }
    }
}

/// A stage of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Another process serves; this one waits for its end, or to take over from it.
    StandingBy,
    /// The owner has been asked.
    Asking,
    /// The owner agreed; our DRA plugin registers beside its own.
    Joining,
    /// The kubelet calls our DRA plugin, whose calls wait; the owner finishes those that it has.
    Receiving,
    /// The owner handed over files and lock, and serves still; our plugins begin beside its own.
    Starting,
    /// Our plugins serve, and the owner's are ending.
    Waiting,
    /// The owner's plugins have ended, and the kubelet may not have seen it yet.
    Settling,
    /// This process is the owner, alone.
    Owning,
    /// A standby's DRA plugin registers.
    Agreeing,
    /// A standby's DRA plugin has the kubelet's new calls; ours finishes its own.
    Draining,
    /// A standby has files and lock; our plugins serve.
    Yielding,
    /// The standby's plugins serve; our plugins are ending.
    Ending,
    /// Our plugins have ended.
    Ended,
    /// This process has handed over, for good.
    Retired,
}

/// An input of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The lock was free, and this process has it.
    Free,
    /// Another process has the lock, and this process learns it late: its disk hung, or could not have a lock. A
    /// `successor` takes over.
    Held {
        successor: bool,
    },
    /// This node could serve: its GPUs are known.
    Able,
    /// This process sees no GPU, because the driver fails or is released.
    Unable,
    Connected,
    /// The owner will hand over, once our DRA plugin is registered.
    Agreed,
    /// The kubelet calls our DRA plugin, or this node has none.
    Joined,
    /// The owner handed over its record and the lock.
    Record,
    /// The owner does not hand over now.
    Refused,
    /// The owner has the driver, and keeps its place.
    PlaceKept,
    /// The owner takes back what it gave.
    Back,
    /// Every plugin of ours is registered, and outlasts the end of the owner's.
    Serving,
    /// The owner's plugins have ended.
    Ended,
    /// Every plugin of ours is registered, and has no plugin before it any more.
    Alone,
    /// A standby wants to take over. One of an older version does not `join` first: its DRA plugin begins when ours has
    /// ended.
    TakeOver {
        joins: bool,
    },
    /// The kubelet calls the standby's DRA plugin.
    TheyJoined,
    /// No call for a claim is under way, and nothing of one writes.
    ClaimsEnded,
    /// Every plugin of the standby is registered.
    TheyServe,
    TheyFailed,
    /// The standby has all.
    TheyAreDone,
    /// Our plugins have ended.
    PluginsEnded,
    /// The connection to the other side is gone, or the other side sent something else than a word.
    Lost,
    /// The moment of [`TakeoverMachine::wake`] has come.
    Tick,
}

/// An order to the node. Orders are carried out in sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    SayTakeOver,
    /// Ask an owner that has no driver for its place.
    SayTakePlace,
    SayAgreed,
    SayJoined,
    /// Hand over the record and the lock, which is kept too.
    SayRecord,
    SayServing,
    SayEnded,
    SayDone,
    SayFailed,
    /// Take back what was given.
    SayBack,
    HangUp,
    /// Restore the node's state from the record that came, or else from the file.
    Adopt,
    /// Write the node's files, or stop to. It has stopped when every write has ended.
    Files(bool),
    Plugins(bool),
    /// Have the plugins register again: another one may have registered over them.
    Renew,
    /// Become reachable for others, as the owner.
    Listen,
    /// Close the lock.
    LetGo,
    /// End everything but the probes.
    Retire,
    Report(Outcome),
}

/// The outcome of a takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This process took over from a living one, which has ended its part.
    TookOver,
    /// This process took over from one that ended.
    Succeeded,
    /// This process could not take over, and stands by again.
    Failed,
    /// Another process took over from this one.
    HandedOver,
    /// Another process could not take over from this one, which goes on.
    WentOn,
}

/// The state of one process.
#[derive(Clone, Debug)]
pub struct TakeoverMachine {
    limits: Limits,
    stage: Stage,
    /// True if the process takes over from a living owner.
    successor: bool,
    /// True if the standby that takes over has registered its DRA plugin before.
    joined: bool,
    able: bool,
    unable: bool,
    /// True if the process asked last for the place of an owner without a driver.
    place: bool,
    /// True if the owner keeps its place, or did not answer.
    kept: bool,
    connected: bool,
    until: Option<Duration>,
    pauses: Backoff,
}

impl TakeoverMachine {
    /// A process that holds the lock from its start.
    pub fn owner(limits: Limits) -> Self {
        Self { stage: Stage::Owning, able: true, ..Self::standby(limits, false) }
    }

    /// A process that found the lock held; a `successor` asks the owner, once it could serve.
    pub fn standby(limits: Limits, successor: bool) -> Self {
        Self {
            limits,
            stage: Stage::StandingBy,
            successor,
            joined: false,
            able: false,
            unable: false,
            place: false,
            kept: false,
            connected: false,
            until: None,
            pauses: limits.pauses,
        }
    }

    /// The current stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The turn of this process's DRA plugin.
    pub fn claims(&self) -> ClaimsTurn {
        match self.stage {
            Stage::StandingBy | Stage::Asking | Stage::Retired => ClaimsTurn::Away,
            Stage::Joining | Stage::Receiving | Stage::Draining => ClaimsTurn::Waits,
            Stage::Yielding | Stage::Ending | Stage::Ended if self.joined => ClaimsTurn::Waits,
            _ => ClaimsTurn::Holds,
        }
    }

    /// Returns true if another process serves this node.
    pub fn stands_by(&self) -> bool {
        matches!(self.stage, Stage::StandingBy | Stage::Asking | Stage::Joining | Stage::Receiving)
    }

    /// Returns true if this process sees no GPU, and asked for the place of an owner without a driver.
    pub fn takes_place(&self) -> bool {
        self.place
    }

    /// Returns true if NVML that cannot be initialised may end this process. A successor asks for the owner's place
    /// before.
    pub fn may_end(&self) -> bool {
        match self.stage {
            Stage::StandingBy => !self.successor || self.unable && !self.able && (self.kept || !self.connected),
            Stage::Owning | Stage::Retired => true,
            _ => false,
        }
    }

    /// Returns true if the owner may hand over its record and the lock now.
    pub fn takes_record(&self) -> bool {
        matches!(self.stage, Stage::Asking | Stage::Receiving)
    }

    /// The time at which an [`Input::Tick`] is due; `None`: not before another input.
    pub fn wake(&self) -> Option<Duration> {
        self.until
    }

    /// Takes an input into account; returns what has to be done, in order. An input that the stage does not expect
    /// changes nothing.
    pub fn step(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match self.stage {
            Stage::StandingBy | Stage::Asking | Stage::Joining | Stage::Receiving => self.standing_by(input, now),
            Stage::Starting | Stage::Waiting | Stage::Settling => self.taking_over(input, now),
            Stage::Owning | Stage::Agreeing | Stage::Draining => self.owning(input, now),
            Stage::Yielding | Stage::Ending | Stage::Ended => self.handing_over(input, now),
            Stage::Retired => Vec::new(),
        }
    }

    fn enter(&mut self, stage: Stage, until: Option<Duration>) {
        (self.stage, self.until) = (stage, until);
    }

    fn standing_by(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            (_, Input::Able) => {
                self.able = true;
                self.ask_if_due(now)
            }
            (_, Input::Unable) => {
                self.unable = true;
                self.ask_if_due(now)
            }
            (_, Input::Free) => {
                self.own();
                // The owner died, and did not give up its place.
                self.place = false;
                let serve = [Action::Adopt, Action::Files(true), Action::Plugins(true), Action::Listen];
                [&serve[..], &[Action::Report(Outcome::Succeeded)]].concat()
            }
            (Stage::StandingBy, Input::Held { successor }) => {
                self.successor = successor;
                Vec::new()
            }
            (_, Input::Lost) => {
                self.connected = false;
                self.enter(Stage::StandingBy, None);
                Vec::new()
            }
            (Stage::StandingBy, Input::Connected) => {
                self.connected = true;
                self.ask_if_due(now)
            }
            (Stage::StandingBy, Input::Tick) if self.is_due(now) => {
                self.until = None;
                self.ask_if_due(now)
            }
            (Stage::Asking, Input::Agreed) => {
                self.enter(Stage::Joining, Some(now + self.limits.join));
                Vec::new()
            }
            (Stage::Joining, Input::Joined) => self.joined(now),
            (Stage::Joining, Input::Tick) if self.is_due(now) => self.joined(now),
            // An owner of an older version does not wait for our DRA plugin.
            (_, Input::Record) if self.takes_record() => {
                self.enter(Stage::Starting, Some(now + self.limits.start));
                vec![Action::Adopt, Action::Files(true), Action::Plugins(true)]
            }
            (Stage::Asking, Input::Refused) => {
                self.enter(Stage::StandingBy, Some(now + self.limits.refused));
                Vec::new()
            }
            (Stage::Asking, Input::PlaceKept) => {
                self.kept = true;
                self.enter(Stage::StandingBy, Some(now + self.limits.place_kept));
                Vec::new()
            }
            (Stage::Asking | Stage::Receiving, Input::Tick) if self.is_due(now) => self.gives_up(now),
            (Stage::Joining | Stage::Receiving, Input::Back) => self.gives_up(now),
            _ => Vec::new(),
        }
    }

    fn joined(&mut self, now: Duration) -> Vec<Action> {
        self.enter(Stage::Receiving, Some(now + self.limits.drain));
        vec![Action::SayJoined]
    }

    fn gives_up(&mut self, now: Duration) -> Vec<Action> {
        self.failed(now);
        vec![Action::HangUp, Action::Report(Outcome::Failed)]
    }

    /// A takeover failed: each further one comes after a longer pause.
    fn failed(&mut self, now: Duration) {
        (self.connected, self.kept) = (false, true);
        let pause = self.pauses.failed();
        self.enter(Stage::StandingBy, Some(now + pause));
    }

    fn is_due(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    fn ask_if_due(&mut self, now: Duration) -> Vec<Action> {
        let asks = self.stage == Stage::StandingBy && self.successor && self.connected;
        if !asks || !(self.able || self.unable) || self.until.is_some_and(|until| now < until) {
            return Vec::new();
        }
        self.enter(Stage::Asking, Some(now + self.limits.answer));
        self.place = !self.able;
        vec![if self.place { Action::SayTakePlace } else { Action::SayTakeOver }]
    }

    fn taking_over(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            (Stage::Starting, Input::Serving) => {
                // Without a deadline: a process that waits for the owner has plugins that serve.
                self.enter(Stage::Waiting, None);
                vec![Action::SayServing]
            }
            (Stage::Waiting, Input::Ended) => {
                self.enter(Stage::Settling, None);
                Vec::new()
            }
            (Stage::Settling, Input::Alone) => {
                self.own();
                vec![Action::SayDone, Action::HangUp, Action::Listen, Action::Report(Outcome::TookOver)]
            }
            // The owner has died. We have the lock, and begin or serve already.
            (_, Input::Lost) => {
                self.own();
                vec![Action::HangUp, Action::Listen, Action::Report(Outcome::Succeeded)]
            }
            (_, Input::Back) => self.give_back(&[Action::HangUp], now),
            (Stage::Starting, Input::Tick) if self.is_due(now) => {
                self.give_back(&[Action::SayFailed, Action::HangUp], now)
            }
            _ => Vec::new(),
        }
    }

    fn own(&mut self) {
        self.connected = false;
        self.pauses.reset();
        self.enter(Stage::Owning, None);
    }

    fn give_back(&mut self, say: &[Action], now: Duration) -> Vec<Action> {
        self.failed(now);
        let stop = [Action::Plugins(false), Action::LetGo, Action::Report(Outcome::Failed)];
        [&[Action::Files(false)], say, &stop].concat()
    }

    fn owning(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            // It served without the lock.
            (Stage::Owning, Input::Held { successor }) => {
                (self.successor, self.able) = (successor, true);
                self.give_back(&[], now)
            }
            (Stage::Owning, Input::TakeOver { joins: true }) => {
                self.enter(Stage::Agreeing, Some(now + self.limits.patience));
                vec![Action::SayAgreed]
            }
            (Stage::Owning, Input::TakeOver { joins: false }) => {
                self.joined = false;
                self.hand_over(now)
            }
            (Stage::Agreeing, Input::TheyJoined) => {
                self.joined = true;
                self.enter(Stage::Draining, Some(now + self.limits.patience));
                Vec::new()
            }
            (Stage::Draining, Input::ClaimsEnded) => self.hand_over(now),
            (Stage::Agreeing | Stage::Draining, Input::Lost | Input::TheyFailed) => self.keep(&[]),
            (Stage::Agreeing | Stage::Draining, Input::Tick) if self.is_due(now) => self.keep(&[Action::SayBack]),
            _ => Vec::new(),
        }
    }

    fn hand_over(&mut self, now: Duration) -> Vec<Action> {
        self.enter(Stage::Yielding, Some(now + self.limits.patience));
        vec![Action::Files(false), Action::SayRecord]
    }

    fn handing_over(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            (Stage::Yielding, Input::TheyServe) => {
                // From here on without a deadline: the standby may be the owner before it could hear of one.
                self.enter(Stage::Ending, None);
                vec![Action::Plugins(false)]
            }
            (Stage::Ending, Input::PluginsEnded) => {
                self.enter(Stage::Ended, None);
                vec![Action::SayEnded]
            }
            (Stage::Ended, Input::TheyAreDone) => {
                self.enter(Stage::Retired, None);
                vec![Action::HangUp, Action::LetGo, Action::Report(Outcome::HandedOver), Action::Retire]
            }
            (_, Input::Lost | Input::TheyFailed) => self.go_on(&[]),
            (Stage::Yielding, Input::Tick) if self.is_due(now) => self.go_on(&[Action::SayBack]),
            _ => Vec::new(),
        }
    }

    /// The standby is gone, or has given up, before it was handed anything.
    fn keep(&mut self, say: &[Action]) -> Vec<Action> {
        self.enter(Stage::Owning, None);
        [say, &[Action::HangUp, Action::Report(Outcome::WentOn)]].concat()
    }

    /// The standby is gone, or has given up. It may have registered, so our plugins register again.
    fn go_on(&mut self, say: &[Action]) -> Vec<Action> {
        self.enter(Stage::Owning, None);
        let rest = [Action::HangUp, Action::Plugins(true), Action::Renew, Action::Files(true)];
        [say, &rest, &[Action::Report(Outcome::WentOn)]].concat()
    }
}

#[cfg(test)]
mod tests;
