//! Runs the pages' `linkwise` commands on a simulated machine: our libnvidia-ml shows a DGX-1 with eight V100.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::commands::helm::repository;
use crate::commands::page::Typed;
use crate::commands::shell::{options, without_variables};

/// The limit of a command; a page marks those that take minutes.
const TIMEOUT_SECONDS: &str = "120";

/// The files that pages name, and the file of the repository that a test copies for them.
const FILES: [(&str, &str); 6] = [
    ("FILE config.yaml shared.yaml nvidia.yaml", "tests/configs/nvidia/time-slicing.yaml"),
    ("values.yaml", "tests/chart/nvidia-values.yaml"),
    ("node.yaml mine.yaml", "crates/host/src/machines/dgx-a100.yaml"),
    ("nccl.log", "fuzz/corpus/nccl_tests/h100"),
    ("jobs.csv trace.csv", "docs/traces/sample.csv"),
    ("pods.csv", "docs/traces/pods.csv"),
];

/// A temporary folder with these files.
pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, source) in FILES.iter().flat_map(|(names, source)| names.split(' ').map(move |name| (name, source))) {
        std::fs::copy(repository(source), folder.path().join(name)).unwrap();
    }
    folder
}

/// Runs a command of linkwise or of the laboratory.
pub fn linkwise(words: &[String], folder: &Path) -> Output {
    let given = without_variables(words);
    let program = match given[0].as_str() {
        "linkwise" => env!("CARGO_BIN_EXE_linkwise").into(),
        "linkwise-lab" => lab(),
        other => panic!("{other} is not a program of ours: {words:?}"),
    };
    let mut command = Command::new("timeout");
    command.env_clear().arg(TIMEOUT_SECONDS).arg(program).args(&given[1..]);
    let variables = words[..words.len() - given.len()].iter().filter_map(|word| word.split_once('='));
    command.envs(variables).env("PATH", "/usr/bin:/bin");
    command.env("FAKE_NVML_MACHINE", repository("crates/host/src/machines/dgx1-v100.yaml"));
    command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path()).env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
    command.current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

/// Runs a command, and compares its output with the page.
pub fn run(typed: &Typed) {
    let words = &typed.parts()[0];
    let needs_lab = without_variables(words)[0] == "linkwise-lab";
    assert!(!needs_lab || lab().is_file(), "run `cargo build -p linkwise-lab` first, as `make test` does");
    let folder = folder();
    for written in options(words, &["--output"]) {
        let _ = std::fs::remove_file(folder.path().join(written));
    }
    let output = linkwise(words, folder.path());
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {}: {text}{error}", typed.place, typed.text);
    match &typed.prints {
        Some(prints) => assert_eq!(&text, prints, "{}: {}", typed.place, typed.text),
        None => assert!(!text.is_empty() || typed.text.contains("--output"), "{}: it prints nothing", typed.place),
    }
}

/// Returns true if the first words are a subcommand of the program, or may be one of a laboratory that is not built.
pub fn is_known(words: &[String]) -> bool {
    if words[0] == "linkwise-lab" && !lab().is_file() {
        return true;
    }
    let names = words[1..].iter().take_while(|word| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
    let names: Vec<String> = names.take_while(|word| !word.starts_with('-')).take(2).cloned().collect();
    let subcommand = |names: &[String]| {
        let words = [&[words[0].clone()], names, &["--help".to_owned()]].concat();
        linkwise(&words, Path::new("/")).status.success()
    };
    // The second word may be an argument instead of a subcommand.
    subcommand(&names) || (!names.is_empty() && subcommand(&names[..1]))
}

/// The path of the laboratory's program, which is built beside linkwise.
pub fn lab() -> std::path::PathBuf {
    Path::new(env!("CARGO_BIN_EXE_linkwise")).with_file_name("linkwise-lab")
}
