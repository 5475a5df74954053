//! DRA claims: a claim as the API server has it, and its preparation on this node.
//!
//! Pure: takes a claim and a snapshot; returns devices and what containers get with them, or the claim's error. The DRA plugin
//! (`dra`) carries that out and keeps checkpoints. It also reads claims from their JSON.

mod claim;
mod config;
mod containers;
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
    AllocatedConfig, AllocatedDevice, Allocation, Claim, ClaimStatus, DeviceAllocation, Holder, NoClaim, OpaqueConfig,
    ReadClaimError,
};
pub use config::ConfigError;
pub use containers::{Edits, NodeDevice, RequestEdits, containers};
pub use device::{devices, hardware_of};
pub use error::{ClaimError, DeviceRefusal};
pub use mig::{MigOrder, MigOrderError, MigTask};
pub use mps::{CLAIMS_DOMAIN, ClaimMps, ClientLimits, MpsOrder, MpsOrderGpu, MpsRefusal};
pub use node::Node;
pub use plan::plan;
pub use prepared::{CLAIM_KIND, Prepared, PreparedDevice, claim_device};
pub use share::{Share, ShareError};
