//! The state machine of a takeover, for both sides: `step(input, now) -> actions`, and the duties of each stage. A
//! process stands by, takes over, serves, and hands over.
//!
//! Pure: no I/O, no clock. The executor is its one caller: it feeds inputs, performs actions, and gives the node's
//! tasks the duties of the stage. The standby keeps all deadlines but one: the owner goes on serving if a standby that
//! has the lock does not serve in time, or if the connection ends. docs/life-cycle.md has the picture. The tests
//! connect two state machines, and end either at each step.

use std::time::Duration;

use super::wire::Message;
use linkwise_core::backoff::Backoff;

/// The longest time until the kubelet calls our DRA plugin instead of the owner's. The takeover then goes on anyway.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time for the owner to finish its calls for claims, longer than the kubelet waits for a call.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time from the owner's record to the registration of our plugins.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest time that the owner waits for the standby's plugins after it handed over the record. It is longer than
/// [`START_TIMEOUT`].
const YIELD_TIMEOUT: Duration = Duration::from_secs(60);
/// The pauses after takeovers that failed.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));
/// The pause after a refusal. The standby asks again, because the owner's driver may have failed by then.
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
    /// The owner handed over record and lock, and its plugins still serve. Met when our plugins are registered, so that
    /// the kubelet keeps them when the owner's plugins end.
    Starting,
    /// Our plugins serve, and the owner's are ending.
    Waiting,
    /// This process is the owner.
    Owning,
    /// A standby's DRA plugin gets the kubelet's new calls. Met when our DRA plugin has no call any more and writes
    /// nothing for claims.
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

/// An input of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The lock was free, and this process has it; or no process can lock the folder.
    Free,
    /// Another process has the lock, and this process learns that late, because its disk hung or the folder could not
    /// be locked. With `can_take_over`, this process asks to take over.
    Held { can_take_over: bool },
    /// This process knows the node's GPUs; false: it sees none, because the driver fails or is released.
    SeesGpus(bool),
    /// A connection to the owner exists.
    Connected,
    /// The owner will hand over, and waits for [`Message::Joined`].
    Agreed,
    /// The owner keeps its place, takes the node back, or sent a scan that this process cannot read.
    Refused,
    /// The owner handed over its record and the lock.
    Record,
    /// A standby asks to take over.
    TakeOver,
    /// The kubelet calls the standby's DRA plugin, or the standby no longer waits for that.
    TheyJoined,
    /// Every plugin of the standby is registered.
    TheyServe,
    /// The condition of the [`Stage`] is met.
    Met,
    /// The connection to the other side is gone, or the other side sent an invalid message.
    Lost,
    /// The moment of [`TakeoverMachine::wake`] has come.
    Tick,
}

/// An order to the executor, which first ends duties, then carries the orders out in sequence, then begins duties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask to take over; see [`TakeoverMachine::takes_place`].
    Ask,
    /// Hand over the record and the lock; this process holds the lock, too, until it retires.
    HandOver,
    /// Send one of the other messages.
    Send(Message),
    /// Restore the node's state from the record that the owner handed over, or else from the file.
    Adopt,
    /// Have the plugins register again, because another process may have registered over them.
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

/// The state of one process in takeovers. Only [`Self::step`] changes it.
#[derive(Clone, Debug, Default)]
pub struct TakeoverMachine {
    stage: Stage,
    /// True if the process can take over from a living owner.
    can_take_over: bool,
    /// True if this process knows the node's GPUs, false if it sees none; `None` while it looks.
    sees_gpus: Option<bool>,
    /// True if the last request was for the place of an owner without a driver.
    takes_place: bool,
    /// True if the owner refused, or a takeover failed.
    was_refused: bool,
    is_connected: bool,
    /// True while the owner has to answer a request.
    awaits_answer: bool,
    deadline: Option<Duration>,
    pauses: Backoff,
    /// The actions of the present step, in order.
    actions: Vec<Action>,
}

impl TakeoverMachine {
    /// A process that serves from its start.
    pub fn owner() -> Self {
        Self { stage: Stage::Owning, sees_gpus: Some(true), ..Self::standby(false) }
    }

