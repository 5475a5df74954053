//! [`UnhealthyReason`]: the reason why no pod may get a device, and the evidence that would end it. `health` judges the
//! evidence.

use crate::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::device::MigInstance;
use super::poll::RecoveryAction;

/// The reason why a device counts as unhealthy. docs/health.md says when each begins and how it ends.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnhealthyReason {
    /// The driver reported an XID for which the GPU is at fault.
    #[error("XID {code}{}", of_instance(*instance))]
    Xid {
        /// The number, as NVIDIA's XID catalog lists it.
        code: u64,
        /// The MIG instance that failed; without one, the whole GPU.
        instance: Option<MigInstance>,
    },
    /// The driver reported an uncorrectable (double-bit) ECC error.
    #[error("double-bit ECC error")]
    DoubleBitEcc,
    /// A driver without recovery actions counts uncorrectable ECC errors on a GPU that cannot remap rows.
    #[error("{count} uncorrectable ECC errors since the driver was loaded")]
    UncorrectableEcc {
        /// The number of errors.
        count: u64,
    },
    /// The driver cannot reach the GPU any more.
    #[error("{call} says that the GPU is lost")]
    Lost {
        /// The NVML call that reported it.
        call: String,
    },
    /// The driver refuses the GPU until it is reset.
    #[error("{call} says that the GPU has to be reset")]
    ResetRequired {
        /// The NVML call that reported it.
        call: String,
    },
    /// The driver asks for an action.
    #[error("the driver asks for: {action}")]
    RecoveryAction {
        /// The action.
        action: RecoveryAction,
    },
    /// A row of memory could not be remapped: no spare is left.
    #[error("a row remapping failed")]
    RowRemapFailed,
    /// A call that has to reach the GPU failed.
    #[error("{call} failed: {error}")]
    CallFailed {
        /// The NVML call.
        call: String,
        /// NVML's name and number of the error.
        error: String,
    },
    /// NVLinks that were active are now down.
    #[error("NVLinks down: {}", list(links))]
    LinksDown {
        /// Their numbers, ascending.
        links: Vec<u32>,
    },
    /// The GPU has not joined its NVLink fabric yet.
    #[error("still joining the NVLink fabric")]
    FabricJoining,
    /// The GPU could not join its NVLink fabric, or has joined it by an unhealthy route.
    #[error("{}", fabric(*status))]
    FabricFailed {
        /// The nvmlReturn_t of the fabric's status, 0 where a route is unhealthy.
        status: u32,
    },
    /// NVML calls about the GPU hung or crashed agents, so that no agent calls NVML about it for now.
    #[error("quarantined: {why}")]
    Quarantined {
        /// The end of the agent, and the call in which it happened.
        why: String,
    },
    /// NVML has been unavailable for the grace period.
    #[error("NVML unavailable: {why}")]
    DriverAway {
        /// The reason.
        why: String,
    },
    /// The kernel does not list the GPU on the PCI bus.
    #[error("the GPU is not on the PCI bus")]
    OffBus,
    /// The GPU or MIG device is no longer there.
    #[error("the device is gone from the node")]
    Gone,
    /// A pod holds the device's hardware under another name.
    #[error("a pod holds it as '{id}' of {resource}")]
    HeldElsewhere {
        /// The resource.
        resource: String,
        /// The id.
        id: String,
    },
    /// A DRA claim holds the device's hardware.
    #[error("the claim {claim} holds it as '{device}'")]
    Claimed {
        /// `namespace/name` of the claim.
        claim: String,
        /// The device's name in the DRA driver's pool, or its GPU's UUID.
        device: String,
    },
    /// DRA waits for two lists of holders from the kubelet before it offers the GPU.
    #[error("the kubelet has not yet listed the holders of GPUs twice")]
    HoldersUnknown,
    /// The hardware is there, but no longer offered as this resource, or with its present sharing.
    #[error("it is no longer offered as this resource")]
    Withdrawn,
    /// The device is shared by MPS, and no control daemon enforces the limits of its clients.
    #[error("the MPS control daemon of its resource is not ready")]
    MpsNotReady,
    /// An operator keeps new work away from the GPU, which may be healthy.
    #[error("{0}")]
    Cordoned(Cordon),
}

/// An operator's order that a GPU takes no new work.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("cordoned by {by}: {why}")]
pub struct Cordon {
    /// The operator.
    pub by: String,
    /// The operator's reason.
    pub why: String,
    /// True if pods with claims of the GPU are to be evicted.
    #[serde(default)]
    pub evict: bool,
}

impl Cordon {
    /// The maximum length of `by` and of `why`, in bytes: short enough for a log line.
    pub const MAX_TEXT: usize = 512;
}

fn of_instance(instance: Option<MigInstance>) -> String {
    match instance {
        None => String::new(),
        Some(MigInstance { gpu_instance, compute_instance: None }) => format!(" of GPU instance {gpu_instance}"),
        Some(MigInstance { gpu_instance, compute_instance: Some(compute) }) => {
            format!(" of GPU instance {gpu_instance}, compute instance {compute}")
        }
    }
}

