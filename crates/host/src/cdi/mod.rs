//! linkwise's CDI specs: files that tell a container runtime how to make a granted GPU appear in a container (Container
//! Device Interface, <https://github.com/cncf-tags/container-device-interface>).
//!
//! Owns the steps from the machine to the files: the [`Scanner`] of driver root and device nodes, a plain
//! [`Description`], the specs that follow from it ([`specs`], pure) and their files ([`write()`]). Called by the
//! runtime, but not during an admission; starts no task. `publish::injection` decides how a container asks for a
//! device.
//!
//! Kinds, file names and device names are those of the NVIDIA device plugin (`internal/cdi/cdi.go` of
//! NVIDIA/k8s-device-plugin): the kubelet caches an answer to Allocate for a container's whole life, so names in use
//! have to stay. `docs/cdi.md` says what is in a spec, and why.

mod build;
mod description;
mod driver;
mod hooks;
mod ld_cache;
mod libraries;
mod metrics;
mod scan;
mod spec;
mod warning;
mod write;

pub use build::specs;
pub use description::{Description, DeviceEntry, DriverFiles, Extra};
pub use metrics::CdiMetrics;
pub use scan::{Options, Roots, Scan, Scanner};
pub use spec::Spec;
pub use warning::Warning;
pub use write::{WriteError, prepare, write};

/// The vendor of all our kinds: the NVIDIA device plugin's, not `nvidia.com`, which belongs to `nvidia-ctk cdi
/// generate`.
pub const VENDOR: &str = "k8s.device-plugin.nvidia.com";

/// The class of GPUs and MIG devices.
pub const GPU_CLASS: &str = "gpu";

/// The class of IMEX channels.
pub const IMEX_CLASS: &str = "imex-channel";

/// The name of the device of a kind that stands for all of them.
pub const ALL: &str = "all";

/// The kind of a class, in the form of a spec: `k8s.device-plugin.nvidia.com/gpu`.
pub fn kind(class: &str) -> String {
    format!("{VENDOR}/{class}")
}
