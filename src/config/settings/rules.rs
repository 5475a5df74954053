//! What must hold between settings that are each well written. Judges what counts, whoever said it.

use super::selection::{GpuFilter, NamedPattern};
use super::sharing::{Replicated, ReplicatedDevices, ReplicatedResource};
use super::{MigStrategy, Origin, Setting, Settings};
use crate::config::file::{Finding, Problem};
use crate::state::{DeviceSelector, ResourceName};

/// What --cdi-disable-hooks can leave out.
const CDI_HOOKS: [&str; 3] = ["all", "create-symlinks", "update-ldcache"];

/// Finds what does not fit together.
pub fn check(settings: &Settings, findings: &mut Vec<Finding>) {
    let sharing = &settings.sharing.value;
    if let Some(mps) = &sharing.mps {
        mps_and_mig(settings, mps, findings);
    }
    for (path, replicated) in [("sharing.timeSlicing", &sharing.time_slicing), ("sharing.mps", &sharing.mps)] {
        let Some(replicated) = replicated else { continue };
        for (later, number) in replicated.resources.iter().zip(0_usize..) {
            let path = format!("{path}.resources[{number}]");
            names(settings, replicated, number, later, &path, findings);
            devices(settings, replicated, number, later, &path, findings);
        }
    }
    let resources = &settings.resources.value;
    for (path, patterns) in [("resources.gpus", &resources.gpus), ("resources.mig", &resources.mig)] {
        unreached(path, patterns, findings);
    }
    for (mig, number) in resources.mig.iter().zip(0_usize..) {
        if let Some(gpu) = resources.gpus.iter().find(|gpu| gpu.name == mig.name) {
            let by = format!("the GPUs of line {}", gpu.line);
            let problem = Problem::NameTaken { name: mig.name.to_string(), by };
            told(findings, mig.line, format!("resources.mig[{number}].name"), problem);
        }
    }
    filters(settings, findings);
    accepted(settings, findings);
}

fn told(findings: &mut Vec<Finding>, line: u64, key: String, problem: Problem) {
    findings.push(Finding { line: Some(line), key, problem });
}

/// A finding at the place where a setting comes from.
fn at<T>(setting: &Setting<T>, key: &str, problem: Problem) -> Finding {
    let (line, key) = match setting.origin {
        Origin::File { line } => (Some(line), key.to_owned()),
        Origin::Environment { variable } => (None, variable.to_owned()),
        Origin::Flag { flag } => (None, format!("--{flag}")),
        Origin::Default => (None, key.to_owned()),
    };
    Finding { line, key, problem }
}

fn is_mig(name: &ResourceName) -> bool {
    name.as_str().starts_with("nvidia.com/mig-")
}

fn mps_and_mig(settings: &Settings, mps: &Replicated, findings: &mut Vec<Finding>) {
    if settings.mig_strategy.value == MigStrategy::Mixed {
        let why = "with sharing.mps the strategy is none or single";
        findings.push(at(&settings.mig_strategy, "flags.migStrategy", Problem::MpsWithMig(why.to_owned())));
    }
    for (resource, number) in mps.resources.iter().zip(0_usize..).filter(|(resource, _)| is_mig(&resource.name)) {
        let key = format!("sharing.mps.resources[{number}].name");
        told(findings, resource.line, key, Problem::MpsWithMig(resource.name.to_string()));
    }
}

/// A shared resource's name belongs to nobody else.
fn names(
    settings: &Settings,
    replicated: &Replicated,
    number: usize,
    resource: &ReplicatedResource,
    path: &str,
    findings: &mut Vec<Finding>,
) {
    let name = resource.offered_as();
    let earlier = replicated.resources.iter().take(number);
    let taken = earlier.filter(|other| other.offered_as() == name && other.name != resource.name);
    let taken = taken.map(|other| format!("line {}", other.line)).next();
    let named = || {
        let resources = &settings.resources.value;
        let mut patterns = resources.gpus.iter().chain(&resources.mig);
        let line = patterns.find(|pattern| pattern.name == *name)?.line;
        Some(format!("the resource of line {line}"))
    };
    let built_in = || {
        let taken = *name == ResourceName::gpu() || is_mig(name) && !name.as_str().ends_with(".shared");
        taken.then(|| "the devices that have it without renaming".to_owned())
    };
    let renamed = || if *name == resource.name { None } else { named().or_else(built_in) };
    if let Some(by) = taken.or_else(renamed) {
        told(findings, resource.line, format!("{path}.rename"), Problem::NameTaken { name: name.to_string(), by });
    }
}

