//! Compares the simulated cluster with a model that knows all nodes, with counted events and with a real scheduler.

use std::collections::{BTreeMap, BTreeSet};

use crate::simulate::{CpuRequests, Door};
use crate::simulate::{Draws, Job};
use linkwise_core::allocation::GpuSet;
use linkwise_scheduler_box::{Cluster, Failure};
use oracle::{Oracle, Set, subsets};
use serde_json::Value;

use super::figures::Figures;
use super::jobs::generate;
use super::machines::Machine;
use super::replay::{Event, Replay};
use super::scheduler::Scheduler;
use super::shapes::{Shape, Shapes};
use super::states::{States, allocation, claim, classes, set_of};

mod recorded;

#[allow(dead_code, clippy::cast_possible_truncation, reason = "the oracle is shared with other tests")]
#[path = "../../../../tests/oracle/mod.rs"]
mod oracle;

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

fn shapes_of_one_pod(sizes: &[usize]) -> Shapes {
    let jobs: Vec<Job> = sizes.iter().map(|size| Job { size: *size, pods: 1, duration: 0, arrival: 0 }).collect();
    Shapes::of(&[], &jobs, Door::Plugin).unwrap()
}

fn shape(gpus: usize) -> Shape {
    Shape { gpus, pods: 1, rails: None }
}

fn machines(names: &[&str]) -> Vec<Machine> {
    names.iter().map(|name| Machine::load(name).unwrap()).collect()
}

fn bits(set: GpuSet) -> Set {
    Set::try_from(set.0).unwrap()
}

/// All nodes in one model of the allocator, as kube-scheduler knows them.
struct WholeModel<'a> {
    cluster: Cluster,
    names: Vec<String>,
    machines: Vec<&'a Machine>,
    free: Vec<GpuSet>,
}

impl<'a> WholeModel<'a> {
    fn new(machines: &'a [Machine], kinds: &[usize]) -> Self {
        let names: Vec<String> = (0..kinds.len()).map(|node| format!("node-{node:05}")).collect();
        let machines: Vec<&Machine> = kinds.iter().map(|kind| &machines[*kind]).collect();
        let slices: Vec<Value> = names.iter().zip(&machines).flat_map(|(name, machine)| machine.slices(name)).collect();
        let free = machines.iter().map(|machine| machine.whole).collect();
        Self { cluster: Cluster::new(&slices, &classes(), &[]).unwrap(), names, machines, free }
    }

    /// The set that the claim gets on each node, with the set's score, and the allocator's steps there.
    fn answers(&self, claim: &Value) -> Vec<(Option<(GpuSet, i64)>, u64)> {
        let answer =
            |(name, machine): (&String, &&Machine)| match self.cluster.allocate(name, std::slice::from_ref(claim)) {
                Ok(placed) => (Some((set_of(machine, &placed.allocations[0]).unwrap(), placed.score)), placed.steps),
                Err(Failure::Refused(why)) => (None, why[0].steps),
                Err(other) => panic!("{other}"),
            };
        self.names.iter().zip(&self.machines).map(answer).collect()
    }

    fn change(&mut self, node: usize, set: GpuSet, takes: bool) {
        let devices = allocation(&self.names[node], self.machines[node].devices_of(set));
        if takes {
            assert_eq!(set.without(self.free[node]), GpuSet::default(), "a GPU is given twice");
            self.cluster.occupy(&devices).unwrap();
            self.free[node] = self.free[node].without(set);
        } else {
            self.cluster.release(&devices).unwrap();
            self.free[node] = self.free[node].union(set);
        }
    }
}

