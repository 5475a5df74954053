//! Commands for people and scripts: `topology`, `allocate`, `config`, `expect`, `verify`, `top`, `admin state` and
//! others.

mod allocate;
mod bad_input;
mod benchmark;
mod cases;
mod config;
mod documents;
mod dra_switch;
mod golden;
mod progress;
mod top;
mod topology;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

/// Built-in machines of eight GPUs whose output is kept in golden files.
const MACHINES: [&str; 3] = ["dgx1-v100", "dgx-h100", "pcie-8x-pix-pairs"];

/// The binary, without settings from the environment in which the tests run.
fn linkwise(args: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    command.env_clear().args(args).stdin(Stdio::null());
    command
}

/// Lets NVML report the GPUs of a built-in machine, and hwloc a host with two packages, to the command.
fn this_is(command: &mut Command, machine: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("crates/host/src/machines/{machine}.yaml"));
    command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path()).env("FAKE_NVML_MACHINE", file);
    command.env_remove("FAKE_NVML_CONTROL").env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
}

/// Runs a command that succeeds with nothing on standard error; returns what it printed.
fn text(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&mut linkwise(args))).unwrap()
}

/// A program whose output is a terminal. Dropping it kills the program.
struct OnTerminal {
    child: Child,
    /// Our side of the terminal.
    ours: File,
    /// The program's output so far.
    written: String,
}

impl OnTerminal {
    fn start(command: &mut Command) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let theirs = File::options().read(true).write(true).open(name).unwrap();
        let child = command.stdout(theirs.try_clone().unwrap()).stderr(theirs).spawn().unwrap();
        Self { child, ours: ours.into(), written: String::new() }
    }

    /// Reads until `is_met` accepts the output so far.
    fn wait(&mut self, is_met: impl Fn(&str) -> bool) {
        while !is_met(&self.written) {
            let mut bytes = [0; 4096];
            let read = self.ours.read(&mut bytes).unwrap_or_else(|error| panic!("{error}: {}", self.written));
            self.written += &String::from_utf8_lossy(&bytes[..read]);
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
