//! The part of this process in preparing the claims of its node. The kubelet's calls wait here for the claim manager,
//! which is there while this process has the right to touch claims.
//!
//! Whatever touches claims has a clone of the right: each call, each write to a disk, the writer of slices, MPS orders.
//! So the next process gets it when all of them have ended, and no two processes ever touch claims.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::api::Book;
use super::claim_manager::{ClaimManager, keep_specs, keep_sweeping};
use crate::registration::Life;
use linkwise_core::errors::chain;
use linkwise_core::state::Event;
use linkwise_system::or_never;
use linkwise_system::right::Right;

/// The time between two attempts to use a folder of checkpoints that cannot be used.
const FAULT_PAUSE: Duration = Duration::from_secs(5);

/// The time for which a process that hands over still begins calls: the kubelet may have chosen this plugin for a call
/// just before it connected to the next one.
const LATE_CALLS: Duration = Duration::from_millis(100);

/// The right to touch the claims of this node, had as long as any clone lives.
pub type ClaimsLock = Right;

/// The duties of a process's DRA plugin among several linkwise of a node.
#[derive(Clone, Debug)]
pub struct Handover {
    /// True while the plugin has its sockets.
    pub offers: watch::Receiver<bool>,
    /// The right to touch the node's claims, while this process has it. Without it, calls wait.
    pub claims: watch::Receiver<Option<Right>>,
}

impl Handover {
    /// The only process of a node.
    pub fn alone() -> Self {
        Self { offers: watch::channel(true).1, claims: watch::channel(Some(Right::default())).1 }
    }
}

impl Shared {
    /// Waits for the manager, in the time that a call of the kubelet has; the error is the text for the kubelet. The
    /// claims are not handed over before the manager is dropped.
    pub async fn manager(&self) -> Result<Arc<ClaimManager>, String> {
        let (mut manager, limit) = (self.claims.subscribe(), self.settings.prepare_timeout);
        let found = timeout(limit, manager.wait_for(Option::is_some)).await;
        let found = found.ok().and_then(Result::ok).and_then(|manager| manager.clone());
        found.ok_or_else(|| {
            let folder = self.settings.checkpoints.display();
            format!("this linkwise has not had the claims of this node ({folder}) within {limit:?}")
        })
    }
}

/// The inputs and outputs of the manager.
pub(super) struct Holder {
    pub shared: Shared,
    pub book: Book,
    pub lock: watch::Sender<Option<ClaimsLock>>,
    pub turn: watch::Receiver<Option<Right>>,
}

impl Holder {
    /// Has the claims whenever it is this process's turn, for ever.
    pub async fn run(self) {
        let mut turn = self.turn.clone();
        loop {
            let right = turn.wait_for(Option::is_some).await.ok().and_then(|right| right.clone());
            // Without a sender, the node is ending.
            let Some(right) = right else { return std::future::pending().await };
            let opened = tokio::select! {
                opened = ClaimManager::open(&self.shared, self.book.clone(), right.clone()) => opened,
                () = self.withdrawn(&right) => {
                    self.book.change(|_| Event::ClaimsHandedOver).await;
                    continue;
                }
            };
            match opened {
                Ok(manager) => self.hold(Arc::new(manager), right).await,
                Err(error) => {
                    self.shared.told.life(&Life::Ended(chain(&error)));
                    let _ = timeout(FAULT_PAUSE, self.withdrawn(&right)).await;
                }
            }
        }
    }

    /// Waits until a right is taken back. Another one may be there then.
    async fn withdrawn(&self, right: &Right) {
        let is_other = |now: &Option<Right>| now.as_ref().is_none_or(|now| !now.is(right));
        or_never(self.turn.clone().wait_for(is_other)).await;
    }

    /// Answers calls and sweeps the claims until another process is to have them; then ends what has begun.
    async fn hold(&self, manager: Arc<ClaimManager>, right: Right) {
        self.lock.send_replace(Some(right.clone()));
        self.shared.claims.send_replace(Some(Arc::clone(&manager)));
        let stop = CancellationToken::new();
        let sweeps = keep_sweeping(&manager, &stop);
        let renewals = stop.run_until_cancelled(keep_specs(&manager));
        let turn = async {
            self.withdrawn(&right).await;
            stop.cancel();
            self.lock.send_replace(None);
            sleep(LATE_CALLS).await;
        };
        tokio::join!(sweeps, renewals, turn);
        self.shared.claims.send_replace(None);
        let end = right.end();
        drop((manager, right));
        end.cancelled().await;
        self.book.change(|_| Event::ClaimsHandedOver).await;
    }
}
