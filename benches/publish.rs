//! The time to compute the devices that a node publishes through DRA, and the bytes that the API server gets.
//!
//! Prints a row for each machine: the time for the order of GPUs and the groups, which are computed once for a
//! topology; the time for the devices, which are made at each change of health; and the size of the slices as JSON. It
//! judges nothing. Run it with `cargo bench --bench publish`, and quote a figure with its machine.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a benchmark prints, and ends at its first error"
)]

#[path = "../tests/large_node/mod.rs"]
mod large_node;

use std::hint::black_box;
use std::time::{Duration, Instant};

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{DraFacts, DraSettings, GpuLayout, SliceDevice, devices, offered_now};
use linkwise_core::state::{Door, NodeState, ResourcePlan};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

/// The repetitions of each figure, whose median counts because the machine has other work too.
const ROUNDS: usize = 9;

fn main() {
    println!("{:<28}{:>5}{:>12}{:>12}{:>9}", "machine", "GPUs", "groups", "devices", "kB");
    for machine in machines::built_in() {
        table(machine.name, &machines::load(machine.name).unwrap().observed);
    }
    for (name, observed) in large_node::all() {
        table(name, &observed);
    }
}

fn table(machine: &str, observed: &NodeObservation) {
    let state = NodeState::of_machine(observed.clone(), ResourcePlan { door: Door::Dra, ..ResourcePlan::default() });
    let gpus = offered_now(&state);
    let (layout, grouped) = timed(|| GpuLayout::of(state.tables(), gpus));
    let facts = || DraFacts::of_state(&state, &layout, DraSettings::default());
    let (published, made) = timed(|| devices(&facts()).0);
    println!("{machine:<28}{:>5}{grouped:>12.0?}{made:>12.0?}{:>9.1}", gpus.len(), kilobytes(published));
}

/// The size of the slices as JSON, in kB.
fn kilobytes(devices: Vec<SliceDevice>) -> f64 {
    let pool = Pool::new("node", devices);
    let bytes = pool.slices(1).iter().map(|slice| serde_json::to_string(slice).unwrap().len()).sum::<usize>();
    bytes as f64 / 1000.0
}

fn timed<T>(mut make: impl FnMut() -> T) -> (T, Duration) {
    let mut times = Vec::new();
    let mut made = make();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        made = black_box(make());
        times.push(start.elapsed());
    }
    times.sort_unstable();
    (made, times.get(ROUNDS / 2).copied().unwrap_or_default())
}
