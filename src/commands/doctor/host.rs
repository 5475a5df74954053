//! Checks the host around the GPUs: the kernel's PCI bus and hwloc, both against NVML.

use super::Node;
use super::driver::Nvml;
use super::finding::{Findings, Status};
use linkwise_core::topology::{NodeObservation, TopologyWarning};
use linkwise_core::words::count;

/// Compares the kernel's GPUs with NVML's.
pub(super) fn sysfs(found: &mut Findings, node: &Node) {
    let sysfs = &node.args.host.sysfs;
    let Some(bus) = &node.bus else { return super::hangs(found, node.limit) };
    let Some(bus) = bus else {
        return found.failed(
            format!("there is no PCI bus under {}", sysfs.display()),
            "mount the host's /sys, or name its place with --sysfs: without it linkwise cannot see how near GPUs are",
        );
    };
    let Nvml::Answers { gpus, .. } = &node.nvml else {
        return found.ok(format!("{} on the PCI bus", count(bus.len(), "NVIDIA GPU")));
    };
    for (pci, driver) in bus.iter().filter(|(pci, _)| !gpus.iter().any(|gpu| gpu.pci == **pci)) {
        let (status, place, advice) = match driver.as_deref() {
            Some("nvidia") => (
                Status::Failed,
                "but NVML does not list it".to_owned(),
                "the driver could not start it, or this container was not made for all GPUs: dmesg names its address (NVRM); \
                 NVIDIA_VISIBLE_DEVICES=all",
            ),
            Some(driver) => (
                Status::Warning,
                format!("and bound to {driver}: NVML does not list it"),
                "right for a GPU that is passed through to virtual machines; else bind it to nvidia",
            ),
            None => (
                Status::Failed,
                "and bound to no driver".to_owned(),
                "the driver does not support it or could not start it: dmesg names its address (NVRM)",
            ),
        };
        let what = format!("GPU {pci} is on the PCI bus, {place}");
        found.each(status, place, what, advice);
    }
    let absent = gpus.iter().filter(|gpu| !bus.contains_key(&gpu.pci)).count();
    if absent > 0 {
        found.warning(
            format!(
                "{absent} of {} that NVML lists are not on the PCI bus under {}",
                count(gpus.len(), "GPU"),
                sysfs.display()
            ),
            "this /sys is not the host's: mount it, or name its place with --sysfs",
        );
    } else if bus.len() == gpus.len() {
        found.ok(format!("{} on the PCI bus, the same by NVML", count(bus.len(), "NVIDIA GPU")));
    }
}

/// Compares hwloc's view with NVML's.
pub(super) fn topology(found: &mut Findings, observed: &NodeObservation, warnings: &[TopologyWarning]) {
    if observed.gpus.is_empty() && warnings.is_empty() {
        return found.skipped("no GPU is known: nothing to compare", None);
    }
    if warnings.is_empty() {
        let nodes = count(observed.host.numa_nodes.len(), "NUMA node");
        found.ok(format!("hwloc and NVML agree on {}; {nodes}", count(observed.gpus.len(), "GPU")));
    }
    for warning in warnings {
        found.each(Status::Warning, "", warning.to_string(), advice(warning));
    }
}

fn advice(warning: &TopologyWarning) -> &'static str {
    match warning {
        TopologyWarning::Probe(_) => "hwloc could not look at the host: is /sys mounted and readable here?",
        TopologyWarning::DuplicateUuid { .. } | TopologyWarning::DuplicateAddress { .. } => {
            "the driver contradicts itself: send NVIDIA nvidia-bug-report.sh"
        }
        TopologyWarning::NotInHostTree(..) => {
            "mount the host's /sys; in some virtual machines there is nothing to see, and NVML's levels are all there is"
        }
        TopologyWarning::P2pRefused { .. } => {
            "turn P2P on: the IOMMU off or in passthrough mode, ACS off below the switches, no NVreg setting against it"
        }
        TopologyWarning::UnknownLevel(..) => "the pair is taken as far apart: choices between such GPUs are guesses",
        TopologyWarning::LevelDisagreement { .. } | TopologyWarning::NumaDisagreement { .. } => {
            "nothing to do: known of virtual switches and of firmware; linkwise snapshot records both for a report"
        }
        TopologyWarning::NvLinkOneSided { .. } | TopologyWarning::NvLinkUnknownRemote(..) => {
            "an NVLink is down or still in training: nvidia-smi nvlink -s; on NVSwitch machines is the fabric manager running?"
        }
        _ => {
            "linkwise goes on without it; linkwise topology shows what is left, linkwise snapshot records it for a report"
        }
    }
}
