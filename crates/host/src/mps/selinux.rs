//! The SELinux label of the pipe directory, and of the folder of orders: containers may use files with the type of
//! their own files, and no other files of the host's /run.
//!
//! Called by `orders`, and by `supervise` before a control daemon starts: sockets get the type of their folder. The
//! label is that of the NVIDIA plugin (`cmd/mps-control-daemon/mps/daemon.go`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, lsetxattr};

use super::daemon::MpsError;

/// The label that every container may read and write. It has no categories: containers of all pods come there.
const LABEL: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a folder and its files, if SELinux is enabled: the kernel shows it at `selinuxfs`. Fails at the first path
/// that cannot be labelled.
pub(super) fn label(folder: &Path, selinuxfs: &Path) -> Result<(), MpsError> {
    if !selinuxfs.exists() {
        return Ok(());
    }
    let failed = |path: &Path, source: io::Error| MpsError::Label(path.to_owned(), source);
    let inside: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    for path in inside.map_err(|source| failed(folder, source))?.into_iter().chain([folder.to_owned()]) {
        let set = lsetxattr(&path, c"security.selinux", LABEL, XattrFlags::empty());
        set.map_err(|error| failed(&path, error.into()))?;
    }
    Ok(())
}
