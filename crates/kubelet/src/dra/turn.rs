//! The turn of this process among the linkwise of a node: which of them prepares claims. The kubelet's calls wait here
//! for the claim manager, which is there while this process has the lock on the node's claims.
//!
//! Whatever touches claims has a clone of the lock: each call, each write to a disk, the writer of slices, MPS orders.
//! So the lock passes to the next process when all of them have ended, and no two processes ever touch claims.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::claim_manager::ClaimManager;
use super::life::{renew_specs, sweep};
use super::{ClaimQuery, Life, Observer, Occurrence, PluginError, Settings};
use linkwise_core::errors::chain;
use linkwise_core::state::{NodeState, PreparedClaim};
use linkwise_system::files;
use linkwise_system::right::Right;

/// The time between two attempts to take the lock while another process has it.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The time between two attempts to use a lock or a folder of checkpoints that cannot be used.
const FAULT_PAUSE: Duration = Duration::from_secs(5);

/// The time for which a process that hands over still begins calls: the kubelet may have chosen this plugin for a call
/// just before it connected to the next one.
const LATE_CALLS: Duration = Duration::from_millis(100);

/// The part of a process in preparing the claims of its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClaimsTurn {
    /// The process has no sockets.
    #[default]
    Away,
    /// Its sockets are there. Calls that have begun end, and new ones wait.
    Waits,
    /// Its sockets are there, and it prepares claims as soon as no other process does.
    Holds,
}

/// The turn of a plugin, and its answer.
#[derive(Clone, Debug)]
pub struct Handover {
    /// The turn.
    pub turn: watch::Receiver<ClaimsTurn>,
    /// True while this process may have calls or writes for claims under way.
    pub held: watch::Sender<bool>,
}

impl Handover {
    /// The only process of a node.
    pub fn alone() -> Self {
        Self { turn: watch::channel(ClaimsTurn::Holds).1, held: watch::Sender::default() }
    }
}

/// The lock on the claims of this node, held as long as any clone lives.
pub type ClaimsLock = Right<File>;

/// Takes the lock. `None`: another process has it. It may block as long as the disk does.
fn try_take(path: &Path) -> io::Result<Option<ClaimsLock>> {
    let file = File::options().append(true).create(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(Right::new(file))),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The claim manager, while this process has the lock.
#[derive(Clone)]
pub(super) struct Claims {
    manager: watch::Sender<Option<Arc<ClaimManager>>>,
    settings: Arc<Settings>,
}

impl Claims {
    /// None yet.
    pub fn new(settings: Arc<Settings>) -> Self {
        Self { manager: watch::Sender::new(None), settings }
    }

    /// Waits for the manager, in the time that a call of the kubelet has; the error is the text for the kubelet. The
    /// lock is not handed over before the manager is dropped.
    pub async fn manager(&self) -> Result<Arc<ClaimManager>, String> {
        let (mut manager, limit) = (self.follow(), self.settings.prepare_timeout);
        let found = timeout(limit, manager.wait_for(Option::is_some)).await;
        let found = found.ok().and_then(Result::ok).and_then(|manager| manager.clone());
        found.ok_or_else(|| {
            let lock = self.settings.lock.display();
            format!("this linkwise has not had the lock on claims ({lock}) within {limit:?}")
        })
    }

    /// Follows the manager.
    pub fn follow(&self) -> watch::Receiver<Option<Arc<ClaimManager>>> {
        self.manager.subscribe()
    }
}

/// What the manager needs, and who is told of it.
pub(super) struct Holder {
    pub settings: Arc<Settings>,
    pub observer: Observer,
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    pub queries: mpsc::Sender<ClaimQuery>,
    pub claims: Claims,
    pub prepared: watch::Sender<Option<Vec<PreparedClaim>>>,
    pub lock: watch::Sender<Option<ClaimsLock>>,
    pub handover: Handover,
}

impl Holder {
    /// Has the claims whenever it is this process's turn, for ever.
    pub async fn run(mut self) {
        loop {
            self.turn_is(true).await;
            let mut turn = self.handover.turn.clone();
            let opened = tokio::select! {
                opened = self.open() => opened,
                Ok(_) = turn.wait_for(|turn| *turn != ClaimsTurn::Holds) => continue,
            };
            match opened {
                Ok((manager, lock)) => self.hold(Arc::new(manager), lock).await,
                Err(error) => {
                    (self.observer)(Occurrence::Life(Life::Ended(chain(&error))));
                    let _ = timeout(FAULT_PAUSE, self.turn_is(false)).await;
                }
            }
        }
    }

    /// Waits until it is this process's turn, or no longer.
    async fn turn_is(&mut self, holds: bool) {
        if self.handover.turn.wait_for(|turn| (*turn == ClaimsTurn::Holds) == holds).await.is_err() {
            // It stays as it is, until the node ends.
            std::future::pending::<()>().await;
        }
    }

    /// Waits for the lock, and reads the checkpoints.
    async fn open(&self) -> Result<(ClaimManager, ClaimsLock), PluginError> {
        let unusable = |source| PluginError::Lock { path: self.settings.lock.clone(), source };
        let lock = loop {
            let path = self.settings.lock.clone();
            match files::blocking(move || try_take(&path)).await.map_err(unusable)? {
                Some(lock) => break lock,
                None => sleep(LOCK_PAUSE).await,
            }
        };
        let (settings, observer) = (Arc::clone(&self.settings), Arc::clone(&self.observer));
        let (snapshot, queries) = (self.snapshot.clone(), self.queries.clone());
        let manager =
            ClaimManager::open(settings, observer, snapshot, queries, self.prepared.clone(), lock.clone()).await?;
        Ok((manager, lock))
    }

    /// Answers calls and sweeps the claims until another process is to have them; then ends what has begun.
    async fn hold(&mut self, manager: Arc<ClaimManager>, lock: ClaimsLock) {
        self.handover.held.send_replace(true);
        self.lock.send_replace(Some(lock.clone()));
        self.claims.manager.send_replace(Some(Arc::clone(&manager)));
        let stop = CancellationToken::new();
        let (settings, snapshot) = (Arc::clone(&self.settings), self.snapshot.clone());
        let sweeps = sweep(&settings, &manager, snapshot, &stop);
        let renewals = stop.run_until_cancelled(renew_specs(&settings, &manager));
        let turn = async {
            self.turn_is(false).await;
            stop.cancel();
            self.lock.send_replace(None);
            sleep(LATE_CALLS).await;
        };
        tokio::join!(sweeps, renewals, turn);
        self.claims.manager.send_replace(None);
        self.prepared.send_replace(None);
        let ended = lock.ended();
        drop((manager, lock));
        ended.await;
        self.handover.held.send_replace(false);
    }
}
