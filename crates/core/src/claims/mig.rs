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
    /// Destroy the instance's compute instances, then the instance. One that does not exist is no error. The answer is
    /// empty.
    ///
    /// With a UUID, do so only if its compute instance is this MIG device, or if it has none because an earlier
    /// destruction was interrupted. Another MIG device in this place is an administrator's, made since.
    Destroy(MigSlot, Option<MigUuid>),
    /// Change nothing. The answer is the GPU's MIG devices as they are now.
    List,
}

/// The reason why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[error("{why}")]
pub struct MigOrderError {
    /// The reason in words: NVML's call and code, or why NVML was not asked.
    pub why: String,
    /// True if the instance may exist. After a Make that the driver refused, an instance there is not this order's.
    pub may_exist: bool,
}

/// The GPU behind an allocated device and its GPU instance, if it is a MIG device that is made for the claim, with the
/// MIG device if it was made before; `None` for one that an administrator made, and for any other device. A MIG device
/// that no claim in the ledger had made is an administrator's.
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
            // The claim that had it made has it, and the error names that claim.
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
