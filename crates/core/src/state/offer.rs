//! What the node offers: the plan carried out, again whenever the plan or the machine changes, and the choice among it.
//!
//! Part of [`NodeState`]; `resources` makes the devices, here the new ones meet what was offered before.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;

use super::NodeState;
use super::device::{Device, ResourceName, Timestamp};
use super::event::Effect;
use super::plan::ResourcePlan;
use super::problem::PlanProblem;
use super::resources::{Choice, Resources};
use crate::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, DeviceId, PreferredAllocation, preferred_allocation,
    preferred_units,
};

impl NodeState {
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

    /// What pods hold: it tells how used the GPUs are, and what may leave the list.
    pub(super) fn holders(&mut self, held: Option<BTreeSet<(ResourceName, DeviceId)>>, now: Timestamp) -> Vec<Effect> {
        let known = held.is_some();
        let mut effects = Vec::new();
        let mut changed = self.held(held.as_ref());
        let held = held.unwrap_or_default();
        if held != *self.held || known != self.holders_since.is_some() {
            self.held = Arc::new(held);
            self.holders_since = known.then_some(now);
            self.choices = Arc::new(self.made(&self.plan).choices);
            effects = self.adopt(now);
            changed = true;
        }
        self.awaited.holders = false;
        changed |= self.opens();
        effects.extend(self.settle(changed));
        effects
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
        for (resource, known) in self.resources.iter().filter(|(resource, _)| made.withheld.contains(*resource)) {
            let stays = |(id, known): &(&DeviceId, &Device)| {
                !self.gone.contains_key(&(resource.clone(), (*id).clone())) && self.is_there(known)
            };
            let staying = known.iter().filter(stays).map(|(id, known)| (id.clone(), known.clone()));
            made.devices.entry(resource.clone()).or_default().extend(staying);
        }
        self.wait_for_daemons(&mut made.devices, now);
        self.list(made.devices, now);
        effects.extend(self.adopt(now));
        effects.extend(self.settle(true));
        effects
    }

    /// Whether the machine has what is behind a device: its GPU, and its MIG device.
    pub(super) fn is_there(&self, device: &Device) -> bool {
        let topology = self.topology();
        match &device.mig {
            Some(mig) => topology.mig_devices().iter().any(|there| there.uuid == mig.uuid),
            None => topology.position(&device.gpu.uuid).is_some(),
        }
    }
}
