//! The checks of valid values: conflicts between settings or list items, refused strategies, values without effect.

use super::file::{Finding, Severity};
use super::lists::{Item, Lists};
use super::value::{DiscoveryStrategy, SharedPolicy};
use super::{Origin, Settings};
use linkwise_core::quote::{excerpt, quoted};
use linkwise_core::state::{
    DeviceSelector, GpuSelector, MigStrategy, NamePattern, Pattern, ResourceName, SharedDevices, SharedResource,
};

/// The values of --cdi-disable-hooks that have an effect: all, and NVIDIA's names of the hooks in linkwise's CDI specs.
const CDI_HOOKS: [&str; 6] = [
    "all",
    "create-symlinks",
    "update-ldcache",
    "enable-cuda-compat",
    "disable-device-node-modification",
    "update-application-profile",
];

/// Reports settings that conflict, and those without effect.
pub(super) fn check(settings: &Settings, lists: &Lists, findings: &mut Vec<Finding>) {
    for (number, shared) in lists.shared.iter().enumerate() {
        let earlier = lists.shared.get(..number).unwrap_or_default();
        findings.extend(offered_nowhere(settings, lists, shared));
        findings.extend(name_taken(lists, earlier, shared));
        findings.extend(mps_replicas(lists, earlier, shared));
        findings.extend(devices_taken(lists, earlier, shared));
    }
    for patterns in [&lists.gpus, &lists.mig] {
        for (number, later) in patterns.iter().enumerate() {
            let mut before = patterns.iter().take(number);
            if let Some(earlier) = before.find(|earlier| earlier.value.pattern.covers(&later.value.pattern)) {
                findings.push(later.error("pattern", unreached(&later.value.pattern, earlier.line)));
            }
        }
    }
    exclusions(&lists.exclude, findings);
    for mig in &lists.mig {
        if let Some(gpu) = lists.gpus.iter().find(|gpu| gpu.value.name == mig.value.name) {
            let problem = format!("the name {} is taken by the GPUs of line {}", mig.value.name, gpu.line);
            findings.push(mig.error("name", problem));
        }
    }
    if lists.is_mps() {
        for item in lists.shared.iter().filter(|item| is_mig(&item.value.name)) {
            let problem = format!("MPS cannot share MIG devices: {}", item.value.name);
            findings.push(item.error("name", problem));
        }
        if settings.mig_strategy.value == MigStrategy::Mixed {
            let problem = "MPS cannot share MIG devices: with sharing.mps the strategy is none or single";
            findings.push(settings.mig_strategy.origin.finding("flags.migStrategy", Severity::Error, problem));
        }
    }
    check_singles(settings, findings);
}

fn unreached(pattern: &Pattern, line: u64) -> String {
    let pattern = quoted(&pattern.to_string());
    format!("pattern {pattern} never counts: all that it matches is matched by line {line}")
}

/// Reports GPUs that are excluded twice.
fn exclusions(excluded: &[Item<GpuSelector>], findings: &mut Vec<Finding>) {
    for (number, later) in excluded.iter().enumerate() {
        let same = excluded.iter().take(number).find(|earlier| earlier.value == later.value);
        let wider = || {
            excluded.iter().find_map(|other| match (&other.value, &later.value) {
                (GpuSelector::Model(wider), GpuSelector::Model(own)) if wider != own && wider.covers(own) => {
                    Some(unreached(own, other.line))
                }
                _ => None,
            })
        };
        let name = excerpt(&later.value.to_string());
        let again = same.map(|earlier| format!("{name} is listed already in line {}", earlier.line));
        findings.extend(again.or_else(wider).map(|problem| Finding::error(later.line, &later.key, problem)));
    }
}

/// The beginning of the default names of MIG devices.
const MIG: &str = "nvidia.com/mig-";

fn is_mig(name: &ResourceName) -> bool {
    name.as_str().starts_with(MIG)
}

fn offered_as(resource: &SharedResource) -> &ResourceName {
    resource.rename.as_ref().unwrap_or(&resource.name)
}

