//! What a linkwise on this node kept of the GPUs' health, for a command that only looks: nothing is set aside or written.

use std::path::{Path, PathBuf};

use super::{driver, keeper};
use crate::state::{HealthRecord, NodeIdentity};

/// What is kept.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The file.
    pub file: PathBuf,
    /// What is in it; `None` where there is none.
    pub record: Option<HealthRecord>,
    /// Which boot and which load of the driver this is now: of another, nothing that is kept counts.
    pub identity: NodeIdentity,
}

/// Reads what is kept in `folder`, or where `run` keeps it without one: beside the kubelet's socket. It reads files, and may
/// block.
///
/// # Errors
///
/// The file, and why it is not used.
pub fn kept(folder: Option<&Path>, kubelet_socket: &Path, sysfs: &Path) -> Result<Kept, (PathBuf, anyhow::Error)> {
    let folder = folder.map(Path::to_owned).or_else(|| keeper::beside(kubelet_socket)).unwrap_or_default();
    let file = folder.join(keeper::FILE);
    match keeper::read(&file) {
        Ok(record) => Ok(Kept { file, record, identity: driver::identity(sysfs) }),
        Err(error) => Err((file, error.into())),
    }
}
