//! The program of NVIDIA's container toolkit that runs as a hook, and the hooks that it has.
//!
//! Called by `scan`. A runtime refuses every container whose spec names a hook that the program does not have. So hooks
//! that came after the first release are used only if the program contains their names. The program is read, not run:
//! it is a program of the host, for the host's libraries, and this container may lack both those and the right.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::libraries::Stamp;

pub(super) const CREATE_SYMLINKS: &str = "create-symlinks";

/// Lets CUDA libraries of the image that are newer than the driver be used (toolkit 1.17.5).
pub(super) const ENABLE_CUDA_COMPAT: &str = "enable-cuda-compat";

pub(super) const UPDATE_LDCACHE: &str = "update-ldcache";

/// Keeps nvidia-smi and NVML in the container from making device nodes (toolkit 1.17.8).
pub(super) const DISABLE_DEVICE_NODE_MODIFICATION: &str = "disable-device-node-modification";

/// Shows only the container's own GPUs to EGL and Vulkan (toolkit 1.20).
pub(super) const UPDATE_APPLICATION_PROFILE: &str = "update-application-profile";

/// The hooks of every release that has CDI hooks (from 1.16).
const FIRST: [&str; 2] = [CREATE_SYMLINKS, UPDATE_LDCACHE];

const LATER: [&str; 3] = [ENABLE_CUDA_COMPAT, DISABLE_DEVICE_NODE_MODIFICATION, UPDATE_APPLICATION_PROFILE];

/// The number of bytes that are read at once; longer than any name.
const CHUNK: usize = 64 << 10;

/// Reads the names of a program's hooks, once for each state of its file.
#[derive(Debug, Default)]
pub(super) struct HookReader {
    last: Option<([Option<Stamp>; 2], BTreeSet<&'static str>)>,
}

impl HookReader {
    /// The hooks of the program at `path` in this container; if it cannot be seen, those of every release.
    pub fn of(&mut self, path: Option<&Path>) -> BTreeSet<&'static str> {
        // If NVIDIA's operator installed the toolkit, the program is a script that starts `NAME.real`.
        let real = |path: &Path| PathBuf::from(format!("{}.real", path.display()));
        let files: Vec<PathBuf> = path.into_iter().flat_map(|path| [path.to_owned(), real(path)]).collect();
        let stamps = [0, 1].map(|file| files.get(file).and_then(|path| Stamp::of(path)));
        if self.last.as_ref().is_none_or(|(last, _)| *last != stamps) {
            // A program that cannot be read counts as having the hooks of every release.
            let later = files.iter().flat_map(|path| later_hooks(path).unwrap_or_default());
            self.last = Some((stamps, FIRST.into_iter().chain(later).collect()));
        }
        self.last.as_ref().map(|(_, hooks)| hooks.clone()).unwrap_or_default()
    }
}

/// The later hooks whose names are in a file.
fn later_hooks(path: &Path) -> io::Result<BTreeSet<&'static str>> {
    let mut file = File::open(path)?;
    let mut hooks = BTreeSet::new();
    let mut window = Vec::new();
    while file.by_ref().take(CHUNK as u64).read_to_end(&mut window)? > 0 {
        let is_in = |name: &&str| window.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        hooks.extend(LATER.into_iter().filter(is_in));
        // A name may lie across two chunks.
        window.drain(..window.len().saturating_sub(64));
    }
    Ok(hooks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn hooks_are_those_named_in_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvidia-cdi-hook");
        let mut reader = HookReader::default();
        let mut hooks = || reader.of(Some(&path)).into_iter().collect::<Vec<_>>();
        assert_eq!(hooks(), FIRST, "there is no program");
        fs::write(&path, "create-symlinks update-ldcache chmod").unwrap();
        assert_eq!(hooks(), FIRST);
        // The names lie across two chunks, and at the end of the file.
        let text = ["x".repeat(CHUNK - 5).as_str(), ENABLE_CUDA_COMPAT, &"y".repeat(CHUNK), LATER[1]].concat();
        fs::write(&path, text).unwrap();
        assert_eq!(hooks(), [CREATE_SYMLINKS, DISABLE_DEVICE_NODE_MODIFICATION, ENABLE_CUDA_COMPAT, UPDATE_LDCACHE]);
        fs::write(&path, "#!/bin/sh").unwrap();
        fs::write(folder.path().join("nvidia-cdi-hook.real"), UPDATE_APPLICATION_PROFILE).unwrap();
        assert_eq!(hooks(), [CREATE_SYMLINKS, UPDATE_APPLICATION_PROFILE, UPDATE_LDCACHE]);
        assert_eq!(HookReader::default().of(None).into_iter().collect::<Vec<_>>(), FIRST);
    }
}
