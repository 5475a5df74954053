//! [`Prepared`]: the hardware and edits that a claim is prepared with, as its checkpoint keeps them.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::mps::ClaimMps;
use super::share::Share;
use crate::publish::injection::{DeviceNode, Injection, Mount};
use crate::topology::{GpuUuid, MigSlot, MigUuid};

/// The CDI kind of what a claim has of its own, beside its GPUs.
pub const CLAIM_KIND: &str = "linkwise.dev/claim";

/// What a claim is prepared with. Kept as JSON in its checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Prepared {
    /// Its devices, in the order of the allocation.
    pub devices: Vec<PreparedDevice>,
    /// What its containers get beside their GPUs, by request: a CDI device of kind [`CLAIM_KIND`] each. None where the
    /// operator asked for nothing of that kind.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub edits: BTreeMap<String, Edits>,
    /// Its MPS control daemon, where it asks for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<ClaimMps>,
}

/// One device of a claim that is prepared, or one GPU of a set that is a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// The request that it is for, without its alternative.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// Its name in the pool; that of a set of GPUs for each member.
    pub device: String,
    /// Which share of it, where several claims have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// What the share takes of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// Whether it is for an administrator, while other claims may have it.
    #[serde(default)]
    pub admin: bool,
    /// The GPU: its name may be another one after a reboot.
    pub gpu: GpuUuid,
    /// The MIG device, where it is not the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigUuid>,
    /// The GPU instance, where the MIG device is made for the claim and destroyed after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<MigSlot>,
    /// The full names of its CDI devices, `vendor/class=name`.
    pub cdi: Vec<String>,
}

/// What containers get beside their GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Edits {
    /// Environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Bind mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

impl Prepared {
    /// The names of its devices in the pool: that of a set of GPUs once.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.devices.iter().map(|device| device.device.clone()).collect();
        names.dedup();
        names
    }
}

impl PreparedDevice {
    /// Whether it is a MIG device that is still to be made.
    pub fn is_unmade(&self) -> bool {
        self.made.is_some() && self.mig.is_none()
    }

    /// Whether both have the same hardware: the same device, or a GPU and a part of it.
    pub fn overlaps(&self, other: &Self) -> bool {
        let apart = match (self.made, other.made) {
            (Some(own), Some(theirs)) => !own.placement.overlaps(theirs.placement),
            // None is made where one is.
            (Some(_), None) => other.mig.is_some(),
            (None, Some(_)) => self.mig.is_some(),
            (None, None) => self.mig.is_some() && other.mig.is_some() && self.mig != other.mig,
        };
        self.gpu == other.gpu && !apart
    }

    /// Whether it keeps others from having the same hardware. Shares with IDs of their own do not.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        let shares = self.share_id.is_some() && other.share_id.is_some() && self.share_id != other.share_id;
        !self.admin && !other.admin && self.overlaps(other) && !shares
    }
}

impl Edits {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl From<Injection> for Edits {
    fn from(injection: Injection) -> Self {
        Self { env: injection.env, device_nodes: injection.device_nodes, mounts: injection.mounts }
    }
}

/// The name of the CDI device with a claim's edits for one request, in the kind [`CLAIM_KIND`].
pub fn claim_device(uid: &str, request: &str) -> String {
    format!("{uid}-{request}")
}
