//! The laboratory: linkwise beside our stand-ins for its neighbours, for the demo, the simulations and the GPU kit.
//!
//! The stand-ins for the kubelet, the API server, the scheduler's allocator and the NVML library are crates beside this
//! one. Nothing in the DaemonSet's image depends on them.

pub mod demo;
pub mod kit;
pub mod simulate;
