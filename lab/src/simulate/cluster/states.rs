//! The answers of nodes to pods. An answer depends only on the pod's shape, the node's machine and its free GPUs. The
//! allocator's model or linkwise's own choice computes each answer once.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow};
use linkwise::commands::{any_claim, exact_claim, fleet_claim, rails_claim};
use linkwise_core::allocation::GpuSet;
use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use super::machines::Machine;
use super::shapes::{Shape, Shapes};
use crate::demo::WHOLE_GPUS;
use crate::simulate::{Door, best_set, values};
use linkwise_core::state::DRA_DRIVER;

/// The name of the node that represents all nodes with its machine. It is as long as the simulated nodes' names.
pub(super) const NODE: &str = "node-00000";

/// The size of the sets that [`State::stuck`] is about.
const FOUR: usize = 4;

/// A node's answer to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The GPUs that the pod gets; `None` if it does not fit.
    pub set: Option<GpuSet>,
    /// The score of the alternative that its claim gets.
    pub score: i64,
    /// The number of devices that the allocator examines.
    pub steps: u64,
    /// The size of the claim with its allocation, as JSON.
    pub claim_bytes: u64,
}

/// A machine with some GPUs free.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub machine: usize,
    pub free: GpuSet,
    /// The best collective of the free GPUs for each shape, in MB/s; `None` if too few are free.
    pub best: Vec<Option<u64>>,
    /// The number of free GPUs that are left when sets of four with the collective of the idle machine's best four are
    /// taken out one after the other. It is 0 if the machine has no such set.
    pub stuck: usize,
}

/// The states that nodes had so far, by number.
pub(super) struct States<'a> {
    pub machines: &'a [Machine],
    pub shapes: &'a Shapes,
    door: Door,
    /// The claim for each shape. There are none if the device plugin serves the pods.
    claims: Vec<Value>,
    /// The allocator's model of one node, for each machine.
    models: Vec<Cluster>,
    /// The collective of each idle machine's best four.
    fours: Vec<Option<u64>>,
    /// The number of each state, by machine and free GPUs.
    numbers: Vec<BTreeMap<u64, usize>>,
    states: Vec<State>,
    /// The known answers, by shape and state.
    answers: Vec<Vec<Option<Answer>>>,
}

impl<'a> States<'a> {
    pub fn new(machines: &'a [Machine], shapes: &'a Shapes, door: Door) -> Result<Self> {
        let claims = shapes.shapes.iter().filter_map(|shape| claim(machines, door, *shape).transpose());
        Ok(Self { door, ..Self::with_claims(machines, shapes, claims.collect::<Result<_>>()?)? })
    }

    /// The states of nodes that serve `claims`, one for each shape. Without claims the device plugin serves pods.
    pub fn with_claims(machines: &'a [Machine], shapes: &'a Shapes, claims: Vec<Value>) -> Result<Self> {
        let model = |machine: &Machine| {
            Cluster::new(&machine.slices(NODE), &classes(), &[])
                .with_context(|| format!("the scheduler cannot read what '{}' publishes", machine.name))
        };
        let models = if claims.is_empty() { Vec::new() } else { machines.iter().map(model).collect::<Result<_>>()? };
        let four = |machine: &Machine| best_set(&machine.tables, machine.whole, FOUR).1;
        Ok(Self {
            machines,
            shapes,
            door: Door::Plugin,
            claims,
            models,
            fours: machines.iter().map(four).collect(),
            numbers: vec![BTreeMap::new(); machines.len()],
            states: Vec::new(),
            answers: vec![Vec::new(); shapes.shapes.len()],
        })
    }

    /// The number of a state. A new state is added.
    pub fn number(&mut self, machine: usize, free: GpuSet) -> usize {
        let (Some(numbers), Some(kind)) = (self.numbers.get_mut(machine), self.machines.get(machine)) else { return 0 };
        let next = self.states.len();
        let number = *numbers.entry(free.0).or_insert(next);
        if number == next {
            let gpus = self.shapes.shapes.iter().map(|shape| shape.gpus);
            let best = gpus.map(|gpus| best_set(&kind.tables, free, gpus).1).collect();
            let whole = self.fours.get(machine).copied().flatten();
            let mut left = free;
            while let (four, Some(collective)) = best_set(&kind.tables, left, FOUR)
                && whole == Some(collective)
            {
                left = left.without(four);
            }
            let stuck = if whole.is_some() { left.len() } else { 0 };
            self.states.push(State { machine, free, best, stuck });
            self.answers.iter_mut().for_each(|answers| answers.push(None));
        }
        number
    }

    pub fn state(&self, number: usize) -> Option<&State> {
        self.states.get(number)
    }

    /// The number of free GPUs if the machine has sets of four, otherwise 0.
    pub fn free_for_fours(&self, number: usize) -> usize {
        self.state(number)
            .filter(|state| self.fours.get(state.machine).is_some_and(Option::is_some))
            .map_or(0, |state| state.free.len())
    }

    /// The answer of a node in this state to a pod of this shape.
    pub fn answer(&mut self, shape: usize, number: usize) -> Result<Answer> {
        if let Some(Some(known)) = self.answers.get(shape).and_then(|answers| answers.get(number)) {
            return Ok(*known);
        }
        let answer = self.ask(shape, number)?;
        if let Some(place) = self.answers.get_mut(shape).and_then(|answers| answers.get_mut(number)) {
            *place = Some(answer);
        }
        Ok(answer)
    }

