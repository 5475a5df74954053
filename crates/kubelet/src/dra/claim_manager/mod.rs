//! Prepares and unprepares claims: reads the claim, lets the core decide, and carries it out in steps each of which is
//! safe to die in.
//!
//! Called by `service` for the kubelet and by `life` for claims that are gone. Prepared claims are kept in memory and
//! in checkpoints. Each claim is worked on by one caller at a time. Claims hardly wait for each other, and no lock is
//! held during a wait for a disk or the API server. A claim counts as prepared before anything is done for it, and
//! until all is undone, so that no other claim gets its GPUs.
//!
//! A claim leaves the manager three times: for itself (the API server), for its place in the node's ledger, and for
//! MIG devices and an MPS control daemon, if it asks for any. Nothing is polled.
//!
//! The answer names a CDI device for each request of the claim. The kubelet keeps every name that it was given for a
//! claim over its restarts and reboots, and hands on old and new ones together; so the names never change, and their
//! spec follows the claim's hardware: it is written at each preparation, and when the node's CDI devices change.

mod mig;
mod mps;
mod prepare;
mod specs;
mod sweep;
mod undo;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OnceCell, OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout};

use super::checkpoint::{Checkpoint, CheckpointFolder, Found, Unreadable};
use super::turn::ClaimsLock;
use super::{Observer, Occurrence, PluginError, Settings};
use linkwise_core::claims::{Claim, ClaimName, Prepared, ReadClaimError};
use linkwise_core::state::{NodeState, PreparedClaim};
use linkwise_system::files;

pub(super) use specs::keep_specs;
pub(super) use sweep::keep_sweeping;

/// The right to work on one claim, until its last clone is dropped: also while a disk has it.
type Turn = Arc<(OwnedMutexGuard<()>, ClaimsLock)>;

/// The state of one claim.
#[derive(Default)]
struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    checkpoint: Option<Checkpoint>,
    /// The file in the checkpoint's place, if it cannot be read.
    unreadable: Option<Unreadable>,
    /// The time at which the checkpoint was put in.
    since: Option<Instant>,
    /// The time at which undoing the claim was tried first while DRA was off.
    undoing: Option<Instant>,
    /// The time since which sweeps have found the claim in no list of the kubelet, while only these count.
    unlisted: Option<Instant>,
}

/// The claims of this node.
pub(super) struct ClaimManager {
    settings: Arc<Settings>,
    store: Arc<CheckpointFolder>,
    observer: Observer,
    snapshot: watch::Receiver<Arc<NodeState>>,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// A count that changes with the prepared claims.
    held: watch::Sender<u64>,
    /// The prepared claims, for the node's ledger.
    ledger: watch::Sender<Option<Vec<PreparedClaim>>>,
    /// The lock on claims, kept by each turn.
    lock: ClaimsLock,
    /// Set once the snapshot has the MIG devices that the process before left.
    is_mig_known: OnceCell<()>,
}

impl ClaimManager {
    /// A manager with the claims that the checkpoints have.
    pub async fn open(
        settings: Arc<Settings>,
        observer: Observer,
        snapshot: watch::Receiver<Arc<NodeState>>,
        ledger: watch::Sender<Option<Vec<PreparedClaim>>>,
        lock: ClaimsLock,
    ) -> Result<Self, PluginError> {
        let (folder, serves) = (settings.checkpoints.clone(), settings.serves);
        let held = lock.clone();
        let opened = files::blocking(move || {
            let _held = held;
            CheckpointFolder::open(&folder, serves)
        });
        let opened = opened.await;
        let unusable = |source| PluginError::Checkpoints { folder: settings.checkpoints.clone(), source };
        let (store, found, foreign) = opened.map_err(unusable)?;
        foreign.into_iter().for_each(|foreign| observer(foreign));
        let since = Some(Instant::now());
        let slot = |(uid, found): (String, Found)| {
            let (checkpoint, unreadable) = match found {
                Ok(checkpoint) => (Some(checkpoint), None),
                Err(unreadable) => (None, Some(*unreadable)),
            };
            if let Some(Unreadable { why, .. }) = &unreadable {
                observer(Occurrence::CheckpointUnreadable { path: store.path(&uid), why: why.clone() });
            }
            (uid, Slot { checkpoint, unreadable, since, ..Slot::default() })
        };
        let slots = Mutex::new(found.into_iter().map(slot).collect());
        let held = watch::Sender::default();
        let (store, is_mig_known) = (Arc::new(store), OnceCell::new());
        let manager = Self { settings, store, observer, snapshot, slots, held, ledger, lock, is_mig_known };
        manager.changed();
        Ok(manager)
    }

    /// Follows the prepared claims.
    pub fn held(&self) -> watch::Receiver<u64> {
        self.held.subscribe()
    }

    /// Everything that is prepared, or being prepared.
    pub fn prepared(&self) -> Vec<Prepared> {
        self.checkpoints().into_iter().map(|checkpoint| checkpoint.prepared).collect()
    }

