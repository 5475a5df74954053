//! The manifests: they parse, and what they name is there. kubectl is not needed; what it would do with strategic merges is not
//! played here.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn overlays() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(manifests().join("overlays")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

fn list<'a>(value: &'a Value, pointer: &str) -> Vec<&'a Value> {
    value.pointer(pointer).and_then(Value::as_array).map(|list| list.iter().collect()).unwrap_or_default()
}

fn names(value: &Value, pointer: &str) -> BTreeSet<String> {
    list(value, pointer).into_iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
}

const POD: &str = "/spec/template/spec";

#[test]
fn kustomizations_name_files_that_are_there() {
    for folder in overlays().into_iter().chain([manifests().join("base")]) {
        let kustomization = read(&folder.join("kustomization.yaml"));
        assert_eq!(kustomization["kind"], "Kustomization");
        for resource in list(&kustomization, "/resources") {
            let path = folder.join(resource.as_str().unwrap());
            assert!(path.exists(), "{}", path.display());
        }
        for patch in list(&kustomization, "/patches") {
            assert!(folder.join(patch["path"].as_str().unwrap()).is_file(), "{patch}");
        }
    }
}

#[test]
fn overlays_change_what_the_base_has() {
    let base = read(&manifests().join("base/daemonset.yaml"));
    for folder in overlays() {
        let kustomization = read(&folder.join("kustomization.yaml"));
        for patch in list(&kustomization, "/patches") {
            let text = read(&folder.join(patch["path"].as_str().unwrap()));
            for (named, by) in [(&patch["target"]["kind"], "kind"), (&text["kind"], "kind")] {
                assert_eq!(*named, base[by], "{}", folder.display());
            }
            for named in [&patch["target"]["name"], &text["metadata"]["name"]] {
                assert_eq!(*named, base["metadata"]["name"], "{}", folder.display());
            }
            // A container of another name would be a second one.
            let containers = format!("{POD}/containers");
            assert!(names(&text, &containers).is_subset(&names(&base, &containers)), "{}", folder.display());
            holds(&[&base, &text]);
        }
    }
    holds(&[&base]);
}

/// Every mount has its volume, every volume its mount, every port of a probe its name.
fn holds(parts: &[&Value]) {
    let all = |pointer: &str| parts.iter().flat_map(|part| names(part, pointer)).collect::<BTreeSet<String>>();
    assert_eq!(all(&format!("{POD}/containers/0/volumeMounts")), all(&format!("{POD}/volumes")));
    let ports = all(&format!("{POD}/containers/0/ports"));
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        for part in parts {
            if let Some(port) = part.pointer(&format!("{POD}/containers/0/{probe}/httpGet/port")) {
                assert!(ports.contains(port.as_str().unwrap()), "{probe}: {port}");
            }
        }
    }
}

#[test]
fn variables_are_those_that_linkwise_reads() {
    // Read by the NVIDIA container runtime, not by us.
    const RUNTIMES: [&str; 2] = ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"];
    let help = Command::new(env!("CARGO_BIN_EXE_linkwise")).args(["run", "--help"]).output().unwrap();
    // Lines are broken to the width of a terminal.
    let help = String::from_utf8(help.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let mut seen = 0;
    for folder in overlays().into_iter().chain([manifests().join("base")]) {
        for name in names(&read(&folder.join("daemonset.yaml")), &format!("{POD}/containers/0/env")) {
            let in_help = |end: char| help.contains(&format!("[env: {name}{end}"));
            let known = RUNTIMES.contains(&name.as_str()) || in_help('=') || in_help(']');
            assert!(known, "{}: linkwise run reads no {name}", folder.display());
            seen += 1;
        }
    }
    assert!(seen > 0);
}
