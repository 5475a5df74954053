//! `linkwise demo` on each built-in machine, and on one without GPUs.

use crate::{MACHINES, linkwise, text};

#[test]
fn it_ends_well_on_every_machine() {
    for machine in MACHINES {
        let shown = text(&mut linkwise(&["demo", "--machine", machine]));
        for words in ["train-a", "kubelet restarts", "XID 79", "why: ", "NUMA node"] {
            assert!(shown.contains(words), "{machine}: no '{words}' in\n{shown}");
        }
        let summary = shown.lines().find(|line| line.starts_with("Summary: ")).unwrap_or_default();
        assert!(summary.contains("pods admitted"), "{shown}");
    }
}

#[test]
fn a_machine_without_gpus_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bare.yaml");
    std::fs::write(&file, "version: 1\nname: bare\ntitle: A bare node\nobserved: {gpus: []}\n").unwrap();
    let shown = text(&mut linkwise(&["demo", "--machine", file.to_str().unwrap()]));
    assert!(shown.contains("no GPU"), "{shown}");
}
