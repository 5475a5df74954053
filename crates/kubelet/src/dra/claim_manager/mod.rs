//! Prepares and unprepares claims: reads the claim, has the node's loop plan it and enter it into the ledger, and
//! carries the plan out. linkwise may be killed in each step without harm.
//!
//! Called by `service` for the kubelet, and by `dra::turn` to sweep claims and renew CDI specs. The ledger in the
//! node's state says what each claim has, from before anything is done for it until all is undone, so that no other
//! claim gets its GPUs. The manager keeps the checkpoints, from which the next process makes the ledger. One caller at
//! a time works on a claim. Claims hardly wait for each other: a wait for a disk or the API server holds only the turns
//! of the claims concerned.
//!
//! The answer names a CDI device for each of the claim's requests and devices. The kubelet keeps every name that it was
//! given for a claim, over its restarts and reboots, and passes old and new names to the runtime together. So the names
//! never change. The spec with the requests' devices follows the claim's hardware: it is written at each preparation,
//! and when the node's CDI devices change.

mod metadata;
mod mig;
mod mps;
mod prepare;
mod specs;
mod sweep;
mod undo;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use tokio::sync::{OnceCell, OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout};

use super::api::LedgerLink;
use super::checkpoint::{Checkpoint, CheckpointFolder, Found, Opened, Unreadable};
use super::{PluginError, PluginMetrics, Settings, Shared};
use linkwise_core::claims::{AllocatedDevice, Claim, ClaimName, ReadClaimError};
use linkwise_core::state::{Event, NodeState};
use linkwise_system::right::Right;
use linkwise_system::{files, lock};

pub(super) use specs::keep_specs;
pub(super) use sweep::keep_sweeping;

/// The turn of a claim, not of the process (`dra::turn`). Ends with its last clone; a write to a disk has one.
type Turn = Arc<(OwnedMutexGuard<()>, Right)>;

/// The state of one claim.
#[derive(Default)]
struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    /// The claim's checkpoint, maybe not written yet, or the unreadable file in its place.
    found: Option<Found>,
    /// The time at which the checkpoint was read or last changed.
    since: Option<Instant>,
    /// The time at which undoing the claim was tried first.
    undoing: Option<Instant>,
    /// The time since which each sweep has found the claim unused, if the API server cannot be asked.
    unlisted: Option<Instant>,
}

/// The manager of this node's claims, made by `dra::turn` while this process has the right to touch claims.
pub(super) struct ClaimManager {
    settings: Arc<Settings>,
    store: Arc<CheckpointFolder>,
    metrics: PluginMetrics,
    snapshot: watch::Receiver<Arc<NodeState>>,
    /// The node's ledger.
    ledger: LedgerLink,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// The right to touch claims, kept by each turn.
    right: Right,
    /// Set once the snapshot has the MIG devices that the previous process left.
    is_mig_known: OnceCell<()>,
}

impl ClaimManager {
    /// A manager with the claims that the checkpoints have.
    pub async fn open(shared: &Shared, ledger: LedgerLink, right: Right) -> Result<Self, PluginError> {
        let Shared { settings, snapshot, reporter, .. } = shared.clone();
        let (folder, serves) = (settings.checkpoints.clone(), settings.serves);
        let opened = files::blocking_with(right.clone(), move || CheckpointFolder::open(&folder, serves)).await;
        let Opened { store, found, foreign } =
            opened.map_err(|error| PluginError(settings.checkpoints.clone(), error))?;
        let unreadable = |path: &Path, why: &str| {
            tracing::warn!(path = %path.display(), why, "checkpoint of a claim unreadable, keeping it");
        };
        foreign.iter().for_each(|path| unreadable(path, "its name is not that of a checkpoint"));
        let since = Some(Instant::now());
        let slot = |(uid, found): (String, Found)| {
            if let Err(fault) = &found {
                unreadable(&store.path(&uid), &fault.why);
            }
            (uid, Slot { found: Some(found), since, ..Slot::default() })
        };
        let slots: BTreeMap<_, _> = found.into_iter().map(slot).collect();
        let known = slots.values().filter_map(Slot::known);
        let entries = known.map(|checkpoint| checkpoint.entry(settings.boot.as_deref())).collect();
        ledger.change(|_| Event::Prepared(entries)).await;
        let (store, slots, is_mig_known) = (Arc::new(store), Mutex::new(slots), OnceCell::new());
        let manager = Self { settings, store, metrics: reporter.metrics, snapshot, ledger, slots, right, is_mig_known };
        manager.changed();
        Ok(manager)
    }

    /// Returns true if the node's door is the device plugin. Then a step of a claim's cleanup that keeps failing is
    /// skipped, so that the device plugin gets the GPUs.
    fn is_off(&self) -> bool {
        !self.settings.serves
    }

