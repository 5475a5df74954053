//! MIG devices made for a claim when it is prepared, and destroyed when it is unprepared.
//!
//! Both happen at the claim's turn. Only the checkpoints show who made a GPU instance. The steps are:
//!
//! 1. The checkpoint Started, with GPU, profile and place, is written while nothing is in that place.
//! 2. The driver is ordered to make the instance.
//! 3. A scan finds the device.
//! 4. The checkpoint Completed, with the device's UUID, is written.
//!
//! So linkwise made the instance in the place of a Started checkpoint of this boot, unless an administrator made the
//! same profile in the same place between steps 1 and 2. After step 4 the UUID distinguishes the device from any other.
//! Instances do not outlive a reboot, so those of another boot's checkpoints are gone. Nothing else is ever destroyed.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::ClaimManager;
use super::prepare::PrepareError;
use crate::dra::checkpoint::Checkpoint;
use crate::dra::{MigDone, MigRequest};
use linkwise_core::claims::{MigOrder, MigOrderError, MigTask, PreparedDevice};
use linkwise_core::state::NodeState;
use linkwise_core::topology::{MigDevice, MigSlot, MigUuid};

/// The cause of a MIG device that was not made or not destroyed.
#[derive(Debug, thiserror::Error)]
pub(super) enum MigError {
    #[error(
        "cannot make the MIG device {device} ({gpu}, profile {}, memory slices from {})",
        .slot.profile_id, .slot.placement.start
    )]
    Refused { device: String, gpu: String, slot: MigSlot, source: MigOrderError },
    #[error("cannot make the MIG device {0}: the boot ID is unknown, so a later process could not tell who made it")]
    UnknownBoot(String),
    #[error("the MIG device {device} was made ({uuid}), and no scan has found it")]
    Unseen { device: String, uuid: MigUuid },
    #[error("cannot destroy the MIG device {device} ({gpu})")]
    Stays { device: String, gpu: String, source: MigOrderError },
    #[error("the MIG device {device} was destroyed, and scans still find it")]
    StillSeen { device: String },
}

impl ClaimManager {
    /// Makes the MIG devices that a checkpoint still lacks. If that fails, the claim's entry and checkpoint in memory
    /// name only the MIG devices that may exist.
    pub(super) async fn make_mig(&self, mut checkpoint: Checkpoint) -> Result<Checkpoint, PrepareError> {
        let uid = checkpoint.claim.uid.clone();
        if !checkpoint.prepared.devices.iter().any(PreparedDevice::is_unmade) {
            return Ok(checkpoint);
        }
        let (mut ordered, mut last) = (checkpoint.clone(), 0);
        for at in 0..checkpoint.prepared.devices.len() {
            let Some(device) = checkpoint.prepared.devices.get_mut(at).filter(|device| device.is_unmade()) else {
                continue;
            };
            match self.make(device).await {
                Ok((uuid, number)) => {
                    device.mig = Some(uuid);
                    last = last.max(number);
                }
                Err((error, may_exist)) => {
                    let begun = if may_exist { at + 1 } else { at };
                    let others = ordered.prepared.devices.iter_mut().skip(begun);
                    others.filter(|device| device.is_unmade()).for_each(forget_order);
                    self.put(&uid, Some(ordered)).await;
                    return Err(error.into());
                }
            }
        }
        for device in &checkpoint.prepared.devices {
            let Some(uuid) = device.made.and(device.mig.as_ref()) else { continue };
            let is_there = |state: &NodeState| {
                is_scanned_after(state, last) && state.topology().mig_devices().iter().any(|mig| mig.uuid == *uuid)
            };
            if !self.await_snapshot(is_there).await {
                return Err(MigError::Unseen { device: device.device.clone(), uuid: uuid.clone() }.into());
            }
        }
        Ok(checkpoint)
    }

    /// Destroys all MIG devices that were made for a claim.
    pub(super) async fn destroy_mig(&self, uid: &str) -> Result<(), MigError> {
        self.destroy(uid, |device| device.made.is_some()).await
    }

    /// Destroys the MIG devices that a claim's checkpoint orders without their UUIDs, and forgets these orders.
    pub(super) async fn destroy_unmade(&self, uid: &str) -> Result<(), MigError> {
        self.destroy(uid, PreparedDevice::is_unmade).await?;
        self.forget_unmade(uid).await;
        Ok(())
    }

    /// Removes from a checkpoint the orders for MIG devices that do not exist.
    pub(super) async fn forget_unmade(&self, uid: &str) {
        let Some(mut checkpoint) = self.checkpoint(uid) else { return };
        checkpoint.prepared.devices.iter_mut().filter(|device| device.is_unmade()).for_each(forget_order);
        self.put(uid, Some(checkpoint)).await;
    }

