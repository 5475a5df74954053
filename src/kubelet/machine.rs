//! The life of one resource's plugin with the kubelet as a state machine: `step(state, input, moment) -> (state, actions)`.
//!
//! Pure: no I/O, no clock, no task, no chance (time and jitter come with the moment). `life` is its one caller: it tells
//! what it saw and does what it is told. docs/life-cycle.md has the diagram and the invariants; the tests beside this
//! file hold them against a simulated world.

use std::time::Duration;

use thiserror::Error;

use super::Phase;
use crate::uds::FileId;

/// A session that lasted this long ended for a new reason: the next attempt comes at once.
const SETTLED: Duration = Duration::from_secs(10);
/// The least time between two sockets of ours, the first retry excepted: however often kubelet.sock changes.
const GAP: Duration = Duration::from_millis(100);
/// How soon PodResources is asked again after an answer without our devices.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How often PodResources is asked while we serve. A registration can be lost with its stream still open.
const ASK_BETWEEN: Duration = Duration::from_secs(30);

/// How long each thing may take.
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

/// When a step is taken: the time since some start, and a random number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub now: Duration,
    pub jitter: u64,
}

/// What PodResources says of our devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// Every healthy one can be given out; also where none is healthy.
    Listed,
    /// One at least cannot.
    Missing,
    /// It is not there, or has no answer: the stream is all there is to go by.
    Unknown,
}

/// What happened.
#[derive(Clone, Debug)]
pub(super) enum Input {
    /// The files were looked at: the kubelet's socket or why there is none, and whether our own stands.
    Looked { kubelet: Result<FileId, String>, own: bool },
    /// Our socket is bound and served, or why not.
    Bound(Result<(), String>),
    /// The kubelet answered Register, or could not be asked.
    Registered(Result<(), String>),
    /// The kubelet holds this many ListAndWatch streams.
    Streams(usize),
    /// PodResources was asked.
    Asked(Listing),
    /// The server ended though nobody told it to.
    ServerEnded(String),
    /// The server has ended, and no connection to it is open.
    Closed,
    /// The moment of [`Machine::wake`] has come.
    Tick,
    /// The plugin is to end.
    Shutdown,
}

/// What has to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Remove dead predecessors' sockets, bind a socket of our own and serve it.
    Bind,
    /// Register it with the kubelet.
    Register,
    /// Ask PodResources for our devices.
    Ask,
    /// Take our socket away, end its streams, let go of every call to the kubelet.
    End,
    /// Cut the connections that have not closed by themselves.
    Cut,
    /// Tell people why there is no kubelet to register with.
    SayWaiting(String),
    /// Tell people why a session ended or did not begin.
    SayEnded(Cause),
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

/// Where the life is.
#[derive(Clone, Debug)]
enum Stage {
    Waiting { told: Option<String> },
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
    /// `doubted`: the last answer did not list our devices.
    Serving {
        ask: Option<Duration>,
        doubted: bool,
    },
}

