//! The SELinux label of the pipe directory: containers may use what has the type of their own files, and nothing else of
//! the host's /run.
//!
//! Called by `supervise`, before a control daemon starts: sockets that it makes get the type of their folder. The label is
//! that of the NVIDIA plugin (`cmd/mps-control-daemon/mps/daemon.go`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, lsetxattr};

use super::daemon::MpsError;

/// Where the kernel shows SELinux; it is not there where SELinux is disabled.
const SELINUXFS: &str = "/sys/fs/selinux";

/// What every container may read and write. No categories: containers of all pods come there.
const LABEL: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a folder and what is in it, where SELinux is enabled.
///
/// # Errors
///
/// [`MpsError::Label`], of the first that cannot be labelled.
pub(super) fn label(folder: &Path) -> Result<(), MpsError> {
    if Path::new(SELINUXFS).exists() { set(folder) } else { Ok(()) }
}

fn set(folder: &Path) -> Result<(), MpsError> {
    let failed = |path: &Path, source: io::Error| MpsError::Label { path: path.to_owned(), source };
    let inside: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    for path in inside.map_err(|source| failed(folder, source))?.into_iter().chain([folder.to_owned()]) {
        let set = lsetxattr(&path, c"security.selinux", LABEL, XattrFlags::empty());
        set.map_err(|error| failed(&path, error.into()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::lgetxattr;

    #[test]
    fn pipe_directory_gets_the_label_of_containers() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        fs::write(&socket, "").unwrap();
        // A process without the right, or a file system without labels, cannot show more than the refusal.
        let may = lsetxattr(&socket, c"security.selinux", b"x:x:x:s0\0", XattrFlags::empty());
        let result = set(folder.path());
        if let Err(refused) = may {
            println!("security labels cannot be set here ({refused}): only the error is checked");
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with(&format!("cannot label {}", socket.display())), "{error}");
            return;
        }
        result.unwrap();
        for path in [&socket, folder.path()] {
            let mut label = [0; 128];
            let length = lgetxattr(path, c"security.selinux", &mut label).unwrap();
            assert_eq!(&label[..length], LABEL, "{}", path.display());
        }
    }

    #[test]
    fn missing_pipe_directory_cannot_be_labelled() {
        assert!(matches!(set(Path::new("/proc/none")), Err(MpsError::Label { .. })));
    }
}