    async fn destroy(&self, uid: &str, which: impl Fn(&PreparedDevice) -> bool) -> Result<(), MigError> {
        let Some(checkpoint) = self.known(uid) else { return Ok(()) };
        // A reboot ends MIG devices. Devices in their places belong to others.
        if checkpoint.is_of_another_boot(self.settings.boot.as_deref()) {
            return Ok(());
        }
        for device in checkpoint.prepared.devices.iter().filter(|device| which(device)) {
            let Some(slot) = device.made else { continue };
            let (name, gpu) = (device.device.clone(), device.gpu.clone());
            let task = MigTask::Destroy(slot, device.mig.clone());
            let done = self.order(MigOrder { gpu: gpu.clone(), task }).await;
            let stays = |source| MigError::Stays { device: name.clone(), gpu: gpu.to_string(), source };
            let number = done.map_err(stays)?.number;
            let is_it = |mig: &MigDevice| match &device.mig {
                Some(uuid) => mig.uuid == *uuid,
                None => mig.slot() == Some(slot),
            };
            let is_gone = |state: &NodeState| {
                // Scans keep the last state of a lost GPU, though the driver has confirmed that nothing is left.
                if state.hardware().reasons(&gpu).any(|(reason, _)| reason.is_loss()) {
                    return true;
                }
                let topology = state.topology();
                let place = topology.position(&gpu);
                is_scanned_after(state, number)
                    && !topology.mig_devices().iter().any(|mig| Some(mig.parent) == place && is_it(mig))
            };
            // Until a scan shows that it is gone, the device would count as an administrator's.
            if !self.await_snapshot(is_gone).await {
                return Err(MigError::StillSeen { device: name });
            }
        }
        Ok(())
    }

    /// Makes a MIG device. Returns its UUID and the order's number, or the error and true if the device may exist.
    async fn make(&self, device: &PreparedDevice) -> Result<(MigUuid, u64), (MigError, bool)> {
        let Some(slot) = device.made.filter(|_| self.settings.boot.is_some()) else {
            return Err((MigError::UnknownBoot(device.device.clone()), false));
        };
        let made = self.order(MigOrder { gpu: device.gpu.clone(), task: MigTask::Make(slot) }).await;
        let nameless = || MigOrderError { why: "the driver made it and reported no UUID".to_owned(), may_exist: true };
        let uuid = |mut made: MigDone| made.devices.pop().map(|uuid| (uuid, made.number)).ok_or_else(nameless);
        made.and_then(uuid).map_err(|source| {
            let (may_exist, gpu) = (source.may_exist, device.gpu.to_string());
            (MigError::Refused { device: device.device.clone(), gpu, slot, source }, may_exist)
        })
    }

    async fn order(&self, order: MigOrder) -> Result<MigDone, MigOrderError> {
        let failed = |why: &str, may_exist| MigOrderError { why: why.to_owned(), may_exist };
        let Some(mig) = &self.settings.mig else { return Err(failed("there is no driver to ask", false)) };
        // A process that has just started has claims before it has an agent, and without an agent the order is refused.
        let _ = self.await_gpus().await;
        let (answer, answered) = oneshot::channel();
        let sent = mig.send(MigRequest { order, answer }).await;
        sent.map_err(|_| failed("linkwise is ending", false))?;
        answered.await.unwrap_or_else(|_| Err(failed("the NVML agent ended before it answered", true)))
    }

    /// Waits until the snapshot has the MIG devices that the driver has now: the last scan may be from before the
    /// previous process made and destroyed devices for its last claims. Each later device is made by this process,
    /// which waits for it. If the driver cannot be asked, the next caller asks again.
    pub(super) async fn await_mig(&self) {
        if self.knows_mig() {
            return;
        }
        let listing = self.is_mig_known.get_or_try_init(async || {
            if !self.await_gpus().await {
                return Err(());
            }
            let state = Arc::clone(&self.snapshot.borrow());
            for gpu in state.topology().gpus().iter().filter(|gpu| gpu.mig_enabled) {
                let listed = self.order(MigOrder { gpu: gpu.uuid.clone(), task: MigTask::List }).await;
                let number = listed.map_err(|_| ())?.number;
                if !self.await_snapshot(|state| is_scanned_after(state, number)).await {
                    return Err(());
                }
            }
            Ok(())
        });
        // After an error, the claim gets what the last scan found.
        let _ = listing.await;
    }

    /// Returns true once the MIG devices that the previous process left are known, or if there is no driver to ask.
    pub(super) fn knows_mig(&self) -> bool {
        self.is_mig_known.initialized() || self.settings.mig.is_none()
    }

    async fn await_gpus(&self) -> bool {
        self.await_snapshot(|state| !state.topology().gpus().is_empty()).await
    }

    /// Waits for a snapshot for which `wanted` holds, at most for the time that CDI specs have. Returns false if none
    /// follows.
    async fn await_snapshot(&self, wanted: impl Fn(&NodeState) -> bool) -> bool {
        let mut snapshot = self.snapshot.clone();
        let found = snapshot.wait_for(|state| wanted(state));
        matches!(timeout(self.settings.specs_timeout, found).await, Ok(Ok(_)))
    }
}

/// Returns true if a state has a scan that was made after an order. A scan from before the order may be published after
/// the order's answer.
fn is_scanned_after(state: &NodeState, order: u64) -> bool {
    state.hardware().mig_orders() >= order
}

/// Removes the order to make a MIG device from a checkpoint's device.
fn forget_order(device: &mut PreparedDevice) {
    device.made = None;
}
