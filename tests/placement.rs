//! Who holds what and how good it is, against a brute force of the collective over all sets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "the helpers of a test may end it")]

#[allow(dead_code, reason = "of the choice's brute force, collectives alone are compared here")]
#[path = "oracle/mod.rs"]
mod oracle;

use std::collections::BTreeMap;
use std::time::Duration;

use linkwise::allocation::DeviceId;
use linkwise::machines;
use linkwise::publish::placement::{Allocation, Placements};
use linkwise::state::{
    ClaimedDevice, ContainerHoldings, ContainerName, Door, DraGpus, Event, Holdings, NAMES_KEPT, NodeState,
    ResourceName, ResourcePlan,
};
use linkwise::topology::GpuUuid;
use oracle::{Oracle, Set, places, subsets};

const NOW: Duration = Duration::from_secs(1_700_000_000);

fn observed(machine: &str) -> Event {
    Event::Observed(Box::new(machines::load(machine).unwrap().observed))
}

fn node(machine: &str) -> NodeState {
    NodeState::default().apply(observed(machine), NOW).0
}

fn after(node: &NodeState, event: Event) -> NodeState {
    node.clone().apply(event, NOW).0
}

fn name(pod: &str, container: &str) -> ContainerName {
    ContainerName { namespace: "ml".into(), pod: pod.into(), container: container.into() }
}

fn uuids(node: &NodeState, set: Set) -> Vec<GpuUuid> {
    places(set).map(|place| node.topology().gpus()[place].uuid.clone()).collect()
}

/// Containers with ids of `nvidia.com/gpu`.
fn listed<I: Into<String>>(containers: impl IntoIterator<Item = (ContainerName, Vec<I>)>) -> Holdings {
    let mut holdings = Holdings::default();
    for (name, ids) in containers {
        let ids = ids.into_iter().map(|id| DeviceId::from(id.into()));
        let held = ContainerHoldings { devices: [(ResourceName::gpu(), ids.collect())].into(), ..Default::default() };
        holdings
            .containers
            .extend(held.devices[&ResourceName::gpu()].iter().map(|id| (ResourceName::gpu(), id.clone())));
        holdings.add(name, held);
    }
    holdings
}

fn held(node: &NodeState, sets: &[Set]) -> Event {
    let ids = |set: &Set| uuids(node, *set).iter().map(ToString::to_string).collect();
    let containers = sets.iter().enumerate().map(|(at, set)| (name(&format!("pod-{at}"), "main"), ids(set)));
    Event::Holders(Some(listed::<String>(containers)))
}

fn claimed(name: &str, device: &str) -> ClaimedDevice {
    ClaimedDevice {
        claim: format!("ml/{name}"),
        driver: "gpu.nvidia.com".to_owned(),
        pool: "node".to_owned(),
        device: device.to_owned(),
        cdi_names: Vec::new(),
    }
}

fn of(allocations: &[Allocation], pod: &str) -> Allocation {
    allocations.iter().find(|allocation| allocation.holder.pod == pod).unwrap().clone()
}

#[test]
fn placements_are_those_of_a_brute_force() {
    for machine in ["dgx1-v100", "pcie-8x-pix-pairs", "nvlink-bridge-pairs", "azure-ndv2-v100", "power9-v100"] {
        let node = node(machine);
        let topology = node.topology().clone();
        let oracle = Oracle::new(&topology);
        let all: Set = (1 << topology.gpus().len()) - 1;
        let top = |of: Set, size: u32| {
            let sets = subsets(of).filter(|set| set.count_ones() == size);
            sets.map(|set| oracle.collective(set)).max()
        };
        for first in subsets(all).filter(|set| *set != 0) {
            let rest = all & !first;
            // One more of some size beside it, so that what is free takes many forms.
            let second = subsets(rest).nth(first as usize % 7).unwrap_or(0);
            let state = after(&node, held(&node, &[first, second]));
            let shown = Placements::of(&state);
            let allocation = of(&shown.allocations, "pod-0");
            assert_eq!(allocation.gpus, uuids(&node, first));
            let linked = (first.count_ones() > 1).then(|| oracle.collective(first));
            assert_eq!(allocation.collective, linked, "{machine} {first:b}");
            let best = linked.and_then(|_| top(all, first.count_ones()));
            assert_eq!(allocation.best, best, "{machine} {first:b}");
            let free = rest & !second;
            let mut worst = (1, 1);
            for outlook in &shown.outlook {
                let size = u32::try_from(outlook.size).unwrap();
                let now = top(free, size).filter(|_| size > 1);
                assert_eq!((outlook.collective, outlook.best), (now, top(all, size).filter(|_| size > 1)));
                let chosen = if free.count_ones() >= size { outlook.size } else { 0 };
                assert_eq!(outlook.gpus.len(), chosen, "{machine} {free:b} {size}");
                assert!(outlook.gpus.iter().all(|gpu| uuids(&node, free).contains(gpu)));
                let parts = outlook.best.zip(outlook.collective).unwrap_or((1, 1));
                if parts.0 * worst.1 > worst.0 * parts.1 {
                    worst = parts;
                }
            }
            let (best, now) = shown.fragmentation().unwrap();
            assert_eq!(best * worst.1, worst.0 * now, "{machine} {free:b}");
            assert_eq!(shown.free.values().sum::<usize>(), free.count_ones() as usize);
        }
    }
}