/// Warns of a shared resource whose name no GPU and no MIG device can have, and of listed devices that cannot have it.
/// If no source sets the MIG strategy, any strategy is possible, because `config check` does not know all sources.
fn offered_nowhere(settings: &Settings, lists: &Lists, shared: &Item<SharedResource>) -> Vec<Finding> {
    let (name, strategy) = (&shared.value.name, &settings.mig_strategy);
    let named = |patterns: &[Item<NamePattern>]| patterns.iter().any(|pattern| pattern.value.name == *name);
    let may_be = |one| strategy.value == one || strategy.origin == Origin::Default;
    // A pattern may take all devices that had the default name.
    let has_catch_all = |patterns: &[Item<NamePattern>]| {
        patterns.iter().any(|pattern| pattern.value.pattern.covers(&Pattern::new("*")))
    };
    let is_gpu = |patterns| *name == ResourceName::gpu() && !has_catch_all(patterns);
    let profile = name.as_str().strip_prefix(MIG).map(|profile| profile.replacen("gb.", "gb+", 1));
    let keeps_name = |profile: String| !lists.mig.iter().any(|pattern| pattern.value.pattern.matches(&profile));
    let has_gpus = named(&lists.gpus) || is_gpu(&lists.gpus);
    let is_mps = lists.is_mps();
    if is_mps && is_mig(name) {
        // `check` reports this as an error.
        return Vec::new();
    }
    let has_mig = !is_mps
        && ((may_be(MigStrategy::Mixed) && profile.is_some_and(keeps_name))
            || (may_be(MigStrategy::Single) && is_gpu(&lists.mig))
            || (strategy.value != MigStrategy::None || strategy.origin == Origin::Default) && named(&lists.mig));
    let warning =
        |key: &str, problem| Finding::at(shared.line, format!("{}.{key}", shared.key), Severity::Warning, problem);
    if !has_gpus && !has_mig {
        let what = if is_mps { "MPS shares whole GPUs, and none" } else { "no GPU and no MIG device" };
        let problem = format!("{what} is called {name}: see flags.migStrategy and resources");
        return vec![warning("name", problem)];
    }
    let SharedDevices::List(listed) = &shared.value.devices else { return Vec::new() };
    let wrong = listed.iter().filter(|device| if device.is_mig() { !has_mig } else { !has_gpus });
    let kind = if has_gpus { "whole GPUs" } else { "MIG devices" };
    wrong.map(|device| warning("devices", format!("{name} has {kind} only, and {device} is not one of them"))).collect()
}

/// The error that a shared resource's name belongs to another resource.
fn name_taken(lists: &Lists, earlier: &[Item<SharedResource>], shared: &Item<SharedResource>) -> Option<Finding> {
    let (resource, name) = (&shared.value, offered_as(&shared.value));
    let mut others = earlier.iter().filter(|other| other.value.name != resource.name);
    let by_shared = others.find(|other| offered_as(&other.value) == name).map(|other| format!("line {}", other.line));
    let by_pattern = || {
        let pattern = lists.gpus.iter().chain(&lists.mig).find(|pattern| pattern.value.name == *name)?;
        Some(format!("the resource of line {}", pattern.line))
    };
    let built_in = || {
        let taken = *name == ResourceName::gpu() || is_mig(name) && !name.as_str().ends_with(".shared");
        taken.then(|| "the devices that have it without renaming".to_owned())
    };
    let renamed = || if *name == resource.name { None } else { by_pattern().or_else(built_in) };
    let by = by_shared.or_else(renamed)?;
    Some(shared.error("rename", format!("the name {name} is taken by {by}")))
}

/// The error that items with one name differ in replicas: MPS has one number of clients for each name.
fn mps_replicas(lists: &Lists, earlier: &[Item<SharedResource>], shared: &Item<SharedResource>) -> Option<Finding> {
    let name = offered_as(&shared.value);
    let mut earlier = earlier.iter().filter(|_| lists.is_mps());
    let differs = |other: &&Item<SharedResource>| other.value.replicas != shared.value.replicas;
    let other = earlier.find(|other| offered_as(&other.value) == name && differs(other))?;
    let problem = format!("MPS: {name} has {} replicas in line {}", other.value.replicas, other.line);
    Some(shared.error("replicas", problem))
}

