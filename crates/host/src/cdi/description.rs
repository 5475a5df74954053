//! The needs of containers, as plain values: found by `scan`, turned into specs by `build`.
//!
//! All paths are those of a container, from its root; the two roots give their places on the host.

use std::collections::BTreeSet;

/// The content of a node's specs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The driver root on the host, `/` or such as `/run/nvidia/driver`.
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
    /// Its names. A GPU that is gone has no index any more: another GPU may have it now.
    pub names: Vec<String>,
    /// Its nodes.
    pub nodes: Vec<String>,
    /// Files and folders below the driver root that come with it.
    pub files: Vec<String>,
    /// Set if it is part of the device `all`. A GPU that is gone is not, but keeps its entry for the containers that
    /// hold it.
    pub present: bool,
}

/// The driver's files for containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// The driver's version, if it is known.
    pub version: Option<String>,
    /// The libraries of that version, by path; empty if none were found.
    pub libraries: Vec<String>,
    /// Links to libraries.
    pub links: Vec<Link>,
    /// Programs, firmware, configuration files and the X server's modules.
    pub files: Vec<DriverFile>,
    /// Sockets of the driver's daemons.
    pub sockets: Vec<DriverFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// `/usr/lib64/libcuda.so`.
    pub path: String,
    /// The link's content, relative to its own folder: `libcuda.so.1`.
    pub target: String,
    /// The library at the end of the chain of links: `/usr/lib64/libcuda.so.550.54.15`.
    pub library: String,
}

/// A file whose paths on the host and in a container may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    pub host: String,
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
