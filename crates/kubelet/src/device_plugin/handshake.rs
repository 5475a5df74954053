//! The device plugin's handshake with the kubelet: from a bound socket, by Register and ListAndWatch, to devices that
//! PodResources lists; further the two steps by which a plugin outlasts another one of the resource.
//!
//! Pure: no I/O, no clock, no task. [`RegistrationMachine`] calls it, `life` performs its actions. docs/life-cycle.md
//! has the diagram and the invariants; the tests beside this file check them in a simulated world.
//!
//! [`RegistrationMachine`]: crate::registration::RegistrationMachine

use std::time::Duration;

use super::Phase;
use crate::registration::{self, Action, Handshake, LifePhase};
use linkwise_system::uds::FileId;

/// The time between the stream and our devices on PodResources' list.
const CONFIRM: Duration = Duration::from_secs(10);
/// The pause before PodResources is asked again after an answer without our devices.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// The time between two questions to PodResources while the plugin serves: a registration can be lost with its stream
/// still open.
const ASK_BETWEEN: Duration = Duration::from_secs(30);
/// The time between the end of the plugin before us and our second registration: by then the kubelet has seen its
/// stream end.
const SEEN_TO_END: Duration = Duration::from_secs(1);
/// The longest time for which the kubelet has no client under the resource's name, because the plugin before us lives:
/// longer than a pod may take to end. Without a client, a kubelet up to 1.36 does not notice our end.
const MAX_TIME_BESIDE: Duration = Duration::from_secs(5 * 60);
/// The time between the end of a plugin that registered over us and our next registration: the kubelet has seen that
/// end too, most likely.
const SOON: Duration = Duration::from_millis(20);

const KUBELET_RESTARTED: &str = "kubelet.sock is gone or new: the kubelet restarted";

/// The deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// Register, from the call to its answer.
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
    /// The kubelet forgot the name of the plugin before us, or why it may not have.
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
    /// Register it again, under another name: newer kubelets refuse a socket that is connected.
    Renew,
    /// Have the kubelet forget the client that it would disconnect when the stream of the plugin before us ends.
    Detach,
    /// Ask PodResources for our devices.
    Ask,
    /// Report whether the end of the plugin before us will leave our registration alone, or why it may not.
    ReportDetached(Result<(), String>),
}

/// An input of the device plugin's machine.
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
        Self::words(self)
    }
}

