//! Prepares a claim: reads it, lets the core decide, and carries that out in steps each of which is safe to die in.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::{Instant, timeout};

use super::mig::MigError;
use super::mps::MpsError;
use super::specs::{self, Specs};
use super::undo::UnprepareError;
use super::{ClaimManager, Turn};
use crate::dra::Settings;
use crate::dra::checkpoint::{Checkpoint, is_uid};
use linkwise_core::claims::{Claim, ClaimError, ClaimName, PlanInputs, Prepared, PreparedDevice, ReadClaimError, plan};
use linkwise_core::errors::chain;
use linkwise_core::publish::injection::HostDevices;
use linkwise_core::quote::quoted;
use linkwise_core::state::{ClaimedDevice, Event, NodeState, PreparedClaim, ResourceName};
use linkwise_system::{files, lock};

/// The time for which a repeated Prepare waits for the API server: it has an answer without it.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// The time for which a claim waits until this process knows the node's slices.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(1);

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
    #[error("cannot undo the claim's last preparation, with devices that the cluster has taken from it")]
    Reallocated(#[source] Box<UnprepareError>),
    #[error("linkwise is ending")]
    Ending,
    #[error("what an earlier attempt has left of the claim is still there")]
    Left(#[source] MigError),
    #[error("the claim was not prepared within {0:?}")]
    Late(Duration),
    #[error("the claim's checkpoint cannot be read, and is kept: {0}")]
    Unreadable(String),
    #[error(
        "{device} may be another claim's: the checkpoint of the claim with the UID {uid} cannot be read ({why}), and {held}"
    )]
    Doubtful { device: String, uid: String, why: String, held: String },
}

