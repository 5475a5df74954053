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
    #[error("the claim {claim} has the UID {}, not {}", quoted(.found), quoted(.requested))]
    OtherUid {
        /// `namespace/name`.
        claim: String,
        /// The UID in the kubelet's request.
        requested: String,
        /// The UID that the API server has.
        found: String,
    },
    /// The API server answered for another claim.
    #[error("the API server answered with the claim {}, not {}", quoted(.found), quoted(.requested))]
    OtherClaim {
        /// `namespace/name` in the kubelet's request.
        requested: String,
        /// `namespace/name` in the answer.
        found: String,
    },
    /// The claim has more devices or configurations than the API server accepts.
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
    /// The scheduler has not allocated devices to the claim.
    #[error("the claim {0} has no allocation")]
    NotAllocated(String),
    /// All devices of the claim belong to other drivers.
    #[error("the claim {0} has no device of the driver {DRA_DRIVER}")]
    NoDevices(String),
    /// A device belongs to another pool, which means another node.
    #[error("device {} belongs to the pool {}, not to this node's {}", quoted(.device), quoted(.pool), quoted(.ours))]
    OtherPool {
        /// The device.
        device: String,
        /// Its pool.
        pool: String,
        /// Our pool.
        ours: String,
    },
    /// This node does not have the device. The second text lists the devices that it has.
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
    /// The kubelet keeps CDI names of the claim's last preparation, but the claim does not have these GPUs any more.
    #[error(
        "the kubelet has the CDI names {} from an earlier preparation of this claim, which does not have these GPUs \
         any more; delete the claim's pods", .0.join(", ")
    )]
    OldNames(Vec<String>),
    /// The claim's configuration cannot be enforced.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The claim's containers could not get the GPU.
    #[error(transparent)]
    Injection(#[from] InjectionError),
}

/// The reason why a claim cannot have a device. The text of [`ClaimError::Device`] appends it to the device's name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceRefusal {
    /// DRA does not offer the GPU, or not yet. The value is the GPU's door; `None` if a filter leaves the GPU out.
    #[error(" {}", not_dra(*.0))]
    NotDra(Option<Door>),
    /// The driver cannot reach the GPU, as the driver or the kernel reported.
    #[error(" is lost: {0}")]
    Lost(UnhealthyReason),
    /// Another claim has the hardware.
    #[error(" is prepared for the claim {}", .0.with_uid())]
    Taken(Box<ClaimName>),
    /// An administrator's MIG device is in the place where the claim's would be made.
    #[error(" cannot be made: {0} is in its place and was not made for a claim")]
    PlaceTaken(MigUuid),
    /// The snapshot no longer has the device.
    #[error(" is gone")]
    Vanished,
    /// A pod has the GPU through a device plugin or another DRA driver. The value is the holder, in words.
    #[error(" is held by {0}")]
    Held(String),
    /// The claim cannot have this share of the GPU.
    #[error(": {0}")]
    Share(ShareError),
    /// MPS cannot share the device.
    #[error(": {0}")]
    Mps(MpsRefusal),
}

fn not_dra(door: Option<Door>) -> &'static str {
    match door {
        Some(Door::Dra) => "is not offered yet: two of the kubelet's lists in a row must show no holder",
        Some(Door::Plugin) => {
            "belongs to the device plugin: DRA does not offer this node's GPUs any more; delete the pod and its claim, \
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

    /// The other claims that hold the refused hardware; empty if the refusal has another reason.
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
