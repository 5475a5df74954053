//! Resources that are shared by MPS: what the snapshot offers of them while their daemons are ready, and while they are
//! not.

use std::collections::BTreeMap;
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Effect, Event, Health, Holdings, MpsShare, NodeState, ResourceName, ResourcePlan, SharedDevices, SharedResource,
    Sharing, SharingKind, UnhealthyReason,
};
use linkwise_core::topology::{ComputeCapability, NodeObservation};

use crate::resources::mixed;

const NOW: Duration = Duration::from_secs(1_000_000);
const LATER: Duration = Duration::from_secs(1_000_060);

/// Four GPUs, none in MIG mode.
fn node() -> NodeObservation {
    let mut node = mixed();
    node.gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    node
}

fn plan(shared: SharedResource) -> ResourcePlan {
    ResourcePlan { sharing: Some(Sharing::new(SharingKind::Mps, vec![shared])), ..ResourcePlan::default() }
}

fn replicas(count: u32) -> ResourcePlan {
    plan(SharedResource::new(ResourceName::gpu(), count))
}

fn apply(snapshot: NodeState, event: Event, at: Duration) -> (NodeState, Vec<Effect>) {
    snapshot.apply(event, at)
}

fn planned(snapshot: NodeState, plan: ResourcePlan) -> NodeState {
    apply(snapshot, Event::Planned(Box::new(plan)), NOW).0
}

fn seen(snapshot: NodeState, node: NodeObservation) -> NodeState {
    apply(snapshot, Event::Observed(Box::new(node)), NOW).0
}

/// All daemons are ready for what is wanted now.
fn ready(snapshot: NodeState) -> NodeState {
    let shares = snapshot.mps_shares().clone();
    apply(snapshot, Event::MpsReady(shares), NOW).0
}

/// Slots and whole GPUs on the list: healthy, and unhealthy by the reason's label.
fn listed(snapshot: &NodeState) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for (_, device) in snapshot.offers().of(&ResourceName::gpu()) {
        let what = match &device.health {
            Health::Healthy => "healthy",
            Health::Unhealthy { reason, .. } => reason.label(),
        };
        *counts.entry(what).or_default() += 1;
    }
    counts
}

#[test]
fn no_slot_is_offered_before_the_daemon_is_ready() {
    let snapshot = seen(planned(NodeState::default(), replicas(2)), node());
    assert_eq!(listed(&snapshot), BTreeMap::new());
    let share = &snapshot.mps_shares()[&ResourceName::gpu()];
    assert_eq!((share.replicas, share.gpus.len(), share.whole_node), (2, 4, true));
    assert_eq!(listed(&ready(snapshot)), BTreeMap::from([("healthy", 8)]));
}

#[test]
fn dead_daemon_makes_slots_unhealthy_not_gpus() {
    let snapshot = ready(seen(planned(NodeState::default(), replicas(2)), node()));
    let (snapshot, effects) = apply(snapshot, Event::MpsReady(BTreeMap::new()), LATER);
    assert_eq!(effects, [Effect::Publish], "nothing is said of GPUs, and nothing kept");
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    let (id, device) = snapshot.offers().of(&ResourceName::gpu()).next().unwrap();
    assert_eq!(device.health, Health::Unhealthy { reason: UnhealthyReason::MpsNotReady, since: LATER });
    let refused = snapshot.allocate(&ResourceName::gpu(), std::slice::from_ref(id)).unwrap_err().to_string();
    assert!(refused.ends_with("is unhealthy: the MPS control daemon of its resource is not ready"), "{refused}");
    // A fault of the GPU says more, and stays when the daemon is back.
    let gpu = device.gpu.uuid.clone();
    let (snapshot, _) = apply(snapshot, Event::Xid { gpu, code: 79, instance: None }, LATER);
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 6), ("xid", 2)]));
    assert_eq!(listed(&ready(snapshot)), BTreeMap::from([("healthy", 6), ("xid", 2)]));
}

