//! [`PreparedClaim`]: a claim and its hardware, as the ledger has it. [`Prepared`]: that hardware, with its MPS daemon,
//! as the claim's checkpoint keeps it.
//!
//! Fields that a later version adds to a checkpoint are ignored, so that this version can read it after a rollback.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::resource_name::ResourceName;
use crate::topology::{GpuUuid, MigSlot, MigUuid, is_mig};

/// The CDI kind of claims. A device of this kind has everything that a container gets for one request of one claim.
pub const CLAIM_KIND: &str = "linkwise.dev/claim";

/// The kind of CDI devices that name one device of a claim, and give a container nothing.
pub const DEVICE_KIND: &str = "linkwise.dev/device";

/// The domain in the names of claims' control daemons under the MPS root.
pub const CLAIMS_DOMAIN: &str = "dra.linkwise.dev";

/// A claim as the kubelet names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; a later claim of the same name has a different one.
    pub uid: String,
}

impl ClaimName {
    /// `namespace/name (UID ...)`.
    pub(crate) fn with_uid(&self) -> String {
        format!("{self} (UID {})", self.uid)
    }
}

impl fmt::Display for ClaimName {
    /// Writes `namespace/name`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A claim that our DRA plugin has prepared or is about to prepare. It is in the ledger before the kubelet lists it,
/// and until its preparation is undone completely.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedClaim {
    /// The claim.
    pub claim: ClaimName,
    /// Its hardware.
    pub prepared: Prepared,
    /// True if it was prepared in another boot of the node. None of its containers runs any more, so other claims may
    /// get its GPUs, whose names may have changed.
    pub is_of_another_boot: bool,
}

impl PreparedClaim {
    /// Its devices, without those that it has with admin access.
    fn taken(&self) -> impl Iterator<Item = &PreparedDevice> {
        self.prepared.devices.iter().filter(|device| !device.admin)
    }

    /// The GPUs that it has as a whole or in part. A GPU comes once for each of its parts.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.taken().map(|device| &device.gpu)
    }

    /// Returns true if it has a GPU as a whole or in part.
    pub fn has(&self, gpu: &GpuUuid) -> bool {
        self.gpus().any(|own| own == gpu)
    }

    /// The names of its devices, without those that it has with admin access.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.taken().map(|device| device.device.as_str())
    }

    /// The names of those of its MIG devices that are made for it.
    pub fn made(&self) -> impl Iterator<Item = &str> {
        self.taken().filter(|device| device.made.is_some()).map(|device| device.device.as_str())
    }
}

/// The hardware that a claim is prepared with. The checkpoint has it as JSON. `claims::containers` derives from it, and
/// from the present node, what containers get.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    /// Its devices, in the order of the allocation.
    pub devices: Vec<PreparedDevice>,
    /// Its MPS settings, if it asks for MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<ClaimMps>,
    /// The name that the pod has for the claim, if the claim was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
}

/// One device of a claim that is prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreparedDevice {
    /// The request that it is for, without its alternative.
    pub request: String,
    /// The alternative that was taken, if the request has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alternative: Option<String>,
    /// The pool.
    pub pool: String,
    /// Its name in the pool. All GPUs of a set have the set's name ([`crate::topology::is_set`]).
    pub device: String,
    /// The ID of its share, if several claims may have the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The part that the share takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// True if the claim has it with admin access, while other claims may have it.
    #[serde(default)]
    pub admin: bool,
    /// The GPU, by UUID: its name may differ after a reboot.
    pub gpu: GpuUuid,
    /// The MIG device; `None` for the whole GPU, or before it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigUuid>,
    /// The GPU instance that linkwise makes for the claim, and destroys when the claim ends. Set before it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<MigSlot>,
    /// The full names of its CDI devices, `vendor/class=name`: its own ([`claim_member`]), and that of its request
    /// ([`claim_device`]). A claim that an older version without [`CLAIM_KIND`] prepared has the names of its GPUs, by
    /// UUID.
    pub cdi: Vec<String>,
}

