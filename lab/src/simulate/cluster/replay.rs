//! The replay: jobs come, wait, run and end. Time is whole seconds.
//!
//! A job that fits nowhere waits. Waiting jobs are tried again when GPUs become free, in the order of their arrivals,
//! and do not hold up the jobs behind them: kube-scheduler puts a pod that does not fit aside.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::simulate::{Job, best_set, collective};
use anyhow::Result;
use linkwise_core::allocation::GpuSet;

use super::figures::{Figures, Tally};
use super::scheduler::{Placed, Scheduler};

/// An event of the replay, with its second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A job starts; `best` is the best collective that any node offers for its size at this moment.
    Started { at: u64, job: usize, node: usize, set: GpuSet, best: Option<u64> },
    /// A job ends.
    Ended { at: u64, job: usize, node: usize, set: GpuSet },
}

/// A running job: the second of its end, its number, its node, and its GPUs.
type Running = Reverse<(u64, usize, usize, GpuSet)>;

/// A replay of jobs, which are in the order of their arrivals.
pub(super) struct Replay<'a, 'b> {
    scheduler: Scheduler<'a>,
    jobs: &'b [Job],
    /// The index of the first counted job.
    counted: usize,
    running: BinaryHeap<Running>,
    /// The waiting jobs by size.
    waiting: Vec<VecDeque<usize>>,
    /// The number of nodes that offer each best collective, by size.
    offers: Vec<BTreeMap<u64, usize>>,
    /// The best collective of the idle machine, by machine and size.
    idle: Vec<Vec<Option<u64>>>,
    tally: Tally,
    watch: &'b mut dyn FnMut(&Event),
}

impl<'a, 'b> Replay<'a, 'b> {
    /// Starts with empty nodes. `watch` sees each event.
    pub fn new(scheduler: Scheduler<'a>, jobs: &'b [Job], counted: usize, watch: &'b mut dyn FnMut(&Event)) -> Self {
        let states = scheduler.states();
        let sizes = states.sizes.len();
        let mut offers = vec![BTreeMap::new(); sizes];
        let arrival = |at: usize| jobs.get(at).map(|job| job.arrival);
        let window = (arrival(counted).unwrap_or(0), arrival(jobs.len().saturating_sub(1)).unwrap_or(0));
        let mut tally = Tally::new(window);
        for number in scheduler.nodes() {
            let Some(state) = states.state(*number) else { continue };
            count(&mut offers, &state.best, true);
            tally.gpus(state.free.len(), states.free_for_fours(*number), state.stuck, true);
        }
        tally.total = tally.free;
        let best = |machine: &super::machines::Machine| {
            states.sizes.iter().map(|size| best_set(&machine.tables, machine.whole, *size).1).collect()
        };
        let idle = states.machines.iter().map(best).collect();
        let waiting = vec![VecDeque::new(); sizes];
        Self { scheduler, jobs, counted, running: BinaryHeap::new(), waiting, offers, idle, tally, watch }
    }

    /// Runs all jobs to their end.
    pub fn run(mut self) -> Result<Figures> {
        for (number, job) in self.jobs.iter().enumerate() {
            self.end_until(job.arrival)?;
            self.tally.advance(job.arrival);
            let Some(size) = self.scheduler.states().sizes.iter().position(|size| *size == job.size) else { continue };
            // If another job of this size waits, no node fits.
            let nobody_waits = self.waiting.get(size).is_some_and(VecDeque::is_empty);
            if !(nobody_waits && self.start(number, size)?)
                && let Some(queue) = self.waiting.get_mut(size)
            {
                queue.push_back(number);
            }
        }
        self.end_until(u64::MAX)?;
        let left = self.waiting.iter().map(VecDeque::len).sum();
        Ok(self.tally.figures(left))
    }

    /// Ends the jobs that end until `then`, and starts waiting jobs in their places.
    fn end_until(&mut self, then: u64) -> Result<()> {
        while let Some(Reverse((end, job, node, set))) = self.running.peek().copied().filter(|next| next.0.0 <= then) {
            self.running.pop();
            self.tally.advance(end);
            self.change(node, |free| free.union(set))?;
            (self.watch)(&Event::Ended { at: end, job, node, set });
            self.serve(node)?;
        }
        Ok(())
    }

    /// Starts waiting jobs on a node where GPUs became free: they fit no other node.
    fn serve(&mut self, node: usize) -> Result<()> {
        loop {
            let mut first: Option<(usize, usize)> = None;
            for (size, queue) in self.waiting.iter().enumerate() {
                if let Some(job) = queue.front().copied()
                    && first.is_none_or(|(first, _)| job < first)
                    && self.scheduler.fits(size, node)?
                {
                    first = Some((job, size));
                }
            }
            let Some((job, size)) = first else { return Ok(()) };
            if !self.start(job, size)? {
                return Ok(());
            }
            self.waiting.get_mut(size).and_then(VecDeque::pop_front);
        }
    }

    /// Starts a job if it fits anywhere.
    fn start(&mut self, number: usize, size: usize) -> Result<bool> {
        if self.offers.get(size).is_none_or(BTreeMap::is_empty) {
            return Ok(false);
        }
        let (Some(job), Some(placed)) = (self.jobs.get(number), self.scheduler.place(size)?) else { return Ok(false) };
        let Placed { node, set, .. } = placed;
        let best = self.offers.get(size).and_then(|offers| offers.last_key_value()).map(|(best, _)| *best);
        if number >= self.counted {
            let states = self.scheduler.states();
            let state = self.scheduler.nodes().get(node).and_then(|number| states.state(*number));
            let of_node = state.and_then(|state| state.best.get(size).copied().flatten());
            let idle = state.and_then(|state| self.idle.get(state.machine)?.get(size).copied().flatten());
            let machine = state.and_then(|state| states.machines.get(state.machine));
            let got = machine.and_then(|machine| collective(&machine.tables, set)).filter(|_| job.size > 1);
            self.tally.started(self.tally.now.saturating_sub(job.arrival), &placed, got, [best, of_node, idle]);
        }
        self.change(node, |free| free.without(set))?;
        self.running.push(Reverse((self.tally.now.saturating_add(job.duration), number, node, set)));
        (self.watch)(&Event::Started { at: self.tally.now, job: number, node, set, best });
        Ok(true)
    }

    /// Gives GPUs of a node to a job, or takes them back.
    fn change(&mut self, node: usize, free: impl FnOnce(GpuSet) -> GpuSet) -> Result<()> {
        self.count(node, false);
        self.scheduler.change(node, free)?;
        self.count(node, true);
        Ok(())
    }

    /// Adds the free GPUs of a node to the sums, or subtracts them.
    fn count(&mut self, node: usize, adds: bool) {
        let states = self.scheduler.states();
        let Some(number) = self.scheduler.nodes().get(node) else { return };
        let Some(state) = states.state(*number) else { return };
        count(&mut self.offers, &state.best, adds);
        self.tally.gpus(state.free.len(), states.free_for_fours(*number), state.stuck, adds);
    }
}

/// Adds the offers of a node, or subtracts them.
fn count(offers: &mut [BTreeMap<u64, usize>], best: &[Option<u64>], adds: bool) {
    for (offers, best) in offers.iter_mut().zip(best) {
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
}
