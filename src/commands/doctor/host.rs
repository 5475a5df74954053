//! Checks the host around the GPUs: the kernel's PCI bus and hwloc, both against NVML; the device nodes; and the CDI
//! folders of the container runtime, with their specs for NVIDIA devices.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::driver::Nvml;
use super::{Findings, Node, Status, existing};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{NodeObservation, TopologyWarning};
use linkwise_core::words::count;
use linkwise_host::yaml::fault;

/// Compares the kernel's GPUs with NVML's.
pub(super) fn sysfs(found: &mut Findings, node: &Node) {
    let sysfs = &node.args.host.sysfs;
    let Some(bus) = &node.bus else { return super::add_hang(found, node.limit) };
    let Some(bus) = bus else {
        return found.failed(
            format!("there is no PCI bus under {}", sysfs.display()),
            "mount the host's /sys, or name its place with --sysfs: linkwise needs it to see which GPUs are close",
        );
    };
    let Nvml::Answers { gpus, .. } = &node.nvml else {
        return found.ok(format!("{} on the PCI bus", count(bus.len(), "NVIDIA GPU")));
    };
    for (pci, driver) in bus.iter().filter(|(pci, _)| !gpus.iter().any(|gpu| gpu.pci == **pci)) {
        let (status, problem, advice) = match driver.as_deref() {
            Some("nvidia") => (
                Status::Failed,
                "but NVML does not list it".to_owned(),
                "the driver could not start it: look for its address in dmesg (NVRM); or this container was not made \
                 for all GPUs: set NVIDIA_VISIBLE_DEVICES=all",
            ),
            Some(driver) => (
                Status::Warning,
                format!("and bound to {driver}: NVML does not list it"),
                "right for a GPU that is passed through to virtual machines; otherwise bind it to nvidia",
            ),
            None => (
                Status::Failed,
                "and bound to no driver".to_owned(),
                "the driver does not support it or could not start it: look for its address in dmesg (NVRM)",
            ),
        };
        let what = format!("GPU {pci} is on the PCI bus, {problem}");
        found.each(status, problem, what, advice);
    }
    let absent = gpus.iter().filter(|gpu| !bus.contains_key(&gpu.pci)).count();
    if absent > 0 {
        let (all, sysfs) = (count(gpus.len(), "GPU"), sysfs.display());
        let advice = "this /sys is not the host's: mount it, or name its place with --sysfs";
        found.warning(format!("{absent} of {all} that NVML lists are not on the PCI bus under {sysfs}"), advice);
    } else if bus.len() == gpus.len() {
        found.ok(format!("{} on the PCI bus, and NVML lists the same", count(bus.len(), "NVIDIA GPU")));
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
        TopologyWarning::Probe(_) => "hwloc could not read the host: check that /sys is mounted and readable here",
        TopologyWarning::DuplicateUuid { .. } | TopologyWarning::DuplicateAddress { .. } => {
            "the driver contradicts itself: send the output of nvidia-bug-report.sh to NVIDIA"
        }
        TopologyWarning::NotInHostTree(..) => {
            "mount the host's /sys; some virtual machines do not show the tree, and only NVML's levels are known"
        }
        TopologyWarning::OddGpu { .. } => {
            "drain the node, then linkwise admin release, nvidia-smi --gpu-reset -i INDEX, linkwise admin resume; if \
             the GPU still differs, compare its lspci -vv with that of the others, and reseat or replace it"
        }
        TopologyWarning::NvLinksUnknown(_) => {
            "run nvidia-smi nvlink -s: if it fails too, update the driver or reboot; until then GPUs are chosen by PCIe"
        }
        TopologyWarning::P2pRefused { .. } => {
            "enable P2P: the IOMMU off or in passthrough mode, ACS off below the switches, no NVreg setting against P2P"
        }
        TopologyWarning::UnknownLevel(..) => "the pair is taken as far apart: choices between such GPUs are guesses",
        TopologyWarning::LevelDisagreement { .. } | TopologyWarning::NumaDisagreement { .. } => {
            "nothing to do: virtual switches and firmware cause this; linkwise snapshot records both for a report"
        }
        TopologyWarning::NvLinkOneSided { .. } | TopologyWarning::NvLinkUnknownRemote(..) => {
            "an NVLink is down or in training: run nvidia-smi nvlink -s; with NVSwitches check the fabric manager"
        }
        _ => "linkwise works without it; linkwise topology shows the rest, linkwise snapshot records it for a report",
    }
}

/// The part of a CDI spec that is checked (CDI specification, SPEC.md: `kind` is vendor/class).
#[derive(Deserialize)]
struct Spec {
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

/// Checks the CDI specs for NVIDIA devices.
pub(super) fn container_runtime(found: &mut Findings, node: &Node) {
    let folders = ["etc/cdi", "var/run/cdi"].map(|folder| node.at(folder));
    let mut specs = 0;
    let mut devices: BTreeMap<String, PathBuf> = BTreeMap::new();
    for folder in &folders {
        let is_spec = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "json" || kind == "yaml");
        for path in existing(found, folder, "specs").into_iter().filter(is_spec) {
            let text = fs::read_to_string(&path).map_err(|error| error.to_string());
            // JSON is YAML.
            let read = |text: String| serde_saphyr::from_str::<Spec>(&text).map_err(|error| fault(&error));
            match text.and_then(read) {
                Ok(spec) if is_nvidias(&spec.kind) => {
                    specs += 1;
                    let listed = count(spec.devices.len(), "device");
                    found.ok(format!("{}: {listed} of {}", path.display(), excerpt(&spec.kind)));
                    add_duplicates(found, &mut devices, spec, &path);
                }
                Ok(_) => {}
                Err(error) => found.warning(
                    format!("{} is not a CDI spec: {error}", path.display()),
                    "runtimes ignore it or refuse all containers: rewrite it (nvidia-ctk cdi generate) or remove it",
                ),
            }
        }
    }
    if specs == 0 {
        let [first, second] = folders.map(|folder| folder.display().to_string());
        found.skipped(
            format!("no CDI spec for NVIDIA devices in {first} or {second}"),
            Some("not needed if containers get their GPUs by NVIDIA_VISIBLE_DEVICES (NVIDIA container runtime)"),
        );
    }
}