/// One state of the life.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    limits: Limits,
    /// The kubelet's socket at the last look, and why there is none.
    kubelet: Result<FileId, String>,
    /// Streams the kubelet holds in this session.
    streams: usize,
    /// Sessions in a row that ended too soon.
    attempt: u32,
    /// When a socket of ours was last asked for.
    bound: Option<Duration>,
    leaving: bool,
    stage: Stage,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            kubelet: Err("the folder has not been looked at yet".to_owned()),
            streams: 0,
            attempt: 0,
            bound: None,
            leaving: false,
            stage: Stage::Waiting { told: None },
        }
    }

    /// What /readyz goes by.
    pub fn phase(&self) -> Phase {
        match &self.stage {
            Stage::Waiting { .. } => Phase::WaitingForKubelet,
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

    /// When a [`Input::Tick`] is wanted; `None`: not before something else happens.
    pub fn wake(&self) -> Option<Duration> {
        match &self.stage {
            Stage::Waiting { .. } | Stage::Binding { .. } | Stage::Over => None,
            Stage::Open { step, .. } => match *step {
                Step::Registering { until } | Step::WaitingForStream { until } => Some(until),
                Step::Confirming { until, ask } => Some(ask.map_or(until, |ask| ask.min(until))),
                Step::Serving { ask, .. } => ask,
            },
            Stage::Ending { cut, .. } => *cut,
            Stage::Pausing { until, .. } => Some(*until),
        }
    }

    /// The next state after an input, and what has to be done about it. An input that the state does not wait for
    /// changes nothing.
    pub fn step(mut self, input: Input, moment: Moment) -> (Self, Vec<Action>) {
        let actions = match input {
            Input::Looked { kubelet, own } => self.looked(kubelet, own, moment),
            Input::Bound(result) => self.served(result, moment),
            Input::Registered(result) => self.registered(result, moment.now),
            Input::Streams(open) => self.streams(open, moment.now),
            Input::Asked(listing) => self.asked(listing, moment.now),
            Input::ServerEnded(why) => self.end_if_open(Cause::ServerEnded(why), moment.now),
            Input::Closed => self.closed(moment),
            Input::Tick => self.tick(moment),
            Input::Shutdown => self.shutdown(moment.now),
        };
        (self, actions)
    }

    fn looked(&mut self, kubelet: Result<FileId, String>, own: bool, moment: Moment) -> Vec<Action> {
        self.kubelet = kubelet;
        let found = self.kubelet.as_ref().ok().copied();
        match &self.stage {
            Stage::Waiting { .. } => self.attempt_or_wait(moment.now),
            Stage::Open { kubelet, .. } if found != Some(*kubelet) => {
                self.end_if_open(Cause::KubeletRestarted, moment.now)
            }
            Stage::Open { .. } if !own => self.end_if_open(Cause::SocketGone, moment.now),
            // A kubelet that is gone leaves its socket behind: the pauses grow while it is away. They are not the
            // new one's.
            Stage::Pausing { kubelet, .. } if found != Some(*kubelet) => {
                self.attempt = 0;
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
                let told = match &self.stage {
                    Stage::Waiting { told } => told.as_ref(),
                    _ => None,
                };
                let say = (told != Some(why)).then(|| Action::SayWaiting(why.clone()));
                self.stage = Stage::Waiting { told: Some(why.clone()) };
                say.into_iter().collect()
            }
        }
    }

    fn bind(&mut self, kubelet: FileId, now: Duration) -> Vec<Action> {
        self.bound = Some(now);
        self.stage = Stage::Binding { kubelet };
        vec![Action::Bind]
    }

    fn served(&mut self, result: Result<(), String>, moment: Moment) -> Vec<Action> {
        let Stage::Binding { kubelet } = self.stage else { return Vec::new() };
        if let Err(why) = result {
            let mut actions = vec![Action::SayEnded(Cause::NotServed(why))];
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

    fn asked(&mut self, listing: Listing, now: Duration) -> Vec<Action> {
        let Stage::Open { step, .. } = &mut self.stage else { return Vec::new() };
        let again = Some(now + ASK_AGAIN);
        match (&*step, listing) {
            // Not asked.
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

    /// Ends the open session, if there is one; what comes next comes when its connections are closed.
    fn end_if_open(&mut self, cause: Cause, now: Duration) -> Vec<Action> {
        let Stage::Open { kubelet, since, .. } = self.stage else { return Vec::new() };
        self.stage = Stage::Ending { kubelet, since, cut: Some(now + self.limits.close) };
        vec![Action::SayEnded(cause), Action::End]
    }

    fn closed(&mut self, moment: Moment) -> Vec<Action> {
        let Stage::Ending { kubelet, since, .. } = self.stage else { return Vec::new() };
        if self.leaving {
            self.stage = Stage::Over;
            return Vec::new();
        }
        self.pause(kubelet, since, moment)
    }

    /// What follows a session that began at `since` with this kubelet.
    fn pause(&mut self, kubelet: FileId, since: Duration, moment: Moment) -> Vec<Action> {
        let now = moment.now;
        if self.kubelet.as_ref().ok() != Some(&kubelet) {
            self.attempt = 0;
            return self.attempt_or_wait(now);
        }
        let settled = now.saturating_sub(since) >= SETTLED;
        self.attempt = if settled { 0 } else { self.attempt.saturating_add(1) };
        let pause = pause(self.attempt, self.limits.longest_pause, moment.jitter);
        if pause.is_zero() {
            return self.bind(kubelet, now);
        }
        self.stage = Stage::Pausing { kubelet, until: now + pause };
        Vec::new()
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
            Stage::Waiting { .. } | Stage::Binding { .. } | Stage::Over => Vec::new(),
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
            // What is half bound goes with its future.
            Stage::Waiting { .. } | Stage::Binding { .. } | Stage::Pausing { .. } => {
                self.stage = Stage::Over;
                vec![Action::End]
            }
        }
    }
}

/// The pause before an attempt: none before the first retry, then doubling up to `longest`, of which a
/// random part up to a half is left out, so that a fleet does not knock in step.
fn pause(attempt: u32, longest: Duration, jitter: u64) -> Duration {
    let Some(doublings) = attempt.checked_sub(2) else { return Duration::ZERO };
    let full = (longest / 64).saturating_mul(1 << doublings.min(6)).min(longest);
    let part = u32::try_from(jitter % 512).unwrap_or(0);
    full.saturating_sub((full / 1024).saturating_mul(part))
}

#[cfg(test)]
mod tests;
