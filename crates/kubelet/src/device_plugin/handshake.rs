//! The device plugin's handshake with the kubelet: from a bound socket, by Register and ListAndWatch, to devices that
//! PodResources lists; further the steps by which a plugin outlasts another one of the resource.
//!
//! Pure: no I/O, no clock, no task. [`RegistrationMachine`] calls it, `life` performs its actions. docs/life-cycle.md
//! has the diagram and the invariants; the tests beside this file check them in a simulated world.
//!
//! [`RegistrationMachine`]: crate::registration::RegistrationMachine

use std::time::Duration;

use super::Phase;
use crate::registration::{self, ActionOf, Handshake, LifePhase};
use linkwise_system::uds::FileId;

/// The pause before PodResources is asked again after an answer without our devices.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// The time between two questions to PodResources while the plugin serves: a registration can be lost with its stream
/// still open.
const ASK_BETWEEN: Duration = Duration::from_secs(30);
/// The time between the end of the plugin before us and our next registration: by then the kubelet has seen its stream
/// end.
const SEEN_TO_END: Duration = Duration::from_secs(1);
/// The longest time for which the kubelet has no client under the resource's name, because a plugin before us lives:
/// longer than a pod may take to end. Without a client, a kubelet up to 1.36 does not notice our end.
const LONGEST_BESIDE: Duration = Duration::from_secs(5 * 60);
/// The time between the end of a plugin that registered over us, or of one of our streams, and our next registration:
/// the kubelet has seen that end too, most likely.
const SOON: Duration = Duration::from_millis(20);

const KUBELET_RESTARTED: &str = "kubelet.sock is gone or new: the kubelet restarted";

/// The deadlines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Register, from the call to its answer.
    pub register: Duration,
    /// The time between that answer and an open ListAndWatch.
    pub stream: Duration,
    /// The time between the stream and our devices on PodResources' list.
    pub confirm: Duration,
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
    /// The kubelet asked our socket for the plugin's options.
    Asked,
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
/// The actions of a step.
type Actions = Vec<ActionOf<DevicePluginHandshake>>;

fn own(action: OwnAction) -> Actions {
    vec![registration::Action::Own(action)]
}

impl LifePhase for Phase {
    const WAITING_FOR_KUBELET: Self = Self::WaitingForKubelet;
    const BINDING: Self = Self::Binding;
    const ENDING: Self = Self::Ending;
    const PAUSING: Self = Self::Pausing;

    fn is_open(self) -> bool {
        (Self::Registering..=Self::Serving).contains(&self)
    }
}

/// The state of the handshake in one session.
#[derive(Debug)]
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
    /// True if the kubelet has asked for the options in this session. Kubelets up to 1.24 take them from the request, and
    /// answer Register before they dial.
    asked: bool,
    /// True while a plugin of this resource that was there when our socket was bound still is.
    predecessor: bool,
    /// True if the kubelet may see the end of that plugin after our registration.
    outlasts: bool,
    /// The time by which the kubelet has seen its end.
    seen: Duration,
    /// True if a plugin registered over us and ended before we served.
    overtaken: bool,
    /// True while the kubelet may have no client under the resource's name.
    detached: bool,
    /// The time at which it gets one although the plugin before us lives.
    beside_until: Duration,
    /// True while the registration that fails on purpose has no answer. The kubelet may forget the name until then.
    detaching: bool,
    /// True while a second Register, which gives the kubelet that client again, has no answer.
    renewing: bool,
    /// True if the event that Register was called for happened once more meanwhile.
    again: bool,
}

