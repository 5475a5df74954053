//! Checks the writers of the GPUs' labels: Node Feature Discovery (NFD) reads a folder with a file of each writer.
//!
//! NFD reads the files in the order of their names and takes the last value of a label, so that with two writers
//! the node's labels depend on the file names.

use std::collections::BTreeSet;
use std::path::Path;

use jiff::Timestamp;

use super::{Findings, Node, existing};
use linkwise_core::words::count;

/// The file in which gpu-feature-discovery writes its labels by default.
const DEFAULT_FILE: &str = "/etc/kubernetes/node-feature-discovery/features.d/gfd";
/// The first part of the GPU labels that gpu-feature-discovery and linkwise write.
const GPU_LABELS: &str = "nvidia.com/gpu.";
/// The largest file that NFD reads (source/local, `MaxFeatureFileSize`), in bytes.
const MAX_FILE: u64 = 65_536;

/// Reports the files with the GPUs' labels, and warns of more than one. Reports nothing without the folder.
pub(super) fn check(found: &mut Findings, node: &Node) {
    let configured = node.settings.as_ref().map(|settings| settings.gfd_output_file.value.to_string_lossy());
    let own = node.at(configured.as_deref().filter(|file| !file.is_empty()).unwrap_or(DEFAULT_FILE));
    let Some(folder) = own.parent() else { return };
    let now = Timestamp::now();
    let mut writers = Vec::new();
    for path in existing(found, folder, "files").into_iter().filter(|path| is_read(path)) {
        match std::fs::read(&path) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let labels = labels(&text, now);
                let of_gpus = labels.iter().filter(|label| label.starts_with(GPU_LABELS)).count();
                writers.extend((of_gpus > 0).then_some((path, of_gpus)));
            }
            Err(error) => {
                found.warning(format!("cannot read {}: {error}", path.display()), "NFD reads it: check its mode")
            }
        }
    }
    let has_own = writers.iter().any(|(path, _)| *path == own);
    let alone = writers.len() == 1;
    for (path, labels) in writers {
        let what = format!("{} has {} {GPU_LABELS}*", path.display(), count(labels, "label"));
        match (path == own, alone) {
            (true, true) => found.ok(what),
            (true, false) => {}
            (false, true) => found.skipped(
                format!("{what}, and linkwise writes none to {}", own.display()),
                Some("right if another program is to write the labels; linkwise labels would be a second writer"),
            ),
            (false, false) => {
                let also = if has_own { format!(", and so has {}", own.display()) } else { String::new() };
                found.warning(
                    format!("{what}{also}"),
                    "two programs write the same labels, and NFD takes the file that is last by name: end one of them \
                     and remove its file",
                );
            }
        }
    }
}

/// Returns true if NFD reads the file: it is not hidden and not too large.
fn is_read(path: &Path) -> bool {
    let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    !is_hidden && std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= MAX_FILE)
}

/// The keys of the labels that NFD makes: a line each, `key=value` or `key`. A directive in a comment sets when the
/// labels below it end, up to the next such directive, or removes the label of the next line.
fn labels(text: &str, now: Timestamp) -> BTreeSet<&str> {
    let (mut labels, mut skipped, mut expired) = (BTreeSet::new(), false, false);
    for line in text.split('\n').map(str::trim).filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        match key {
            "# +no-label" => skipped = true,
            "# +expiry-time" => expired = value.trim().parse::<Timestamp>().map_or(expired, |end| end < now),
            _ if line.starts_with('#') || expired => {}
            _ if skipped => {
                labels.remove(key);
                skipped = false;
            }
            _ => drop(labels.insert(key)),
        }
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_file_is_read_as_nfd_reads_it() {
        let text = "# a comment\n nvidia.com/gpu.count=8 \r\nnvidia.com/gpu.present\n\n\
                    # +no-label\nnvidia.com/gpu.family=hopper\nnvidia.com/gpu.memory=1=2\n#+no-label\na=1\n\
                    # +expiry-time=2001-09-09T01:46:39Z\nold=1\n# +expiry-time=soon\nolder=1\n\
                    # +expiry-time=2001-09-09T01:46:40Z\nnew=1\n# +no-label\nnew=2\n# +no-feature\nlast";
        let expected = ["a", "last", "nvidia.com/gpu.count", "nvidia.com/gpu.memory", "nvidia.com/gpu.present"];
        let now = Timestamp::from_second(1_000_000_000).unwrap();
        assert_eq!(labels(text, now), expected.into());
    }
}
