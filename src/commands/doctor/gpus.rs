//! Checks the GPUs one by one: NVML's failed calls, and the reasons for which a GPU is unhealthy.

use super::driver::Nvml;
use super::finding::{Findings, Status};
use super::health::History;
use super::{Node, name};
use crate::commands::since::now;
use linkwise_core::topology::{GpuObservation, HostObservation, NodeObservation, ProbeFailure};
use linkwise_nvml::{COUNT, CallError, CallFailure, Fault, REGISTER};

/// The failed calls about a GPU, with the remedies.
fn failed_calls(gpu: &GpuObservation, failures: &[CallFailure]) -> Vec<(String, &'static str)> {
    let own = failures.iter().filter(|failure| failure.subject == gpu.pci.to_string());
    own.map(|failure| (described(failure), advice(&failure.error))).collect()
}

fn described(failure: &CallFailure) -> String {
    let ProbeFailure { call, error, .. } = failure.clone().into();
    format!("{call}: {error}")
}

fn advice(error: &CallError) -> &'static str {
    match error.fault() {
        Fault::GpuLost => {
            "it has fallen off the bus: drain the node and reboot it; if it comes again, the card or its slot"
        }
        Fault::ResetRequired => {
            "drain the node, then linkwise admin release, nvidia-smi --gpu-reset -i INDEX, linkwise admin resume"
        }
        _ if error.call == REGISTER => {
            "its XIDs and ECC errors are not seen: another process may hold the events, or the driver is in trouble (dmesg)"
        }
        _ => "linkwise goes on without that fact; dmesg (NVRM, Xid) may say why the driver does not answer",
    }
}

/// Adds a line for each GPU that is well, and one for each fault.
pub(super) async fn check(found: &mut Findings, node: &Node, host: HostObservation) {
    found.check = "gpus";
    let history = History::ask(found, &node.args, !node.nvml.gpus().is_empty(), node.limit).await;
    let now = now();
    let Nvml::Answers { gpus, failures, polls, .. } = &node.nvml else {
        found.skipped("NVML does not answer: no GPU can be asked", None);
        for (gpu, reasons) in history.reasons(&NodeObservation::default(), &Default::default(), now) {
            reasons.iter().for_each(|reason| reason.add_to(found, &format!("GPU {gpu}"), now));
        }
        return;
    };
    if gpus.is_empty() && failures.is_empty() {
        found.skipped("NVML lists no GPU", None);
    }
    let observed = NodeObservation { gpus: gpus.clone(), host, ..NodeObservation::default() };
    let mut unhealthy = history.reasons(&observed, polls, now);
    for gpu in gpus {
        let (failed, reasons) = (failed_calls(gpu, failures), unhealthy.remove(&gpu.uuid).unwrap_or_default());
        let asked = polls.contains_key(&gpu.uuid);
        if failed.is_empty() && reasons.is_empty() && asked {
            found.ok(format!("{}: {}", name(gpu), gpu.model.as_deref().unwrap_or("model unknown")));
        }
        for (what, advice) in failed {
            let whole = format!("{}: {what}", name(gpu));
            found.each(Status::Warning, what, whole, advice);
        }
        reasons.iter().for_each(|reason| reason.add_to(found, &name(gpu), now));
        if !asked {
            let what = "the process that asked NVML ended before it said how the GPU is";
            let advice = "run this again; where it stays so, dmesg (NVRM, Xid) may say why";
            found.each(Status::Warning, what, format!("{}: {what}", name(gpu)), advice);
        }
    }
    for (gpu, reasons) in unhealthy {
        reasons.iter().for_each(|reason| reason.add_to(found, &format!("GPU {gpu}, which NVML does not list"), now));
    }
    // A GPU that could not even be identified cannot be offered.
    let listed = |failure: &CallFailure| gpus.iter().any(|gpu| failure.subject == gpu.pci.to_string());
    for failure in failures.iter().filter(|failure| !listed(failure)) {
        let what = format!("{}: {}", failure.subject, described(failure));
        // A failed call about the driver only loses its fact, except the count of GPUs: without it no GPU can be
        // offered.
        let costs_gpus = failure.subject != "driver" || failure.error.call == COUNT;
        let status = if costs_gpus { Status::Failed } else { Status::Warning };
        found.each(status, described(failure), what, advice(&failure.error));
    }
}
