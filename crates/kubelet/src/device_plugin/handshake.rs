//! The device plugin's handshake with the kubelet: from a bound socket, by Register and ListAndWatch, to devices that
//! PodResources lists. Two more steps, Detach and Renew, let a registration outlast another plugin of the resource.
//!
//! Pure: no I/O, no clock, no task. [`RegistrationMachine`] calls it, `life` performs its actions. docs/life-cycle.md
//! has the diagram and the invariants; the tests beside this file check them in a simulated world.
//!
//! [`RegistrationMachine`]: crate::registration::RegistrationMachine

use std::time::Duration;

use super::Phase;
use crate::registration::{self, Action, Handshake, LifePhase};
use linkwise_system::uds::FileId;

/// The time that PodResources has to list our devices, in each phase Confirming.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before PodResources is asked again after an answer without our devices.
const ASK_AGAIN_DELAY: Duration = Duration::from_millis(100);
/// The time between two questions to PodResources while the plugin serves: a registration can be lost with its stream
/// still open.
const ASK_INTERVAL: Duration = Duration::from_secs(30);
/// The time between the end of the plugin before us and our second registration: by then the kubelet has seen that
/// plugin's stream end.
const RENEW_DELAY: Duration = Duration::from_secs(1);
/// The longest time for which the kubelet has no client under the resource's name, because the plugin before us still
/// runs: longer than a pod may take to end. Without a client, a kubelet up to 1.36 does not notice our end.
const MAX_OVERLAP: Duration = Duration::from_secs(5 * 60);
/// The time between the end of a plugin that registered after us and our next registration: most likely the kubelet has
/// seen that end by then.
const OVERTAKEN_DELAY: Duration = Duration::from_millis(20);

const KUBELET_RESTARTED: &str = "kubelet.sock is gone or new: the kubelet restarted";

/// The deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// The time from Register to its answer.
    pub register: Duration,
    /// The time between that answer and an open ListAndWatch.
    pub stream: Duration,
}

/// The answer of PodResources to the question for our devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// Every healthy device is listed; also where none is healthy.
    Listed,
    /// At least one healthy device is not listed.
    Missing,
    /// PodResources does not answer: only the stream shows that the plugin is registered.
    Unknown,
}

/// An input of the device plugin's own.
#[derive(Clone, Debug)]
pub(super) enum OwnInput {
    /// The kubelet forgot the client under the resource's name, or the reason why it may not have.
    Detached(Result<(), String>),
    /// The kubelet holds this many ListAndWatch streams.
    Streams(usize),
    /// PodResources answered.
    Listed(Listing),
    /// Another plugin of the resource has registered after us, and ended.
    Renew,
}

/// An action of the device plugin's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnAction {
    /// Register the socket with the kubelet.
    Register,
    /// Register the socket again, under another file name: newer kubelets refuse a socket that is connected.
    Renew,
    /// Make the kubelet forget the client that it would disconnect when the stream of the plugin before us ends.
    Detach,
    /// Ask PodResources for our devices.
    Ask,
    /// Report that our registration will outlast the plugin before us, or why it may not.
    ReportDetached(Result<(), String>),
}

/// An input of the device plugin's state machine.
pub(super) type Input = registration::Input<DevicePluginHandshake>;
/// The attempts of the device plugin.
type Attempts = registration::Attempts<DevicePluginHandshake>;

impl LifePhase for Phase {
    const WAITING_FOR_KUBELET: Self = Self::WaitingForKubelet;
    const BINDING: Self = Self::Binding;
    const ENDING: Self = Self::Ending;
    const PAUSING: Self = Self::Pausing;
    const SERVING: Self = Self::Serving;

    fn is_open(self) -> bool {
        (Self::Registering..=Self::Serving).contains(&self)
    }

    fn is_ready(self) -> bool {
        self.is_serving()
    }

    fn words(self) -> &'static str {
        Self::words(self) // inherent
    }
}

/// The state of the handshake in one session.
#[derive(Debug, Default)]
pub(super) struct DevicePluginHandshake {
    limits: Limits,
    /// The time at which PodResources is asked next; `None` if no question is planned.
    ask: Option<Duration>,
    /// True while a question to PodResources has no answer.
    is_asking: bool,
    /// True if the last answer did not list our devices. In the phase Serving, the answer before it did.
    is_doubted: bool,
    /// The number of streams that the kubelet holds in this session.
    streams: usize,
    /// True while a plugin of this resource that is older than our socket still runs.
    has_predecessor: bool,
    /// True if the kubelet may see the end of that plugin after our registration, which the end must not affect.
    must_detach: bool,
    /// True while the kubelet may have no client under the resource's name.
    is_detached: bool,
    /// True while a second Register, which gives the kubelet a client again, has no answer.
    is_renewing: bool,
}