impl Prepared {
    /// The names of its devices in the pool. A set of GPUs gives its name once.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.devices.iter().map(|device| device.device.clone()).collect();
        names.dedup();
        names
    }

    /// Takes over the CDI names of the claim's last preparation that are of neither [`CLAIM_KIND`] nor
    /// [`DEVICE_KIND`], because the kubelet keeps all names that it ever got for a claim, and hands them on with the
    /// new ones. `kind` is the CDI kind of GPUs.
    ///
    /// # Errors
    ///
    /// The names of GPUs that the claim does not have any more: its containers would get them beside its own.
    pub fn keep_names(&mut self, before: &Self, kind: &str) -> Result<(), Vec<String>> {
        let given = before.devices.iter().flat_map(|device| &device.cdi);
        let given = given.filter(|name| ![CLAIM_KIND, DEVICE_KIND].iter().any(|own| name.starts_with(own)));
        let given: Vec<String> = given.cloned().collect();
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
    /// A whole GPU under this name, for no request yet.
    pub fn whole(device: &str, gpu: GpuUuid) -> Self {
        Self { device: device.to_owned(), gpu, ..Self::default() }
    }

    /// Returns true for a MIG device that is still to be made.
    pub fn is_unmade(&self) -> bool {
        self.made.is_some() && self.mig.is_none()
    }

    /// Returns true if the two have hardware in common: one device, a GPU and a part of it, or overlapping MIG slots.
    pub fn overlaps(&self, other: &Self) -> bool {
        let apart = match (self.made, other.made) {
            (Some(own), Some(theirs)) => !own.placement.overlaps(theirs.placement),
            // A MIG device is never made in the place of an existing one.
            (Some(_), None) => other.mig.is_some(),
            (None, Some(_)) => self.mig.is_some(),
            (None, None) => self.mig.is_some() && other.mig.is_some() && self.mig != other.mig,
        };
        // A MIG device that was destroyed before it was ready takes no place: its claim is prepared again.
        let is_nothing = |device: &Self| device.mig.is_none() && device.made.is_none() && is_mig(&device.device);
        self.gpu == other.gpu && !apart && !is_nothing(self) && !is_nothing(other)
    }

    /// Returns true if the two cannot be prepared at the same time. Two shares with different IDs can.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let shares = self.share_id.is_some() && other.share_id.is_some() && self.share_id != other.share_id;
        !self.admin && !other.admin && self.overlaps(other) && !shares
    }
}

/// The full name of the CDI device of a claim's request. It stays the same whatever hardware the claim has: the kubelet
/// keeps it over its restarts and the node's reboots.
pub fn claim_device(uid: &str, request: &str) -> String {
    format!("{CLAIM_KIND}={uid}-{request}")
}

/// The full name of the CDI device of one device in a claim's request. In the status of a pod, the kubelet tells the
/// devices of a claim apart by the first CDI name of each, and takes devices with the same first name for one device
/// (pkg/kubelet/cm/dra/manager.go of Kubernetes 1.36).
pub fn claim_member(uid: &str, request: &str, device: &str) -> String {
    format!("{DEVICE_KIND}={uid}-{request}-{device}")
}

/// The part that a claim takes of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The number of its shares, at least 1.
    pub shares: u64,
    /// The bytes of its memory; 0 if the device has no such capacity.
    pub memory: u64,
}

/// An MPS control daemon for GPUs of claims, with its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsOrder {
    /// Its GPUs, in the order in which the daemon numbers them; at least one.
    pub gpus: Vec<MpsOrderGpu>,
    /// The part of a GPU's threads that a client may have, in percent: 1 to 100.
    pub thread_percentage: u32,
    /// True if the GPUs belong to one claim and refuse processes that are not clients.
    pub exclusive: bool,
}

/// A GPU of a control daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsOrderGpu {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The memory of it that a client may have, in MiB; `None` means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
}

impl MpsOrder {
    /// The name of the daemon's folder under the MPS root, made from its first GPU: a GPU belongs to one daemon. `None`
    /// if it has no GPU, or one whose UUID cannot be part of such a name.
    pub fn name(&self) -> Option<ResourceName> {
        format!("{CLAIMS_DOMAIN}/{}", self.gpus.first()?.gpu).parse().ok()
    }

    /// Returns true if the two have a GPU in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.gpus.iter().any(|own| other.gpus.iter().any(|theirs| own.gpu == theirs.gpu))
    }
}

/// The MPS settings of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimMps {
    /// Its control daemon.
    pub order: MpsOrder,
    /// The requests whose containers are clients, with their limits if these are lower than the daemon's.
    pub clients: BTreeMap<String, ClientLimits>,
}

/// Limits in the environment of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientLimits {
    /// The part of a GPU's threads, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_percentage: Option<u32>,
    /// The memory of the daemon's only GPU, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
}

impl ClientLimits {
    /// The variables that the CUDA driver reads.
    pub(crate) fn variables(self) -> impl Iterator<Item = (String, String)> {
        let threads = self.thread_percentage.map(|percent| ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string()));
        let memory = self.mib.map(|mib| ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={mib}M")));
        threads.into_iter().chain(memory).map(|(name, value)| (name.to_owned(), value))
    }
}
