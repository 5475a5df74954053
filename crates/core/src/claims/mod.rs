//! DRA claims as the API server has them, and what a claim that was allocated here is prepared with.
//!
//! Pure: a claim and a snapshot in, devices and their CDI names or the claim's error out. The DRA plugin (`dra`) carries
//! it out and keeps checkpoints; it reads claims from their JSON too.

mod config;
mod device;
mod plan;

use crate::prelude::*;
use core::fmt;

use serde::{Deserialize, Serialize};

pub use config::ConfigError;
pub use device::{devices, hardware_of};
pub use plan::{CLAIM_KIND, ClaimError, Edits, Holder, Node, Prepared, PreparedDevice, claim_device, plan};

/// The request without its alternative: `gpus` of `gpus/quad`.
fn base(request: &str) -> &str {
    request.split('/').next().unwrap_or(request)
}

/// A claim as the kubelet names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID: another claim of the same name has another.
    pub uid: String,
}

impl fmt::Display for ClaimName {
    /// `namespace/name`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What linkwise reads of a `ResourceClaim` (`resource.k8s.io/v1`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Name, namespace, UID.
    pub metadata: ClaimName,
    /// What became of it.
    pub status: ClaimStatus,
}

/// What became of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimStatus {
    /// Its devices; `None` before the scheduler allocates any.
    pub allocation: Option<Allocation>,
}

/// The devices of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// The devices, of all drivers, and their configuration.
    pub devices: DeviceAllocation,
}

/// See [`Allocation`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAllocation {
    /// The devices.
    pub results: Vec<AllocatedDevice>,
    /// Configuration by class and claim; later wins.
    pub config: Vec<AllocatedConfig>,
}

/// One device of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// The request that it is for; `request/subrequest` where the request has alternatives.
    pub request: String,
    /// Its DRA driver.
    pub driver: String,
    /// Its pool.
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// Whether an administrator looks at it without taking it.
    pub admin_access: Option<bool>,
    /// Which share of a device that several claims have.
    pub share_id: Option<String>,
}

/// Configuration that a claim or its class carries for a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatedConfig {
    /// `FromClass` or `FromClaim`.
    pub source: String,
    /// The requests that it is for; empty for all.
    pub requests: Vec<String>,
    /// What only the driver reads.
    pub opaque: Option<OpaqueConfig>,
}

/// Configuration that only the driver reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpaqueConfig {
    /// The driver.
    pub driver: String,
    /// The object, as JSON text.
    pub parameters: String,
}