/// The errors that devices are shared twice, or are excluded.
fn devices_taken(lists: &Lists, earlier: &[Item<SharedResource>], shared: &Item<SharedResource>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let resource = &shared.value;
    let mut error = |problem: String| findings.push(shared.error("devices", problem));
    for other in earlier.iter().filter(|other| other.value.name == resource.name) {
        let what = match (&other.value.devices, &resource.devices) {
            (SharedDevices::List(theirs), SharedDevices::List(ours)) => {
                ours.iter().find(|device| theirs.contains(device)).map(ToString::to_string)
            }
            (SharedDevices::All, _) => Some("all of them".to_owned()),
            (SharedDevices::Count(count), _) => Some(format!("any {count} of them")),
            (_, SharedDevices::All | SharedDevices::Count(_)) => Some("some of them".to_owned()),
        };
        if let Some(what) = what {
            error(format!("some devices of {} are shared twice: line {} takes {what}", resource.name, other.line));
        }
    }
    let listed = if let SharedDevices::List(listed) = &resource.devices { listed.as_slice() } else { &[] };
    for (number, device) in listed.iter().enumerate() {
        if listed.iter().take(number).any(|earlier| earlier == device) {
            error(format!("{device} is listed already in line {}", shared.line));
        }
        let excluded = lists.exclude.iter().find(|excluded| match (&excluded.value, device) {
            (GpuSelector::Index(gpu), DeviceSelector::Index(index) | DeviceSelector::MigIndex(index, _)) => {
                gpu == index
            }
            (GpuSelector::Uuid(gpu), DeviceSelector::Uuid(uuid)) => gpu.as_str() == uuid,
            _ => false,
        });
        if let Some(excluded) = excluded {
            let line = excluded.line;
            error(format!("{device} is shared, but left out by linkwise.filter.exclude in line {line}"));
        }
    }
    findings
}

/// Refuses strategies for GPUs that NVML does not list, because a node that offers nothing would be harder to
/// understand. Notes values without effect, which are accepted because the NVIDIA plugin accepts them.
fn check_singles(settings: &Settings, findings: &mut Vec<Finding>) {
    const TEGRA: &str = "linkwise finds GPUs by NVML, which does not list integrated GPUs of Tegra; use the NVIDIA \
                         plugin on such nodes";
    const VFIO: &str = "linkwise finds GPUs by NVML, which does not list GPUs that are bound to vfio-pci; use NVIDIA's \
                        gpu-feature-discovery on such nodes";
    const CDI_FEATURES: &str =
        "no effect: they are options of NVIDIA's generator of CDI specs, and linkwise has a generator of its own";
    const OTHER_HOOKS: &str = "create-symlinks, enable-cuda-compat, update-ldcache, disable-device-node-modification \
                               and update-application-profile (or all) can be left out; other hooks are in no CDI \
                               spec of linkwise";
    const SPREAD: &str = "the same as distributed, with which linkwise takes distinct GPUs for one request";
    let Settings { device_discovery_strategy: strategy, shared_devices_allocation_policy: policy, .. } = settings;
    let (features, hooks) = (&settings.cdi_feature_flags, &settings.cdi_disable_hooks);
    let has_other_hooks = hooks.value.iter().any(|hook| !CDI_HOOKS.contains(&hook.as_str()));
    let discovery = (strategy.origin, "flags.deviceDiscoveryStrategy", Severity::Error);
    let note = |origin, key| (origin, key, Severity::Note);
    let of_hooks = note(hooks.origin, "flags.plugin.cdiDisableHooks");
    for (applies, (origin, key, severity), problem) in [
        (strategy.value == DiscoveryStrategy::Tegra, discovery, TEGRA),
        (strategy.value == DiscoveryStrategy::Vfio, discovery, VFIO),
        (!features.value.is_empty(), note(features.origin, "flags.plugin.cdiFeatureFlags"), CDI_FEATURES),
        (has_other_hooks, of_hooks, OTHER_HOOKS),
        (
            policy.value == SharedPolicy::Spread,
            note(policy.origin, "flags.plugin.sharedDevicesAllocationPolicy"),
            SPREAD,
        ),
    ] {
        findings.extend((applies && origin != Origin::Default).then(|| origin.finding(key, severity, problem)));
    }
}