    /// Returns true if any claim is being prepared, or has a checkpoint, even an unreadable one.
    pub fn has_checkpoints(&self) -> bool {
        lock(&self.slots).values().any(|slot| slot.found.is_some())
    }

    /// The devices of this plugin that are allocated to a claim.
    fn ours<'a>(&'a self, claim: &'a Claim) -> impl Iterator<Item = &'a AllocatedDevice> {
        let Settings { driver, pool, .. } = &*self.settings;
        claim.allocated().filter(move |result| result.driver == *driver && result.pool == *pool)
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

    /// Reads the checkpoint of a claim again if it could not be read; returns the fault, if any.
    async fn read_again(&self, uid: &str, turn: &Turn) -> Option<Box<Unreadable>> {
        lock(&self.slots).get(uid)?.unreadable()?;
        let (store, owned) = (Arc::clone(&self.store), uid.to_owned());
        match files::blocking_with(Arc::clone(turn), move || Ok(store.read(&owned))).await {
            Ok(Ok(checkpoint)) => {
                self.put(uid, Some(checkpoint)).await;
                None
            }
            Ok(Err(unreadable)) => Some(unreadable),
            Err(error) => Some(Box::new(Unreadable { why: error.to_string(), is_torn: false, parts: None })),
        }
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        lock(&self.slots).values().filter_map(|slot| slot.found.clone()?.ok()).collect()
    }

    fn checkpoint(&self, uid: &str) -> Option<Checkpoint> {
        lock(&self.slots).get(uid)?.found.clone()?.ok()
    }

    /// The checkpoint of a claim, or the parts of it that can be read.
    fn known(&self, uid: &str) -> Option<Checkpoint> {
        lock(&self.slots).get(uid)?.known().cloned()
    }

    /// Enters what a claim has from now on into the ledger and the slot; `None` if the claim is over.
    async fn put(&self, uid: &str, checkpoint: Option<Checkpoint>) {
        let entry = checkpoint.as_ref().map(|checkpoint| checkpoint.entry(self.settings.boot.as_deref()));
        let owned = uid.to_owned();
        self.ledger.change(move |state| Event::Prepared(state.ledger().claims_with(&owned, entry))).await;
        self.set(uid, checkpoint);
    }

    fn set(&self, uid: &str, checkpoint: Option<Checkpoint>) {
        lock(&self.slots).entry(uid.to_owned()).or_default().set(checkpoint);
        self.changed();
    }

    async fn turn(&self, uid: &str) -> Turn {
        let turn = Arc::clone(&lock(&self.slots).entry(uid.to_owned()).or_default().turn);
        Arc::new((turn.lock_owned().await, self.right.clone()))
    }

    /// The turn of a claim, if nothing works on the claim.
    fn idle_turn(&self, uid: &str) -> Option<Turn> {
        let turn = Arc::clone(&lock(&self.slots).entry(uid.to_owned()).or_default().turn);
        turn.try_lock_owned().ok().map(|turn| Arc::new((turn, self.right.clone())))
    }

    /// Forgets claims that are not prepared and that nothing works on.
    fn tidy(&self) {
        lock(&self.slots).retain(|_, slot| slot.found.is_some() || Arc::strong_count(&slot.turn) > 1);
    }

    /// Orders the MPS control daemons, and counts claims and devices.
    fn changed(&self) {
        let slots = lock(&self.slots);
        let known = || slots.values().filter_map(Slot::known);
        if let Some(mps) = &self.settings.mps {
            let of_this_boot = |checkpoint: &&Checkpoint| !checkpoint.is_of_another_boot(self.settings.boot.as_deref());
            mps.order(known().filter(of_this_boot), slots.values().any(Slot::is_blind), &self.right);
        }
        let (claims, devices) = (known().count(), known().map(|known| known.prepared.names().len()).sum());
        self.metrics.held(claims, devices);
    }
}

impl Slot {
    /// The checkpoint, or the parts of it that can be read.
    fn known(&self) -> Option<&Checkpoint> {
        self.found.as_ref()?.as_ref().map_or_else(|fault| fault.parts.as_deref(), Some)
    }

    /// The unreadable file in the checkpoint's place, if there is one.
    fn unreadable(&self) -> Option<&Unreadable> {
        self.found.as_ref()?.as_ref().err().map(Box::as_ref)
    }

    /// Returns true if there is a file of the claim from which nothing can be read.
    fn is_blind(&self) -> bool {
        self.found.is_some() && self.known().is_none()
    }

    fn set(&mut self, checkpoint: Option<Checkpoint>) {
        let (turn, found) = (Arc::clone(&self.turn), checkpoint.map(Ok));
        *self = Self { turn, found, since: Some(Instant::now()), ..Self::default() };
    }
}
