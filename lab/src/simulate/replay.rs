//! The replay of jobs on one machine, first come first served. It is a function of its arguments. Time is in whole
//! seconds.
//!
//! Owns the queue and the figures. A policy chooses the GPUs, and linkwise's allocator rates the choices of every
//! policy.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use serde::Serialize;

use super::draws::Draws;
use super::options::SimulatePolicy;
use super::trace::Job;
use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, GpuSet, PreferredAllocation, Values,
    preferred_allocation,
};

/// The classes of a set's worst pair, the best class first: those of a topology matrix, but all NVLinks are one class.
pub(super) const CLASSES: [&str; 6] = ["NVLink", "PIX", "PXB", "PHB", "NODE", "SYS"];

/// The results of a trace under one policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Figures {
    /// Jobs that ran.
    pub jobs: u64,
    /// The number of jobs left out, because they want more GPUs than the machine has.
    pub skipped: u64,
    /// The number of jobs of several GPUs. The next five fields are about these.
    pub several: u64,
    /// The mean ratio of the collective to the idle machine's best for that size, in millionths. Each job counts once.
    /// `None` without such jobs, or if the allocator has no values for the machine.
    pub collective_by_count: Option<u64>,
    /// The same mean, in which each job counts by its GPU-seconds.
    pub collective_by_gpu_hours: Option<u64>,
    /// Jobs by the class of their worst pair.
    pub link_classes: BTreeMap<&'static str, u64>,
    /// Jobs by the number of NUMA nodes of their GPUs.
    pub numa_nodes: BTreeMap<usize, u64>,
    /// The number of jobs with a GPU whose NUMA node is unknown.
    pub numa_unknown: u64,
    /// The mean wait of the jobs that ran, in seconds, rounded down.
    pub mean_wait_seconds: u64,
    /// The longest time in the queue, in seconds.
    pub max_wait_seconds: u64,
    /// The end of the last job, in seconds.
    pub end_seconds: u64,
}

/// Runs the jobs, which are in the order of their arrivals. The first job in the queue blocks those behind it. The seed
/// is for the random policy.
pub(super) fn replay(tables: &AllocationTables, jobs: &[Job], (policy, seed): (SimulatePolicy, u64)) -> Figures {
    let all: GpuSet = (0..tables.topology().gpus().len()).collect();
    let mut figures = Figures { link_classes: CLASSES.map(|class| (class, 0)).into(), ..Figures::default() };
    let mut random = Draws::new(seed);
    let mut idle = BTreeMap::new();
    let mut free = all;
    let mut running: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    let (mut now, mut waited) = (0, 0_u128);
    let (mut by_count, mut by_time) = (Mean::default(), Mean::default());
    for job in jobs {
        if job.size > all.len() {
            figures.skipped += 1;
            continue;
        }
        now = job.arrival.max(now);
        while let Some(Reverse((end, gpus))) = running.peek().copied()
            && (end <= now || free.len() < job.size)
        {
            running.pop();
            now = end.max(now);
            free = free.union(GpuSet(gpus));
        }
        let set = match policy {
            SimulatePolicy::BestEffort => best_set(tables, free, job.size).0,
            SimulatePolicy::FirstFit => free.places().take(job.size).collect(),
            SimulatePolicy::Random => random.subset(free, job.size),
        };
        free = free.without(set);
        let end = now.saturating_add(job.duration);
        running.push(Reverse((end, set.0)));
        let wait = now - job.arrival;
        waited += u128::from(wait);
        figures.jobs += 1;
        figures.max_wait_seconds = figures.max_wait_seconds.max(wait);
        figures.end_seconds = figures.end_seconds.max(end);
        if job.size > 1 {
            figures.count(tables, set);
            let best = *idle.entry(job.size).or_insert_with(|| best_set(tables, all, job.size).1);
            if let (Some(best), Some(ours)) = (best, collective(tables, set)) {
                let share = u128::from(ours) * 1_000_000 / u128::from(best.max(1));
                // If the best is 0, the job got all that there is.
                let share = if best == 0 { 1_000_000 } else { share };
                by_count.add(share, 1);
                by_time.add(share, u128::from(job.duration) * job.size as u128);
            }
        }
    }
    figures.collective_by_count = by_count.value();
    figures.collective_by_gpu_hours = by_time.value();
    figures.mean_wait_seconds = whole(waited / u128::from(figures.jobs.max(1)));
    figures
}

impl Figures {
    /// Counts a set of several GPUs by its worst pair and by its NUMA nodes.
    fn count(&mut self, tables: &AllocationTables, set: GpuSet) {
        let topology = tables.topology();
        let pairs = set.places().flat_map(|a| set.places().filter(move |b| a < *b).map(move |b| (a, b)));
        let class = |(a, b)| if topology.nvlink(a, b) > 0 { CLASSES[0] } else { topology.rank(a, b).symbol() };
        let worst = pairs.map(class).max_by_key(|class| CLASSES.iter().position(|known| known == class));
        self.several += 1;
        *self.link_classes.entry(worst.unwrap_or(CLASSES[0])).or_default() += 1;
        let nodes: Option<BTreeSet<_>> =
            set.places().filter_map(|place| topology.gpus().get(place)).map(|gpu| gpu.numa).collect();
        match nodes {
            Some(nodes) => *self.numa_nodes.entry(nodes.len()).or_default() += 1,
            None => self.numa_unknown += 1,
        }
    }
}

/// The best set of these GPUs and its collective, or an empty set if there are too few GPUs.
pub fn best_set(tables: &AllocationTables, free: GpuSet, size: usize) -> (GpuSet, Option<u64>) {
    if free.len() < size {
        return (GpuSet::default(), None);
    }
    let (set, values) = ask(tables, free, GpuSet::default(), size);
    (set, values.map(|values| values.collective))
}

