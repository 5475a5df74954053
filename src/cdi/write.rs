//! Specs as files: whole or not at all, and only where something changed.
//!
//! A runtime reads the folder whenever it likes, ours or not: a file is written under a name that no runtime reads, synced,
//! and moved to its place.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::{Builder, NamedTempFile};
use thiserror::Error;

use super::spec::Spec;

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
    /// The spec is no JSON.
    #[error("cannot put the CDI spec of {kind} into JSON")]
    Json {
        /// Its kind.
        kind: String,
        /// Why not.
        source: serde_json::Error,
    },
}

/// Makes the folder where there is none, and sees whether files can be made in it.
pub fn prepare(folder: &Path) -> Result<(), WriteError> {
    writable(folder).map_err(|source| WriteError::Folder { folder: folder.display().to_string(), source })
}

/// Makes a folder where there is none, and a file in it that goes again.
pub fn writable(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder).and_then(|()| temporary(folder)).map(drop)
}

/// Puts a spec at its place; says whether there was another one, or none.
pub fn write(folder: &Path, spec: &Spec) -> Result<bool, WriteError> {
    let text = spec.json().map_err(|source| WriteError::Json { kind: spec.kind.clone(), source })?;
    let path = folder.join(spec.file_name());
    replace(folder, &path, &text).map_err(|source| WriteError::File { path: path.display().to_string(), source })
}

/// Puts a text at a path in a folder, whole or not at all; says whether there was another one, or none.
pub fn replace(folder: &Path, path: &Path, text: &str) -> io::Result<bool> {
    if fs::read(path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(false);
    }
    // /var/run/cdi is in memory: a reboot takes the folder with it, and somebody may.
    fs::create_dir_all(folder)?;
    let mut file = temporary(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    // The name is in the folder, and lasts with it.
    File::open(folder)?.sync_all()?;
    Ok(true)
}

/// A file that no runtime reads (they take *.json and *.yaml), gone unless moved to its place.
fn temporary(folder: &Path) -> io::Result<NamedTempFile> {
    Builder::new().prefix(".linkwise-").permissions(Permissions::from_mode(0o644)).tempfile_in(folder)
}
