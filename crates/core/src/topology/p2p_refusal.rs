//! The driver's reasons for refusing P2P: a value that observations and warnings have.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The driver's reason for refusing P2P, `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pRefusal {
    /// NVML 1.
    #[error("the chipset does not support it")]
    Chipset,
    /// NVML 2.
    #[error("a GPU does not support it")]
    Gpu,
    /// NVML 3.
    #[error("the way between their root ports does not support it")]
    Topology,
    /// NVML 4.
    #[error("a setting of the driver disables it")]
    Setting,
    /// NVML 5.
    #[error("it is not supported")]
    NotSupported,
    /// NVML 6, which NCCL takes for a refusal too.
    #[error("its status is unknown")]
    Unknown,
}

impl P2pRefusal {
    /// Reads NVML's number of a status: `None` for OK, and for a number that NVML does not define.
    pub fn from_nvml(number: u32) -> Option<Self> {
        let refusals = [Self::Chipset, Self::Gpu, Self::Topology, Self::Setting, Self::NotSupported, Self::Unknown];
        refusals.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
    }
}
