//! The life of one resource's plugin with the kubelet as a state machine: `step(state, input, moment) -> (state,
//! actions)`.
//!
//! Pure: no I/O, no clock, no task, no randomness (time and jitter come with the moment). `life` is its one caller: it
//! feeds inputs and performs actions. docs/life-cycle.md has the diagram and the invariants; the tests beside this file
//! check them in a simulated world.

use std::time::Duration;

use super::Phase;
use crate::backoff::Backoff;
use crate::once::Once;
use crate::uds::FileId;

/// A session that lasted this long had settled: the attempt after it comes at once.
const SETTLED: Duration = Duration::from_secs(10);
/// The least time between two binds, the first retry excepted, however often kubelet.sock changes.
const GAP: Duration = Duration::from_millis(100);
/// The pause before PodResources is asked again after an answer without our devices.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How often PodResources is asked while the plugin serves: a registration can be lost with its stream still open.
const ASK_BETWEEN: Duration = Duration::from_secs(30);
/// From the end of the plugin before us until we register again: by then the kubelet has seen its stream end.
const SEEN_TO_END: Duration = Duration::from_secs(1);

/// From the end of a plugin that registered over us, or of one of our streams, until we register again: the kubelet has
/// seen that end too, most likely.
const SOON: Duration = Duration::from_millis(20);

const KUBELET_RESTARTED: &str = "kubelet.sock is gone or new: the kubelet restarted";

/// The deadlines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Register, from the call to its answer.
    pub register: Duration,
    /// From that answer to an open ListAndWatch.
    pub stream: Duration,
    /// From the stream to our devices on PodResources' list.
    pub confirm: Duration,
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

/// Whether PodResources lists our devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// It lists every healthy one; also where none is healthy.
    Listed,
    /// At least one healthy device is not listed.
    Missing,
    /// It does not answer: only the stream shows that the plugin is registered.
    Unknown,
}

/// What happened.
#[derive(Clone, Debug)]
pub(super) enum Input {
    /// The files were checked: the kubelet's socket or why there is none, whether our own is in place, and whether a
    /// plugin of this resource that was there when ours was bound is still there.
    Checked { kubelet: Result<FileId, String>, own: bool, predecessor: bool },
    /// Our socket is bound and served, or why not; and whether another plugin of this resource is there.
    Bound(Result<bool, String>),
    /// The kubelet answered Register, or the call failed.
    Registered(Result<(), String>),
    /// The kubelet forgot the name of the plugin before us, or why it may not have.
    Unnamed(Result<(), String>),
    /// The kubelet holds this many ListAndWatch streams.
    Streams(usize),
    /// PodResources answered.
    Listed(Listing),
    /// The server ended by itself.
    ServerEnded(String),
    /// The server has ended, and no connection to it is open.
    Closed,
    /// Another plugin of the resource has registered after us, and ended.
    Renew,
    /// The moment of [`Machine::wake`] has come.
    Tick,
    /// The plugin is asked to end.
    Shutdown,
}

