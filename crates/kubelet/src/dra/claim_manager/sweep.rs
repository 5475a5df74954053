//! Sweeps: undoes claims that are half made, or over and never unprepared by the kubelet, and renews CDI specs.
//!
//! A checkpoint that cannot be read (a disk that fails, a later version's file, a file torn by a crash of the machine)
//! stays until the kubelet unprepares its claim, or the cluster and the kubelet's list show that the claim is over. A
//! new preparation replaces a torn file. The GPUs, MIG devices and MPS control daemons in the readable parts stay
//! held. If nothing can be read, the kubelet's list says which devices the claim has.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::{ClaimManager, Slot, Turn, specs};
use crate::dra::checkpoint::Checkpoint;
use linkwise_core::claims::{Claim, ClaimName, ReadClaimError};
use linkwise_core::errors::chain;
use linkwise_core::state::{ClaimedDevice, NodeState};
use linkwise_system::{files, lock, or_never};

/// The longest time that a claim waits for the turn of another claim that has its devices: a sweep or an Unprepare
/// writes and removes a few files. Without a limit, two claims could wait for each other for ever.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);

/// The time between two sweeps while DRA is off and claims are left: the kubelet may not be able to unprepare them.
const OFF_SWEEP_INTERVAL: Duration = Duration::from_secs(2);

/// The log's messages for a claim that is over: it was undone, it could not be undone.
const GONE: [&str; 2] = ["claim unprepared: it no longer exists", "cannot unprepare a claim that no longer exists"];

/// The log's messages for a claim whose MIG devices were being made when linkwise was killed: they were destroyed, they
/// could not be destroyed.
const HALF_MADE: [&str; 2] =
    ["destroyed the half made MIG devices of a claim", "cannot destroy the half made MIG devices of a claim"];

/// Sweeps the claims until `stop`. Finishes the undoing of a claim that has begun by then.
pub(in crate::dra) async fn keep_sweeping(manager: &ClaimManager, stop: &CancellationToken) {
    let (settings, mut snapshot) = (&manager.settings, manager.snapshot.clone());
    // After `listed_within`, the kubelet's lists have the claims of the previous process.
    let mut pause = settings.listed_within.min(settings.sweep);
    loop {
        let is_seen = |state: &NodeState| !state.topology().gpus().is_empty();
        let (was_known, was_seen) = {
            let state = snapshot.borrow();
            (state.ledger().lists_all(), is_seen(&state))
        };
        manager.sweep(stop).await;
        // Without the kubelet's list, a sweep undoes no claim that is gone; without the driver, it destroys no MIG
        // device. The next sweep follows when the list or the driver is there.
        let news = |state: &Arc<NodeState>| !was_known && state.ledger().lists_all() || !was_seen && is_seen(state);
        let news = or_never(snapshot.wait_for(news));
        let limit = if manager.is_off() && manager.has_checkpoints() { pause.min(OFF_SWEEP_INTERVAL) } else { pause };
        match stop.run_until_cancelled(tokio::time::timeout(limit, news)).await {
            None => return,
            Some(Err(_)) if limit == pause => pause = settings.sweep,
            Some(_) => {}
        }
    }
}