impl DevicePluginHandshake {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ask: None,
            asking: false,
            doubted: false,
            streams: 0,
            asked: false,
            predecessor: false,
            outlasts: false,
            seen: Duration::ZERO,
            overtaken: false,
            detached: false,
            beside_until: Duration::MAX,
            detaching: false,
            renewing: false,
            again: false,
        }
    }

    fn enter(&mut self, attempts: &mut Attempts, phase: Phase, until: Option<Duration>) {
        attempts.enter(phase, until);
        self.ask = None;
    }

    /// Asks PodResources for our devices, unless a question is still open.
    fn ask(&mut self) -> Actions {
        self.ask = None;
        if std::mem::replace(&mut self.asking, true) { Vec::new() } else { own(OwnAction::Ask) }
    }

    /// Plans the next question. An open one is waited for.
    fn ask_later(&mut self, now: Duration) {
        let pause = if self.doubted { ASK_AGAIN } else { ASK_BETWEEN };
        self.ask = (!self.asking).then_some(now + pause);
    }

    /// PodResources does not list our devices any more, or not yet.
    fn confirm(&mut self, attempts: &mut Attempts, now: Duration) {
        self.enter(attempts, Phase::Confirming, Some(now + self.limits.confirm));
        self.ask_later(now);
    }

    fn streams(&mut self, attempts: &mut Attempts, open: usize, now: Duration) -> Actions {
        let before = std::mem::replace(&mut self.streams, open);
        match attempts.phase() {
            Phase::WaitingForStream if open > 0 => {
                self.enter(attempts, Phase::Confirming, Some(now + self.limits.confirm));
                self.ask()
            }
            Phase::Confirming | Phase::Detaching | Phase::Beside | Phase::Serving if open == 0 => {
                attempts.end_if_open("the kubelet's ListAndWatch stream is gone", now)
            }
            // We have several since we registered again. The kubelet ends the last, and takes the registration with it.
            Phase::Beside | Phase::Serving if open < before => self.renew_soon(attempts, now),
            _ => Vec::new(),
        }
    }

    fn listed(&mut self, attempts: &mut Attempts, listing: Listing, now: Duration) -> Actions {
        if !std::mem::take(&mut self.asking) {
            return Vec::new();
        }
        let was_doubted = std::mem::replace(&mut self.doubted, listing == Listing::Missing);
        match attempts.phase() {
            Phase::Confirming | Phase::Beside | Phase::Serving => self.ask_later(now),
            // The answer was slow. A doubt is looked into once the kubelet has forgotten the name.
            _ => return Vec::new(),
        }
        match attempts.phase() {
            Phase::Confirming if !self.doubted => return self.confirmed(attempts, now),
            // A device that has just changed its health may be missing for a moment.
            Phase::Beside | Phase::Serving if self.doubted && was_doubted => self.confirm(attempts, now),
            _ => {}
        }
        Vec::new()
    }

    /// PodResources lists our devices. The plugin before us may still have a stream, whose end must not end our
    /// registration. Kubelets that have not asked for our options end the stream's own registration only, and would put
    /// the one that fails into our place.
    fn confirmed(&mut self, attempts: &mut Attempts, now: Duration) -> Actions {
        // Detached, we register again in any case.
        let overtaken = std::mem::take(&mut self.overtaken);
        if self.outlasts && self.asked && !self.detached {
            self.enter(attempts, Phase::Detaching, Some(now + self.limits.register));
            let is_asked = std::mem::replace(&mut self.detaching, true);
            return if is_asked { Vec::new() } else { own(OwnAction::Detach) };
        }
        self.detached |= overtaken;
        if self.renewing {
            attempts.enter(Phase::Beside, Some(now + self.limits.register));
        } else if self.detached {
            self.beside(attempts, now);
        } else {
            attempts.enter(Phase::Serving, None);
        }
        Vec::new()
    }

    /// The kubelet has forgotten the name, or may not have: then the end of the plugin before us costs another session.
    fn detached(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) -> Actions {
        self.detached = true;
        if self.doubted {
            self.confirm(attempts, now);
        } else {
            self.beside(attempts, now);
        }
        own(OwnAction::ReportDetached(result))
    }

    /// The registration that fails on purpose has its answer. If it comes late, the kubelet may have forgotten the name
    /// after we registered again.
    fn answered(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) -> Actions {
        if !std::mem::take(&mut self.detaching) {
            return Vec::new();
        }
        match attempts.phase() {
            Phase::Detaching => self.detached(attempts, result, now),
            // The next registration is still to come.
            Phase::Beside if !self.renewing => Vec::new(),
            _ => self.renew_soon(attempts, now),
        }
    }

    fn beside(&mut self, attempts: &mut Attempts, now: Duration) {
        self.beside_until = self.beside_until.min(now + LONGEST_BESIDE);
        let until = if self.predecessor { self.beside_until } else { self.seen.max(now) };
        self.enter(attempts, Phase::Beside, Some(until));
        self.ask_later(now);
        (self.renewing, self.again) = (false, false);
    }

    /// A plugin before us lives on: from now on the kubelet is to notice our end, and that plugin's end costs a session.
    fn no_longer_beside(&mut self) -> Actions {
        self.predecessor = false;
        let why = format!("it is still there after {LONGEST_BESIDE:?}");
        own(OwnAction::ReportDetached(Err(why)))
    }

    /// Registers the same socket again, so that the kubelet has the name again.
    fn renew(&mut self, attempts: &mut Attempts, now: Duration) -> Actions {
        (self.renewing, attempts.until) = (true, Some(now + self.limits.register));
        own(OwnAction::Renew)
    }

    /// The kubelet may have forgotten the name: registers again soon, or once PodResources lists our devices.
    fn renew_soon(&mut self, attempts: &mut Attempts, now: Duration) -> Actions {
        match attempts.phase() {
            Phase::Beside | Phase::Confirming if self.renewing => self.again = true,
            phase if phase.is_serving() => {
                attempts.enter(Phase::Beside, Some(now + SOON));
                (self.detached, self.renewing, self.again) = (true, false, false);
            }
            phase => self.overtaken |= phase.is_open(),
        }
        Vec::new()
    }

    /// The second registration of the same socket has ended.
    fn renewed(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) -> Actions {
        let outlasts = self.asked && (self.predecessor || now < self.seen);
        match result {
            Err(why) => attempts.end_if_open(format!("the second registration failed: {why}"), now),
            Ok(()) if std::mem::take(&mut self.again) => {
                if outlasts {
                    return attempts.end_if_open("plugins before and after ours came and went", now);
                }
                self.renew_soon(attempts, now)
            }
            Ok(()) => {
                (self.detached, self.outlasts) = (false, outlasts);
                if attempts.phase() == Phase::Confirming { Vec::new() } else { self.confirmed(attempts, now) }
            }
        }
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
            (self.predecessor, self.seen) = (false, now + SEEN_TO_END);
            if attempts.phase() == Phase::Beside {
                attempts.until = Some(self.seen);
            }
        }
    }

    fn bound(&mut self, attempts: &mut Attempts, predecessor: bool, now: Duration) -> Actions {
        attempts.forget_waiting();
        (self.streams, self.asked, self.overtaken) = (0, false, false);
        (self.asking, self.doubted) = (false, false);
        (self.detached, self.detaching, self.renewing) = (false, false, false);
        (self.predecessor, self.outlasts, self.beside_until) = (predecessor, predecessor, Duration::MAX);
        self.enter(attempts, Phase::Registering, Some(now + self.limits.register));
        match attempts.other_kubelet() {
            Some(cause) => attempts.end_if_open(cause, now),
            None => own(OwnAction::Register),
        }
    }

    fn registered(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) -> Actions {
        // PodResources may have missed our devices meanwhile.
        let renews = matches!(attempts.phase(), Phase::Beside | Phase::Confirming);
        if renews && std::mem::take(&mut self.renewing) {
            return self.renewed(attempts, result, now);
        }
        if attempts.phase() != Phase::Registering {
            return Vec::new();
        }
        let mut actions = vec![registration::Action::ReportRegistered(result.clone())];
        actions.extend(match result {
            Err(why) => attempts.end_if_open(format!("the registration failed: {why}"), now),
            Ok(()) => {
                self.enter(attempts, Phase::WaitingForStream, Some(now + self.limits.stream));
                self.streams(attempts, self.streams, now)
            }
        });
        actions
    }

    fn happened(&mut self, attempts: &mut Attempts, input: OwnInput, now: Duration) -> Actions {
        match input {
            OwnInput::Detached(result) => self.answered(attempts, result, now),
            OwnInput::Asked => {
                self.asked = true;
                Vec::new()
            }
            OwnInput::Streams(open) => self.streams(attempts, open, now),
            OwnInput::Listed(listing) => self.listed(attempts, listing, now),
            OwnInput::Renew => self.renew_soon(attempts, now),
        }
    }

    fn due(&mut self, attempts: &mut Attempts, now: Duration) -> Actions {
        let limits = self.limits;
        match attempts.phase() {
            Phase::Registering => self.registered(attempts, self.unanswered(), now),
            Phase::WaitingForStream => {
                let cause =
                    format!("the kubelet did not open ListAndWatch within {:?} of the registration", limits.stream);
                attempts.end_if_open(cause, now)
            }
            Phase::Confirming if attempts.is_due(now) => {
                let after = limits.confirm;
                let cause =
                    format!("PodResources does not list our devices, {after:?} after the kubelet opened ListAndWatch");
                attempts.end_if_open(cause, now)
            }
            Phase::Detaching => self.detached(attempts, self.unanswered(), now),
            Phase::Beside if attempts.is_due(now) => {
                if self.renewing {
                    return self.registered(attempts, self.unanswered(), now);
                }
                let is_late = self.predecessor && now >= self.beside_until;
                let mut actions = if is_late { self.no_longer_beside() } else { Vec::new() };
                actions.extend(self.renew(attempts, now));
                actions
            }
            Phase::Confirming | Phase::Beside | Phase::Serving => self.ask(),
            Phase::WaitingForKubelet | Phase::Binding | Phase::Ending | Phase::Pausing => Vec::new(),
        }
    }

    fn wake(&self) -> Option<Duration> {
        self.ask
    }
}

#[cfg(test)]
mod tests;
