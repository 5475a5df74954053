//! Resources that are shared by MPS: the GPUs of each, the limits of MPS, and slots that are offered only while their
//! control daemon is ready.
//!
//! A part of [`super::Offers`]. The node reports the daemons that are ready as an event. The daemons' own process
//! also reads [`super::NodeState::mps_shares`], so that both sides have the same shares.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::ResourceName;
use super::device::{Device, Timestamp};
use super::mps_share::MpsShare;
use super::problem::PlanProblem;
use crate::allocation::DeviceId;
use crate::topology::{ComputeCapability, Gpu};

/// The oldest GPUs that MPS works on (man nvidia-cuda-mps-control, driver 580: "SM 3.5 or higher").
const FIRST: ComputeCapability = ComputeCapability { major: 3, minor: 5 };

/// The most clients of an MPS server for each GPU: since Volta, and before (man nvidia-cuda-mps-control, driver 580:
/// "SM 7.0 has a limit of 48", "SM 3.5 through SM 6.0 the limit is 16"). The NVIDIA plugin counts Volta among the older
/// GPUs.
const MOST_CLIENTS: (u32, u32) = (48, 16);

/// The compute capability of Volta.
pub(crate) const VOLTA: ComputeCapability = ComputeCapability { major: 7, minor: 0 };

/// The resources that are shared by MPS, and the readiness of their daemons.
#[derive(Clone, Debug, Default)]
pub(super) struct Mps {
    /// The resources that are shared by MPS, offered or not, with the GPUs of each.
    pub(super) shares: BTreeMap<ResourceName, MpsShare>,
    /// The daemons that are ready, each with its share.
    pub(super) ready: BTreeMap<ResourceName, MpsShare>,
    /// The resources whose daemon is not ready, each with the time at which the wait began.
    waiting: BTreeMap<ResourceName, Timestamp>,
}

impl Mps {
    /// The time since which a slot waits for its resource's daemon; `None` if it does not wait.
    pub(super) fn waits(&self, resource: &ResourceName, device: &Device) -> Option<Timestamp> {
        self.waiting.get(resource).copied().filter(|_| device.slot.is_some())
    }

    /// Removes the new slots of resources whose daemon is not ready from `made`. Slots that are on the list already
    /// stay there, unhealthy, because pods may hold them.
    pub(super) fn hold_back(
        &mut self,
        by_mps: bool,
        gpus_of_node: usize,
        made: &mut BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
        is_listed: impl Fn(&ResourceName, &DeviceId) -> bool,
        now: Timestamp,
    ) {
        let shared = made.iter().filter(|_| by_mps);
        self.shares =
            shared.filter_map(|(name, devices)| Some((name.clone(), MpsShare::of(devices, gpus_of_node)?))).collect();
        let Self { shares, ready, waiting } = self;
        let is_ready = |name: &ResourceName, share: &MpsShare| ready.get(name).is_some_and(|of| of.covers(share));
        let not_ready: BTreeSet<&ResourceName> =
            shares.iter().filter(|(name, share)| !is_ready(name, share)).map(|(name, _)| name).collect();
        waiting.retain(|name, _| not_ready.contains(name));
        for name in not_ready {
            waiting.entry(name.clone()).or_insert(now);
            if let Some(devices) = made.get_mut(name) {
                devices.retain(|id, device| device.slot.is_none() || is_listed(name, id));
            }
        }
        made.retain(|_, devices| !devices.is_empty());
    }
}

/// The reason why a resource cannot be shared by MPS on these GPUs, if there is one.
pub(super) fn refusal<'a>(
    resource: &ResourceName,
    replicas: u32,
    gpus: impl Iterator<Item = &'a Gpu> + Clone,
) -> Option<PlanProblem> {
    let addresses = |wrong: fn(&Gpu) -> bool| {
        let mut addresses: Vec<_> = gpus.clone().filter(|gpu| wrong(gpu)).map(|gpu| gpu.pci).collect();
        addresses.dedup();
        addresses
    };
    let in_mig_mode = addresses(|gpu| gpu.mig_enabled);
    if !in_mig_mode.is_empty() {
        return Some(PlanProblem::MpsOnMig(resource.clone(), in_mig_mode));
    }
    // A GPU of unknown capability counts as new: all of today's drivers report it.
    let too_old = addresses(|gpu| gpu.facts.compute_capability.is_some_and(|capability| capability < FIRST));
    if !too_old.is_empty() {
        return Some(PlanProblem::MpsTooOld(resource.clone(), too_old));
    }
    let (since, before) = MOST_CLIENTS;
    let most = |gpu: &Gpu| if gpu.facts.compute_capability.is_none_or(|seen| seen >= VOLTA) { since } else { before };
    let (gpu, most) = gpus.map(|gpu| (gpu.pci, most(gpu))).find(|(_, most)| replicas > *most)?;
    Some(PlanProblem::MpsTooManyClients { resource: resource.clone(), gpu, replicas, most })
}
