//! Slots: 1024 on 16 GPUs, any size, all policies; the worst named.
//!
//! Prints a table beside the budget of DESIGN section 8 (1 ms); it judges nothing. `cargo bench --bench slots`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends where it cannot go on")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise::allocation::{AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, Units, preferred_units};
use linkwise::machines;
use linkwise::topology::NodeTopology;

/// Slots on each GPU.
const REPLICAS: usize = 64;
/// Each request is asked this often and its median counts.
const ROUNDS: usize = 9;

fn main() {
    println!("{:<28}{:>7}{:>14}{:>14}{:>14}{:>12}", "machine", "slots", "policy", "median", "worst", "worst size");
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        let topology = Arc::new(NodeTopology::assemble(&observed).0);
        if topology.gpus().len() < 8 {
            continue;
        }
        let tables = AllocationTables::new(Arc::clone(&topology));
        let units = Units::slots(&topology, REPLICAS);
        for policy in [AllocationPolicy::BestEffort, AllocationPolicy::Distributed, AllocationPolicy::Packed] {
            row(machine.name, &tables, &units, policy);
        }
    }
}

fn row(machine: &str, tables: &AllocationTables, units: &Units, policy: AllocationPolicy) {
    let all: Vec<DeviceId> = units.ids().cloned().collect();
    let request = |size: usize| AllocationRequest { available: all.clone(), must_include: Vec::new(), size };
    let mut times = Vec::new();
    for size in (1..=all.len()).filter(|size| *size <= 32 || size % 37 == 0 || *size == all.len()) {
        let request = request(size);
        let mut rounds: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            black_box(preferred_units(tables, units, black_box(&request), policy));
            rounds.push(start.elapsed());
        }
        rounds.sort_unstable();
        times.push((rounds.get(ROUNDS / 2).copied().unwrap_or_default(), size));
    }
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default().0;
    let (worst, at) = times.last().copied().unwrap_or_default();
    let policy = format!("{policy:?}");
    println!("{machine:<28}{:>7}{policy:>14}{median:>14?}{worst:>14?}{at:>12}", all.len());
}
