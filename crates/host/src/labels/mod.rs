//! The facts of the host for a node's labels, and the file by which NFD gets the labels.
//!
//! `host` reads the machine's type, and `vgpu` reads NVIDIA's capability in a PCI configuration space; `file` writes
//! the file for NFD. Called by the program, which owns the tasks, and by `linkwise labels`. `publish::labels` decides
//! which labels there are; nothing here speaks to NVML or to an API server.

mod file;
mod host;
mod metrics;
mod vgpu;

use sha2::{Digest, Sha256};

pub use file::{LabelsFile, text};
pub use host::host;
pub use metrics::LabelMetrics;

/// The value of `linkwise.dev/nvlink-fabric` for a node that is a fabric of its own: `node-` and the first 16
/// hexadecimal digits of the SHA-256 of the node's name, which is unique in the cluster and may be longer than a label.
pub fn own_fabric(node: &str) -> String {
    let hash = Sha256::digest(node);
    let digits: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("node-{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_fabric_is_the_beginning_of_the_names_sha256() {
        // `printf abc | sha256sum`
        assert_eq!(own_fabric("abc"), "node-ba7816bf8f01cfea");
        assert_ne!(own_fabric("gpu-1"), own_fabric("gpu-2"));
    }
}
