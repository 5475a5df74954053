//! `nvidia.com/mig.*`, `nvidia.com/mig-<profile>.*`, and the values that the strategy `single` gives
//! `nvidia.com/gpu.*`.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt::Display;

use super::gpus::{Model, group_of_chosen_model, product};
use super::{Labels, Shared};
use crate::state::{MigStrategy, ResourceName, ResourcePlan, SharingKind};
use crate::topology::{MigDevice, NodeTopology};

pub(super) fn labels(topology: &NodeTopology, plan: &ResourcePlan, labels: &mut Labels) {
    let mut profiles: BTreeMap<ResourceName, Vec<&MigDevice>> = BTreeMap::new();
    for device in topology.mig_devices() {
        profiles.entry(ResourceName::mig(&device.profile)).or_default().push(device);
    }
    match plan.mig_strategy {
        MigStrategy::None => {}
        MigStrategy::Mixed => {
            labels.put("nvidia.com/mig.strategy", "mixed");
            for (resource, devices) in &profiles {
                of_profile(resource.as_str(), devices, topology, plan, labels);
            }
        }
        MigStrategy::Single => {
            labels.put("nvidia.com/mig.strategy", "single");
            if !topology.gpus().iter().any(|gpu| gpu.mig_enabled) {
                return;
            }
            let with_devices: BTreeSet<usize> = topology.mig_devices().iter().map(|device| device.parent).collect();
            let only = profiles.values().next().filter(|_| profiles.len() == 1);
            match only.filter(|_| with_devices.len() == topology.gpus().len()) {
                Some(devices) => of_profile("nvidia.com/gpu", devices, topology, plan, labels),
                None => invalid(topology, labels),
            }
        }
    }
}

/// Adds the labels of the MIG devices of one profile. The product is the model with the most of these devices, then the
/// first by name.
fn of_profile(prefix: &str, devices: &[&MigDevice], topology: &NodeTopology, plan: &ResourcePlan, labels: &mut Labels) {
    let model = |device: &MigDevice| topology.gpus().get(device.parent).and_then(|gpu| gpu.model.as_deref());
    let chosen = group_of_chosen_model(devices.iter().map(|device| (model(device), *device)), |_| ());
    let Some((model, [first, ..])) = chosen.as_ref().map(|(model, devices)| (*model, devices.as_slice())) else {
        return;
    };
    // MPS cannot share MIG devices.
    let by_mps = plan.sharing.as_ref().is_some_and(|sharing| sharing.kind == SharingKind::Mps);
    let shared = if by_mps { Shared::NOT } else { Shared::of(plan, &plan.name_of_mig(&first.profile)) };
    let resource = ResourceName::mig(&first.profile);
    let name = resource.as_str().strip_prefix("nvidia.com/mig-").unwrap_or_default();
    labels.put_known(format!("{prefix}.product"), product(model, &format!("-MIG-{name}{}", shared.suffix)));
    let mut put = |name: &str, value: &dyn Display| labels.put(format!("{prefix}.{name}"), value);
    put("count", &devices.len());
    put("replicas", &shared.replicas);
    put("sharing-strategy", &shared.strategy);
    put("memory", &first.facts.memory_mib);
    put("slices.gi", &first.profile.gpu_slices);
    put("slices.ci", &first.profile.compute_slices);
    if let Some(engines) = first.facts.engines {
        put("multiprocessors", &engines.multiprocessors);
        put("engines.copy", &engines.copy);
        put("engines.decoder", &engines.decoder);
        put("engines.encoder", &engines.encoder);
        put("engines.jpeg", &engines.jpeg);
        put("engines.ofa", &engines.ofa);
    }
}

/// Adds the labels for GPUs on which the strategy `single` cannot be carried out.
fn invalid(topology: &NodeTopology, labels: &mut Labels) {
    let model = Model::chosen(topology).and_then(|model| model.name);
    labels.put_known("nvidia.com/gpu.product", product(model, "-MIG-INVALID"));
    labels.put("nvidia.com/gpu.count", 0);
    labels.put("nvidia.com/gpu.replicas", 0);
    labels.put("nvidia.com/gpu.sharing-strategy", "");
    labels.put("nvidia.com/gpu.memory", 0);
}
