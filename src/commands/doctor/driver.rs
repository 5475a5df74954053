//! Checks that the driver and its library are found, loaded and of one version. NVML is called in the child process, as
//! in `run`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Findings;
use crate::config::HostArgs;
use linkwise_host::hwloc::{BusGpus, held_by_others};
use linkwise_nvml::child::{Agent, AgentEnded};
use linkwise_nvml::protocol::FromAgent;
use linkwise_nvml::{CallFailure, Fault, NodeScan, known};

use crate::run;
use linkwise_core::state::HealthPoll;
use linkwise_core::topology::{GpuObservation, GpuUuid};
use linkwise_core::words::count;

/// The outcome of the calls to NVML.
#[derive(Clone, Debug)]
pub(super) enum Nvml {
    Answers {
        driver: Option<String>,
        library: Option<String>,
        gpus: Vec<GpuObservation>,
        failures: Vec<CallFailure>,
        /// The first poll of each GPU, if there was one.
        polls: BTreeMap<GpuUuid, HealthPoll>,
    },
    /// NVML is unavailable: the failed call, `dlopen` or agent's start, with its error, and the kind of fault.
    Fails(String, Fault),
    /// The agent ended without an answer, for this reason; with the remedy.
    Ends(String, &'static str),
    /// NVML did not answer within this time.
    Hangs(Duration),
}

impl Nvml {
    pub fn gpus(&self) -> &[GpuObservation] {
        match self {
            Self::Answers { gpus, .. } => gpus,
            Self::Fails(..) | Self::Ends(..) | Self::Hangs(_) => &[],
        }
    }
}

/// Asks NVML for all facts, through an agent that ends afterwards.
pub(super) async fn ask(host: &HostArgs, limit: Duration) -> Nvml {
    let mut agent = match Agent::spawn(&run::agent_command(host)) {
        Ok(agent) => agent,
        Err(error) => return Nvml::Fails(format!("{error:#}"), Fault::Other),
    };
    let deadline = Instant::now() + limit;
    let (mut failed, mut scanned) = (None, None);
    loop {
        let Ok(message) = timeout_at(deadline, agent.next()).await else { return Nvml::Hangs(limit) };
        match message {
            Ok(FromAgent::Ready(scan)) => scanned = Some(scan.after(None)),
            // The first poll follows at once.
            Ok(FromAgent::Polled { gpus: polls, .. }) => {
                if let Some(scan) = scanned {
                    agent.end().await;
                    return answers(scan, polls);
                }
            }
            Ok(FromAgent::Leaving(error)) => failed = Some(error),
            Ok(_) => {}
            Err(ended) => {
                return match (scanned, failed) {
                    (Some(scan), _) => answers(scan, BTreeMap::new()),
                    (None, Some(error)) => Nvml::Fails(error.to_string(), error.fault()),
                    (None, None) => Nvml::Ends(agent.describe(&ended), remedy(&ended)),
                };
            }
        }
    }
}

fn answers(scan: NodeScan, polls: BTreeMap<GpuUuid, HealthPoll>) -> Nvml {
    let gpus = scan.observations();
    let (driver, library) = (known(&scan.driver).cloned(), known(&scan.library).cloned());
    Nvml::Answers { driver, library, gpus, failures: scan.failures, polls }
}

/// The version of the loaded kernel module, from /proc/driver/nvidia/version: the first word of its line NVRM that is a
/// number with dots.
pub(super) fn module_version(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(version).map(str::to_owned)
}

pub(super) fn check(found: &mut Findings, nvml: &Nvml, bus: Option<&BusGpus>, module: Option<&str>) {
    found.check = "driver";
    let others_hold_all = |bus: &BusGpus| held_by_others(bus).count() == bus.len();
    match nvml {
        Nvml::Answers { driver, library, gpus, .. } => {
            let (driver, library) = (driver.as_deref(), library.as_deref());
            let or_unknown = |version: Option<&str>| version.unwrap_or("unknown").to_owned();
            let gpus = count(gpus.len(), "GPU");
            found.ok(format!("NVML answers: driver {}, library {}, {gpus}", or_unknown(driver), or_unknown(library)));
            versions(found, driver, library, module);
        }
        Nvml::Fails(why, fault) if fault.is_no_driver() && bus.is_some_and(BTreeMap::is_empty) => found.skipped(
            format!("no NVIDIA GPU on the PCI bus, NVML unavailable ({why}): linkwise run idles here, and is ready"),
            Some("nothing to do; if this node should have GPUs, run lspci -d 10de: on the host"),
        ),
        Nvml::Fails(why, fault) if fault.is_no_driver() && bus.is_some_and(others_hold_all) => found.skipped(
            format!("other drivers hold all GPUs, NVML unavailable ({why}): linkwise run idles here, and is ready"),
            Some("right if all GPUs are passed through to virtual machines; otherwise bind them to nvidia"),
        ),
        Nvml::Fails(why, fault) => found.failed(format!("NVML unavailable: {why}"), advice(*fault, module)),
        // This is a failure even if the bus shows no GPU: a library that exists and fails does not prove that there is
        // no GPU.
        Nvml::Ends(why, remedy) => found.failed(format!("NVML unavailable: {why}"), remedy),
        Nvml::Hangs(limit) => found.failed(
            format!("NVML does not answer within {limit:?}"),
            "the driver hangs: dmesg on the host names the GPU (NVRM, Xid); drain the node and \
             reset the GPU (linkwise admin release, nvidia-smi --gpu-reset, linkwise admin resume) or reboot",
        ),
    }
}

/// The remedy if an agent ended without an answer.
fn remedy(ended: &AgentEnded) -> &'static str {
    match ended {
        AgentEnded::Memory(..) => {
            "if the library needs that much, raise --nvml-memory-mib (LINKWISE_NVML_MEMORY_MIB), and the container's \
             memory limit by twice the difference"
        }
        ended if ended.is_crash() => {
            "the library crashes: it is broken, or of another release than the driver; run nvidia-smi on the host, \
             which uses the same library"
        }
        _ => "run nvidia-smi on the host, and look at dmesg (NVRM, Xid)",
    }
}

