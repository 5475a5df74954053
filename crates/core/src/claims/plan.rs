//! Prepares a claim that was allocated here, or refuses it with the reason.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use super::claim::{AllocatedDevice, Claim, alternative, base};
use super::config::{Configs, Kind};
use super::containers::containers;
use super::error::{ClaimError, DeviceRefusal};
use super::mig::on_demand;
use super::mps::{self, Asked};
use super::share;
use crate::names::is_word;
use crate::publish::injection::{ChosenDevice, HostDevices, InjectionOptions};
use crate::state::{
    ClaimName, DRA_DRIVER, Door, NodeState, Prepared, PreparedDevice, ResourceName, claim_device, claim_member,
};
use crate::topology::{Gpu, MigSlot, NodeTopology, device_names};
use crate::words::list;

/// The most devices of a claim, of all drivers (`AllocationResultsMaxSize` of resource.k8s.io).
const MAX_DEVICES: usize = 32;

/// The most configurations of a claim that has devices: its own and its classes' (twice `DeviceConfigMaxSize`).
const MAX_CONFIGS: usize = 64;

/// The longest DNS label.
const MAX_LABEL: usize = 63;

/// The facts that a plan is made from, apart from the claim.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The pool's name.
    pub pool: &'a str,
    /// The snapshot.
    pub state: &'a NodeState,
    /// The options by which containers get their GPUs; with CDI.
    pub injection: &'a InjectionOptions,
    /// The host's devices other than GPUs.
    pub host: &'a HostDevices,
    /// True if MIG devices are made for claims.
    pub makes_mig: bool,
    /// The MPS control daemons that serve and have no shared memory of their own: an older release started them.
    pub common_shm: &'a BTreeSet<ResourceName>,
}

/// Plans the preparation of a claim by the state of its node. The state has one writer, which enters the result into the
/// ledger before any other plan: so nothing is given twice.
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
pub fn plan(claim: &Claim, asked: &ClaimName, node: PlanInputs<'_>) -> Result<Prepared, ClaimError> {
    let (name, found) = (asked.to_string(), claim.metadata.to_string());
    if found != name {
        return Err(ClaimError::OtherClaim { asked: name, found });
    }
    if claim.metadata.uid != asked.uid {
        let (asked, found, claim) = (asked.uid.clone(), claim.metadata.uid.clone(), name);
        return Err(ClaimError::OtherUid { claim, asked, found });
    }
    let allocation = claim.status.allocation.as_ref().ok_or_else(|| ClaimError::NotAllocated(name.clone()))?;
    let (results, configs) = (&allocation.devices.results, &allocation.devices.config);
    for (what, count, limit) in
        [("devices", results.len(), MAX_DEVICES), ("configurations", configs.len(), MAX_CONFIGS)]
    {
        if count > limit {
            return Err(ClaimError::TooMany { claim: name, what, count, limit });
        }
    }
    let ours: Vec<&AllocatedDevice> = results.iter().filter(|result| result.driver == DRA_DRIVER).collect();
    if ours.is_empty() {
        return Err(ClaimError::NoDevices(name));
    }
    let configs = Configs::read(configs)?;
    let others = || node.state.ledger().claims().filter(|(name, _)| name.uid != asked.uid);
    let mut prepared: Vec<PreparedDevice> = Vec::new();
    let mut by_mps: Vec<Asked<'_>> = Vec::new();
    for result in ours {
        let (hardware, made) = hardware(result, asked, node)?;
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
            alternative: alternative(&result.request).map(ToOwned::to_owned),
            pool: result.pool.clone(),
            share_id: result.share_id.clone(),
            share,
            admin,
            mig: hardware.mig.map(|mig| mig.uuid.clone()),
            made,
            cdi: vec![claim_member(&asked.uid, request, &result.device), claim_device(&asked.uid, request)],
            ..PreparedDevice::whole(&result.device, hardware.gpu.uuid.clone())
        };
        if let Some(other) = prepared.iter().find(|other| device.excludes(other)) {
            return Err(ClaimError::Repeated(device.device, other.device.clone()));
        }
        let holds = |other: &Prepared| other.devices.iter().any(|held| device.excludes(held));
        let holders = others();
        if let Some((holder, _)) = holders.clone().find(|(_, other)| holds(other)) {
            return Err(refused(DeviceRefusal::Taken(Box::new(holder.clone()))));
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
        prepared.push(device);
    }
    let mps = mps::plan(&by_mps, others().filter_map(|(name, other)| Some((name, other.mps.as_ref()?))))?;
    // The annotation is a user's, and the name a DNS label that becomes a part of a path.
    let is_label = |name: &String| name.len() <= MAX_LABEL && is_word(name, b"-");
    let pod_claim_name = claim.pod_claim_name.clone().filter(is_label);
    let mut prepared = Prepared { devices: prepared, mps, pod_claim_name };
    if let Some(before) = node.state.ledger().prepared(&asked.uid) {
        let kind = node.injection.cdi.as_ref().map_or("", |cdi| cdi.kind.as_str());
        prepared.keep_names(&before.prepared, kind).map_err(ClaimError::OldNames)?;
    }
    // MIG devices that are still to be made have no nodes yet.
    if !prepared.devices.iter().any(PreparedDevice::is_unmade) {
        containers(&prepared, node)?;
    }
    Ok(prepared)
}