/// Returns true if devices of a kind are NVIDIA's, such as `nvidia.com/gpu`, `k8s.device-plugin.nvidia.com/gpu`.
fn is_nvidias(kind: &str) -> bool {
    let vendor = kind.split('/').next().unwrap_or_default();
    vendor == "nvidia.com" || vendor.ends_with(".nvidia.com")
}

/// Reports devices that two specs have.
fn add_duplicates(found: &mut Findings, devices: &mut BTreeMap<String, PathBuf>, spec: Spec, path: &Path) {
    let mut others = Vec::new();
    for device in spec.devices {
        match devices.entry(format!("{}={}", spec.kind, device.name)) {
            Entry::Occupied(other) => others.push(other.get().clone()),
            Entry::Vacant(new) => drop(new.insert(path.to_owned())),
        }
    }
    if let Some(other) = others.last() {
        let (common, kind) = (count(others.len(), "device"), excerpt(&spec.kind));
        let advice = "if both are in one folder, runtimes use neither, else that of /var/run/cdi: remove the older one";
        found.warning(format!("{} and {} both have {common} of {kind}", other.display(), path.display()), advice);
    }
}

/// The device nodes that every use of a GPU needs: the control node, and the node of each GPU.
fn needed(node: &Node) -> Vec<PathBuf> {
    let minors = node.nvml.gpus().iter().filter_map(|gpu| gpu.minor);
    let gpus = minors.map(|minor| node.at(&format!("dev/nvidia{minor}")));
    std::iter::once(node.at("dev/nvidiactl")).chain(gpus).collect()
}

/// Counts the device nodes that pass a check. Each that fails is a finding, with its fault and the remedy.
fn count_good(
    found: &mut Findings,
    paths: &[PathBuf],
    check: impl Fn(&Path) -> Result<(), (String, &'static str)>,
) -> usize {
    let mut good = 0;
    for path in paths {
        match check(path) {
            Ok(()) => good += 1,
            Err((fault, advice)) => {
                let what = format!("{}{fault}", path.display());
                found.each(Status::Failed, fault, what, advice);
            }
        }
    }
    good
}

/// Reports missing device nodes, and other files in their place.
pub(super) fn device_nodes(found: &mut Findings, node: &Node) {
    let (gpus, control) = (node.nvml.gpus(), node.at("dev/nvidiactl"));
    if gpus.is_empty() && !control.exists() {
        return found.skipped(format!("no GPU is known, and there is no {}", control.display()), None);
    }
    let needed = needed(node);
    let good = count_good(found, &needed, |path| match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_char_device() => Ok(()),
        Ok(_) => Err((
            " is not a character device".to_owned(),
            "remove it on the host, and run nvidia-modprobe (-c MINOR for the node of a GPU)",
        )),
        Err(error) => Err((
            format!(": {error}"),
            "on the host: run nvidia-smi, which makes the nodes; in a container that was made before the node, or not \
             for all GPUs (NVIDIA_VISIBLE_DEVICES=all): delete the pod",
        )),
    });
    if good == needed.len() {
        found.ok(format!("{}: all {good} nodes are there", node.at("dev").display()));
    }
    let unknown = gpus.iter().filter(|gpu| gpu.minor.is_none()).count();
    if unknown > 0 {
        let advice = "leave --pass-device-specs off: with it the pods of these GPUs get no device node";
        found.warning(format!("NVML does not report the device nodes of {unknown} of the GPUs"), advice);
    }
    for (path, whose, use_) in [
        (
            "dev/nvidia-uvm",
            "CUDA's node is",
            "needed with --pass-device-specs only: then set NVIDIA_DRIVER_CAPABILITIES=compute,utility for linkwise",
        ),
        ("dev/nvidia-caps", "MIG's nodes are", "needed for MIG only"),
    ] {
        let path = node.at(path);
        match path.exists() {
            true => found.ok(format!("{}: {whose} there", path.display())),
            false => found.skipped(format!("there is no {}", path.display()), Some(use_)),
        }
    }
}

/// Checks that this process may open the existing device nodes.
pub(super) fn permissions(found: &mut Findings, node: &Node) {
    // The owner of /proc/self is this process's uid.
    if let Ok(own) = fs::metadata("/proc/self") {
        found.ok(format!("runs as uid {}", own.uid()));
    }
    let is_node = |path: &PathBuf| fs::metadata(path).is_ok_and(|meta| meta.file_type().is_char_device());
    let nodes: Vec<PathBuf> = needed(node).into_iter().filter(is_node).collect();
    let good = count_good(found, &nodes, |path| match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err((
            format!(": {error}"),
            "the container's device rules forbid it: the container was made before the node, or a cgroup change took \
             the rule (as systemctl daemon-reload does with runc): delete the pod; for SELinux see manifests/README.md",
        )),
    });
    match (good, nodes.len()) {
        (_, 0) => found.skipped("no device node to open", None),
        (good, all) if good == all => found.ok(format!("all {good} device nodes can be opened")),
        _ => {}
    }
}