/// The state of the handshake in one session.
#[derive(Debug, Default)]
pub(super) struct DevicePluginHandshake {
    limits: Limits,
    /// The time at which PodResources is asked next; while it is asked, `None`.
    ask: Option<Duration>,
    /// True while a question to PodResources has no answer.
    asking: bool,
    /// True if the last answer did not list our devices. While serving, the one before did.
    doubted: bool,
    /// Streams the kubelet holds in this session.
    streams: usize,
    /// True while a plugin of this resource that was there when our socket was bound still is.
    predecessor: bool,
    /// True if the kubelet may see the end of that plugin after our registration, which must not end ours.
    must_detach: bool,
    /// True while the kubelet may have no client under the resource's name.
    detached: bool,
    /// True while a second Register, which gives the kubelet that client again, has no answer.
    renewing: bool,
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
        if !std::mem::replace(&mut self.asking, true) {
            attempts.act(Action::Own(OwnAction::Ask));
        }
    }

    fn streams(&mut self, attempts: &mut Attempts, open: usize, now: Duration) {
        let before = std::mem::replace(&mut self.streams, open);
        match attempts.phase() {
            Phase::WaitingForStream if open > 0 => {
                self.enter(attempts, Phase::Confirming, Some(now + CONFIRM));
                self.ask(attempts);
            }
            // There are several once we have registered again. The kubelet ends the last, and the registration with it.
            Phase::Confirming | Phase::Detaching | Phase::Beside | Phase::Serving if open < before => {
                attempts.end_if_open("the kubelet's ListAndWatch stream is gone", now);
            }
            _ => {}
        }
    }

    fn listed(&mut self, attempts: &mut Attempts, listing: Listing, now: Duration) {
        if !std::mem::take(&mut self.asking) {
            return;
        }
        let was_doubted = std::mem::replace(&mut self.doubted, listing == Listing::Missing);
        match attempts.phase() {
            Phase::Confirming if !self.doubted => return self.confirmed(attempts, now),
            // A device that has just changed its health may be missing for a moment.
            Phase::Serving if self.doubted && was_doubted => {
                self.enter(attempts, Phase::Confirming, Some(now + CONFIRM));
            }
            Phase::Confirming | Phase::Serving => {}
            _ => return,
        }
        self.ask = Some(now + if self.doubted { ASK_AGAIN } else { ASK_BETWEEN });
    }

    /// PodResources lists our devices. The plugin before us may still have a stream, whose end must not end our
    /// registration.
    fn confirmed(&mut self, attempts: &mut Attempts, now: Duration) {
        if std::mem::take(&mut self.must_detach) {
            self.enter(attempts, Phase::Detaching, Some(now + self.limits.register));
            attempts.act(Action::Own(OwnAction::Detach));
        } else if self.detached {
            self.beside(attempts, now);
        } else {
            self.serve(attempts, now);
        }
    }

    fn serve(&mut self, attempts: &mut Attempts, now: Duration) {
        self.enter(attempts, Phase::Serving, None);
        self.ask = (!self.asking).then_some(now + ASK_BETWEEN);
    }

    /// Until the plugin before us has ended, and the kubelet has seen that.
    fn beside(&mut self, attempts: &mut Attempts, now: Duration) {
        let wait = if self.predecessor { MAX_TIME_BESIDE } else { SEEN_TO_END };
        self.enter(attempts, Phase::Beside, Some(now + wait));
    }

    /// Registers the same socket again, so that the kubelet notices our end.
    fn renew(&mut self, attempts: &mut Attempts, now: Duration) {
        (self.renewing, attempts.until) = (true, Some(now + self.limits.register));
        attempts.act(Action::Own(OwnAction::Renew));
        if std::mem::take(&mut self.predecessor) {
            let why = format!("it is still there after {MAX_TIME_BESIDE:?}");
            attempts.act(Action::Own(OwnAction::ReportDetached(Err(why))));
        }
    }

    /// A plugin that registered over us has ended: the kubelet may have no client under the name.
    fn overtaken(&mut self, attempts: &mut Attempts, now: Duration) {
        if attempts.phase() != Phase::Serving {
            return attempts.end_if_open("a plugin registered over ours, and has ended", now);
        }
        self.detached = true;
        self.enter(attempts, Phase::Beside, Some(now + SOON));
    }

    fn unanswered(&self) -> Result<(), String> {
        Err(format!("the kubelet did not answer Register within {:?}", self.limits.register))
    }
}

impl Handshake for DevicePluginHandshake {
    type Phase = Phase;
    type Kubelet = FileId;
    /// True while a plugin of this resource that was there when our socket was bound still is.
    type Others = bool;
    /// True if another plugin of this resource is there.
    type Bound = bool;
    type Input = OwnInput;
    type Action = OwnAction;

    const SOCKETS_GONE: &str = "our socket is gone or not ours any more";
    const FIRST_RETRY_KEEPS_GAP: bool = false;

    fn other_kubelet(found: &Result<FileId, String>, attempted: Option<&FileId>) -> Option<&'static str> {
        (found.as_ref().ok() != attempted).then_some(KUBELET_RESTARTED)
    }

    fn checked(&mut self, attempts: &mut Attempts, predecessor: bool, now: Duration) {
        if self.predecessor && !predecessor {
            self.predecessor = false;
            if attempts.phase() == Phase::Beside && !self.renewing {
                attempts.until = Some(now + SEEN_TO_END);
            }
        }
    }

    fn bound(&mut self, attempts: &mut Attempts, predecessor: bool, now: Duration) {
        attempts.forget_waiting();
        *self = Self { predecessor, must_detach: predecessor, ..Self::new(self.limits) };
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
            (Phase::Beside, Err(why)) if self.renewing => {
                attempts.end_if_open(format!("the second registration failed: {why}"), now);
            }
            (Phase::Beside, Ok(())) if self.renewing => {
                (self.renewing, self.detached) = (false, false);
                self.serve(attempts, now);
                // Nobody has asked meanwhile.
                self.ask(attempts);
            }
            _ => {}
        }
    }

    fn happened(&mut self, attempts: &mut Attempts, input: OwnInput, now: Duration) {
        match input {
            OwnInput::Detached(result) if attempts.phase() == Phase::Detaching => {
                self.detached = true;
                self.beside(attempts, now);
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
                format!("PodResources does not list our devices, {CONFIRM:?} after the kubelet opened ListAndWatch")
            }
            Phase::Detaching => format!("the kubelet answered no registration within {:?}", limits.register),
            Phase::Beside if self.renewing => return self.registered(attempts, self.unanswered(), now),
            Phase::Beside => return self.renew(attempts, now),
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