    fn ask(&mut self, shape: usize, number: usize) -> Result<Answer> {
        let (Some(state), Some(Shape { gpus, .. })) = (self.states.get(number), self.shapes.shapes.get(shape)) else {
            return Err(anyhow!("no state {number}, or no shape {shape}"));
        };
        let machine = self.machines.get(state.machine).context("the state's machine is unknown")?;
        let Some(claim) = self.claims.get(shape) else {
            let choose = if self.door == Door::PluginRails { lowest_rails } else { chosen };
            let set = (state.free.len() >= *gpus).then(|| choose(machine, state.free, *gpus));
            return Ok(Answer { set, score: 0, steps: 0, claim_bytes: 0 });
        };
        let model = self.models.get_mut(state.machine).context("the machine has no model")?;
        let used = allocation(NODE, machine.devices_of(machine.whole.without(state.free)));
        model.occupy(&used)?;
        let placed = model.allocate(NODE, std::slice::from_ref(claim));
        model.release(&used)?;
        match placed {
            Ok(placement) => {
                let allocation = placement.allocations.into_iter().next().context("the claim has no allocation")?;
                let set =
                    set_of(machine, &allocation).with_context(|| format!("a device of {allocation} is unknown"))?;
                let mut claim = claim.clone();
                claim["status"] = json!({ "allocation": allocation });
                let claim_bytes = claim.to_string().len() as u64;
                Ok(Answer { set: Some(set), score: placement.score, steps: placement.steps, claim_bytes })
            }
            Err(Failure::Refused(why)) => {
                let steps = why.iter().map(|refusal| refusal.steps).sum();
                Ok(Answer { set: None, score: 0, steps, claim_bytes: 0 })
            }
            Err(failure) => Err(failure).with_context(|| format!("{gpus} GPUs on '{}'", machine.name)),
        }
    }
}

fn chosen(machine: &Machine, free: GpuSet, gpus: usize) -> GpuSet {
    best_set(&machine.tables, free, gpus).0
}

/// The set that linkwise would prefer if rails were its last value: the one with the lowest rails among the sets that
/// have the values of the best set.
fn lowest_rails(machine: &Machine, free: GpuSet, gpus: usize) -> GpuSet {
    let best = chosen(machine, free, gpus);
    let wanted = values(&machine.tables, free, best);
    let mut sets = subsets(free, gpus);
    sets.retain(|set| wanted.is_some() && values(&machine.tables, free, *set) == wanted);
    sets.into_iter().min_by_key(|set| (machine.rails(*set), *set != best, *set)).unwrap_or(best)
}

/// All sets of `size` of these GPUs.
fn subsets(gpus: GpuSet, size: usize) -> Vec<GpuSet> {
    let first = gpus.lowest();
    match size {
        0 => vec![GpuSet::default()],
        _ if gpus.len() < size => Vec::new(),
        _ => {
            let rest = gpus.without(first);
            let with_first = subsets(rest, size - 1).into_iter().map(|set| set.union(first));
            with_first.chain(subsets(rest, size)).collect()
        }
    }
}

/// The claim of a pod, or `None` if the device plugin serves it. Exact claims and claims for a fleet are made for a
/// cluster with equally many nodes of each machine, whatever the mix is.
pub(super) fn claim(machines: &[Machine], door: Door, Shape { gpus, rails, .. }: Shape) -> Result<Option<Value>> {
    let count = u8::try_from(gpus).with_context(|| format!("{gpus} GPUs are too many for a claim"))?;
    let spec = match door {
        Door::Plugin | Door::PluginRails => return Ok(None),
        Door::DraSingles => {
            let exactly = json!({"deviceClassName": DRA_DRIVER, "allocationMode": "ExactCount", "count": count});
            json!({"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}})
        }
        Door::DraGroups | Door::DraRails => match rails {
            Some((first, rails)) => rails_claim(count, &(first..first.saturating_add(rails)).collect::<Vec<_>>())?,
            None => any_claim(count)?,
        },
        Door::DraExact => exact_claim(count, &slices(machines))?,
        Door::DraFleet => {
            let names: Vec<String> = machines.iter().map(|machine| machine.name.clone()).collect();
            fleet_claim(count, &slices(machines), &names)?
        }
    };
    Ok(Some(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": format!("gpus-{gpus}"), "namespace": "default"}, "spec": spec,
    })))
}

/// The slices of one node of each machine.
fn slices(machines: &[Machine]) -> Vec<Value> {
    machines.iter().enumerate().flat_map(|(kind, machine)| machine.slices(&format!("node-{kind}"))).collect()
}

pub(super) fn classes() -> Vec<Value> {
    vec![json!({"metadata": {"name": DRA_DRIVER}, "spec": {"selectors": [{"cel": {"expression": WHOLE_GPUS}}]}})]
}

/// The `status.allocation` of a claim that has these devices.
pub(super) fn allocation<'a>(node: &str, devices: impl Iterator<Item = &'a str>) -> Value {
    let pool = format!("{node}/gpu");
    let result = |device: &str| json!({"request": "gpus", "driver": DRA_DRIVER, "pool": pool, "device": device});
    json!({"devices": {"results": devices.map(result).collect::<Vec<_>>()}})
}

pub(super) fn set_of(machine: &Machine, allocation: &Value) -> Option<GpuSet> {
    let results = allocation["devices"]["results"].as_array()?;
    let gpus = |result: &Value| machine.gpus_of.get(result["device"].as_str()?).copied();
    results.iter().try_fold(GpuSet::default(), |all, result| Some(all.union(gpus(result)?)))
}
