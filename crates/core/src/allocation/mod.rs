//! The choice: topology + request + policy in, the best set of GPUs and a report out.
//!
//! Pure: no I/O, no clock, no environment, no logging, no floats; it cannot panic on any request.
//! A budget is a count of sets compared, never a time. Called by the kubelet's adapter through an
//! inventory snapshot and by the commands; it knows `topology` and nothing else.

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
