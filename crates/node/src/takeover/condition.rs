//! The conditions of the takeover's stages: this node could serve, its plugins are registered, they have ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::node::standby::PluginStatus;
use crate::readiness::Readiness;
use crate::takeover::machine::{Input, Stage, TakeoverMachine};
use linkwise_core::state::NodeState;
use linkwise_kubelet::device_plugin::HeldCalls;
use linkwise_nvml::supervisor::Idle;
use linkwise_system::or_never;

/// The time for which a new owner may register its plugins once more.
const SETTLED: Duration = Duration::from_secs(3);
/// The time for which a standby that serves waits for a call of the kubelet to hold, before it makes the owner end.
const QUIET: Duration = Duration::from_millis(200);
/// The longest time for which calls are held; the end of the owner's plugins takes some milliseconds.
const HELD: Duration = Duration::from_millis(500);

/// The facts on which the conditions of the stages depend.
#[derive(Clone)]
pub struct Facts {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    pub readiness: Readiness,
    pub running: watch::Receiver<PluginStatus>,
    pub calls: HeldCalls,
}

impl Facts {
    /// Waits for the next input of the stage that is no word and no deadline. `is_empty_handed`: there is nothing to
    /// register.
    pub async fn condition(
        mut self,
        machine: &TakeoverMachine,
        is_empty_handed: bool,
        claims_ends: Vec<CancellationToken>,
    ) -> Input {
        // If a sender is gone, the node is ending.
        let is_met = match machine.stage() {
            Stage::StandingBy if machine.sees() != Some(true) => {
                let has_none = |readiness: &Readiness| matches!(*readiness.idle().borrow(), Idle::NoGpu(_));
                let sees = tokio::select! {
                    biased;
                    Ok(_) = self.snapshot.wait_for(|state| state.offers_any()) => true,
                    () = until(&self.readiness, has_none) => true,
                    () = until(&self.readiness, Readiness::sees_nothing), if machine.sees().is_none() => false,
                };
                return Input::Sees(sees);
            }
            Stage::Joining => {
                until(&self.readiness, Readiness::is_dra_called).await;
                true
            }
            Stage::Starting => {
                let snapshot = self.snapshot.clone();
                let has_each =
                    |readiness: &Readiness| readiness.has_plugin_of_each(snapshot.borrow().offers().resources().keys());
                until(&self.readiness, |readiness| {
                    is_empty_handed && readiness.sees_nothing() || readiness.has_plugins(false) && has_each(readiness)
                })
                .await;
                // While this process holds a call, the kubelet makes no other call, and so none to the plugin that is
                // about to end.
                self.calls.hold(HELD);
                let _ = timeout(QUIET, self.calls.any()).await;
                true
            }
            Stage::Draining => {
                for end in claims_ends {
                    end.cancelled().await;
                }
                true
            }
            Stage::Ending => {
                let ended = PluginStatus { is_wanted: false, running: 0 };
                self.running.wait_for(|running| *running == ended).await.is_ok()
            }
            _ => false,
        };
        if is_met { Input::Met } else { std::future::pending().await }
    }

    /// Waits until a new owner's plugins have no plugin before them. They register once more then: this must not come
    /// after the registrations of the next owner, which it would displace.
    pub async fn settled(self, owning: Instant) {
        tokio::select! {
            () = until(&self.readiness, |readiness| readiness.has_plugins(true)) => {}
            () = sleep_until(owning + SETTLED) => {}
        }
    }
}

/// Waits until something is true of the readiness.
async fn until(readiness: &Readiness, is_so: impl Fn(&Readiness) -> bool) {
    let (mut news, mut idle) = (readiness.news(), readiness.idle().subscribe());
    while !is_so(readiness) {
        tokio::select! {
            () = or_never(news.changed()) => {}
            () = or_never(idle.changed()) => {}
        }
    }
}