/// A device is shared once, and not left out.
fn devices(
    settings: &Settings,
    replicated: &Replicated,
    number: usize,
    resource: &ReplicatedResource,
    path: &str,
    findings: &mut Vec<Finding>,
) {
    let path = format!("{path}.devices");
    for earlier in replicated.resources.iter().take(number).filter(|other| other.name == resource.name) {
        let what = match (&earlier.devices, &resource.devices) {
            (ReplicatedDevices::List(theirs), ReplicatedDevices::List(ours)) => {
                ours.iter().find(|device| theirs.contains(device)).map(ToString::to_string)
            }
            (ReplicatedDevices::All, _) => Some("all of them".to_owned()),
            (ReplicatedDevices::Count(count), _) => Some(format!("any {count} of them")),
            (_, ReplicatedDevices::All) | (_, ReplicatedDevices::Count(_)) => Some("some of them".to_owned()),
        };
        if let Some(what) = what {
            let problem = Problem::Overlap { name: resource.name.to_string(), line: earlier.line, what };
            told(findings, resource.line, path.clone(), problem);
        }
    }
    let ReplicatedDevices::List(listed) = &resource.devices else { return };
    for (place, device) in listed.iter().enumerate() {
        if listed.iter().take(place).any(|earlier| earlier == device) {
            let problem = Problem::Again { thing: device.to_string(), line: resource.line };
            told(findings, resource.line, path.clone(), problem);
        }
        let same = |gpu: &GpuFilter| match (gpu, device) {
            (GpuFilter::Index(gpu), DeviceSelector::Index(index) | DeviceSelector::MigIndex(index, _)) => gpu == index,
            (GpuFilter::Uuid(gpu), DeviceSelector::Uuid(uuid)) => gpu.as_str() == uuid,
            _ => false,
        };
        if let Some(excluded) = settings.exclude.value.iter().find(|excluded| same(&excluded.gpu)) {
            let problem = Problem::SharedAndExcluded { device: device.to_string(), line: excluded.line };
            told(findings, resource.line, path.clone(), problem);
        }
    }
}

/// A pattern after one that takes all that it could.
fn unreached(path: &str, patterns: &[NamedPattern], findings: &mut Vec<Finding>) {
    for (number, later) in patterns.iter().enumerate() {
        if let Some(wider) = patterns.iter().take(number).find(|earlier| earlier.pattern.covers(&later.pattern)) {
            let problem = Problem::Unreached { pattern: format!("'{}'", later.pattern), line: wider.line };
            told(findings, later.line, format!("{path}[{number}].pattern"), problem);
        }
    }
}

/// A GPU is left out by one filter.
fn filters(settings: &Settings, findings: &mut Vec<Finding>) {
    let excluded = &settings.exclude.value;
    for (number, later) in excluded.iter().enumerate() {
        let key = format!("linkwise.filter.exclude[{number}]");
        if let Some(earlier) = excluded.iter().take(number).find(|earlier| earlier.gpu == later.gpu) {
            let problem = Problem::Again { thing: later.gpu.to_string(), line: earlier.line };
            told(findings, later.line, key, problem);
            continue;
        }
        let GpuFilter::Model(pattern) = &later.gpu else { continue };
        let wider = excluded.iter().filter(|other| other.gpu != later.gpu).find(|other| match &other.gpu {
            GpuFilter::Model(wider) => wider.covers(pattern),
            _ => false,
        });
        if let Some(wider) = wider {
            let problem = Problem::Unreached { pattern: format!("'{pattern}'"), line: wider.line };
            told(findings, later.line, key, problem);
        }
    }
}

/// What is taken because the NVIDIA plugin takes it, and does nothing here.
fn accepted(settings: &Settings, findings: &mut Vec<Finding>) {
    use super::{DiscoveryStrategy, SharedPolicy};
    const CDI_FEATURES: &str =
        "no effect: they tell NVIDIA's generator of CDI specs how to go about it, and linkwise has its own";
    const OTHER_HOOKS: &str = "only create-symlinks and update-ldcache (or all) are there to be left out; other hooks \
                               are in no CDI spec of linkwise";
    const GFD: &str = "no effect: linkwise is no gpu-feature-discovery";
    if settings.device_discovery_strategy.value == DiscoveryStrategy::Tegra {
        let problem =
            Problem::NoEffect("no effect: linkwise looks for GPUs by NVML only, Tegra has none that it shows");
        findings.push(at(&settings.device_discovery_strategy, "flags.deviceDiscoveryStrategy", problem));
    }
    if !settings.cdi_feature_flags.value.is_empty() {
        let problem = Problem::NoEffect(CDI_FEATURES);
        findings.push(at(&settings.cdi_feature_flags, "flags.plugin.cdiFeatureFlags", problem));
    }
    if settings.cdi_disable_hooks.value.iter().any(|hook| !CDI_HOOKS.contains(&hook.as_str())) {
        let problem = Problem::NoEffect(OTHER_HOOKS);
        findings.push(at(&settings.cdi_disable_hooks, "flags.plugin.cdiDisableHooks", problem));
    }
    if settings.shared_devices_allocation_policy.value == SharedPolicy::Spread {
        let problem = Problem::NoEffect("the same as distributed, which takes distinct GPUs for one request here");
        findings.push(at(
            &settings.shared_devices_allocation_policy,
            "flags.plugin.sharedDevicesAllocationPolicy",
            problem,
        ));
    }
    let mut gfd = |key: &str, origin: Origin| {
        if let Origin::File { line } = origin {
            told(findings, line, key.to_owned(), Problem::NoEffect(GFD));
        }
    };
    gfd("flags.useNodeFeatureAPI", settings.use_node_feature_api.origin);
    gfd("flags.gfd.oneshot", settings.gfd_oneshot.origin);
    gfd("flags.gfd.noTimestamp", settings.gfd_no_timestamp.origin);
    gfd("flags.gfd.sleepInterval", settings.gfd_sleep_interval.origin);
    gfd("flags.gfd.outputFile", settings.gfd_output_file.origin);
    gfd("flags.gfd.machineTypeFile", settings.gfd_machine_type_file.origin);
}