impl ClaimManager {
    /// Undoes claims that are gone or half made, and renews CDI specs.
    async fn sweep(&self, stop: &CancellationToken) {
        self.sweep_unreadable().await;
        if self.checkpoints().iter().any(Checkpoint::has_mig)
            && stop.run_until_cancelled(self.await_mig()).await.is_none()
        {
            return;
        }
        for checkpoint in self.checkpoints() {
            let uid = checkpoint.claim.uid.clone();
            // The API server is asked before the claim's turn is taken, because the kubelet must not wait for the
            // answer. A UID that is gone does not come back.
            let Some(is_gone) = stop.run_until_cancelled(self.is_gone(&checkpoint)).await else { return };
            let Some(turn) = stop.run_until_cancelled(self.turn(&uid)).await else { return };
            if self.checkpoint(&uid).as_ref() != Some(&checkpoint) {
                continue;
            }
            if is_gone {
                self.sweep_one(&checkpoint.claim, &turn, GONE).await;
            } else if checkpoint.is_half_made(self.settings.boot.as_deref()) && !self.is_off() {
                // The kubelet has no answer for this claim, and may ask again. While DRA is off, a swept claim would
                // then be refused.
                self.sweep_one(&checkpoint.claim, &turn, HALF_MADE).await;
            } else if checkpoint.is_completed_in(self.settings.boot.as_deref()) {
                self.renew_spec(&checkpoint, &turn).await;
            }
        }
        let folder = self.settings.cdi_folder.clone();
        let with_spec = files::blocking(move || Ok(specs::claims(&folder))).await.unwrap_or_default();
        let state = Arc::clone(&self.snapshot.borrow());
        // A spec without a checkpoint may be that of a container's claim, whose checkpoint is in another state folder
        // of this boot. The kubelet's list names the claims of containers.
        let may_be_used = |uid: &String| {
            let mut names = state.ledger().claimed_lately().flat_map(|held| &held.cdi_names);
            !state.ledger().lists_all()
                || names.any(|name| name.strip_prefix(uid.as_str()).is_some_and(|rest| rest.starts_with('-')))
        };
        let with_spec = with_spec.into_iter().filter(|uid| !may_be_used(uid));
        for uid in with_spec.chain(state.ledger().claims().map(|(claim, _)| claim.uid.clone())) {
            if let Some(turn) = self.idle_turn(&uid)
                && lock(&self.slots).get(&uid).is_none_or(|slot| slot.found.is_none())
            {
                let _ = self.undo(&uid, &turn).await;
            }
        }
        self.tidy();
    }

    /// Undoes a claim, and logs one of the messages; returns true if it is undone.
    async fn sweep_one(&self, claim: &ClaimName, turn: &Turn, [done, failed]: [&str; 2]) -> bool {
        let (result, uid) = (self.undo_in_time(&claim.uid, turn).await, &claim.uid);
        self.metrics.swept(result.is_ok());
        match &result {
            Ok(()) => tracing::info!(%claim, uid, "{done}"),
            Err(error) => tracing::warn!(%claim, uid, error = chain(error), "{failed}"),
        }
        result.is_ok()
    }

    /// Undoes a claim if it is gone; returns true if it is undone.
    pub(super) async fn release_gone(&self, holder: &ClaimName) -> bool {
        let Ok(turn) = timeout(TURN_TIMEOUT, self.turn(&holder.uid)).await else { return false };
        match self.checkpoint(&holder.uid) {
            Some(checkpoint) if self.is_gone(&checkpoint).await => self.sweep_one(&checkpoint.claim, &turn, GONE).await,
            Some(_) => false,
            // Sweeps undo a claim whose checkpoint cannot be read. A claim that only the ledger has was given up before
            // anything was done for it.
            None => self.known(&holder.uid).is_none() && self.undo_in_time(&holder.uid, &turn).await.is_ok(),
        }
    }

    /// Returns true if the cluster no longer has the claim or has taken its devices from it, and no container of this
    /// node has them. If DRA is off and there is no client of the API server, only the containers count.
    async fn is_gone(&self, checkpoint: &Checkpoint) -> bool {
        if self.is_off() && self.settings.read_claim.is_none() {
            return self.note_unlisted(&checkpoint.claim.uid, self.is_unused(checkpoint));
        }
        let is_over = match self.read_claim(&checkpoint.claim).await {
            Err(ReadClaimError::NotFound) => true,
            Err(ReadClaimError::Failed(_)) => false,
            Ok(found) if found.metadata.uid != checkpoint.claim.uid => true,
            // The claim's pod has ended, but a kubelet that was reinstalled has not unprepared the claim.
            Ok(found) => !self.is_allocated(&found, checkpoint),
        };
        is_over && self.is_unused(checkpoint)
    }

