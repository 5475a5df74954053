//! What a claim that was allocated here is prepared with, or why it is not.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::config::{ConfigError, Configs, Kind};
use super::device::{devices, hardware_of};
use super::mig::{OnDemand, on_demand};
use super::mps::{self, Asked, ClaimMps, ClientLimits, MpsRefusal};
use super::share::{self, Share, ShareError};
use super::{AllocatedDevice, Claim, ClaimName, base};
use crate::publish::MpsClient;
use crate::publish::injection::{
    ChosenDevice, DeviceNode, Granted, HostDevices, Injection, InjectionError, InjectionOptions, Mount,
};
use crate::quote::quoted;
use crate::state::{Door, NodeState, UnhealthyReason};
use crate::topology::{Gpu, GpuUuid, MigSlot, MigUuid, NodeTopology};

/// The CDI kind of what a claim has of its own, beside its GPUs.
pub const CLAIM_KIND: &str = "linkwise.dev/claim";

/// The most devices of a claim, of all drivers (`AllocationResultsMaxSize` of resource.k8s.io).
const MOST_DEVICES: usize = 32;

/// The most configurations of a claim that has devices: its own and its classes' (twice `DeviceConfigMaxSize`).
const MOST_CONFIGS: usize = 64;

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

/// One device of a claim that is prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// The request that it is for, without its alternative.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// Its name in the pool. Several have one name where it is a set of GPUs ([`crate::topology::is_set`]).
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

/// What a plan is made from, beside the claim.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// The DRA driver's name.
    pub driver: &'a str,
    /// The pool's name.
    pub pool: &'a str,
    /// The snapshot.
    pub state: &'a NodeState,
    /// How containers get their GPUs; with CDI.
    pub injection: &'a InjectionOptions,
    /// What the host has beside its GPUs.
    pub host: &'a HostDevices,
    /// Whether MIG devices are made for claims.
    pub makes_mig: bool,
}

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

/// The claim that has a device; shown as `namespace/name (UID ...)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder(pub ClaimName);

impl core::fmt::Display for Holder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}/{} (UID {})", self.0.namespace, self.0.name, self.0.uid)
    }
}

fn not_dra(door: Option<Door>) -> &'static str {
    match door {
        Some(Door::ToDra) => "still belongs to the device plugin on this node: it comes to DRA when no pod holds it",
        Some(_) => "belongs to the device plugin on this node, not to DRA",
        None => "is not offered on this node: a filter leaves it out",
    }
}

