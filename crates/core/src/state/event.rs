//! [`Event`] and [`Effect`]: the input of the state, and its orders to the node's loop.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{
    Cordon, Health, HealthPoll, HealthRecord, Holdings, MigInstance, MpsShare, NodeIdentity, NumaHints, PlanProblem,
    PreparedClaim, RecoveryAction, ResourceName, ResourcePlan, Shortfall, UnhealthyReason,
};
use crate::allocation::DeviceId;
use crate::topology::{GpuUuid, MigUuid, NodeObservation, TopologyWarning};

/// Something that happened, as a plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A complete scan of the node.
    Observed(Box<NodeObservation>),
    /// The operator wants a new plan of resources.
    Planned(Box<ResourcePlan>),
    /// The resources whose MPS control daemon enforces the limits of their share now, each with that share.
    MpsReady(BTreeMap<ResourceName, MpsShare>),
    /// The driver reported an XID.
    Xid {
        /// The GPU.
        gpu: GpuUuid,
        /// The number, as NVIDIA's XID catalog lists it.
        code: u64,
        /// The MIG instance that failed, if the driver names one.
        instance: Option<MigInstance>,
    },
    /// The driver reported an uncorrectable ECC error.
    DoubleBitEcc(GpuUuid),
    /// The operator wants devices to report other NUMA nodes.
    NumaHints(NumaHints),
    /// The results of one round of polls. A GPU that is missing was not polled.
    Polled(BTreeMap<GpuUuid, HealthPoll>),
    /// NVML calls about a GPU hung or crashed agents, as the text says, so no agent calls NVML about it for now.
    Quarantined(GpuUuid, String),
    /// An agent scanned a quarantined GPU and survived.
    ReleasedFromQuarantine(GpuUuid),
    /// An outage began, with this cause, and the operator wants devices to be unhealthy during it.
    DriverAway(String),
    /// NVML answers again.
    DriverBack,
    /// The operator cleared the reasons of a GPU.
    Cleared(GpuUuid),
    /// The operator wants a GPU to take no new work, or with `None` to take work again.
    Cordoned(GpuUuid, Option<Cordon>),
    /// The operator accepts that the node lacks this hardware.
    HardwareAccepted(Vec<Shortfall>),
    /// The devices that pods hold, as the kubelet lists them; `None` if the kubelet cannot be asked. An orphan leaves
    /// its resource's list when two lists of holders in a row do not have it.
    Holders(Option<Holdings>),
    /// The device plugin gave devices to a container. The kubelet lists them a little later.
    Allocated {
        /// The resource.
        resource: ResourceName,
        /// The devices.
        devices: BTreeSet<DeviceId>,
        /// The devices from which the kubelet let us choose these; empty if it did not.
        offered: Vec<DeviceId>,
    },
    /// All claims that our DRA plugin has prepared or is about to prepare.
    Prepared(Vec<PreparedClaim>),
    /// Another process prepares the claims of this node from now on.
    ClaimsHandedOver,
    /// The identity of this boot and of this load of the driver. It comes before each scan, but after the first if the
    /// host was not probed in time.
    Identified(NodeIdentity),
    /// The record that our last process kept. It comes before [`Self::Identified`].
    Restored(Box<HealthRecord>),
    /// Time passed, and nothing else happened.
    Tick,
}

/// An order to the node's loop. The state itself carries out nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Hand the new state to all readers.
    Publish,
    /// Report that the health of a GPU, or of one MIG device alone, changed.
    HealthChanged {
        /// The GPU.
        gpu: GpuUuid,
        /// The MIG device, if the change is its own and not its whole GPU's.
        mig: Option<MigUuid>,
        /// The new health.
        health: Health,
    },
    /// Report that an XID itself changes nothing: its class has no effect, or the recovery action decides.
    XidIgnored {
        /// The GPU.
        gpu: GpuUuid,
        /// The number.
        code: u64,
    },
    /// Write [`super::NodeState::record`] to the place where the next process will read it.
    Keep,
    /// Report, once while it lasts, that the driver asks for an action unknown to this version. The GPU stays healthy.
    UnknownRecoveryAction(GpuUuid, RecoveryAction),
    /// Report, once while it lasts, a reason that makes no GPU unhealthy because health checks are disabled.
    NotCounted(GpuUuid, UnhealthyReason),
    /// Report that the record has a format version that this linkwise does not know.
    RecordIgnored(u32),
    /// Report that devices of a resource cannot be given out for now: a pod or claim holds the hardware under another
    /// name.
    HeldElsewhere {
        /// The GPU.
        gpu: GpuUuid,
        /// The resource.
        resource: ResourceName,
        /// The holder, as the reason.
        reason: UnhealthyReason,
    },
    /// Report that pods hold devices of a resource that are not offered, or are no longer offered. The devices are on
    /// the resource's list now.
    HeldUnoffered(ResourceName, Vec<DeviceId>),
    /// Report that DRA has a GPU from now on (true), or no longer (false).
    DoorChanged(GpuUuid, bool),
    /// Report a warning about the node's hardware, once while it lasts.
    Warn(TopologyWarning),
    /// Report that a shortfall began (true) or ended (false).
    Shortfall(Shortfall, bool),
    /// Report a part of the plan that this node cannot offer, once while it lasts.
    PlanProblem(PlanProblem),
}
