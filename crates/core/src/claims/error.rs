//! [`ClaimError`]: the reason why a claim cannot be prepared.

use crate::prelude::*;

use thiserror::Error;

use super::claim::Holder;
use super::config::ConfigError;
use super::mps::MpsRefusal;
use super::share::ShareError;
use crate::publish::injection::InjectionError;
use crate::quote::quoted;
use crate::state::{Door, UnhealthyReason};
use crate::topology::{GpuUuid, MigUuid};

/// The reason why a claim cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// Another claim has the name now.
    #[error("the claim {namespace}/{name} has the UID {}, not {}", quoted(.found), quoted(.asked))]
    OtherUid {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        name: String,
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
    #[error("the claim {claim} has no device of the driver {driver}")]
    NoDevices {
        /// `namespace/name`.
        claim: String,
        /// Our driver.
        driver: String,
    },
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
    #[error("there is no device {} on this node; there are {known}", quoted(.device))]
    UnknownDevice {
        /// The device.
        device: String,
        /// The devices of this node.
        known: String,
    },
    /// A set of GPUs of which one is not here.
    #[error("device {device} is a set of GPUs, and there is no {member} on this node")]
    MissingMember {
        /// The set.
        device: String,
        /// The GPU, by its name in the pool.
        member: String,
    },
    /// The GPU is not offered through DRA, or not yet.
    #[error("device {device} ({gpu}) {}", not_dra(*.door))]
    NotDra {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The API through which it is offered; `None` if a filter leaves it out.
        door: Option<Door>,
    },
    /// The driver cannot reach it.
    #[error("device {device} ({gpu}) is lost: {reason}")]
    Lost {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The driver's or the kernel's report.
        reason: UnhealthyReason,
    },
    /// Another claim has it.
    #[error("device {device} ({gpu}) is prepared for the claim {holder}")]
    Taken {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The other claim.
        holder: Box<Holder>,
    },
    /// A MIG device is in the place of the one to be made.
    #[error("device {device} ({gpu}) cannot be made: {mig} is in its place, which no claim had made")]
    PlaceTaken {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The MIG device in its place.
        mig: MigUuid,
    },
    /// A device of the claim went away while the claim was being prepared.
    #[error("device {device} ({gpu}) is gone")]
    Vanished {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// A pod has it otherwise than by our DRA plugin.
    #[error("device {device} ({gpu}) is held by {holder}")]
    Held {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The holder, in words.
        holder: String,
    },
    /// It cannot be the claim's share of a device.
    #[error("device {device} ({gpu}): {why}")]
    Share {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The reason.
        why: ShareError,
    },
    /// It cannot be shared by MPS.
    #[error("device {device} ({gpu}): {why}")]
    Mps {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// The reason.
        why: MpsRefusal,
    },
    /// The claim has the same hardware twice.
    #[error("device {device} shares hardware with another device of the same claim, {other}")]
    Repeated {
        /// The device.
        device: String,
        /// The other one.
        other: String,
    },
    /// Its configuration cannot be enforced.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its containers could not get the GPU.
    #[error(transparent)]
    Injection(#[from] InjectionError),
}

fn not_dra(door: Option<Door>) -> &'static str {
    match door {
        Some(Door::ToDra) => "still belongs to the device plugin on this node: it comes to DRA when no pod holds it",
        Some(_) => "belongs to the device plugin on this node, not to DRA",
        None => "is not offered on this node: a filter leaves it out",
    }
}

impl ClaimError {
    /// The claims that have the hardware which this claim is refused.
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::Taken { holder, .. } => core::slice::from_ref(holder),
            Self::Share { why: ShareError::Exceeds { holders, .. }, .. } => holders,
            Self::Mps { why: MpsRefusal::Disagrees { holder }, .. } => core::slice::from_ref(holder),
            _ => &[],
        }
    }
}