impl Prepared {
    /// The names of its devices in the pool.
    pub fn names(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.device.clone()).collect()
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

impl PreparedDevice {
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
    fn excludes(&self, other: &Self) -> bool {
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

/// What a claim is prepared with. `others` are the claims that are prepared here, and being prepared.
///
/// A GPU that the driver has lost, or that is gone, is refused: its container could not start, and the error says why.
/// One that is sick otherwise is not refused. Its taint is in our slices, so the scheduler allocated it because the claim
/// tolerates the taint, or before the taint was there; and the first of these is an operator's wish, such as a pod that
/// tests the GPU. A GPU that a pod holds through a device plugin, or through a claim of the DRA driver that linkwise
/// replaced, is refused as far as the kubelet lists it: either may have served the node before.
///
/// # Errors
///
/// The first thing that is wrong; nothing is prepared then.
pub fn plan<'a>(
    claim: &Claim,
    asked: &ClaimName,
    node: Node<'_>,
    others: impl Iterator<Item = (&'a ClaimName, &'a Prepared)> + Clone,
) -> Result<Prepared, ClaimError> {
    let full = |name: &ClaimName| format!("{}/{}", name.namespace, name.name);
    if full(&claim.metadata) != full(asked) {
        return Err(ClaimError::OtherClaim { asked: full(asked), found: full(&claim.metadata) });
    }
    if claim.metadata.uid != asked.uid {
        return Err(ClaimError::OtherUid {
            namespace: asked.namespace.clone(),
            name: asked.name.clone(),
            asked: asked.uid.clone(),
            found: claim.metadata.uid.clone(),
        });
    }
    let allocation = claim.status.allocation.as_ref().ok_or_else(|| ClaimError::NotAllocated(full(asked)))?;
    let (results, configs) = (&allocation.devices.results, &allocation.devices.config);
    for (what, count, limit) in
        [("devices", results.len(), MOST_DEVICES), ("configurations", configs.len(), MOST_CONFIGS)]
    {
        if count > limit {
            return Err(ClaimError::TooMany { claim: full(asked), what, count, limit });
        }
    }
    let ours: Vec<&AllocatedDevice> = results.iter().filter(|result| result.driver == node.driver).collect();
    if ours.is_empty() {
        return Err(ClaimError::NoDevices { claim: full(asked), driver: node.driver.to_owned() });
    }
    let configs = Configs::read(configs, node.driver)?;
    let mut prepared: Vec<PreparedDevice> = Vec::new();
    let mut chosen: BTreeMap<&str, Vec<ChosenDevice<'_>>> = BTreeMap::new();
    let mut by_mps: Vec<Asked<'_>> = Vec::new();
    for result in ours {
        let (hardware, made) = hardware(result, node, others.clone())?;
        let kind = if hardware.mig.is_some() || made.is_some() { Kind::Mig } else { Kind::Gpu };
        let config = configs.mps(&result.request, &result.device, kind)?;
        let request = base(&result.request);
        let admin = result.admin_access == Some(true);
        let of_share = |why| ClaimError::Share { device: result.device.clone(), gpu: hardware.gpu.uuid.clone(), why };
        let sharing = node.state.dra_sharing(&hardware.gpu.uuid).now.filter(|_| kind == Kind::Gpu);
        let share = if admin { None } else { share::of(result, sharing, hardware.gpu.memory_mib).map_err(of_share)? };
        let device = PreparedDevice {
            request: request.to_owned(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
            share,
            admin,
            gpu: hardware.gpu.uuid.clone(),
            mig: hardware.mig.map(|mig| mig.uuid.clone()),
            made,
            cdi: Vec::new(),
        };
        if let Some(other) = prepared.iter().find(|other| device.excludes(other)) {
            return Err(ClaimError::Repeated { device: device.device, other: other.device.clone() });
        }
        let holds = |other: &Prepared| other.devices.iter().any(|held| device.excludes(held));
        let holders = others.clone().filter(|(name, _)| name.uid != asked.uid);
        if let Some((holder, _)) = holders.clone().find(|(_, other)| holds(other)) {
            let holder = Box::new(Holder(holder.clone()));
            return Err(ClaimError::Taken { device: device.device, gpu: device.gpu, holder });
        }
        if let Some((share, sharing)) = device.share.zip(sharing) {
            let beside = holders.flat_map(|(name, other)| other.devices.iter().map(move |device| (Some(name), device)));
            let beside = beside.chain(prepared.iter().map(|device| (None, device)));
            let beside = beside.filter(|(_, other)| !other.admin && device.overlaps(other));
            let beside = beside.filter_map(|(name, other)| Some((name, other.share?)));
            share::fits(share, sharing, hardware.gpu.memory_mib, beside).map_err(of_share)?;
        }
        let beside = || node.state.ledger().holder_beside(node.state.topology(), &device.gpu, node.driver, node.pool);
        if let Some(holder) = (!device.admin).then(beside).flatten() {
            return Err(ClaimError::Held { device: device.device, gpu: device.gpu, holder });
        }
        if let Some(config) = config {
            let (request, device, share) = (request.to_owned(), device.device.clone(), share.zip(sharing));
            by_mps.push(Asked { request, device, gpu: hardware.gpu, admin, share, config });
        }
        chosen.entry(request).or_default().push(hardware);
        prepared.push(device);
    }
    let beside = others.filter(|(name, _)| name.uid != asked.uid);
    let mps = mps::plan(&by_mps, beside.filter_map(|(name, other)| Some((name, other.mps.as_ref()?))));
    let mps = mps.map_err(|(of, why)| {
        let (device, gpu) = (of.device.clone(), of.gpu.uuid.clone());
        ClaimError::Mps { device, gpu, why }
    })?;
    if prepared.iter().any(PreparedDevice::is_unmade) {
        // What has no UUID yet has no CDI name: see `complete`.
        return Ok(Prepared { devices: prepared, edits: BTreeMap::new(), mps });
    }
    let edits = inject(&asked.uid, &mut prepared, mps.as_ref(), &chosen, node)?;
    Ok(Prepared { devices: prepared, edits, mps })
}

/// The same with the CDI names of its devices, once all MIG devices of it are made and in the snapshot.
///
/// # Errors
///
/// One of them is not in the snapshot, or containers could not get it.
pub fn complete(uid: &str, prepared: Prepared, node: Node<'_>) -> Result<Prepared, ClaimError> {
    let (mut devices, topology) = (prepared.devices, node.state.topology());
    let mut chosen: BTreeMap<String, Vec<ChosenDevice<'_>>> = BTreeMap::new();
    for device in &devices {
        let gpu = topology.gpus().iter().find(|gpu| gpu.uuid == device.gpu);
        let mig = device.mig.as_ref().map(|uuid| topology.mig_devices().iter().find(|mig| mig.uuid == *uuid));
        let (Some(gpu), false, false) = (gpu, device.is_unmade(), mig == Some(None)) else {
            return Err(ClaimError::Vanished { device: device.device.clone(), gpu: device.gpu.clone() });
        };
        chosen.entry(device.request.clone()).or_default().push(ChosenDevice { gpu, mig: mig.flatten() });
    }
    let chosen = chosen.iter().map(|(request, devices)| (request.as_str(), devices.clone())).collect();
    let edits = inject(uid, &mut devices, prepared.mps.as_ref(), &chosen, node)?;
    Ok(Prepared { devices, edits, mps: prepared.mps })
}

/// The hardware of an allocated device, if containers can have it, and the GPU instance where its MIG device is made for
/// the claim.
fn hardware<'a, 'b>(
    result: &AllocatedDevice,
    node: Node<'a>,
    records: impl Iterator<Item = (&'b ClaimName, &'b Prepared)> + Clone,
) -> Result<(ChosenDevice<'a>, Option<MigSlot>), ClaimError> {
    if let Some(OnDemand { gpu, slot, made }) = on_demand(result, node, records)? {
        usable(result, gpu, node)?;
        return Ok((ChosenDevice { gpu, mig: made }, Some(slot)));
    }
    of_this_pool(result, node)?;
    let topology: &NodeTopology = node.state.topology();
    let hardware = hardware_of(topology, &result.device).ok_or_else(|| {
        let known: Vec<String> = devices(topology).into_iter().map(|(name, _)| name).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        ClaimError::UnknownDevice { device: result.device.clone(), known }
    })?;
    usable(result, hardware.gpu, node)?;
    Ok((hardware, None))
}

fn of_this_pool(result: &AllocatedDevice, node: Node<'_>) -> Result<(), ClaimError> {
    let (device, pool, ours) = (result.device.clone(), result.pool.clone(), node.pool.to_owned());
    if pool == ours { Ok(()) } else { Err(ClaimError::OtherPool { device, pool, ours }) }
}

/// Whether containers can have a GPU of an allocated device, or a part of it.
fn usable(result: &AllocatedDevice, gpu: &Gpu, node: Node<'_>) -> Result<(), ClaimError> {
    of_this_pool(result, node)?;
    let (device, gpu) = (result.device.clone(), gpu.uuid.clone());
    let door = node.state.door(&gpu);
    if !door.is_some_and(Door::is_dra) {
        return Err(ClaimError::NotDra { device, gpu, door });
    }
    let lost = node.state.hardware().standing(&gpu).map(|(reason, _)| reason).find(|reason| reason.is_loss());
    match lost {
        Some(reason) => Err(ClaimError::Lost { device, reason: reason.clone(), gpu }),
        None => Ok(()),
    }
}

/// Gives each device its CDI names, and returns what each request has beside. A container gets the CDI devices of the
/// requests that it names, or of all: what belongs to a request and not to one device is with the first of its devices.
fn inject(
    uid: &str,
    prepared: &mut [PreparedDevice],
    mps: Option<&ClaimMps>,
    chosen: &BTreeMap<&str, Vec<ChosenDevice<'_>>>,
    node: Node<'_>,
) -> Result<BTreeMap<String, Edits>, ClaimError> {
    let topology = node.state.topology();
    // Static names by UUID: nothing of them is lost with a reboot, and an index is another GPU's tomorrow. NVIDIA's
    // runtime has no part in DRA.
    let options = InjectionOptions {
        envvar: false,
        volume_mounts: false,
        device_nodes: false,
        ids: Default::default(),
        ..node.injection.clone()
    };
    let mut edits = BTreeMap::new();
    for (request, devices) in chosen {
        let limits = mps.and_then(|mps| mps.clients.get(*request));
        let daemon = mps.filter(|_| limits.is_some()).and_then(|mps| mps.order.name());
        let client = daemon.map(|daemon| MpsClient::new(&options.mps_root, &daemon));
        let granted = Granted { topology, devices: devices.clone(), mps: client };
        let mut injection = options.inject(&granted, node.host)?;
        injection.env.extend(limits.copied().into_iter().flat_map(ClientLimits::variables));
        let names = core::mem::take(&mut injection.cdi_devices);
        let of_request: BTreeSet<&str> = devices.iter().map(ChosenDevice::uuid).collect();
        let is_gpu = |name: &str| name.split_once('=').is_some_and(|(_, id)| of_request.contains(id));
        let mut beside: Vec<String> = names.iter().filter(|name| !is_gpu(name)).cloned().collect();
        let own = Edits::from(injection);
        if !own.is_empty() {
            beside.push(format!("{CLAIM_KIND}={}", claim_device(uid, request)));
            edits.insert((*request).to_owned(), own);
        }
        let mut beside = Some(beside);
        for device in prepared.iter_mut().filter(|device| device.request == **request) {
            let id = device.mig.as_ref().map_or(device.gpu.as_str(), |mig| mig.as_str());
            let gpu = names.iter().filter(|name| name.split_once('=').is_some_and(|(_, of)| of == id)).cloned();
            device.cdi = gpu.chain(beside.take().into_iter().flatten()).collect();
        }
    }
    Ok(edits)
}

#[cfg(test)]
mod tests;
