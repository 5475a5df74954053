//! Resources that are shared by MPS: the slots on the list while their daemons are ready, and while they are not.

use std::collections::BTreeMap;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Effect, Event, Health, MpsShare, NodeState, ResourcePlan, SharedDevices, SharedResource, SharingKind,
    UnhealthyReason,
};
use linkwise_core::topology::{ComputeCapability, NodeObservation};

use crate::resources::{LATER, NOW, after, gpu, mixed, no_holders, planned, problems, seen, sharing, with};

/// Four GPUs, none in MIG mode.
fn node() -> NodeObservation {
    let mut node = mixed();
    node.gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    node
}

fn replicas(count: u32) -> ResourcePlan {
    sharing(SharingKind::Mps, vec![SharedResource::new(gpu(), count)])
}

/// The machine with two slots for each GPU.
fn shared() -> NodeState {
    with(&replicas(2), node())
}

fn unready() -> Event {
    Event::MpsReady(BTreeMap::new())
}

/// The state once all daemons are ready with the current limits.
fn ready(snapshot: NodeState) -> NodeState {
    let shares = snapshot.mps_shares().clone();
    after(snapshot, [Event::MpsReady(shares)])
}

/// The number of slots and whole GPUs on the list: healthy ones, and unhealthy ones by the reason's label.
fn listed(snapshot: &NodeState) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for (_, device) in snapshot.offers().of(&gpu()) {
        let label = match &device.health {
            Health::Healthy => "healthy",
            Health::Unhealthy { reason, .. } => reason.label(),
        };
        *counts.entry(label).or_default() += 1;
    }
    counts
}

#[test]
fn no_slot_is_offered_before_the_daemon_is_ready() {
    let snapshot = shared();
    assert_eq!(listed(&snapshot), BTreeMap::new());
    let share = &snapshot.mps_shares()[&gpu()];
    assert_eq!((share.replicas, share.gpus.len(), share.whole_node), (2, 4, true));
    assert_eq!(listed(&ready(snapshot)), BTreeMap::from([("healthy", 8)]));
}

#[test]
fn dead_daemon_makes_slots_unhealthy_not_gpus() {
    let snapshot = ready(shared());
    let (snapshot, effects) = snapshot.apply(unready(), LATER);
    assert_eq!(effects, [Effect::Publish], "no GPU changes, and the health record stays");
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    let (id, device) = snapshot.offers().of(&gpu()).next().unwrap();
    assert_eq!(device.health, Health::Unhealthy { reason: UnhealthyReason::MpsNotReady, since: LATER });
    let refused = snapshot.allocate(&gpu(), std::slice::from_ref(id)).unwrap_err().to_string();
    assert!(refused.ends_with("is unhealthy: the MPS control daemon of its resource is not ready"), "{refused}");
    // A fault of the GPU hides the daemon's, and stays when the daemon is back.
    let gpu = device.gpu.uuid.clone();
    let snapshot = after(snapshot, [Event::Xid { gpu, code: 79, instance: None }]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 6), ("xid", 2)]));
    assert_eq!(listed(&ready(snapshot)), BTreeMap::from([("healthy", 6), ("xid", 2)]));
}

#[test]
fn daemon_with_other_limits_makes_no_slot_ready() {
    let snapshot = after(ready(shared()), [planned(&replicas(4))]);
    // Pods may hold the old slots. The new slots follow when a daemon has the new limits.
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    let snapshot = ready(snapshot);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 16)]));
    let snapshot = ready(after(snapshot, [planned(&replicas(3))]));
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 12), ("withdrawn", 4)]));
    // Whole GPUs need no daemon.
    let snapshot = after(snapshot, [planned(&ResourcePlan::default())]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 4), ("withdrawn", 16)]));
    assert!(snapshot.mps_shares().is_empty());
    let snapshot = after(snapshot, [no_holders(), no_holders(), planned(&replicas(2))]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("withdrawn", 4)]), "no slot is on the list yet");
}

#[test]
fn lost_gpu_takes_only_its_own_slots() {
    let mut fewer = node();
    let gone = fewer.gpus.pop().unwrap();
    let snapshot = after(ready(shared()), [seen(fewer.clone())]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("gone", 2), ("healthy", 6)]));
    // Once the GPU is back, a daemon of fewer GPUs does not count for any.
    let snapshot = after(ready(snapshot), [seen(node())]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    // Nor does a daemon count that started with another amount of memory.
    fewer.gpus.push(gone);
    fewer.gpus[3].memory_mib = Some(1024);
    assert_eq!(listed(&after(ready(snapshot), [seen(fewer)])), BTreeMap::from([("mps_not_ready", 8)]));
}

#[test]
fn unshared_gpus_do_not_wait_for_the_daemon() {
    let one = SharedResource { devices: SharedDevices::Count(1), ..SharedResource::new(gpu(), 2) };
    let snapshot = with(&sharing(SharingKind::Mps, vec![one]), node());
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 3)]));
    let MpsShare { replicas, gpus, whole_node } = &snapshot.mps_shares()[&gpu()];
    assert_eq!((*replicas, gpus.len(), *whole_node), (2, 1, false));
    let slot = DeviceId::from(format!("{}::0", gpus[0].uuid));
    assert!(!snapshot.offers().is_healthy(&gpu(), &slot));
    let snapshot = ready(snapshot);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 5)]));
    let snapshot = after(snapshot, [unready()]);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 3), ("mps_not_ready", 2)]));
}

#[test]
fn gpus_that_mps_cannot_share_are_refused() {
    let problem = |major, minor, count| {
        let mut node = node();
        node.gpus[2].compute_capability = Some(ComputeCapability { major, minor });
        let planned = after(NodeState::default(), [planned(&replicas(count))]);
        let (snapshot, effects) = planned.apply(seen(node), NOW);
        let problem = problems(&effects).concat();
        assert_eq!(listed(&ready(snapshot)).is_empty(), !problem.is_empty());
        problem
    };
    assert_eq!(problem(3, 5, 16), "");
    assert_eq!(problem(7, 0, 48), "");
    let old = "for which GPUs 0000:47:00.0 are too old (compute capability below 3.5); it is not offered";
    assert_eq!(problem(3, 0, 2), format!("nvidia.com/gpu is to be shared by MPS, {old}"));
    let few = "but the MPS server of GPU 0000:47:00.0 takes 16 clients at most; it is not offered";
    assert_eq!(problem(6, 1, 17), format!("nvidia.com/gpu is to be shared by MPS with 17 replicas, {few}"));
}
