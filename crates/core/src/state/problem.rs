//! What a [`super::ResourcePlan`] cannot have on a machine, by name.

use crate::prelude::*;
use thiserror::Error;

use super::device::ResourceName;
use super::plan::DeviceSelector;
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, PciAddress};

/// Why something that a plan asks for is not offered. The rest of the plan is carried out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum PlanProblem {
    /// A display is set up on a GPU, and the plan does not keep such GPUs.
    #[error("GPU {pci} ({uuid}): a display is set up on it; it is left out")]
    Display {
        /// Where it is.
        pci: PciAddress,
        /// The GPU.
        uuid: GpuUuid,
    },
    /// MIG mode is on and no MIG device was created.
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
    #[error("MIG strategy single: the MIG devices differ ({}); none is offered", profiles.iter().map(|(profile, gpus)| format!("{profile} on {}", list(gpus))).collect::<Vec<_>>().join("; "))]
    MixedProfiles {
        /// Each profile with its GPUs.
        profiles: Vec<(String, Vec<PciAddress>)>,
    },
    /// The resource appears twice among those to be shared.
    #[error("{resource} is to be shared twice; it is not offered")]
    SharedTwice {
        /// The resource.
        resource: ResourceName,
    },
    /// One slot or none is no sharing.
    #[error("{resource} is to be shared with {replicas} replicas, 2 is the least; it is not offered")]
    TooFewReplicas {
        /// The resource.
        resource: ResourceName,
        /// As the plan has it.
        replicas: u32,
    },
    /// More slots than the kubelet can be told of.
    #[error("{resource} is to be shared in {slots} slots, {most} is the most; it is not offered", most = super::resources::MOST_SLOTS)]
    TooManySlots {
        /// The resource.
        resource: ResourceName,
        /// Slots of all devices together.
        slots: u64,
    },
    /// More devices are to be shared than there are.
    #[error("{count} devices of {resource} are to be shared, the node has {devices}; it is not offered")]
    TooFewDevices {
        /// The resource.
        resource: ResourceName,
        /// As the plan has it.
        count: u32,
        /// As the node has it.
        devices: usize,
    },
    /// A device that is to be shared is none of the resource's.
    #[error("device {device} is to be shared, but it is none of {resource}; that is not offered")]
    NoSuchDevice {
        /// The resource.
        resource: ResourceName,
        /// As the plan names it.
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
    /// MPS does not know GPUs as old as these.
    #[error(
        "{resource} is to be shared by MPS, for which GPUs {} are too old (compute capability below 3.5); it is not offered",
        list(gpus)
    )]
    MpsTooOld {
        /// The resource.
        resource: ResourceName,
        /// The GPUs.
        gpus: Vec<PciAddress>,
    },
    /// More replicas than an MPS server takes clients.
    #[error(
        "{resource} is to be shared by MPS with {replicas} replicas, but the MPS server of GPU {gpu} takes {most} clients at most; it is not offered"
    )]
    MpsTooManyClients {
        /// The resource.
        resource: ResourceName,
        /// The first such GPU.
        gpu: PciAddress,
        /// As the plan has it.
        replicas: u32,
        /// What there may be.
        most: u32,
    },
    /// Two resources would have one name.
    #[error("{resource} is to be shared as {name}, which is another resource already; it is not offered")]
    NameTaken {
        /// The resource.
        resource: ResourceName,
        /// The name.
        name: ResourceName,
    },
    /// The name that sharing or a profile makes is none.
    #[error("'{name}' is no resource name; what would have it is not offered")]
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
    /// A new plan has problems that the one in effect has not.
    #[error("the new plan cannot be carried out on this node as it is now; the last one stays until it can")]
    OldPlanStays,
}

fn list(gpus: &[PciAddress]) -> String {
    gpus.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(", ")
}
