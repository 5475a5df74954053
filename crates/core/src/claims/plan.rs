//! Prepares a claim that was allocated here, or refuses it with the reason.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::claim::{AllocatedDevice, Claim, Holder, base};
use super::config::{Configs, Kind};
use super::device::{devices, hardware_of};
use super::error::{ClaimError, DeviceRefusal};
use super::mig::{OnDemand, on_demand};
use super::mps::{self, Asked, ClaimMps, ClientLimits};
use super::node::Node;
use super::prepared::{CLAIM_KIND, Edits, Prepared, PreparedDevice, claim_device};
use super::share;
use crate::publish::MpsClient;
use crate::publish::injection::{ChosenDevice, Granted, InjectionOptions};
use crate::state::{ClaimName, DRA_DRIVER, Door};
use crate::topology::{Gpu, MigSlot, NodeTopology};

/// The most devices of a claim, of all drivers (`AllocationResultsMaxSize` of resource.k8s.io).
const MOST_DEVICES: usize = 32;

/// The most configurations of a claim that has devices: its own and its classes' (twice `DeviceConfigMaxSize`).
const MOST_CONFIGS: usize = 64;

/// Plans the preparation of a claim. `others` are the claims that are prepared here or are being prepared.
///
/// A GPU that the driver has lost, or that is gone, is refused: its container could not start, and the error says why.
/// A GPU that is sick otherwise is not refused. Its taint is in our slices, so the scheduler allocated it either
/// because the claim tolerates the taint or before the taint was there. The operator wants the former, for example for
/// a pod that tests the GPU. A GPU that a pod holds through a device plugin, or through a claim of the DRA driver that
/// linkwise replaced, is refused as far as the kubelet lists it: either may have served the node before.
///
/// # Errors
///
/// The first thing that is wrong. Nothing is prepared then.
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
        let (asked, found, claim) = (asked.uid.clone(), claim.metadata.uid.clone(), full(asked));
        return Err(ClaimError::OtherUid { claim, asked, found });
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
    let ours: Vec<&AllocatedDevice> = results.iter().filter(|result| result.driver == DRA_DRIVER).collect();
    if ours.is_empty() {
        return Err(ClaimError::NoDevices(full(asked)));
    }
    let configs = Configs::read(configs)?;
    let mut prepared: Vec<PreparedDevice> = Vec::new();
    let mut chosen: BTreeMap<&str, Vec<ChosenDevice<'_>>> = BTreeMap::new();
    let mut by_mps: Vec<Asked<'_>> = Vec::new();
    for result in ours {
        let (hardware, made) = hardware(result, node, others.clone())?;
        let kind = if hardware.mig.is_some() || made.is_some() { Kind::Mig } else { Kind::Gpu };
        let config = configs.mps(&result.request, &result.device, kind)?;
        let request = base(&result.request);
        let admin = result.admin_access == Some(true);
        let refused = |why| ClaimError::of_device(&result.device, &hardware.gpu.uuid, why);
        let of_share = |why| refused(DeviceRefusal::Share(why));
        let sharing = node.state.dra_sharing(&hardware.gpu.uuid).now.filter(|_| kind == Kind::Gpu);
        let share =
            if admin { None } else { share::of(result, sharing, hardware.gpu.facts.memory_mib).map_err(of_share)? };
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
            return Err(ClaimError::Repeated(device.device, other.device.clone()));
        }
        let holds = |other: &Prepared| other.devices.iter().any(|held| device.excludes(held));
        let holders = others.clone().filter(|(name, _)| name.uid != asked.uid);
        if let Some((holder, _)) = holders.clone().find(|(_, other)| holds(other)) {
            return Err(refused(DeviceRefusal::Taken(Box::new(Holder(holder.clone())))));
        }
        if let Some((share, sharing)) = device.share.zip(sharing) {
            let beside = holders.flat_map(|(name, other)| other.devices.iter().map(move |device| (Some(name), device)));
            let beside = beside.chain(prepared.iter().map(|device| (None, device)));
            let beside = beside.filter(|(_, other)| !other.admin && device.overlaps(other));
            let beside = beside.filter_map(|(name, other)| Some((name, other.share?)));
            share::fits(share, sharing, hardware.gpu.facts.memory_mib, beside).map_err(of_share)?;
        }
        let beside = || node.state.ledger().holder_beside(node.state.topology(), &device.gpu, node.pool);
        if let Some(holder) = (!device.admin).then(beside).flatten() {
            return Err(refused(DeviceRefusal::Held(holder)));
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
    let mps = mps.map_err(|(of, why)| ClaimError::of_device(&of.device, &of.gpu.uuid, DeviceRefusal::Mps(why)))?;
    if prepared.iter().any(PreparedDevice::is_unmade) {
        // A device without a UUID has no CDI name yet: see `complete`.
        return Ok(Prepared { devices: prepared, edits: BTreeMap::new(), mps });
    }
    let edits = inject(&asked.uid, &mut prepared, mps.as_ref(), &chosen, node)?;
    Ok(Prepared { devices: prepared, edits, mps })
}

