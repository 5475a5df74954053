//! MIG devices that are made for a claim: which these are, and what is ordered of the driver.

use crate::prelude::*;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::claim::AllocatedDevice;
use super::error::ClaimError;
use super::node::Node;
use super::prepared::Prepared;
use crate::state::ClaimName;
use crate::topology::{Gpu, GpuUuid, MigDevice, MigSlot, MigUuid, possible_mig};

/// An order to the driver about one GPU instance, which the agent carries out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigOrder {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Which instance.
    pub slot: MigSlot,
    /// What to do.
    pub task: MigTask,
}

/// What is done with a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum MigTask {
    /// Make it, with one compute instance that takes all of it: the answer is the UUID of the MIG device.
    Make,
    /// Destroy its compute instances and it. One that does not exist is no error.
    ///
    /// With a UUID, only where its compute instance is this MIG device, or where it has none: a destruction that was
    /// broken off has left it so. Another MIG device in this place is an administrator's, made since.
    Destroy(Option<MigUuid>),
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[error("{why}")]
pub struct MigOrderError {
    /// In words: NVML's call and code, or why NVML was not asked.
    pub why: String,
    /// Whether the instance may be there. After a Make that the driver refused it is not this order's.
    pub may_exist: bool,
}

/// A MIG device that is made for a claim.
pub(super) struct OnDemand<'a> {
    pub gpu: &'a Gpu,
    pub slot: MigSlot,
    /// The device, where it was made before.
    pub made: Option<&'a MigDevice>,
}

/// The MIG device that an allocated device is, if it is one that is made for the claim: not one that an administrator
/// made, nor any that nobody makes. `records` are all claims that are prepared here: a MIG device that none of them had
/// made is an administrator's.
pub(super) fn on_demand<'a, 'b>(
    result: &AllocatedDevice,
    node: Node<'a>,
    records: impl Iterator<Item = (&'b ClaimName, &'b Prepared)> + Clone,
) -> Result<Option<OnDemand<'a>>, ClaimError> {
    let topology = node.state.topology();
    let Some(possible) = possible_mig(topology).into_iter().find(|possible| possible.name == result.device) else {
        return Ok(None);
    };
    let Some(gpu) = topology.gpus().get(possible.gpu) else { return Ok(None) };
    let is_ours = |mig: &MigDevice| {
        let slot = mig.profile_id.zip(mig.placement).map(|(profile_id, placement)| MigSlot { profile_id, placement });
        let mut devices = records.clone().flat_map(|(_, prepared)| &prepared.devices);
        devices.any(|device| device.gpu == gpu.uuid && device.made.is_some() && device.made == slot)
    };
    let mut made = None;
    for mig in topology.mig_devices().iter().filter(|mig| possible.is_blocked_by(mig)) {
        match (is_ours(mig), possible.is(mig)) {
            (true, true) => made = Some(mig),
            // The claim that had it made is in the way, and is named.
            (true, false) => {}
            (false, true) => return Ok(None),
            (false, false) => {
                let (device, gpu, mig) = (result.device.clone(), gpu.uuid.clone(), mig.uuid.clone());
                return Err(ClaimError::PlaceTaken { device, gpu, mig });
            }
        }
    }
    // For an administrator nothing is made: other claims may have the device.
    let makes_it = node.makes_mig && result.admin_access != Some(true);
    Ok((made.is_some() || makes_it).then_some(OnDemand { gpu, slot: possible.slot, made }))
}