/// The hardware of an allocated device, if containers can have it, and the GPU instance where its MIG device is made for
/// the claim.
fn hardware<'a>(
    result: &AllocatedDevice,
    asked: &ClaimName,
    node: PlanInputs<'a>,
) -> Result<(ChosenDevice<'a>, Option<MigSlot>), ClaimError> {
    if let Some((hardware, slot)) = on_demand(result, node)? {
        usable(result, hardware.gpu, asked, node)?;
        return Ok((hardware, Some(slot)));
    }
    of_this_pool(result, node)?;
    let devices = devices(node.state.topology());
    let Some((_, hardware)) = devices.iter().find(|(name, _)| *name == result.device) else {
        let known = if devices.is_empty() { "none".to_owned() } else { list(devices.iter().map(|(name, _)| name)) };
        return Err(ClaimError::UnknownDevice(result.device.clone(), known));
    };
    usable(result, hardware.gpu, asked, node)?;
    Ok((*hardware, None))
}

/// All devices by their published names: GPUs that are not in MIG mode, and MIG devices.
pub fn devices(topology: &NodeTopology) -> Vec<(String, ChosenDevice<'_>)> {
    let chosen = |(place, mig): (usize, Option<usize>)| {
        let gpu = topology.gpus().get(place)?;
        match mig {
            Some(mig) => Some(ChosenDevice { gpu, mig: Some(topology.mig_devices().get(mig)?) }),
            None => (!gpu.mig_enabled).then_some(ChosenDevice { gpu, mig: None }),
        }
    };
    let names = device_names(topology).into_iter();
    names.filter_map(|(hardware, name)| Some((name, chosen(hardware)?))).collect()
}

fn of_this_pool(result: &AllocatedDevice, node: PlanInputs<'_>) -> Result<(), ClaimError> {
    let (device, pool, ours) = (result.device.clone(), result.pool.clone(), node.pool.to_owned());
    if pool == ours { Ok(()) } else { Err(ClaimError::OtherPool { device, pool, ours }) }
}

/// Checks that containers can have a GPU of an allocated device, or a part of it. A claim whose checkpoint has the GPU
/// keeps it, though the node's door is the device plugin by now.
fn usable(result: &AllocatedDevice, gpu: &Gpu, asked: &ClaimName, node: PlanInputs<'_>) -> Result<(), ClaimError> {
    of_this_pool(result, node)?;
    let refused = |why| Err(ClaimError::of_device(&result.device, &gpu.uuid, why));
    let (door, ledger) = (node.state.door(&gpu.uuid), node.state.ledger());
    let is_own = ledger.prepared(&asked.uid).is_some_and(|own| own.has(&gpu.uuid));
    if !(is_own || door == Some(Door::Dra) && node.state.is_with_dra(&gpu.uuid)) {
        let holder =
            ledger.holder_beside(node.state.topology(), &gpu.uuid, node.pool).filter(|_| door == Some(Door::Dra));
        return refused(holder.map_or(DeviceRefusal::NotDra(door), DeviceRefusal::Held));
    }
    let lost = node.state.hardware().reasons(&gpu.uuid).map(|(reason, _)| reason).find(|reason| reason.is_loss());
    lost.map_or(Ok(()), |reason| refused(DeviceRefusal::Lost(reason.clone())))
}

#[cfg(test)]
mod tests;
