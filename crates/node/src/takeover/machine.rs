//! The state machine of a takeover, for both sides: `step(input, now) -> actions`, and the duties of each stage. A
//! process stands by, takes over, serves, and is taken over from.
//!
//! Pure: no I/O, no clock. The executor is its one caller: it feeds inputs, performs actions, and does what the stage's
//! duties are. The standby keeps the deadlines. The owner answers, and goes on when the connection ends, or when a
//! standby that has the lock does not serve in time.
//! docs/life-cycle.md has the picture; the tests beside this file let two machines speak over a wire that loses the
//! end of everything.

use std::time::Duration;

use super::wire::Word;
use linkwise_core::backoff::Backoff;

/// The time for the kubelet to register our DRA plugin beside the owner's. After it the takeover goes on without.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The owner's time to finish the calls for claims that it has begun, longer than the kubelet waits for one.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// The time between the owner's record and the registration of our plugins.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The owner's patience after it handed over the record, longer than [`START_TIMEOUT`].
const YIELD_TIMEOUT: Duration = Duration::from_secs(60);
/// The pauses after takeovers that failed.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));
/// The pause after a refusal: the owner's driver may fail later.
const REFUSED_DELAY: Duration = Duration::from_secs(5);

/// A stage of a process, with the condition for [`Input::Met`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Stage {
    /// Another process serves; this one waits for its end, or has asked to take over from it.
    #[default]
    StandingBy,
    /// The owner agreed. Met when the kubelet calls our DRA plugin, or this node has none.
    Joining,
    /// The owner finishes the calls for claims that it has; new ones wait at our DRA plugin.
    Receiving,
    /// The owner handed over record and lock, and its plugins serve still. Met when ours are registered and outlast the
    /// end of the owner's.
    Starting,
    /// Our plugins serve, and the owner's are ending.
    Waiting,
    /// This process is the owner.
    Owning,
    /// A standby's DRA plugin has the kubelet's new calls. Met when ours has none any more, and writes nothing for
    /// claims.
    Draining,
    /// A standby has record and lock; our plugins serve.
    Yielding,
    /// The standby's plugins serve. Met when ours have ended.
    Ending,
    /// This process has handed over, for good.
    Retired,
}

/// The duties of a process in a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Duties {
    /// Its DRA plugin has its sockets. Without `claims`, the kubelet's calls wait there.
    pub dra: bool,
    /// It prepares claims.
    pub claims: bool,
    /// It writes the node's files.
    pub files: bool,
    /// Its device plugins serve.
    pub plugins: bool,
}

/// An input of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The lock was free, and this process has it.
    Free,
    /// Another process has the lock, and this process learns it late: its disk hung, or could not have a lock. A
    /// `successor` takes over.
    Held { successor: bool },
    /// This process knows the node's GPUs; false: it sees none, because the driver fails or is released.
    Sees(bool),
    /// The owner can be asked.
    Connected,
    /// The owner hands over, once our DRA plugin is registered.
    Agreed,
    /// The owner has the driver and keeps its place, or takes back what it gave.
    Refused,
    /// The owner handed over its record and the lock.
    Record,
    /// A standby asks to take over.
    TakeOver,
    /// The kubelet calls the standby's DRA plugin.
    TheyJoined,
    /// Every plugin of the standby is registered.
    TheyServe,
    /// The condition of the [`Stage`] is met.
    Met,
    /// The connection to the other side is gone, or the other side sent something else than a word.
    Lost,
    /// The moment of [`TakeoverMachine::wake`] has come.
    Tick,
}

/// An order to the executor. Orders are carried out in sequence: after the duties that end, before those that begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask to take over; see [`TakeoverMachine::takes_place`].
    Ask,
    /// Hand over the record with the lock, which is kept too.
    HandOver,
    /// Say one of the other words.
    Say(Word),
    /// Restore the node's state from the record that came, or else from the file.
    Adopt,
    /// Have the plugins register again: another one may have registered over them.
    Renew,
    /// The takeover is over: hang up, and report it.
    End(Outcome),
}

