//! MIG devices that are made for a claim: what is ordered of the driver.

use crate::prelude::*;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::topology::{GpuUuid, MigSlot, MigUuid};

/// An order about one GPU instance, for whoever can reach the driver.
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
