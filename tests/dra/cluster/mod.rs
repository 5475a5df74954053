//! DRA with the API server in the box: the writer of slices, the reader of claims, and whole nodes as processes.

mod claims;
mod counters;
mod fleet;
mod gpu_cluster;
mod metadata;
pub mod mig;
pub mod mps;
pub mod node;
mod slices;
pub mod takeover;
