//! [`Resources`]: makes the resources of a plan on a machine: the devices that are offered under each name.
//!
//! Pure, and total: a part that the machine cannot offer is withheld and named as a [`PlanProblem`]. Every device here
//! is new and healthy; `offers` keeps health and earlier offers.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::mps;
use super::plan::is_display_adapter;
use super::{
    Device, DeviceSelector, Door, MAX_SLOTS, MigStrategy, NumaHints, PlanProblem, ResourceName, ResourcePlan,
    SharedDevices, SharedResource, Sharing, SharingKind,
};
use crate::allocation::DeviceId;
use crate::topology::{Gpu, GpuUuid, NodeTopology, PciAddress};

/// The resources that a plan makes of a machine.
#[derive(Clone, Debug, Default)]
pub struct Resources {
    /// The devices of each resource, by id.
    pub devices: BTreeMap<ResourceName, BTreeMap<DeviceId, Device>>,
    /// Resources that the plan names and the machine cannot offer.
    pub withheld: BTreeSet<ResourceName>,
    /// The reasons, and other messages for the operator.
    pub problems: Vec<PlanProblem>,
    /// The GPUs of DRA, which a row of the plan's sharing may name too.
    of_dra: Vec<Gpu>,
}

/// The devices of one row of the plan's sharing.
struct Shared<'a> {
    /// The name under which they are offered.
    name: ResourceName,
    /// The resource to which they belong.
    of: &'a ResourceName,
    /// The number of slots of each device.
    replicas: u32,
    /// The devices, without slots.
    devices: Vec<Device>,
}

/// The devices of resources before they are shared.
type Unshared = BTreeMap<ResourceName, Vec<Device>>;

impl Resources {
    /// Carries out a plan, with the GPUs that DRA does not have.
    pub fn make(topology: &NodeTopology, plan: &ResourcePlan, hints: NumaHints, is_dra: impl Fn(&Gpu) -> bool) -> Self {
        let mut made = Self::default();
        let mut unshared = made.unshared(topology, plan, hints, is_dra);
        let shared = plan.sharing.as_ref().map(|sharing| made.share(sharing, &mut unshared)).unwrap_or_default();
        for (name, devices) in unshared {
            made.devices.entry(name).or_default().extend(devices.into_iter().map(|device| (device.id(), device)));
        }
        for Shared { name, replicas, devices, .. } in shared {
            let slots = devices.iter().flat_map(|device| (0..replicas).map(|slot| device.with_slot(slot)));
            made.devices.entry(name).or_default().extend(slots.map(|slot| (slot.id(), slot)));
        }
        made.devices.retain(|_, devices| !devices.is_empty());
        made
    }

    /// The devices to offer, by the resource that they belong to before sharing.
    fn unshared(
        &mut self,
        topology: &NodeTopology,
        plan: &ResourcePlan,
        hints: NumaHints,
        is_dra: impl Fn(&Gpu) -> bool,
    ) -> Unshared {
        let mut unshared = Unshared::new();
        let (mut whole, mut in_mig_mode) = (Vec::new(), Vec::new());
        let mut profiles: BTreeMap<String, Vec<PciAddress>> = BTreeMap::new();
        let mut mig_names = BTreeSet::new();
        for (place, gpu) in topology.gpus().iter().enumerate() {
            if plan.filter.excludes(gpu) {
                continue;
            }
            if let Some(model) = gpu.model.as_ref().filter(|model| is_display_adapter(model)) {
                self.problems.push(PlanProblem::DisplayAdapter(gpu.pci, model.clone()));
                continue;
            }
            if plan.filter.excludes_display_of(gpu) {
                self.problems.push(PlanProblem::Display(gpu.pci, gpu.uuid.clone()));
                continue;
            }
            if plan.door == Door::Dra || is_dra(gpu) {
                self.of_dra.push(gpu.clone());
                continue;
            }
            let device = Device::new(topology, gpu, hints);
            if !gpu.mig_enabled || plan.mig_strategy == MigStrategy::None {
                whole.push(gpu.pci);
                unshared.entry(plan.name_of_gpu(gpu)).or_default().push(device);
                continue;
            }
            let mut empty = true;
            for mig in topology.mig_devices().iter().filter(|mig| mig.parent == place) {
                empty = false;
                let name = plan.name_of_mig(&mig.profile);
                mig_names.insert(name.clone());
                unshared.entry(name).or_default().push(Device { mig: Some(mig.clone()), ..device.clone() });
                let gpus = profiles.entry(mig.profile.to_string()).or_default();
                if gpus.last() != Some(&gpu.pci) {
                    gpus.push(gpu.pci);
                }
            }
            if empty {
                self.problems.push(PlanProblem::NoMigDevice(gpu.pci));
            } else {
                in_mig_mode.push(gpu.pci);
            }
        }
        if plan.mig_strategy == MigStrategy::Single {
            if profiles.len() > 1 {
                self.problems.push(PlanProblem::MixedProfiles(profiles.into_iter().collect()));
                self.withhold(&mut unshared, &mig_names);
            }
            if !whole.is_empty() && !in_mig_mode.is_empty() {
                self.problems.push(PlanProblem::MixedModes(in_mig_mode, whole));
                let all = unshared.keys().cloned().collect();
                self.withhold(&mut unshared, &all);
            }
        }
        unshared
    }

    fn withhold(&mut self, unshared: &mut Unshared, names: &BTreeSet<ResourceName>) {
        unshared.retain(|name, _| !names.contains(name));
        self.withheld.extend(names.iter().cloned());
    }

