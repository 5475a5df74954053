//! The missing parts of a CDI spec on this node, for the log.

use thiserror::Error;

use linkwise_core::topology::{GpuUuid, MigUuid};

/// A part of a complete spec that this one lacks. The spec is written all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Warning {
    /// The libraries are missing: CUDA will not start in a container whose image does not bring them along.
    #[error("no {0} below {1}: containers get device nodes, but no driver libraries; looked in {2}")]
    NoLibraries(String, String, String),
    /// No hook makes links or runs ldconfig in the container.
    #[error("no {0}: libraries are mounted under the names of their links instead, and found where the image looks")]
    NoHook(String),
    /// A GPU without a known device node.
    #[error("the minor number of {0} is unknown: it has no device node, and is left out of the CDI spec")]
    NoMinor(GpuUuid),
    /// A MIG device has no capabilities: with its GPU's node alone, a container could open no part of the GPU.
    #[error("the kernel lists no capabilities of {0}: it is left out of the CDI spec")]
    NoCapabilities(MigUuid),
    /// The control node is missing: no container can use a GPU without it.
    #[error("no {0} below {1}: the CDI spec names no control node, and CUDA will not start")]
    NoControlNode(String, String),
}
