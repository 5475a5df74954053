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

mod specs;
mod unreadable;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::{OnceCell, OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::checkpoint::{Checkpoint, CheckpointFolder, Found, Unreadable, is_uid};
use super::mig::MigError;
use super::mps::MpsError;
use super::turn::ClaimsLock;
use super::{Observer, Occurrence, PluginError, Settings, claim_specs};
use linkwise_core::claims::{
    Claim, ClaimError, ClaimName, DeviceRefusal, Node, Prepared, PreparedDevice, ReadClaimError, plan,
};
use linkwise_core::errors::chain;
use linkwise_core::publish::injection::HostDevices;
use linkwise_core::quote::quoted;
use linkwise_core::state::{NodeState, PreparedClaim, ResourceName};
use linkwise_system::files;

/// The longest time that the node's state may take to enter a claim: it never waits for a disk or for NVML.
const LEDGER_TIMEOUT: Duration = Duration::from_secs(5);

/// The time that a claim waits for the turn of one in its way: a sweep or an Unprepare writes and removes a few files. Without
/// a limit two claims in each other's way would wait for ever.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);

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
    pub(super) settings: Arc<Settings>,
    store: Arc<CheckpointFolder>,
    observer: Observer,
    pub(super) snapshot: watch::Receiver<Arc<NodeState>>,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// A count that changes with the prepared claims.
    held: watch::Sender<u64>,
    /// The prepared claims, for the node's ledger.
    ledger: watch::Sender<Option<Vec<PreparedClaim>>>,
    /// The lock on claims, kept by each turn.
    lock: ClaimsLock,
    /// Set once the snapshot has the MIG devices that the process before left.
    pub(super) is_mig_known: OnceCell<()>,
}

/// The cause of a claim that was not prepared.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrepareError {
    #[error("{} is no UID of a claim", quoted(.0))]
    NoUid(String),
    #[error(
        "this node's GPUs go through the device plugin (linkwise.dra.gpus: none), and the claim was not prepared before: \
         delete the pod and its claim, or set dra.gpus to all"
    )]
    NotServed,
    #[error("cannot read the claim {claim}")]
    Query { claim: String, source: ReadClaimError },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("cannot write the checkpoint of the claim")]
    Checkpoint { source: std::io::Error },
    #[error("cannot write the CDI spec of the claim")]
    Spec { source: std::io::Error },
    #[error(transparent)]
    Mig(#[from] MigError),
    #[error(transparent)]
    Mps(#[from] MpsError),
    #[error("no scan of the host has found {0} yet, which the claim's CDI spec needs")]
    NoDevices(String),
    #[error("linkwise is ending, or did not enter the claim into its ledger within {LEDGER_TIMEOUT:?}")]
    NoLedger,
    #[error("what an earlier attempt has left of the claim is still there")]
    Left(#[from] UnprepareError),
    #[error("the claim was not prepared within {0:?}")]
    Late(Duration),
    #[error("the claim's checkpoint cannot be read, and is kept: {0}")]
    Unreadable(String),
    #[error(
        "{device} may be another claim's: the checkpoint of the claim with the UID {uid} cannot be read ({why}), and {held}"
    )]
    Doubtful { device: String, uid: String, why: String, held: String },
}

