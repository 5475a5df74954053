//! Prepares a claim: reads it, lets the core plan it, and carries the plan out.

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

/// The longest time that a repeated Prepare waits for the API server, whose answer it can do without.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest time that a claim waits until this process knows the node's slices.
const PUBLISHED_TIMEOUT: Duration = Duration::from_secs(1);

/// The cause of a claim that was not prepared.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrepareError {
    #[error("{} is not the UID of a claim", quoted(.0))]
    NoUid(String),
    #[error(
        "this node's GPUs go through the device plugin (linkwise.dra.gpus: none), and the claim was not prepared \
         before; delete the pod and its claim, or set dra.gpus to all"
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
    #[error("cannot write the CDI spec of the claim: no scan of the host has found {0} yet")]
    NoDevices(String),
    #[error("cannot undo the claim's previous preparation, whose devices the cluster has taken from it")]
    Reallocated(#[source] Box<UnprepareError>),
    #[error("linkwise is ending")]
    Ending,
    #[error("cannot clean up after an earlier attempt to prepare the claim")]
    Left(#[source] MigError),
    #[error("the claim was not prepared within {0:?}")]
    Late(Duration),
    #[error("cannot read the checkpoint of the claim, keeping it: {0}")]
    Unreadable(String),
    #[error(
        "device {device} may belong to another claim: cannot read the checkpoint of the claim with the UID {uid} \
         ({why}), and {reason}"
    )]
    Doubtful { device: String, uid: String, why: String, reason: String },
}

