//! MIG devices that are made for a claim, and the orders to the driver that make and destroy them.

use crate::prelude::*;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::claim::AllocatedDevice;
use super::error::{ClaimError, DeviceRefusal};
use super::plan::PlanInputs;
use crate::publish::injection::ChosenDevice;
use crate::topology::{GpuUuid, MigDevice, MigSlot, MigUuid, possible_mig};

/// An order to the driver about the instances of one GPU, which the agent carries out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigOrder {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The task.
    pub task: MigTask,
}

/// The task of an order about GPU instances. The answer is a list of MIG devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum MigTask {
    /// Make the instance, with one compute instance that takes all of it. The answer is its MIG device.
    Make(MigSlot),
    /// Destroy the instance's compute instances, then the instance. A missing instance is not an error. The answer is
    /// empty.
    ///
    /// With a UUID, destroy the instance only if its compute instance is this MIG device, or if it has no compute
    /// instance because an earlier destruction was interrupted. Any other MIG device in this place was made by an
    /// administrator.
    Destroy(MigSlot, Option<MigUuid>),
    /// Change nothing. The answer is the GPU's MIG devices as they are now.
    List,
}

/// The reason why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[error("{why}")]
pub struct MigOrderError {
    /// The reason in words: NVML's call and code, or why NVML was not called.
    pub why: String,
    /// True if the instance of a Make may exist. False if the driver refused the Make or did not get it: any instance
    /// in its place is someone else's.
    pub may_exist: bool,
}

/// Finds the hardware of an allocated device that is a MIG device made for claims: its GPU, its GPU instance, and the
/// MIG device if it exists already. `None` for any other device. An administrator made each MIG device that the ledger
/// does not show as made for a claim.
pub(super) fn on_demand<'a>(
    result: &AllocatedDevice,
    node: PlanInputs<'a>,
) -> Result<Option<(ChosenDevice<'a>, MigSlot)>, ClaimError> {
    let topology = node.state.topology();
    let Some(possible) = possible_mig(topology).into_iter().find(|possible| possible.name == result.device) else {
        return Ok(None);
    };
    let Some(gpu) = topology.gpus().get(possible.gpu) else { return Ok(None) };
    let is_ours = |mig: &MigDevice| {
        let slot = mig.slot();
        let mut devices = node.state.ledger().claims().flat_map(|(_, prepared)| &prepared.devices);
        devices.any(|device| device.gpu == gpu.uuid && device.made.is_some() && device.made == slot)
    };
    let mut made = None;
    for mig in topology.mig_devices().iter().filter(|mig| possible.is_blocked_by(mig)) {
        match (is_ours(mig), possible.is(mig)) {
            (true, true) => made = Some(mig),
            // The claim for which it was made holds it, so `plan` refuses this claim and names that one.
            (true, false) => {}
            (false, true) => return Ok(None),
            (false, false) => {
                let why = DeviceRefusal::PlaceTaken(mig.uuid.clone());
                return Err(ClaimError::of_device(&result.device, &gpu.uuid, why));
            }
        }
    }
    // No device is made for an administrator's access: other claims may have the device.
    let makes_it = node.makes_mig && result.admin_access != Some(true);
    Ok((made.is_some() || makes_it).then_some((ChosenDevice { gpu, mig: made }, possible.slot)))
}
