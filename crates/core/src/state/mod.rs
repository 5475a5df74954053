//! The state of this node: `apply(state, event, now) -> (state, effects)`.
//!
//! Pure: no I/O, no clock (`now` is an argument), no tasks, no logging. In `run` the node's loop is the one writer:
//! only it calls [`NodeState::apply`], and all others read whole snapshots. The state has three parts, innermost first:
//!
//! - [`Hardware`]: the graph, facts and health of GPUs and MIG devices, keyed by UUID.
//! - [`Ledger`]: the hardware that is held, and the door through which it is held.
//! - [`Offers`]: plan × hardware × ledger -> resources, each with its devices and the units to choose from.
//!
//! [`crate::allocation`] decides which set of GPUs is best.

mod admissions;
mod apply;
mod availability;
mod device;
mod doors;
mod event;
mod free_at_admission;
mod hardware;
mod health;
mod holdings;
mod inventory;
mod ledger;
mod mps;
mod node_state;
mod offers;
mod opening;
mod plan;
mod poll;
mod prepared_claim;
mod problem;
mod reason;
mod record;
mod resource_name;
mod resources;
mod shares;
mod xid;

pub use availability::Availability;
pub use device::{Device, Health, MigInstance, NumaHints, Timestamp};
pub use event::{Effect, Event};
pub use hardware::{DriverVersions, Hardware};
pub use holdings::{ClaimedDevice, ContainerHoldings, ContainerName, Holdings, ResourceDevice};
pub use inventory::{Expectation, Inventory, KnownGpu, Lack, Shortfall};
pub use ledger::{DRA_DRIVER, Ledger, NAMES_KEPT, gpu_behind, gpu_of};
pub(crate) use mps::VOLTA;
pub use mps::{MAX_MPS_CLIENTS, MpsGpu, MpsShare};
pub use node_state::{AllocateError, GpuStatus, NodeState};
pub use offers::{Offers, Resource};
pub use opening::Opening;
pub use plan::{
    DeviceSelector, Door, Filter, GpuSelector, MAX_SLOTS, MigStrategy, NamePattern, Pattern, ResourcePlan,
    SharedDevices, SharedResource, Sharing, SharingKind,
};
pub use poll::{FabricHealth, HealthPoll, Reach, RecoveryAction, RowRemapping};
pub use prepared_claim::{
    CLAIM_KIND, CLAIMS_DOMAIN, ClaimMps, ClaimName, ClientLimits, DEVICE_KIND, MpsOrder, MpsOrderGpu, Prepared,
    PreparedClaim, PreparedDevice, Share, claim_device, claim_member,
};
pub use problem::PlanProblem;
pub use reason::{Cordon, UnhealthyReason};
pub use record::{Accepted, AdmissionRecord, FreeThen, GpuRecord, HealthRecord, KeptReason, LastSeen, NodeIdentity};
pub use resource_name::{ResourceName, ResourceNameError};
pub use shares::{GpuShares, GpuSharing};
pub use xid::{XidClass, XidPolicy, XidSet};

#[cfg(test)]
mod tests;
