//! The time of a choice among slots, as GetPreferredAllocation asks a snapshot, on machines of at least 8 GPUs: with 64
//! slots on each GPU and with as many as a resource can have, for sampled sizes of requests and both policies.
//!
//! Prints the median and worst time and the size of the worst, and judges nothing; the budget is 1 ms for 1024 slots on
//! 16 GPUs. Run it with `cargo bench --bench slots`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends at its first error")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use linkwise_core::allocation::{AllocationPolicy, AllocationRequest, DeviceId};
use linkwise_core::state::{
    Event, Filter, NodeState, ResourceName, ResourcePlan, SharedResource, Sharing, SharingKind, Timestamp,
};
use linkwise_host::machines;

/// The budget's number of slots on each GPU.
const REPLICAS: u32 = 64;
/// The most slots of a resource.
const MAX_SLOTS: u32 = 16_384;
/// The repetitions of each request, whose median counts.
const ROUNDS: usize = 9;

fn main() {
    println!("{:<28}{:>7}{:>14}{:>14}{:>14}{:>12}", "machine", "slots", "policy", "median", "worst", "worst size");
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        if observed.gpus.len() < 8 {
            continue;
        }
        let most = MAX_SLOTS / u32::try_from(observed.gpus.len()).unwrap();
        let (seen, _) = NodeState::default().apply(Event::Observed(Box::new(observed)), Timestamp::ZERO);
        let policies = [AllocationPolicy::Distributed, AllocationPolicy::Packed];
        for (replicas, policy) in [REPLICAS, most].into_iter().flat_map(|replicas| policies.map(|one| (replicas, one)))
        {
            let shared = vec![SharedResource::new(ResourceName::gpu(), replicas)];
            let plan = ResourcePlan {
                sharing: Some(Sharing::new(SharingKind::TimeSlicing, shared)),
                filter: Filter::default(),
                shared_policy: Some(policy),
                ..ResourcePlan::default()
            };
            let (snapshot, _) = seen.clone().apply(Event::Planned(Box::new(plan)), Timestamp::ZERO);
            row(machine.name, &snapshot, policy);
        }
    }
}

fn row(machine: &str, snapshot: &NodeState, policy: AllocationPolicy) {
    let resource = ResourceName::gpu();
    // The whole GPUs of the default plan stay on the list as unhealthy devices, which no kubelet offers.
    let all: Vec<DeviceId> =
        snapshot.offers().of(&resource).filter(|(_, device)| device.slot.is_some()).map(|(id, _)| id.clone()).collect();
    let request = |size: usize| AllocationRequest { available: all.clone(), must_include: Vec::new(), size };
    let mut times = Vec::new();
    for size in (1..=all.len()).filter(|size| *size <= 32 || size % (all.len() / 27) == 0 || *size == all.len()) {
        let request = request(size);
        let mut rounds: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            black_box(snapshot.preferred(&resource, black_box(&request)));
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
