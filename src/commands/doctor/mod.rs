//! `linkwise doctor`: what is wrong with this node, and what to do about it.
//!
//! One file for each check, in the order in which a person would check; each returns its findings. The doctor changes
//! nothing on the node, calls NVML in the child process only, and waits for nothing longer than --timeout.

mod container_runtime;
mod devices;
mod driver;
mod finding;
mod gpus;
mod health;
mod host;
mod kubelet;
mod topology_manager;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use tokio::time::timeout;

use super::print;
use crate::config::{DoctorArgs, Format};
use crate::hwloc;
use crate::topology::{GpuObservation, NodeObservation, NodeTopology};
use finding::{Finding, Findings, Report};

/// Runs the command; the exit code is 1 where any check failed.
pub async fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let limit = Duration::from_secs(args.timeout);
    let at = |path: &str| args.root.join(path);
    let sysfs = args.host.sysfs.clone();
    let bus = blocking(limit, move || host::bus(&sysfs)).await;
    let nvml = driver::ask(&args.host, limit).await;
    let module = at("proc/driver/nvidia/version");
    let module = blocking(limit, move || driver::module_version(&module)).await.flatten();
    let on_bus = bus.as_ref().and_then(Option::as_ref);

    let mut found = driver::check(&nvml, on_bus, module.as_deref());
    let (dev, known) = (at("dev"), nvml.clone());
    found.extend(guarded("device nodes", limit, move || devices::nodes(&dev, &known)).await);
    let (dev, known) = (at("dev"), nvml.clone());
    found.extend(guarded("permissions", limit, move || devices::permissions(&dev, &known)).await);
    let (sysfs, known, seen) = (args.host.sysfs.clone(), nvml.clone(), bus.clone().flatten());
    found.extend(match bus {
        Some(_) => guarded("sysfs", limit, move || host::sysfs(&sysfs, seen.as_ref(), &known)).await,
        None => hangs("sysfs", limit),
    });

    let sysfs = args.host.sysfs.clone();
    let assembled = blocking(limit, move || hwloc::observe(&sysfs)).await.map(|(host, failures)| {
        // What NVML did not answer is reported with the GPUs.
        let observed = NodeObservation { gpus: nvml.gpus().to_vec(), host, failures, ..NodeObservation::default() };
        let (topology, warnings) = NodeTopology::assemble(&observed);
        (observed, topology, warnings)
    });
    found.extend(match &assembled {
        Some((observed, _, warnings)) => host::topology(observed, warnings),
        None => hangs("topology", limit),
    });
    found.extend(kubelet::check(&args.kubelet_socket, &args.pod_resources_socket, limit).await);
    let folders: Vec<PathBuf> = ["etc/cdi", "var/run/cdi"].map(at).into();
    found.extend(guarded("container runtime", limit, move || container_runtime::check(&folders)).await);
    if let Some((observed, topology, _)) = &assembled {
        found.extend(topology_manager::check(observed, topology, args.numa_hints));
    }
    let host = assembled.map(|(observed, ..)| observed.host).unwrap_or_default();
    let (past, source) = health::Past::ask(args, !nvml.gpus().is_empty(), limit).await;
    found.extend(source);
    found.extend(gpus::check(&nvml, host, past));

    let report = Report::new(found);
    print(&match args.format {
        Format::Text => report.text(),
        Format::Json => serde_json::to_string_pretty(&report)? + "\n",
    })?;
    Ok(if report.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs what may hang in the kernel on a thread that the end of the process does not wait for; `None` when it hangs.
async fn blocking<T: Send + 'static>(limit: Duration, look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    timeout(limit, tokio::task::spawn_blocking(look)).await.ok()?.ok()
}

/// A check that may hang.
async fn guarded(
    check: &'static str,
    limit: Duration,
    look: impl FnOnce() -> Vec<Finding> + Send + 'static,
) -> Vec<Finding> {
    blocking(limit, look).await.unwrap_or_else(|| hangs(check, limit))
}

fn hangs(check: &'static str, limit: Duration) -> Vec<Finding> {
    let mut found = Findings::of(check);
    found.failed(
        format!("no answer within {limit:?}"),
        "a file or a device hangs in the kernel: look for its address in dmesg; a reboot ends it",
    );
    found.all()
}

/// The name of a GPU for people.
fn name(gpu: &GpuObservation) -> String {
    format!("GPU {} ({}, {})", gpu.index, gpu.pci, gpu.uuid)
}

/// `1 GPU`, `2 GPUs`.
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
