//! DRA claims: a claim as the API server stores it, and the plan of its preparation on this node.
//!
//! Pure: takes a claim and a snapshot; returns devices and the edits of their containers, or the claim's error. The
//! claim manager (`crates/kubelet/src/dra/claim_manager`) carries the plan out and keeps checkpoints. This module also
//! reads claims from their JSON.

mod claim;
mod config;
mod containers;
mod error;
mod mig;
mod mps;
mod plan;
mod share;

pub use crate::state::{
    CLAIM_KIND, CLAIMS_DOMAIN, ClaimMps, ClaimName, ClientLimits, DEVICE_KIND, MpsOrder, MpsOrderGpu, Prepared,
    PreparedDevice, Share, claim_device, claim_member,
};
pub use claim::{
    AllocatedConfig, AllocatedDevice, Allocation, Claim, ClaimStatus, DeviceAllocation, NoClaim, OpaqueConfig,
    ReadClaimError,
};
pub use config::ConfigError;
pub use containers::{NodeDevice, RequestEdits, containers};
pub use error::{ClaimError, DeviceRefusal};
pub use mig::{MigOrder, MigOrderError, MigTask};
pub use mps::MpsRefusal;
pub use plan::{PlanInputs, devices, plan};
pub use share::ShareError;