/// Adds the CDI names of the devices, once all MIG devices of the claim are made and in the snapshot.
///
/// # Errors
///
/// A device is not in the snapshot, or containers could not get it.
pub fn complete(uid: &str, prepared: Prepared, node: Node<'_>) -> Result<Prepared, ClaimError> {
    let (mut devices, topology) = (prepared.devices, node.state.topology());
    let mut chosen: BTreeMap<String, Vec<ChosenDevice<'_>>> = BTreeMap::new();
    for device in &devices {
        let gpu = topology.gpus().iter().find(|gpu| gpu.uuid == device.gpu);
        let mig = device.mig.as_ref().map(|uuid| topology.mig_devices().iter().find(|mig| mig.uuid == *uuid));
        let (Some(gpu), false, false) = (gpu, device.is_unmade(), mig == Some(None)) else {
            return Err(ClaimError::of_device(&device.device, &device.gpu, DeviceRefusal::Vanished));
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
        ClaimError::UnknownDevice(result.device.clone(), known)
    })?;
    usable(result, hardware.gpu, node)?;
    Ok((hardware, None))
}

fn of_this_pool(result: &AllocatedDevice, node: Node<'_>) -> Result<(), ClaimError> {
    let (device, pool, ours) = (result.device.clone(), result.pool.clone(), node.pool.to_owned());
    if pool == ours { Ok(()) } else { Err(ClaimError::OtherPool { device, pool, ours }) }
}

/// Checks that containers can have a GPU of an allocated device, or a part of it.
fn usable(result: &AllocatedDevice, gpu: &Gpu, node: Node<'_>) -> Result<(), ClaimError> {
    of_this_pool(result, node)?;
    let refused = |why| Err(ClaimError::of_device(&result.device, &gpu.uuid, why));
    let door = node.state.door(&gpu.uuid);
    if !door.is_some_and(Door::is_dra) {
        return refused(DeviceRefusal::NotDra(door));
    }
    let lost = node.state.hardware().standing(&gpu.uuid).map(|(reason, _)| reason).find(|reason| reason.is_loss());
    lost.map_or(Ok(()), |reason| refused(DeviceRefusal::Lost(reason.clone())))
}

/// Gives each device its CDI names. Returns the edits of each request beside its GPUs. A container gets the CDI devices
/// of the requests that it names, or of all requests. Edits of a request that belong to no single device are with the
/// first of its devices.
fn inject(
    uid: &str,
    prepared: &mut [PreparedDevice],
    mps: Option<&ClaimMps>,
    chosen: &BTreeMap<&str, Vec<ChosenDevice<'_>>>,
    node: Node<'_>,
) -> Result<BTreeMap<String, Edits>, ClaimError> {
    let topology = node.state.topology();
    // Names by UUID: they survive a reboot, while an index may be another GPU's after it. NVIDIA's runtime has no part
    // in DRA.
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
