//! What containers need, as plain values: found by `scan`, turned into specs by `build`.
//!
//! All paths are as a container has them, from its root; the two roots tell where they are on the host.

use std::collections::BTreeSet;

/// Everything the specs of a node are made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The driver root on the host, `/` or such as `/run/nvidia/driver`.
    pub driver_root: String,
    /// The folder on the host that has `/dev` in it, mostly `/`.
    pub dev_root: String,
    /// The GPUs, in the order of their PCI addresses, and then the MIG devices.
    pub gpus: Vec<DeviceEntry>,
    /// What containers can get beside GPUs: a class and its devices each.
    pub others: Vec<(&'static str, Vec<DeviceEntry>)>,
    /// The nodes that every container with a GPU gets, `/dev/nvidiactl` ...
    pub control_nodes: Vec<String>,
    /// The driver's files.
    pub driver: DriverFiles,
    /// nvidia-cdi-hook (or nvidia-ctk), on the host; `None` where no hook is to be used.
    pub hook: Option<String>,
    /// Hooks that are left out, by name.
    pub disabled_hooks: BTreeSet<String>,
}

/// A device of a spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Its names. A GPU that is gone has no index any more: another one may have it now.
    pub names: Vec<String>,
    /// Its nodes.
    pub nodes: Vec<String>,
    /// Files and folders below the driver root that come with it.
    pub files: Vec<String>,
    /// Whether it is part of the device `all`. A GPU that is gone is not, but keeps its entry for the containers that
    /// hold it.
    pub present: bool,
}

/// The driver's files for containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// The driver's version, where it is known.
    pub version: Option<String>,
    /// The folder of the libraries; empty without libraries.
    pub library_folder: String,
    /// The libraries of that version, by name.
    pub libraries: Vec<Library>,
    /// Programs, firmware and configuration files.
    pub files: Vec<String>,
    /// Sockets of the driver's daemons.
    pub sockets: Vec<Socket>,
}

/// One shared library in the library folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// `libcuda.so.550.54.15`.
    pub name: String,
    /// Links in the same folder that lead to it, each with its target: (`libcuda.so`, `libcuda.so.1`),
    /// (`libcuda.so.1`, `libcuda.so.550.54.15`).
    pub links: Vec<(String, String)>,
}

/// A daemon's socket, which the host and a container may have at different places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// Below the driver root.
    pub host: String,
    /// In the container.
    pub container: String,
}

/// What containers can get beside a GPU. Each is a CDI kind of its own with one device, `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// GDRCopy: /dev/gdrdrv.
    GdrCopy,
    /// GPUDirect Storage: /dev/nvidia-fs*.
    Gds,
    /// RDMA: /dev/infiniband/uverbs* and rdma_cm.
    Mofed,
}
