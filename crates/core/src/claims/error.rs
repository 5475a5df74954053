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

/// Why a claim cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// Another claim has its name now.
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
    /// More than the API server stores.
    #[error("the claim {claim} has {count} {what}; the API's limit is {limit}")]
    TooMany {
        /// `namespace/name`.
        claim: String,
        /// Of what: devices, or configurations.
        what: &'static str,
        /// How many.
        count: usize,
        /// How many there may be.
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
    /// A device of another pool: of another node.
    #[error("device {} is of the pool {}; this node has the pool {}", quoted(.device), quoted(.pool), quoted(.ours))]
    OtherPool {
        /// The device.
        device: String,
        /// Its pool.
        pool: String,
        /// Ours.
        ours: String,
    },
    /// No such device here.
    #[error("there is no device {} on this node; there are {known}", quoted(.device))]
    UnknownDevice {
        /// The device.
        device: String,
        /// Those that there are.
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
        /// Through which API it is offered; `None` where a filter leaves it out.
        door: Option<Door>,
    },
    /// The driver cannot reach it.
    #[error("device {device} ({gpu}) is lost: {reason}")]
    Lost {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// What the driver or the kernel reports.
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
    /// A MIG device is where one would have to be made.
    #[error("device {device} ({gpu}) cannot be made: {mig} is in its place, which no claim had made")]
    PlaceTaken {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// What is there.
        mig: MigUuid,
    },
    /// A device of the claim went while it was prepared.
    #[error("device {device} ({gpu}) is gone")]
    Vanished {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// A pod has it that our DRA plugin did not give it to.
    #[error("device {device} ({gpu}) is held by {holder}")]
    Held {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// What holds it, in words.
        holder: String,
    },
    /// It cannot be the claim's share of a device.
    #[error("device {device} ({gpu}): {why}")]
    Share {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// Why not.
        why: ShareError,
    },
    /// It cannot be shared by MPS.
    #[error("device {device} ({gpu}): {why}")]
    Mps {
        /// The device.
        device: String,
        /// Its GPU.
        gpu: GpuUuid,
        /// Why not.
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
    /// Its configuration is not one that we can enforce.
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
    /// The claims that have what this one is refused.
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::Taken { holder, .. } => core::slice::from_ref(holder),
            Self::Share { why: ShareError::Exceeds { holders, .. }, .. } => holders,
            Self::Mps { why: MpsRefusal::Disagrees { holder }, .. } => core::slice::from_ref(holder),
            _ => &[],
        }
    }
}
