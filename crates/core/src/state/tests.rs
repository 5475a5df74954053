//! Single events of the state: their effects, and the health and NUMA hints of devices.

use super::health::GpuHealth;
use super::*;
use crate::prelude::*;
use crate::topology::{
    GpuObservation, GpuUuid, HostObservation, NodeObservation, NumaNodeId, NumaNodeObservation, PackageId, PciAddress,
};

const NOON: Timestamp = Timestamp::from_secs(12 * 3600);

fn gpu(index: u8) -> GpuObservation {
    GpuObservation {
        numa: Some(NumaNodeId(u32::from(index))),
        ..GpuObservation::new(
            u32::from(index),
            format!("GPU-{index}").parse().unwrap(),
            PciAddress::new(0, index, 0, 0).unwrap(),
        )
    }
}

fn node(gpus: &[u8]) -> Event {
    let cpus = [(0, "0-7"), (1, "")];
    let numa_nodes =
        cpus.map(|(id, cpus)| NumaNodeObservation { id: NumaNodeId(id), package: None, cpus: cpus.into() });
    let host = HostObservation { numa_nodes: numa_nodes.to_vec(), ..HostObservation::default() };
    let gpus = gpus.iter().copied().map(gpu).collect();
    Event::Observed(Box::new(NodeObservation { gpus, host, ..NodeObservation::default() }))
}

fn healthy(state: &NodeState) -> Vec<&str> {
    let devices = state.offers().of(&ResourceName::gpu());
    devices.filter(|(_, device)| device.health == Health::Healthy).map(|(id, _)| id.as_str()).collect()
}

fn after(events: impl IntoIterator<Item = Event>) -> (NodeState, Vec<Effect>) {
    events.into_iter().fold((NodeState::default(), Vec::new()), |(state, _), event| state.apply(event, NOON))
}

fn uuid(index: u8) -> GpuUuid {
    gpu(index).uuid
}

#[test]
fn numa_hints_are_own_node_package_or_none() {
    let mut observed = NodeObservation::default();
    // Package 0 has nodes 0 and 1 with CPUs, and node 2 without. Package 1 has node 3. Node 4 has no known package.
    let places = [(0, Some(0), "0-3"), (1, Some(0), "4-7"), (2, Some(0), ""), (3, Some(1), "8-11"), (4, None, "12-15")];
    for (id, package, cpus) in places {
        let (id, package) = (NumaNodeId(id), package.map(PackageId));
        observed.host.numa_nodes.push(NumaNodeObservation { id, package, cpus: cpus.into() });
    }
    observed.gpus = (0..6).map(gpu).collect();
    let nodes = |hints| {
        let (state, _) = NodeState::new(hints).apply(Event::Observed(Box::new(observed.clone())), NOON);
        let nodes = state.offers().of(&ResourceName::gpu()).map(|(_, device)| device.numa_nodes.clone());
        nodes.map(|nodes| nodes.iter().map(|node| node.0).collect()).collect::<Vec<Vec<u32>>>()
    };
    assert_eq!(nodes(NumaHints::Node), [vec![0], vec![1], vec![], vec![3], vec![4], vec![]]);
    assert_eq!(nodes(NumaHints::Package), [vec![0, 1], vec![0, 1], vec![0, 1], vec![3], vec![4], vec![]]);
    assert_eq!(nodes(NumaHints::Off), vec![Vec::<u32>::new(); 6]);
    // Hints that are set later give the same nodes as hints set at the start, also for GPUs that are gone.
    let (state, _) = NodeState::new(NumaHints::Off).apply(Event::Observed(Box::new(observed.clone())), NOON);
    let fewer = NodeObservation { gpus: (0..4).map(gpu).collect(), ..observed.clone() };
    let (state, _) = state.apply(Event::Observed(Box::new(fewer)), NOON);
    let (state, effects) = state.apply(Event::NumaHints(NumaHints::Package), NOON);
    let later = state
        .offers()
        .of(&ResourceName::gpu())
        .map(|(_, device)| device.numa_nodes.iter().map(|node| node.0).collect());
    assert_eq!((later.collect::<Vec<Vec<u32>>>(), effects), (nodes(NumaHints::Package), vec![Effect::Publish]));
}

