//! Requests that cannot be answered: an error that names the cause, and an exit code other than 0.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::cli::linkwise;
use crate::dra::published::golden::assert_golden;

/// Runs a command that prints nothing on standard output; returns its exit code and standard error.
fn refusal(args: &[&str]) -> (Option<i32>, String) {
    let mut command = linkwise(args);
    // Without --node the command reads this machine, where NVML is to be unavailable.
    command.env("LINKWISE_NVML_LIBRARY", "/no/such/libnvidia-ml.so.1");
    let output = command.output().unwrap();
    assert!(output.stdout.is_empty(), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!error.contains("panicked") && !error.contains("RUST_BACKTRACE"), "{error}");
    (output.status.code(), error)
}

/// Asserts that the command fails with one line that contains all texts in `named`.
fn assert_refused(args: &[&str], named: &[&str]) {
    let (code, error) = refusal(args);
    assert_eq!(code, Some(1), "{args:?}: {error}");
    let one_line = error.starts_with("linkwise: ") && error.lines().count() == 1 && error.ends_with('\n');
    let is_plain = ["{ ", "u32"].iter().all(|debug| !error.contains(debug));
    assert!(one_line && is_plain && named.iter().all(|name| error.contains(name)), "{args:?}: no {named:?} in {error}");
}

/// Commands that take a machine.
fn with_machine(machine: &str) -> [Vec<&str>; 5] {
    let allocate = ["allocate", "--size", "1", "--node", machine];
    let claim = ["claim", "--gpus", "1", "--node", machine];
    let exact = [&claim[..], &["--exact"]].concat();
    [vec!["topology", "--node", machine], allocate.to_vec(), vec!["snapshot", "--node", machine], claim.to_vec(), exact]
}

fn file(text: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node.yaml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

#[test]
fn unknown_machine_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let missing = format!("{folder}/missing.yaml");
    for args in with_machine(&missing) {
        assert_refused(&args, &[&missing, "No such file"]);
    }
    for args in with_machine(folder) {
        assert_refused(&args, &[folder, "directory"]);
    }
    for args in with_machine("dgx-h200") {
        assert_refused(&args, &["'dgx-h200'", "dgx1-v100, dgx2-v100, dgx-a100, dgx-h100, hgx-h200"]);
    }
}

#[test]
fn broken_node_file_is_named_with_line() {
    let gpu = "version: 1\nname: x\nobserved:\n  gpus:\n    - {index: 0, uuid: GPU-a, pci: \"zz\"}\n";
    let deep = format!("version: 1\nname: {}{}\n", "[".repeat(100), "]".repeat(100));
    let cases: [(&[u8], &[&str]); 9] = [
        (b"version: 1\nname: x\nobserved:\n  gpus: []\n  colour: red\n", &["`colour`", "line 5"]),
        (b"version: 1\nname: [x\ntitle: y\n", &["line "]),
        (b"", &["node.yaml"]),
        (b"version: 9\nname: x\n", &["version 9 is newer"]),
        (b"version: 1\nname: x\n", &["`observed`"]),
        (gpu.as_bytes(), &["zz", "line 5"]),
        (b"version: 1\nname: \xff", &["not UTF-8", "byte 17"]),
        (b"\0\0\0\0", &["node.yaml"]),
        (deep.as_bytes(), &["nested too deeply", "line 2"]),
    ];
    for (text, named) in cases {
        let (_folder, path) = file(text);
        for args in with_machine(path.to_str().unwrap()) {
            assert_refused(&args, &[&["node.yaml"], named].concat());
        }
    }
    let (_folder, path) = file(deep.as_bytes());
    let slices = format!("--cluster={}", path.to_str().unwrap());
    assert_refused(&["claim", "--gpus", "2", &slices], &["node.yaml: ", "nested too deeply", "line 2"]);
    assert_refused(&["config", "show", "--config-file", path.to_str().unwrap()], &["line 2", "nested too deeply"]);
}

