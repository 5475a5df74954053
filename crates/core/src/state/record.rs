//! [`HealthRecord`]: the part of the state that is kept across our restarts, as plain values. The `node` crate reads
//! and writes its file.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::inventory::Inventory;
use super::{FabricHealth, GpuShares, RecoveryAction, UnhealthyReason};
use crate::topology::GpuUuid;

/// The machine, the boot and the load of the driver to which a fact belongs. Unknown counts as no change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeIdentity {
    /// The kernel's boot id.
    pub boot: Option<String>,
    /// The loaded driver: another text for each load.
    pub driver: Option<String>,
    /// The machine: `product_uuid` of its firmware (SMBIOS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

impl NodeIdentity {
    /// Returns true if this is known to be another boot or another load of the driver than `before`.
    pub fn differs_from(&self, before: &Self) -> bool {
        differs(&self.boot, &before.boot) || differs(&self.driver, &before.driver)
    }

    /// Returns true if this is known to be another machine than `before`, whose disk was moved here.
    pub fn is_another_machine(&self, before: &Self) -> bool {
        differs(&self.machine, &before.machine)
    }
}

fn differs(now: &Option<String>, then: &Option<String>) -> bool {
    now.is_some() && then.is_some() && now != then
}

/// The record of the whole node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthRecord {
    /// The version of the format; 0 in a record that was never written.
    pub version: u32,
    /// The node's identity when the record was written.
    pub identity: NodeIdentity,
    /// The GPUs' records.
    pub gpus: BTreeMap<GpuUuid, GpuRecord>,
    /// The GPUs that the node had.
    pub inventory: Inventory,
    /// The GPUs that DRA offers, or that its claims hold.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub dra: BTreeSet<GpuUuid>,
    /// The GPUs in `dra` that several claims may share.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub dra_shares: BTreeMap<GpuUuid, GpuShares>,
    /// The best bandwidth that was free when the device plugin gave devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub admissions: Vec<AdmissionRecord>,
    /// The best bandwidth that was free when claims were prepared, by their UIDs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub claim_admissions: BTreeMap<String, FreeThen>,
}

impl HealthRecord {
    /// The version of the format that this linkwise writes and reads.
    pub const VERSION: u32 = 1;
}

/// The record of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuRecord {
    /// The reasons that need an action, in the order in which they began.
    pub reasons: Vec<KeptReason>,
    /// The number of doublings of its hold time; `None` before it first failed.
    pub flaps: Option<u32>,
    /// The numbers of the NVLinks that were active once.
    pub links: BTreeSet<u32>,
    /// The GPUs of this node at the far ends of NVLinks, by the link's number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub far_ends: BTreeMap<u32, GpuUuid>,
    /// The findings that an operator accepted.
    pub accepted: Accepted,
    /// An operator's order that the GPU takes no new work ([`UnhealthyReason::Cordoned`]). It outlasts boots and loads
    /// of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cordon: Option<KeptReason>,
    /// The facts of the last poll. They show a reset between two processes of ours.
    pub seen: LastSeen,
}

/// A reason that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptReason {
    /// The reason.
    pub reason: UnhealthyReason,
    /// Its beginning, in seconds since the Unix epoch.
    pub since: u64,
    /// True if a reset has been observed since.
    #[serde(default)]
    pub remedied: bool,
}

/// The driver's report on a GPU when an operator cleared its reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Accepted {
    /// The recovery action.
    pub action: Option<RecoveryAction>,
    /// True if a row remapping had failed.
    pub row_remap_failed: bool,
    /// The number of uncorrectable ECC errors that it counted.
    pub uncorrectable_ecc: Option<u64>,
    /// The state of its fabric.
    pub fabric: Option<FabricHealth>,
}

/// The facts of the last poll.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastSeen {
    /// The recovery action; `None` if the driver does not report recovery actions.
    pub action: Option<RecoveryAction>,
    /// True if the GPU can remap rows.
    pub remaps: bool,
    /// True if a remapping waited for a reset.
    pub remap_pending: bool,
    /// True if a remapping had failed.
    pub row_remap_failed: bool,
    /// The volatile counter of uncorrectable ECC errors.
    pub uncorrectable_ecc: Option<u64>,
    /// The state of its fabric.
    pub fabric: Option<FabricHealth>,
    /// True if the driver refused the GPU until a reset.
    pub reset_required: bool,
    /// True if the driver could not reach the GPU any more.
    pub lost: bool,
    /// True if the kernel did not list the GPU on the PCI bus.
    pub off_bus: bool,
}

/// The record of an admission through the device plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionRecord {
    /// The resource.
    pub resource: String,
    /// The ids that were given.
    pub devices: BTreeSet<String>,
    /// The best bandwidth that was free.
    pub then: FreeThen,
}

/// The best collective bandwidth, in MB/s, that as many GPUs as were given could have had at an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeThen {
    /// The best among the GPUs that were free, those given included.
    pub free: u64,
    /// The best among the healthy GPUs, held or not.
    pub healthy: u64,
}
