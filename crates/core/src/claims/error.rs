//! [`ClaimError`]: the reason why a claim cannot be prepared.

use crate::prelude::*;

use thiserror::Error;

use super::config::ConfigError;
use super::mps::MpsRefusal;
use super::share::ShareError;
use crate::publish::injection::InjectionError;
use crate::quote::quoted;
use crate::state::{ClaimName, DRA_DRIVER, Door, UnhealthyReason};
use crate::topology::{GpuUuid, MigUuid};

/// The reason why a claim cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// Another claim has the name now.
    #[error("the claim {claim} has the UID {}, not {}", quoted(.found), quoted(.asked))]
    OtherUid {
        /// `namespace/name`.
        claim: String,
        /// The UID that the kubelet named.
        asked: String,
        /// The UID that the API server has.
        found: String,
    },
    /// The API server answered for another claim.
    #[error("the API server answered with the claim {}, not {}", quoted(.found), quoted(.asked))]
    OtherClaim {
        /// `namespace/name` as asked.
        asked: String,
        /// `namespace/name` as answered.
        found: String,
    },
    /// The claim has more than the API server stores.
    #[error("the claim {claim} has {count} {what}; the API's limit is {limit}")]
    TooMany {
        /// `namespace/name`.
        claim: String,
        /// The things counted: devices, or configurations.
        what: &'static str,
        /// Their number.
        count: usize,
        /// The most that there may be.
        limit: usize,
    },
    /// The scheduler has not allocated devices to it.
    #[error("the claim {0} has no allocation")]
    NotAllocated(String),
    /// All its devices are of other drivers.
    #[error("the claim {0} has no device of the driver {DRA_DRIVER}")]
    NoDevices(String),
    /// A device belongs to another pool, which means another node.
    #[error("device {} is of the pool {}; this node has the pool {}", quoted(.device), quoted(.pool), quoted(.ours))]
    OtherPool {
        /// The device.
        device: String,
        /// Its pool.
        pool: String,
        /// Our pool.
        ours: String,
    },
    /// This node has no such device.
    #[error("there is no device {device} on this node; there are {1}", device = quoted(.0))]
    UnknownDevice(String, String),
    /// The claim cannot have one of its devices.
    #[error("device {device} ({gpu}){why}")]
    Device {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The reason.
        why: DeviceRefusal,
    },
    /// The claim has the same hardware twice.
    #[error("device {0} shares hardware with another device of the same claim, {1}")]
    Repeated(String, String),
    /// The kubelet has CDI names of the claim's last preparation that are now another's.
    #[error(
        "the kubelet has the CDI names {} of this claim from an earlier linkwise, which are not its devices any more: \
         delete its pods", .0.join(", ")
    )]
    OldNames(Vec<String>),
    /// Its configuration cannot be enforced.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its containers could not get the GPU.
    #[error(transparent)]
    Injection(#[from] InjectionError),
}

/// The reason why a claim cannot have a device. Its text goes on after the device's name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceRefusal {
    /// DRA does not offer the GPU, or not yet. The GPU's door; `None` if a filter leaves it out.
    #[error(" {}", not_dra(*.0))]
    NotDra(Option<Door>),
    /// The driver cannot reach it, by the driver's or the kernel's report.
    #[error(" is lost: {0}")]
    Lost(UnhealthyReason),
    /// Another claim has it.
    #[error(" is prepared for the claim {}", .0.with_uid())]
    Taken(Box<ClaimName>),
    /// This MIG device is in the place of the one to be made.
    #[error(" cannot be made: {0} is in its place, which no claim had made")]
    PlaceTaken(MigUuid),
    /// It went away while the claim was being prepared.
    #[error(" is gone")]
    Vanished,
    /// A pod has it otherwise than by our DRA plugin; the holder, in words.
    #[error(" is held by {0}")]
    Held(String),
    /// It cannot be the claim's share of a device.
    #[error(": {0}")]
    Share(ShareError),
    /// It cannot be shared by MPS.
    #[error(": {0}")]
    Mps(MpsRefusal),
}

fn not_dra(door: Option<Door>) -> &'static str {
    match door {
        Some(Door::Dra) => "is not offered yet: the kubelet has to list its holders twice",
        Some(Door::Plugin) => {
            "belongs to the device plugin: this node's GPUs do not go through DRA any more. Delete the pod and its claim, \
             or set dra.gpus to all again"
        }
        None => "is not offered on this node: a filter leaves it out",
    }
}

impl ClaimError {
    /// The refusal of a device.
    pub fn of_device(device: &str, gpu: &GpuUuid, why: DeviceRefusal) -> Self {
        Self::Device { device: device.to_owned(), gpu: gpu.clone(), why }
    }

    /// The claims that have the hardware which this claim is refused.
    pub fn holders(&self) -> &[ClaimName] {
        let Self::Device { why, .. } = self else { return &[] };
        match why {
            DeviceRefusal::Taken(holder) | DeviceRefusal::Mps(MpsRefusal::Disagrees(holder)) => {
                core::slice::from_ref(holder)
            }
            DeviceRefusal::Share(ShareError::Exceeds { holders, .. }) => holders,
            _ => &[],
        }
    }
}
