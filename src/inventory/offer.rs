//! What the node offers: the plan carried out, again whenever the plan or the machine changes, and the choice among it.
//!
//! Part of [`Inventory`]; `resources` makes the devices, here the new ones meet what was offered before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Inventory;
use super::device::{Device, Health, ResourceName, Timestamp, UnhealthyReason};
use super::event::Effect;
use super::plan::ResourcePlan;
use super::problem::PlanProblem;
use super::resources::{Choice, Resources};
use crate::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, DeviceId, PreferredAllocation, preferred_allocation,
    preferred_units,
};

impl Inventory {
    /// The best devices of a resource for a request, and why: whole GPUs as such, slots and MIG devices by the GPUs
    /// behind them. Never fails.
    pub fn preferred(
        &self,
        resource: &ResourceName,
        request: &AllocationRequest,
    ) -> (PreferredAllocation, AllocationReport) {
        match self.choices.get(resource) {
            Some(Choice { units: Some(units), policy, .. }) => preferred_units(&self.tables, units, request, *policy),
            Some(choice) => preferred_allocation(&self.tables, request, choice.policy),
            None => preferred_allocation(&self.tables, request, AllocationPolicy::BestEffort),
        }
    }

    /// Another plan. Before the first look it is taken as it is: there is nothing yet that it could not be had on.
    pub(super) fn planned(&mut self, plan: ResourcePlan, now: Timestamp) -> Vec<Effect> {
        self.wanted = Arc::new(plan);
        if self.topology().gpus().is_empty() {
            self.plan = Arc::clone(&self.wanted);
        }
        self.offer(now)
    }

    /// What pods hold: it tells how used the GPUs are, and what may leave the list. A device that went a while ago and
    /// that no pod holds is forgotten; without that knowledge none is.
    pub(super) fn held(&mut self, held: Option<BTreeSet<(ResourceName, DeviceId)>>, now: Timestamp) -> Vec<Effect> {
        let mut changed = false;
        if let Some(held) = &held {
            for (resource, devices) in &mut self.resources {
                let before = devices.len();
                devices.retain(|id, device| !device.has_left(now) || held.contains(&(resource.clone(), id.clone())));
                changed |= devices.len() != before;
            }
            self.resources.retain(|_, devices| !devices.is_empty());
        }
        let held = held.unwrap_or_default();
        if held != *self.held {
            self.held = Arc::new(held);
            self.choices = Arc::new(self.made(&self.plan).choices);
            changed = true;
        }
        if changed { vec![Effect::Publish] } else { Vec::new() }
    }

    fn made(&self, plan: &ResourcePlan) -> Resources {
        Resources::make(self.topology(), plan, self.numa_hints, &self.held)
    }

    /// Carries out the plan on the machine as it is: what is new is added, what is gone stays as unhealthy.
    ///
    /// The kubelet dereferences ids that pods hold, so an id once advertised does not leave the list. Where the wanted
    /// plan cannot be carried out, the last one that could be stays; where a resource of that cannot be had any
    /// more, what was offered of it stays as long as it is there.
    pub(super) fn offer(&mut self, now: Timestamp) -> Vec<Effect> {
        let mut made = self.made(&self.wanted);
        if self.wanted == self.plan || made.withheld.is_empty() {
            self.plan = Arc::clone(&self.wanted);
        } else {
            let mut problems = made.problems;
            made = self.made(&self.plan);
            problems.extend(
                made.problems.iter().filter(|problem| !problems.contains(problem)).cloned().collect::<Vec<_>>(),
            );
            problems.push(PlanProblem::OldPlanStays);
            made.problems = problems;
        }
        let told = made.problems.iter().filter(|problem| !self.problems.contains(problem));
        let mut effects: Vec<Effect> = told.cloned().map(Effect::PlanProblem).collect();
        self.problems = made.problems;
        self.choices = Arc::new(made.choices);
        // A fault is the hardware's, whatever it is offered as.
        let known = || self.resources.values().flat_map(BTreeMap::values);
        let sick: BTreeMap<&str, &Health> =
            known().filter(|device| device.is_sick()).map(|device| (device.uuid(), &device.health)).collect();
        for device in made.devices.values_mut().flat_map(BTreeMap::values_mut) {
            let health = sick.get(device.uuid()).or_else(|| sick.get(device.gpu.uuid.as_str()));
            device.health = health.map_or(Health::Healthy, |health| (*health).clone());
        }
        let mut changed = BTreeMap::new();
        for (resource, known) in &self.resources {
            let withheld = made.withheld.contains(resource);
            let fresh = made.devices.entry(resource.clone()).or_default();
            for (id, known) in known {
                if let Some(device) = fresh.get(id) {
                    // Gone and back is the evidence that ends a disappearance.
                    if device.health != known.health {
                        changed.insert(device.gpu.uuid.clone(), device.health.clone());
                    }
                    continue;
                }
                let mut gone = known.clone();
                let there = self.is_there(known);
                if known.health == Health::Healthy && !(there && withheld) {
                    let reason = if there { UnhealthyReason::Withdrawn } else { UnhealthyReason::Gone };
                    gone.health = Health::Unhealthy { reason, since: now };
                    changed.insert(known.gpu.uuid.clone(), gone.health.clone());
                }
                fresh.insert(id.clone(), gone);
            }
        }
        effects.extend(changed.into_iter().map(|(gpu, health)| Effect::HealthChanged { gpu, health }));
        made.devices.retain(|_, devices| !devices.is_empty());
        self.resources = made.devices;
        effects.push(Effect::Publish);
        effects
    }

    /// Whether the machine has what is behind a device: its GPU, and its MIG device.
    fn is_there(&self, device: &Device) -> bool {
        let topology = self.topology();
        match &device.mig {
            Some(mig) => topology.mig_devices().iter().any(|there| there.uuid == mig.uuid),
            None => topology.position(&device.gpu.uuid).is_some(),
        }
    }
}
