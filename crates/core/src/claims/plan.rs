//! Plans the preparation of a claim whose devices are allocated on this node, or refuses the claim with the reason.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use super::claim::{AllocatedConfig, AllocatedDevice, Claim, alternative, base};
use super::config::{Configs, Kind};
use super::containers::containers;
use super::error::{ClaimError, DeviceRefusal};
use super::mig::on_demand;
use super::mps::{self, MpsDevice};
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

/// The most configurations of an allocation: those of the claim and those of its device classes (twice
/// `DeviceConfigMaxSize`).
const MAX_CONFIGS: usize = 64;

/// The longest DNS label, in bytes.
const MAX_LABEL: usize = 63;

/// The inputs of a plan besides the claim.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The name of this node's pool.
    pub pool: &'a str,
    /// The snapshot.
    pub state: &'a NodeState,
    /// The operator's options for containers. DRA needs CDI in them.
    pub injection: &'a InjectionOptions,
    /// The host's devices other than GPUs.
    pub host: &'a HostDevices,
    /// True if the node makes MIG devices for claims.
    pub makes_mig: bool,
    /// The running MPS control daemons without shared memory of their own, because an older release started them.
    pub common_shm: &'a BTreeSet<ResourceName>,
}

/// Plans the preparation of the claim that the kubelet requested. The state's one writer enters each plan into the
/// ledger before it makes the next one, so no two claims get the same hardware.
///
/// - A GPU that the driver has lost, or that is gone, is refused, because its container could not start.
/// - A GPU that is unhealthy for another reason is not refused. Its taint is in our slices, so the scheduler allocated
///   the GPU either because the claim tolerates the taint, for example for a pod that tests the GPU, or before the
///   taint was published.
/// - A GPU that DRA does not offer is refused, unless the claim has it already.
/// - Without adminAccess a GPU is refused if, by the kubelet's list, a pod holds it through a device plugin (ours or an
///   earlier one), or a claim through the DRA driver that linkwise replaced.
///
/// # Errors
///
/// The first fault that is found. Nothing is prepared then.
pub fn plan(claim: &Claim, requested: &ClaimName, node: PlanInputs<'_>) -> Result<Prepared, ClaimError> {
    let (ours, configs) = allocated(claim, requested)?;
    let configs = Configs::read(configs)?;
    let others = || node.state.ledger().claims().filter(|(name, _)| name.uid != requested.uid);
    let mut prepared: Vec<PreparedDevice> = Vec::new();
    let mut by_mps: Vec<MpsDevice<'_>> = Vec::new();
    for result in ours {
        let (hardware, made) = hardware(result, &requested.uid, node)?;
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
            cdi: vec![claim_member(&requested.uid, request, &result.device), claim_device(&requested.uid, request)],
            ..PreparedDevice::whole(&result.device, hardware.gpu.uuid.clone())
        };
        if let Some(other) = prepared.iter().find(|other| device.excludes(other)) {
            return Err(ClaimError::Repeated(device.device, other.device.clone()));
        }
        let holds = |other: &Prepared| other.devices.iter().any(|held| device.excludes(held));
        if let Some((holder, _)) = others().find(|(_, other)| holds(other)) {
            return Err(refused(DeviceRefusal::Taken(Box::new(holder.clone()))));
        }
        if let Some((share, sharing)) = device.share.zip(sharing) {
            let held = others().flat_map(|(name, other)| other.devices.iter().map(move |device| (Some(name), device)));
            let held = held.chain(prepared.iter().map(|device| (None, device)));
            let held = held.filter(|(_, other)| !other.admin && device.overlaps(other));
            let held = held.filter_map(|(name, other)| Some((name, other.share?)));
            share::fits(share, sharing, hardware.gpu.facts.memory_mib, held).map_err(of_share)?;
        }
        let holder = || node.state.ledger().holder_beside(node.state.topology(), &device.gpu, node.pool);
        if let Some(holder) = (!device.admin).then(holder).flatten() {
            return Err(refused(DeviceRefusal::Held(holder)));
        }
        if let Some((config_number, config)) = config {
            let (request, name, share) = (request.to_owned(), device.device.clone(), share.zip(sharing));
            by_mps.push(MpsDevice { request, name, gpu: hardware.gpu, admin, share, config_number, config });
        }
        prepared.push(device);
    }
    let mps = mps::plan(&by_mps, others().filter_map(|(name, other)| Some((name, other.mps.as_ref()?))))?;
    // The name, from an annotation that a user may have written, becomes a part of a path.
    let is_label = |name: &String| name.len() <= MAX_LABEL && is_word(name, b"-");
    let pod_claim_name = claim.pod_claim_name.clone().filter(is_label);
    let mut prepared = Prepared { devices: prepared, mps, pod_claim_name };
    if let Some(before) = node.state.ledger().prepared(&requested.uid) {
        let kind = node.injection.cdi.as_ref().map_or("", |cdi| cdi.kind.as_str());
        prepared.keep_names(&before.prepared, kind).map_err(ClaimError::OldNames)?;
    }
    // MIG devices that are still to be made have no device nodes yet.
    if !prepared.devices.iter().any(PreparedDevice::is_unmade) {
        containers(&prepared, node)?;
    }
    Ok(prepared)
}

