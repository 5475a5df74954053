//! MIG devices made for a claim when it is prepared, and destroyed when it is unprepared.
//!
//! Called at the claim's turn. Who made a GPU instance is known by the checkpoints alone. The order
//! of steps: checkpoint Started with GPU, profile and place, written while nothing is in that place; the order to make
//! it; the device is in a scan; checkpoint Completed with its UUID. So an instance in a place that a Started checkpoint
//! of this boot names was made by the process that wrote it, and by nobody between these two steps but an administrator
//! who makes the same profile in the same place at the same moment. After Completed the UUID tells it from any other.
//! Instances do not outlive a reboot: those of another boot's checkpoints are gone. Nothing else is ever destroyed.

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
    #[error("cannot make the MIG device {device} ({gpu}, profile {profile}, memory slices from {start})", profile = slot.profile_id, start = slot.placement.start)]
    Refused { device: String, gpu: String, slot: MigSlot, source: MigOrderError },
    #[error(
        "cannot make the MIG device {0}: without the kernel's name of this boot nobody would know later whose it is"
    )]
    UnknownBoot(String),
    #[error("the MIG device {device} was made ({uuid}), and no scan has found it")]
    Unseen { device: String, uuid: MigUuid },
    #[error("cannot destroy the MIG device {device} ({gpu})")]
    Stays { device: String, gpu: String, source: MigOrderError },
    #[error("the MIG device {device} was destroyed, and scans still find it")]
    StillSeen { device: String },
}

impl ClaimManager {
    /// Makes the MIG devices that a checkpoint still lacks. Where that fails, the checkpoint that is kept names only
    /// those that may be there.
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
                    others.filter(|device| device.is_unmade()).for_each(forget);
                    self.put(&uid, Some(ordered)).await;
                    return Err(error.into());
                }
            }
        }
        for device in &checkpoint.prepared.devices {
            let Some(uuid) = device.made.and(device.mig.as_ref()) else { continue };
            let is_there = |state: &NodeState| {
                knows(state, last) && state.topology().mig_devices().iter().any(|mig| mig.uuid == *uuid)
            };
            if !self.comes(is_there).await {
                return Err(MigError::Unseen { device: device.device.clone(), uuid: uuid.clone() }.into());
            }
        }
        Ok(checkpoint)
    }

    /// Destroys all MIG devices that were made for a claim.
    pub(super) async fn destroy_mig(&self, uid: &str) -> Result<(), MigError> {
        self.destroy(uid, |device| device.made.is_some()).await
    }

    /// Destroys the MIG devices of a claim that its checkpoint does not have.
    pub(super) async fn destroy_unmade(&self, uid: &str) -> Result<(), MigError> {
        self.destroy(uid, PreparedDevice::is_unmade).await?;
        self.forget_unmade(uid).await;
        Ok(())
    }

    /// Takes the MIG devices out of a checkpoint that were never ordered.
    pub(super) async fn forget_unmade(&self, uid: &str) {
        let Some(mut checkpoint) = self.checkpoint(uid) else { return };
        checkpoint.prepared.devices.iter_mut().filter(|device| device.is_unmade()).for_each(forget);
        self.put(uid, Some(checkpoint)).await;
    }

    async fn destroy(&self, uid: &str, which: impl Fn(&PreparedDevice) -> bool) -> Result<(), MigError> {
        let Some(checkpoint) = self.known(uid) else { return Ok(()) };
        // They went with the reboot; what is in their places is somebody else's.
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
                // Scans keep what they saw last of a GPU that is lost, and the driver has said that nothing is left.
                if state.hardware().reasons(&gpu).any(|(reason, _)| reason.is_loss()) {
                    return true;
                }
                let topology = state.topology();
                let place = topology.position(&gpu);
                knows(state, number)
                    && !topology.mig_devices().iter().any(|mig| Some(mig.parent) == place && is_it(mig))
            };
            // Before that it would count as an administrator's.
            if !self.comes(is_gone).await {
                return Err(MigError::StillSeen { device: name });
            }
        }
        Ok(())
    }

    /// The UUID of the device and the number of the order, or the error and whether the device may be there.
    async fn make(&self, device: &PreparedDevice) -> Result<(MigUuid, u64), (MigError, bool)> {
        let Some(slot) = device.made.filter(|_| self.settings.boot.is_some()) else {
            return Err((MigError::UnknownBoot(device.device.clone()), false));
        };
        let made = self.order(MigOrder { gpu: device.gpu.clone(), task: MigTask::Make(slot) }).await;
        let nameless = || MigOrderError { why: "it was made without a UUID".to_owned(), may_exist: true };
        let uuid = |mut made: MigDone| made.devices.pop().map(|uuid| (uuid, made.number)).ok_or_else(nameless);
        made.and_then(uuid).map_err(|source| {
            let (may_exist, gpu) = (source.may_exist, device.gpu.to_string());
            (MigError::Refused { device: device.device.clone(), gpu, slot, source }, may_exist)
        })
    }

    async fn order(&self, order: MigOrder) -> Result<MigDone, MigOrderError> {
        let failed = |why: &str, may_exist| MigOrderError { why: why.to_owned(), may_exist };
        let Some(mig) = &self.settings.mig else { return Err(failed("there is no driver to ask", false)) };
        // A process that has just started has claims before it has an agent. Without one the order is refused.
        let _ = self.sees_gpus().await;
        let (answer, answered) = oneshot::channel();
        let sent = mig.send(MigRequest { order, answer }).await;
        sent.map_err(|_| failed("linkwise is ending", false))?;
        answered.await.unwrap_or_else(|_| Err(failed("the NVML agent ended before it answered", true)))
    }

    /// Waits until the snapshot has the MIG devices that the driver has now: the last scan may be older than those which
    /// the process before made and destroyed for its last claims. Later ones are this process's, and it waits for each.
    /// Where the driver cannot be asked, the next caller asks again.
    pub(super) async fn await_mig(&self) {
        if self.knows_mig() {
            return;
        }
        let asked = self.is_mig_known.get_or_try_init(async || {
            if !self.sees_gpus().await {
                return Err(());
            }
            let state = Arc::clone(&self.snapshot.borrow());
            for gpu in state.topology().gpus().iter().filter(|gpu| gpu.mig_enabled) {
                let listed = self.order(MigOrder { gpu: gpu.uuid.clone(), task: MigTask::List }).await;
                let number = listed.map_err(|_| ())?.number;
                if !self.comes(|state| knows(state, number)).await {
                    return Err(());
                }
            }
            Ok(())
        });
        // An error leaves the claim to what the last scan found.
        let _ = asked.await;
    }

    /// Returns true once the MIG devices that the process before left are known, or if there is no driver to ask.
    pub(super) fn knows_mig(&self) -> bool {
        self.is_mig_known.initialized() || self.settings.mig.is_none()
    }

    async fn sees_gpus(&self) -> bool {
        self.comes(|state| !state.topology().gpus().is_empty()).await
    }

    /// Waits, for the time that CDI specs have, for a snapshot for which this holds; false if none comes.
    async fn comes(&self, wanted: impl Fn(&NodeState) -> bool) -> bool {
        let mut snapshot = self.snapshot.clone();
        let comes = snapshot.wait_for(|state| wanted(state));
        matches!(timeout(self.settings.specs_timeout, comes).await, Ok(Ok(_)))
    }
}

/// Whether a state is of a scan that was made after this order: the one before it may be published after its answer.
fn knows(state: &NodeState, order: u64) -> bool {
    state.hardware().mig_orders() >= order
}

fn forget(device: &mut PreparedDevice) {
    device.made = None;
}
