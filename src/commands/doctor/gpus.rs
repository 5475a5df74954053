//! The GPUs one by one, as NVML sees them now.

use super::driver::Nvml;
use super::finding::{Finding, Findings};
use super::name;
use crate::nvml::COUNT;
use crate::topology::{GpuObservation, ProbeFailure};

/// What keeps a GPU from being used, or from being watched: the words and what to do. What NVML has to say of a GPU's
/// health is added here.
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
pub(super) fn check(nvml: &Nvml) -> Vec<Finding> {
    let mut found = Findings::of("gpus");
    let Nvml::Answers { gpus, failures, .. } = nvml else {
        found.skipped("NVML does not answer: no GPU can be asked", None);
        return found.all();
    };
    if gpus.is_empty() && failures.is_empty() {
        found.skipped("NVML lists no GPU", None);
    }
    for gpu in gpus {
        let ailments = ailments(gpu, failures);
        if ailments.is_empty() {
            found.ok(format!("{}: {}", name(gpu), gpu.model.as_deref().unwrap_or("model unknown")));
        }
        for (what, advice) in ailments {
            found.warning(format!("{}: {what}", name(gpu)), advice);
        }
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
        if costs_gpus { found.failed(what, advice(failure)) } else { found.warning(what, advice(failure)) }
    }
    found.all()
}
