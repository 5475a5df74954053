//! The life of the DRA plugin with the kubelet as a state machine: `step(state, input, moment) -> (state, actions)`.
//!
//! Pure: no I/O, no clock, no task, no randomness (time and jitter come with the moment). `life` is its one caller: it
//! feeds inputs and performs actions. Here the kubelet comes to us: it finds a socket in its folder, asks for our name,
//! and says whether it registered the plugin. A kubelet that restarts does so again with the same socket.

use std::time::Duration;

use super::Phase;
use crate::backoff::Backoff;
use crate::once::Once;

/// A session that lasted this long had settled: the attempt after it comes at once.
const SETTLED: Duration = Duration::from_secs(10);
/// The least time between two binds, the first retry excepted, however often the folder changes.
const GAP: Duration = Duration::from_millis(100);

/// The deadlines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// From sockets that are there, or a kubelet that is away, to the next sockets.
    pub offer: Duration,
    /// From the end of a session until its connections are cut.
    pub close: Duration,
    /// The longest pause between attempts.
    pub longest_pause: Duration,
}

/// When a step is taken: the time since the machine's start, and a random number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub now: Duration,
    pub jitter: u64,
}

/// What happened.
#[derive(Clone, Debug)]
pub(super) enum Input {
    /// GPUs have been seen, and their CDI specs are written.
    Ready,
    /// The files were checked: whether the kubelet's folder is there or why not, and whether our sockets are in place.
    Checked { registry: Result<(), String>, own: bool },
    /// Our sockets are bound and served, or why not.
    Bound(Result<(), String>),
    /// The kubelet registered the plugin, or refused to with this text.
    Notified(Result<(), String>),
    /// This many connections to our services are open.
    Connections(usize),
    /// A server ended by itself.
    ServerEnded(String),
    /// The servers have ended, and no connection to them is open.
    Closed,
    /// The moment of [`Machine::wake`] has come.
    Tick,
    /// The plugin is asked to end.
    Shutdown,
}

/// What `life` has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Remove dead predecessors' sockets, bind our own and serve them.
    Bind,
    /// Remove our sockets, end the streams, accept no more connections.
    End,
    /// Cut the connections that have not closed by themselves.
    Cut,
    /// Report why the plugin is not registered.
    ReportWaiting(String),
    /// Report that the kubelet registered the plugin, or why it refused.
    ReportRegistered(Result<(), String>),
    /// Report why a session ended or did not begin; another attempt follows.
    ReportEnded(String),
}

