//! The log of a plugin's life with the kubelet, and the plugin's part in the node's readiness.

use std::sync::Mutex;

use super::executor::Life;
use super::machine::LifePhase;
use crate::readiness::{Part, Readiness};
use linkwise_core::reported::Reported;
use linkwise_system::grpc::{Refusal, Rpc};
use linkwise_system::lock;
use linkwise_system::uds::Peer;

/// The most troubles, and the most refused users, that are remembered; further ones are logged at debug level only.
const MAX_REMEMBERED: usize = 64;

/// Logs what happens to a plugin: a trouble once until the plugin serves again, a refused user once.
pub struct Journal {
    plugin: Part,
    readiness: Readiness,
    /// The troubles since the plugin last served.
    troubles: Mutex<Reported<String>>,
    refused_users: Mutex<Reported<u32>>,
}

impl Journal {
    /// The journal of a plugin.
    pub fn new(plugin: Part, readiness: Readiness) -> Self {
        let troubles = Mutex::new(Reported::with_bound(MAX_REMEMBERED));
        let refused_users = Mutex::new(Reported::with_bound(MAX_REMEMBERED));
        Self { plugin, readiness, troubles, refused_users }
    }

    /// Notes an event. Returns true for the first one of its text since the plugin last served, and for a user's first
    /// refusal.
    fn begins<P: LifePhase>(&self, event: &Life<P>) -> bool {
        match event {
            Life::Refused(Refusal::Caller(Peer { uid, .. })) => lock(&self.refused_users).begins(*uid),
            trouble => lock(&self.troubles).begins(format!("{trouble:?}")),
        }
    }

    /// Logs what happened, and shows the plugin's phase and troubles.
    pub fn note<P: LifePhase>(&self, event: &Life<P>) {
        let plugin = &self.plugin;
        if let Life::Waiting(why) | Life::Ended(why) | Life::Registered(Err(why)) = event {
            self.readiness.trouble(plugin, why.clone());
        }
        match event {
            Life::Phase(phase) => self.entered(*phase),
            Life::Rpc(Rpc { method, code, elapsed }) => tracing::debug!(%plugin, method, code, ?elapsed, "rpc"),
            _ if !self.begins(event) => tracing::debug!(%plugin, ?event, "repeated event"),
            Life::Waiting(why) => tracing::warn!(%plugin, why, "waiting for the kubelet"),
            Life::Registered(Ok(())) => tracing::info!(%plugin, "registered"),
            Life::Registered(Err(error)) => tracing::warn!(%plugin, error, "cannot register with the kubelet"),
            Life::Ended(why) => tracing::warn!(%plugin, why, "the session with the kubelet ended"),
            Life::Refused(Refusal::NotAccepted(error)) => {
                tracing::warn!(%plugin, error, "cannot accept a connection");
            }
            Life::Refused(Refusal::Caller(Peer { uid, pid })) => {
                tracing::warn!(%plugin, uid, pid, "refused a caller; root and linkwise's own user may call");
            }
        }
    }

    fn entered<P: LifePhase>(&self, now: P) {
        let (plugin, phase) = (&self.plugin, now.words());
        self.readiness.enter(plugin, phase, now.is_ready());
        if now == P::SERVING {
            let repeated = lock(&self.troubles).clear();
            tracing::info!(%plugin, phase, repeated, "kubelet");
        } else {
            tracing::debug!(%plugin, phase, "kubelet");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_plugin::Phase;
    use linkwise_core::state::ResourceName;
    use linkwise_nvml::supervisor::Idle;

    fn journal() -> Journal {
        Journal::new(Part::Plugin(ResourceName::gpu()), Readiness::new(Idle::Waiting(String::new())))
    }

    fn ended(why: String) -> Life<Phase> {
        Life::Ended(why)
    }

    #[test]
    fn troubles_are_news_again_once_plugin_served() {
        let (journal, why) = (journal(), || "a".to_owned());
        assert!(journal.begins(&ended(why())) && journal.begins(&Life::<Phase>::Waiting(why())));
        assert!(!journal.begins(&ended(why())));
        journal.note(&Life::Phase(Phase::Serving));
        assert!(journal.begins(&ended(why())));
    }

    #[test]
    fn refusals_and_troubles_are_logged_up_to_a_bound() {
        let journal = journal();
        let refused = |uid| Life::<Phase>::Refused(Refusal::Caller(Peer { uid, pid: None }));
        let logged = (0..10_000).filter(|uid| journal.begins(&refused(*uid))).count();
        assert_eq!(logged, MAX_REMEMBERED);
        let logged = (0..10_000).filter(|number: &u32| journal.begins(&ended(number.to_string()))).count();
        assert_eq!(logged, MAX_REMEMBERED);
    }
}
