//! Dynamic Resource Allocation: what machines publish, what a scheduler makes of it, and how claims are prepared.

pub mod cluster;
mod door;
mod model;
pub mod published;