/// Returns the claim's devices of this driver and all its configurations, if it is the requested claim and within the
/// limits of the API.
fn allocated<'a>(
    claim: &'a Claim,
    requested: &ClaimName,
) -> Result<(Vec<&'a AllocatedDevice>, &'a [AllocatedConfig]), ClaimError> {
    let (name, found) = (requested.to_string(), claim.metadata.to_string());
    if found != name {
        return Err(ClaimError::OtherClaim { requested: name, found });
    }
    if claim.metadata.uid != requested.uid {
        let (requested, found, claim) = (requested.uid.clone(), claim.metadata.uid.clone(), name);
        return Err(ClaimError::OtherUid { claim, requested, found });
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
    Ok((ours, configs))
}

/// Finds the hardware of an allocated device, and checks that containers can have it. For a MIG device that is made for
/// the claim, also returns its GPU instance.
fn hardware<'a>(
    result: &AllocatedDevice,
    uid: &str,
    node: PlanInputs<'a>,
) -> Result<(ChosenDevice<'a>, Option<MigSlot>), ClaimError> {
    if let Some((hardware, slot)) = on_demand(result, node)? {
        check_gpu(result, hardware.gpu, uid, node)?;
        return Ok((hardware, Some(slot)));
    }
    check_pool(result, node)?;
    let devices = devices(node.state.topology());
    let Some((_, hardware)) = devices.iter().find(|(name, _)| *name == result.device) else {
        let known = if devices.is_empty() { "none".to_owned() } else { list(devices.iter().map(|(name, _)| name)) };
        return Err(ClaimError::UnknownDevice(result.device.clone(), known));
    };
    check_gpu(result, hardware.gpu, uid, node)?;
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

fn check_pool(result: &AllocatedDevice, node: PlanInputs<'_>) -> Result<(), ClaimError> {
    let (device, pool, ours) = (result.device.clone(), result.pool.clone(), node.pool.to_owned());
    if pool == ours { Ok(()) } else { Err(ClaimError::OtherPool { device, pool, ours }) }
}

/// Checks that containers can have the GPU of an allocated device, or a part of the GPU. A claim that has the GPU in
/// the ledger keeps it, even if the node's door is the device plugin now.
fn check_gpu(result: &AllocatedDevice, gpu: &Gpu, uid: &str, node: PlanInputs<'_>) -> Result<(), ClaimError> {
    check_pool(result, node)?;
    let refused = |why| Err(ClaimError::of_device(&result.device, &gpu.uuid, why));
    let (door, ledger) = (node.state.door(&gpu.uuid), node.state.ledger());
    let is_own = ledger.prepared(uid).is_some_and(|own| own.has(&gpu.uuid));
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