/// Lets random claims come and go on three nodes, and compares the simulated scheduler with the model at each step.
fn compare_with_model(machines: &[Machine], kinds: &[usize], door: Door, cpu: CpuRequests, seed: u64) {
    let shapes = shapes_of_one_pod(&SIZES);
    let mut scheduler = Scheduler::new(machines, kinds, &shapes, door, cpu).unwrap();
    let mut whole = WholeModel::new(machines, kinds);
    let claims = SIZES.map(|size| claim(machines, door, shape(size)).unwrap().unwrap());
    let (mut draws, mut held, mut waits) = (Draws::new(seed), Vec::new(), 0);
    for _ in 0..60 {
        if draws.below(5) < 2 && !held.is_empty() {
            let (node, set) = held.swap_remove(usize::try_from(draws.below(held.len() as u64)).unwrap());
            scheduler.change(node, |free| free.union(set)).unwrap();
            whole.change(node, set, false);
            continue;
        }
        let index = usize::try_from(draws.below(SIZES.len() as u64)).unwrap();
        let claim = claims[index].clone();
        let answers = whole.answers(&claim);
        let names: Vec<&str> = whole.names.iter().map(String::as_str).collect();
        let scheduled = whole.cluster.schedule(&names, &[claim]);
        let Some(placed) = scheduler.place(index).unwrap() else {
            assert!(matches!(scheduled, Err(Failure::Refused(_))), "{scheduled:?}");
            waits += 1;
            continue;
        };
        let scheduled = scheduled.unwrap();
        let (set, score) = answers[placed.node].0.unwrap();
        assert_eq!(placed.set, set);
        assert_eq!(placed.steps, answers.iter().map(|(_, steps)| steps).sum::<u64>());
        // kube-scheduler adds the score of the alternative, relative to the best node's, and the CPU that the pod would
        // leave free.
        let total = |node: usize, score: i64| {
            let (free, all) = (whole.free[node].len() - SIZES[index], whole.machines[node].whole.len());
            let by_cpu = if cpu == CpuRequests::Share { i64::try_from(100 * free / all).unwrap() } else { 0 };
            by_cpu + if scheduled.score == 0 { 0 } else { 2 * (100 * score / scheduled.score) }
        };
        let totals = answers.iter().enumerate().filter_map(|(node, (got, _))| Some(total(node, (*got)?.1)));
        assert_eq!(total(placed.node, score), totals.max().unwrap());
        if cpu == CpuRequests::None {
            assert_eq!(score, scheduled.score, "the model prefers {}", scheduled.node);
        }
        scheduler.change(placed.node, |free| free.without(placed.set)).unwrap();
        whole.change(placed.node, placed.set, true);
        held.push((placed.node, placed.set));
    }
    assert!(waits > 0, "no claim had to wait");
}

#[test]
fn placement_is_that_of_the_whole_model() {
    let kinds = machines(&["dgx1-v100", "pcie-8x-pix-pairs", "dgx-h100"]);
    for door in [Door::DraSingles, Door::DraGroups, Door::DraExact] {
        for (nodes, cpu, seed) in
            [([0, 0, 0], CpuRequests::None, 1), ([0, 1, 2], CpuRequests::None, 2), ([0, 1, 0], CpuRequests::Share, 3)]
        {
            compare_with_model(&kinds, &nodes, door, cpu, seed);
        }
    }
}

#[test]
fn stuck_gpus_are_those_in_no_best_four() {
    /// The greatest number of sets of four of these GPUs that have the wanted collective and share no GPU.
    fn most_fours(oracle: &Oracle<'_>, free: Set, wanted: u64, known: &mut BTreeMap<Set, u32>) -> u32 {
        if let Some(known) = known.get(&free) {
            return *known;
        }
        let fours = subsets(free).filter(|set| set.count_ones() == 4 && oracle.collective(*set) == wanted);
        let found = fours.map(|four| 1 + most_fours(oracle, free & !four, wanted, known)).max().unwrap_or(0);
        known.insert(free, found);
        found
    }
    let machines = machines(&["dgx1-v100", "pcie-8x-pix-pairs", "nvlink-bridge-pairs", "dgx-h100", "gb200-nvl72-node"]);
    for (kind, machine) in machines.iter().enumerate() {
        let shapes = shapes_of_one_pod(&[1]);
        let mut states = States::new(&machines, &shapes, Door::Plugin).unwrap();
        let (oracle, all) = (Oracle::new(machine.tables.topology()), bits(machine.whole));
        let fours = subsets(all).filter(|set| set.count_ones() == 4);
        let best = fours.map(|set| oracle.collective(set)).max().unwrap();
        let mut known = BTreeMap::new();
        for free in subsets(all) {
            let number = states.number(kind, GpuSet(u64::from(free)));
            let stuck = free.count_ones() - 4 * most_fours(&oracle, free, best, &mut known);
            assert_eq!(states.state(number).unwrap().stuck, stuck as usize, "{} {free:b}", machine.name);
        }
    }
}

