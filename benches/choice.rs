//! The time of a choice among whole GPUs, compared with a brute force.
//!
//! Prints a row for each machine and size of request: median and worst time over all sets of free GPUs (a sample for
//! more than 8 GPUs), the most sets that a request compared, the share of answers proven best, and the time of the
//! brute force on the idle machine (`-` if it would take minutes). The time to build the tables follows each machine.
//! It judges nothing: benches/README.md has the budgets. Run it with `cargo bench --bench choice`, and quote a figure
//! with its machine.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "a benchmark prints, and ends at its first error"
)]

#[path = "../tests/large_node/mod.rs"]
mod large_node;
#[path = "../tests/oracle/mod.rs"]
mod oracle;
mod support;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, GpuSet, preferred_allocation,
};
use linkwise_core::topology::{NodeObservation, NodeTopology};
use linkwise_host::machines;
use oracle::Oracle;
use support::percentile;

/// The repetitions of each request and each build of tables. The median counts: the machine has other work too.
const ROUNDS: usize = 9;
/// The most sets of free GPUs in a sample; beyond 16 GPUs a third as many.
const MAX_SETS: usize = 300;
/// The repetitions of the brute force.
const BRUTE_FORCE_ROUNDS: usize = 3;
/// The largest machine for the brute force, which takes minutes from 16 GPUs on.
const MAX_BRUTE_FORCE_GPUS: usize = 8;

fn main() {
    println!(
        "{:<28}{:>5}{:>10}{:>12}{:>12}{:>10}{:>8}{:>14}",
        "machine", "size", "requests", "median", "worst", "most sets", "exact", "brute force"
    );
    for machine in machines::built_in() {
        table(machine.name, &machines::load(machine.name).unwrap().observed);
    }
    for (name, observed) in large_node::all() {
        table(name, &observed);
    }
}

fn table(machine: &str, observed: &NodeObservation) {
    let topology = Arc::new(NodeTopology::assemble(observed).0);
    let mut builds: Vec<Duration> = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        black_box(AllocationTables::new(Arc::clone(&topology)));
        builds.push(start.elapsed());
    }
    let tables = AllocationTables::new(Arc::clone(&topology));
    for size in [1, 2, 3, 4, 8, 12, 16, 32].into_iter().filter(|size| *size <= topology.gpus().len()) {
        row(machine, size, &tables);
    }
    println!("{machine:<28}tables built in {:?}", percentile(&mut builds, 50));
}

fn row(machine: &str, size: usize, tables: &AllocationTables) {
    let ids: Vec<DeviceId> = tables.topology().gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
    let mut times = Vec::new();
    let (mut most, mut exact) = (0, 0);
    for availability in availabilities(ids.len()).filter(|set| set.len() >= size) {
        let available = availability.places().map(|place| ids[place].clone()).collect();
        let request = AllocationRequest { available, must_include: Vec::new(), size };
        let mut rounds: Vec<Duration> = Vec::new();
        let mut proven = false;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let answer = preferred_allocation(tables, black_box(&request), AllocationPolicy::BestEffort);
            rounds.push(start.elapsed());
            most = most.max(answer.1.compared);
            proven = answer.1.exact;
        }
        exact += usize::from(proven);
        times.push(percentile(&mut rounds, 50));
    }
    let (requests, worst) = (times.len(), times.iter().max().copied().unwrap_or_default());
    let brute = brute_force(tables, size).map_or_else(|| "-".to_owned(), |time| format!("{time:.2?}"));
    println!(
        "{machine:<28}{size:>5}{requests:>10}{:>12}{:>12}{most:>10}{:>7}%{brute:>14}",
        format!("{:.2?}", percentile(&mut times, 50)),
        format!("{worst:.2?}"),
        exact * 100 / requests.max(1)
    );
}

/// All sets of free GPUs, or a sample with the whole machine in it. Beyond 16 GPUs half of the sample has many GPUs.
fn availabilities(gpus: usize) -> Box<dyn Iterator<Item = GpuSet>> {
    if gpus <= 16 {
        let sets = 1_u64 << gpus;
        let step = (sets / MAX_SETS as u64).max(1) | 1;
        return Box::new((0..sets).rev().step_by(step as usize).map(GpuSet));
    }
    let all: GpuSet = (0..gpus).collect();
    let mut number = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        GpuSet(number)
    };
    let sample = (0..MAX_SETS / 3).map(move |at| if at % 2 == 0 { next() } else { next().union(next()).union(next()) });
    Box::new(std::iter::once(all).chain(sample.map(move |set| set.intersection(all))))
}

/// The time of the brute force on the idle machine, with an empty cache.
fn brute_force(tables: &AllocationTables, size: usize) -> Option<Duration> {
    let gpus = tables.topology().gpus().len();
    if gpus > MAX_BRUTE_FORCE_GPUS {
        return None;
    }
    let mut rounds: Vec<Duration> = Vec::new();
    for _ in 0..BRUTE_FORCE_ROUNDS {
        let start = Instant::now();
        black_box(Oracle::new(tables.topology()).choose((1 << gpus) - 1, 0, size as u32));
        rounds.push(start.elapsed());
    }
    Some(percentile(&mut rounds, 50))
}
