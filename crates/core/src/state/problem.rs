//! [`PlanProblem`]: a part of a [`super::ResourcePlan`] that a node cannot offer.

use crate::prelude::*;
use thiserror::Error;

use super::plan::{DeviceSelector, MAX_SLOTS};
use super::resource_name::ResourceName;
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, PciAddress};
use crate::words::list;

/// A reason why a part of a plan is not offered while the rest is, or why the previous plan stays.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum PlanProblem {
    /// The GPU drives a display and computes nothing; no plan offers it.
    #[error("GPU {0} ({1}): it is a DGX's display adapter; it is not offered")]
    DisplayAdapter(PciAddress, String),
    /// A GPU has an active display, and the plan excludes such GPUs.
    #[error("GPU {0} ({1}): it has an active display; it is not offered")]
    Display(PciAddress, GpuUuid),
    /// MIG mode is on, and there is no MIG device.
    #[error("GPU {0}: MIG mode is on, but it has no MIG device; it offers nothing")]
    NoMigDevice(PciAddress),
    /// Strategy single, and some GPUs are in MIG mode while others are not.
    #[error("MIG strategy single: GPUs {} are in MIG mode and {} are not; none is offered", list(.0), list(.1))]
    MixedModes(Vec<PciAddress>, Vec<PciAddress>),
    /// Strategy single, and there are MIG devices of several profiles.
    #[error("MIG strategy single: the MIG devices differ ({}); none is offered", by_profile(.0))]
    MixedProfiles(Vec<(String, Vec<PciAddress>)>),
    /// Sharing needs at least two slots.
    #[error("{0}: replicas is {1}, at least 2 are needed; it is not offered")]
    TooFewReplicas(ResourceName, u32),
    /// More slots than the kubelet's API carries; the last number is what each device gets.
    #[error("{0} would have {1} slots, at most {MAX_SLOTS} are possible; each device gets {2}")]
    TooManySlots(ResourceName, u64, u32),
    /// The plan shares more devices than the node has.
    #[error("{0}: {1} of its devices are to be shared, the node has {2}; these are shared")]
    TooFewDevices(ResourceName, u32, usize),
    /// The plan shares a device that the resource does not have.
    #[error("{0} has no device {1} that could be shared; the others are shared")]
    NoSuchDevice(ResourceName, DeviceSelector),
    /// MPS does not work on GPUs in MIG mode.
    #[error("{0} is to be shared by MPS, but GPUs {gpus} are in MIG mode; it is not offered", gpus = list(.1))]
    MpsOnMig(ResourceName, Vec<PciAddress>),
    /// MPS does not support GPUs of this age.
    #[error(
        "{0} is to be shared by MPS, for which GPUs {gpus} are too old (compute capability below 3.5); \
         it is not offered",
        gpus = list(.1)
    )]
    MpsTooOld(ResourceName, Vec<PciAddress>),
    /// The plan has more replicas than an MPS server accepts clients.
    #[error(
        "{resource} is to be shared by MPS with {replicas} replicas, but the MPS server of GPU {gpu} takes \
         {max_clients} clients at most; it is not offered"
    )]
    MpsTooManyClients {
        /// The resource.
        resource: ResourceName,
        /// The first GPU whose limit is too low.
        gpu: PciAddress,
        /// The number in the plan.
        replicas: u32,
        /// Its limit.
        max_clients: u32,
    },
    /// Two resources would have one name.
    #[error("{0} is to be shared as {1}, which is another resource's name; it is not offered")]
    NameTaken(ResourceName, ResourceName),
    /// Sharing would make a name that no kubelet accepts.
    #[error("'{0}' is not a resource name that kubelets accept; it is not offered")]
    NoName(String),
    /// A slot's id is longer than the kubelet's API allows.
    #[error("{0}: the id {1} is longer than {max} characters; it is not offered", max = GpuUuid::MAX)]
    LongId(ResourceName, DeviceId),
    /// GPUs of DRA are in MIG mode: each of their MIG devices goes to one claim.
    #[error(
        "{0} is to be shared, but DRA shares only whole GPUs; each MIG device of GPUs {gpus} goes to one claim",
        gpus = list(.1)
    )]
    DraMigNotShared(ResourceName, Vec<PciAddress>),
    /// The plan shares GPUs of DRA by MPS.
    #[error(
        "{0} is to be shared by MPS, but with DRA each claim asks for MPS itself; GPUs {gpus} go to one claim each",
        gpus = list(.1)
    )]
    DraNotByMps(ResourceName, Vec<PciAddress>),
    /// A new plan has a resource that the node cannot offer.
    #[error("this node cannot offer what the new configuration asks for; the previous plan stays until it can")]
    OldPlanStays,
}

impl PlanProblem {
    /// The labels in metrics: the resource, if the problem belongs to one, and the problem.
    pub fn labels(&self) -> (Option<&ResourceName>, &'static str) {
        match self {
            Self::DisplayAdapter(..) | Self::Display(..) => (None, "display"),
            Self::NoMigDevice(_) => (None, "no_mig_device"),
            Self::MixedModes(..) => (None, "mixed_mig_modes"),
            Self::MixedProfiles(_) => (None, "mixed_mig_profiles"),
            Self::TooFewReplicas(of, _) => (Some(of), "too_few_replicas"),
            Self::TooManySlots(of, ..) => (Some(of), "too_many_slots"),
            Self::TooFewDevices(of, ..) => (Some(of), "too_few_devices"),
            Self::NoSuchDevice(of, _) => (Some(of), "no_such_device"),
            Self::MpsOnMig(of, _) => (Some(of), "mps_on_mig"),
            Self::MpsTooOld(of, _) => (Some(of), "mps_too_old"),
            Self::MpsTooManyClients { resource, .. } => (Some(resource), "mps_too_many_clients"),
            Self::NameTaken(of, _) => (Some(of), "name_taken"),
            Self::NoName(_) => (None, "no_name"),
            Self::LongId(of, _) => (Some(of), "long_id"),
            Self::DraMigNotShared(of, _) => (Some(of), "dra_mig_not_shared"),
            Self::DraNotByMps(of, _) => (Some(of), "dra_not_by_mps"),
            Self::OldPlanStays => (None, "old_plan_stays"),
        }
    }
}

fn by_profile(profiles: &[(String, Vec<PciAddress>)]) -> String {
    let each = profiles.iter().map(|(profile, gpus)| format!("{profile} on {}", list(gpus)));
    each.collect::<Vec<_>>().join("; ")
}