fn replay(machines: &[Machine], kinds: &[usize], jobs: &[Job], door: Door) -> (Figures, Vec<Event>) {
    let mut events = Vec::new();
    let shapes = Shapes::of(machines, jobs, door).unwrap();
    let scheduler = Scheduler::new(machines, kinds, &shapes, door, CpuRequests::Share).unwrap();
    let mut watch = |event: &Event| events.push(*event);
    let figures = Replay::new(scheduler, jobs, 0, &mut watch).run().unwrap();
    (figures, events)
}

#[test]
fn replay_agrees_with_count_of_its_events() {
    let machines = machines(&["dgx1-v100", "pcie-8x-pix-pairs"]);
    let oracles: Vec<Oracle<'_>> = machines.iter().map(|machine| Oracle::new(machine.tables.topology())).collect();
    let kinds = [0, 1, 0];
    for door in [Door::Plugin, Door::DraSingles, Door::DraGroups] {
        let jobs = generate(300, 24, 8, 950, &mut Draws::new(5));
        let (figures, events) = replay(&machines, &kinds, &jobs, door);
        let mut free: Vec<Set> = kinds.iter().map(|kind| bits(machines[*kind].whole)).collect();
        let (mut started, mut ended) = (BTreeMap::new(), BTreeSet::new());
        let (mut several, mut bests, mut share, mut now) = (0, 0, 0, 0);
        for event in events {
            let (Event::Started { at, .. } | Event::Ended { at, .. }) = event;
            if at > now {
                // No waiting job fits a node.
                let most = free.iter().map(|free| free.count_ones() as usize).max().unwrap();
                let mut waiting = jobs.iter().enumerate().filter(|(job, _)| !started.contains_key(job));
                assert!(waiting.all(|(_, job)| job.arrival > now || job.size > most));
                now = at;
            }
            match event {
                Event::Started { job, node, set, best, .. } => {
                    let set = bits(set);
                    assert_eq!((set & !free[node], set.count_ones() as usize), (0, jobs[job].size), "job {job}");
                    let offered = kinds.iter().zip(&free).flat_map(|(kind, free)| {
                        let sets = subsets(*free).filter(|other| other.count_ones() == set.count_ones());
                        sets.map(|set| oracles[*kind].collective(set))
                    });
                    let (offered, got) = (offered.max().unwrap(), oracles[kinds[node]].collective(set));
                    if jobs[job].size > 1 {
                        assert_eq!(best, Some(offered));
                        several += 1;
                        bests += u64::from(got == offered);
                        share += got * 1_000_000 / offered;
                    }
                    free[node] &= !set;
                    assert!(at >= jobs[job].arrival && started.insert(job, at).is_none());
                }
                Event::Ended { job, node, set, .. } => {
                    assert_eq!(at, started[&job] + jobs[job].duration);
                    assert!(free[node] & bits(set) == 0 && ended.insert(job));
                    free[node] |= bits(set);
                }
            }
        }
        assert_eq!((started.len(), ended.len(), figures.never_started), (300, 300, 0));
        let mut waits: Vec<u64> = started.iter().map(|(job, at)| at - jobs[*job].arrival).collect();
        waits.sort_unstable();
        assert!(waits[299] > 0, "no job waited");
        assert_eq!(
            (figures.mean_wait_seconds, figures.p99_wait_seconds),
            (waits.iter().sum::<u64>() / 300, waits[296])
        );
        assert_eq!(figures.waited, waits.iter().filter(|wait| **wait > 0).count() as u64 * 1000 / 300);
        let shares = (figures.collective_of_cluster, figures.best_of_cluster);
        assert_eq!((figures.several, shares), (several, (Some(share / several / 1000), Some(bests * 1000 / several))));
        // Jobs of one size start in the order of their arrivals.
        for size in SIZES {
            assert!(started.iter().filter(|(job, _)| jobs[**job].size == size).is_sorted_by_key(|(_, at)| *at));
        }
        // linkwise's own choice takes the best set of a node.
        assert!(door != Door::Plugin || figures.collective_of_node == Some(1000), "{door:?}: {figures:?}");
    }
}

