//! The GPUs one by one: what NVML could not say of each, and what is held against it.

use super::driver::Nvml;
use super::finding::{Finding, Findings, Status};
use super::health::{self, Past};
use super::name;
use crate::nvml::COUNT;
use crate::topology::{GpuObservation, HostObservation, NodeObservation, ProbeFailure};

/// What of a GPU could not be seen: the words and what to do.
fn ailments(gpu: &GpuObservation, failures: &[ProbeFailure]) -> Vec<(String, &'static str)> {
    let pci = gpu.pci.to_string();
    let own = failures.iter().filter(|failure| failure.subject == pci || failure.subject == gpu.uuid.as_str());
    own.map(|failure| (format!("{}: {}", failure.call, failure.error), advice(failure))).collect()
}

fn advice(failure: &ProbeFailure) -> &'static str {
    if failure.error.contains("GPU_IS_LOST") {
        "it has fallen off the bus: drain the node and reboot it; if it comes again, the card or its slot"
    } else if failure.error.contains("RESET_REQUIRED") {
        "drain the node and reset the GPU (nvidia-smi --gpu-reset -i INDEX)"
    } else if failure.call == "nvmlDeviceRegisterEvents" {
        "its XIDs and ECC errors are not seen: another process may hold the events, or the driver is in trouble (dmesg)"
    } else {
        "linkwise goes on without that fact; dmesg (NVRM, Xid) may say why the driver does not answer"
    }
}

/// A line for each GPU that is well, and each thing that is not.
pub(super) fn check(nvml: &Nvml, host: HostObservation, past: Past) -> Vec<Finding> {
    let mut found = Findings::of("gpus");
    let now = health::now();
    let Nvml::Answers { gpus, failures, polls, .. } = nvml else {
        found.skipped("NVML does not answer: no GPU can be asked", None);
        for (gpu, held) in past.against(&NodeObservation::default(), &Default::default(), now) {
            held.iter().for_each(|held| held.tell(&mut found, &format!("GPU {gpu}"), now));
        }
        return found.all();
    };
    if gpus.is_empty() && failures.is_empty() {
        found.skipped("NVML lists no GPU", None);
    }
    let observed = NodeObservation { gpus: gpus.clone(), host, failures: Vec::new() };
    let mut against = past.against(&observed, polls, now);
    for gpu in gpus {
        let (ailments, held) = (ailments(gpu, failures), against.remove(&gpu.uuid).unwrap_or_default());
        let asked = polls.contains_key(&gpu.uuid);
        if ailments.is_empty() && held.is_empty() && asked {
            found.ok(format!("{}: {}", name(gpu), gpu.model.as_deref().unwrap_or("model unknown")));
        }
        for (what, advice) in ailments {
            let whole = format!("{}: {what}", name(gpu));
            found.each(Status::Warning, what, whole, advice);
        }
        held.iter().for_each(|held| held.tell(&mut found, &name(gpu), now));
        if !asked {
            let what = "the process that asked NVML ended before it said how the GPU is";
            let advice = "run this again; where it stays so, dmesg (NVRM, Xid) may say why";
            found.each(Status::Warning, what, format!("{}: {what}", name(gpu)), advice);
        }
    }
    for (gpu, held) in against {
        held.iter().for_each(|held| held.tell(&mut found, &format!("GPU {gpu}, which NVML does not list"), now));
    }
    // What is about none of those: a GPU that does not even say who it is cannot be offered.
    let known = |failure: &ProbeFailure| {
        gpus.iter().any(|gpu| failure.subject == gpu.pci.to_string() || failure.subject == gpu.uuid.as_str())
    };
    for failure in failures.iter().filter(|failure| !known(failure)) {
        let ProbeFailure { subject, call, error } = failure;
        let what = format!("{subject}: {call}: {error}");
        // What the driver does not say of itself costs that; without its count there is no GPU to be offered.
        let costs_gpus = subject != "driver" || call == COUNT;
        let status = if costs_gpus { Status::Failed } else { Status::Warning };
        found.each(status, format!("{call}: {error}"), what, advice(failure));
    }
    found.all()
}
