//! The replay: jobs arrive, wait, run and end. Time is in whole seconds.
//!
//! A job waits until all its pods fit. Waiting jobs are tried again when GPUs become free, in the order of their
//! arrivals. They do not hold up the jobs behind them, because kube-scheduler puts a pod that does not fit aside.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::simulate::{Job, best_set, collective};
use anyhow::Result;
use linkwise_core::allocation::GpuSet;

use super::figures::{Figures, Started, Tally};
use super::scheduler::{Placed, Scheduler};

/// An event of the replay, with its second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A pod of a job starts. `got` is the collective of its GPUs, if it has several, and `best` the best that any node
    /// offers for its size at this moment. `score` is the score of its claim's alternative.
    Started { at: u64, job: usize, node: usize, set: GpuSet, score: i64, got: Option<u64>, best: Option<u64> },
    /// A pod of a job ends.
    Ended { at: u64, job: usize, node: usize, set: GpuSet },
}

/// A running pod: the second of its end, its job's number, its node, and its GPUs.
type Running = Reverse<(u64, usize, usize, GpuSet)>;

/// A replay of jobs that are in the order of their arrivals.
pub(super) struct Replay<'a, 'b> {
    scheduler: Scheduler<'a>,
    jobs: &'b [Job],
    /// The index of the first job that the figures count.
    counted: usize,
    running: BinaryHeap<Running>,
    /// The waiting jobs by shape.
    waiting: Vec<VecDeque<usize>>,
    /// The number of nodes that offer each best collective, by shape.
    offers: Vec<BTreeMap<u64, usize>>,
    /// The best collective of the idle machine, by machine and shape.
    idle: Vec<Vec<Option<u64>>>,
    tally: Tally,
    watch: &'b mut dyn FnMut(&Event),
}

impl<'a, 'b> Replay<'a, 'b> {
    /// Starts with empty nodes. `watch` sees each event.
    pub fn new(scheduler: Scheduler<'a>, jobs: &'b [Job], counted: usize, watch: &'b mut dyn FnMut(&Event)) -> Self {
        let states = scheduler.states();
        let shapes = &states.shapes.shapes;
        let arrival = |at: usize| jobs.get(at).map(|job| job.arrival);
        let window = (arrival(counted).unwrap_or(0), arrival(jobs.len().saturating_sub(1)).unwrap_or(0));
        let best = |machine: &super::machines::Machine| {
            shapes.iter().map(|shape| best_set(&machine.tables, machine.whole, shape.gpus).1).collect()
        };
        let idle = states.machines.iter().map(best).collect();
        let (waiting, offers) = (vec![VecDeque::new(); shapes.len()], vec![BTreeMap::new(); shapes.len()]);
        let (running, tally) = (BinaryHeap::new(), Tally::new(window));
        let mut replay = Self { scheduler, jobs, counted, running, waiting, offers, idle, tally, watch };
        (0..replay.scheduler.nodes().len()).for_each(|node| replay.count(node, true));
        replay.tally.total = replay.tally.free;
        replay
    }

    pub fn run(mut self) -> Result<Figures> {
        for (number, job) in self.jobs.iter().enumerate() {
            self.end_until(job.arrival)?;
            self.tally.advance(job.arrival);
            let Some(shape) = self.scheduler.states().shapes.position(number, job) else { continue };
            // If another job of this shape waits, this one does not fit either.
            let nobody_waits = self.waiting.get(shape).is_some_and(VecDeque::is_empty);
            if !(nobody_waits && self.start(number, shape)?)
                && let Some(queue) = self.waiting.get_mut(shape)
            {
                queue.push_back(number);
            }
        }
        self.end_until(u64::MAX)?;
        let left = self.waiting.iter().map(VecDeque::len).sum();
        Ok(self.tally.figures(left))
    }

    /// Ends the pods that end until `then`, and starts waiting jobs in their places.
    fn end_until(&mut self, then: u64) -> Result<()> {
        while let Some(Reverse((end, job, node, set))) = self.running.peek().copied()
            && end <= then
        {
            self.running.pop();
            self.tally.advance(end);
            self.change(node, |free| free.union(set))?;
            (self.watch)(&Event::Ended { at: end, job, node, set });
            self.serve(node)?;
        }
        Ok(())
    }