    /// Notes whether a claim is unused at this sweep. Returns true if it was unused at every sweep for `listed_within`:
    /// the kubelet could be asked, and listed no container with it. A kubelet that starts lists no pod at first.
    fn note_unlisted(&self, uid: &str, is_unused: bool) -> bool {
        let now = Instant::now();
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get_mut(uid) else { return false };
        slot.unlisted = is_unused.then(|| slot.unlisted.unwrap_or(now));
        slot.unlisted.is_some_and(|since| now.saturating_duration_since(since) >= self.settings.listed_within)
    }

    /// Returns true if the kubelet lists no container with a checkpoint's devices; false while the kubelet cannot be
    /// asked or has just started, and while its list may be older than the claim's preparation. Containers count,
    /// because a claim that was deleted by force is gone before its pod is.
    pub(super) fn is_unused(&self, checkpoint: &Checkpoint) -> bool {
        let state = self.snapshot.borrow().clone();
        let named = checkpoint.claim.to_string();
        let since = lock(&self.slots).get(&checkpoint.claim.uid).and_then(|slot| slot.since);
        let mut listed = state.ledger().claimed_lately();
        state.ledger().lists_all()
            && since.is_none_or(|since| since.elapsed() >= self.settings.listed_within)
            && !listed.any(|held| {
                let has = |device: &str| checkpoint.prepared.devices.iter().any(|prepared| prepared.device == device);
                held.claim == named && held.driver == self.settings.driver && has(&held.device)
            })
    }

    /// Returns true if any of a checkpoint's devices is still the claim's.
    fn is_allocated(&self, claim: &Claim, checkpoint: &Checkpoint) -> bool {
        self.ours(claim).any(|result| checkpoint.prepared.devices.iter().any(|device| device.device == result.device))
    }

    /// Reads unreadable checkpoints again. Undoes the claims that are over: the cluster and the kubelet no longer
    /// have them. If the claim's name cannot be read, it is over once the kubelet has listed no claim but those with
    /// readable checkpoints for `listed_within`.
    async fn sweep_unreadable(&self) {
        let unreadable = |(uid, slot): (&String, &Slot)| slot.unreadable().map(|_| uid.clone());
        let uids: Vec<String> = lock(&self.slots).iter().filter_map(unreadable).collect();
        for uid in uids {
            let is_over = match self.known(&uid) {
                Some(parts) => self.is_gone(&parts).await,
                None => self.note_unlisted(&uid, self.knows_lists() && self.unaccounted().next().is_none()),
            };
            let turn = self.turn(&uid).await;
            if self.read_again(&uid, &turn).await.is_some() && is_over {
                let claim = self
                    .known(&uid)
                    .map_or_else(|| ClaimName { uid: uid.clone(), ..ClaimName::default() }, |known| known.claim);
                self.sweep_one(&claim, &turn, GONE).await;
            }
        }
    }

    /// The devices of this driver's claims in the kubelet's lists whose claim has no checkpoint that can be read.
    pub(super) fn unaccounted(&self) -> impl Iterator<Item = ClaimedDevice> {
        let known: Vec<String> =
            lock(&self.slots).values().filter_map(Slot::known).map(|checkpoint| checkpoint.claim.to_string()).collect();
        let state = self.snapshot.borrow().clone();
        let listed: Vec<ClaimedDevice> = state.ledger().claimed_lately().cloned().collect();
        let driver = self.settings.driver.clone();
        listed.into_iter().filter(move |held| held.driver == driver && !known.contains(&held.claim))
    }

    /// Returns true if the kubelet could be asked for its lists at the last attempt.
    pub(super) fn knows_lists(&self) -> bool {
        self.snapshot.borrow().ledger().is_known()
    }
}