fn versions(found: &mut Findings, driver: Option<&str>, library: Option<&str>, module: Option<&str>) {
    if let (Some(driver), Some(module)) = (driver, module)
        && driver != module
    {
        found.failed(
            format!("the kernel module has version {module}, but the driver reports {driver}"),
            "the driver was replaced while the module stayed loaded: drain the node, reload the module or reboot",
        );
    }
    // The library's version is CUDA.DRIVER, such as 13.580.95.05.
    if let (Some(driver), Some(library)) = (driver, library)
        && library != driver
        && !library.ends_with(&format!(".{driver}"))
    {
        let advice = "the container holds the library of another driver: delete the pod to make it again";
        found.warning(format!("the library is {library}, the driver {driver}: not of one release"), advice);
    }
}

fn advice(fault: Fault, module: Option<&str>) -> &'static str {
    match fault {
        Fault::Library => {
            "the library is not in this container: run it with the NVIDIA container runtime (runtimeClassName: nvidia, \
             NVIDIA_VISIBLE_DEVICES=all), or name the library or the driver's root with --nvml-library"
        }
        Fault::VersionMismatch => {
            "the library and the loaded kernel module are of different releases: drain the node, reload the module or \
             reboot, and delete this pod"
        }
        Fault::Released => "nothing is wrong; run `linkwise admin resume` when the driver may be used again",
        Fault::NoPermission => "this process may not open the device nodes: see permissions below",
        Fault::GpuLost => "a GPU has fallen off the bus: drain the node and reboot it",
        Fault::DriverNotLoaded if module.is_none() => {
            "the kernel module is not loaded: run modprobe nvidia on the host; if it fails, see dmesg"
        }
        Fault::DriverNotLoaded => {
            "the kernel module is loaded, but this container cannot reach it: its device nodes are missing or not \
             allowed, see below"
        }
        Fault::Uninitialized | Fault::ResetRequired | Fault::Other => {
            "run nvidia-smi on the host, and look at dmesg (NVRM, Xid)"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_of_another_release_is_reported() {
        let is_reported = |driver: &str, library: &str| {
            let (driver, library) = (Some(driver.to_owned()), Some(library.to_owned()));
            let (gpus, failures, polls) = Default::default();
            let nvml = Nvml::Answers { driver, library, gpus, failures, polls };
            let mut found = Findings::default();
            check(&mut found, &nvml, None, None);
            serde_json::to_string(&found.found).unwrap().contains("not of one release")
        };
        assert!(!is_reported("580.95.05", "13.580.95.05") && !is_reported("580.95.05", "580.95.05"));
        assert!(is_reported("580.95.05", "13.580.9.05") && is_reported("580.95.05", "12.570.1"));
    }
}
