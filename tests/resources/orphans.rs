//! Orphans: ids that pods hold and this node does not offer. They are on the list, unhealthy, also after a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Effect, Event, Health, HealthPoll, NodeState, NumaHints, Resource, ResourceName, UnhealthyReason,
};
use linkwise_core::topology::NodeObservation;

use crate::resources::{LATER, NOW, after, gpu, mixed, no_holders, planned, renamed, resource, sliced};

fn id(text: impl Into<String>) -> DeviceId {
    DeviceId::from(text.into())
}

static MACHINE: LazyLock<NodeObservation> = LazyLock::new(mixed);

fn uuid(at: usize) -> String {
    MACHINE.gpus[at].uuid.to_string()
}

/// The machine with some of its GPUs.
fn only(gpus: &BTreeSet<usize>) -> NodeObservation {
    let mut observed = MACHINE.clone();
    let mut at = 0..;
    observed.gpus.retain(|_| gpus.contains(&at.next().unwrap()));
    observed
}

fn seen(gpus: impl IntoIterator<Item = usize>) -> Event {
    Event::Observed(Box::new(only(&gpus.into_iter().collect())))
}

fn held(ids: &[&str]) -> Event {
    Event::Holders(Some(ids.iter().map(|text| (gpu(), id(*text))).collect()))
}

/// A resource's list as the kubelet gets it: each id, and the reason if the device is unhealthy.
fn list(snapshot: &NodeState, of: &ResourceName) -> BTreeMap<String, Option<UnhealthyReason>> {
    let devices = snapshot.offers().of(of).map(|(id, device)| (id, device.health.clone()));
    let reason = |health| match health {
        Health::Healthy => None,
        Health::Unhealthy { reason, .. } => Some(reason),
    };
    let mut list = BTreeMap::new();
    let unknown = snapshot.offers().resources().get(of).into_iter().flat_map(Resource::unknown);
    for (id, health) in devices.chain(unknown) {
        assert!(list.insert(id.to_string(), reason(health)).is_none(), "{id} is listed twice");
    }
    list
}

#[test]
fn held_id_survives_restart_until_pod_ends() {
    let (snapshot, effects) = after(NodeState::default(), [seen([0, 1])]).apply(held(&[&uuid(3)]), LATER);
    assert_eq!(list(&snapshot, &gpu())[&uuid(3)], Some(UnhealthyReason::Gone));
    assert_eq!(snapshot.offers().of(&gpu()).count(), 2, "an orphan is not a device");
    let reported = Effect::HeldUnoffered(gpu(), vec![id(uuid(3))]);
    assert_eq!(effects, [reported, Effect::Publish]);
    assert!(snapshot.offers().awaits_holders());
    let refused = snapshot.allocate(&gpu(), &[id(uuid(3))]).unwrap_err().to_string();
    assert!(refused.contains("is unhealthy: the device is gone from the node"), "{refused}");
    let (snapshot, effects) = snapshot.apply(held(&[&uuid(3)]), LATER);
    assert_eq!(effects, [], "the same list changes nothing");
    // The orphan stays while the kubelet is silent. The first list without it may be older than the pod.
    assert_eq!(list(&after(snapshot.clone(), [Event::Holders(None)]), &gpu()).len(), 3);
    let snapshot = after(snapshot, [no_holders()]);
    assert_eq!(list(&snapshot, &gpu()).len(), 3);
    let (snapshot, effects) = snapshot.apply(no_holders(), LATER);
    assert_eq!((list(&snapshot, &gpu()).len(), effects), (2, vec![Effect::Publish]));
    assert!(!snapshot.offers().awaits_holders());
}

#[test]
fn orphan_is_a_device_again_when_its_gpu_is_back() {
    let snapshot = after(NodeState::default(), [held(&[&uuid(3)]), seen([0, 1]), seen([0, 1, 3])]);
    assert_eq!(list(&snapshot, &gpu()), [0, 1, 3].map(|at| (uuid(at), None)).into());
    assert!(!snapshot.offers().awaits_holders());
}