impl DevicePluginHandshake {
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    fn enter(&mut self, attempts: &mut Attempts, phase: Phase, until: Option<Duration>) {
        attempts.enter(phase, until);
        self.ask = None;
    }

    /// Asks PodResources for our devices, unless a question is still open.
    fn ask(&mut self, attempts: &mut Attempts) {
        self.ask = None;
        if !std::mem::replace(&mut self.is_asking, true) {
            attempts.act(Action::Own(OwnAction::Ask));
        }
    }

    fn streams(&mut self, attempts: &mut Attempts, open: usize, now: Duration) {
        let before = std::mem::replace(&mut self.streams, open);
        match attempts.phase() {
            Phase::WaitingForStream if open > 0 => {
                self.enter(attempts, Phase::Confirming, Some(now + CONFIRM_TIMEOUT));
                self.ask(attempts);
            }
            // After a second registration there are several streams. If one ends, it is the newest, and our
            // registration ends with it.
            Phase::Confirming | Phase::Detaching | Phase::Overlapping | Phase::Serving if open < before => {
                attempts.end_if_open("the kubelet's ListAndWatch stream is gone", now);
            }
            _ => {}
        }
    }

    fn listed(&mut self, attempts: &mut Attempts, listing: Listing, now: Duration) {
        if !std::mem::take(&mut self.is_asking) {
            return;
        }
        let was_doubted = std::mem::replace(&mut self.is_doubted, listing == Listing::Missing);
        match attempts.phase() {
            Phase::Confirming if !self.is_doubted => return self.confirmed(attempts, now),
            // A device that has just changed its health may be missing for a moment.
            Phase::Serving if self.is_doubted && was_doubted => {
                self.enter(attempts, Phase::Confirming, Some(now + CONFIRM_TIMEOUT));
            }
            Phase::Confirming | Phase::Serving => {}
            _ => return,
        }
        self.ask = Some(now + if self.is_doubted { ASK_AGAIN_DELAY } else { ASK_INTERVAL });
    }

    /// Detaches or serves: PodResources lists our devices, or does not answer. The plugin before us may still have a
    /// stream, whose end must not end our registration.
    fn confirmed(&mut self, attempts: &mut Attempts, now: Duration) {
        if std::mem::take(&mut self.must_detach) {
            self.enter(attempts, Phase::Detaching, Some(now + self.limits.register));
            attempts.act(Action::Own(OwnAction::Detach));
        } else if self.is_detached {
            self.overlap(attempts, now);
        } else {
            self.serve(attempts, now);
        }
    }

    fn serve(&mut self, attempts: &mut Attempts, now: Duration) {
        self.enter(attempts, Phase::Serving, None);
        self.ask = (!self.is_asking).then_some(now + ASK_INTERVAL);
    }

    /// Serves beside the plugin before us, until that has ended and the kubelet has seen its end.
    fn overlap(&mut self, attempts: &mut Attempts, now: Duration) {
        let wait = if self.has_predecessor { MAX_OVERLAP } else { RENEW_DELAY };
        self.enter(attempts, Phase::Overlapping, Some(now + wait));
    }

    /// Registers the same socket again, so that the kubelet notices our end.
    fn renew(&mut self, attempts: &mut Attempts, now: Duration) {
        (self.is_renewing, attempts.until) = (true, Some(now + self.limits.register));
        attempts.act(Action::Own(OwnAction::Renew));
        if std::mem::take(&mut self.has_predecessor) {
            let why = format!("that plugin still runs after {MAX_OVERLAP:?}");
            attempts.act(Action::Own(OwnAction::ReportDetached(Err(why))));
        }
    }

    /// Prepares another registration in the phase Serving, otherwise ends the session: a plugin that registered after
    /// us has ended, and the kubelet may have no client under the name.
    fn overtaken(&mut self, attempts: &mut Attempts, now: Duration) {
        if attempts.phase() != Phase::Serving {
            return attempts.end_if_open("another plugin of the resource registered after ours and ended", now);
        }
        self.is_detached = true;
        self.enter(attempts, Phase::Overlapping, Some(now + OVERTAKEN_DELAY));
    }

