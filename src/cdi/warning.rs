//! What a CDI spec lacks on this node, for the log.

use thiserror::Error;

use crate::topology::{GpuUuid, MigUuid};

/// Something that a complete spec would have and this one has not. The spec is written all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Warning {
    /// No libraries: CUDA will not start in a container whose image does not bring them along.
    #[error("no {wanted} below {root}: containers get device nodes, but no driver libraries; looked in {folders}")]
    NoLibraries {
        /// The file, with the driver's version where that is known.
        wanted: String,
        /// The driver root in our container.
        root: String,
        /// The folders that were read, relative to it.
        folders: String,
    },
    /// No hook makes links or runs ldconfig in the container.
    #[error("no {path}: libraries are mounted under the names of their links instead, and found where the image looks")]
    NoHook {
        /// Where the hook would be on the host.
        path: String,
    },
    /// A GPU without a known device node.
    #[error("the minor number of {uuid} is unknown: it has no device node, and is left out of the CDI spec")]
    NoMinor {
        /// The GPU.
        uuid: GpuUuid,
    },
    /// A MIG device without capabilities: with its GPU's node alone, a container could open no part of the GPU.
    #[error("the kernel lists no capabilities of {uuid}: it is left out of the CDI spec")]
    NoCapabilities {
        /// The MIG device.
        uuid: MigUuid,
    },
    /// No control node, without which no container can use a GPU.
    #[error("no {node} below {root}: the CDI spec names no control node, and CUDA will not start")]
    NoControlNode {
        /// The node.
        node: String,
        /// The folder in our container that has `/dev` in it.
        root: String,
    },
}
