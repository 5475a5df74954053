//! What an upgrade costs the pods of a node: real processes take over from each other while the kubelet in the box
//! admits 50 pods a second, or none. Both kinds of kubelets. Run with `cargo bench --bench upgrade`.
//!
//! A gap is the time in which the kubelet would have rejected a pod: from the end of the old stream to the new list.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a benchmark prints, and ends where it cannot go on"
)]

#[path = "../tests/upgrade/fleet.rs"]
#[allow(dead_code, reason = "tests/upgrade uses all of it")]
mod fleet;
#[path = "../tests/run/node.rs"]
#[allow(dead_code, reason = "tests/run uses all of it")]
mod node;

use std::time::Duration;

use fleet::{GPUS, Running, World};
use linkwise_kubelet_box::Connections;
use node::{GPU, registered};

/// Replacements of each kind.
const TIMES: u64 = 100;
/// Admissions in a second on a busy node.
const RATE: u32 = 50;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    for (connections, name) in [
        (Connections::ByEndpoint, "up to 1.24"),
        (Connections::ByResource, "from 1.25 to 1.36"),
        (Connections::BySocket, "from 1.37"),
    ] {
        for (load, rate) in [("busy", Some(RATE)), ("idle", None)] {
            measure(&format!("kubelet {name}, {load}, taken over"), connections, rate, true).await;
        }
        measure(&format!("kubelet {name}, busy, ended and started"), connections, Some(RATE), false).await;
    }
}

async fn measure(what: &str, connections: Connections, rate: Option<u32>, beside: bool) {
    let world = World::new(connections);
    let mut running = world.start("pod-0").await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    running.ready().await;
    let load = rate.map(|rate| world.load(rate));
    for time in 1..=TIMES {
        let uid = format!("pod-{time}");
        running = if beside { world.replace(running, &uid).await } else { anew(&world, running, &uid).await };
    }
    let tally = match load {
        Some(load) => load.end().await,
        None => linkwise_kubelet_box::Tally::default(),
    };
    running.end().await;
    let gaps = world.kubelet.gaps(GPU);
    println!(
        "{what}: {TIMES} times, {} pods admitted, {} rejected, longest admission {:?}; {} gaps{}",
        tally.admitted,
        tally.rejected.len(),
        tally.longest,
        gaps.len(),
        spread(gaps),
    );
}

/// A new process after the end of the old one.
async fn anew(world: &World, old: Running, uid: &str) -> Running {
    old.end().await;
    let new = world.start(uid).await;
    new.ready().await;
    new
}

/// Median and worst.
fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let of = |at: usize| times.get(at).map(|time| format!("{time:?}"));
    match (of(times.len() / 2), of(times.len().saturating_sub(1))) {
        (Some(median), Some(worst)) => format!(": median {median}, worst {worst}"),
        _ => String::new(),
    }
}