/// Replays jobs on nodes of one machine. Returns the figures, and the collectives of each job's pods.
fn replay_on(machine: &str, nodes: usize, jobs: &[Job], door: Door) -> (Figures, BTreeMap<usize, Vec<u64>>) {
    let machines = machines(&[machine]);
    let topology = machines[0].tables.topology();
    let oracle = Oracle::new(topology);
    let (figures, events) = replay(&machines, &vec![0; nodes], jobs, door);
    let mut free = vec![bits(machines[0].whole); nodes];
    let mut pods: BTreeMap<usize, Vec<(u64, Set)>> = BTreeMap::new();
    for event in events {
        match event {
            Event::Started { at, job, node, set, .. } => {
                assert_eq!(bits(set) & !free[node], 0, "a GPU is given twice");
                free[node] &= !bits(set);
                pods.entry(job).or_default().push((at, bits(set)));
            }
            Event::Ended { node, set, .. } => free[node] |= bits(set),
        }
    }
    let (mut pairs, mut equal) = (0, 0);
    for (job, pods) in &pods {
        assert_eq!(pods.len(), jobs[*job].pods);
        let mut rails = Vec::new();
        for (at, set) in pods {
            assert_eq!((*at, set.count_ones() as usize), (pods[0].0, jobs[*job].size), "job {job}");
            let gpus = topology.gpus().iter().enumerate().filter(|(place, _)| set >> place & 1 == 1);
            let mut own: Vec<u32> = gpus.map(|(_, gpu)| gpu.rail.unwrap()).collect();
            own.sort_unstable();
            pairs += rails.len();
            equal += rails.iter().filter(|other| **other == own).count();
            rails.push(own);
        }
    }
    assert_eq!(figures.equal_rails, (equal * 1000).checked_div(pairs).map(|mille| mille as u64));
    let collectives = |(job, pods): (usize, Vec<(u64, Set)>)| {
        (job, pods.iter().map(|(_, set)| oracle.collective(*set)).collect::<Vec<_>>())
    };
    (figures, pods.into_iter().map(collectives).collect())
}

#[test]
fn dra_rails_starts_pods_of_a_job_on_equal_rails() {
    let mut draws = Draws::new(11);
    let mut number = |most: u64| usize::try_from(1 + draws.below(most)).unwrap();
    let mut jobs: Vec<Job> = (0..120)
        .map(|at| Job {
            size: [2, 3, 4, 8][number(4) - 1],
            pods: number(4),
            duration: 50 * number(9) as u64,
            arrival: 40 * at,
        })
        .collect();
    // A DGX-1 has four rails of two GPUs each. Five GPUs do not fill whole rails, and outnumber the rails.
    jobs.push(Job { size: 5, pods: 2, duration: 9, arrival: 5000 });
    for machine in ["dgx-h100", "dgx1-v100", "dgx-a100"] {
        let (plugin, preferred) = replay_on(machine, 5, &jobs, Door::Plugin);
        let (fixed, on_rails) = replay_on(machine, 5, &jobs, Door::DraRails);
        if machine != "dgx1-v100" {
            // Behind NVSwitches fixed rails cost no job any collective.
            assert!(preferred.iter().all(|(job, pods)| on_rails[job].iter().min() >= pods.iter().min()), "{machine}");
        }
        assert_eq!((plugin.jobs, plugin.never_started, fixed.jobs, fixed.never_started), (121, 0, 121, 0));
        assert!(plugin.equal_rails < Some(1000) && fixed.equal_rails == Some(1000), "{machine}: {plugin:?} {fixed:?}");
    }
}

#[test]
fn figures_count_what_happens_over_time() {
    // One node of 4 GPUs: two are busy for half of the 100 s in which jobs arrive, and a job of four waits for them.
    let machines = machines(&["gb200-nvl72-node"]);
    let job = |size, duration, arrival| Job { size, pods: 1, duration, arrival };
    let jobs = [job(2, 50, 0), job(4, 30, 10), job(1, 5, 100)];
    let (figures, _) = replay(&machines, &[0], &jobs, Door::DraGroups);
    assert_eq!((figures.jobs, figures.several, figures.waited), (3, 2, 333));
    assert_eq!((figures.mean_wait_seconds, figures.p99_wait_seconds), (40 / 3, 40));
    // Of 400 GPU-seconds 2 GPUs are busy for 50 s, 4 for 30 s, 0 for 20 s. For 50 s the other 2 are in no set of four.
    assert_eq!((figures.busy, figures.fragmentation), (Some((100 + 120) * 1000 / 400), Some(100 * 1000 / 180)));
    // Three claims make seven requests each, in 100 s.
    assert_eq!(figures.writes_per_hour, Some(3 * 7 * 36));
    let (figures, _) = replay(&machines, &[0], &jobs, Door::Plugin);
    assert_eq!((figures.writes_per_hour, figures.steps_mean, figures.claim_bytes), (Some(0), 0, 0));
}
