//! The laboratory: linkwise beside neighbours of our own, in one process, for the demo and for simulations.
//!
//! The kubelet, the API server, the scheduler's allocator and the NVML library are crates beside this one. Nothing that
//! runs on a node depends on any of them.

pub mod demo;
pub mod kit;
pub mod simulate;
