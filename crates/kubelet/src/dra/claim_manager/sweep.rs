//! Sweeps: undoes claims that are over and that the kubelet never unprepared, and restores CDI specs that are missing.
//!
//! A checkpoint that cannot be read (a disk that fails, a later version's file, a file torn by a crash of the machine)
//! stays until the kubelet unprepares its claim, or the claim is over by the cluster and the kubelet's list. It holds the
//! GPUs, MIG devices and MPS control daemons that can be read in it. Where nothing can be read, the kubelet's list says
//! which devices its claim has.

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

/// The time that a claim waits for the turn of one in its way: a sweep or an Unprepare writes and removes a few files.
/// Without a limit two claims in each other's way would wait for ever.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);

/// The time between two searches for claims that are over while DRA is off: the kubelet's list alone tells.
const OFF_SWEEP: Duration = Duration::from_secs(2);

/// The words of the log for a claim that was undone because it is over, and for one that could not be.
const GONE: [&str; 2] = ["claim unprepared: it no longer exists", "a claim that no longer exists cannot be unprepared"];

/// The words of the log for a claim of which MIG devices were made before linkwise was killed.
const HALF_MADE: [&str; 2] = [
    "MIG devices destroyed of a claim that an earlier process did not prepare to its end",
    "half made MIG devices of a claim cannot be destroyed",
];

/// Sweeps the claims until `stop`. A claim that is being undone then is undone.
pub(in crate::dra) async fn keep_sweeping(manager: &ClaimManager, stop: &CancellationToken) {
    let (settings, mut snapshot) = (&manager.settings, manager.snapshot.clone());
    // Lists tell of the claims of the last process from then on.
    let mut pause = settings.listed_within.min(settings.sweep);
    loop {
        let is_seen = |state: &NodeState| !state.topology().gpus().is_empty();
        let (was_known, was_seen) = {
            let state = snapshot.borrow();
            (state.ledger().lists_all(), is_seen(&state))
        };
        manager.sweep(stop).await;
        // A sweep without the kubelet's list undoes nothing, one without the driver destroys no MIG device: the next
        // follows when there is one.
        let news = |state: &Arc<NodeState>| !was_known && state.ledger().lists_all() || !was_seen && is_seen(state);
        let known = or_never(snapshot.wait_for(news));
        // The end of a claim may reach nobody while DRA is off.
        let limit = if manager.is_off() && manager.has_checkpoints() { pause.min(OFF_SWEEP) } else { pause };
        match stop.run_until_cancelled(tokio::time::timeout(limit, known)).await {
            None => return,
            Some(Err(_)) if limit == pause => pause = settings.sweep,
            Some(_) => {}
        }
    }
}

impl ClaimManager {
    /// Undoes claims that are gone, and restores CDI specs of claims that are missing.
    async fn sweep(&self, stop: &CancellationToken) {
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
                self.sweep_one(&checkpoint.claim, &turn, GONE).await;
            } else if checkpoint.is_half_made(self.settings.boot.as_deref()) && !self.is_off() {
                // The kubelet was told nothing, and asks again, if at all. Where DRA is off, it would be refused then.
                self.sweep_one(&checkpoint.claim, &turn, HALF_MADE).await;
            } else if checkpoint.is_completed_in(self.settings.boot.as_deref()) {
                self.renew_spec(&checkpoint, &turn).await;
            }
        }
        let folder = self.settings.cdi_folder.clone();
        let with_spec = files::blocking(move || Ok(specs::claims(&folder))).await.unwrap_or_default();
        let state = Arc::clone(&self.snapshot.borrow());
        // A spec without a checkpoint may be that of a running container: of another state folder of this boot. The
        // kubelet's list names the claims that containers have.
        let is_used = |uid: &String| {
            let mut names = state.ledger().claimed_lately().flat_map(|held| &held.cdi_names);
            !state.ledger().lists_all()
                || names.any(|name| name.strip_prefix(uid.as_str()).is_some_and(|rest| rest.starts_with('-')))
        };
        let with_spec = with_spec.into_iter().filter(|uid| !is_used(uid));
        for uid in with_spec.chain(state.ledger().claims().map(|(claim, _)| claim.uid.clone())) {
            if let Some(turn) = self.idle_turn(&uid)
                && lock(&self.slots).get(&uid).is_none_or(|slot| slot.found.is_none())
            {
                let _ = self.undo(&uid, &turn).await;
            }
        }
        self.tidy();
    }

    /// Undoes a claim that needs it; returns true once it is done.
    async fn sweep_one(&self, claim: &ClaimName, turn: &Turn, [done, failed]: [&str; 2]) -> bool {
        let (result, uid) = (self.undo_in_time(&claim.uid, turn).await, &claim.uid);
        self.metrics.swept(result.is_ok());
        match &result {
            Ok(()) => tracing::info!(%claim, uid, "{done}"),
            Err(error) => tracing::warn!(%claim, uid, error = chain(error), "{failed}"),
        }
        result.is_ok()
    }

    /// Undoes a claim if it is gone; returns true once it is out of the way.
    pub(super) async fn release_gone(&self, holder: &ClaimName) -> bool {
        let Ok(turn) = timeout(TURN_TIMEOUT, self.turn(&holder.uid)).await else { return false };
        match self.checkpoint(&holder.uid) {
            Some(checkpoint) if self.is_gone(&checkpoint).await => self.sweep_one(&checkpoint.claim, &turn, GONE).await,
            Some(_) => false,
            // One that cannot be read is the sweeps'. One that only the ledger has was given up before anything was done.
            None => self.known(&holder.uid).is_none() && self.undo_in_time(&holder.uid, &turn).await.is_ok(),
        }
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
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get_mut(uid) else { return false };
        slot.unlisted = is_unused.then(|| slot.unlisted.unwrap_or(now));
        slot.unlisted.is_some_and(|since| now.saturating_duration_since(since) >= self.settings.listed_within)
    }

    /// Returns true if the kubelet lists no container with a checkpoint's devices. While it cannot be asked, or has
    /// just started, there may be one, and where it was asked before the claim was prepared: a claim that was deleted by
    /// force is gone before its pod is.
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

    /// Reads unreadable checkpoints again. Undoes those of claims that are over: the cluster and the kubelet have no such
    /// claim, or, where the claim's name cannot be read, the kubelet has listed no claim but those with checkpoints for
    /// as long as its lists may be late.
    async fn sweep_unreadable(&self) {
        let unreadable = |(uid, slot): (&String, &Slot)| slot.unreadable().map(|_| uid.clone());
        let uids: Vec<String> = lock(&self.slots).iter().filter_map(unreadable).collect();
        for uid in uids {
            let is_over = match self.known(&uid) {
                Some(parts) => self.is_gone(&parts).await,
                None => self.is_long_unlisted(&uid, self.is_known() && self.unaccounted().next().is_none()),
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

    pub(super) fn is_known(&self) -> bool {
        self.snapshot.borrow().ledger().is_known()
    }
}