    fn unanswered(&self) -> Result<(), String> {
        Err(format!("the kubelet did not answer Register within {:?}", self.limits.register))
    }
}

impl Handshake for DevicePluginHandshake {
    type Phase = Phase;
    type Kubelet = FileId;
    /// True while a plugin of this resource that is older than our socket still runs.
    type Others = bool;
    /// True if another plugin of this resource exists.
    type Bound = bool;
    type Input = OwnInput;
    type Action = OwnAction;

    const SOCKETS_GONE: &str = "our socket is gone or was replaced";
    const FIRST_RETRY_KEEPS_GAP: bool = false;

    fn other_kubelet(found: &Result<FileId, String>, attempted: Option<&FileId>) -> Option<&'static str> {
        (found.as_ref().ok() != attempted).then_some(KUBELET_RESTARTED)
    }

    fn checked(&mut self, attempts: &mut Attempts, has_predecessor: bool, now: Duration) {
        if self.has_predecessor && !has_predecessor {
            self.has_predecessor = false;
            if attempts.phase() == Phase::Overlapping && !self.is_renewing {
                attempts.until = Some(now + RENEW_DELAY);
            }
        }
    }

    fn bound(&mut self, attempts: &mut Attempts, has_predecessor: bool, now: Duration) {
        attempts.forget_waiting();
        *self = Self { has_predecessor, must_detach: has_predecessor, ..Self::new(self.limits) };
        self.enter(attempts, Phase::Registering, Some(now + self.limits.register));
        match attempts.other_kubelet() {
            Some(cause) => attempts.end_if_open(cause, now),
            None => attempts.act(Action::Own(OwnAction::Register)),
        }
    }

    fn registered(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) {
        match (attempts.phase(), result) {
            (Phase::Registering, result) => {
                attempts.act(Action::ReportRegistered(result.clone()));
                match result {
                    Err(why) => attempts.end_if_open(format!("the registration failed: {why}"), now),
                    Ok(()) => {
                        self.enter(attempts, Phase::WaitingForStream, Some(now + self.limits.stream));
                        self.streams(attempts, self.streams, now);
                    }
                }
            }
            (Phase::Overlapping, Err(why)) if self.is_renewing => {
                attempts.end_if_open(format!("the second registration failed: {why}"), now);
            }
            (Phase::Overlapping, Ok(())) if self.is_renewing => {
                (self.is_renewing, self.is_detached) = (false, false);
                self.serve(attempts, now);
                // No question was begun in the phase Overlapping.
                self.ask(attempts);
            }
            _ => {}
        }
    }

    fn happened(&mut self, attempts: &mut Attempts, input: OwnInput, now: Duration) {
        match input {
            OwnInput::Detached(result) if attempts.phase() == Phase::Detaching => {
                self.is_detached = true;
                self.overlap(attempts, now);
                attempts.act(Action::Own(OwnAction::ReportDetached(result)));
            }
            OwnInput::Detached(_) => {}
            OwnInput::Streams(open) => self.streams(attempts, open, now),
            OwnInput::Listed(listing) => self.listed(attempts, listing, now),
            OwnInput::Renew => self.overtaken(attempts, now),
        }
    }

    fn due(&mut self, attempts: &mut Attempts, now: Duration) {
        let limits = self.limits;
        let cause = match attempts.phase() {
            Phase::Registering => return self.registered(attempts, self.unanswered(), now),
            Phase::WaitingForStream => {
                format!("the kubelet did not open ListAndWatch within {:?} of the registration", limits.stream)
            }
            Phase::Confirming if attempts.is_due(now) => {
                format!("PodResources has not listed our devices within {CONFIRM_TIMEOUT:?}")
            }
            Phase::Detaching => format!("the kubelet did not answer the detachment within {:?}", limits.register),
            Phase::Overlapping if self.is_renewing => return self.registered(attempts, self.unanswered(), now),
            Phase::Overlapping => return self.renew(attempts, now),
            Phase::Confirming | Phase::Serving => return self.ask(attempts),
            Phase::WaitingForKubelet | Phase::Binding | Phase::Ending | Phase::Pausing => return,
        };
        attempts.end_if_open(cause, now);
    }

    fn wake(&self) -> Option<Duration> {
        self.ask
    }
}

#[cfg(test)]
mod tests;
