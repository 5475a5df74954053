//! The file that NFD's worker reads: `key=value` lines, sorted, in a folder of such files.
//!
//! NFD reads every file of that folder whose name does not begin with a dot, and removes the labels from the node when
//! the file is gone. So the file is replaced as a whole, and never removed.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use linkwise_system::files;

/// The mode of the file, which every user may read: NFD's worker has a user of its own.
const MODE: u32 = 0o644;

/// The text of the file.
pub fn text(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
}

/// The output for the labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelsFile {
    /// The file; `None` stands for standard output.
    path: Option<PathBuf>,
}

impl LabelsFile {
    /// An output; an empty path stands for standard output.
    pub fn new(path: &Path) -> Self {
        Self { path: (!path.as_os_str().is_empty()).then(|| path.to_owned()) }
    }

    /// Writes these labels if the file has others; returns true if it wrote. Standard output gets them each time. The
    /// call blocks: the folder is the host's. On an error the file is unchanged.
    pub fn write(&self, labels: &BTreeMap<String, String>) -> io::Result<bool> {
        let text = text(labels);
        match &self.path {
            Some(path) => files::write_if_changed(path, text.as_bytes(), MODE),
            None => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush()).map(|()| true)
            }
        }
    }

    /// Returns true if the output is a file: standard output is not compared.
    pub fn is_file(&self) -> bool {
        self.path.is_some()
    }
}

impl std::fmt::Display for LabelsFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.path {
            Some(path) => path.display().fmt(f),
            None => f.write_str("standard output"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_has_sorted_lines_and_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("features.d/gfd");
        let file = LabelsFile::new(&path);
        let labels = [("nvidia.com/gpu.count", "8"), ("linkwise.dev/gpu.link", "nvswitch"), ("nvidia.com/a", "")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert!(file.write(&labels).unwrap());
        assert!(!file.write(&labels).unwrap(), "it is there already");
        let written = fs::read_to_string(&path).unwrap();
        assert_eq!(written, "linkwise.dev/gpu.link=nvswitch\nnvidia.com/a=\nnvidia.com/gpu.count=8\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn failed_write_names_no_file_and_leaves_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        fs::create_dir(&path).unwrap();
        assert!(LabelsFile::new(&path).write(&BTreeMap::new()).is_err());
        assert_eq!(LabelsFile::new(Path::new("")).to_string(), "standard output");
    }
}
