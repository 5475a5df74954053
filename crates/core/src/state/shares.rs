//! [`Form`]: the sharing of a GPU of DRA by several claims, in effect and as the plan's rows for sharing want it.
//!
//! [`super::doors`] keeps the form of each GPU of DRA. A GPU keeps its form while claims have it, because the scheduler
//! counts a device for one claim and a device for several claims in incompatible ways. If the plan wants another form,
//! the GPU takes no new claim. It gets the new form when no claim is prepared or listed on it. A claim that was
//! allocated for the old form is refused when it is prepared, if it would share a GPU that is no longer shared.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt;

use serde::{Deserialize, Serialize};

use super::resources::split_shared;
use super::{MigStrategy, PlanProblem, ResourceName, ResourcePlan, SharingKind, Timestamp};
use crate::topology::{Gpu, GpuUuid, NodeTopology, PciAddress};

/// The shares of a GPU that several claims may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuShares {
    /// The number of shares, at least 2.
    pub shares: u32,
    /// True if a claim may have no more than one.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub one_each: bool,
}

impl fmt::Display for GpuShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {} shares{}", self.shares, if self.one_each { ", one for a claim" } else { "" })
    }
}

/// The sharing of a GPU of DRA; `None` means that it goes to one claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuSharing {
    /// The sharing in effect.
    pub now: Option<GpuShares>,
    /// The sharing in the plan. While it differs from `now`, the GPU takes no new claim.
    pub next: Option<GpuShares>,
}

/// The form of a GPU: shared or not, now and next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub now: Option<GpuShares>,
    /// The form of the plan if it differs, and the time since which it waits for claims to end.
    pub next: Option<(Option<GpuShares>, Timestamp)>,
}

/// The GPUs that a plan shares through DRA, and the parts of its rows that DRA cannot offer. DRA shares only whole
/// GPUs, by time slices.
pub fn wanted(topology: &NodeTopology, plan: &ResourcePlan) -> (BTreeMap<GpuUuid, GpuShares>, Vec<PlanProblem>) {
    let (mut shared, mut problems) = (BTreeMap::new(), Vec::new());
    let Some(sharing) = &plan.sharing else { return (shared, problems) };
    let of_dra = || topology.gpus().iter().filter(|gpu| plan.offers_through_dra(gpu));
    let mut unshared: BTreeMap<ResourceName, Vec<&Gpu>> = BTreeMap::new();
    for gpu in of_dra().filter(|gpu| !gpu.mig_enabled) {
        unshared.entry(plan.name_of_gpu(gpu)).or_default().push(gpu);
    }
    for resource in sharing.resources.iter().map(|row| &row.name).collect::<BTreeSet<_>>() {
        let in_mig_mode = addresses(of_dra().filter(|gpu| gpu.mig_enabled && has_mig(topology, plan, gpu, resource)));
        if !in_mig_mode.is_empty() {
            problems.push(PlanProblem::DraMigNotShared(resource.clone(), in_mig_mode));
        }
    }
    for row in sharing.resources.iter().filter(|row| row.replicas >= 2) {
        let Some(all) = unshared.get_mut(&row.name) else { continue };
        let mut absent = Vec::new();
        let (gpus, rest) = split_shared(row, all, |selector, gpu| selector.is(gpu, None), |_| false, &mut absent);
        *all = rest;
        if sharing.kind == SharingKind::TimeSlicing {
            problems.append(&mut absent);
            let shares = GpuShares { shares: row.replicas, one_each: sharing.fail_requests_greater_than_one };
            shared.extend(gpus.into_iter().map(|gpu| (gpu.uuid.clone(), shares)));
        } else if !gpus.is_empty() {
            problems.push(PlanProblem::DraNotByMps(row.name.clone(), addresses(gpus.into_iter())));
        }
    }
    (shared, problems)
}

/// Returns true if a resource has MIG devices of a GPU, or the GPU if the MIG strategy is none.
fn has_mig(topology: &NodeTopology, plan: &ResourcePlan, gpu: &Gpu, resource: &ResourceName) -> bool {
    if plan.mig_strategy == MigStrategy::None {
        return plan.name_of_gpu(gpu) == *resource;
    }
    let place = topology.position(&gpu.uuid);
    let mut own = topology.mig_devices().iter().filter(|mig| Some(mig.parent) == place);
    own.any(|mig| plan.name_of_mig(&mig.profile) == *resource)
}

fn addresses<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> Vec<PciAddress> {
    gpus.map(|gpu| gpu.pci).collect()
}
