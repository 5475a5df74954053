//! What is odd about a node in the eyes of a CDI spec, for the log.

use thiserror::Error;

use crate::topology::{GpuUuid, MigUuid};

/// Something that a complete spec would have and this one has not. The spec is written all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Oddity {
    /// No libraries: CUDA will not start in a container whose image does not bring them along.
    #[error("no {wanted} below {root}: containers get device nodes, but no driver libraries; looked in {folders}")]
    NoLibraries {
        /// What was looked for, with the driver's version where that is known.
        wanted: String,
        /// The driver root in our container.
        root: String,
        /// The folders, relative to it.
        folders: String,
    },
    /// Without the hook nobody makes links or runs ldconfig in the container.
    #[error("no {path}: libraries are mounted under the names of their links instead, and found where the image looks")]
    NoHook {
        /// Where it would be on the host.
        path: String,
    },
    /// A GPU that nobody can name a node of.
    #[error("the minor number of {uuid} is unknown: it has no device node, and is left out of the CDI spec")]
    NoMinor {
        /// The GPU.
        uuid: GpuUuid,
    },
    /// A MIG device that nobody can open: without its capabilities a container has its GPU's node and no part of the GPU.
    #[error("the kernel lists no capabilities of {uuid}: it is left out of the CDI spec")]
    NoCapabilities {
        /// The MIG device.
        uuid: MigUuid,
    },
    /// No container can use a GPU without it.
    #[error("no {node} below {root}: the CDI spec names no control node, and CUDA will not start")]
    NoControlNode {
        /// The node.
        node: String,
        /// Where /dev was looked for, in our container.
        root: String,
    },
}