#[test]
fn unknown_holders_make_nothing_free() {
    let shown = Placements::of(&node("dgx1-v100"));
    assert!(shown.free.is_empty() && shown.fragmentation().is_none() && shown.allocations.is_empty());
    assert!(shown.outlook.iter().all(|outlook| outlook.gpus.is_empty() && outlook.collective.is_none()));
    assert_eq!(shown.outlook.iter().map(|outlook| outlook.size).collect::<Vec<_>>(), [1, 2, 4, 8]);
}

#[test]
fn each_container_has_its_own_allocation() {
    let node = node("dgx1-v100");
    let [a, b] = [uuids(&node, 0b11), uuids(&node, 0b1100)].map(|set| set.iter().map(ToString::to_string).collect());
    let long = "p".repeat(253);
    let containers = [(name(&long, "main"), a), (name(&long, "sidecar"), b)];
    let state = after(&node, Event::Holders(Some(listed::<String>(containers))));
    let shown = Placements::of(&state).allocations;
    let named: Vec<_> = shown.iter().map(|one| (one.holder.container.as_str(), one.gpus.len())).collect();
    assert_eq!((named, shown[0].holder.pod.len()), (vec![("main", 2), ("sidecar", 2)], 253));
    assert!(shown.iter().all(|one| one.door == Door::Plugin && one.resource == "nvidia.com/gpu"));
}

#[test]
fn unknown_id_leaves_no_collective() {
    let node = node("dgx1-v100");
    let mut ids: Vec<String> = uuids(&node, 0b11).iter().map(ToString::to_string).collect();
    ids.push("GPU-gone".to_owned());
    let containers = [(name("lost", "main"), ids), (name("vendor", "main"), vec!["nic0".to_owned()])];
    let shown = Placements::of(&after(&node, Event::Holders(Some(listed(containers))))).allocations;
    // What is no GPU of this node is no allocation.
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].gpus.len(), shown[0].collective, shown[0].best), (2, None, None));
}

#[test]
fn device_held_twice_is_shown_twice_and_free_once() {
    let node = node("dgx1-v100");
    let state = after(&node, held(&node, &[0b11, 0b11]));
    let shown = Placements::of(&state);
    assert_eq!(shown.allocations.len(), 2);
    assert_eq!(shown.free.values().sum::<usize>(), 6);
}

#[test]
fn claims_of_one_container_count_together() {
    let plan = ResourcePlan { dra: DraGpus::All, ..ResourcePlan::default() };
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), observed("dgx1-v100"), unheld(), unheld()];
    let node = events.into_iter().fold(NodeState::default(), |node, event| node.apply(event, NOW).0);
    assert_eq!(Placements::of(&node).free.values().sum::<usize>(), 8, "GPUs of DRA can be had too");
    let claims = [claimed("one", "gpu-0"), claimed("two", "gpu-1")];
    let mut holdings = Holdings { claims: claims.clone().into(), ..Holdings::default() };
    for pod in ["first", "second"] {
        holdings.add(name(pod, "main"), ContainerHoldings { claims: claims.clone().into(), ..Default::default() });
    }
    let shown = Placements::of(&after(&node, Event::Holders(Some(holdings))));
    let first = of(&shown.allocations, "first");
    assert_eq!((first.door, first.resource.as_str(), first.gpus.len()), (Door::Dra, "gpu.nvidia.com", 2));
    assert!(first.collective.is_some() && first.gpus == of(&shown.allocations, "second").gpus);
    assert_eq!(shown.free.values().sum::<usize>(), 6);
}

#[test]
fn holders_are_forgotten_when_the_kubelet_stays_away() {
    let node = node("dgx1-v100");
    let state = after(&node, held(&node, &[0b11]));
    let at = |after: Duration| state.clone().apply(Event::Holders(None), NOW + after).0;
    let shown = |after| Placements::of(&at(after)).allocations.len();
    assert_eq!([shown(Duration::ZERO), shown(NAMES_KEPT - Duration::from_secs(1)), shown(NAMES_KEPT)], [1, 1, 0]);
    // The GPUs may still be held.
    assert_eq!(Placements::of(&at(NAMES_KEPT)).free.values().sum::<usize>(), 6);
    let gone = after(&state, Event::Holders(Some(Holdings::default())));
    assert_eq!(Placements::of(&gone).allocations, []);
}

#[test]
fn containers_beyond_the_bound_are_not_told_apart() {
    let mut holdings = Holdings::default();
    let claim = ContainerHoldings { claims: [claimed("c", "gpu-0")].into(), ..Default::default() };
    (0..10_000).for_each(|pod| holdings.add(name(&format!("pod-{pod}"), "main"), claim.clone()));
    assert_eq!(holdings.by_container.len(), 4096);
    let more = ContainerHoldings { claims: [claimed("c", "gpu-1")].into(), ..Default::default() };
    holdings.add(name("pod-0", "main"), more);
    let first: BTreeMap<_, _> = holdings.by_container.into_iter().take(1).collect();
    assert_eq!(first[&name("pod-0", "main")].claims.len(), 2, "listed again");
}
