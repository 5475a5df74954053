//! Tests of the laboratory: demos with and without DRA, the node's page, simulations, and GPUs under Topology Managers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test may panic"
)]

mod demo;
mod demo_dra;
mod numa_hints;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../../../tests/oracle/mod.rs"]
mod oracle;
mod page;
mod simulate;
mod simulate_cluster;
mod topology_manager_tables;

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// The binary, without settings from the environment in which the tests run.
fn lab(args: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise-lab"));
    command.env_clear().args(args).stdin(Stdio::null());
    command
}

/// Runs a command, which must succeed and print nothing to standard error. Returns its standard output.
fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn run_with_input(command: &mut Command, input: &[u8]) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A thread writes the input, because a command that prints while it reads would block on a full pipe.
    let writing = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap().unwrap();
    output
}
