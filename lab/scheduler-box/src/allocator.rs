//! The depth-first search over claims, requests, alternatives and devices, up to the first complete solution.
//!
//! k8s@1.36: `structured/internal/incubating/allocator_incubating.go`, `allocateOne` and `allocateDevice`.

mod capacity;
mod constraint;
mod request;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::api::Claim;
use crate::devices::{Counter, DeviceName, NodeDevice, NodeDevices, consumed};
use crate::error::Failure;
use crate::quantity::Quantity;
use crate::report;
use crate::selector::{Selectors, View};
use crate::{Cluster, Placement};
pub(crate) use capacity::{Amount, Consumed};
pub(crate) use constraint::applies_to;
use constraint::{MatchState, Member};
pub(crate) use request::{Ask, RequestPlan};

/// `AllocationResultsMaxSize`: the most devices of a claim.
const MAX_RESULTS: usize = 32;

/// The score of the first alternative of a request (`FirstAvailableDeviceRequestMaxSize`); each later one has 1 less.
const BEST_SCORE: i64 = 8;

/// A device that the search has chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen {
    pub claim: usize,
    pub request: usize,
    /// The index of the alternative of the request; 0 if the request has none.
    pub alternative: usize,
    /// The device's index in [`NodeDevices::devices`].
    pub device: usize,
}

/// The position of the search.
#[derive(Clone, Copy)]
struct Position {
    claim: usize,
    request: usize,
    alternative: Option<usize>,
    /// The number of devices already chosen for the request.
    count: usize,
    /// The first device that may be chosen next, so that combinations are tried and not permutations.
    next: usize,
}

impl Position {
    fn at(claim: usize, request: usize) -> Self {
        Self { claim, request, alternative: None, count: 0, next: 0 }
    }
}

/// One attempt to allocate a pod's claims on a node.
pub(crate) struct Attempt<'a> {
    pub node: &'a str,
    pub devices: &'a NodeDevices<'a>,
    pub used: &'a BTreeSet<DeviceName>,
    /// The shares of devices that several claims may have.
    pub shares: &'a BTreeMap<DeviceName, BTreeMap<String, Consumed>>,
    pub claims: &'a [Claim],
    /// The requests, by claim.
    pub plans: Vec<Vec<RequestPlan<'a>>>,
    selectors: &'a Selectors,
    views: Vec<View>,
    /// The known results of [`Self::selects`], by its arguments.
    selected: BTreeMap<(usize, usize, usize, usize), bool>,
    constraints: Vec<Vec<MatchState<'a>>>,
    /// The remaining values of the counters, by pool.
    counters: Vec<BTreeMap<Counter<'a>, Quantity>>,
    chosen: Vec<Chosen>,
    /// The furthest claim and request that the search reached.
    deepest: (usize, usize),
    max_steps: u64,
    steps_left: u64,
}

impl<'a> Attempt<'a> {
    pub fn new(
        cluster: &'a Cluster,
        node: &'a str,
        devices: &'a NodeDevices<'a>,
        claims: &'a [Claim],
    ) -> Result<Self, Failure> {
        let Cluster { classes, used, shares, selectors, steps, .. } = cluster;
        let plans = claims.iter().map(|claim| request::plan(claim, classes)).collect::<Result<_, _>>()?;
        let constraints = claims.iter().map(constraint::of_claim).collect();
        let mut counters = devices.counters.clone();
        for device in devices.devices.iter().filter(|device| used.contains(&device.name)) {
            change(&mut counters, device, -1)?;
        }
        Ok(Self {
            node,
            devices,
            used,
            shares,
            claims,
            plans,
            selectors,
            views: devices.devices.iter().map(|_| View::default()).collect(),
            selected: BTreeMap::new(),
            constraints,
            counters,
            chosen: Vec::new(),
            deepest: (0, 0),
            max_steps: *steps,
            steps_left: *steps,
        })
    }

    /// Finds devices for all claims.
    pub fn run(mut self) -> Result<Placement, Failure> {
        if self.search(Position::at(0, 0))? {
            let score = self.score();
            let allocations = (0..self.claims.len()).map(|claim| report::allocation(&self, claim));
            let allocations: Vec<Value> = allocations.collect::<Result<_, _>>()?;
            return Ok(Placement { node: self.node.to_owned(), score, steps: self.steps(), allocations });
        }
        let (claim, request) = self.deepest;
        Err(Failure::Refused(vec![report::refusal(&mut self, claim, request)]))
    }

    /// The number of devices examined so far.
    pub fn steps(&self) -> u64 {
        self.max_steps.saturating_sub(self.steps_left)
    }

