//! linkwise's CDI specs: files that tell a container runtime how to make a granted GPU appear in a container (Container
//! Device Interface, <https://github.com/cncf-tags/container-device-interface>).
//!
//! Owns the steps from the machine to the files: the [`Scanner`] of driver root and device nodes, a plain
//! [`Description`], the specs that follow from it ([`specs`], pure) and their files ([`write()`]). Called by
//! `src/run`, but not during an admission; starts no task. `publish::injection` decides how a container asks for a
//! device.
//!
//! Kinds, file names and device names are those of the NVIDIA device plugin (`internal/cdi/cdi.go` of
//! NVIDIA/k8s-device-plugin): the kubelet caches an answer to Allocate for a container's whole life, so names in use
//! have to stay. `docs/cdi.md` says what is in a spec, and why.
//!
//! A [`Description`]'s paths are a container's, unless a doc says otherwise; its roots give their places on the host.
//! A runtime may read the folder of specs at any time: [`write()`] writes under a name that no runtime reads (they read
//! *.json and *.yaml) and moves the file to its place.

mod build;
mod driver;
mod libraries;
mod scan;

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use thiserror::Error;

use linkwise_core::topology::{GpuUuid, MigUuid};
use linkwise_system::files;
use linkwise_system::metrics::new;

pub use build::{Spec, specs};
pub use scan::{Options, Roots, Scan, Scanner};

/// The vendor of all kinds here: the NVIDIA device plugin's, not `nvidia.com`, which belongs to `nvidia-ctk cdi
/// generate`.
pub const VENDOR: &str = "k8s.device-plugin.nvidia.com";

/// The class of GPUs and MIG devices.
pub const GPU_CLASS: &str = "gpu";

/// The class of IMEX channels.
pub const IMEX_CLASS: &str = "imex-channel";

/// The name of the device that stands for all devices of a kind.
pub const ALL: &str = "all";

/// The kind of a class, in the form of a spec: `k8s.device-plugin.nvidia.com/gpu`.
pub fn kind(class: &str) -> String {
    format!("{VENDOR}/{class}")
}

/// The content of a node's specs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The driver root on the host: `/`, or that of a driver container, such as `/run/nvidia/driver`.
    pub driver_root: String,
    /// The folder on the host that has `/dev` in it, mostly `/`.
    pub dev_root: String,
    /// The GPUs, in the order of their PCI addresses, and then the MIG devices.
    pub gpus: Vec<DeviceEntry>,
    /// The devices that containers can get beside GPUs: a class and its devices each.
    pub others: Vec<(&'static str, Vec<DeviceEntry>)>,
    /// The nodes that every container with a GPU gets, `/dev/nvidiactl` ...
    pub control_nodes: Vec<String>,
    /// The driver's files.
    pub driver: DriverFiles,
    /// The hooks, if there is a program for them.
    pub hooks: Option<Hooks>,
}

/// A device of a spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Its names in CDI. A GPU that has left the node is not named by its index, which another GPU may have now.
    pub names: Vec<String>,
    /// Its nodes.
    pub nodes: Vec<String>,
    /// Files and folders below the driver root that come with it.
    pub files: Vec<String>,
    /// True if it is part of the device `all`. A GPU that has left the node is not, but keeps its entry for the
    /// containers that hold it.
    pub is_present: bool,
}

/// The driver's files for containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// The driver's version, if it is known.
    pub version: Option<String>,
    /// The driver's libraries, by path; empty if none were found.
    pub libraries: Vec<String>,
    /// Links to libraries.
    pub links: Vec<Link>,
    /// Programs, firmware, configuration files and the X server's modules.
    pub files: Vec<DriverFile>,
    /// Sockets of the driver's daemons.
    pub sockets: Vec<DriverFile>,
}

/// A link to a library, as a container gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// `/usr/lib64/libcuda.so`.
    pub path: String,
    /// The link's content, relative to its own folder: `libcuda.so.1`.
    pub target: String,
    /// The library at the end of the chain of links: `/usr/lib64/libcuda.so.550.54.15`.
    pub library: String,
}

/// A file whose paths below the driver root and in a container may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// The path below the driver root.
    pub host: String,
    /// The path in a container.
    pub container: String,
}

/// The hooks to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hooks {
    /// nvidia-cdi-hook (or nvidia-ctk), on the host.
    pub program: String,
    /// Their names: the hooks that the program has and that no operator disabled.
    pub names: BTreeSet<&'static str>,
}

/// The devices that containers can get beside a GPU. Each is a CDI kind of its own with one device, `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// GDRCopy: /dev/gdrdrv.
    GdrCopy,
    /// GPUDirect Storage: /dev/nvidia-fs*.
    Gds,
    /// RDMA: /dev/infiniband/uverbs* and rdma_cm.
    Mofed,
}

/// A part of a complete spec that this one lacks. The spec is written all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Warning {
    /// The libraries are missing: CUDA will not start in a container whose image does not bring them along.
    #[error("no {0} below {1}: containers get device nodes, but no driver libraries; looked in {2}")]
    NoLibraries(String, String, String),
    /// No hook makes links or runs ldconfig in the container, which finds libraries only where its image looks for
    /// them.
    #[error("no {0}: instead of hooks, libraries are mounted under the names of their links")]
    NoHook(String),
    /// A GPU without a known device node.
    #[error("the minor number of {0} is unknown, and so is its device node: the GPU is left out of the CDI spec")]
    NoMinor(GpuUuid),
    /// A MIG device has no capabilities: with its GPU's node alone, a container could open no part of the GPU.
    #[error("the kernel lists no capabilities of {0}: the MIG device is left out of the CDI spec")]
    NoCapabilities(MigUuid),
    /// The control node is missing: no container can use a GPU without it.
    #[error("no {0} below {1}: the CDI spec names no control node, and CUDA will not start")]
    NoControlNode(String, String),
}

/// Counts writes of specs.
#[derive(Clone, Debug)]
pub struct CdiMetrics {
    writes: Family<[(&'static str, &'static str); 1], Counter>,
}

impl CdiMetrics {
    /// Makes and registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "CDI specs that changed: ok (written) or failed (the last one stays)";
        Self { writes: new(registry, "cdi_spec_writes", help) }
    }

    /// Counts a write of a changed spec, or its failure.
    pub fn cdi_written(&self, ok: bool) {
        self.writes.get_or_create(&[("outcome", if ok { "ok" } else { "failed" })]).inc();
    }
}

/// The mode of a spec, which every user may read: runtimes run as other users.
const MODE: u32 = 0o644;

/// The reason why a spec could not be written.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WriteError {
    #[error("cannot write CDI specs to the folder {0}")]
    Folder(String, #[source] io::Error),
    #[error("cannot write the CDI spec {0}")]
    File(String, #[source] io::Error),
}

/// Makes the folder if it is missing, and checks that files can be made in it.
pub fn prepare(folder: &Path) -> Result<(), WriteError> {
    files::prepare_folder(folder).map_err(|source| WriteError::Folder(folder.display().to_string(), source))
}

/// Writes a spec to its place; returns true if it changed or is new. Makes the folder again after a reboot, because
/// /var/run/cdi is in memory.
pub fn write(folder: &Path, spec: &Spec) -> Result<bool, WriteError> {
    let path = folder.join(spec.file_name());
    let text = spec.json().map_err(io::Error::from);
    let written = text.and_then(|text| files::write_if_changed(&path, text.as_bytes(), MODE));
    written.map_err(|source| WriteError::File(path.display().to_string(), source))
}
