//! Checks the device nodes: each exists, is of the right kind, and can be opened by this process.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::Node;
use super::finding::{Findings, Status};

impl Node {
    fn dev(&self, name: &str) -> PathBuf {
        self.at("dev").join(name)
    }
}

/// The nodes that every use of a GPU needs: the control node, and that of each GPU.
fn needed(node: &Node) -> Vec<PathBuf> {
    let minors = node.nvml.gpus().iter().filter_map(|gpu| gpu.minor);
    std::iter::once("nvidiactl".to_owned())
        .chain(minors.map(|minor| format!("nvidia{minor}")))
        .map(|name| node.dev(&name))
        .collect()
}

/// Counts the nodes that pass a check; each other one is a finding, with its fault and the remedy.
fn count_good(
    found: &mut Findings,
    nodes: &[PathBuf],
    check: impl Fn(&Path) -> Result<(), (String, &'static str)>,
) -> usize {
    let mut good = 0;
    for node in nodes {
        match check(node) {
            Ok(()) => good += 1,
            Err((fault, advice)) => {
                let what = format!("{}{fault}", node.display());
                found.each(Status::Failed, fault, what, advice);
            }
        }
    }
    good
}

/// Reports missing nodes, and files in their place that are not device nodes.
pub(super) fn nodes(found: &mut Findings, node: &Node) {
    let (gpus, control) = (node.nvml.gpus(), node.dev("nvidiactl"));
    if gpus.is_empty() && !control.exists() {
        return found.skipped(format!("no GPU is known, and there is no {}", control.display()), None);
    }
    let needed = needed(node);
    let good = count_good(found, &needed, |node| match fs::metadata(node) {
        Ok(meta) if meta.file_type().is_char_device() => Ok(()),
        Ok(_) => Err((
            " is no character device".to_owned(),
            "something else was put in its place: remove it on the host and run nvidia-modprobe (-c MINOR for a GPU's)",
        )),
        Err(error) => Err((
            format!(": {error}"),
            "on the host: nvidia-smi makes the nodes; in a container: it was made before the node was there, or not for \
             all GPUs (NVIDIA_VISIBLE_DEVICES=all): delete the pod",
        )),
    });
    if good == needed.len() {
        found.ok(format!("{}: all {good} nodes are there", node.at("dev").display()));
    }
    let unknown = gpus.iter().filter(|gpu| gpu.minor.is_none()).count();
    if unknown > 0 {
        found.warning(
            format!("NVML does not report the device nodes of {unknown} of the GPUs"),
            "with --pass-device-specs their pods get no node of theirs: leave it off",
        );
    }
    for (name, whose, use_) in [
        (
            "nvidia-uvm",
            "CUDA's node is",
            "needed with --pass-device-specs only: then set NVIDIA_DRIVER_CAPABILITIES=compute,utility for linkwise",
        ),
        ("nvidia-caps", "MIG's nodes are", "needed for MIG only"),
    ] {
        let path = node.dev(name);
        match path.exists() {
            true => found.ok(format!("{}: {whose} there", path.display())),
            false => found.skipped(format!("there is no {}", path.display()), Some(use_)),
        }
    }
}

/// Checks that this process may open the existing nodes.
pub(super) fn permissions(found: &mut Findings, node: &Node) {
    // This reads the uid without unsafe code. Opening the nodes shows which of them the process may not open.
    if let Ok(own) = fs::metadata("/proc/self") {
        found.ok(format!("runs as uid {}", own.uid()));
    }
    let is_node = |node: &PathBuf| fs::metadata(node).is_ok_and(|meta| meta.file_type().is_char_device());
    let nodes: Vec<PathBuf> = needed(node).into_iter().filter(is_node).collect();
    let good = count_good(found, &nodes, |node| match OpenOptions::new().read(true).write(true).open(node) {
        Ok(_) => Ok(()),
        Err(error) => Err((
            format!(": {error}"),
            "the container's device rules do not allow it: it was made before the node was there, or a cgroup change took it \
             (systemctl daemon-reload does, with runc): delete the pod; see manifests/README.md for SELinux",
        )),
    });
    match (good, nodes.len()) {
        (_, 0) => found.skipped("no device node to open", None),
        (good, all) if good == all => found.ok(format!("all {good} device nodes can be opened")),
        _ => {}
    }
}