fn fabric(status: u32) -> String {
    match status {
        0 => "an unhealthy route to the NVLink fabric".to_owned(),
        status => format!("not joined to the NVLink fabric: status {status}"),
    }
}

fn list(links: &[u32]) -> String {
    let numbers: Vec<String> = links.iter().map(ToString::to_string).collect();
    numbers.join(",")
}

impl UnhealthyReason {
    /// Returns true if the GPU cannot be reached any more: a reset or a reboot brings it back, without its MIG devices.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::OffBus | Self::Gone)
    }

    /// The kind of reason, as a metric's label.
    pub fn label(&self) -> &'static str {
        self.label_and_end().0
    }

    /// The evidence that would end it, for people: an action, or an event to wait for.
    pub fn ends_with(&self) -> &'static str {
        self.label_and_end().1
    }

    /// The label, and the evidence that ends it.
    fn label_and_end(&self) -> (&'static str, &'static str) {
        const RESET: &str = "a GPU reset that polls observe (between `linkwise admin release` and `resume`), a driver \
                             reload, a node reboot, recovery action none for the hold time, or `clear`";
        const ORDER: &str = "the requested action, after which the driver reports none for the hold time, or `clear`";
        const COUNTER: &str = "the counter back at 0 (GPU reset, driver reload, reboot), or `clear`";
        const HARMLESS: &str = "a scan of the GPU that hangs or crashes no agent, then good polls for the hold time";
        match self {
            Self::Xid { .. } => ("xid", RESET),
            Self::DoubleBitEcc => ("double_bit_ecc", RESET),
            Self::UncorrectableEcc { .. } => ("uncorrectable_ecc", COUNTER),
            Self::Lost { .. } => ("lost", RESET),
            Self::ResetRequired { .. } => {
                ("reset_required", "a GPU reset, between `linkwise admin release` and `resume`")
            }
            Self::RecoveryAction { .. } => ("recovery_action", ORDER),
            Self::RowRemapFailed => ("row_remap_failed", "another GPU in its place, or `clear`"),
            Self::CallFailed { .. } => ("call_failed", "the call passing for the hold time"),
            Self::LinksDown { .. } => ("links_down", "the links active for the hold time, or `clear`"),
            Self::FabricJoining => ("fabric_joining", "the GPU joined to its fabric"),
            Self::FabricFailed { .. } => {
                ("fabric_failed", "the GPU joined to its fabric by healthy routes for the hold time")
            }
            Self::Quarantined { .. } => ("left_out", HARMLESS),
            Self::DriverAway { .. } => ("driver_away", "NVML answering again"),
            Self::OffBus => ("off_bus", "the GPU on the PCI bus again, for the hold time"),
            Self::Gone => ("gone", "the device back on the node"),
            Self::HeldElsewhere { .. } => ("held_elsewhere", "the pod's end"),
            Self::Claimed { .. } => ("claimed", "the claim's end"),
            Self::HoldersUnknown => ("holders_unknown", "two PodResources answers of the kubelet in a row"),
            Self::Withdrawn => ("withdrawn", "a configuration that offers it as this resource again"),
            Self::Cordoned(_) => ("cordoned", "`linkwise admin uncordon`"),
            Self::MpsNotReady => ("mps_not_ready", "the daemon serving with the configured limits"),
        }
    }

    /// Returns true if the GPU needs a reset or another action; such a reason is kept across our restarts.
    pub(super) fn needs_action(&self) -> bool {
        matches!(
            self,
            Self::Xid { .. }
                | Self::DoubleBitEcc
                | Self::UncorrectableEcc { .. }
                | Self::Lost { .. }
                | Self::ResetRequired { .. }
                | Self::RecoveryAction { .. }
                | Self::RowRemapFailed
        )
    }

    /// Returns true if one poll does not prove it: a call may fail once, and a link may be down for a moment.
    pub(super) fn needs_second_look(&self) -> bool {
        matches!(self, Self::CallFailed { .. } | Self::LinksDown { .. } | Self::FabricFailed { .. })
    }

    /// Returns true if it is the same reason; details count only in XIDs. A GPU has each reason at most once.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Xid { .. }, Self::Xid { .. }) => self == other,
            _ => core::mem::discriminant(self) == core::mem::discriminant(other),
        }
    }

    /// Returns true if it makes a MIG device of this instance unhealthy, or with `None` the whole GPU.
    pub(crate) fn concerns(&self, instance: Option<MigInstance>) -> bool {
        match (self, instance) {
            (Self::Xid { instance: Some(hit), .. }, Some(device)) => {
                let compute = match (hit.compute_instance, device.compute_instance) {
                    (Some(hit), Some(device)) => hit == device,
                    _ => true,
                };
                hit.gpu_instance == device.gpu_instance && compute
            }
            _ => true,
        }
    }
}