    /// A process that found the lock held. If it `can_take_over`, it asks the owner once it has looked for GPUs.
    pub fn standby(can_take_over: bool) -> Self {
        Self { can_take_over, pauses: PAUSES, ..Self::default() }
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

    /// Returns true if this process is a standby without the lock.
    pub fn stands_by(&self) -> bool {
        matches!(self.stage, Stage::StandingBy | Stage::Joining | Stage::Receiving)
    }

    /// Returns true if this process knows the node's GPUs, false if it sees none; `None` while it looks.
    pub fn sees_gpus(&self) -> Option<bool> {
        self.sees_gpus
    }

    /// Returns true if this process sees no GPU, and asked for the place of an owner without a driver.
    pub fn takes_place(&self) -> bool {
        self.takes_place
    }

    /// Returns true if this process may end because it cannot initialise NVML. A process that can take over first asks
    /// for the owner's place.
    pub fn may_end(&self) -> bool {
        match self.stage {
            Stage::StandingBy if self.can_take_over => {
                self.sees_gpus == Some(false) && (self.was_refused || !self.is_connected)
            }
            Stage::StandingBy | Stage::Owning | Stage::Retired => true,
            _ => false,
        }
    }

    /// The time at which an [`Input::Tick`] is due, if any.
    pub fn wake(&self) -> Option<Duration> {
        self.deadline
    }

    /// Processes an input; returns the actions to carry out, in order. An input that the stage does not expect changes
    /// nothing.
    pub fn step(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match (self.stage, input) {
            (_, Input::Tick) if self.deadline.is_none_or(|deadline| now < deadline) => {}
            (_, Input::SeesGpus(sees_gpus)) => {
                self.sees_gpus = Some(sees_gpus);
                self.ask_if_due(now);
            }
            (Stage::StandingBy | Stage::Joining | Stage::Receiving, Input::Free) => {
                // The owner died, so this process does not take its place by agreement.
                self.takes_place = false;
                self.actions.push(Action::Adopt);
                self.own(Outcome::Succeeded);
            }
            (Stage::StandingBy, input) => self.standing_by(input, now),
            (Stage::Joining, Input::Met | Input::Tick) => {
                self.enter(Stage::Receiving, Some(now + DRAIN_TIMEOUT));
                self.send(Message::Joined);
            }
            (Stage::Receiving, Input::Record) => {
                self.enter(Stage::Starting, Some(now + START_TIMEOUT));
                self.actions.push(Action::Adopt);
            }
            // The owner has handed over nothing yet.
            (Stage::Joining | Stage::Receiving, Input::Lost) => {
                self.is_connected = false;
                self.enter(Stage::StandingBy, None);
            }
            (Stage::Starting, Input::Met) => {
                // Without a deadline: the owner's plugins may be ending already.
                self.enter(Stage::Waiting, None);
                self.send(Message::Serving);
            }
            // The owner has died. This process has the lock, and its plugins start or serve already.
            (Stage::Starting, Input::Lost) => self.own(Outcome::Succeeded),
            (Stage::Waiting, Input::Lost) => self.own(Outcome::TookOver),
            (Stage::Joining | Stage::Receiving | Stage::Starting | Stage::Waiting, Input::Refused | Input::Tick) => {
                self.fail(now);
            }
            // This process served without the lock.
            (Stage::Owning, Input::Held { can_take_over }) => {
                self.can_take_over = can_take_over;
                self.fail(now);
            }
            (Stage::Owning, Input::TakeOver) => self.send(Message::Agreed),
            (Stage::Owning, Input::TheyJoined) => self.enter(Stage::Draining, None),
            (Stage::Draining, Input::Met) => {
                self.enter(Stage::Yielding, Some(now + YIELD_TIMEOUT));
                self.actions.push(Action::HandOver);
            }
            // Without a deadline: the standby may be the owner before a message of ours arrives.
            (Stage::Yielding, Input::TheyServe) => self.enter(Stage::Ending, None),
            (Stage::Ending, Input::Met) => self.end(Stage::Retired, Outcome::HandedOver),
            // The standby is gone, or gave up.
            (Stage::Owning | Stage::Draining, Input::Lost) => self.end(Stage::Owning, Outcome::WentOn),
            // The standby may have registered over our plugins.
            (Stage::Yielding | Stage::Ending, Input::Lost | Input::Tick) => {
                if input == Input::Tick {
                    self.send(Message::Back);
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
            Input::Held { can_take_over } => self.can_take_over = can_take_over,
            Input::Connected => {
                self.is_connected = true;
                self.ask_if_due(now);
            }
            Input::Lost => (self.is_connected, self.awaits_answer, self.deadline) = (false, false, None),
            Input::Agreed if std::mem::take(&mut self.awaits_answer) => {
                self.enter(Stage::Joining, Some(now + JOIN_TIMEOUT));
            }
            Input::Refused if std::mem::take(&mut self.awaits_answer) => {
                (self.was_refused, self.deadline) = (true, Some(now + REFUSED_DELAY));
            }
            Input::Tick => {
                self.deadline = None;
                self.ask_if_due(now);
            }
            _ => {}
        }
    }

    fn send(&mut self, message: Message) {
        self.actions.push(Action::Send(message));
    }

    /// Ends the takeover. The next stage has no deadline.
    fn end(&mut self, stage: Stage, outcome: Outcome) {
        self.enter(stage, None);
        self.actions.push(Action::End(outcome));
    }

    fn enter(&mut self, stage: Stage, deadline: Option<Duration>) {
        (self.stage, self.deadline) = (stage, deadline);
    }

    fn ask_if_due(&mut self, now: Duration) {
        let Some(sees_gpus) = self.sees_gpus.filter(|_| self.stage == Stage::StandingBy) else { return };
        let is_pausing = self.deadline.is_some_and(|deadline| now < deadline);
        if self.can_take_over && self.is_connected && !self.awaits_answer && !is_pausing {
            (self.awaits_answer, self.takes_place) = (true, !sees_gpus);
            self.actions.push(Action::Ask);
        }
    }

    fn own(&mut self, outcome: Outcome) {
        self.is_connected = false;
        self.pauses.reset();
        self.end(Stage::Owning, outcome);
    }

    /// Gives up a takeover. The pause before the next one doubles, up to the longest of [`PAUSES`].
    fn fail(&mut self, now: Duration) {
        (self.is_connected, self.was_refused) = (false, true);
        let pause = self.pauses.failed();
        self.enter(Stage::StandingBy, Some(now + pause));
        self.actions.push(Action::End(Outcome::Failed));
    }
}

#[cfg(test)]
mod tests;