/// The outcome of a takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This process took over, and the owner's plugins have ended.
    TookOver,
    /// This process serves because the owner has ended.
    Succeeded,
    /// This process could not take over, and stands by again.
    Failed,
    /// Another process took over from this one.
    HandedOver,
    /// Another process did not take over from this one, which goes on.
    WentOn,
}

/// The state of one process.
#[derive(Clone, Debug, Default)]
pub struct TakeoverMachine {
    stage: Stage,
    /// True if the process takes over from a living owner.
    successor: bool,
    /// True if this process knows the node's GPUs, false if it sees none; `None` while it looks.
    sees: Option<bool>,
    /// True if the process asked last for the place of an owner without a driver.
    place: bool,
    /// True if the owner refused, or a takeover failed.
    refused: bool,
    connected: bool,
    /// True while the owner has to answer.
    asked: bool,
    until: Option<Duration>,
    pauses: Backoff,
    /// The actions of the present step, in order.
    actions: Vec<Action>,
}

impl TakeoverMachine {
    /// A process that serves from its start.
    pub fn owner() -> Self {
        Self { stage: Stage::Owning, sees: Some(true), ..Self::standby(false) }
    }

    /// A process that found the lock held; a `successor` asks the owner, once it could serve.
    pub fn standby(successor: bool) -> Self {
        Self { successor, pauses: PAUSES, ..Self::default() }
    }

    /// The current stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The duties of the current stage.
    pub fn duties(&self) -> Duties {
        let none = Duties::default();
        match self.stage {
            Stage::StandingBy | Stage::Retired => none,
            Stage::Joining | Stage::Receiving | Stage::Ending => Duties { dra: true, ..none },
            Stage::Starting | Stage::Waiting | Stage::Owning => {
                Duties { dra: true, claims: true, files: true, plugins: true }
            }
            Stage::Draining => Duties { dra: true, files: true, plugins: true, ..none },
            Stage::Yielding => Duties { dra: true, plugins: true, ..none },
        }
    }

    /// Returns true if another process serves this node.
    pub fn stands_by(&self) -> bool {
        matches!(self.stage, Stage::StandingBy | Stage::Joining | Stage::Receiving)
    }

    /// Returns true if this process knows the node's GPUs, false if it sees none; `None` while it looks.
    pub fn sees(&self) -> Option<bool> {
        self.sees
    }

    /// Returns true if this process sees no GPU, and asked for the place of an owner without a driver.
    pub fn takes_place(&self) -> bool {
        self.place
    }

    /// Returns true if NVML that cannot be initialised may end this process. A successor asks for the owner's place
    /// before.
    pub fn may_end(&self) -> bool {
        match self.stage {
            Stage::StandingBy => !self.successor || self.sees == Some(false) && (self.refused || !self.connected),
            Stage::Owning | Stage::Retired => true,
            _ => false,
        }
    }

    /// The time at which an [`Input::Tick`] is due; `None`: not before another input.
    pub fn wake(&self) -> Option<Duration> {
        self.until
    }

