//! The conditions of the takeover's stages, such as that this process's plugins are registered, or have ended.

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

/// The longest time that a new owner waits for its plugins to register again, before another process may take over.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time that a standby whose plugins serve waits for a call of the kubelet that it can hold, before the
/// owner's plugins end.
const CALL_TIMEOUT: Duration = Duration::from_millis(200);
/// The longest time that calls are held. The end of the owner's plugins takes some milliseconds.
const MAX_HOLD: Duration = Duration::from_millis(500);

/// The sources of the facts on which the conditions of the stages depend.
#[derive(Clone)]
pub struct Facts {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    pub readiness: Readiness,
    pub plugin_status: watch::Receiver<PluginStatus>,
    pub calls: HeldCalls,
}

impl Facts {
    /// Waits until the condition of the current stage is met, and returns the input that says so. The executor handles
    /// messages and deadlines. `is_empty_handed`: this process has nothing to register.
    pub async fn condition(
        mut self,
        machine: &TakeoverMachine,
        is_empty_handed: bool,
        claims_ends: Vec<CancellationToken>,
    ) -> Input {
        // If a sender is gone, the node is ending.
        let is_met = match machine.stage() {
            Stage::StandingBy if machine.sees_gpus() != Some(true) => {
                let is_without_gpu = |readiness: &Readiness| matches!(*readiness.idle().borrow(), Idle::NoGpu(_));
                let sees_gpus = tokio::select! {
                    biased;
                    Ok(_) = self.snapshot.wait_for(|state| state.offers_any()) => true,
                    () = until(&self.readiness, is_without_gpu) => true,
                    () = until(&self.readiness, Readiness::sees_nothing), if machine.sees_gpus().is_none() => false,
                };
                return Input::SeesGpus(sees_gpus);
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
                self.calls.hold(MAX_HOLD);
                let _ = timeout(CALL_TIMEOUT, self.calls.await_held()).await;
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
                self.plugin_status.wait_for(|status| *status == ended).await.is_ok()
            }
            _ => false,
        };
        if is_met { Input::Met } else { std::future::pending().await }
    }

    /// Waits, at most for [`SETTLE_TIMEOUT`], until a new owner's plugins are the only ones of their resources and have
    /// registered again. A later registration would displace the plugins of the next owner.
    pub async fn settled(self, owner_since: Instant) {
        tokio::select! {
            () = until(&self.readiness, |readiness| readiness.has_plugins(true)) => {}
            () = sleep_until(owner_since + SETTLE_TIMEOUT) => {}
        }
    }
}

/// Waits until the predicate is true.
async fn until(readiness: &Readiness, predicate: impl Fn(&Readiness) -> bool) {
    let (mut news, mut idle) = (readiness.news(), readiness.idle().subscribe());
    while !predicate(readiness) {
        tokio::select! {
            () = or_never(news.changed()) => {}
            () = or_never(idle.changed()) => {}
        }
    }
}
