//! `linkwise-lab demo` on each built-in machine, and on one without GPUs.

use crate::{lab, text};

/// Built-in machines of eight GPUs: a mesh of NVLinks, NVSwitches, PCIe alone.
const MACHINES: [&str; 3] = ["dgx1-v100", "dgx-h100", "pcie-8x-pix-pairs"];

#[test]
fn demo_succeeds_on_each_machine() {
    for machine in MACHINES {
        let shown = text(&mut lab(&["demo", "--machine", machine]));
        for words in ["train-a", "kubelet restarts", "XID 79", "why: ", "NUMA node"] {
            assert!(shown.contains(words), "{machine}: no '{words}' in\n{shown}");
        }
        let summary = shown.lines().find(|line| line.starts_with("Summary: ")).unwrap_or_default();
        assert!(summary.contains("pods admitted"), "{shown}");
    }
}

#[test]
fn demo_succeeds_without_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bare.yaml");
    std::fs::write(&file, "version: 1\nname: bare\ntitle: A bare node\nobserved: {gpus: []}\n").unwrap();
    let shown = text(&mut lab(&["demo", "--machine", file.to_str().unwrap()]));
    assert!(shown.contains("no GPU"), "{shown}");
}