    /// Takes an input into account; returns what has to be done, in order. An input that the stage does not expect
    /// changes nothing.
    pub fn step(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            (_, Input::Tick) if self.until.is_none_or(|until| now < until) => {}
            (_, Input::Sees(sees)) => {
                self.sees = Some(sees);
                self.ask_if_due(now);
            }
            (Stage::StandingBy | Stage::Joining | Stage::Receiving, Input::Free) => {
                // The owner died, and did not give up its place.
                self.place = false;
                self.actions.push(Action::Adopt);
                self.own(Outcome::Succeeded);
            }
            (Stage::StandingBy, input) => self.standing_by(input, now),
            (Stage::Joining, Input::Met | Input::Tick) => {
                self.enter(Stage::Receiving, Some(now + DRAIN_TIMEOUT));
                self.say(Word::Joined);
            }
            (Stage::Receiving, Input::Record) => {
                self.enter(Stage::Starting, Some(now + START_TIMEOUT));
                self.actions.push(Action::Adopt);
            }
            // It was handed nothing.
            (Stage::Joining | Stage::Receiving, Input::Lost) => {
                self.connected = false;
                self.enter(Stage::StandingBy, None);
            }
            (Stage::Starting, Input::Met) => {
                // Without a deadline: the owner's plugins may be ending already.
                self.enter(Stage::Waiting, None);
                self.say(Word::Serving);
            }
            // The owner has died. This process has the lock, and begins or serves already.
            (Stage::Starting, Input::Lost) => self.own(Outcome::Succeeded),
            (Stage::Waiting, Input::Lost) => self.own(Outcome::TookOver),
            (Stage::Joining | Stage::Receiving | Stage::Starting | Stage::Waiting, Input::Refused | Input::Tick) => {
                self.fail(now);
            }
            // It served without the lock.
            (Stage::Owning, Input::Held { successor }) => {
                self.successor = successor;
                self.fail(now);
            }
            (Stage::Owning, Input::TakeOver) => self.say(Word::Agreed),
            (Stage::Owning, Input::TheyJoined) => self.enter(Stage::Draining, None),
            (Stage::Draining, Input::Met) => {
                self.enter(Stage::Yielding, Some(now + YIELD_TIMEOUT));
                self.actions.push(Action::HandOver);
            }
            // Without a deadline: the standby may be the owner before it could hear of one.
            (Stage::Yielding, Input::TheyServe) => self.enter(Stage::Ending, None),
            (Stage::Ending, Input::Met) => self.end(Stage::Retired, Outcome::HandedOver),
            // The standby is gone, or gave up.
            (Stage::Owning | Stage::Draining, Input::Lost) => self.end(Stage::Owning, Outcome::WentOn),
            // It may have registered over our plugins.
            (Stage::Yielding | Stage::Ending, Input::Lost | Input::Tick) => {
                if input == Input::Tick {
                    self.say(Word::Back);
                }
                self.actions.push(Action::Renew);
                self.end(Stage::Owning, Outcome::WentOn);
            }
            _ => {}
        }
        std::mem::take(&mut self.actions)
    }

    fn standing_by(&mut self, input: Input, now: Duration) {
        match input {
            Input::Held { successor } => self.successor = successor,
            Input::Connected => {
                self.connected = true;
                self.ask_if_due(now);
            }
            Input::Lost => (self.connected, self.asked, self.until) = (false, false, None),
            Input::Agreed if std::mem::take(&mut self.asked) => {
                self.enter(Stage::Joining, Some(now + JOIN_TIMEOUT));
            }
            Input::Refused if std::mem::take(&mut self.asked) => {
                (self.refused, self.until) = (true, Some(now + REFUSED_DELAY));
            }
            Input::Tick => {
                self.until = None;
                self.ask_if_due(now);
            }
            _ => {}
        }
    }

    fn say(&mut self, word: Word) {
        self.actions.push(Action::Say(word));
    }

    /// Ends the takeover, without a deadline for what follows.
    fn end(&mut self, stage: Stage, outcome: Outcome) {
        self.enter(stage, None);
        self.actions.push(Action::End(outcome));
    }

    fn enter(&mut self, stage: Stage, until: Option<Duration>) {
        (self.stage, self.until) = (stage, until);
    }

    fn ask_if_due(&mut self, now: Duration) {
        let Some(sees) = self.sees.filter(|_| self.stage == Stage::StandingBy) else { return };
        let pauses = self.until.is_some_and(|until| now < until);
        if self.successor && self.connected && !self.asked && !pauses {
            (self.asked, self.place) = (true, !sees);
            self.actions.push(Action::Ask);
        }
    }

    fn own(&mut self, outcome: Outcome) {
        self.connected = false;
        self.pauses.reset();
        self.end(Stage::Owning, outcome);
    }

    /// A takeover failed: each further one comes after a longer pause.
    fn fail(&mut self, now: Duration) {
        (self.connected, self.refused) = (false, true);
        let pause = self.pauses.failed();
        self.enter(Stage::StandingBy, Some(now + pause));
        self.actions.push(Action::End(Outcome::Failed));
    }
}

#[cfg(test)]
mod tests;
