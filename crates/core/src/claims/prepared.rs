//! [`Prepared`]: the hardware that a claim is prepared with, as its checkpoint keeps it.
//!
//! Fields that a later version adds are ignored: the version before has to read its checkpoints after a rollback.

use crate::prelude::*;

use serde::{Deserialize, Serialize};

use super::mps::ClaimMps;
use super::share::Share;
use crate::topology::{GpuUuid, MigSlot, MigUuid};

/// The CDI kind of claims. A device of it is what a container gets that uses one request of one claim.
pub const CLAIM_KIND: &str = "linkwise.dev/claim";

/// The hardware that a claim is prepared with. The checkpoint has it as JSON. What containers get follows from it and
/// from the node as it is ([`containers`](super::containers())).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    /// Its devices, in the order of the allocation.
    pub devices: Vec<PreparedDevice>,
    /// Its MPS control daemon, if it asks for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<ClaimMps>,
}

/// One device of a claim that is prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
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
    /// The full names of its CDI devices, `vendor/class=name`: that of its request ([`claim_device`]). A claim that was
    /// prepared before linkwise named claims has those of its GPUs, by UUID.
    pub cdi: Vec<String>,
}

impl Prepared {
    /// The names of its devices in the pool: that of a set of GPUs once.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.devices.iter().map(|device| device.device.clone()).collect();
        names.dedup();
        names
    }

    /// Takes over the names of the claim's last preparation that are not of [`CLAIM_KIND`]: the kubelet keeps all names
    /// that it was ever given for a claim, and hands them on with the new ones. `kind` is that of GPUs.
    ///
    /// # Errors
    ///
    /// The names of GPUs that the claim does not have any more: its containers would get them beside its own.
    pub fn keep_names(&mut self, before: &Self, kind: &str) -> Result<(), Vec<String>> {
        let given = before.devices.iter().flat_map(|device| &device.cdi);
        let given: Vec<String> = given.filter(|name| !name.starts_with(CLAIM_KIND)).cloned().collect();
        let is_own = |id: &str| {
            self.devices.iter().any(|device| device.mig.as_ref().map_or(device.gpu.as_str(), MigUuid::as_str) == id)
        };
        let is_foreign = |name: &&String| name.split_once('=').is_some_and(|(of, id)| of == kind && !is_own(id));
        let foreign: Vec<String> = given.iter().filter(is_foreign).cloned().collect();
        if !foreign.is_empty() {
            return Err(foreign);
        }
        if let Some(first) = self.devices.first_mut() {
            first.cdi.extend(given);
        }
        Ok(())
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

/// The full name of the CDI device of a claim's request. It stays the same whatever hardware the claim has: the kubelet
/// keeps it over its restarts and reboots.
pub fn claim_device(uid: &str, request: &str) -> String {
    format!("{CLAIM_KIND}={uid}-{request}")
}