/// One state of the life.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    limits: Limits,
    phase: Phase,
    /// Whether the plugin has ended; its last phase is [`Phase::Ending`].
    over: bool,
    /// When the phase ends by itself.
    until: Option<Duration>,
    /// Whether the kubelet's folder was there at the last check, or why not.
    registry: Result<(), String>,
    /// When the current session began.
    since: Duration,
    /// Connections to our services.
    connections: usize,
    /// Whether the next session that ends soon is followed by an attempt at once; the pauses come after it.
    retry_at_once: bool,
    pauses: Backoff,
    /// When [`Action::Bind`] was last asked for.
    bound: Option<Duration>,
    leaving: bool,
    /// Why it is not registered, since it last was.
    waits: Once<String>,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            phase: Phase::WaitingForGpus,
            over: false,
            until: None,
            registry: Err("the folder has not been checked yet".to_owned()),
            since: Duration::ZERO,
            connections: 0,
            retry_at_once: true,
            // The first pause is so much shorter than the longest that six doublings lead there.
            pauses: Backoff::new(limits.longest_pause / 64, limits.longest_pause),
            bound: None,
            leaving: false,
            waits: Once::new(),
        }
    }

    /// The phase that /readyz shows.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether the plugin has ended.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// When an [`Input::Tick`] is due; `None`: not before another input.
    pub fn wake(&self) -> Option<Duration> {
        self.until
    }

    /// The next state after an input, and what has to be done. An input that the state does not expect changes nothing.
    pub fn step(mut self, input: Input, moment: Moment) -> (Self, Vec<Action>) {
        let now = moment.now;
        let actions = match input {
            Input::Ready if self.phase == Phase::WaitingForGpus => self.attempt_or_wait(now),
            Input::Ready => Vec::new(),
            Input::Checked { registry, own } => self.checked(registry, own, now),
            Input::Bound(result) => self.served(result, moment),
            Input::Notified(result) => self.notified(result, now),
            Input::Connections(open) => self.connections(open, now),
            Input::ServerEnded(why) => self.end_if_open(format!("the server ended: {why}"), now),
            Input::Closed => self.closed(moment),
            Input::Tick => self.tick(now),
            Input::Shutdown => self.shutdown(now),
        };
        (self, actions)
    }

    fn enter(&mut self, phase: Phase, until: Option<Duration>) {
        (self.phase, self.until) = (phase, until);
    }

    /// Whether a session is open: our sockets are bound, and the session is not ending.
    fn is_open(&self) -> bool {
        (Phase::Offered..=Phase::Disconnected).contains(&self.phase)
    }

    fn checked(&mut self, registry: Result<(), String>, own: bool, now: Duration) -> Vec<Action> {
        self.registry = registry;
        match self.phase {
            Phase::WaitingForKubelet => self.attempt_or_wait(now),
            _ if !own => self.end_if_open("our sockets are gone or not ours any more", now),
            _ => Vec::new(),
        }
    }

    /// The next attempt, now or when the gap allows it; or the wait for a kubelet.
    fn attempt_or_wait(&mut self, now: Duration) -> Vec<Action> {
        if let Err(why) = self.registry.clone() {
            self.enter(Phase::WaitingForKubelet, None);
            return self.waiting(why);
        }
        match self.bound.map(|bound| bound + GAP).filter(|earliest| now < *earliest) {
            None => self.bind(now),
            earliest => {
                self.enter(Phase::Pausing, earliest);
                Vec::new()
            }
        }
    }

    fn waiting(&mut self, why: String) -> Vec<Action> {
        self.waits.replace([why]).into_iter().map(Action::ReportWaiting).collect()
    }

    fn bind(&mut self, now: Duration) -> Vec<Action> {
        self.bound = Some(now);
        self.enter(Phase::Binding, None);
        vec![Action::Bind]
    }

    fn served(&mut self, result: Result<(), String>, moment: Moment) -> Vec<Action> {
        if self.phase != Phase::Binding {
            return Vec::new();
        }
        (self.since, self.connections) = (moment.now, 0);
        match result {
            Err(why) => {
                let mut actions = vec![Action::ReportEnded(why)];
                actions.extend(self.pause(moment));
                actions
            }
            Ok(()) => {
                self.enter(Phase::Offered, Some(moment.now + self.limits.offer));
                Vec::new()
            }
        }
    }

    fn notified(&mut self, result: Result<(), String>, now: Duration) -> Vec<Action> {
        if !self.is_open() {
            return Vec::new();
        }
        let mut actions = vec![Action::ReportRegistered(result.clone())];
        match result {
            Ok(()) => {
                self.waits.clear();
                self.forget_failures();
                self.enter(Phase::Registered, None);
            }
            // Other sockets are another plugin to the kubelet: whatever it has against this one is over.
            Err(why) => actions.extend(self.end_if_open(format!("the kubelet refused to register it: {why}"), now)),
        }
        actions
    }

    /// The kubelet keeps a connection to our services. When it restarts, the connection ends first.
    fn connections(&mut self, open: usize, now: Duration) -> Vec<Action> {
        let before = std::mem::replace(&mut self.connections, open);
        match self.phase {
            Phase::Registered if open == 0 && before > 0 => {
                self.enter(Phase::Disconnected, Some(now + self.limits.offer));
            }
            // A connection that was idle for long is closed, and opened again when it is needed.
            Phase::Disconnected if open > 0 => self.enter(Phase::Registered, None),
            _ => {}
        }
        Vec::new()
    }

    /// Ends the open session, if there is one. The next attempt waits until its connections are closed.
    fn end_if_open(&mut self, cause: impl Into<String>, now: Duration) -> Vec<Action> {
        if !self.is_open() {
            return Vec::new();
        }
        self.enter(Phase::Ending, Some(now + self.limits.close));
        vec![Action::ReportEnded(cause.into()), Action::End]
    }

    fn closed(&mut self, moment: Moment) -> Vec<Action> {
        if self.phase != Phase::Ending {
            return Vec::new();
        }
        if self.leaving {
            (self.over, self.until) = (true, None);
            return Vec::new();
        }
        self.pause(moment)
    }

    /// After a session: the next attempt, or a pause before it. A random part of the pause, up to a half, is left out,
    /// so that the nodes of a cluster do not retry in step.
    fn pause(&mut self, moment: Moment) -> Vec<Action> {
        let now = moment.now;
        if now.saturating_sub(self.since) >= SETTLED {
            self.forget_failures();
            return self.attempt_or_wait(now);
        }
        if std::mem::take(&mut self.retry_at_once) {
            return self.attempt_or_wait(now);
        }
        let full = self.pauses.failed();
        let part = u32::try_from(moment.jitter % 512).unwrap_or(0);
        self.enter(Phase::Pausing, Some(now + full.saturating_sub((full / 1024).saturating_mul(part))));
        Vec::new()
    }

    fn forget_failures(&mut self) {
        self.retry_at_once = true;
        self.pauses.reset();
    }

    fn tick(&mut self, now: Duration) -> Vec<Action> {
        if self.wake().is_none_or(|wake| now < wake) {
            return Vec::new();
        }
        let limit = self.limits.offer;
        match self.phase {
            Phase::Offered => {
                self.offer_again(format!("the kubelet has not registered the plugin within {limit:?}"), now)
            }
            Phase::Disconnected => self
                .offer_again(format!("the kubelet closed its connection and did not come back within {limit:?}"), now),
            Phase::Ending => {
                self.until = None;
                vec![Action::Cut]
            }
            Phase::Pausing => self.attempt_or_wait(now),
            Phase::WaitingForGpus | Phase::WaitingForKubelet | Phase::Binding | Phase::Registered => Vec::new(),
        }
    }

    /// New sockets for a kubelet that is not there, or that missed the file: reported once.
    fn offer_again(&mut self, why: String, now: Duration) -> Vec<Action> {
        let mut actions = self.waiting(why);
        self.enter(Phase::Ending, Some(now + self.limits.close));
        actions.push(Action::End);
        actions
    }

    fn shutdown(&mut self, now: Duration) -> Vec<Action> {
        self.leaving = true;
        if self.phase == Phase::Ending {
            return Vec::new();
        }
        // A bind in progress is cancelled.
        self.over = !self.is_open();
        self.enter(Phase::Ending, (!self.over).then_some(now + self.limits.close));
        vec![Action::End]
    }
}

#[cfg(test)]
mod tests;
