//! What is kept of the GPUs' health across our own restarts, as plain values. The runtime reads and writes them.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::gpu_shares::GpuShares;
use super::poll::RecoveryAction;
use super::reason::UnhealthyReason;
use crate::topology::GpuUuid;

/// Which boot and which driver a fact belongs to. Unknown is no change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeIdentity {
    /// The kernel's boot id.
    pub boot: Option<String>,
    /// The loaded driver: another text for each load.
    pub driver: Option<String>,
}

impl NodeIdentity {
    /// Whether this is known to be another boot or another load of the driver than `before`.
    pub fn differs_from(&self, before: &Self) -> bool {
        let differs = |now: &Option<String>, then: &Option<String>| now.is_some() && then.is_some() && now != then;
        differs(&self.boot, &before.boot) || differs(&self.driver, &before.driver)
    }
}

/// What is kept of all GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthRecord {
    /// The form of the record.
    pub version: u32,
    /// When it was so.
    #[serde(default)]
    pub identity: NodeIdentity,
    /// By GPU.
    #[serde(default)]
    pub gpus: BTreeMap<GpuUuid, GpuRecord>,
    /// The GPUs that are offered through DRA.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub dra: BTreeSet<GpuUuid>,
    /// Those of them that several claims share.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dra_shares: BTreeMap<GpuUuid, GpuShares>,
    /// What was free when the device plugin gave devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub admissions: Vec<AdmissionRecord>,
    /// What was free when claims were prepared, by their UIDs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub claim_admissions: BTreeMap<String, FreeThen>,
}

impl HealthRecord {
    /// The form that this version writes and reads.
    pub const VERSION: u32 = 1;
}

impl Default for HealthRecord {
    fn default() -> Self {
        Self {
            version: Self::VERSION,
            identity: NodeIdentity::default(),
            gpus: BTreeMap::new(),
            dra: BTreeSet::new(),
            dra_shares: BTreeMap::new(),
            admissions: Vec::new(),
            claim_admissions: BTreeMap::new(),
        }
    }
}

/// What is kept of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuRecord {
    /// The reasons that need something done, in the order in which they began.
    pub reasons: Vec<KeptReason>,
    /// How often its hold has been doubled; none before it first failed.
    pub flaps: Option<u32>,
    /// NVLinks that were active once.
    pub links: BTreeSet<u32>,
    /// The GPUs of this node at their far ends.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub far_ends: BTreeMap<u32, GpuUuid>,
    /// What an operator accepted.
    pub accepted: Accepted,
    /// What was seen last, by which a reset between two processes of ours shows.
    pub seen: LastSeen,
}

/// A reason that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptReason {
    /// What.
    pub reason: UnhealthyReason,
    /// Since when, in seconds since the Unix epoch.
    pub since: u64,
    /// Whether a reset has been seen since.
    #[serde(default)]
    pub remedied: bool,
}

/// What the driver said of a GPU when an operator called it well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Accepted {
    /// The recovery action.
    pub action: Option<RecoveryAction>,
    /// Whether a row remapping had failed.
    pub row_remap_failed: bool,
    /// How many uncorrectable ECC errors it counted.
    pub uncorrectable_ecc: Option<u64>,
}

/// The last that a poll said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastSeen {
    /// The recovery action; none where the driver has no such word.
    pub action: Option<RecoveryAction>,
    /// Whether the GPU can remap rows.
    pub remaps: bool,
    /// Whether a remapping waited for a reset.
    pub remap_pending: bool,
    /// Whether a remapping had failed.
    pub row_remap_failed: bool,
    /// The volatile counter of uncorrectable ECC errors.
    pub uncorrectable_ecc: Option<u64>,
    /// Whether the driver refused it until a reset.
    pub reset_required: bool,
    /// Whether the kernel did not list it on the PCI bus.
    pub off_bus: bool,
}

/// What is kept of an admission through the device plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionRecord {
    /// The resource.
    pub resource: String,
    /// The ids that were given.
    pub devices: BTreeSet<String>,
    /// What was free.
    pub then: FreeThen,
}

/// What so many GPUs could have had at an admission, MB/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeThen {
    /// The best collective of those that were free.
    pub free: u64,
    /// The best collective of those that were healthy, held or not.
    pub healthy: u64,
}
