//! Specs as files: whole or not at all, and only where something changed.
//!
//! A runtime reads the folder whenever it likes, ours or not: `files` writes under a name that no runtime reads (they take
//! *.json and *.yaml) and moves the file to its place.

use std::io;
use std::path::Path;

use thiserror::Error;

use super::spec::Spec;
use crate::files;

/// Everybody may read a spec: runtimes run as other users.
const MODE: u32 = 0o644;

/// Why a spec is not where it should be.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The folder cannot be made or written.
    #[error("cannot write CDI specs to the folder {folder}")]
    Folder {
        /// The folder.
        folder: String,
        /// What the system says.
        source: io::Error,
    },
    /// The file cannot be put there.
    #[error("cannot write the CDI spec {path}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        source: io::Error,
    },
}

/// Makes the folder where there is none, and sees whether files can be made in it.
pub fn prepare(folder: &Path) -> Result<(), WriteError> {
    files::prepare_folder(folder).map_err(|source| WriteError::Folder { folder: folder.display().to_string(), source })
}

/// Puts a spec at its place; says whether there was another one, or none. /var/run/cdi is in memory: a reboot takes the
/// folder with it, and it is made again.
pub fn write(folder: &Path, spec: &Spec) -> Result<bool, WriteError> {
    let path = folder.join(spec.file_name());
    let text = spec.json().map_err(io::Error::from);
    let written = text.and_then(|text| files::write_if_changed(&path, text.as_bytes(), MODE));
    written.map_err(|source| WriteError::File { path: path.display().to_string(), source })
}
