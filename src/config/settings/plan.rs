//! What the configuration says of resources, as the plan that the snapshot carries out.

use super::selection::GpuFilter;
use super::sharing::{Replicated, ReplicatedDevices};
use super::{MigStrategy, NamedPattern, Origin, Settings, SharedPolicy};
use crate::allocation::AllocationPolicy;
use crate::state::{self, Filter, GpuSelector, NamePattern, ResourcePlan, SharedDevices, SharedResource, SharingKind};

impl Settings {
    /// What is to be made of the node's GPUs.
    pub fn plan(&self) -> ResourcePlan {
        let names = |patterns: &[NamedPattern]| -> Vec<NamePattern> {
            let name = |named: &NamedPattern| NamePattern { pattern: named.pattern.clone(), name: named.name.clone() };
            patterns.iter().map(name).collect()
        };
        let sharing = &self.sharing.value;
        let mps = sharing.mps.as_ref().map(|replicated| shared(SharingKind::Mps, replicated));
        let slicing = || sharing.time_slicing.as_ref().map(|replicated| shared(SharingKind::TimeSlicing, replicated));
        let policy = &self.shared_devices_allocation_policy;
        ResourcePlan {
            mig_strategy: match self.mig_strategy.value {
                MigStrategy::None => state::MigStrategy::None,
                MigStrategy::Single => state::MigStrategy::Single,
                MigStrategy::Mixed => state::MigStrategy::Mixed,
            },
            gpu_names: names(&self.resources.value.gpus),
            mig_names: names(&self.resources.value.mig),
            sharing: mps.or_else(slicing),
            filter: Filter {
                exclude: self.exclude.value.iter().map(|excluded| (&excluded.gpu).into()).collect(),
                keep_display: self.keep_display.value,
            },
            policies: self.policies.value.iter().map(|(name, policy)| (name.clone(), (*policy).into())).collect(),
            shared_policy: (policy.origin != Origin::Default).then_some(match policy.value {
                SharedPolicy::Distributed | SharedPolicy::Spread => AllocationPolicy::Distributed,
                SharedPolicy::Packed => AllocationPolicy::Packed,
            }),
        }
    }
}

fn shared(kind: SharingKind, replicated: &Replicated) -> state::Sharing {
    let resources = replicated.resources.iter().map(|resource| SharedResource {
        name: resource.name.clone(),
        rename: resource.rename.clone(),
        devices: match &resource.devices {
            ReplicatedDevices::All => SharedDevices::All,
            ReplicatedDevices::Count(count) => SharedDevices::Count(*count),
            ReplicatedDevices::List(devices) => SharedDevices::List(devices.clone()),
        },
        replicas: resource.replicas,
    });
    state::Sharing {
        kind,
        // Worked into each resource's own name.
        rename_by_default: false,
        fail_requests_greater_than_one: replicated.fail_requests_greater_than_one,
        resources: resources.collect(),
    }
}

impl From<&GpuFilter> for GpuSelector {
    fn from(filter: &GpuFilter) -> Self {
        match filter {
            GpuFilter::Index(index) => Self::Index(*index),
            GpuFilter::Uuid(uuid) => Self::Uuid(uuid.clone()),
            GpuFilter::Pci(pci) => Self::Pci(*pci),
            GpuFilter::Model(pattern) => Self::Model(pattern.clone()),
        }
    }
}
