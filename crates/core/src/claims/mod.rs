//! DRA claims as the API server has them, and what a claim that was allocated here is prepared with.
//!
//! Pure: a claim and a snapshot in, devices and their CDI names or the claim's error out. The DRA plugin (`dra`) carries
//! it out and keeps checkpoints; it reads claims from their JSON too.

mod claim;
mod config;
mod device;
mod error;
mod mig;
mod mps;
mod node;
mod plan;
mod prepared;
mod share;

pub use crate::state::ClaimName;
pub use claim::{
    AllocatedConfig, AllocatedDevice, Allocation, Claim, ClaimStatus, DeviceAllocation, Holder, OpaqueConfig,
};
pub use config::ConfigError;
pub use device::{devices, hardware_of};
pub use error::ClaimError;
pub use mig::{MigOrder, MigOrderError, MigTask};
pub use mps::{ClaimMps, ClientLimits, MpsOrder, MpsOrderGpu, MpsRefusal};
pub use node::Node;
pub use plan::{complete, plan};
pub use prepared::{CLAIM_KIND, Edits, Prepared, PreparedDevice, claim_device};
pub use share::{Share, ShareError};
