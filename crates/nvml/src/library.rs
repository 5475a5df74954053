//! Finds the driver's library in a driver root: a folder that holds the files of a driver as a host's root does.
//!
//! Called by each agent at its start, so that it finds a driver that was installed late. This module loads nothing.

use std::path::{Path, PathBuf};

/// The file, as drivers install it.
const NAME: &str = "libnvidia-ml.so.1";

/// The folders where drivers put their libraries: Debian's multiarch folders, those of Red Hat and SUSE, WSL's,
/// NixOS's, and the folders of the drivers that cloud providers install below a folder of their own.
pub const FOLDERS: [&str; 13] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/powerpc64le-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
    "usr/lib",
    "lib",
];

/// The library under a driver root. Without one, the error is the most usual path, so that a message can name it.
pub fn under(root: &Path) -> Result<PathBuf, PathBuf> {
    let mut candidates = FOLDERS.iter().map(|folder| root.join(folder).join(NAME));
    candidates.find(|path| path.exists()).ok_or_else(|| root.join(FOLDERS[0]).join(NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_found_in_each_folder_of_a_root() {
        for folder in FOLDERS {
            let root = tempfile::tempdir().unwrap();
            assert_eq!(under(root.path()), Err(root.path().join("usr/lib64/libnvidia-ml.so.1")));
            let path = root.path().join(folder);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join(NAME), "").unwrap();
            assert_eq!(under(root.path()), Ok(path.join(NAME)));
        }
    }
}
