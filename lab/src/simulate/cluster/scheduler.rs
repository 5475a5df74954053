//! kube-scheduler's choice among the nodes, and the GPUs that are free on each.
//!
//! The choice follows `pkg/scheduler/schedule_one.go` of Kubernetes 1.36. The scheduler examines nodes,
//! beginning behind the last examined one, until enough of them fit. It scores those, and takes the node on top of a
//! heap of the scores. This model examines nodes one after the other, kube-scheduler 16 at once.

use crate::simulate::{CpuRequests, Door};
use anyhow::{Result, anyhow};
use linkwise_core::allocation::GpuSet;

use super::machines::Machine;
use super::shapes::Shapes;
use super::states::{Answer, State, States};

/// The least number of fitting nodes that ends the search.
const MIN_NODES: usize = 100;

/// The highest score of a plugin (`MaxNodeScore`).
const MAX_SCORE: i64 = 100;

/// The weight of the score of alternatives (`applyDynamicResources` in
/// `pkg/scheduler/apis/config/v1/default_plugins.go`). The weight of LeastAllocated is 1.
const ALTERNATIVES_WEIGHT: i64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub node: usize,
    pub set: GpuSet,
    /// The score of the alternative that the pod's claim gets.
    pub score: i64,
    /// The number of devices that the allocator examined on all tried nodes.
    pub steps: u64,
    pub claim_bytes: u64,
}

/// The nodes of a cluster with one door.
pub(super) struct Scheduler<'a> {
    states: States<'a>,
    /// The number in `states` of each node's state.
    nodes: Vec<usize>,
    cpu: CpuRequests,
    /// The node at which the next search begins.
    start: usize,
    /// The nodes that fit, with their answers and their scores by CPU. It is a field only to reuse its memory.
    fit: Vec<(usize, Answer, i64)>,
}

impl<'a> Scheduler<'a> {
    /// Starts with all GPUs free. `kinds` holds the index of each node's machine.
    pub fn new(
        machines: &'a [Machine],
        kinds: &[usize],
        shapes: &'a Shapes,
        door: Door,
        cpu: CpuRequests,
    ) -> Result<Self> {
        Ok(Self::of(States::new(machines, shapes, door)?, kinds, cpu))
    }

    /// Starts with all GPUs free, on these states.
    pub fn of(mut states: States<'a>, kinds: &[usize], cpu: CpuRequests) -> Self {
        let machines = states.machines;
        let idle =
            |kind: &usize| states.number(*kind, machines.get(*kind).map(|machine| machine.whole).unwrap_or_default());
        let nodes = kinds.iter().map(idle).collect();
        Self { states, nodes, cpu, start: 0, fit: Vec::new() }
    }

    pub fn states(&self) -> &States<'a> {
        &self.states
    }

    /// The number of each node's state.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// The node's present answer to a pod of this shape.
    pub fn answer(&mut self, shape: usize, node: usize) -> Result<Answer> {
        let state = self.nodes.get(node).copied().ok_or_else(|| anyhow!("no node {node}"))?;
        self.states.answer(shape, state)
    }

    /// The placement of a pod of this shape, or `None` if the pod has to wait. Its GPUs stay free until
    /// [`Self::change`].
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
        let scores: Vec<i64> = self.fit.iter().map(|(_, answer, by_cpu)| total(answer.score, most, *by_cpu)).collect();
        let best = top(&scores).and_then(|at| self.fit.get(at)).map(|(node, answer, _)| (*node, *answer));
        let placed = |(node, Answer { set, score, claim_bytes, .. }): (usize, Answer)| {
            Some(Placed { node, set: set?, score, steps, claim_bytes })
        };
        Ok(best.and_then(placed))
    }

    pub fn change(&mut self, node: usize, free: impl FnOnce(GpuSet) -> GpuSet) -> Result<()> {
        let number = self.nodes.get_mut(node).ok_or_else(|| anyhow!("no node {node}"))?;
        let (machine, free) = match self.states.state(*number) {
            Some(state) => (state.machine, free(state.free)),
            None => return Err(anyhow!("node {node} has no state")),
        };
        *number = self.states.number(machine, free);
        Ok(())
    }

    /// The score of LeastAllocated (NodeResourcesFit): the free percentage of CPU and memory, equal to that of GPUs, or
    /// 0 without CPU requests.
    fn least_allocated(&self, state: &State, answer: Answer) -> i64 {
        let whole = self.states.machines.get(state.machine).map_or(0, |machine| machine.whole.len());
        let free = state.free.len().saturating_sub(answer.set.map_or(0, GpuSet::len));
        match self.cpu {
            CpuRequests::Share => i64::try_from(free * 100 / whole.max(1)).unwrap_or(0),
            CpuRequests::None => 0,
        }
    }
}

/// The number of fitting nodes that ends the search (`numFeasibleNodesToFind` with the default of
/// `percentageOfNodesToScore`).
fn enough(nodes: usize) -> usize {
    let percent = 50_usize.saturating_sub(nodes / 125).max(5);
    if nodes < MIN_NODES { nodes } else { (nodes * percent / 100).max(MIN_NODES) }
}

/// The place of the score that the scheduler takes. It does not draw among equal scores: without extenders it takes the
/// one that is on top after Go's `container/heap` has made a heap of the list (kubernetes#141024).
fn top(scores: &[i64]) -> Option<usize> {
    let mut heap: Vec<(i64, usize)> = scores.iter().copied().zip(0..).collect();
    let score = |heap: &[(i64, usize)], at: usize| heap.get(at).map(|(score, _)| *score);
    for start in (0..heap.len() / 2).rev() {
        let mut at = start;
        // The score moves down while a child is higher. Of equal children the left one moves up.
        while let Some(left) = score(&heap, 2 * at + 1) {
            let child = if score(&heap, 2 * at + 2) > Some(left) { 2 * at + 2 } else { 2 * at + 1 };
            if score(&heap, child) <= score(&heap, at) {
                break;
            }
            heap.swap(at, child);
            at = child;
        }
    }
    heap.first().map(|(_, at)| *at)
}

/// The sum of a node's scores: the score of its alternative, relative to the highest of all fitting nodes
/// (`DefaultNormalizeScore`), and the score by CPU.
pub(super) fn total(score: i64, most: i64, by_cpu: i64) -> i64 {
    (score * MAX_SCORE).checked_div(most).unwrap_or(score) * ALTERNATIVES_WEIGHT + by_cpu
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_nodes_is_kube_schedulers_number() {
        // schedule_one_test.go, Test_numFeasibleNodesToFind, with the default percentage.
        assert_eq!([10, 100, 1000, 6000, 10_000].map(enough), [10, 100, 420, 300, 500]);
    }

    #[test]
    fn tie_goes_to_the_top_of_gos_heap() {
        // heap.Init of Go 1.26 with these scores in this order, and the place that its top element had.
        for (scores, first) in [
            (&[][..], None),
            (&[5, 5, 5], Some(0)),
            (&[1, 5, 5], Some(1)),
            (&[1, 2, 2, 5, 5], Some(3)),
            (&[0, 1, 2, 3, 5, 5, 5], Some(4)),
            (&[3, 1, 5, 5, 5, 0, 5, 5], Some(3)),
            (&[1, 1, 1, 1, 1, 5, 1, 1, 5, 5], Some(8)),
            (&[2, 1, 5, 1, 1, 1, 5, 1, 1, 5, 5, 5, 1, 5], Some(9)),
        ] {
            assert_eq!(top(scores), first, "{scores:?}");
        }
    }
}