    /// Returns true if the node's door is the device plugin. Then a claim is over as soon as the kubelet lists it no
    /// more, and what stands against undoing it does not keep its GPUs from the device plugin.
    fn is_off(&self) -> bool {
        !self.settings.serves
    }

    /// Returns true if any claim is prepared or being prepared.
    pub fn has_checkpoints(&self) -> bool {
        self.slots().values().any(Slot::is_held)
    }

    async fn read_claim(&self, claim: &ClaimName) -> Result<Claim, ReadClaimError> {
        let failed = |why: String| Err(ReadClaimError::Failed(why));
        let Some(read) = &self.settings.read_claim else {
            return failed("linkwise has no client of the API server".to_owned());
        };
        let limit = self.settings.claim_timeout;
        let late = || failed(format!("the API server did not answer within {limit:?}"));
        timeout(limit, read(claim.clone())).await.unwrap_or_else(|_| late())
    }

    /// Reads the checkpoint of a claim again if it could not be read; returns it if it still cannot be.
    async fn read_again(&self, uid: &str, turn: &Turn) -> Option<Unreadable> {
        self.slots().get(uid)?.unreadable.as_ref()?;
        let (store, named, held) = (Arc::clone(&self.store), uid.to_owned(), Arc::clone(turn));
        let read = files::blocking(move || {
            let _held = held;
            Ok(store.read(&named))
        });
        match read.await {
            Ok(Ok(checkpoint)) => {
                self.put(uid, Some(checkpoint));
                None
            }
            Ok(Err(unreadable)) => Some(*unreadable),
            Err(error) => Some(Unreadable { why: error.to_string(), is_torn: false, parts: None }),
        }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        // Only whole checkpoints are ever put in or taken out.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.slots().values().filter_map(|slot| slot.checkpoint.clone()).collect()
    }

    fn checkpoint(&self, uid: &str) -> Option<Checkpoint> {
        self.slots().get(uid)?.checkpoint.clone()
    }

    /// The checkpoint of a claim, or what can be read of it.
    fn known(&self, uid: &str) -> Option<Checkpoint> {
        self.slots().get(uid)?.known().cloned()
    }

    fn put(&self, uid: &str, checkpoint: Option<Checkpoint>) {
        self.slots().entry(uid.to_owned()).or_default().set(checkpoint);
        self.changed();
    }

    async fn turn(&self, uid: &str) -> Turn {
        let turn = Arc::clone(&self.slots().entry(uid.to_owned()).or_default().turn);
        Arc::new((turn.lock_owned().await, self.lock.clone()))
    }

    /// The turn of a claim that nothing works on.
    fn idle_turn(&self, uid: &str) -> Option<Turn> {
        let turn = Arc::clone(&self.slots().entry(uid.to_owned()).or_default().turn);
        turn.try_lock_owned().ok().map(|turn| Arc::new((turn, self.lock.clone())))
    }

    /// Forgets claims that are not prepared and that nothing works on.
    fn tidy(&self) {
        self.slots().retain(|_, slot| slot.is_held() || Arc::strong_count(&slot.turn) > 1);
    }

    fn changed(&self) {
        let (claims, devices) = {
            let slots = self.slots();
            let checkpoints = || slots.values().filter_map(Slot::known);
            (checkpoints().count(), checkpoints().map(|checkpoint| checkpoint.prepared.names().len()).sum())
        };
        let prepared = self.slots().values().filter_map(Slot::known).map(Checkpoint::for_ledger).collect();
        if let Some(mps) = &self.settings.mps {
            let boot = self.settings.boot.as_deref();
            let slots = self.slots();
            let is_blind = slots.values().any(Slot::is_blind);
            let known = slots.values().filter_map(Slot::known).filter(|r| !r.is_of_another_boot(boot));
            mps.order(known, is_blind, &self.lock);
        }
        let prepared = Some(prepared);
        self.ledger.send_if_modified(|before| {
            let is_news = *before != prepared;
            *before = prepared;
            is_news
        });
        (self.observer)(Occurrence::Held { claims, devices });
        self.held.send_modify(|change| *change = change.wrapping_add(1));
    }
}

impl Slot {
    /// The checkpoint, or what can be read of it.
    fn known(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref().or_else(|| self.unreadable.as_ref()?.parts.as_deref())
    }

    /// Returns true if there is a file of the claim.
    fn is_held(&self) -> bool {
        self.checkpoint.is_some() || self.unreadable.is_some()
    }

    /// Returns true if there is a file of the claim, and it cannot be seen what the claim has.
    fn is_blind(&self) -> bool {
        self.unreadable.is_some() && self.known().is_none()
    }

    fn set(&mut self, checkpoint: Option<Checkpoint>) {
        *self = Self { turn: Arc::clone(&self.turn), checkpoint, since: Some(Instant::now()), ..Self::default() };
    }
}
