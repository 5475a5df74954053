//! [`MigInstance`]: the place of a MIG device on its GPU, as the driver's events name it.

use serde::{Deserialize, Serialize};

/// One MIG instance of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MigInstance {
    /// The GPU instance.
    pub gpu_instance: u32,
    /// The compute instance in it, if one is named.
    pub compute_instance: Option<u32>,
}
