//! The soak: `linkwise run` as a real process between the kubelet in the box and our own libnvidia-ml, while faults come at random, one
//! after the other and sometimes two at once, and pods come and go all the time. `make soak`; it ends with a ledger.
//!
//! Every fault has to be noticed, and the node has to be whole again within [`RECOVERY`] of its end. No admission may fail that
//! could have been answered; no device may be handed out twice. Its times are chosen for random moments: it waits for
//! states, and sleeps only to let a fault, a pod or a pause last.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "what a helper cannot do ends the soak, and the ledger is for people"
)]

mod faults;
mod ledger;
mod load;
#[path = "../run/node.rs"]
#[allow(dead_code, reason = "tests/run uses all of it")]
mod node;
mod process;
mod random;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use random::Random;
use world::World;

/// The node has to be whole again this long after the end of a fault. The longest waits of ours are 16 s between two
/// registrations, 10 s for a stream or a confirmation, 6 s of doubled hold and as much between trials of a GPU.
const RECOVERY: Duration = Duration::from_secs(60);
/// What is open at the end may be this much more than at the start.
const MORE_FILES: usize = 16;
/// And each process may hold this much more, in KiB.
const MORE_MEMORY: u64 = 16 * 1024;

#[expect(clippy::disallowed_methods, reason = "a test has no configuration; make hands these on")]
fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: '{text}' is no number")))
}

fn main() -> ExitCode {
    let seconds = setting("SOAK_SECONDS").unwrap_or(300);
    let chance = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let seed = setting("SOAK_SEED").unwrap_or(u64::try_from(chance % 1_000_000).unwrap());
    println!("soak: {seconds} s, SOAK_SEED={seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    let good = runtime.block_on(local.run_until(soak(Duration::from_secs(seconds), seed)));
    // A call to the fake library may still wait for a child that is no more.
    runtime.shutdown_background();
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Says whether all was well.
async fn soak(length: Duration, seed: u64) -> bool {
    let begin = Instant::now();
    let mut world = World::start(seed).await;
    let ledger = world.ledger.clone();
    if let Err(why) = world.whole(begin, RECOVERY).await {
        ledger.error(format!("the node did not come up: {why}"));
    }
    let start = world.measure();
    let load = load::Load::start(&world, seed);
    let mut random = Random::new(seed);
    let mut rounds = tokio::task::JoinSet::new();
    rounds.spawn_local(async move {
        while begin.elapsed() < length && faults::round(&mut world, &mut random).await {}
        world
    });
    let rounds = rounds.join_next().await.expect("there is one task");
    load.end().await;
    match rounds {
        Ok(world) => {
            let end = world.measure();
            ledger.logged(world.node.process.lines().len());
            if end.files() > start.files() + MORE_FILES {
                ledger.error(format!("{} open files at the start, {} at the end", start.files(), end.files()));
            }
            for (name, start, end) in
                [("the plugin", start.plugin, end.plugin), ("the NVML child", start.child, end.child)]
            {
                if end.resident > start.resident + MORE_MEMORY {
                    ledger.error(format!("{name} holds {} KiB, and held {} KiB", end.resident, start.resident));
                }
            }
            ledger.print(begin.elapsed(), Some((&start, &end)));
            world.end().await;
        }
        Err(panic) => {
            ledger.error(format!("the soak could not go on: {panic}"));
            ledger.print(begin.elapsed(), None);
        }
    }
    let errors = ledger.errors();
    for error in &errors {
        println!("error: {error}");
    }
    println!("soak: {} errors, SOAK_SEED={seed}", errors.len());
    errors.is_empty()
}