    /// Starts waiting jobs that fit. Tries those of which a pod fits the node with freed GPUs: no other can fit.
    fn serve(&mut self, node: usize) -> Result<()> {
        loop {
            let fronts = self.waiting.iter().enumerate().filter_map(|(shape, queue)| Some((*queue.front()?, shape)));
            let mut first: Vec<(usize, usize)> = fronts.collect();
            first.sort_unstable();
            let mut started = None;
            for (job, shape) in first {
                if self.scheduler.answer(shape, node)?.set.is_some() && self.start(job, shape)? {
                    started = Some(shape);
                    break;
                }
            }
            let Some(shape) = started else { return Ok(()) };
            self.waiting.get_mut(shape).and_then(VecDeque::pop_front);
        }
    }

    /// Starts a job if all its pods fit. Returns true if it started.
    fn start(&mut self, number: usize, shape: usize) -> Result<bool> {
        let Some(job) = self.jobs.get(number).copied() else { return Ok(false) };
        let mut pods: Vec<Started> = Vec::new();
        while pods.len() < job.pods
            && self.offers.get(shape).is_some_and(|offers| !offers.is_empty())
            && let Some(placed) = self.scheduler.place(shape)?
        {
            pods.push(self.started(shape, placed));
            self.change(placed.node, |free| free.without(placed.set))?;
        }
        if pods.len() < job.pods {
            for Placed { node, set, .. } in pods.into_iter().map(|pod| pod.placed) {
                self.change(node, |free| free.union(set))?;
            }
            return Ok(false);
        }
        let at = self.tally.now;
        if number >= self.counted {
            self.tally.started(at.saturating_sub(job.arrival), &pods);
        }
        for Started { placed: Placed { node, set, score, .. }, got, best: [best, ..], .. } in pods {
            self.running.push(Reverse((at.saturating_add(job.duration), number, node, set)));
            (self.watch)(&Event::Started { at, job: number, node, set, score, got, best });
        }
        Ok(true)
    }

    /// The record of a pod that is about to start in this place, which is still free.
    fn started(&self, shape: usize, placed: Placed) -> Started {
        let best = self.offers.get(shape).and_then(|offers| offers.last_key_value()).map(|(best, _)| *best);
        let states = self.scheduler.states();
        let state = self.scheduler.nodes().get(placed.node).and_then(|number| states.state(*number));
        let of_node = state.and_then(|state| state.best.get(shape).copied().flatten());
        let idle = state.and_then(|state| self.idle.get(state.machine)?.get(shape).copied().flatten());
        let machine = state.and_then(|state| states.machines.get(state.machine));
        let got = machine.and_then(|machine| collective(&machine.tables, placed.set)).filter(|_| placed.set.len() > 1);
        let rails = machine.map(|machine| machine.rails(placed.set)).unwrap_or_default();
        Started { placed, rails, got, best: [best, of_node, idle] }
    }

    /// Gives GPUs of a node to a job, or takes them back.
    fn change(&mut self, node: usize, free: impl FnOnce(GpuSet) -> GpuSet) -> Result<()> {
        self.count(node, false);
        self.scheduler.change(node, free)?;
        self.count(node, true);
        Ok(())
    }

    /// Adds the free GPUs and the offers of a node to the sums, or subtracts them.
    fn count(&mut self, node: usize, adds: bool) {
        let states = self.scheduler.states();
        let Some(number) = self.scheduler.nodes().get(node) else { return };
        let Some(state) = states.state(*number) else { return };
        for (offers, best) in self.offers.iter_mut().zip(&state.best) {
            let Some(best) = best else { continue };
            let nodes = offers.entry(*best).or_default();
            if adds {
                *nodes += 1;
            } else if *nodes > 1 {
                *nodes -= 1;
            } else {
                offers.remove(best);
            }
        }
        self.tally.count_free(state.free.len(), states.free_for_fours(*number), state.stuck, adds);
    }
}
