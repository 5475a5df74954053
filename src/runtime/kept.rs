//! The health record of the agent on this node, for a command that only reads: no file is renamed or written.

use std::path::{Path, PathBuf};

use super::keeper::ReadError;
use super::{driver, keeper};
use crate::state::{HealthRecord, NodeIdentity};

/// A health record and what it has to match.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The file.
    pub file: PathBuf,
    /// Its content; `None` where there is no file.
    pub record: Option<HealthRecord>,
    /// The current boot and load of the driver: a record of another one does not count.
    pub identity: NodeIdentity,
}

/// Reads the record in `folder`, or without one where `run` keeps it: beside the kubelet's socket. It may block.
///
/// # Errors
///
/// The file, and why it is not used.
pub fn kept(folder: Option<&Path>, kubelet_socket: &Path, sysfs: &Path) -> Result<Kept, (PathBuf, ReadError)> {
    let folder = folder.map(Path::to_owned).or_else(|| keeper::beside(kubelet_socket)).unwrap_or_default();
    let file = folder.join(keeper::FILE);
    match keeper::read(&file) {
        Ok(record) => Ok(Kept { file, record, identity: driver::identity(sysfs) }),
        Err(error) => Err((file, error)),
    }
}