#[test]
fn gpu_xid_fails_that_gpu_once() {
    let xid = |code| Event::Xid { gpu: uuid(1), code, instance: None };
    let (state, effects) = after([node(&[0, 1]), xid(79)]);
    assert_eq!(healthy(&state), ["GPU-0"]);
    let health = Health::Unhealthy { reason: UnhealthyReason::Xid { code: 79, instance: None }, since: NOON };
    assert_eq!(effects, [Effect::HealthChanged { gpu: uuid(1), mig: None, health }, Effect::Publish, Effect::Keep]);
    let (state, again) = state.apply(xid(79), NOON);
    assert_eq!(again, [], "a repeated XID changes nothing");
    let (state, another) = state.apply(xid(48), NOON);
    assert_eq!(another, [Effect::Keep], "people see the first reason");
    let (state, unknown) = state.apply(Event::DoubleBitEcc(uuid(9)), NOON);
    assert_eq!((healthy(&state), unknown), (vec!["GPU-0"], vec![]), "no GPU of this node");
}

#[test]
fn warning_is_reported_once() {
    let (_, effects) = after([node(&[0])]);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Warn(_))), "the GPU is not in the host's tree");
    let (_, effects) = after([node(&[0]), node(&[0])]);
    assert_eq!(effects, [Effect::Publish]);
}

#[test]
fn xid_of_mig_instance_fails_that_instance_alone() {
    let instance = |gpu_instance, compute_instance| MigInstance { gpu_instance, compute_instance };
    let mut health = GpuHealth::default();
    let hit = |health: &GpuHealth, device| {
        health.verdict(&XidPolicy::default(), |reason| reason.concerns(device)) != Health::Healthy
    };
    let reason = UnhealthyReason::Xid { code: 79, instance: Some(instance(1, Some(0))) };
    assert_eq!(reason.to_string(), "XID 79 of GPU instance 1, compute instance 0");
    health.fail(reason.clone(), NOON);
    health.fail(reason, NOON);
    assert_eq!(health.reasons().count(), 1, "the same reason is kept once");
    let devices = [Some(instance(1, Some(0))), Some(instance(1, Some(1))), Some(instance(2, Some(0))), None];
    assert_eq!(devices.map(|device| hit(&health, device)), [true, false, false, true]);
    // An event without a compute instance concerns the GPU instance, and an event without any instance the GPU.
    health.fail(UnhealthyReason::Xid { code: 79, instance: Some(instance(1, None)) }, NOON);
    assert_eq!(devices.map(|device| hit(&health, device)), [true, true, false, true]);
    health.fail(UnhealthyReason::DoubleBitEcc, NOON);
    assert_eq!(devices.map(|device| hit(&health, device)), [true; 4]);
}

#[test]
fn clear_heals_a_present_gpu_only() {
    let failed =
        [node(&[0, 1, 2]), Event::Xid { gpu: uuid(0), code: 79, instance: None }, Event::DoubleBitEcc(uuid(1))];
    let (state, _) = after(failed);
    let (state, effects) = state.apply(Event::Cleared(uuid(0)), NOON);
    assert_eq!(healthy(&state), ["GPU-0", "GPU-2"]);
    let changed = Effect::HealthChanged { gpu: uuid(0), mig: None, health: Health::Healthy };
    assert_eq!(effects, [changed, Effect::Publish, Effect::Keep]);
    let (state, effects) = state.apply(Event::Cleared(uuid(0)), NOON);
    assert_eq!(effects, [], "the GPU has no reason left");
    // An order does not bring a missing GPU back.
    let (state, _) = state.apply(node(&[0, 1]), NOON);
    let (state, effects) = state.apply(Event::Cleared(uuid(2)), NOON);
    assert_eq!((healthy(&state), effects), (vec!["GPU-0"], vec![]));
}