/// What `life` has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Remove dead predecessors' sockets, bind our own and serve it.
    Bind,
    /// Register it with the kubelet.
    Register,
    /// Register it again, under another name: newer kubelets refuse a socket that is connected.
    Renew,
    /// Have the kubelet forget whom it would disconnect when the stream of the plugin before us ends.
    Unname,
    /// Ask PodResources for our devices.
    Ask,
    /// Remove our socket, end its streams, cancel every call to the kubelet.
    End,
    /// Cut the connections that have not closed by themselves.
    Cut,
    /// Report why there is no kubelet to register with.
    ReportWaiting(String),
    /// Report that a registration succeeded, or why it failed.
    ReportRegistered(Result<(), String>),
    /// Report why a session ended or did not begin; another attempt follows.
    ReportEnded(String),
    /// Report whether the end of the plugin before us will leave our registration alone, or why it may not.
    ReportUnnamed(Result<(), String>),
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
    /// When PodResources is asked next; while it is asked, `None`.
    ask: Option<Duration>,
    /// While serving: the last answer did not list our devices, the one before did.
    doubted: bool,
    /// The kubelet's socket at the last check, or why there is none.
    kubelet: Result<FileId, String>,
    /// The kubelet's socket of the current attempt.
    attempted: Option<FileId>,
    /// When the current session began.
    since: Duration,
    /// Streams the kubelet holds in this session.
    streams: usize,
    /// Whether another plugin of this resource was there when our socket was bound, and still is.
    predecessor: bool,
    /// Whether the kubelet may see its end after our registration.
    outlasts: bool,
    /// By when the kubelet has seen its end.
    seen: Duration,
    /// Whether the kubelet may have no client under the resource's name.
    unnamed: bool,
    /// Whether Register was called again, so that it has.
    renewing: bool,
    /// Whether what it was called for happened once more meanwhile.
    again: bool,
    /// Whether the next session that ends soon is followed by an attempt at once; the pauses come after it.
    retry_at_once: bool,
    pauses: Backoff,
    /// When [`Action::Bind`] was last asked for.
    bound: Option<Duration>,
    leaving: bool,
    /// Why it waits for a kubelet, since the last bind.
    waits: Once<String>,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            phase: Phase::WaitingForKubelet,
            over: false,
            until: None,
            ask: None,
            doubted: false,
            kubelet: Err("the folder has not been checked yet".to_owned()),
            attempted: None,
            since: Duration::ZERO,
            streams: 0,
            predecessor: false,
            outlasts: false,
            seen: Duration::ZERO,
            unnamed: false,
            renewing: false,
            again: false,
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
        self.until.into_iter().chain(self.ask).min()
    }

    /// The next state after an input, and what has to be done. An input that the state does not expect changes nothing.
    pub fn step(mut self, input: Input, moment: Moment) -> (Self, Vec<Action>) {
        let actions = match input {
            Input::Checked { kubelet, own, predecessor } => self.checked(kubelet, own, predecessor, moment.now),
            Input::Bound(result) => self.served(result, moment),
            Input::Registered(result) => self.registered(result, moment.now),
            Input::Unnamed(result) => self.unnamed(result, moment.now),
            Input::Streams(open) => self.streams(open, moment.now),
            Input::Listed(listing) => self.listed(listing, moment.now),
            Input::ServerEnded(why) => self.end_if_open(format!("the server ended: {why}"), moment.now),
            Input::Closed => self.closed(moment),
            Input::Renew => self.renew_soon(moment.now),
            Input::Tick => self.tick(moment.now),
            Input::Shutdown => self.shutdown(moment.now),
        };
        (self, actions)
    }

    fn enter(&mut self, phase: Phase, until: Option<Duration>) {
        (self.phase, self.until, self.ask, self.doubted) = (phase, until, None, false);
    }

    /// Whether a session is open: our socket is bound, and the session is not ending.
    fn is_open(&self) -> bool {
        (Phase::Registering..=Phase::Serving).contains(&self.phase)
    }

    /// Whether kubelet.sock is still the one of the current attempt.
    fn is_same_kubelet(&self) -> bool {
        self.kubelet.as_ref().ok() == self.attempted.as_ref()
    }

    fn checked(&mut self, kubelet: Result<FileId, String>, own: bool, predecessor: bool, now: Duration) -> Vec<Action> {
        self.kubelet = kubelet;
        let has_ended = self.predecessor && !predecessor;
        self.predecessor &= predecessor;
        if has_ended {
            self.seen = now + SEEN_TO_END;
        }
        match self.phase {
            Phase::WaitingForKubelet => self.attempt_or_wait(now),
            // A kubelet that has ended leaves its socket behind, and the pauses grow; the new one's start anew.
            Phase::Pausing if !self.is_same_kubelet() => {
                self.forget_failures();
                self.attempt_or_wait(now)
            }
            _ if !self.is_same_kubelet() => self.end_if_open(KUBELET_RESTARTED, now),
            _ if !own => self.end_if_open("our socket is gone or not ours any more", now),
            Phase::Beside if has_ended => {
                self.until = Some(self.seen);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// The next attempt, now or when the gap allows it; or the wait for a kubelet.
    fn attempt_or_wait(&mut self, now: Duration) -> Vec<Action> {
        if let Err(why) = self.kubelet.clone() {
            self.enter(Phase::WaitingForKubelet, None);
            return self.waits.replace([why]).into_iter().map(Action::ReportWaiting).collect();
        }
        self.attempted = self.kubelet.as_ref().ok().copied();
        match self.bound.map(|bound| bound + GAP).filter(|earliest| now < *earliest) {
            None => self.bind(now),
            earliest => {
                self.enter(Phase::Pausing, earliest);
                Vec::new()
            }
        }
    }

    fn bind(&mut self, now: Duration) -> Vec<Action> {
        self.bound = Some(now);
        self.waits.clear();
        self.enter(Phase::Binding, None);
        vec![Action::Bind]
    }

    fn served(&mut self, result: Result<bool, String>, moment: Moment) -> Vec<Action> {
        if self.phase != Phase::Binding {
            return Vec::new();
        }
        (self.since, self.streams, self.unnamed, self.renewing) = (moment.now, 0, false, false);
        match result {
            Ok(predecessor) => (self.predecessor, self.outlasts) = (predecessor, predecessor),
            Err(why) => {
                let mut actions = vec![Action::ReportEnded(why)];
                actions.extend(self.pause(moment));
                return actions;
            }
        }
        self.enter(Phase::Registering, Some(moment.now + self.limits.register));
        if !self.is_same_kubelet() {
            return self.end_if_open(KUBELET_RESTARTED, moment.now);
        }
        vec![Action::Register]
    }

    fn registered(&mut self, result: Result<(), String>, now: Duration) -> Vec<Action> {
        if self.phase == Phase::Beside && std::mem::take(&mut self.renewing) {
            return match result {
                Err(why) => self.end_if_open(format!("the second registration failed: {why}"), now),
                Ok(()) if std::mem::take(&mut self.again) => {
                    if self.predecessor || now < self.seen {
                        return self.end_if_open("plugins before and after ours came and went", now);
                    }
                    self.renew_soon(now)
                }
                Ok(()) => {
                    (self.unnamed, self.outlasts) = (false, self.predecessor || now < self.seen);
                    self.confirmed(now)
                }
            };
        }
        if self.phase != Phase::Registering {
            return Vec::new();
        }
        let mut actions = vec![Action::ReportRegistered(result.clone())];
        actions.extend(match result {
            Err(why) => self.end_if_open(format!("the registration failed: {why}"), now),
            Ok(()) => {
                self.enter(Phase::WaitingForStream, Some(now + self.limits.stream));
                self.streams(self.streams, now)
            }
        });
        actions
    }

    fn streams(&mut self, open: usize, now: Duration) -> Vec<Action> {
        let before = std::mem::replace(&mut self.streams, open);
        match self.phase {
            Phase::WaitingForStream if open > 0 => {
                self.enter(Phase::Confirming, Some(now + self.limits.confirm));
                vec![Action::Ask]
            }
            Phase::Confirming | Phase::Unnaming | Phase::Beside | Phase::Serving if open == 0 => {
                self.end_if_open("the kubelet's ListAndWatch stream is gone", now)
            }
            // We have several since we registered again. The kubelet ends the last, and takes the registration with it.
            Phase::Beside | Phase::Serving if open < before => self.renew_soon(now),
            _ => Vec::new(),
        }
    }

    fn listed(&mut self, listing: Listing, now: Duration) -> Vec<Action> {
        let is_asked = self.asks_at_times() && self.ask.is_none();
        if is_asked && listing != Listing::Missing {
            self.doubted = false;
            self.ask = Some(now + ASK_BETWEEN);
            if self.phase == Phase::Confirming {
                return self.confirmed(now);
            }
        } else if is_asked {
            if self.doubted {
                self.enter(Phase::Confirming, Some(now + self.limits.confirm));
            } else {
                // A device that has just changed its health may be missing for a moment.
                self.doubted = self.phase != Phase::Confirming;
            }
            self.ask = Some(now + ASK_AGAIN);
        }
        Vec::new()
    }

    /// Whether PodResources is asked from time to time.
    fn asks_at_times(&self) -> bool {
        matches!(self.phase, Phase::Confirming | Phase::Beside | Phase::Serving)
    }

    /// PodResources lists our devices. A plugin that was here before us may have its stream still, whose end must not end
    /// us.
    fn confirmed(&mut self, now: Duration) -> Vec<Action> {
        if self.outlasts && !self.unnamed {
            self.enter(Phase::Unnaming, Some(now + self.limits.register));
            return vec![Action::Unname];
        }
        if self.unnamed {
            self.beside(now);
        } else {
            (self.phase, self.until) = (Phase::Serving, None);
        }
        Vec::new()
    }

    /// The kubelet has forgotten the name, or may not have: then the end of the plugin before us costs another session.
    fn unnamed(&mut self, result: Result<(), String>, now: Duration) -> Vec<Action> {
        if self.phase != Phase::Unnaming {
            return Vec::new();
        }
        self.unnamed = true;
        self.beside(now);
        vec![Action::ReportUnnamed(result)]
    }

    fn beside(&mut self, now: Duration) {
        self.enter(Phase::Beside, (!self.predecessor).then_some(self.seen.max(now)));
        (self.ask, self.renewing, self.again) = (Some(now + ASK_BETWEEN), false, false);
    }

    /// Registers the same socket again, so that the kubelet has the name again.
    fn renew(&mut self, now: Duration) -> Vec<Action> {
        (self.renewing, self.until) = (true, Some(now + self.limits.register));
        vec![Action::Renew]
    }

    /// Another plugin of the resource has registered and ended: the kubelet may have taken our registration with it.
    fn renew_soon(&mut self, now: Duration) -> Vec<Action> {
        if self.phase == Phase::Beside && self.renewing {
            self.again = true;
        } else if self.phase.is_serving() {
            (self.phase, self.until) = (Phase::Beside, Some(now + SOON));
            (self.unnamed, self.renewing, self.again) = (true, false, false);
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
        if !self.is_same_kubelet() {
            self.forget_failures();
            return self.attempt_or_wait(now);
        }
        if now.saturating_sub(self.since) >= SETTLED {
            self.forget_failures();
            return self.bind(now);
        }
        if std::mem::take(&mut self.retry_at_once) {
            return self.bind(now);
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
        let limits = self.limits;
        match self.phase {
            Phase::Registering => {
                self.registered(Err(format!("the kubelet did not answer Register within {:?}", limits.register)), now)
            }
            Phase::WaitingForStream => {
                let cause =
                    format!("the kubelet did not open ListAndWatch within {:?} of the registration", limits.stream);
                self.end_if_open(cause, now)
            }
            Phase::Confirming if self.until.is_some_and(|until| now >= until) => {
                let after = limits.confirm;
                let cause =
                    format!("PodResources does not list our devices, {after:?} after the kubelet opened ListAndWatch");
                self.end_if_open(cause, now)
            }
            Phase::Unnaming => {
                self.unnamed(Err(format!("the kubelet did not answer Register within {:?}", limits.register)), now)
            }
            Phase::Beside if self.until.is_some_and(|until| now >= until) => {
                if !self.renewing {
                    return self.renew(now);
                }
                self.registered(Err(format!("the kubelet did not answer Register within {:?}", limits.register)), now)
            }
            Phase::Confirming | Phase::Beside | Phase::Serving => {
                self.ask = None;
                vec![Action::Ask]
            }
            Phase::Ending => {
                self.until = None;
                vec![Action::Cut]
            }
            Phase::Pausing => self.attempt_or_wait(now),
            Phase::WaitingForKubelet | Phase::Binding => Vec::new(),
        }
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
