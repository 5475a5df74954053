//! What a node publishes through DRA: how long the groups and the devices take to compute, and how many bytes the API
//! server gets.
//!
//! Prints a table: machine; the order and the groups, computed once for a topology; the devices, made for each change of
//! health; and the slices as JSON. It judges nothing. Run it with `cargo bench --bench publish`; a figure is quoted with
//! the machine it was measured on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a benchmark prints, and ends where it cannot go on"
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

/// Each figure is the median of so many: the machine is not ours alone.
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
    println!("{machine:<28}{:>5}{grouped:>12.0?}{made:>12.0?}{:>9.1}", gpus.len(), bytes(published));
}

/// The slices as JSON, kB.
fn bytes(devices: Vec<SliceDevice>) -> f64 {
    let pool = Pool::new("node", devices);
    let texts = pool.slices(1).iter().map(|slice| serde_json::to_string(slice).unwrap().len()).sum::<usize>();
    texts as f64 / 1000.0
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