impl ClaimManager {
    /// Prepares a claim; the error is the text for the kubelet.
    pub async fn prepare(&self, name: ClaimName) -> Result<Prepared, String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let work = timeout(limit, self.try_prepare(&name)).await;
        let result = work.unwrap_or(Err(PrepareError::Late(limit)));
        self.tidy();
        let repeated = result.as_ref().is_ok_and(|(_, repeated)| *repeated);
        let result = result.map(|(prepared, _)| prepared).map_err(|error| chain(&error));
        let (elapsed, uid) = (start.elapsed(), &name.uid);
        self.metrics.prepared(result.is_ok(), repeated, elapsed);
        match &result {
            Ok(prepared) => {
                let devices = prepared.names().join(",");
                tracing::info!(claim = %name, uid, devices, repeated, ?elapsed, "claim prepared");
            }
            Err(error) => tracing::warn!(claim = %name, uid, error, "cannot prepare claim"),
        }
        result
    }

    async fn try_prepare(&self, name: &ClaimName) -> Result<(Prepared, bool), PrepareError> {
        let uid = &name.uid;
        if !is_uid(uid) {
            return Err(PrepareError::NoUid(uid.clone()));
        }
        let turn = self.turn(uid).await;
        // No version can read a torn checkpoint. The kubelet has named the claim, so it is prepared again.
        if let Some(unreadable) = self.read_again(uid, &turn).await.filter(|unreadable| !unreadable.is_torn) {
            return Err(PrepareError::Unreadable(unreadable.why));
        }
        if self.checkpoint(uid).is_some_and(|checkpoint| checkpoint.is_half_made(self.settings.boot.as_deref())) {
            // The claim keeps its entry in the ledger. Without it, if the node's door has changed, this node would
            // offer the claim's GPUs and refuse the claim.
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
            && self.write_if_intact(checkpoint, &turn).await
        {
            self.await_mps(checkpoint).await?;
            return Ok((checkpoint.prepared.clone(), true));
        }
        let checkpoint = match self.reserve(name).await {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                if before.is_some_and(|before| error.is_gone() && self.is_unused(&before)) {
                    // If that fails, the claim stays prepared, and the next sweep tries again.
                    let _ = self.undo(uid, &turn).await;
                }
                return Err(error);
            }
        };
        let carried_out = self.carry_out(checkpoint, &turn).await;
        if carried_out.is_err() {
            match before {
                // The entry stays, because it has to name the MIG devices that still exist.
                Some(_) if self.destroy_unmade(uid).await.is_err() => {}
                // A pod may run with the previous preparation, so it is restored. Its checkpoint is restored, too: MIG
                // devices that a checkpoint names as begun are destroyed at the next start.
                Some(before) => {
                    let _ = self.write(&before, None, &turn).await;
                    self.put(uid, Some(before)).await;
                }
                None => drop(self.undo(uid, &turn).await),
            }
        }
        Ok((carried_out?, false))
    }

    /// Asks the API server whether a prepared claim has other devices now. The cluster takes devices from a claim only
    /// when no pod uses it any more. A kubelet that lost its state does not unprepare such a claim. Without an answer
    /// the checkpoint counts.
    async fn has_other_devices_now(&self, checkpoint: &Checkpoint) -> bool {
        let read = timeout(RECHECK_TIMEOUT, self.read_claim(&checkpoint.claim)).await;
        let Ok(Ok(found)) = read else { return false };
        let now: BTreeSet<_> = self.ours(&found).map(|result| (&result.device, &result.share_id)).collect();
        let before = checkpoint.prepared.devices.iter().map(|device| (&device.device, &device.share_id));
        found.metadata.uid == checkpoint.claim.uid && !now.is_empty() && now != before.collect()
    }

    /// Reads the claim, and has it planned and entered into the ledger. Claims that are gone and hold its devices are
    /// undone first.
    async fn reserve(&self, name: &ClaimName) -> Result<Checkpoint, PrepareError> {
        let claim = self.read_claim(name).await;
        let claim = claim.map_err(|source| PrepareError::Query { claim: name.to_string(), source })?;
        if claim.has_mig_device() {
            self.await_mig().await;
        }
        let (claim, before) = (Arc::new(claim), self.checkpoint(&name.uid));
        loop {
            let prepared = self.plan(name, Arc::clone(&claim)).await.ok_or(PrepareError::Ending)?;
            let error = match prepared {
                Ok(prepared) => {
                    let checkpoint = Checkpoint::started(self.settings.boot.clone(), name.clone(), prepared);
                    let checkpoint = checkpoint.after(before.as_ref());
                    self.set(&name.uid, Some(checkpoint.clone()));
                    let Some(doubtful) = self.doubtful_device(&checkpoint) else { return Ok(checkpoint) };
                    // Nothing was done for the claim yet, so its previous entry is restored.
                    self.put(&name.uid, before).await;
                    return Err(doubtful);
                }
                Err(error) => error,
            };
            let mut any_gone = false;
            for holder in error.holders() {
                any_gone |= self.release_gone(holder).await;
            }
            if !any_gone {
                return Err(error.into());
            }
        }
    }

    /// Has the node's loop plan a claim by its current state, and enter it into the ledger; `None` if the node is
    /// ending.
    async fn plan(&self, name: &ClaimName, claim: Arc<Claim>) -> Option<Result<Prepared, ClaimError>> {
        let (settings, host) = (Arc::clone(&self.settings), self.settings.host_devices.borrow().clone());
        let (common_shm, name) = (self.with_common_shm(), name.clone());
        let planned = self.ledger.give(move |state| {
            let prepared = plan(&claim, &name, plan_inputs(&settings, state, &host, &common_shm))?;
            let entry = PreparedClaim { claim: name.clone(), prepared: prepared.clone(), is_of_another_boot: false };
            Ok((Event::Prepared(state.ledger().claims_with(&name.uid, Some(entry))), prepared))
        });
        planned.await
    }

    /// Prepares a claim as its checkpoint says. MIG devices and an MPS control daemon outlast this process, and the
    /// next one has to undo them. A claim that needs them therefore has a checkpoint from the beginning. Its CDI
    /// devices resolve from then on, too, because the next process may be of an older release, which gives them to the
    /// kubelet as they are. For any other claim, only a CDI spec outlasts a process that is killed before the last
    /// step, and a spec without a checkpoint is removed.
    async fn carry_out(&self, checkpoint: Checkpoint, turn: &Turn) -> Result<Prepared, PrepareError> {
        let uid = checkpoint.claim.uid.clone();
        let outlasts_process =
            checkpoint.prepared.mps.is_some() || checkpoint.prepared.devices.iter().any(PreparedDevice::is_unmade);
        let names = specs::of_names(&checkpoint.prepared);
        if outlasts_process && let Err(error) = self.write(&checkpoint, Some(names), turn).await {
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
            // `devices` is not dropped, because the outcome of an order to the driver has to be recorded.
            Either::Right((mps, devices)) => {
                let devices = devices.await;
                mps?;
                devices?
            }
        };
        // A container keeps the metadata with which it starts, so a process that has just begun waits for the slices.
        let mut published = self.settings.published.clone();
        let _ = timeout(PUBLISHED_TIMEOUT, published.wait_for(Option::is_some)).await;
        let spec = self.await_spec(&checkpoint).await?;
        let checkpoint = checkpoint.completed();
        self.write(&checkpoint, Some(spec), turn).await?;
        self.put(&uid, Some(checkpoint.clone())).await;
        Ok(checkpoint.prepared)
    }

    /// Writes the given specs of a claim, if any, and then its checkpoint.
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

    /// The error for a device that may belong to another claim, whose checkpoint cannot be read: the kubelet lists the
    /// device with that claim, or cannot be asked.
    fn doubtful_device(&self, checkpoint: &Checkpoint) -> Option<PrepareError> {
        let (uid, why) = {
            let slots = lock(&self.slots);
            let (uid, slot) = slots.iter().find(|(_, slot)| slot.is_blind())?;
            (uid.clone(), slot.unreadable()?.why.clone())
        };
        let devices = &checkpoint.prepared.devices;
        if !self.knows_lists() {
            let (device, reason) = (devices.first()?.device.clone(), "the kubelet cannot be asked".to_owned());
            return Some(PrepareError::Doubtful { device, uid, why, reason });
        }
        let has = |held: &ClaimedDevice| devices.iter().any(|device| !device.admin && device.device == held.device);
        let listed = self.unaccounted().find(has)?;
        let reason = format!("the kubelet lists it with the claim {}", listed.claim);
        Some(PrepareError::Doubtful { device: listed.device, uid, why, reason })
    }
}

impl PrepareError {
    /// Returns true if the claim that was prepared under this UID no longer exists.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Query { source: ReadClaimError::NotFound, .. } | Self::Claim(ClaimError::OtherUid { .. }))
    }
}

/// The inputs of a plan.
pub(super) fn plan_inputs<'a>(
    settings: &'a Settings,
    state: &'a NodeState,
    host: &'a HostDevices,
    common_shm: &'a BTreeSet<ResourceName>,
) -> PlanInputs<'a> {
    let Settings { pool, injection, makes_mig, .. } = settings;
    PlanInputs { pool, state, injection, host, makes_mig: *makes_mig, common_shm }
}
