//! [`Prepared`]: the hardware and edits that a claim is prepared with, as its checkpoint keeps them.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::mps::ClaimMps;
use super::share::Share;
use crate::publish::injection::{DeviceNode, Injection, Mount};
use crate::topology::{GpuUuid, MigSlot, MigUuid};

/// The CDI kind of a claim's own edits, beside its GPUs.
pub const CLAIM_KIND: &str = "linkwise.dev/claim";

/// The hardware and edits that a claim is prepared with. The checkpoint has it as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Prepared {
    /// Its devices, in the order of the allocation.
    pub devices: Vec<PreparedDevice>,
    /// The edits that its containers get beside their GPUs, by request: a CDI device of kind [`CLAIM_KIND`] each. Empty
    /// if the operator's options make no edits.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub edits: BTreeMap<String, Edits>,
    /// Its MPS control daemon, if it asks for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<ClaimMps>,
}

/// One device of a claim that is prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// The request that it is for, without its alternative.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// Its name in the pool. Several have one name if it is a set of GPUs ([`crate::topology::is_set`]).
    pub device: String,
    /// The ID of its share, if several claims have the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The part that the share takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// True if it is for an administrator, while other claims may have it.
    #[serde(default)]
    pub admin: bool,
    /// The GPU, by UUID: its name may differ after a reboot.
    pub gpu: GpuUuid,
    /// The MIG device, where it is not the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigUuid>,
    /// The GPU instance, if the MIG device is made for the claim and destroyed after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<MigSlot>,
    /// The full names of its CDI devices, `vendor/class=name`.
    pub cdi: Vec<String>,
}

/// The edits that containers get beside their GPUs.
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
    /// Returns true for a MIG device that is still to be made.
    pub fn is_unmade(&self) -> bool {
        self.made.is_some() && self.mig.is_none()
    }

    /// Returns true if both have the same hardware: the same device, or a GPU and a part of it.
    pub fn overlaps(&self, other: &Self) -> bool {
        let apart = match (self.made, other.made) {
            (Some(own), Some(theirs)) => !own.placement.overlaps(theirs.placement),
            // A MIG device is never made in the place of an existing one.
            (Some(_), None) => other.mig.is_some(),
            (None, Some(_)) => self.mig.is_some(),
            (None, None) => self.mig.is_some() && other.mig.is_some() && self.mig != other.mig,
        };
        self.gpu == other.gpu && !apart
    }

    /// Returns true if it keeps the other from having the same hardware. Shares with IDs of their own do not.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        let shares = self.share_id.is_some() && other.share_id.is_some() && self.share_id != other.share_id;
        !self.admin && !other.admin && self.overlaps(other) && !shares
    }
}

impl Edits {
    /// Returns true if there are none.
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