    /// The chosen devices, in the order in which they were chosen.
    pub fn chosen(&self) -> &[Chosen] {
        &self.chosen
    }

    /// The alternatives of a request; a request without alternatives is its own single alternative.
    pub fn asks(&self, claim: usize, request: usize) -> &[Ask<'a>] {
        self.plans.get(claim).and_then(|plans| plans.get(request)).map_or(&[], |plan| &plan.asks)
    }

    /// The score of the choices in prioritised lists: 8 for the first alternative, 1 less for each later one
    /// (`dynamicresources.go`, `computeScore`).
    fn score(&self) -> i64 {
        let mut score = 0;
        for (claim, plans) in self.plans.iter().enumerate() {
            for (request, _) in plans.iter().enumerate().filter(|(_, plan)| plan.is_prioritised) {
                let got = self.chosen.iter().find(|chosen| (chosen.claim, chosen.request) == (claim, request));
                score += got.map_or(0, |got| BEST_SCORE - i64::try_from(got.alternative).unwrap_or(BEST_SCORE));
            }
        }
        score
    }

    fn search(&mut self, position: Position) -> Result<bool, Failure> {
        let Some(plans) = self.plans.get(position.claim) else { return Ok(true) };
        let Some(plan) = plans.get(position.request) else {
            return self.search(Position::at(position.claim + 1, 0));
        };
        self.deepest = self.deepest.max((position.claim, position.request));
        let Some(alternative) = position.alternative else {
            for alternative in 0..plan.asks.len() {
                if self.search(Position { alternative: Some(alternative), ..position })? {
                    return Ok(true);
                }
            }
            return Ok(false);
        };
        let Some(ask) = plan.asks.get(alternative) else { return Ok(false) };
        let wanted = ask.asked.count;
        let others = self.chosen.iter().filter(|chosen| chosen.claim == position.claim).count() - position.count;
        if wanted == 0 || others + wanted > MAX_RESULTS {
            return Ok(false);
        }
        if position.count == wanted {
            return self.search(Position::at(position.claim, position.request + 1));
        }
        for device in position.next..self.devices.devices.len() {
            if self.take(position, alternative, device)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Chooses a device for a request and continues the search. If that fails, gives the device back.
    fn take(&mut self, position: Position, alternative: usize, device: usize) -> Result<bool, Failure> {
        if self.steps_left == 0 {
            return Err(Failure::TooMuchWork(self.node.to_owned(), self.max_steps));
        }
        self.steps_left -= 1;
        let chosen = Chosen { claim: position.claim, request: position.request, alternative, device };
        // The cheap check for a device in use comes first, so that the selectors are not evaluated for such a device.
        if self.is_taken(device) || !self.selects(position.claim, position.request, alternative, device)? {
            return Ok(false);
        }
        if !self.has_capacity(chosen)? || self.is_tainted(device) || !self.consume(device)? {
            return Ok(false);
        }
        if !self.add_to_constraints(chosen) {
            self.give_back(device)?;
            return Ok(false);
        }
        self.chosen.push(chosen);
        let next = Position { count: position.count + 1, next: device + 1, alternative: Some(alternative), ..position };
        if self.search(next)? {
            return Ok(true);
        }
        self.chosen.pop();
        self.constraints.iter_mut().flatten().for_each(|state| state.forget(&chosen));
        self.give_back(device)?;
        Ok(false)
    }

    /// Returns true if another claim has the device alone, or if this attempt has chosen it and cannot share it.
    fn is_taken(&self, device: usize) -> bool {
        let is_chosen = self.chosen.iter().any(|chosen| chosen.device == device);
        self.is_used(device) || (is_chosen && !self.is_shared(device))
    }

    /// Returns true if another claim has the device alone.
    pub fn is_used(&self, device: usize) -> bool {
        self.devices.devices.get(device).is_some_and(|device| self.used.contains(&device.name))
    }

    fn ask(&self, of: Chosen) -> Option<&Ask<'a>> {
        self.asks(of.claim, of.request).get(of.alternative)
    }

    /// Returns true if the selectors of the class and then those of the request select the device.
    pub fn selects(&mut self, claim: usize, request: usize, alternative: usize, index: usize) -> Result<bool, Failure> {
        let key = (claim, request, alternative, index);
        if let Some(known) = self.selected.get(&key) {
            return Ok(*known);
        }
        let (Some(ask), Some(device), Some(view)) =
            (self.asks(claim, request).get(alternative), self.devices.devices.get(index), self.views.get(index))
        else {
            return Ok(false);
        };
        let mut selected = true;
        for selector in ask.class.spec.selectors.iter().chain(&ask.asked.selectors) {
            let expression = &selector.cel.expression;
            let selects = self.selectors.selects(expression, &device.name.driver, device.device, view);
            let is_selected = selects.map_err(|why| Failure::Selector {
                claim: self.claims.get(claim).map(Claim::name).unwrap_or_default(),
                request: ask.name.clone(),
                device: device.name.to_string(),
                expression: expression.clone(),
                why,
            })?;
            if !is_selected {
                selected = false;
                break;
            }
        }
        self.selected.insert(key, selected);
        Ok(selected)
    }

    /// Returns true if a taint keeps the device from claims; tolerations are not modelled. Taints with an unknown
    /// effect, or with `None`, only inform (`taintPreventsAllocation`).
    pub fn is_tainted(&self, device: usize) -> bool {
        let mut taints = self.devices.devices.get(device).into_iter().flat_map(|device| &device.device.taints);
        taints.any(|taint| ["NoSchedule", "NoExecute"].contains(&taint.effect.as_str()))
    }

    /// Returns true if several claims may have the device.
    fn is_shared(&self, device: usize) -> bool {
        self.devices.devices.get(device).is_some_and(|device| device.device.allow_multiple_allocations)
    }

    /// The amounts that a choice consumes of its device; `None` if the device lacks a capacity or refuses an amount.
    pub fn consumes(&self, chosen: Chosen) -> Result<Option<Consumed>, Failure> {
        let (Some(ask), Some(device)) = (self.ask(chosen), self.devices.devices.get(chosen.device)) else {
            return Ok(None);
        };
        capacity::consumed(&device.name.to_string(), device.device, ask.asked.capacity.as_ref())
    }

    /// Returns true if the device has the requested capacity besides the amounts that claims have.
    pub fn has_capacity(&self, chosen: Chosen) -> Result<bool, Failure> {
        let (Some(ask), Some(device)) = (self.ask(chosen), self.devices.devices.get(chosen.device)) else {
            return Ok(false);
        };
        let is_exclusive = !device.device.allow_multiple_allocations && !self.shares.contains_key(&device.name);
        if ask.asked.capacity.is_none() && is_exclusive {
            return Ok(true);
        }
        let Some(wanted) = self.consumes(chosen)? else { return Ok(false) };
        let mut in_attempt = Vec::new();
        for other in self.chosen.iter().filter(|other| other.device == chosen.device) {
            in_attempt.extend(self.consumes(*other)?);
        }
        let before = self.shares.get(&device.name).into_iter().flat_map(BTreeMap::values);
        capacity::fits(&device.name.to_string(), device.device, &wanted, before.chain(&in_attempt))
    }

    /// Subtracts the amounts that a device consumes from the counters of its pool. Returns false, and changes nothing,
    /// if a counter is short.
    fn consume(&mut self, index: usize) -> Result<bool, Failure> {
        let Some(device) = self.devices.devices.get(index) else { return Ok(false) };
        let Some(pool) = self.counters.get(device.pool) else { return Ok(false) };
        let amounts = consumed(device)?;
        let enough = amounts.iter().all(|(counter, amount)| pool.get(counter).is_some_and(|left| left >= amount));
        if enough {
            change(&mut self.counters, device, -1)?;
        }
        Ok(enough)
    }

    fn give_back(&mut self, index: usize) -> Result<(), Failure> {
        self.devices.devices.get(index).map_or(Ok(()), |device| change(&mut self.counters, device, 1))
    }

    /// Adds a device to the constraints of its claim. Returns false, and adds it to none, if the device breaks one.
    fn add_to_constraints(&mut self, chosen: Chosen) -> bool {
        let ask = self.plans.get(chosen.claim).and_then(|plans| plans.get(chosen.request));
        let Some(ask) = ask.and_then(|plan| plan.asks.get(chosen.alternative)) else { return false };
        let Some(device) = self.devices.devices.get(chosen.device) else { return false };
        let member = Member { chosen, ask, device };
        let Some(states) = self.constraints.get_mut(chosen.claim) else { return false };
        let holds = states.iter_mut().all(|state| state.add(&member));
        if !holds {
            states.iter_mut().for_each(|state| state.forget(&chosen));
        }
        holds
    }
}

/// Adds the amounts that a device consumes to the counters of its pool; with the sign -1, subtracts them.
fn change<'a>(
    counters: &mut [BTreeMap<Counter<'a>, Quantity>],
    device: &NodeDevice<'a>,
    sign: i128,
) -> Result<(), Failure> {
    for (counter, amount) in consumed(device)? {
        if let Some(left) = counters.get_mut(device.pool).and_then(|pool| pool.get_mut(&counter)) {
            left.0 += sign * amount.0;
        }
    }
    Ok(())
}
