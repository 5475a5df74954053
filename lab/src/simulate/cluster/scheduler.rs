//! kube-scheduler's choice among the nodes, and the GPUs that are free on each.
//!
//! The choice follows `pkg/scheduler/schedule_one.go` of Kubernetes 1.36: from the node behind the last examined one,
//! nodes are tried until enough of them fit; those are scored, and one of the best is drawn. Nodes are examined one
//! after the other, instead of 16 at once.

use crate::simulate::Draws;
use crate::simulate::{CpuRequests, Door};
use anyhow::{Result, anyhow};
use linkwise_core::allocation::GpuSet;

use super::machines::Machine;
use super::shapes::Shapes;
use super::states::{Answer, State, States};

/// The least number of fitting nodes that ends the search.
const LEAST_NODES: usize = 100;

/// The highest score of a plugin (`MaxNodeScore`).
const MOST_SCORE: i64 = 100;

/// The placement of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub node: usize,
    pub set: GpuSet,
    /// The devices that the allocator examined, on all tried nodes.
    pub steps: u64,
    pub claim_bytes: u64,
}

/// The nodes of a cluster with one door.
pub(super) struct Scheduler<'a> {
    states: States<'a>,
    /// The state of each node.
    nodes: Vec<usize>,
    cpu: CpuRequests,
    /// The node at which the next search begins.
    start: usize,
    draws: Draws,
    /// The nodes that fit, with their answers and their scores by CPU. Kept only to reuse its memory.
    fit: Vec<(usize, Answer, i64)>,
}

impl<'a> Scheduler<'a> {
    /// Starts with all GPUs free. `kinds` holds the machine of each node.
    pub fn new(
        machines: &'a [Machine],
        kinds: &[usize],
        shapes: &'a Shapes,
        door: Door,
        cpu: CpuRequests,
        seed: u64,
    ) -> Result<Self> {
        let mut states = States::new(machines, shapes, door)?;
        let idle = |kind: &usize| states.number(*kind, machines.get(*kind).map(|of| of.whole).unwrap_or_default());
        let nodes = kinds.iter().map(idle).collect();
        Ok(Self { states, nodes, cpu, start: 0, draws: Draws::new(seed), fit: Vec::new() })
    }

    pub fn states(&self) -> &States<'a> {
        &self.states
    }

    /// The states of all nodes.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Returns true if a node could take a pod of this shape now.
    pub fn fits(&mut self, shape: usize, node: usize) -> Result<bool> {
        let state = self.nodes.get(node).copied().ok_or_else(|| anyhow!("no node {node}"))?;
        Ok(self.states.answer(shape, state)?.set.is_some())
    }

    /// The placement of a pod of this shape; `None` if it has to wait. Nothing is taken yet.
    pub fn place(&mut self, shape: usize) -> Result<Option<Placed>> {
        let (count, enough) = (self.nodes.len(), enough(self.nodes.len()));
        let (mut steps, mut tried) = (0, 0);
        self.fit.clear();
        while tried < count && self.fit.len() < enough {
            let node = (self.start + tried) % count;
            tried += 1;
            let Some(state) = self.nodes.get(node).copied() else { continue };
            let answer = self.states.answer(shape, state)?;
            steps += answer.steps;
            if answer.set.is_some() {
                let by_cpu = self.states.state(state).map_or(0, |state| self.least_allocated(state, answer));
                self.fit.push((node, answer, by_cpu));
            }
        }
        self.start = (self.start + tried).checked_rem(count).unwrap_or(0);
        let most = self.fit.iter().map(|(_, answer, _)| answer.score).max().unwrap_or(0);
        let (mut best, mut best_score, mut equals) = (None, i64::MIN, 0);
        for (node, answer, by_cpu) in &self.fit {
            let score = normalized(answer.score, most) + by_cpu;
            if score > best_score {
                (best, best_score, equals) = (Some((*node, *answer)), score, 1);
            } else if score == best_score {
                equals += 1;
                // The last of n is taken with a chance of 1 in n: so all are equally likely.
                if self.draws.below(equals) == 0 {
                    best = Some((*node, *answer));
                }
            }
        }
        Ok(best
            .and_then(|(node, Answer { set, claim_bytes, .. })| Some(Placed { node, set: set?, steps, claim_bytes })))
    }

    /// Gives a set of a node to a job, or takes it back.
    pub fn change(&mut self, node: usize, free: impl FnOnce(GpuSet) -> GpuSet) -> Result<()> {
        let number = self.nodes.get_mut(node).ok_or_else(|| anyhow!("no node {node}"))?;
        let (machine, free) = match self.states.state(*number) {
            Some(state) => (state.machine, free(state.free)),
            None => return Err(anyhow!("node {node} has no state")),
        };
        *number = self.states.number(machine, free);
        Ok(())
    }

    /// The score of NodeResourcesFit's default, LeastAllocated: the share of CPU and memory that is free with the pod.
    fn least_allocated(&self, state: &State, answer: Answer) -> i64 {
        let whole = self.states.machines.get(state.machine).map_or(0, |machine| machine.whole.len());
        let free = state.free.len().saturating_sub(answer.set.map_or(0, GpuSet::len));
        match self.cpu {
            CpuRequests::Share => i64::try_from(free * 100 / whole.max(1)).unwrap_or(0),
            CpuRequests::None => 0,
        }
    }
}

/// The number of fitting nodes that is enough (`numFeasibleNodesToFind`, with the default of
/// `percentageOfNodesToScore`).
fn enough(nodes: usize) -> usize {
    let percent = 50_usize.saturating_sub(nodes / 125).max(5);
    if nodes < LEAST_NODES { nodes } else { (nodes * percent / 100).max(LEAST_NODES) }
}

/// A score of alternatives relative to the highest of the nodes (`DefaultNormalizeScore`). The weight is 1, that of a
/// plugin without one.
fn normalized(score: i64, most: i64) -> i64 {
    if most == 0 { score } else { score * MOST_SCORE / most }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_nodes_are_those_of_kube_scheduler() {
        // schedule_one_test.go, Test_numFeasibleNodesToFind, with the default percentage.
        assert_eq!([10, 100, 1000, 6000, 10_000].map(enough), [10, 100, 420, 300, 500]);
    }
}
