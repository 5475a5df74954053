//! The choice: takes topology, request and policy, and returns the best set of GPUs and a report.
//!
//! Pure: no I/O, no clock, no environment, no logging, no floats. It cannot panic on any request. Budgets count
//! compared sets, never time. The kubelet's adapter calls it with a snapshot of the state, and commands call it. It
//! uses `topology` and nothing else.

mod choose;
mod collective;
mod explain;
mod groups;
mod remaining;
mod report;
mod request;
mod search;
mod set;
mod shared;
mod tables;
mod tree;

pub use choose::preferred_allocation;
pub use explain::{Explanation, NearestNics, Offer};
pub use groups::Groups;
pub use report::{AllocationReport, ChosenGpu, FallbackReason, RunnerUp, Value, Values};
pub use request::{AllocationPolicy, AllocationRequest, DeviceId, PreferredAllocation};
pub use set::GpuSet;
pub(crate) use set::{components, subsets};
pub use shared::{Units, preferred_units};
pub use tables::AllocationTables;
