//! [`PlanProblem`]: a part of a [`super::ResourcePlan`] that a node cannot offer.

use crate::prelude::*;
use thiserror::Error;

use super::plan::{DeviceSelector, MOST_SLOTS};
use super::resource_name::ResourceName;
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, PciAddress};

/// The reason why a part of a plan is not offered. The rest of the plan is carried out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum PlanProblem {
    /// The GPU drives a display and computes nothing; no plan offers it.
    #[error("GPU {pci} ({model}): it is a DGX's display adapter; it is not offered")]
    DisplayAdapter {
        /// Its PCI address.
        pci: PciAddress,
        /// Its model.
        model: String,
    },
    /// A GPU has an active display, and the plan excludes such GPUs.
    #[error("GPU {pci} ({uuid}): it has an active display; it is not offered")]
    Display {
        /// Its PCI address.
        pci: PciAddress,
        /// The GPU.
        uuid: GpuUuid,
    },
    /// MIG mode is on, and there is no MIG device.
    #[error("GPU {pci}: MIG mode is on, but it has no MIG device; it offers nothing")]
    NoMigDevice {
        /// The GPU.
        pci: PciAddress,
    },
    /// Strategy single, and some GPUs are in MIG mode while others are not.
    #[error("MIG strategy single: GPUs {} are in MIG mode and {} are not; none is offered", list(mig), list(whole))]
    MixedModes {
        /// GPUs with MIG devices.
        mig: Vec<PciAddress>,
        /// GPUs without MIG mode.
        whole: Vec<PciAddress>,
    },
    /// Strategy single, and there are MIG devices of several profiles.
    #[error("MIG strategy single: the MIG devices differ ({}); none is offered", by_profile(profiles))]
    MixedProfiles {
        /// Each profile with its GPUs.
        profiles: Vec<(String, Vec<PciAddress>)>,
    },
    /// The plan shares the resource twice.
    #[error("{resource} is listed twice under sharing; it is not offered")]
    SharedTwice {
        /// The resource.
        resource: ResourceName,
    },
    /// Sharing needs at least two slots.
    #[error("{resource}: replicas is {replicas}, at least 2 are needed; it is not offered")]
    TooFewReplicas {
        /// The resource.
        resource: ResourceName,
        /// The number in the plan.
        replicas: u32,
    },
    /// More slots than the kubelet's API carries.
    #[error("{resource} would have {slots} slots, at most {MOST_SLOTS} are possible; it is not offered")]
    TooManySlots {
        /// The resource.
        resource: ResourceName,
        /// Slots of all devices together.
        slots: u64,
    },
    /// The plan shares more devices than the node has.
    #[error("{resource}: {count} of its devices are to be shared, the node has {devices}; it is not offered")]
    TooFewDevices {
        /// The resource.
        resource: ResourceName,
        /// The number in the plan.
        count: u32,
        /// The number on the node.
        devices: usize,
    },
    /// The plan shares a device that the resource does not have.
    #[error("{resource} has no device {device} that could be shared; it is not offered")]
    NoSuchDevice {
        /// The resource.
        resource: ResourceName,
        /// The device as the plan names it.
        device: DeviceSelector,
    },
    /// MPS does not work on GPUs in MIG mode.
    #[error("{resource} is to be shared by MPS, but GPUs {} are in MIG mode; it is not offered", list(gpus))]
    MpsOnMig {
        /// The resource.
        resource: ResourceName,
        /// The GPUs.
        gpus: Vec<PciAddress>,
    },
    /// MPS does not support GPUs as old as these.
    #[error(
        "{resource} is to be shared by MPS, for which GPUs {} are too old (compute capability below 3.5); \
         it is not offered",
        list(gpus)
    )]
    MpsTooOld {
        /// The resource.
        resource: ResourceName,
        /// The GPUs.
        gpus: Vec<PciAddress>,
    },
    /// The plan has more replicas than an MPS server accepts clients.
    #[error(
        "{resource} is to be shared by MPS with {replicas} replicas, but the MPS server of GPU {gpu} takes {most} \
         clients at most; it is not offered"
    )]
    MpsTooManyClients {
        /// The resource.
        resource: ResourceName,
        /// The first such GPU.
        gpu: PciAddress,
        /// The number in the plan.
        replicas: u32,
        /// The limit.
        most: u32,
    },
    /// Two resources would have one name.
    #[error("{resource} is to be shared as {name}, which is another resource's name; it is not offered")]
    NameTaken {
        /// The resource.
        resource: ResourceName,
        /// The name.
        name: ResourceName,
    },
    /// Sharing or a MIG profile makes a name that no kubelet accepts.
    #[error("'{name}' is not a resource name that kubelets accept; it is not offered")]
    NoName {
        /// The name.
        name: String,
    },
    /// A slot's id is longer than the kubelet's API allows.
    #[error("{resource}: the id {id} is longer than {max} characters; it is not offered", max = GpuUuid::MAX)]
    LongId {
        /// The resource.
        resource: ResourceName,
        /// The first such id.
        id: DeviceId,
    },
    /// GPUs of DRA are in MIG mode: each of their MIG devices goes to one claim.
    #[error(
        "{resource} is to be shared, but through DRA only whole GPUs are: the MIG devices of GPUs {} are one \
         claim's each",
        list(gpus)
    )]
    DraMigNotShared {
        /// The resource.
        resource: ResourceName,
        /// The GPUs.
        gpus: Vec<PciAddress>,
    },
    /// GPUs of DRA that the plan shares by MPS.
    #[error(
        "{resource} is to be shared by MPS, for which claims ask themselves: through DRA, GPUs {} are one claim's each",
        list(gpus)
    )]
    DraNotByMps {
        /// The resource.
        resource: ResourceName,
        /// The GPUs.
        gpus: Vec<PciAddress>,
    },
    /// The plan shares more devices than DRA has.
    #[error("{resource}: {count} of its devices are to be shared, DRA has {devices}; they are one claim's each")]
    DraTooFewDevices {
        /// The resource.
        resource: ResourceName,
        /// The number in the plan.
        count: u32,
        /// The number in DRA.
        devices: usize,
    },
    /// A new plan has problems that the plan in effect does not have.
    #[error("this node cannot offer what the new configuration asks for; the previous plan stays until it can")]
    OldPlanStays,
}

fn by_profile(profiles: &[(String, Vec<PciAddress>)]) -> String {
    let each = profiles.iter().map(|(profile, gpus)| format!("{profile} on {}", list(gpus)));
    each.collect::<Vec<_>>().join("; ")
}

fn list(gpus: &[PciAddress]) -> String {
    gpus.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(", ")
}
