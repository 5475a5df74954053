//! Runs the fuzz targets' checks on their corpora and on every input that once failed.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "the helpers of a test may end it, and name the input")]

use crate::fuzz_checks;
use std::fs;
use std::path::{Path, PathBuf};

/// The files of a target's corpus and regressions.
fn inputs(target: &str) -> Vec<PathBuf> {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let mut files = Vec::new();
    for kind in ["corpus", "regressions"] {
        let Ok(folder) = fs::read_dir(fuzz.join(kind).join(target)) else { continue };
        files.extend(folder.map(|file| file.unwrap().path()));
    }
    files.sort();
    files
}

fn check(target: &str, check: fn(&[u8])) {
    let files = inputs(target);
    assert!(!files.is_empty(), "no corpus for {target}");
    for file in files {
        // The last line before a failure names the input.
        eprintln!("{}", file.display());
        check(&fs::read(&file).unwrap());
    }
}

#[test]
fn requests() {
    check("request", fuzz_checks::request);
}

#[test]
fn node_files() {
    check("node_file", fuzz_checks::node_file);
}

#[test]
fn nccl_dumps() {
    check("nccl_xml", fuzz_checks::nccl_xml);
}

#[test]
fn texts_of_nccl_tests() {
    check("nccl_tests", fuzz_checks::nccl_tests);
}

#[test]
fn configurations() {
    check("config", fuzz_checks::config);
}

#[test]
fn claims() {
    check("claim", fuzz_checks::claim);
}

#[test]
fn checkpoints() {
    check("checkpoint", fuzz_checks::checkpoint);
}

#[test]
fn agent_messages() {
    check("agent_protocol", fuzz_checks::agent_protocol);
}
