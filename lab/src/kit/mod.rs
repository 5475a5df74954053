//! `linkwise-lab kit`: runs linkwise on this machine's driver, beside a kubelet and an API server in a box. It is a
//! part of the GPU kit (`lab/gpu-kit`), which tries linkwise on a machine with a GPU.
//!
//! It starts the real program as a child process, as a DaemonSet would, once as a device plugin and once with DRA, and
//! writes the results into a folder. It changes nothing else on the machine.

mod container;
#[cfg(feature = "cluster")]
mod dra;
mod fault;
mod footprint;
mod plugin;
mod program;
mod release;
mod takeover;

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use linkwise_system::block_on;
use linkwise_system::output::print;

pub use container::{ContainerArgs, run as run_container};
use fault::Fault;

/// The longest wait for any step. When linkwise starts, a driver without persistence mode first starts each GPU.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The arguments.
#[derive(Debug, Args)]
pub struct KitArgs {
    /// linkwise's program
    #[arg(long, value_name = "PATH")]
    linkwise: PathBuf,
    /// The folder for the report's files, which must exist
    #[arg(long, value_name = "PATH")]
    report: PathBuf,
    /// An XID and the command that causes it on the first GPU; may be repeated
    #[arg(long, value_name = "XID=COMMAND")]
    fault: Vec<Fault>,
    /// The folder with the faulting programs and, in lib, their libraries; containers get it at the same path
    #[arg(long, value_name = "PATH")]
    #[cfg_attr(not(feature = "cluster"), allow(dead_code, reason = "containers are made for DRA's claims"))]
    kit: Option<PathBuf>,
    /// The program that counts the system calls of a process; its arguments are the process and the seconds
    #[arg(long, value_name = "PATH")]
    system_calls: Option<PathBuf>,
    /// The seconds for which wake-ups are counted
    #[arg(long, value_name = "N", default_value_t = 30)]
    idle_seconds: u64,
    /// The driver's library
    #[arg(long, value_name = "PATH", env = "LINKWISE_NVML_LIBRARY")]
    nvml_library: Option<PathBuf>,
    /// The root of the driver's installation
    #[arg(long, value_name = "PATH", env = "NVIDIA_DRIVER_ROOT", default_value = "/")]
    driver_root: PathBuf,
}

/// Runs the command.
pub fn run(args: &KitArgs) -> Result<()> {
    block_on(async {
        let report = Report { folder: args.report.clone(), failures: Cell::default() };
        // Both doors are tried, because a failure of one says nothing about the other.
        if let Err(error) = plugin::play(args, &report).await {
            report.promise(false, &format!("the device plugin: {error:#}"))?;
        }
        #[cfg(feature = "cluster")]
        if let Err(error) = dra::play(args, &report).await {
            report.promise(false, &format!("DRA: {error:#}"))?;
        }
        #[cfg(not(feature = "cluster"))]
        report.note(false, "DRA is left out: this program lacks the feature cluster")?;
        let failures = report.failures.get();
        ensure!(failures == 0, "{failures} lines begin with FAILED");
        Ok(())
    })
}

/// The report: files in a folder, and lines on standard output.
struct Report {
    folder: PathBuf,
    failures: Cell<usize>,
}

impl Report {
    fn write(&self, file: &str, content: impl AsRef<[u8]>) -> Result<()> {
        fs::write(self.folder.join(file), content).with_context(|| format!("cannot write {file}"))
    }

    /// Prints a line about something that may differ between machines. It never fails the run.
    fn note(&self, is_fine: bool, text: &str) -> Result<()> {
        print(&format!("{}: {text}\n", if is_fine { "ok" } else { "LOOK" }))?;
        Ok(())
    }

    /// Prints a line about something that linkwise promises. A broken promise fails the run, but only at its end.
    fn promise(&self, is_kept: bool, text: &str) -> Result<()> {
        self.failures.set(self.failures.get() + usize::from(!is_kept));
        print(&format!("{}: {text}\n", if is_kept { "ok" } else { "FAILED" }))?;
        Ok(())
    }
}
