//! The conditions of the takeover's stages: this node could serve, its plugins are registered, they have ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::Happened;
use crate::duty::Running;
use crate::readiness::Readiness;
use crate::takeover::{Input, Stage};
use linkwise_core::state::NodeState;
use linkwise_kubelet::device_plugin::HeldCalls;
use linkwise_nvml::supervisor::Idle;

/// The time for which a standby that serves waits for a call of the kubelet to hold, before it makes the owner end.
const QUIET: Duration = Duration::from_millis(200);
/// The longest time for which calls are held; the end of the owner's plugins takes some milliseconds.
const HELD: Duration = Duration::from_millis(500);

/// What the takeover was told about a standby.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Could {
    /// Nothing yet.
    #[default]
    Unknown,
    /// The standby sees no GPU: the driver fails or is released.
    Not,
    /// The standby could serve the node.
    Serve,
}

/// The facts that the takeover knows already.
#[derive(Clone, Copy)]
pub struct Known {
    /// The state machine's stage.
    pub stage: Stage,
    /// What the takeover was told.
    pub could: Could,
    /// Set if every plugin is registered, in a takeover and after it.
    pub serves: bool,
    /// Set if this process sees nothing and takes the place of one that offers nothing: there is nothing to register.
    pub is_empty_handed: bool,
}

/// Waits until this process sees no GPU, because the driver fails or is released. False if the node is ending.
async fn sees_nothing(readiness: &Readiness) -> bool {
    let (mut news, mut idle) = (readiness.news(), readiness.idle().subscribe());
    while !readiness.sees_nothing() {
        let changed = tokio::select! {
            changed = news.changed() => changed,
            changed = idle.changed() => changed,
        };
        if changed.is_err() {
            return false;
        }
    }
    true
}

/// Waits for the condition of the stage.
pub async fn condition(
    known: Known,
    mut snapshot: watch::Receiver<Arc<NodeState>>,
    readiness: Readiness,
    (mut running, mut claims_held): (watch::Receiver<Running>, watch::Receiver<bool>),
    calls: HeldCalls,
) -> Happened {
    // If a sender is gone, the node is ending.
    let never = std::future::pending::<Happened>();
    let mut news = readiness.news();
    match known.stage {
        Stage::StandingBy if known.could != Could::Serve => {
            let mut idle = readiness.idle().subscribe();
            let offers = async { snapshot.wait_for(|state| state.offers_any()).await.is_ok() };
            let none = async { idle.wait_for(|idle| matches!(idle, Idle::NoGpu(_))).await.is_ok() };
            let (input, is_so) = tokio::select! {
                biased;
                able = offers => (Input::Able, able),
                able = none => (Input::Able, able),
                unable = sees_nothing(&readiness), if known.could == Could::Unknown => (Input::Unable, unable),
            };
            if is_so { Happened::Input(input) } else { never.await }
        }
        Stage::Joining => {
            while !readiness.is_dra_called() {
                if news.changed().await.is_err() {
                    return never.await;
                }
            }
            Happened::Input(Input::Joined)
        }
        Stage::Draining => {
            if claims_held.wait_for(|held| !*held).await.is_ok() {
                return Happened::Input(Input::ClaimsEnded);
            }
            never.await
        }
        Stage::Starting => {
            let nothing_to_register = || known.is_empty_handed && readiness.sees_nothing();
            let has_each = || readiness.has_plugin_of_each(snapshot.borrow().offers().resources().keys());
            while !(nothing_to_register() || readiness.has_plugins(false) && has_each()) {
                if news.changed().await.is_err() {
                    return never.await;
                }
            }
            // While this process holds a call, the kubelet makes no other call, and so none to the plugin that is about
            // to end.
            calls.hold(HELD);
            let _ = timeout(QUIET, calls.any()).await;
            Happened::Input(Input::Serving)
        }
        Stage::Waiting | Stage::Settling | Stage::Owning => loop {
            let serves = readiness.has_plugins(false);
            if serves != known.serves && (known.stage != Stage::Owning || serves) {
                return Happened::Serves(serves);
            }
            let nothing_to_register = known.is_empty_handed && readiness.sees_nothing();
            if known.stage == Stage::Settling && (nothing_to_register || readiness.has_plugins(true)) {
                return Happened::Input(Input::Alone);
            }
            if known.stage == Stage::Owning && known.serves || news.changed().await.is_err() {
                return never.await;
            }
        },
        Stage::Ending => {
            let ended = Running { wanted: false, plugins: 0 };
            if running.wait_for(|running| *running == ended).await.is_ok() {
                return Happened::Input(Input::PluginsEnded);
            }
            never.await
        }
        _ => never.await,
    }
}
