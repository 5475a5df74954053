//! Dynamic Resource Allocation: the slices of machines, the scheduler's allocations, and prepared claims.

pub mod cluster;
mod door;
mod model;
pub mod published;