/// The ring bandwidth of a set by NCCL's model, in MB/s.
pub fn collective(tables: &AllocationTables, set: GpuSet) -> Option<u64> {
    values(tables, GpuSet::default(), set).map(|values| values.collective)
}

/// The values of a set while these GPUs are free.
pub fn values(tables: &AllocationTables, free: GpuSet, set: GpuSet) -> Option<Values> {
    ask(tables, free, set, set.len()).1
}

/// The allocator's set, and its values if the tables have them.
fn ask(tables: &AllocationTables, free: GpuSet, must: GpuSet, size: usize) -> (GpuSet, Option<Values>) {
    let gpus = tables.topology().gpus();
    let ids = |set: GpuSet| set.places().filter_map(|place| gpus.get(place)).map(|gpu| DeviceId::from(&gpu.uuid));
    let request = AllocationRequest { available: ids(free).collect(), must_include: ids(must).collect(), size };
    let (PreferredAllocation { devices }, report) =
        preferred_allocation(tables, &request, AllocationPolicy::BestEffort);
    let place = |id: &DeviceId| gpus.iter().position(|gpu| gpu.uuid.as_str() == id.as_str());
    (devices.iter().filter_map(place).collect(), report.values)
}

/// A weighted mean of whole numbers, rounded down.
#[derive(Default)]
struct Mean {
    sum: u128,
    weight: u128,
}

impl Mean {
    fn add(&mut self, value: u128, weight: u128) {
        self.sum = self.sum.saturating_add(value.saturating_mul(weight));
        self.weight = self.weight.saturating_add(weight);
    }

    fn value(&self) -> Option<u64> {
        self.sum.checked_div(self.weight).map(whole)
    }
}

pub(super) fn whole(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use linkwise_core::topology::NodeTopology;
    use linkwise_host::machines;

    fn run(machine: &str, jobs: &[(usize, u64, u64)], chooser: (SimulatePolicy, u64)) -> Figures {
        let observed = machines::load(machine).unwrap().observed;
        let tables = AllocationTables::new(Arc::new(NodeTopology::assemble(&observed).0));
        let jobs: Vec<Job> =
            jobs.iter().map(|&(size, duration, arrival)| Job { size, pods: 1, duration, arrival }).collect();
        replay(&tables, &jobs, chooser)
    }

    const BEST: (SimulatePolicy, u64) = (SimulatePolicy::BestEffort, 0);
    const FIRST_FIT: (SimulatePolicy, u64) = (SimulatePolicy::FirstFit, 0);

    #[test]
    fn head_of_queue_blocks_later_jobs() {
        // The machine has 8 GPUs. The job of 8 runs until 100, then both jobs of 4 run. At 110 one of them ends, and
        // the job of 2 starts. The job of 16 never starts.
        let jobs = [(8, 100, 0), (4, 50, 0), (4, 10, 0), (2, 5, 0), (16, 1, 0), (1, 0, 500)];
        for chooser in [BEST, FIRST_FIT, (SimulatePolicy::Random, 3)] {
            let figures = run("dgx-h100", &jobs, chooser);
            assert_eq!((figures.jobs, figures.skipped, figures.several), (5, 1, 4));
            assert_eq!((figures.mean_wait_seconds, figures.max_wait_seconds), ((100 + 100 + 110) / 5, 110));
            assert_eq!(figures.end_seconds, 500);
            // Behind NVSwitches every set has the full bandwidth.
            assert_eq!((figures.collective_by_count, figures.link_classes["NVLink"]), (Some(1_000_000), 4));
        }
        // A small job does not overtake a large one that waits.
        let figures = run("dgx-h100", &[(4, 100, 0), (8, 10, 1), (1, 1, 2)], BEST);
        assert_eq!((figures.max_wait_seconds, figures.mean_wait_seconds), (108, (99 + 108) / 3));
    }

    #[test]
    fn collectives_are_relative_to_idle_machine() {
        // First fit takes GPUs 0 and 1 (one NVLink, 20000 of 40000 MB/s), then 2 and 3 (two NVLinks).
        let jobs = [(2, 100, 0), (2, 300, 0), (1, 1000, 0)];
        let figures = run("dgx1-v100", &jobs, FIRST_FIT);
        assert_eq!(figures.collective_by_count, Some(750_000));
        assert_eq!(figures.collective_by_gpu_hours, Some((200 * 500_000 + 600 * 1_000_000) / 800));
        assert_eq!((figures.link_classes["NVLink"], figures.several), (2, 2));
        let figures = run("dgx1-v100", &jobs, BEST);
        assert_eq!((figures.collective_by_count, figures.collective_by_gpu_hours), (Some(1_000_000), Some(1_000_000)));
        // One GPU has no collective; a job without duration has no weight.
        assert_eq!(run("dgx1-v100", &[(1, 9, 0)], BEST).collective_by_count, None);
        let figures = run("dgx1-v100", &[(2, 0, 0)], BEST);
        assert_eq!((figures.collective_by_count, figures.collective_by_gpu_hours), (Some(1_000_000), None));
    }

    #[test]
    fn worst_pair_and_numa_nodes_are_counted() {
        let jobs = [(2, 10, 0), (3, 10, 0), (3, 10, 0)];
        let figures = run("pcie-8x-pix-pairs", &jobs, FIRST_FIT);
        // GPUs 0 and 1 share a switch. GPUs 2, 3 and 4 span both sockets, 5, 6 and 7 do not.
        assert_eq!((figures.link_classes["PIX"], figures.link_classes["SYS"]), (1, 1), "{figures:?}");
        assert_eq!(figures.numa_nodes, BTreeMap::from([(1, 2), (2, 1)]));
    }
}