impl ClaimManager {
    /// Prepares a claim; the error is the text for the kubelet.
    pub async fn prepare(&self, asked: ClaimName) -> Result<Prepared, String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let work = timeout(limit, self.try_prepare(&asked)).await;
        let result = work.unwrap_or(Err(PrepareError::Late(limit)));
        self.tidy();
        let repeated = result.as_ref().is_ok_and(|(_, repeated)| *repeated);
        let result = result.map(|(prepared, _)| prepared).map_err(|error| chain(&error));
        let (elapsed, uid) = (start.elapsed(), &asked.uid);
        self.metrics.prepared(result.is_ok(), repeated, elapsed);
        match &result {
            Ok(prepared) => {
                let devices = prepared.names().join(",");
                tracing::info!(claim = %asked, uid, devices, repeated, ?elapsed, "claim prepared");
            }
            Err(error) => tracing::warn!(claim = %asked, uid, error, "claim not prepared"),
        }
        result
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
            // The claim keeps its entry: at a door that has changed since, this node would offer its GPUs, and refuse it.
            self.destroy_unmade(uid).await.map_err(PrepareError::Left)?;
        }
        let mut before = self.checkpoint(uid);
        if let Some(checkpoint) = &before
            && self.has_other_devices_now(checkpoint).await
        {
            self.undo(uid, &turn).await.map_err(|source| PrepareError::Reallocated(Box::new(source)))?;
            before = None;
        }
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
        let carried_out = self.carry_out(checkpoint, &turn).await;
        if carried_out.is_err() {
            match before {
                // What is still there of its MIG devices has to be known.
                Some(_) if self.destroy_unmade(uid).await.is_err() => {}
                // A pod may run with it. The checkpoint too: what one names as begun is destroyed at the next start.
                Some(before) => {
                    let _ = self.write(&before, None, &turn).await;
                    self.put(uid, Some(before)).await;
                }
                None => drop(self.undo(uid, &turn).await),
            }
        }
        Ok((carried_out?, false))
    }

    /// Asks whether the cluster has given other devices to a prepared claim. It takes devices from a claim only when no pod
    /// uses it any more: a kubelet that lost its state has not unprepared it. Without an answer the checkpoint holds.
    async fn has_other_devices_now(&self, checkpoint: &Checkpoint) -> bool {
        let read = timeout(RECHECK_TIMEOUT, self.read_claim(&checkpoint.claim)).await;
        let Ok(Ok(found)) = read else { return false };
        let now: BTreeSet<_> = self.ours(&found).map(|result| (&result.device, &result.share_id)).collect();
        let before = checkpoint.prepared.devices.iter().map(|device| (&device.device, &device.share_id));
        found.metadata.uid == checkpoint.claim.uid && !now.is_empty() && now != before.collect()
    }

    /// Reads the claim, and has it planned and entered into the ledger. The devices of claims that are gone are taken from
    /// them first.
    async fn reserve(&self, asked: &ClaimName) -> Result<Checkpoint, PrepareError> {
        let claim = self.read_claim(asked).await;
        let claim = claim.map_err(|source| PrepareError::Query { claim: asked.to_string(), source })?;
        if claim.asks_for_mig() {
            self.await_mig().await;
        }
        let (claim, before) = (Arc::new(claim), self.checkpoint(&asked.uid));
        loop {
            let prepared = self.plan(asked, Arc::clone(&claim)).await.ok_or(PrepareError::Ending)?;
            let taken = match prepared {
                Ok(prepared) => {
                    let checkpoint = Checkpoint::started(self.settings.boot.clone(), asked.clone(), prepared);
                    let checkpoint = checkpoint.after(before.as_ref());
                    self.set(&asked.uid, Some(checkpoint.clone()));
                    let Some(doubt) = self.doubt(&checkpoint) else { return Ok(checkpoint) };
                    // As it was: nothing is done yet.
                    self.put(&asked.uid, before).await;
                    return Err(doubt);
                }
                Err(taken) => taken,
            };
            let mut any_gone = false;
            for holder in taken.holders() {
                any_gone |= self.release_gone(holder).await;
            }
            if !any_gone {
                return Err(taken.into());
            }
        }
    }

    /// Has the node's loop plan a claim, by the state as it is then, and enter it; `None` if the node is ending.
    async fn plan(&self, asked: &ClaimName, claim: Arc<Claim>) -> Option<Result<Prepared, ClaimError>> {
        let (settings, host) = (Arc::clone(&self.settings), self.settings.host_devices.borrow().clone());
        let (common_shm, asked) = (self.with_common_shm(), asked.clone());
        let planned = self.book.give(move |state| {
            let prepared = plan(&claim, &asked, facts(&settings, state, &host, &common_shm))?;
            let entry = PreparedClaim { claim: asked.clone(), prepared: prepared.clone(), is_of_another_boot: false };
            Ok((Event::Prepared(state.ledger().claims_with(&asked.uid, Some(entry))), prepared))
        });
        planned.await
    }

    /// Prepares a claim as its checkpoint says. Two things last longer than a process and are undone by the next one: the
    /// MIG devices and the MPS control daemon of a claim that asks for any. For such a claim alone there is a
    /// checkpoint from the beginning on, and the names that it has resolve from then on: the process after this one may
    /// give them to the kubelet as they are, if it is of an older release. Of any other claim nothing is done before its
    /// last step but its CDI spec, and one without a checkpoint is removed.
    async fn carry_out(&self, checkpoint: Checkpoint, turn: &Turn) -> Result<Prepared, PrepareError> {
        let uid = checkpoint.claim.uid.clone();
        let asks_others =
            checkpoint.prepared.mps.is_some() || checkpoint.prepared.devices.iter().any(PreparedDevice::is_unmade);
        let names = specs::of_names(&checkpoint.prepared);
        if asks_others && let Err(error) = self.write(&checkpoint, Some(names), turn).await {
            self.forget_unmade(&uid).await;
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
        // The containers of a claim keep the metadata with which they start: a process that has just begun waits for its
        // slices.
        let mut published = self.settings.published.clone();
        let _ = timeout(PUBLISHED_WITHIN, published.wait_for(Option::is_some)).await;
        let spec = self.await_spec(&checkpoint).await?;
        let checkpoint = checkpoint.completed();
        self.write(&checkpoint, Some(spec), turn).await?;
        self.put(&uid, Some(checkpoint.clone())).await;
        Ok(checkpoint.prepared)
    }

    /// Writes the specs of a claim, if they are given, and then its checkpoint.
    async fn write(&self, checkpoint: &Checkpoint, specs: Option<Specs>, turn: &Turn) -> Result<(), PrepareError> {
        let (store, checkpoint) = (Arc::clone(&self.store), checkpoint.clone());
        let folder = self.settings.cdi_folder.clone();
        let written = files::blocking_with(Arc::clone(turn), move || {
            let written = specs.map_or(Ok(()), |specs| specs::write(&folder, &checkpoint.claim.uid, &specs));
            Ok(match written {
                Ok(()) => store.write(&checkpoint).map_err(|source| PrepareError::Checkpoint { source }),
                Err(source) => Err(PrepareError::Spec { source }),
            })
        });
        written.await.map_err(|source| PrepareError::Checkpoint { source })?
    }

    /// The reason why a device of a claim may be another claim's of which nothing can be read: the kubelet lists it, or
    /// cannot be asked.
    pub(super) fn doubt(&self, checkpoint: &Checkpoint) -> Option<PrepareError> {
        let (uid, why) = {
            let slots = lock(&self.slots);
            let (uid, slot) = slots.iter().find(|(_, slot)| slot.is_blind())?;
            (uid.clone(), slot.unreadable()?.why.clone())
        };
        let devices = &checkpoint.prepared.devices;
        if !self.is_known() {
            let (device, held) = (devices.first()?.device.clone(), "the kubelet cannot be asked".to_owned());
            return Some(PrepareError::Doubtful { device, uid, why, held });
        }
        let has = |held: &ClaimedDevice| devices.iter().any(|device| !device.admin && device.device == held.device);
        let listed = self.unaccounted().find(has)?;
        let held = format!("the kubelet lists it with the claim {}", listed.claim);
        Some(PrepareError::Doubtful { device: listed.device, uid, why, held })
    }
}

impl PrepareError {
    /// Returns true if the claim that was prepared under this UID no longer exists.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Query { source: ReadClaimError::NotFound, .. } | Self::Claim(ClaimError::OtherUid { .. }))
    }
}

/// The facts that a plan is made from.
pub(super) fn facts<'a>(
    settings: &'a Settings,
    state: &'a NodeState,
    host: &'a HostDevices,
    common_shm: &'a BTreeSet<ResourceName>,
) -> PlanInputs<'a> {
    let Settings { pool, injection, makes_mig, .. } = settings;
    PlanInputs { pool, state, injection, host, makes_mig: *makes_mig, common_shm }
}
