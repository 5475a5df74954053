//! What a container needs, as plain values: found by `scan`, turned into specs by `build`.
//!
//! All paths are as a container sees them, from its root; the two roots of the host say where they lie there.

use std::collections::{BTreeMap, BTreeSet};

use crate::topology::{GpuUuid, MigCapabilities, MigUuid, PciAddress};

/// Everything the specs of a node are made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Where the host has the driver's files, `/` or such as `/run/nvidia/driver`.
    pub driver_root: String,
    /// Where the host has `/dev`, mostly `/`.
    pub dev_root: String,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuEntry>,
    /// The MIG devices.
    pub migs: Vec<MigEntry>,
    /// The nodes that every container with a GPU gets, `/dev/nvidiactl` ...
    pub control_nodes: Vec<String>,
    /// The driver's files.
    pub driver: DriverFiles,
    /// nvidia-cdi-hook (or nvidia-ctk), as the host has it; `None` where it is not to be used.
    pub hook: Option<String>,
    /// Hooks that are left out, by name.
    pub disabled_hooks: BTreeSet<String>,
    /// What is handed in beside GPUs where asked for, a kind each.
    pub extras: BTreeMap<Extra, ExtraFiles>,
    /// The IMEX channels, by number, sorted.
    pub imex_channels: Vec<u32>,
}

/// A whole GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuEntry {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// NVML's index. One that is gone may have lost it to another.
    pub index: u32,
    /// Where it is.
    pub pci: PciAddress,
    /// N of /dev/nvidiaN.
    pub minor: u32,
    /// Whether it is there now. One that is gone keeps its device under its UUID, for the containers that hold it.
    pub present: bool,
    /// Its nodes under /dev/dri, `card1`, `renderD128` ...
    pub dri: Vec<String>,
}

/// A MIG device: a compute instance of a GPU instance of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigEntry {
    /// NVML's UUID of the MIG device.
    pub uuid: MigUuid,
    /// NVML's index of the parent GPU.
    pub gpu_index: u32,
    /// N of the parent's /dev/nvidiaN.
    pub gpu_minor: u32,
    /// NVML's index among the parent's MIG devices.
    pub index: u32,
    /// The minors of its nodes under /dev/nvidia-caps.
    pub capabilities: MigCapabilities,
}

/// What the driver brings along for containers.
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
    /// Links in the same folder that lead to it, with what each of them says: (`libcuda.so`, `libcuda.so.1`),
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

/// What can be handed in beside a GPU. Each is a CDI kind of its own with one device, `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// GDRCopy: /dev/gdrdrv.
    GdrCopy,
    /// GPUDirect Storage: /dev/nvidia-fs*.
    Gds,
    /// RDMA: /dev/infiniband/uverbs* and rdma_cm.
    Mofed,
}

impl Extra {
    /// Its class, the second part of its kind.
    pub fn class(self) -> &'static str {
        match self {
            Self::GdrCopy => "gdrcopy",
            Self::Gds => "gds",
            Self::Mofed => "mofed",
        }
    }
}

/// The files of an [`Extra`]; nothing where the node does not have it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtraFiles {
    /// Device nodes.
    pub nodes: Vec<String>,
    /// Files and folders below the driver root.
    pub files: Vec<String>,
}

/// The node of an IMEX channel.
pub(super) fn imex_node(channel: u32) -> String {
    format!("/dev/nvidia-caps-imex-channels/channel{channel}")
}
