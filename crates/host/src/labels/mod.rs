//! The facts of the host for a node's labels, and the file by which NFD gets the labels.
//!
//! `host` reads the machine's type, and NVIDIA's capability in a PCI configuration space; [`LabelsFile`] writes NFD's
//! file. Called by `src/run`, which owns the tasks, and by `src/commands`. `publish::labels` decides which labels
//! there are; nothing here speaks to NVML or to an API server.
//!
//! NFD reads every file of its folder whose name does not begin with a dot, and removes the labels from the node when
//! the file is gone. So the file of `key=value` lines is replaced as a whole, and never removed.

mod host;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use sha2::{Digest, Sha256};

use linkwise_system::files;
use linkwise_system::metrics::{new, number};

pub use host::host;

/// The value of `linkwise.dev/nvlink-fabric` for a node that is a fabric of its own: `node-` and the first 16
/// hexadecimal digits of the SHA-256 of the node's name, unique in the cluster and perhaps too long for a label.
pub fn own_fabric(node: &str) -> String {
    let hash = Sha256::digest(node);
    let digits: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("node-{digits}")
}

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
    /// call blocks on the host's folder. On an error the file is unchanged.
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

    /// Returns true if the output is a file.
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

/// The metrics of labels and of writes of their file.
#[derive(Clone, Debug, Default)]
pub struct LabelMetrics {
    labels: Gauge,
    dropped: Gauge,
    writes: Family<[(&'static str, &'static str); 1], Counter>,
    last_write: Gauge<u64, AtomicU64>,
}

impl LabelMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let dropped = "Labels left out because Kubernetes would refuse their value";
        let writes = "Writes of the labels' file: ok (it changed) or failed (the last one stays)";
        let last = "When the labels' file was last correct, in seconds since 1970; 0 before the first time";
        Self {
            labels: new(registry, "labels", "Labels of this node, 0 before they are made"),
            dropped: new(registry, "labels_dropped", dropped),
            writes: new(registry, "label_writes", writes),
            last_write: new(registry, "labels_written_timestamp_seconds", last),
        }
    }

    /// Records the numbers of labels and of labels left out.
    pub fn made(&self, labels: usize, dropped: usize) {
        self.labels.set(number(labels));
        self.dropped.set(number(dropped));
    }

    /// Counts a write that changed the file, or one that failed.
    pub fn written(&self, ok: bool) {
        self.writes.get_or_create(&[("outcome", if ok { "ok" } else { "failed" })]).inc();
    }

    /// Records that the file was correct at this time, in seconds since 1970.
    pub fn correct_at(&self, seconds: u64) {
        self.last_write.set(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn own_fabric_is_the_beginning_of_the_names_sha256() {
        // `printf abc | sha256sum`
        assert_eq!(own_fabric("abc"), "node-ba7816bf8f01cfea");
        assert_ne!(own_fabric("gpu-1"), own_fabric("gpu-2"));
    }

    #[test]
    fn failed_write_is_an_error_empty_path_is_stdout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        fs::create_dir(&path).unwrap();
        assert!(LabelsFile::new(&path).write(&BTreeMap::new()).is_err());
        assert_eq!(LabelsFile::new(Path::new("")).to_string(), "standard output");
    }
}