#[test]
fn daemon_of_other_limits_makes_no_slot_ready() {
    let snapshot = ready(seen(planned(NodeState::default(), replicas(2)), node()));
    let snapshot = planned(snapshot, replicas(4));
    // Pods may hold the old slots; the new ones come with the new limits.
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    let snapshot = ready(snapshot);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 16)]));
    let snapshot = ready(planned(snapshot, replicas(3)));
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 12), ("withdrawn", 4)]));
    // Whole GPUs need no daemon.
    let snapshot = planned(snapshot, ResourcePlan::default());
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 4), ("withdrawn", 16)]));
    assert!(snapshot.mps_shares().is_empty());
    let nobody = || Event::Holders(Some(Holdings::default()));
    let snapshot = apply(apply(snapshot, nobody(), NOW).0, nobody(), NOW).0;
    let snapshot = planned(snapshot, replicas(2));
    assert_eq!(listed(&snapshot), BTreeMap::from([("withdrawn", 4)]), "no slot is on the list yet");
}

#[test]
fn lost_gpu_takes_only_its_own_slots() {
    let snapshot = ready(seen(planned(NodeState::default(), replicas(2)), node()));
    let mut fewer = node();
    let gone = fewer.gpus.pop().unwrap();
    let snapshot = seen(snapshot, fewer.clone());
    assert_eq!(listed(&snapshot), BTreeMap::from([("gone", 2), ("healthy", 6)]));
    // What was judged by fewer GPUs is no word on the one that is back.
    let snapshot = ready(snapshot);
    let snapshot = seen(snapshot, node());
    assert_eq!(listed(&snapshot), BTreeMap::from([("mps_not_ready", 8)]));
    // As little as by another amount of memory.
    let snapshot = ready(snapshot);
    fewer.gpus.push(gone);
    fewer.gpus[3].memory_mib = Some(1024);
    assert_eq!(listed(&seen(snapshot, fewer)), BTreeMap::from([("mps_not_ready", 8)]));
}

#[test]
fn unshared_gpus_do_not_wait_for_the_daemon() {
    let one = SharedResource { devices: SharedDevices::Count(1), ..SharedResource::new(ResourceName::gpu(), 2) };
    let snapshot = seen(planned(NodeState::default(), plan(one)), node());
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 3)]));
    let MpsShare { replicas, gpus, whole_node } = &snapshot.mps_shares()[&ResourceName::gpu()];
    assert_eq!((*replicas, gpus.len(), *whole_node), (2, 1, false));
    let slot = DeviceId::from(format!("{}::0", gpus[0].uuid));
    assert!(!snapshot.offers().is_healthy(&ResourceName::gpu(), &slot));
    let snapshot = ready(snapshot);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 5)]));
    let (snapshot, _) = apply(snapshot, Event::MpsReady(BTreeMap::new()), NOW);
    assert_eq!(listed(&snapshot), BTreeMap::from([("healthy", 3), ("mps_not_ready", 2)]));
}

#[test]
fn time_slicing_needs_no_daemon() {
    let mut plan = replicas(2);
    plan.sharing.as_mut().unwrap().kind = SharingKind::TimeSlicing;
    let snapshot = seen(planned(NodeState::default(), plan), node());
    assert_eq!((listed(&snapshot), snapshot.mps_shares().len()), (BTreeMap::from([("healthy", 8)]), 0));
}

#[test]
fn gpus_too_old_for_mps_are_refused() {
    let words = |major, minor, count| {
        let mut node = node();
        node.gpus[2].compute_capability = Some(ComputeCapability { major, minor });
        let (snapshot, effects) =
            apply(planned(NodeState::default(), replicas(count)), Event::Observed(Box::new(node)), NOW);
        assert_eq!(
            listed(&ready(snapshot)).is_empty(),
            !effects.iter().all(|it| !matches!(it, Effect::PlanProblem(_)))
        );
        let problem = |effect| match effect {
            Effect::PlanProblem(problem) => Some(problem.to_string()),
            _ => None,
        };
        effects.into_iter().find_map(problem).unwrap_or_default()
    };
    assert_eq!(words(3, 5, 16), "");
    assert_eq!(words(7, 0, 48), "");
    assert_eq!(
        words(3, 0, 2),
        "nvidia.com/gpu is to be shared by MPS, for which GPUs 0000:47:00.0 are too old (compute capability below 3.5); \
         it is not offered"
    );
    assert_eq!(
        words(6, 1, 17),
        "nvidia.com/gpu is to be shared by MPS with 17 replicas, but the MPS server of GPU 0000:47:00.0 takes 16 clients \
         at most; it is not offered"
    );
}
