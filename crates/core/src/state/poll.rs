//! [`HealthPoll`]: the answers of driver and kernel about one GPU's health in one round of cheap calls: raw facts.
//!
//! The NVML adapter makes these values at each poll; `health` decides what each means. Unknown, unsupported and
//! unanswered facts stay `None`: a missing answer is not a failure.

use crate::prelude::*;
use core::fmt;

use serde::{Deserialize, Serialize};

/// The answers of one round of calls about one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HealthPoll {
    /// The result of a call that has to reach the GPU.
    pub reach: Reach,
    /// The action that the driver wants (field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION); `None` if the driver has no such
    /// field.
    pub recovery_action: Option<RecoveryAction>,
    /// Row remapping (`nvmlDeviceGetRemappedRows`).
    pub row_remapping: Option<RowRemapping>,
    /// Uncorrectable ECC errors since the driver was loaded (volatile counter).
    pub uncorrectable_ecc: Option<u64>,
    /// Numbers of the NVLinks that are not active, ascending; `None` if NVML does not report the links. While MIG is
    /// on, no link counts as down.
    pub nvlinks_down: Option<Vec<u32>>,
    /// The NVLink fabric (`nvmlDeviceGetGpuFabricInfoV`), if the driver reports it.
    pub fabric: Option<FabricHealth>,
    /// True if the kernel still lists the GPU on the PCI bus.
    pub on_bus: Option<bool>,
}

/// The result of the call that has to reach the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    /// The call is not supported here, or was not made: neither proof nor failure.
    #[default]
    Unknown,
    /// The GPU answered.
    Answers,
    /// NVML_ERROR_GPU_IS_LOST: the GPU has fallen off the bus.
    Lost {
        /// The C function.
        call: String,
    },
    /// NVML_ERROR_RESET_REQUIRED.
    ResetRequired {
        /// The C function.
        call: String,
    },
    /// Any other error.
    Failed {
        /// The C function.
        call: String,
        /// NVML's name and number of the error.
        error: String,
    },
}

/// The action that the driver wants for a GPU: nvmlDeviceGpuRecoveryAction_t of nvml.h, NVML 13.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoveryAction {
    /// 0: nothing.
    None,
    /// 1: reset the GPU.
    GpuReset,
    /// 2: reboot the node.
    NodeReboot,
    /// 3: drain peer-to-peer traffic.
    DrainP2p,
    /// 4: drain the GPU, then reset it.
    DrainAndReset,
    /// 5: recover the IMEX domain.
    RecoverImexDomain,
    /// 6: reset the bus.
    BusReset,
    /// 7: reboot the whole system.
    SystemReboot,
    /// A number that this version does not know.
    Other(u32),
}

impl fmt::Display for RecoveryAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nothing"),
            Self::GpuReset => f.write_str("GPU reset"),
            Self::NodeReboot => f.write_str("node reboot"),
            Self::DrainP2p => f.write_str("drain peer-to-peer"),
            Self::DrainAndReset => f.write_str("drain and GPU reset"),
            Self::RecoverImexDomain => f.write_str("recover the IMEX domain"),
            Self::BusReset => f.write_str("PCI bus reset"),
            Self::SystemReboot => f.write_str("system reboot"),
            Self::Other(number) => write!(f, "recovery action {number}"),
        }
    }
}

impl From<u32> for RecoveryAction {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            5 => Self::RecoverImexDomain,
            6 => Self::BusReset,
            7 => Self::SystemReboot,
            other => Self::Other(other),
        }
    }
}

/// Row remapping of Ampere and later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRemapping {
    /// True if a remapping waits for the next reset.
    pub pending: bool,
    /// True if a remapping failed because no spare row was left.
    pub failed: bool,
}

/// The state of a GPU in its NVLink fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricHealth {
    /// The GPU is not meant to join a fabric: it is in MIG mode, or there is no NVSwitch.
    Unused,
    /// It has joined.
    Joined,
    /// It has not begun to join, or is still joining.
    Joining,
    /// It could not join, or has joined by a route that is unhealthy.
    Failed {
        /// The nvmlReturn_t of the fabric's status; `NVML_SUCCESS`, 0, where a route is unhealthy.
        status: u32,
    },
}
