//! The life of one resource's plugin with the kubelet as a state machine: `step(state, input, moment) -> (state,
//! actions)`.
//!
//! Pure: no I/O, no clock, no task, no randomness (time and jitter come with the moment). `life` is its one caller: it
//! feeds inputs and performs actions. docs/life-cycle.md has the diagram and the invariants; the tests beside this file
//! check them in a simulated world.

use std::time::Duration;

use thiserror::Error;

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
    /// The files were checked: the kubelet's socket or why there is none, and whether our own is in place.
    Checked { kubelet: Result<FileId, String>, own: bool },
    /// Our socket is bound and served, or why not.
    Bound(Result<(), String>),
    /// The kubelet answered Register, or the call failed.
    Registered(Result<(), String>),
    /// The kubelet holds this many ListAndWatch streams.
    Streams(usize),
    /// PodResources answered.
    Listed(Listing),
    /// The server ended by itself.
    ServerEnded(String),
    /// The server has ended, and no connection to it is open.
    Closed,
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
    /// Ask PodResources for our devices.
    Ask,
    /// Remove our socket, end its streams, cancel every call to the kubelet.
    End,
    /// Cut the connections that have not closed by themselves.
    Cut,
    /// Report why there is no kubelet to register with.
    ReportWaiting(String),
    /// Report why a session ended or did not begin.
    ReportEnded(Cause),
}

/// Why a session with the kubelet ended; each is followed by another attempt.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum Cause {
    #[error("{0}")]
    NotServed(String),
    #[error("the registration failed: {0}")]
    Register(String),
    #[error("the registration failed: the kubelet did not answer Register within {0:?}")]
    RegisterLate(Duration),
    #[error("the kubelet did not open ListAndWatch within {0:?} of the registration")]
    NoStream(Duration),
    #[error("the kubelet's ListAndWatch stream is gone")]
    StreamGone,
    #[error("PodResources does not list our devices, {0:?} after the kubelet opened ListAndWatch")]
    NotListed(Duration),
    #[error("kubelet.sock is gone or new: the kubelet restarted")]
    KubeletRestarted,
    #[error("our socket is gone or not ours any more")]
    SocketGone,
    #[error("the server ended: {0}")]
    ServerEnded(String),
}

/// Where the plugin is in its life.
#[derive(Clone, Debug)]
enum Stage {
    Waiting,
    Binding { kubelet: FileId },
    Open { kubelet: FileId, since: Duration, step: Step },
    Ending { kubelet: FileId, since: Duration, cut: Option<Duration> },
    Pausing { kubelet: FileId, until: Duration },
    Over,
}

/// How far an open session has come.
#[derive(Clone, Copy, Debug)]
enum Step {
    Registering {
        until: Duration,
    },
    WaitingForStream {
        until: Duration,
    },
    Confirming {
        until: Duration,
        ask: Option<Duration>,
    },
    /// `doubted`: the last answer did not list our devices, the one before did.
    Serving {
        ask: Option<Duration>,
        doubted: bool,
    },
}

