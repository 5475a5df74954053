//! This process's turn at the claims of its node. The kubelet's calls wait here for the claim manager, which exists
//! while this process has the right to touch claims.
//!
//! Everything that touches claims has a clone of the right: each call, each write to a disk, the writer of slices, MPS
//! orders. The next process gets the right when all clones are dropped, so that one process at a time touches claims.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::api::LedgerLink;
use super::claim_manager::{ClaimManager, keep_specs, keep_sweeping};
use crate::registration::Life;
use linkwise_core::errors::chain;
use linkwise_core::state::Event;
use linkwise_system::or_never;
use linkwise_system::right::Right;

/// The time between two attempts to use the folder of checkpoints.
const FAULT_PAUSE: Duration = Duration::from_secs(5);

/// The time for which a process that hands over still accepts calls: the kubelet may have chosen this plugin for a call
/// just before it connected to the next one.
const LATE_CALLS: Duration = Duration::from_millis(100);

/// The duties of a process's DRA plugin among the linkwise processes of a node.
#[derive(Clone, Debug)]
pub struct Handover {
    /// True while the plugin may have its sockets.
    pub offers: watch::Receiver<bool>,
    /// The right to touch the node's claims, while this process has it. Without it, calls wait.
    pub claims: watch::Receiver<Option<Right>>,
}

impl Handover {
    /// The duties of the only process of a node.
    pub fn alone() -> Self {
        Self { offers: watch::channel(true).1, claims: watch::channel(Some(Right::default())).1 }
    }
}

impl Shared {
    /// Waits for the manager, at most for the time that a call of the kubelet has; the error is the text for the
    /// kubelet. The claims are not handed over before all clones of the manager are dropped.
    pub async fn manager(&self) -> Result<Arc<ClaimManager>, String> {
        let (mut manager, limit) = (self.manager.subscribe(), self.settings.prepare_timeout);
        let found = timeout(limit, manager.wait_for(Option::is_some)).await;
        let found = found.ok().and_then(Result::ok).and_then(|manager| manager.clone());
        found.ok_or_else(|| {
            let folder = self.settings.checkpoints.display();
            format!("cannot get the claims of this node ({folder}) within {limit:?}: another linkwise may have them")
        })
    }
}

/// The task that opens and serves the claim manager.
pub(super) struct ManagerTask {
    pub shared: Shared,
    pub ledger: LedgerLink,
    /// The right, published while the manager serves.
    pub claims_right: watch::Sender<Option<Right>>,
    /// The right, while this process has it.
    pub turn: watch::Receiver<Option<Right>>,
}

impl ManagerTask {
    /// Opens and serves the manager whenever it is this process's turn, for ever.
    pub async fn run(self) {
        let mut turn = self.turn.clone();
        loop {
            let right = turn.wait_for(Option::is_some).await.ok().and_then(|right| right.clone());
            // Without a sender, the node is ending.
            let Some(right) = right else { return std::future::pending().await };
            let opened = tokio::select! {
                opened = ClaimManager::open(&self.shared, self.ledger.clone(), right.clone()) => opened,
                () = self.await_withdrawal(&right) => {
                    self.ledger.change(|_| Event::ClaimsHandedOver).await;
                    continue;
                }
            };
            match opened {
                Ok(manager) => self.serve(Arc::new(manager), right).await,
                Err(error) => {
                    self.shared.reporter.report(&Life::Ended(chain(&error)));
                    let _ = timeout(FAULT_PAUSE, self.await_withdrawal(&right)).await;
                }
            }
        }
    }

    /// Waits until a right is taken back. A newer right may be there by then.
    async fn await_withdrawal(&self, right: &Right) {
        let is_other = |now: &Option<Right>| now.as_ref().is_none_or(|now| !now.is(right));
        or_never(self.turn.clone().wait_for(is_other)).await;
    }

    /// Answers calls and sweeps the claims until the right is taken back, then waits until its last clone is dropped.
    async fn serve(&self, manager: Arc<ClaimManager>, right: Right) {
        self.claims_right.send_replace(Some(right.clone()));
        self.shared.manager.send_replace(Some(Arc::clone(&manager)));
        let stop = CancellationToken::new();
        let sweeps = keep_sweeping(&manager, &stop);
        let renewals = stop.run_until_cancelled(keep_specs(&manager));
        let withdrawal = async {
            self.await_withdrawal(&right).await;
            stop.cancel();
            self.claims_right.send_replace(None);
            sleep(LATE_CALLS).await;
        };
        tokio::join!(sweeps, renewals, withdrawal);
        self.shared.manager.send_replace(None);
        let end = right.end();
        drop((manager, right));
        end.cancelled().await;
        self.ledger.change(|_| Event::ClaimsHandedOver).await;
    }
}
