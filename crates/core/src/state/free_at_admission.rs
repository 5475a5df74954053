//! The best bandwidth that was free when a container or a claim was given GPUs.
//!
//! Called by [`super::NodeState::apply`] before it notes the admission; [`super::admissions`] keeps the answer.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{Device, FreeThen, Hardware, Health, Ledger, Offers, PreparedClaim, ResourceDevice, ResourceName, gpu_of};
use crate::allocation::{DeviceId, GpuSet};
use crate::topology::Gpu;

/// The GPUs of healthy devices that are not MIG devices.
pub(super) fn healthy_whole_gpus<'a>(hardware: &Hardware, devices: impl Iterator<Item = &'a Device>) -> GpuSet {
    let whole = devices.filter(|device| device.mig.is_none() && device.health == Health::Healthy);
    whole.filter_map(|device| hardware.topology().position(&device.gpu.uuid)).collect()
}

/// The best bandwidth of as many GPUs as `given`: among `given` and `free`, and among `given` and all GPUs without a
/// standing reason or a cordon.
fn best_bandwidths(hardware: &Hardware, given: GpuSet, free: GpuSet) -> Option<FreeThen> {
    let (tables, gpus) = (hardware.tables(), hardware.topology().gpus());
    let own = tables.collective(given)?;
    let may_work = |gpu: &Gpu| hardware.reasons(&gpu.uuid).next().is_none() && hardware.cordon(&gpu.uuid).is_none();
    let is_healthy = |place: &usize| gpus.get(*place).is_some_and(may_work);
    let healthy: GpuSet = (0..gpus.len()).filter(is_healthy).collect();
    let best = |of: GpuSet| tables.best_collective(of.union(given), given.len()).map(|best| best.max(own));
    Some(FreeThen { free: best(free)?, healthy: best(healthy)? })
}

/// The best bandwidth that was free when devices of a resource were given. `offered` are the devices from which the
/// kubelet let us choose.
pub(super) fn at_allocate(
    (hardware, ledger, offers): (&Hardware, &Ledger, &Offers),
    resource: &ResourceName,
    devices: &BTreeSet<DeviceId>,
    offered: &[DeviceId],
) -> Option<FreeThen> {
    let topology = hardware.topology();
    let place = |id: &DeviceId| gpu_of(topology, id).filter(|(_, is_whole)| *is_whole).map(|(place, _)| place);
    let given: GpuSet = devices.iter().map(place).collect::<Option<_>>()?;
    if given.len() < 2 || !ledger.is_known() {
        return None;
    }
    let is_held = |id: &DeviceId| {
        let key: ResourceDevice = (resource.clone(), id.clone());
        ledger.holdings().has(&key) || ledger.admissions.unlisted().any(|unlisted| unlisted == (resource, id))
    };
    // A pod may have ended since the last list. The kubelet knows that and offers its devices.
    let offered: BTreeSet<&DeviceId> = offered.iter().collect();
    let free = offers.of(resource).filter(|(id, _)| offered.contains(id) || !is_held(id));
    best_bandwidths(hardware, given, healthy_whole_gpus(hardware, free.map(|(_, device)| device)))
}

/// The best bandwidth that was free when our DRA plugin began to prepare claims, by UID; `None` if it is unknown, or if
/// the ledger or the kubelet's list has the claim already.
pub(super) fn at_prepare(
    (hardware, ledger, offers): (&Hardware, &Ledger, &Offers),
    claims: &[PreparedClaim],
) -> BTreeMap<String, Option<FreeThen>> {
    let topology = hardware.topology();
    let held = ledger.held(topology, |resource, id| offers.gpu_of(resource, id)).filter(|_| ledger.is_known());
    let mut occupied: Option<GpuSet> = held.map(|held| held.iter().filter_map(|gpu| topology.position(gpu)).collect());
    let mut at_prepare = |prepared: &PreparedClaim| {
        let given: GpuSet = prepared.gpus().filter_map(|gpu| topology.position(gpu)).collect();
        let name = prepared.claim.to_string();
        let is_new = ledger.prepared(&prepared.claim.uid).is_none();
        let is_listed = ledger.holdings().claims.iter().any(|claimed| claimed.claim == name);
        let occupied = occupied.as_mut().filter(|_| is_new && !is_listed)?;
        let free = healthy_whole_gpus(hardware, offers.through_dra().iter()).without(*occupied);
        *occupied = occupied.union(given);
        best_bandwidths(hardware, given, free)
    };
    claims.iter().map(|prepared| (prepared.claim.uid.clone(), at_prepare(prepared))).collect()
}
