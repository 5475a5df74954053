//! DRA claims as the API server has them, and what a claim that was allocated here is prepared with.
//!
//! Pure: a claim and a snapshot in, devices and their CDI names or the claim's error out. The DRA plugin (`dra`) carries
//! it out and keeps checkpoints; it reads claims from their JSON too.

mod config;
mod device;
mod mig;
mod mps;
mod plan;
mod share;

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::fmt;

use serde::{Deserialize, Deserializer, Serialize};

pub use config::ConfigError;
pub use device::{devices, hardware_of};
pub use mig::{MigOrder, MigOrderError, MigTask};
pub use mps::{ClaimMps, ClientLimits, MpsOrder, MpsOrderGpu, MpsRefusal};
pub use plan::{CLAIM_KIND, ClaimError, Edits, Holder, Node, Prepared, PreparedDevice, claim_device, complete, plan};
pub use share::{Share, ShareError};

/// The request without its alternative: `gpus` of `gpus/quad`.
fn base(request: &str) -> &str {
    request.split('/').next().unwrap_or(request)
}

/// A claim as the kubelet names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Claim {
    /// Name, namespace, UID.
    pub metadata: ClaimName,
    /// What became of it.
    pub status: ClaimStatus,
}

/// What became of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimStatus {
    /// Its devices; `None` before the scheduler allocates any.
    pub allocation: Option<Allocation>,
}

/// The devices of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocation {
    /// The devices, of all drivers, and their configuration.
    pub devices: DeviceAllocation,
}

/// See [`Allocation`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceAllocation {
    /// The devices.
    #[serde(deserialize_with = "or_default")]
    pub results: Vec<AllocatedDevice>,
    /// Configuration by class and claim; later wins.
    #[serde(deserialize_with = "or_default")]
    pub config: Vec<AllocatedConfig>,
}

/// One device of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
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
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    /// What the share takes of the device's capacities, as quantities by their names.
    #[serde(deserialize_with = "map_or_default")]
    pub consumed_capacity: BTreeMap<String, String>,
}

/// Configuration that a claim or its class carries for a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllocatedConfig {
    /// `FromClass` or `FromClaim`.
    pub source: String,
    /// The requests that it is for; empty for all.
    #[serde(deserialize_with = "or_default")]
    pub requests: Vec<String>,
    /// What only the driver reads.
    pub opaque: Option<OpaqueConfig>,
}

/// Configuration that only the driver reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OpaqueConfig {
    /// The driver.
    pub driver: String,
    /// The object, as JSON text.
    #[serde(deserialize_with = "as_text")]
    pub parameters: String,
}

/// A map, or null.
fn map_or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A list, or null.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A JSON value as its text.
fn as_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    serde_json::Value::deserialize(deserializer).map(|value| value.to_string())
}

impl Claim {
    /// Reads a `ResourceClaim` (`resource.k8s.io/v1`). Fields that linkwise has no use for are skipped.
    ///
    /// # Errors
    ///
    /// It is no JSON, or a field has another type.
    pub fn from_json(text: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(text)
    }
}
