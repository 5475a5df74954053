//! The host around the GPUs: hwloc and sysfs, node files and built-in machines, CDI specs, MPS control daemons, the
//! facts that labels need, pictures of a machine.
//!
//! Nothing here speaks to NVML, the kubelet or the API server.

pub mod cdi;
pub mod hwloc;
pub mod labels;
pub mod machines;
pub mod mps;
pub mod picture;
pub mod yaml;