/// The cause of a claim that was not unprepared.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnprepareError {
    #[error(transparent)]
    Mig(#[from] MigError),
    #[error("cannot remove the CDI spec of the claim")]
    Spec { source: std::io::Error },
    #[error("cannot remove the checkpoint of the claim")]
    Checkpoint { source: std::io::Error },
    #[error("the claim was not unprepared within {0:?}")]
    Late(Duration),
    #[error("the claim's checkpoint cannot be read, and MIG devices may be made for it: {0}")]
    Unreadable(String),
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
    pub fn is_off(&self) -> bool {
        !self.settings.serves
    }

    /// Returns true if any claim is prepared or being prepared.
    pub fn has_checkpoints(&self) -> bool {
        self.slots().values().any(Slot::is_held)
    }

    /// Prepares a claim; the error is the text for the kubelet.
    pub async fn prepare(&self, asked: ClaimName) -> Result<Prepared, String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let work = timeout(limit, self.try_prepare(&asked)).await;
        let result = work.unwrap_or(Err(PrepareError::Late(limit)));
        self.tidy();
        let repeated = result.as_ref().is_ok_and(|(_, repeated)| *repeated);
        let result = result.map(|(prepared, _)| prepared).map_err(|error| chain(&error));
        let names = Prepared::names;
        let outcome = result.as_ref().map(names).map_err(Clone::clone);
        let elapsed = start.elapsed();
        (self.observer)(Occurrence::Prepared { claim: asked, result: outcome, repeated, elapsed });
        result
    }

    /// Unprepares a claim; the error is the text for the kubelet. A claim that is not prepared is no error. The API
    /// server is not asked: the claim may be deleted already.
    pub async fn unprepare(&self, asked: ClaimName) -> Result<(), String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let mut repeated = false;
        let work = async {
            if !is_uid(&asked.uid) {
                return Ok(());
            }
            let turn = self.turn(&asked.uid).await;
            let unreadable = self.read_again(&asked.uid, &turn).await;
            repeated = unreadable.is_none() && self.checkpoint(&asked.uid).is_none();
            if let Some(unreadable) = unreadable
                && !unreadable.is_torn
                && unreadable.parts.is_none()
                && self.settings.makes_mig
            {
                return Err(UnprepareError::Unreadable(unreadable.why));
            }
            self.undo(&asked.uid, &turn).await
        };
        let result = timeout(limit, work).await.unwrap_or(Err(UnprepareError::Late(limit)));
        self.tidy();
        let result = result.map_err(|error| chain(&error));
        let elapsed = start.elapsed();
        (self.observer)(Occurrence::Unprepared { claim: asked, result: result.clone(), repeated, elapsed });
        result
    }

    /// Undoes claims that are gone, and restores CDI specs of claims that are missing.
    pub async fn sweep(&self, stop: &CancellationToken) {
        self.sweep_unreadable().await;
        if self.checkpoints().iter().any(Checkpoint::has_mig)
            && stop.run_until_cancelled(self.await_mig()).await.is_none()
        {
            return;
        }
        for checkpoint in self.checkpoints() {
            let uid = checkpoint.claim.uid.clone();
            // The API server is asked before it is this claim's turn: the kubelet must not wait for that. A UID that is
            // gone does not come back.
            let Some(is_gone) = stop.run_until_cancelled(self.is_gone(&checkpoint)).await else { return };
            let Some(turn) = stop.run_until_cancelled(self.turn(&uid)).await else { return };
            if self.checkpoint(&uid).as_ref() != Some(&checkpoint) {
                continue;
            }
            if is_gone {
                let result = self.undo_in_time(&uid, &turn).await.map_err(|error| chain(&error));
                (self.observer)(Occurrence::Swept { claim: checkpoint.claim, result });
            } else if checkpoint.is_half_made(self.settings.boot.as_deref()) {
                // The kubelet was told nothing, and asks again, if at all.
                let result = self.undo_in_time(&uid, &turn).await.map_err(|error| chain(&error));
                (self.observer)(Occurrence::HalfMade { claim: checkpoint.claim, result });
            } else if checkpoint.is_completed_in(self.settings.boot.as_deref()) {
                self.renew_spec(&checkpoint, &turn).await;
            }
        }
        let folder = self.settings.cdi_folder.clone();
        for uid in files::blocking(move || Ok(claim_specs::claims(&folder))).await.unwrap_or_default() {
            if let Some(turn) = self.idle_turn(&uid)
                && !self.slots().get(&uid).is_some_and(Slot::is_held)
            {
                let _ = self.undo(&uid, &turn).await;
            }
        }
        self.tidy();
    }

    async fn try_prepare(&self, asked: &ClaimName) -> Result<(Prepared, bool), PrepareError> {
        let uid = &asked.uid;
        if !is_uid(uid) {
            return Err(PrepareError::NoUid(uid.clone()));
        }
        let turn = self.turn(uid).await;
        // The kubelet names the claim. Where nothing can be read of it, not even by a later version, it is prepared anew.
        if let Some(unreadable) = self.read_again(uid, &turn).await.filter(|unreadable| !unreadable.is_torn) {
            return Err(PrepareError::Unreadable(unreadable.why));
        }
        if self.checkpoint(uid).is_some_and(|checkpoint| checkpoint.is_half_made(self.settings.boot.as_deref())) {
            self.undo(uid, &turn).await?;
        }
        let before = self.checkpoint(uid);
        if self.is_off() && before.is_none() {
            return Err(PrepareError::NotServed);
        }
        if let Some(checkpoint) = &before
            && checkpoint.is_completed_in(self.settings.boot.as_deref())
            && self.is_intact(checkpoint, &turn).await
        {
            self.await_mps(checkpoint).await?;
            return Ok((checkpoint.prepared.clone(), true));
        }
        let checkpoint = match self.reserve(asked).await {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                if before.is_some_and(|before| error.is_gone() && self.is_unused(&before)) {
                    // Where that fails, it stays prepared, and the next sweep tries again.
                    let _ = self.undo(uid, &turn).await;
                }
                return Err(error);
            }
        };
        let carried_out = match self.confirm(&checkpoint).await {
            Ok(()) => self.carry_out(checkpoint, &turn).await,
            Err(error) => {
                self.forget_unmade(uid);
                Err(error)
            }
        };
        if carried_out.is_err() {
            match before {
                // What is still there of its MIG devices has to be known.
                Some(_) if self.destroy_unmade(uid).await.is_err() => {}
                // A pod may run with it. The checkpoint too: what one names as begun is destroyed at the next start.
                Some(before) => {
                    let _ = self.write(&before, None, &turn).await;
                    self.put(uid, Some(before));
                }
                None => drop(self.undo(uid, &turn).await),
            }
        }
        Ok((carried_out?, false))
    }

    /// Waits until the node's ledger has a claim that [`Self::reserve`] entered: from then on its GPUs stay with DRA.
    async fn confirm(&self, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        if self.settings.has_ledger {
            let (ours, mut snapshot) = (checkpoint.for_ledger(), self.snapshot.clone());
            let known = snapshot.wait_for(|state| state.ledger().prepared(&checkpoint.claim.uid) == Some(&ours));
            if !matches!(timeout(LEDGER_TIMEOUT, known).await, Ok(Ok(_))) {
                return Err(PrepareError::NoLedger);
            }
        }
        let state = Arc::clone(&self.snapshot.borrow());
        let holder = |gpu| state.ledger().holder_beside(state.topology(), gpu, &self.settings.pool);
        let mut taken = checkpoint.prepared.devices.iter().filter(|device| !device.admin);
        let held = taken.find_map(|device| Some((device, holder(&device.gpu)?)));
        held.map_or(Ok(()), |(device, holder)| {
            Err(ClaimError::of_device(&device.device, &device.gpu, DeviceRefusal::Held(holder)).into())
        })
    }

    /// Reads the claim, plans it, and enters it as prepared. The devices of claims that are gone are taken from them
    /// first.
    async fn reserve(&self, asked: &ClaimName) -> Result<Checkpoint, PrepareError> {
        let named = || format!("{}/{}", asked.namespace, asked.name);
        let claim = self.read_claim(asked).await;
        let claim = claim.map_err(|source| PrepareError::Query { claim: named(), source })?;
        if claim.asks_for_mig() {
            self.await_mig().await;
        }
        let before = self.checkpoint(&asked.uid);
        loop {
            let taken = match self.plan(asked, &claim) {
                Ok(checkpoint) => {
                    let doubt = self.doubt(&checkpoint);
                    if doubt.is_some() {
                        // As it was: nothing is done yet.
                        self.put(&asked.uid, before);
                    }
                    return doubt.map_or(Ok(checkpoint), Err);
                }
                Err(error) => error,
            };
            let mut any_gone = false;
            for holder in taken.holders() {
                any_gone |= self.release_gone(&holder.0).await;
            }
            if !any_gone {
                return Err(taken.into());
            }
        }
    }

    /// Undoes a claim if it is gone; returns true once it is out of the way.
    async fn release_gone(&self, holder: &ClaimName) -> bool {
        let Ok(turn) = timeout(TURN_TIMEOUT, self.turn(&holder.uid)).await else { return false };
        match self.checkpoint(&holder.uid) {
            Some(checkpoint) if self.is_gone(&checkpoint).await => {
                self.undo_in_time(&checkpoint.claim.uid, &turn).await.is_ok_and(|()| {
                    (self.observer)(Occurrence::Swept { claim: checkpoint.claim, result: Ok(()) });
                    true
                })
            }
            Some(_) => false,
            // One that cannot be read is the sweeps'.
            None => self.known(&holder.uid).is_none(),
        }
    }

    fn plan(&self, asked: &ClaimName, claim: &Claim) -> Result<Checkpoint, ClaimError> {
        let (state, host) = (self.snapshot.borrow().clone(), self.settings.host_devices.borrow().clone());
        let common_shm = self.with_common_shm();
        let (settings, node) = (&self.settings, self.node(&state, &host, &common_shm));
        let mut slots = self.slots();
        // No container of another boot runs, and what was GPU 0 then may be GPU 1 now.
        let others = slots.values().filter_map(Slot::known);
        let others = others.filter(|checkpoint| !checkpoint.is_of_another_boot(settings.boot.as_deref()));
        let others = others.map(|checkpoint| (&checkpoint.claim, &checkpoint.prepared));
        let mut prepared = plan(claim, asked, node, others)?;
        let before = slots.get(&asked.uid).and_then(|slot| slot.checkpoint.as_ref());
        if let Some(before) = before {
            let kind = settings.injection.cdi.as_ref().map_or("", |cdi| cdi.kind.as_str());
            prepared.keep_names(&before.prepared, kind).map_err(ClaimError::OldNames)?;
        }
        let checkpoint = Checkpoint::started(settings.boot.clone(), asked.clone(), prepared).after(before);
        slots.entry(asked.uid.clone()).or_default().set(Some(checkpoint.clone()));
        drop(slots);
        self.changed();
        Ok(checkpoint)
    }

    /// The facts that a plan is made from.
    pub(super) fn node<'a>(
        &'a self,
        state: &'a NodeState,
        host: &'a HostDevices,
        common_shm: &'a BTreeSet<ResourceName>,
    ) -> Node<'a> {
        let Settings { pool, injection, makes_mig, .. } = &*self.settings;
        Node { pool, state, injection, host, makes_mig: *makes_mig, common_shm }
    }

    /// Prepares a claim as its checkpoint says. Two things last longer than a process and are undone by the next one: the
    /// MIG devices and the MPS control daemon of a claim that asks for any. For such a claim alone there is a
    /// checkpoint from the beginning on. Of any other nothing is done before its last step but its CDI spec, and one
    /// without a checkpoint is removed.
    async fn carry_out(&self, checkpoint: Checkpoint, turn: &Turn) -> Result<Prepared, PrepareError> {
        let uid = checkpoint.claim.uid.clone();
        let asks_others =
            checkpoint.prepared.mps.is_some() || checkpoint.prepared.devices.iter().any(PreparedDevice::is_unmade);
        if asks_others && let Err(error) = self.write(&checkpoint, None, turn).await {
            self.forget_unmade(&uid);
            return Err(error);
        }
        let mps = pin!(self.await_mps(&checkpoint));
        let devices = pin!(self.make_mig(checkpoint.clone()));
        let checkpoint = match select(devices, mps).await {
            Either::Left((devices, mps)) => {
                let checkpoint = devices?;
                mps.await?;
                checkpoint
            }
            // Not dropped: an order to the driver that is under way has to be known.
            Either::Right((mps, devices)) => {
                let devices = devices.await;
                mps?;
                devices?
            }
        };
        let spec = self.await_spec(&checkpoint).await?;
        let checkpoint = checkpoint.completed();
        self.write(&checkpoint, Some(spec), turn).await?;
        self.put(&uid, Some(checkpoint.clone()));
        Ok(checkpoint.prepared)
    }

    /// As [`Self::undo`], in the time that a call of the kubelet has: an order that the driver never answers holds up
    /// no other claim.
    async fn undo_in_time(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let limit = self.settings.prepare_timeout;
        timeout(limit, self.undo(uid, turn)).await.unwrap_or(Err(UnprepareError::Late(limit)))
    }

    /// Undoes all steps for a claim: the MIG devices that were made for it, its spec, its checkpoint, its entry. While
    /// DRA is off, a step that cannot be undone for some time is left out.
    async fn undo(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let is_off = self.is_off();
        let gives_up = {
            let (mut slots, now, limit) = (self.slots(), Instant::now(), self.settings.listed_within);
            let is_late = |slot: &mut Slot| {
                let since = slot.undoing.filter(|_| is_off);
                slot.undoing = is_off.then(|| since.unwrap_or(now));
                since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
            };
            is_off & slots.get_mut(uid).is_none_or(is_late)
        };
        let destroyed = self.destroy_mig(uid).await.map_err(UnprepareError::from);
        self.or_left_behind(uid, destroyed, gives_up)?;
        let removed = self.remove_spec(uid, turn).await.map_err(|source| UnprepareError::Spec { source });
        self.or_left_behind(uid, removed, gives_up)?;
        let (store, named, held) = (Arc::clone(&self.store), uid.to_owned(), Arc::clone(turn));
        let removed = files::blocking(move || {
            let _held = held;
            store.remove(&named)
        });
        let removed = removed.await.map_err(|source| UnprepareError::Checkpoint { source });
        self.or_left_behind(uid, removed, gives_up)?;
        self.put(uid, None);
        Ok(())
    }

    /// Reports the part of a claim that is left behind, where this process gives up.
    fn or_left_behind(
        &self,
        uid: &str,
        result: Result<(), UnprepareError>,
        gives_up: bool,
    ) -> Result<(), UnprepareError> {
        match result {
            Err(error) if gives_up => {
                if let Some(checkpoint) = self.checkpoint(uid) {
                    let what = chain(&error);
                    (self.observer)(Occurrence::LeftBehind { claim: checkpoint.claim, what });
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Writes the spec of a claim, if it is given, and then its checkpoint.
    async fn write(&self, checkpoint: &Checkpoint, spec: Option<String>, turn: &Turn) -> Result<(), PrepareError> {
        let (store, checkpoint, held) = (Arc::clone(&self.store), checkpoint.clone(), Arc::clone(turn));
        let folder = self.settings.cdi_folder.clone();
        let written = files::blocking(move || {
            let _held = held;
            let spec = spec.map_or(Ok(()), |text| claim_specs::write(&folder, &checkpoint.claim.uid, &text));
            Ok(match spec {
                Ok(()) => store.write(&checkpoint).map_err(|source| PrepareError::Checkpoint { source }),
                Err(source) => Err(PrepareError::Spec { source }),
            })
        });
        written.await.map_err(|source| PrepareError::Checkpoint { source })?
    }

    /// Asks whether the cluster has no such claim any more, or its devices have been taken from it, and no container of
    /// this node has them. Where DRA is off and the API server cannot be asked, the containers alone count.
    async fn is_gone(&self, checkpoint: &Checkpoint) -> bool {
        if self.is_off() && self.settings.read_claim.is_none() {
            return self.is_long_unlisted(&checkpoint.claim.uid, self.is_unused(checkpoint));
        }
        let is_over = match self.read_claim(&checkpoint.claim).await {
            Err(ReadClaimError::NotFound) => true,
            Err(ReadClaimError::Failed(_)) => false,
            Ok(found) if found.metadata.uid != checkpoint.claim.uid => true,
            // Its pod has ended, and the kubelet should have unprepared it. One that was reinstalled does not.
            Ok(found) => !self.is_allocated(&found, checkpoint),
        };
        is_over && self.is_unused(checkpoint)
    }

    /// Returns true if the kubelet could be asked, and listed no container with a checkpoint's devices, each time that
    /// a sweep looked for as long as its lists may be late: a kubelet that starts lists no pod at first.
    fn is_long_unlisted(&self, uid: &str, is_unused: bool) -> bool {
        let now = Instant::now();
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(uid) else { return false };
        slot.unlisted = is_unused.then(|| slot.unlisted.unwrap_or(now));
        slot.unlisted.is_some_and(|since| now.saturating_duration_since(since) >= self.settings.listed_within)
    }

    /// Returns true if the kubelet lists no container with a checkpoint's devices. While it cannot be asked, there may
    /// be one, and where it was asked before the claim was prepared: a claim that was deleted by force is gone before
    /// its pod is.
    fn is_unused(&self, checkpoint: &Checkpoint) -> bool {
        let state = self.snapshot.borrow().clone();
        let named = checkpoint.claim.to_string();
        let since = self.slots().get(&checkpoint.claim.uid).and_then(|slot| slot.since);
        let mut listed = state.ledger().claimed_lately();
        state.ledger().is_known()
            && since.is_none_or(|since| since.elapsed() >= self.settings.listed_within)
            && !listed.any(|held| {
                let has = |device: &str| checkpoint.prepared.devices.iter().any(|prepared| prepared.device == device);
                held.claim == named && held.driver == self.settings.driver && has(&held.device)
            })
    }

    /// Returns true if any of a checkpoint's devices is still the claim's.
    fn is_allocated(&self, claim: &Claim, checkpoint: &Checkpoint) -> bool {
        let results = claim.status.allocation.iter().flat_map(|allocation| &allocation.devices.results);
        let mut ours =
            results.filter(|result| result.driver == self.settings.driver && result.pool == self.settings.pool);
        ours.any(|result| checkpoint.prepared.devices.iter().any(|device| device.device == result.device))
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

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        // Only whole checkpoints are ever put in or taken out.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.slots().values().filter_map(|slot| slot.checkpoint.clone()).collect()
    }

    pub(super) fn checkpoint(&self, uid: &str) -> Option<Checkpoint> {
        self.slots().get(uid)?.checkpoint.clone()
    }

    /// The checkpoint of a claim, or what can be read of it.
    pub(super) fn known(&self, uid: &str) -> Option<Checkpoint> {
        self.slots().get(uid)?.known().cloned()
    }

    pub(super) fn put(&self, uid: &str, checkpoint: Option<Checkpoint>) {
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

impl PrepareError {
    /// Returns true if the claim that was prepared under this UID no longer exists.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Query { source: ReadClaimError::NotFound, .. } | Self::Claim(ClaimError::OtherUid { .. }))
    }
}
