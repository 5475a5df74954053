//! The DRA plugin as the registration's executor drives it: it looks for the kubelet's folder and reports events.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::handshake::{Connections, DraHandshake, Input};
use super::session::PluginSession;
use super::{Phase, Settings, Shared, checkpoint};
use crate::registration::{
    BindError, BoxedFuture, Executor, Life, Limits, Registrant, RegistrationMachine, Watching, random,
};
use linkwise_core::state::NodeState;
use linkwise_system::right::Right;
use linkwise_system::{files, or_never};

/// The longest time that connections may take to close when a session ends; a shutdown has one second in all.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// The consequence for pods whose claims are left, if the kubelet cannot reach a DRA plugin.
const NOT_UNPREPARED: &str = ": without DRA's folders the kubelet cannot unprepare the claims that are left, and their \
    pods stay in Terminating; mount DRA's folders again (dra.gpus may stay none), or delete the pods with --force";

/// The plugin's life with the kubelet, whenever this process offers the plugin.
pub(super) struct Registering {
    pub shared: Shared,
    pub phase: watch::Sender<Phase>,
    /// True while the plugin may have its sockets.
    pub offers: watch::Receiver<bool>,
    /// The right to touch claims, while this process has it.
    pub turn: watch::Receiver<Option<Right>>,
}

impl Registering {
    /// Registers the plugin whenever this process offers it, until `shutdown`.
    pub async fn run(self, shutdown: &CancellationToken) {
        loop {
            let mut offers = self.offers.clone();
            let begins = async { offers.wait_for(|offers| *offers).await.is_ok() };
            if shutdown.run_until_cancelled(begins).await != Some(true) {
                return;
            }
            let end = shutdown.child_token();
            let leaves = async {
                or_never(offers.wait_for(|offers| !*offers)).await;
                end.cancel();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                biased;
                () = self.register(&end) => {}
                () = leaves => {}
            }
        }
    }

    async fn register(&self, end: &CancellationToken) {
        let Self { shared, phase, turn, .. } = self;
        let settings = &shared.settings;
        let limits = Limits { close: CLOSE_TIMEOUT, longest_pause: settings.longest_pause };
        let handshake = DraHandshake::new(settings.offer_timeout);
        let machine = RegistrationMachine::new(limits, Phase::WaitingForKubelet, handshake, random());
        let watching = Watching { folder: settings.registry.clone(), poll: settings.poll, inotify: settings.inotify };
        let ready = async {
            if !settings.serves {
                return await_claims(shared.clone(), turn.clone()).await;
            }
            let mut turn = turn.clone();
            tokio::select! {
                () = await_gpus_or_claims(shared.clone()) => {}
                // Another process has the claims and has written their specs. The kubelet's calls wait here.
                Ok(_) = turn.wait_for(Option::is_none) => {}
            }
        };
        // Without anything to serve, nothing watches the kubelet's folder, which need not be mounted then.
        phase.send_replace(Phase::WaitingForGpus);
        shared.reporter.report(&Life::Phase(Phase::WaitingForGpus));
        if end.run_until_cancelled(ready).await.is_none() {
            return;
        }
        let registrant = DraPlugin { shared: shared.clone() };
        Executor::new(registrant, machine, phase.clone(), watching).run(end).await;
    }
}

/// The plugin, as its executor drives it.
struct DraPlugin {
    shared: Shared,
}

impl Registrant for DraPlugin {
    type Handshake = DraHandshake;
    type Session = PluginSession;

    fn report(&self, event: Life<Phase>) {
        self.shared.reporter.report(&event);
    }

    fn kubelet(&self) -> Result<(), String> {
        let Settings { registry: folder, serves, .. } = &*self.shared.settings;
        let end = if *serves { "" } else { NOT_UNPREPARED };
        if folder.is_dir() { Ok(()) } else { Err(format!("there is no folder {}{end}", folder.display())) }
    }

    fn bind(&self, random: u64) -> BoxedFuture<Result<((), PluginSession), BindError>> {
        let shared = self.shared.clone();
        Box::pin(async move { Ok(((), PluginSession::begin(shared, random)?)) })
    }

    fn perform(&self, action: Infallible, _: &mut PluginSession) -> Option<BoxedFuture<Input>> {
        match action {}
    }

    async fn next(&mut self) -> Connections {
        std::future::pending().await
    }
}

/// Completes when the checkpoints are read and have claims, or else when GPUs have been seen and the host is scanned.
/// Claims are unprepared without GPUs too, so that their pods end after a reboot with a broken driver.
async fn await_gpus_or_claims(Shared { settings, mut snapshot, manager, .. }: Shared) {
    let mut manager = manager.subscribe();
    // An error means that the node is ending.
    let manager = manager.wait_for(Option::is_some).await.ok().and_then(|manager| manager.clone());
    if manager.is_some_and(|manager| manager.has_checkpoints()) {
        return;
    }
    or_never(snapshot.wait_for(|state| !state.topology().gpus().is_empty())).await;
    or_never(settings.cdi.clone().wait_for(Option::is_some)).await;
}

/// Completes when there are claims that the kubelet may unprepare, though the node's door is the device plugin. They
/// have checkpoints, or the kubelet lists them because it missed the answer to its Unprepare. Without the DRA
/// plugin such a claim would keep its pod and its GPUs for ever. Listed claims are ours if the folder of checkpoints
/// exists: another driver may have our name. The folder is removed when the kubelet has listed no claim for some time.
async fn await_claims(shared: Shared, mut turn: watch::Receiver<Option<Right>>) {
    let Shared { settings, mut snapshot, manager, .. } = shared;
    let (mut manager, mut known) = (manager.subscribe(), snapshot.clone());
    let on_disk = |test: fn(&Path) -> bool| {
        let folder = settings.checkpoints.clone();
        async move { files::blocking(move || Ok(test(&folder))).await.unwrap_or_default() }
    };
    let lists =
        |state: &Arc<NodeState>| state.ledger().claimed_lately().any(|claimed| claimed.driver == settings.driver);
    loop {
        let waits = turn.borrow_and_update().is_none();
        let has_some = manager.borrow_and_update().as_ref().is_some_and(|manager| manager.has_checkpoints());
        // While another process has the claims, only the disk shows them.
        if has_some || waits && on_disk(checkpoint::has_any).await {
            return;
        }
        let are_ours = on_disk(Path::is_dir).await;
        let unlisted = async {
            sleep(settings.listed_within).await;
            known.wait_for(|state| state.ledger().is_known()).await.is_ok()
        };
        let listed = async { snapshot.wait_for(lists).await.is_ok() };
        tokio::select! {
            biased;
            Ok(()) = turn.changed() => {}
            Ok(()) = manager.changed() => {}
            true = listed, if are_ours => return,
            true = unlisted, if are_ours && !waits => {
                on_disk(|folder| std::fs::remove_dir(folder).is_ok()).await;
            }
            // The node is ending.
            else => std::future::pending().await,
        }
    }
}
