//! The DRA plugin's handshake with the kubelet: the kubelet finds a socket in its folder, asks for the plugin's name,
//! and says whether it registered the plugin. A kubelet that restarts does so again with the same socket.
//!
//! Pure: no I/O, no clock, no task. [`RegistrationMachine`] calls it.
//!
//! [`RegistrationMachine`]: crate::registration::RegistrationMachine

use std::convert::Infallible;
use std::time::Duration;

use super::Phase;
use crate::registration::{self, Action, Handshake, LifePhase};

/// The number of open connections to our services.
#[derive(Clone, Copy, Debug)]
pub(super) struct Connections(pub usize);

/// An input of the DRA plugin's state machine.
pub(super) type Input = registration::Input<DraHandshake>;
/// The attempts of the DRA plugin.
type Attempts = registration::Attempts<DraHandshake>;

impl LifePhase for Phase {
    const WAITING_FOR_KUBELET: Self = Self::WaitingForKubelet;
    const BINDING: Self = Self::Binding;
    const ENDING: Self = Self::Ending;
    const PAUSING: Self = Self::Pausing;
    const SERVING: Self = Self::Registered;

    fn is_open(self) -> bool {
        (Self::Offered..=Self::Disconnected).contains(&self)
    }

    fn is_ready(self) -> bool {
        // A kubelet that restarts registers the plugin again by itself.
        matches!(self, Self::Accepted | Self::Registered | Self::Disconnected)
    }

    fn words(self) -> &'static str {
        Self::words(self) // inherent
    }
}

/// The state of the handshake in one session.
#[derive(Debug)]
pub(super) struct DraHandshake {
    /// The time after which new sockets are made if the kubelet has not registered the old ones, or is not connected.
    offer_timeout: Duration,
    /// The number of open connections to our services.
    connections: usize,
}

impl DraHandshake {
    /// A handshake with this `offer_timeout`.
    pub fn new(offer_timeout: Duration) -> Self {
        Self { offer_timeout, connections: 0 }
    }
}

impl Handshake for DraHandshake {
    type Phase = Phase;
    /// The folder shows only that there is a kubelet. A kubelet that restarts keeps the folder; the end of its
    /// connection shows the restart.
    type Kubelet = ();
    type Others = ();
    type Bound = ();
    type Input = Connections;
    type Action = Infallible;

    const SOCKETS_GONE: &str = "our sockets are gone or were replaced";
    // A registration resets the pauses. Without the least time between two binds, a kubelet that registers the plugin
    // and refuses it at once would cause a storm of binds.
    const FIRST_RETRY_KEEPS_GAP: bool = true;

    fn bound(&mut self, attempts: &mut Attempts, (): (), now: Duration) {
        self.connections = 0;
        attempts.enter(Phase::Offered, Some(now + self.offer_timeout));
    }

    fn registered(&mut self, attempts: &mut Attempts, result: Result<(), String>, now: Duration) {
        attempts.act(Action::ReportRegistered(result.clone()));
        match result {
            Ok(()) => {
                attempts.forget_waiting();
                attempts.forget_failures();
                match self.connections {
                    0 => attempts.enter(Phase::Accepted, Some(now + self.offer_timeout)),
                    _ => attempts.enter(Phase::Registered, None),
                }
            }
            // The kubelet takes new sockets for another plugin, which it may accept.
            Err(why) => attempts.end_if_open(format!("the kubelet refused to register the plugin: {why}"), now),
        }
    }

    /// Takes the number of open connections. The kubelet keeps one, whose end is the first sign of a restart.
    fn happened(&mut self, attempts: &mut Attempts, Connections(open): Connections, now: Duration) {
        let before = std::mem::replace(&mut self.connections, open);
        match attempts.phase() {
            Phase::Registered if open == 0 && before > 0 => {
                attempts.enter(Phase::Disconnected, Some(now + self.offer_timeout));
            }
            // The kubelet closes a connection that was idle for long, and opens it again when it needs one.
            Phase::Accepted | Phase::Disconnected if open > 0 => attempts.enter(Phase::Registered, None),
            _ => {}
        }
    }

    /// Ends the session, so that new sockets are made for a kubelet that is away or missed the old ones. The cause is
    /// reported once.
    fn due(&mut self, attempts: &mut Attempts, now: Duration) {
        let limit = self.offer_timeout;
        let why = match attempts.phase() {
            Phase::Offered => format!("the kubelet has not registered the plugin within {limit:?}"),
            Phase::Accepted => format!("the kubelet registered the plugin and did not connect to it within {limit:?}"),
            Phase::Disconnected => {
                format!("the kubelet closed its connection and did not come back within {limit:?}")
            }
            _ => return,
        };
        attempts.report_waiting(why);
        attempts.end(now);
    }
}

#[cfg(test)]
mod tests;