#[test]
fn impossible_choice_reports_cause() {
    let allocate =
        |more: &[&str], named: &[&str]| assert_refused(&[&["allocate", "--node", "dgx-h100"], more].concat(), named);
    allocate(&["--size", "9"], &["cannot choose 9 GPUs", "8 are available"]);
    allocate(&["--size", "0"], &["cannot choose 0 GPUs"]);
    allocate(&["--size", "18446744073709551615"], &["cannot choose 18446744073709551615 GPUs"]);
    allocate(&["--size", "3", "--available", "0,1"], &["cannot choose 3 GPUs", "2 are available"]);
    allocate(&["--size", "2", "--available", "1,1,1"], &["cannot choose 2 GPUs", "1 are available"]);
    allocate(&["--size", "1", "--must-include", "1,2"], &["cannot choose 1 GPUs", "2 must be included"]);
    allocate(&["--size", "1", "--available", "0,8"], &["no GPU 8", "it has 8"]);
    allocate(&["--size", "1", "--must-include", "GPU-nobody"], &["no GPU GPU-nobody"]);
    let (_folder, path) = file(b"version: 1\nname: bare\nobserved: {gpus: []}\n");
    let path = path.to_str().unwrap();
    assert_refused(&["allocate", "--size", "1", "--node", path], &["cannot choose 1 GPUs", "0 are available"]);
    for exact in [&[][..], &["--exact"]] {
        let claim = ["claim", "--gpus", "1", "--node", path];
        assert_refused(&[&claim, exact].concat(), &["--gpus 1 with --node", "the largest has 0"]);
    }
}

#[test]
fn missing_nvml_reports_cause_and_remedy() {
    for args in [vec!["topology"], vec!["allocate", "--size", "1"]] {
        assert_refused(&args, &["/no/such/libnvidia-ml.so.1", "--node"]);
    }
}

#[test]
fn unknown_arguments_are_named() {
    let usage = |args: &[&str], named: &str| {
        let (code, error) = refusal(args);
        assert_eq!(code, Some(2), "{args:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(named), "{args:?}: {error}");
    };
    usage(&["topology", "--wat"], "'--wat'");
    usage(&["dance"], "'dance'");
    usage(&["topology", "--node", "dgx-h100", "--list"], "--list");
    usage(&["topology", "--node", "dgx-h100", "--format", "xml"], "'xml'");
    usage(&["allocate", "--node", "dgx-h100"], "--size");
    usage(&["allocate", "--node", "dgx-h100", "--size", "two"], "'two'");
    usage(&["allocate", "--node", "dgx-h100", "--size", "1", "--available", "0,!?"], "'!?'");
    usage(&["allocate", "--node", "dgx-h100", "--size", "1", "--available", "0,,1"], "''");
    usage(&["allocate", "--node", "dgx-h100", "--size", "1", "--must-include", "-3"], "-3");
    usage(&["run", "--metrics-address", "here"], "'here'");
    usage(&["run", "--fail-on-init-error=maybe"], "'maybe'");
}

#[test]
fn removed_names_are_refused_with_the_remedy() {
    let mut text = String::new();
    for args in [
        &["gang", "--pods", "4"][..],
        &["run", "--dra-groups=2"],
        &["simulate"],
        &["topology", "--format", "dot"],
        &["top", "--format=json"],
        &["top", "--no-color"],
        &["topology", "--allocated", "0"],
        &["topology", "--host=host.xml"],
        &["claim", "--spare-nvswitch"],
    ] {
        let (code, error) = refusal(args);
        assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
        text += &error;
    }
    assert_golden("removed-names", &text);
    let mut show = linkwise(&["config", "show"]);
    let output = show.env("LINKWISE_DRA_GROUPS", "2").env("LINKWISE_TRACES_ENDPOINT", "").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{error}");
    assert!(error.starts_with("linkwise: LINKWISE_DRA_GROUPS: removed: groups of 2, 4 and 8 GPUs"), "{error}");
}
