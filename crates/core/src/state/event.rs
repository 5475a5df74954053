//! What happens to the node, and what has to be done about it.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, MigUuid, NodeObservation, TopologyWarning};

use super::device::Health;
use super::door::Door;
use super::holdings::Holdings;
use super::mig_instance::MigInstance;
use super::mps_share::MpsShare;
use super::numa_hints::NumaHints;
use super::plan::ResourcePlan;
use super::poll::{HealthPoll, RecoveryAction};
use super::prepared_claim::PreparedClaim;
use super::problem::PlanProblem;
use super::reason::UnhealthyReason;
use super::record::{HealthRecord, NodeIdentity};
use super::resource_name::ResourceName;

/// Something that happened, as a plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A complete look at the node.
    Observed(Box<NodeObservation>),
    /// An operator wants other resources made of the GPUs.
    Planned(Box<ResourcePlan>),
    /// The MPS control daemons whose limits hold now, each with the share by which that was judged: one of another share
    /// makes nothing ready.
    MpsReady(BTreeMap<ResourceName, MpsShare>),
    /// The driver reported an XID.
    Xid {
        /// The GPU.
        gpu: GpuUuid,
        /// The number, as NVIDIA's XID catalog lists it.
        code: u64,
        /// The MIG instance it is about, where the driver names one.
        instance: Option<MigInstance>,
    },
    /// The driver reported an uncorrectable ECC error.
    DoubleBitEcc {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The operator wants devices to claim other NUMA nodes.
    NumaHints(NumaHints),
    /// A round of cheap looks at the GPUs; one that is missing was not asked.
    Polled(BTreeMap<GpuUuid, HealthPoll>),
    /// NVML calls about a GPU hung or crashed agents, and no agent calls NVML about it for now.
    Quarantined {
        /// The GPU.
        gpu: GpuUuid,
        /// What happened to the process, and in which call.
        why: String,
    },
    /// An agent scanned a quarantined GPU, and lived.
    ReleasedFromQuarantine {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// NVML has been away for the grace period, and devices shall not be given out meanwhile.
    DriverAway {
        /// Why.
        why: String,
    },
    /// NVML answers again.
    DriverBack,
    /// An operator's word that a GPU is well.
    Cleared {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The devices that pods hold, as the kubelet lists them; `None` where it cannot be asked. An orphan leaves the list when
    /// two in a row do not have it.
    Holders(Option<Holdings>),
    /// The device plugin gave devices to a container; the kubelet lists them a little later.
    Allocated {
        /// The resource.
        resource: ResourceName,
        /// The devices.
        devices: BTreeSet<DeviceId>,
        /// Those from which the kubelet let us choose them; empty where it did not ask.
        offered: Vec<DeviceId>,
    },
    /// All claims that our DRA plugin has prepared or is about to prepare.
    Prepared(Vec<PreparedClaim>),
    /// Which boot and which load of the driver this is: before the first look, and before each that another child made.
    Identified(NodeIdentity),
    /// What was kept when our last process ended, before [`Self::Identified`].
    Restored(Box<HealthRecord>),
    /// Nothing happened but time.
    Tick,
}

/// Something to do, by the runtime: the inventory itself touches nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Hand the new state to everybody who follows it.
    Publish,
    /// Report that the health of a GPU, or of one MIG device alone, changed.
    HealthChanged {
        /// The GPU.
        gpu: GpuUuid,
        /// The MIG device, where the change is its own and not its whole GPU's.
        mig: Option<MigUuid>,
        /// What it is now.
        health: Health,
    },
    /// Tell people that an XID changes nothing: an application's fault, or ignored.
    XidIgnored {
        /// The GPU.
        gpu: GpuUuid,
        /// The number.
        code: u64,
        /// How often it came: the first time at once, then what came in a minute as one.
        times: u64,
    },
    /// Write [`super::NodeState::record`] where the next process will find it.
    Keep,
    /// Report, once, that the driver asks for something that this version does not know. It makes no GPU unhealthy.
    UnknownRecoveryAction {
        /// The GPU.
        gpu: GpuUuid,
        /// The action.
        action: RecoveryAction,
    },
    /// Report, once while it stands, a reason that makes no GPU unhealthy because health checks are disabled.
    NotCounted {
        /// The GPU.
        gpu: GpuUuid,
        /// The reason.
        reason: UnhealthyReason,
    },
    /// Tell people that what was kept has a form that this version does not know.
    RecordIgnored {
        /// The form.
        version: u32,
    },
    /// Tell people that devices of a resource cannot be given out for now: a pod holds the hardware under another name.
    HeldElsewhere {
        /// The GPU.
        gpu: GpuUuid,
        /// The resource.
        resource: ResourceName,
        /// What holds it.
        reason: UnhealthyReason,
    },
    /// Tell people that pods hold devices of a resource that are not offered, or not any more; they are on its list now.
    HeldUnoffered {
        /// The resource.
        resource: ResourceName,
        /// The ids, in order.
        ids: Vec<DeviceId>,
    },
    /// Tell people that a GPU is offered through another API, or is on its way to that; `None`: through none.
    DoorChanged {
        /// The GPU.
        gpu: GpuUuid,
        /// Its door.
        door: Option<Door>,
    },
    /// Tell people what is odd about the node, once.
    Warn(TopologyWarning),
    /// Tell people what the plan cannot have on this node, once.
    PlanProblem(PlanProblem),
}
