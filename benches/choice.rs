//! The choice: every availability and size of a machine, the worst of them named.
//!
//! Prints a table: machine and size, our time over all availabilities of a machine of up to 8 GPUs (for 16: a
//! sample), and what the tables took to build. It judges nothing: DESIGN section 8 has the budgets. Run it
//! with `cargo bench --bench choice`; a figure is quoted with the machine it was measured on.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends where it cannot go on")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise::allocation::{AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, preferred_allocation};
use linkwise::machines;
use linkwise::topology::NodeTopology;

/// Each request is asked this often and its median counts: the machine is not ours alone.
const ROUNDS: usize = 9;
/// Requests of one size beyond which a machine's availabilities are sampled.
const MOST: usize = 300;

fn main() {
    println!("{:<28}{:>5}{:>11}{:>14}{:>14}{:>14}", "machine", "size", "requests", "median", "worst", "most sets");
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        let topology = Arc::new(NodeTopology::assemble(&observed).0);
        let mut builds: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            black_box(AllocationTables::new(Arc::clone(&topology)));
            builds.push(start.elapsed());
        }
        let tables = AllocationTables::new(Arc::clone(&topology));
        for size in [1, 2, 4, 8].into_iter().filter(|size| *size <= topology.gpus().len()) {
            row(machine.name, size, &tables);
        }
        println!("{:<28}tables built in {:?}", machine.name, median(&mut builds));
    }
}

fn row(machine: &str, size: usize, tables: &AllocationTables) {
    let ids: Vec<DeviceId> = tables.topology().gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
    let sets = 1_u64 << ids.len();
    // All availabilities, or every so many of them; the whole machine is always one.
    let step = (sets / MOST as u64).max(1) | 1;
    let mut times = Vec::new();
    let mut most = 0;
    let availabilities = (0..sets).rev().step_by(usize::try_from(step).unwrap());
    for availability in availabilities.filter(|set| set.count_ones() as usize >= size) {
        let free = ids.iter().enumerate().filter(|(place, _)| availability >> place & 1 == 1);
        let available = free.map(|(_, id)| id.clone()).collect();
        let request = AllocationRequest { available, must_include: Vec::new(), size };
        let mut rounds: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let answer = preferred_allocation(tables, black_box(&request), AllocationPolicy::BestEffort);
            rounds.push(start.elapsed());
            most = most.max(answer.1.compared);
        }
        times.push(median(&mut rounds));
    }
    let (requests, worst) = (times.len(), times.iter().max().copied().unwrap_or_default());
    println!("{machine:<28}{size:>5}{requests:>11}{:>14?}{worst:>14?}{most:>14}", median(&mut times));
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