#[test]
fn orphaned_slots_keep_numa_and_are_not_offered() {
    let slot = |at: usize, slot: u32| format!("{}::{slot}", uuid(at));
    let (first, last, odd) = (slot(0, 3), slot(3, 7), format!("{}::x", uuid(0)));
    let held = held(&[&slot(0, 1), &first, &last, &odd]);
    let snapshot = after(NodeState::default(), [planned(&sliced(2)), seen([0, 1]), held]);
    let listed = list(&snapshot, &gpu());
    assert_eq!(listed[&slot(0, 1)], None, "a slot of the present plan is healthy");
    let withdrawn = Some(UnhealthyReason::Withdrawn);
    assert_eq!((&listed[&first], &listed[&odd]), (&withdrawn, &withdrawn));
    assert_eq!(listed[&last], Some(UnhealthyReason::Gone), "the slot's GPU is missing");
    // A restarted kubelet aligns a pod again by the NUMA nodes of its devices.
    let numa = |of: &str| snapshot.offers().of(&gpu()).find(|(id, _)| id.as_str() == of).map(|(_, it)| &it.numa_nodes);
    assert!(numa(&first).is_some_and(|nodes| !nodes.is_empty()) && numa(&first) == numa(&slot(0, 1)));
    assert_eq!((numa(&last), numa(&odd)), (None, None));
    // The GPU comes back, with fewer slots.
    let snapshot = after(snapshot, [seen([0, 1, 3])]);
    assert_eq!(list(&snapshot, &gpu())[&last], withdrawn);
    // The earlier plan comes back.
    let snapshot = after(snapshot, [planned(&sliced(8))]);
    assert_eq!((&list(&snapshot, &gpu())[&first], &list(&snapshot, &gpu())[&last]), (&None, &None));
    assert!(list(&snapshot, &gpu())[&odd].is_some());
}

/// linkwise lists even a foreign id, because the kubelet looks up each id that pods hold under the resource's name.
#[test]
fn foreign_id_is_listed_foreign_resource_is_not() {
    let nic = (resource("other.vendor/nic"), id("nic0"));
    let holders = BTreeSet::from([(gpu(), id("nvidia0")), nic]);
    let snapshot = after(NodeState::default(), [seen([0]), Event::Holders(Some(holders.into_iter().collect()))]);
    assert_eq!(list(&snapshot, &gpu())["nvidia0"], Some(UnhealthyReason::Gone));
    assert_eq!(snapshot.offers().resources().keys().collect::<Vec<_>>(), [&gpu()]);
}

#[test]
fn held_ids_alone_make_no_resource() {
    for snapshot in [
        after(NodeState::default(), [held(&[&uuid(0)]), seen([])]),
        after(NodeState::default(), [planned(&renamed()), seen([0]), held(&[&uuid(0)])]),
    ] {
        assert!(!snapshot.offers().resources().contains_key(&gpu()));
    }
    // Orphans stay on the list after the resource's last device is gone.
    let held = || held(&[&uuid(3)]);
    let snapshot = after(NodeState::default(), [seen([0, 1]), held(), seen([]), held(), held()]);
    assert_eq!(list(&snapshot, &gpu()), [(uuid(3), Some(UnhealthyReason::Gone))].into());
    assert!(snapshot.offers().resources().contains_key(&gpu()), "the resource is still served");
    let snapshot = after(snapshot, [no_holders(), no_holders()]);
    assert!(snapshot.offers().resources().is_empty() && !snapshot.offers().awaits_holders());
}

#[test]
fn absurd_holder_list_is_bounded() {
    let many = (0..40_000).map(|number| (gpu(), id(format!("GPU-{number:06}"))));
    let long = [(gpu(), id("x".repeat(64)))];
    let events = [seen([0, 1]), Event::Holders(Some(many.chain(long).collect()))];
    let snapshot = after(NodeState::default(), events);
    let listed = list(&snapshot, &gpu());
    assert_eq!(listed.len(), 1 << 14);
    assert!(listed.keys().all(|id| id.len() <= 63));
    assert_eq!(listed.values().filter(|reason| reason.is_none()).count(), 2, "orphans displace no device");
}

#[test]
fn first_list_waits_for_scan_poll_and_holders() {
    let start = || NodeState::default().awaiting(|first| (first.scan, first.poll, first.holders) = (true, true, true));
    let polled = || Event::Polled([(uuid(0).parse().unwrap(), HealthPoll::default())].into());
    let publishes = |events: Vec<Event>| {
        let mut state = start();
        let mut published = Vec::new();
        for event in events {
            let (next, effects) = state.apply(event, NOW);
            (state, _) = (next, published.push(effects.contains(&Effect::Publish)));
        }
        published
    };
    assert_eq!(publishes(vec![seen([0]), polled(), held(&[])]), [false, false, true]);
    assert_eq!(publishes(vec![seen([0]), held(&[]), polled()]), [false, false, true]);
    assert_eq!(publishes(vec![held(&[]), seen([0]), polled()]), [false, false, true]);
    // The answer that holders are unknown counts, too. A node without GPUs waits for nothing.
    assert_eq!(publishes(vec![seen([0]), polled(), Event::Holders(None)]), [false, false, true]);
    assert_eq!(publishes(vec![seen([])]), [true]);
    // A poll before the scan does not count, and neither a plan nor NUMA hints replace a later poll.
    let early = vec![polled(), held(&[]), seen([0]), planned(&sliced(2)), Event::NumaHints(NumaHints::Off), polled()];
    assert_eq!(publishes(early), [false, false, false, false, false, true]);
}
