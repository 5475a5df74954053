//! The soak: `linkwise run` as a process between the boxes of kubelet, API server and driver, while pods of the device
//! plugin and pods with claims come and go, and faults come at random, sometimes two at once.
//!
//! No hardware may go to two pods, the node must recover from each fault in time, no call of the kubelet may fail
//! without a cause, and nothing may be left behind. The ledger uses no type of linkwise. `make soak` runs it, and
//! `make test` has two short runs, one with each kind of kubelet.

#![allow(clippy::print_stdout, reason = "the numbers are for people")]

mod faults;
mod ledger;
mod load;
#[allow(dead_code, reason = "each user takes a part")]
pub mod random;
mod world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise_kubelet_box::Connections;
use tokio::task::JoinSet;

use crate::run::node::KUBELETS;
use faults::Fault;
use random::Random;
use world::Soak;

/// The numbers of workers that start pods with claims, and pods of the device plugin.
const CLAIM_WORKERS: u32 = 4;
const POD_WORKERS: u32 = 3;
/// The longest time for which a call may go on failing after its last cause.
const STUCK_TIMEOUT: Duration = Duration::from_secs(30);
/// The time after a fault within which the node must be whole. The longest waits of linkwise are 16 s between two
/// registrations, 10 s for a stream or a confirmation, and 6 s for a doubled hold time and between trials of a GPU.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

#[allow(clippy::disallowed_methods, reason = "make passes these variables")]
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: '{text}' is not a number")))
}

/// Runs all faults in random order, and repeats them until the time is over.
async fn soak(connections: Connections, seed: u64, seconds: u64, all: &[Fault]) {
    println!("soak: {connections:?}, SOAK_SEED={seed}");
    let begin = Instant::now();
    let mut soak = Soak::start(connections, seed).await;
    let (world, specs, before) = (Arc::clone(&soak.world), soak.world.node.specs(), soak.measure());
    let mut load = JoinSet::new();
    for worker in 0..CLAIM_WORKERS + POD_WORKERS {
        let (world, random) = (Arc::clone(&world), Random::new(seed ^ (u64::from(worker + 1) << 32)));
        load.spawn(async move {
            match worker {
                0..CLAIM_WORKERS => load::run_pods_with_claims(&world, worker, random).await,
                _ => load::run_pods_of_the_plugin(&world, worker, random).await,
            }
        });
    }
    loop {
        let mut faults = all.to_vec();
        while !faults.is_empty() && !world.has_failed() {
            let at = soak.random.within(0..u32::try_from(faults.len()).unwrap());
            let fault = faults.swap_remove(usize::try_from(at).unwrap());
            if !fault.fits(world.is_dra()) {
                soak.round(&[Fault::DoorChanges]).await;
            }
            let fitting = fault.overlapping().iter().copied().filter(|second| second.fits(world.is_dra()));
            let fitting: Vec<Fault> = fitting.collect();
            if fitting.is_empty() || !soak.random.one_in(3) {
                soak.round(&[fault]).await;
            } else {
                let second = soak.random.of(&fitting);
                soak.round(&[fault, second]).await;
            }
        }
        if begin.elapsed().as_secs() >= seconds || world.has_failed() {
            break;
        }
        soak.roll_out_in_calm().await;
    }
    world.journal.over.cancel();
    while let Some(ended) = load.join_next().await {
        ended.unwrap();
    }
    if !world.has_failed() {
        soak.check_empty(&specs, &before).await;
    }
    let summary =
        format!("{connections:?}, SOAK_SEED={seed}, {} s\n{}", begin.elapsed().as_secs(), world.journal.summary());
    assert!(!world.has_failed(), "{summary}\n{}\n{:#?}", world.journal.history(), world.journal.errors());
    println!("{summary}");
    soak.end().await;
    for kind in load::Kind::ALL {
        assert!(world.journal.counted(kind.name()) > 0, "no {}", kind.name());
    }
    assert!(world.journal.counted(load::PODS) > 0);
}

#[tokio::test]
async fn faults_cause_no_error_with_kubelets_up_to_1_36() {
    soak(KUBELETS[0], 1, 0, &Fault::few()).await;
}

#[tokio::test]
async fn faults_cause_no_error_with_kubelets_from_1_37() {
    soak(KUBELETS[1], 2, 0, &Fault::few()).await;
}

#[tokio::test]
#[ignore = "needs SOAK_SECONDS: make soak"]
async fn every_fault_is_survived_on_each_kubelet() {
    let seconds = number("SOAK_SECONDS").expect("SOAK_SECONDS is set by make soak");
    let chance = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let seed = number("SOAK_SEED").unwrap_or(u64::try_from(chance % 1_000_000).unwrap());
    for connections in KUBELETS {
        soak(connections, seed, seconds / 2, &Fault::all()).await;
    }
}