    /// Moves the shared devices from their resources to the names under which they are offered. The devices of a
    /// row that cannot be offered are withheld.
    fn share<'a>(&mut self, sharing: &'a Sharing, unshared: &mut Unshared) -> Vec<Shared<'a>> {
        let names: BTreeSet<ResourceName> = unshared.keys().cloned().collect();
        let mut shared: Vec<Shared<'a>> = Vec::new();
        for resource in &sharing.resources {
            // A node without such devices needs no message: one file serves many nodes.
            let Some(all) = unshared.get_mut(&resource.name) else { continue };
            let is = |selector: &DeviceSelector, device: &Device| selector.is(&device.gpu, device.mig.as_ref());
            let is_of_dra = |selector: &DeviceSelector| self.of_dra.iter().any(|gpu| selector.is(gpu, None));
            let (chosen, rest) = split_shared(resource, all, is, is_of_dra, &mut self.problems);
            *all = rest;
            let name = offered_as(sharing, resource);
            let made = name.clone().and_then(|name| {
                let mut others = shared.iter().filter(|other| other.name == name);
                let clashes = |other: &Shared<'_>| {
                    *other.of != resource.name
                        || sharing.kind == SharingKind::Mps && other.replicas != resource.replicas
                };
                if name != resource.name && names.contains(&name) || others.any(clashes) {
                    return Err(PlanProblem::NameTaken(resource.name.clone(), name));
                }
                check_shareable(sharing.kind, resource, &chosen)?;
                let listed = shared.iter().filter(|other| other.name == name);
                let listed = listed.map(|other| slots(other.replicas, &other.devices)).sum::<u64>();
                let wanted = slots(resource.replicas, &chosen);
                let mut replicas = resource.replicas;
                let max = u64::from(MAX_SLOTS);
                if listed.saturating_add(wanted) > max {
                    let room = max.saturating_sub(listed) / u64::try_from(chosen.len()).unwrap_or(u64::MAX).max(1);
                    replicas = u32::try_from(room).unwrap_or(replicas).min(replicas);
                    self.problems.push(PlanProblem::TooManySlots(name.clone(), wanted, replicas));
                }
                Ok(Shared { name, of: &resource.name, replicas, devices: chosen })
            });
            match made {
                Ok(made) => shared.push(made),
                Err(problem) => {
                    // A taken name is offered, with the devices of its owner.
                    let is_taken = matches!(problem, PlanProblem::NameTaken(..));
                    self.problems.push(problem);
                    let name = name.ok().filter(|_| !is_taken);
                    self.withheld.insert(name.unwrap_or_else(|| resource.name.clone()));
                }
            }
        }
        shared
    }
}

/// The number of slots of some devices.
fn slots(replicas: u32, devices: &[Device]) -> u64 {
    u64::from(replicas).saturating_mul(u64::try_from(devices.len()).unwrap_or(u64::MAX))
}

/// The name under which the shared devices of a resource are offered.
fn offered_as(sharing: &Sharing, resource: &SharedResource) -> Result<ResourceName, PlanProblem> {
    match &resource.rename {
        Some(name) => Ok(name.clone()),
        None if sharing.rename_by_default => {
            let name = format!("{}.shared", resource.name);
            name.parse().map_err(|_| PlanProblem::NoName(name))
        }
        None => Ok(resource.name.clone()),
    }
}

/// Divides the devices of a resource into shared and unshared ones. A device that the plan names and the node does not
/// have is a problem; the others are shared. `is_elsewhere` is true for a selector of a device that is not in `all` but
/// may be named.
pub(super) fn split_shared<T: Clone>(
    resource: &SharedResource,
    all: &[T],
    is: impl Fn(&DeviceSelector, &T) -> bool,
    is_elsewhere: impl Fn(&DeviceSelector) -> bool,
    problems: &mut Vec<PlanProblem>,
) -> (Vec<T>, Vec<T>) {
    let of = || resource.name.clone();
    match &resource.devices {
        SharedDevices::All => (all.to_vec(), Vec::new()),
        SharedDevices::Count(count) => {
            let wanted = usize::try_from(*count).unwrap_or(usize::MAX);
            if wanted > all.len() {
                problems.push(PlanProblem::TooFewDevices(of(), *count, all.len()));
            }
            let (chosen, rest) = all.split_at(wanted.min(all.len()));
            (chosen.to_vec(), rest.to_vec())
        }
        SharedDevices::List(list) => {
            let is_there = |selector: &DeviceSelector| all.iter().any(|device| is(selector, device));
            let absent = list.iter().filter(|selector| !is_there(selector) && !is_elsewhere(selector));
            problems.extend(absent.map(|selector| PlanProblem::NoSuchDevice(of(), selector.clone())));
            all.iter().cloned().partition(|device| list.iter().any(|selector| is(selector, device)))
        }
    }
}

/// Checks that these devices of a resource can be shared.
fn check_shareable(kind: SharingKind, resource: &SharedResource, chosen: &[Device]) -> Result<(), PlanProblem> {
    let (of, replicas) = (resource.name.clone(), resource.replicas);
    if replicas < 2 {
        return Err(PlanProblem::TooFewReplicas(of, replicas));
    }
    if kind == SharingKind::Mps
        && let Some(refusal) = mps::refusal(&of, replicas, chosen.iter().map(|device| &device.gpu))
    {
        return Err(refusal);
    }
    let mut last = chosen.iter().map(|device| device.with_slot(replicas.saturating_sub(1)).id());
    match last.find(|id| id.as_str().len() > GpuUuid::MAX) {
        Some(id) => Err(PlanProblem::LongId(of, id)),
        None => Ok(()),
    }
}
