//! The DRA plugin as the executor of its life sees it: the kubelet's folder, the occurrences; and beside that life the
//! sweeps of the claims.
//!
//! All the plugin's work is done in the task of [`super::Plugin::run`], which the node owns.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::api::CdiLink;
use super::claim_manager::ClaimManager;
use super::handshake::{DraHandshake, Input, OwnInput};
use super::session::PluginSession;
use super::{Observer, Occurrence, Phase, Settings};
use crate::registration::{BindError, Executor, Held, Life, Limits, Registrant, RegistrationMachine, Watching, random};
use linkwise_core::state::NodeState;

/// The longest time that connections may take to close when a session ends; a shutdown has one second in all.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// The time between two searches for claims that are over while DRA is off: the kubelet's list alone tells.
const OFF_SWEEP: Duration = Duration::from_secs(2);

/// Lives until `shutdown`; sweeps the claims meanwhile.
pub(super) async fn live(
    settings: Arc<Settings>,
    manager: Arc<ClaimManager>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    observer: Observer,
    phase: watch::Sender<Phase>,
    shutdown: &CancellationToken,
) {
    let limits = Limits { close: CLOSE_TIMEOUT, longest_pause: settings.longest_pause };
    let handshake = DraHandshake::new(settings.offer_timeout);
    let machine = RegistrationMachine::new(limits, Phase::WaitingForGpus, handshake, random());
    let watching = Watching { folder: settings.registry.clone(), poll: settings.poll, inotify: settings.inotify };
    // Prepared claims are unprepared without GPUs too: after a reboot with a broken driver their pods end.
    let has_claims = manager.has_checkpoints();
    let (seen, cdi) = (snapshot.clone(), settings.cdi.clone());
    let ready: Held<()> = if has_claims { Box::pin(async {}) } else { Box::pin(ready(seen, cdi)) };
    let sweeps = sweep(&settings, &manager, snapshot.clone());
    let renewals = renew_specs(&settings, &manager);
    let (settings, manager) = (Arc::clone(&settings), Arc::clone(&manager));
    let registrant = DraPlugin { settings, manager, snapshot, observer, ready: Some(ready) };
    tokio::select! {
        biased;
        () = Executor::new(registrant, machine, phase, watching).live(shutdown) => {}
        () = sweeps => {}
        () = renewals => {}
    }
}

/// Writes the claims' CDI specs each time that the node's CDI devices change: a driver was updated, a device node came
/// late, an operator removed files.
async fn renew_specs(settings: &Settings, manager: &ClaimManager) {
    let (mut cdi, mut host) = (settings.cdi.clone(), settings.host_devices.clone());
    loop {
        if cdi.borrow_and_update().is_some() {
            host.mark_unchanged();
            manager.renew_specs().await;
        }
        tokio::select! {
            Ok(()) = cdi.changed() => {}
            Ok(()) = host.changed() => {}
            // The node is ending.
            else => std::future::pending().await,
        }
    }
}

/// Sweeps the claims, for ever.
async fn sweep(settings: &Settings, manager: &ClaimManager, mut snapshot: watch::Receiver<Arc<NodeState>>) {
    // Lists tell of the claims of the last process from then on.
    let mut pause = settings.listed_within.min(settings.sweep);
    loop {
        let is_seen = |state: &NodeState| !state.topology().gpus().is_empty();
        let (was_known, was_seen) = {
            let state = snapshot.borrow();
            (state.ledger().is_known(), is_seen(&state))
        };
        manager.sweep().await;
        // A sweep without the kubelet's list undoes nothing, one without the driver destroys no MIG device: the next
        // follows when there is one.
        let known = async {
            let news = |state: &Arc<NodeState>| !was_known && state.ledger().is_known() || !was_seen && is_seen(state);
            if snapshot.wait_for(news).await.is_err() {
                // The node is ending.
                std::future::pending::<()>().await;
            }
        };
        // The end of a claim may reach nobody while DRA is off.
        let limit = if manager.is_off() && manager.has_checkpoints() { pause.min(OFF_SWEEP) } else { pause };
        if tokio::time::timeout(limit, known).await.is_err() && limit == pause {
            pause = settings.sweep;
        }
    }
}

/// The plugin, and what a session needs.
struct DraPlugin {
    settings: Arc<Settings>,
    manager: Arc<ClaimManager>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    observer: Observer,
    /// Completes when the sockets may be bound; `None` after that.
    ready: Option<Held<()>>,
}

impl Registrant for DraPlugin {
    type Handshake = DraHandshake;
    type Session = PluginSession;

    fn report(&self, event: Life<Phase>) {
        (self.observer)(Occurrence::Life(event));
    }

    fn kubelet(&self) -> Result<(), String> {
        let folder = &self.settings.registry;
        if folder.is_dir() { Ok(()) } else { Err(format!("there is no folder {}", folder.display())) }
    }

    fn bind(&self, random: u64) -> Held<Result<((), PluginSession), BindError>> {
        let (settings, manager) = (Arc::clone(&self.settings), Arc::clone(&self.manager));
        let (snapshot, observer) = (self.snapshot.clone(), Arc::clone(&self.observer));
        Box::pin(async move { Ok(((), PluginSession::begin(settings, manager, snapshot, observer, random)?)) })
    }

    fn perform(&self, action: Infallible, _: &mut PluginSession) -> Option<Held<Input>> {
        match action {}
    }

    async fn next(&mut self) -> OwnInput {
        match &mut self.ready {
            Some(ready) => ready.await,
            None => std::future::pending().await,
        }
        self.ready = None;
        OwnInput::Ready
    }
}

/// Completes when GPUs have been seen and the host is scanned.
async fn ready(mut snapshot: watch::Receiver<Arc<NodeState>>, mut cdi: CdiLink) {
    // An error means that the node is ending.
    let seen = snapshot.wait_for(|state| !state.topology().gpus().is_empty()).await.is_ok();
    if !seen || cdi.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}
