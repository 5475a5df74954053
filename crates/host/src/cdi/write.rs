//! Specs as files: written whole or not at all, and only if they changed.
//!
//! A runtime may read the folder at any time: `files` writes under a name that no runtime reads (they read *.json and
//! *.yaml) and moves the file to its place.

use std::io;
use std::path::Path;

use thiserror::Error;

use super::spec::Spec;
use linkwise_system::files;

/// The mode of a spec, which every user may read: runtimes run as other users.
const MODE: u32 = 0o644;

/// The reason why a spec could not be written.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WriteError {
    #[error("cannot write CDI specs to the folder {0}")]
    Folder(String, #[source] io::Error),
    #[error("cannot write the CDI spec {0}")]
    File(String, #[source] io::Error),
}

/// Makes the folder if it is missing, and checks that files can be made in it.
pub fn prepare(folder: &Path) -> Result<(), WriteError> {
    files::prepare_folder(folder).map_err(|source| WriteError::Folder(folder.display().to_string(), source))
}

/// Writes a spec to its place; returns true if it changed or is new. /var/run/cdi is in memory: a reboot removes the
/// folder, and it is made again.
pub fn write(folder: &Path, spec: &Spec) -> Result<bool, WriteError> {
    let path = folder.join(spec.file_name());
    let text = spec.json().map_err(io::Error::from);
    let written = text.and_then(|text| files::write_if_changed(&path, text.as_bytes(), MODE));
    written.map_err(|source| WriteError::File(path.display().to_string(), source))
}