/// One state of the life.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    limits: Limits,
    /// The kubelet's socket at the last check, or why there is none.
    kubelet: Result<FileId, String>,
    /// Streams the kubelet holds in this session.
    streams: usize,
    /// Whether the next session that ends soon is followed by an attempt at once; the pauses come after it.
    retry_at_once: bool,
    pauses: Backoff,
    /// When [`Action::Bind`] was last asked for.
    bound: Option<Duration>,
    leaving: bool,
    /// Why it waits for a kubelet, since the last bind.
    waits: Once<String>,
    stage: Stage,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            kubelet: Err("the folder has not been checked yet".to_owned()),
            streams: 0,
            retry_at_once: true,
            // The first pause is so much shorter than the longest that six doublings lead there.
            pauses: Backoff::new(limits.longest_pause / 64, limits.longest_pause),
            bound: None,
            leaving: false,
            waits: Once::new(),
            stage: Stage::Waiting,
        }
    }

    /// The phase that /readyz shows.
    pub fn phase(&self) -> Phase {
        match &self.stage {
            Stage::Waiting => Phase::WaitingForKubelet,
            Stage::Binding { .. } => Phase::Binding,
            Stage::Open { step: Step::Registering { .. }, .. } => Phase::Registering,
            Stage::Open { step: Step::WaitingForStream { .. }, .. } => Phase::WaitingForStream,
            Stage::Open { step: Step::Confirming { .. }, .. } => Phase::Confirming,
            Stage::Open { step: Step::Serving { .. }, .. } => Phase::Serving,
            Stage::Ending { .. } | Stage::Over => Phase::Ending,
            Stage::Pausing { .. } => Phase::Pausing,
        }
    }

    /// Whether the plugin has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// When an [`Input::Tick`] is due; `None`: not before another input.
    pub fn wake(&self) -> Option<Duration> {
        match &self.stage {
            Stage::Waiting | Stage::Binding { .. } | Stage::Over => None,
            Stage::Open { step, .. } => match *step {
                Step::Registering { until } | Step::WaitingForStream { until } => Some(until),
                Step::Confirming { until, ask } => Some(ask.map_or(until, |ask| ask.min(until))),
                Step::Serving { ask, .. } => ask,
            },
            Stage::Ending { cut, .. } => *cut,
            Stage::Pausing { until, .. } => Some(*until),
        }
    }

    /// The next state after an input, and what has to be done. An input that the state does not expect changes nothing.
    pub fn step(mut self, input: Input, moment: Moment) -> (Self, Vec<Action>) {
        let actions = match input {
            Input::Checked { kubelet, own } => self.checked(kubelet, own, moment),
            Input::Bound(result) => self.served(result, moment),
            Input::Registered(result) => self.registered(result, moment.now),
            Input::Streams(open) => self.streams(open, moment.now),
            Input::Listed(listing) => self.listed(listing, moment.now),
            Input::ServerEnded(why) => self.end_if_open(Cause::ServerEnded(why), moment.now),
            Input::Closed => self.closed(moment),
            Input::Tick => self.tick(moment),
            Input::Shutdown => self.shutdown(moment.now),
        };
        (self, actions)
    }

    fn checked(&mut self, kubelet: Result<FileId, String>, own: bool, moment: Moment) -> Vec<Action> {
        self.kubelet = kubelet;
        let found = self.kubelet.as_ref().ok().copied();
        match &self.stage {
            Stage::Waiting => self.attempt_or_wait(moment.now),
            Stage::Open { kubelet, .. } if found != Some(*kubelet) => {
                self.end_if_open(Cause::KubeletRestarted, moment.now)
            }
            Stage::Open { .. } if !own => self.end_if_open(Cause::SocketGone, moment.now),
            // A kubelet that has ended leaves its socket behind, and the pauses grow; the new one's start anew.
            Stage::Pausing { kubelet, .. } if found != Some(*kubelet) => {
                self.forget_failures();
                self.attempt_or_wait(moment.now)
            }
            _ => Vec::new(),
        }
    }

    /// The next attempt, now or when the gap allows it; or the wait for a kubelet.
    fn attempt_or_wait(&mut self, now: Duration) -> Vec<Action> {
        match &self.kubelet {
            Ok(kubelet) => {
                let kubelet = *kubelet;
                let earliest = self.bound.map_or(now, |bound| bound + GAP);
                if now < earliest {
                    self.stage = Stage::Pausing { kubelet, until: earliest };
                    return Vec::new();
                }
                self.bind(kubelet, now)
            }
            Err(why) => {
                self.stage = Stage::Waiting;
                self.waits.replace([why.clone()]).into_iter().map(Action::ReportWaiting).collect()
            }
        }
    }

    fn bind(&mut self, kubelet: FileId, now: Duration) -> Vec<Action> {
        self.bound = Some(now);
        self.waits.clear();
        self.stage = Stage::Binding { kubelet };
        vec![Action::Bind]
    }

    fn served(&mut self, result: Result<(), String>, moment: Moment) -> Vec<Action> {
        let Stage::Binding { kubelet } = self.stage else { return Vec::new() };
        if let Err(why) = result {
            let mut actions = vec![Action::ReportEnded(Cause::NotServed(why))];
            actions.extend(self.pause(kubelet, moment.now, moment));
            return actions;
        }
        self.streams = 0;
        let step = Step::Registering { until: moment.now + self.limits.register };
        self.stage = Stage::Open { kubelet, since: moment.now, step };
        if self.kubelet.as_ref().ok() != Some(&kubelet) {
            return self.end_if_open(Cause::KubeletRestarted, moment.now);
        }
        vec![Action::Register]
    }

    fn registered(&mut self, result: Result<(), String>, now: Duration) -> Vec<Action> {
        let Stage::Open { step: step @ Step::Registering { .. }, .. } = &mut self.stage else { return Vec::new() };
        if let Err(why) = result {
            return self.end_if_open(Cause::Register(why), now);
        }
        *step = Step::WaitingForStream { until: now + self.limits.stream };
        self.streams(self.streams, now)
    }

    fn streams(&mut self, open: usize, now: Duration) -> Vec<Action> {
        self.streams = open;
        let Stage::Open { step, .. } = &mut self.stage else { return Vec::new() };
        match step {
            Step::WaitingForStream { .. } if open > 0 => {
                *step = Step::Confirming { until: now + self.limits.confirm, ask: None };
                vec![Action::Ask]
            }
            Step::Confirming { .. } | Step::Serving { .. } if open == 0 => self.end_if_open(Cause::StreamGone, now),
            _ => Vec::new(),
        }
    }

    fn listed(&mut self, listing: Listing, now: Duration) -> Vec<Action> {
        let Stage::Open { step, .. } = &mut self.stage else { return Vec::new() };
        let again = Some(now + ASK_AGAIN);
        match (&*step, listing) {
            // No answer is expected.
            (Step::Registering { .. } | Step::WaitingForStream { .. }, _)
            | (Step::Confirming { ask: Some(_), .. } | Step::Serving { ask: Some(_), .. }, _) => {}
            (_, Listing::Listed | Listing::Unknown) => {
                *step = Step::Serving { ask: Some(now + ASK_BETWEEN), doubted: false };
            }
            (Step::Confirming { until, .. }, Listing::Missing) => {
                *step = Step::Confirming { until: *until, ask: again };
            }
            // A device that has just changed its health may be missing for a moment.
            (Step::Serving { doubted: false, .. }, Listing::Missing) => {
                *step = Step::Serving { ask: again, doubted: true };
            }
            (Step::Serving { doubted: true, .. }, Listing::Missing) => {
                *step = Step::Confirming { until: now + self.limits.confirm, ask: again };
            }
        }
        Vec::new()
    }

    /// Ends the open session, if there is one. The next attempt waits until its connections are closed.
    fn end_if_open(&mut self, cause: Cause, now: Duration) -> Vec<Action> {
        let Stage::Open { kubelet, since, .. } = self.stage else { return Vec::new() };
        self.stage = Stage::Ending { kubelet, since, cut: Some(now + self.limits.close) };
        vec![Action::ReportEnded(cause), Action::End]
    }

    fn closed(&mut self, moment: Moment) -> Vec<Action> {
        let Stage::Ending { kubelet, since, .. } = self.stage else { return Vec::new() };
        if self.leaving {
            self.stage = Stage::Over;
            return Vec::new();
        }
        self.pause(kubelet, since, moment)
    }

    /// After a session that began at `since` with this kubelet: the next attempt, or a pause before it. A random part
    /// of the pause, up to a half, is left out, so that the nodes of a cluster do not retry in step.
    fn pause(&mut self, kubelet: FileId, since: Duration, moment: Moment) -> Vec<Action> {
        let now = moment.now;
        if self.kubelet.as_ref().ok() != Some(&kubelet) {
            self.forget_failures();
            return self.attempt_or_wait(now);
        }
        if now.saturating_sub(since) >= SETTLED {
            self.forget_failures();
            return self.bind(kubelet, now);
        }
        if std::mem::take(&mut self.retry_at_once) {
            return self.bind(kubelet, now);
        }
        let full = self.pauses.failed();
        let part = u32::try_from(moment.jitter % 512).unwrap_or(0);
        let pause = full.saturating_sub((full / 1024).saturating_mul(part));
        self.stage = Stage::Pausing { kubelet, until: now + pause };
        Vec::new()
    }

    fn forget_failures(&mut self) {
        self.retry_at_once = true;
        self.pauses.reset();
    }

    fn tick(&mut self, moment: Moment) -> Vec<Action> {
        let (now, limits) = (moment.now, self.limits);
        if self.wake().is_none_or(|wake| now < wake) {
            return Vec::new();
        }
        match &mut self.stage {
            Stage::Open { step, .. } => match step {
                Step::Registering { .. } => self.end_if_open(Cause::RegisterLate(limits.register), now),
                Step::WaitingForStream { .. } => self.end_if_open(Cause::NoStream(limits.stream), now),
                Step::Confirming { until, .. } if now >= *until => {
                    self.end_if_open(Cause::NotListed(limits.confirm), now)
                }
                Step::Confirming { ask, .. } | Step::Serving { ask, .. } => {
                    *ask = None;
                    vec![Action::Ask]
                }
            },
            Stage::Ending { cut, .. } => {
                *cut = None;
                vec![Action::Cut]
            }
            Stage::Pausing { .. } => self.attempt_or_wait(now),
            Stage::Waiting | Stage::Binding { .. } | Stage::Over => Vec::new(),
        }
    }

    fn shutdown(&mut self, now: Duration) -> Vec<Action> {
        self.leaving = true;
        match self.stage {
            Stage::Open { kubelet, since, .. } => {
                self.stage = Stage::Ending { kubelet, since, cut: Some(now + self.limits.close) };
                vec![Action::End]
            }
            Stage::Ending { .. } | Stage::Over => Vec::new(),
            // A bind in progress is cancelled.
            Stage::Waiting | Stage::Binding { .. } | Stage::Pausing { .. } => {
                self.stage = Stage::Over;
                vec![Action::End]
            }
        }
    }
}

#[cfg(test)]
mod tests;
