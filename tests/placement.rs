//! The holders of GPUs and the quality of their placements, compared with a brute force of the collective of all sets.

use crate::oracle;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::claims::ClaimName;
use linkwise_core::publish::placement::{Allocation, Placements, Shortfall};
use linkwise_core::state::{
    ClaimedDevice, ContainerHoldings, ContainerName, Door, Event, HealthRecord, Holdings, NAMES_KEPT, NodeState,
    Prepared, PreparedClaim, PreparedDevice, ResourceName, ResourcePlan,
};
use linkwise_core::topology::{GpuUuid, MigObservation, NodeTopology};
use linkwise_host::machines;
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

/// The kubelet's list of containers that hold these ids of `nvidia.com/gpu`.
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

/// The best collective of any `size` GPUs of a set.
fn top(oracle: &Oracle<'_>, of: Set, size: u32) -> Option<u64> {
    subsets(of).filter(|set| set.count_ones() == size).map(|set| oracle.collective(set)).max()
}

/// Makes the GPUs of this set unhealthy.
fn sick(state: NodeState, set: Set) -> NodeState {
    let gpus = uuids(&state, set).into_iter();
    gpus.fold(state, |state, gpu| after(&state, Event::Xid { gpu, code: 79, instance: None }))
}

/// A DGX-1 whose GPUs go through DRA, without holders.
fn through_dra() -> NodeState {
    let plan = ResourcePlan { door: Door::Dra, ..ResourcePlan::default() };
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), observed("dgx1-v100"), unheld(), unheld()];
    events.into_iter().fold(NodeState::default(), |node, event| node.apply(event, NOW).0)
}

fn held(node: &NodeState, sets: &[Set]) -> Event {
    let ids = |set: &Set| uuids(node, *set).iter().map(ToString::to_string).collect();
    let containers = sets.iter().enumerate().map(|(at, set)| (name(&format!("pod-{at}"), "main"), ids(set)));
    Event::Holders(Some(listed::<String>(containers)))
}

fn claimed(name: &str, device: &str) -> ClaimedDevice {
    ClaimedDevice { cdi_names: Vec::new(), ..crate::resources::claimed(&format!("ml/{name}"), device, "") }
}

fn of(allocations: &[Allocation], pod: &str) -> Allocation {
    allocations.iter().find(|allocation| allocation.pod == pod).unwrap().clone()
}

#[test]
fn placements_match_brute_force() {
    for machine in ["dgx1-v100", "pcie-8x-pix-pairs", "nvlink-bridge-pairs", "azure-ndv2-v100", "power9-v100"] {
        let node = node(machine);
        let topology = node.topology().clone();
        let oracle = Oracle::new(&topology);
        let all: Set = (1 << topology.gpus().len()) - 1;
        let top = |of, size| top(&oracle, of, size);
        for first in subsets(all).filter(|set| *set != 0) {
            let rest = all & !first;
            // A second pod's set varies the free GPUs.
            let second = subsets(rest).nth(first as usize % 7).unwrap_or(0);
            let state = after(&node, held(&node, &[first, second]));
            let shown = Placements::of(&state);
            let allocation = of(&shown.allocations, "pod-0");
            assert_eq!(allocation.gpus, uuids(&node, first));
            let collective = (first.count_ones() > 1).then(|| oracle.collective(first));
            assert_eq!(allocation.collective, collective, "{machine} {first:b}");
            let best = collective.and_then(|_| top(all, first.count_ones()));
            assert_eq!(allocation.best, best, "{machine} {first:b}");
            let free = rest & !second;
            let (mut worst_best, mut worst_now) = (1, 1);
            for outlook in &shown.outlook {
                let size = u32::try_from(outlook.size).unwrap();
                let now = top(free, size).filter(|_| size > 1);
                assert_eq!((outlook.collective, outlook.best), (now, top(all, size).filter(|_| size > 1)));
                let chosen = if free.count_ones() >= size { outlook.size } else { 0 };
                assert_eq!(outlook.gpus.len(), chosen, "{machine} {free:b} {size}");
                assert!(outlook.gpus.iter().all(|gpu| uuids(&node, free).contains(gpu)));
                let (best, now) = outlook.best.zip(outlook.collective).unwrap_or((1, 1));
                if best * worst_now > worst_best * now {
                    (worst_best, worst_now) = (best, now);
                }
            }
            let (best, now) = shown.fragmentation().unwrap();
            assert_eq!(best * worst_now, worst_best * now, "{machine} {free:b}");
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
    let named: Vec<_> = shown.iter().map(|one| (one.container.as_str(), one.gpus.len())).collect();
    assert_eq!((named, shown[0].pod.len()), (vec![("main", 2), ("sidecar", 2)], 253));
    assert!(shown.iter().all(|one| one.door == "plugin" && one.resource == "nvidia.com/gpu"));
}

#[test]
fn unknown_id_leaves_no_collective() {
    let node = node("dgx1-v100");
    let mut ids: Vec<String> = uuids(&node, 0b11).iter().map(ToString::to_string).collect();
    ids.push("GPU-gone".to_owned());
    let containers = [(name("lost", "main"), ids), (name("vendor", "main"), vec!["nic0".to_owned()])];
    let shown = Placements::of(&after(&node, Event::Holders(Some(listed(containers))))).allocations;
    // A container without a GPU of this node has no allocation.
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].gpus.len(), shown[0].collective, shown[0].best), (2, None, None));
}

#[test]
fn device_held_twice_is_shown_twice_and_counted_once() {
    let node = node("dgx1-v100");
    let state = after(&node, held(&node, &[0b11, 0b11]));
    let shown = Placements::of(&state);
    assert_eq!(shown.allocations.len(), 2);
    assert_eq!(shown.free.values().sum::<usize>(), 6);
}

#[test]
fn claims_of_one_container_count_together() {
    let node = through_dra();
    assert_eq!(Placements::of(&node).free.values().sum::<usize>(), 8, "GPUs of DRA are not free");
    let claims = [claimed("one", "gpu-0"), claimed("two", "gpu-1")];
    let mut holdings = Holdings { claims: claims.clone().into(), ..Holdings::default() };
    for pod in ["first", "second"] {
        holdings.add(name(pod, "main"), ContainerHoldings { claims: claims.clone().into(), ..Default::default() });
    }
    let shown = Placements::of(&after(&node, Event::Holders(Some(holdings))));
    let first = of(&shown.allocations, "first");
    assert_eq!((&*first.door, first.resource.as_str(), first.gpus.len()), ("dra", "gpu.nvidia.com", 2));
    assert!(first.collective.is_some() && first.gpus == of(&shown.allocations, "second").gpus);
    assert_eq!(shown.free.values().sum::<usize>(), 6);
}

#[test]
fn holder_names_expire_when_the_kubelet_stays_away() {
    let node = node("dgx1-v100");
    let state = after(&node, held(&node, &[0b11]));
    let at = |after: Duration| state.clone().apply(Event::Holders(None), NOW + after).0;
    let shown = |after| Placements::of(&at(after)).allocations.len();
    let almost = NAMES_KEPT.saturating_sub(Duration::from_secs(1));
    assert_eq!([Duration::ZERO, almost, NAMES_KEPT].map(shown), [1, 1, 0]);
    let back = state.clone().apply(Event::Holders(None), NOW.saturating_sub(Duration::from_secs(86_400))).0;
    assert_eq!(Placements::of(&back).allocations.len(), 1, "a clock that jumped back forgot names");
    // The GPUs stay held, although the names of the holders are forgotten.
    assert_eq!(Placements::of(&at(NAMES_KEPT)).free.values().sum::<usize>(), 6);
    let gone = after(&state, Event::Holders(Some(Holdings::default())));
    assert_eq!(Placements::of(&gone).allocations, []);
}

#[test]
fn containers_beyond_the_bound_are_not_added() {
    let mut holdings = Holdings::default();
    let claim = ContainerHoldings { claims: [claimed("c", "gpu-0")].into(), ..Default::default() };
    (0..10_000).for_each(|pod| holdings.add(name(&format!("pod-{pod}"), "main"), claim.clone()));
    assert_eq!(holdings.by_container.len(), 4096);
    let more = ContainerHoldings { claims: [claimed("c", "gpu-1")].into(), ..Default::default() };
    holdings.add(name("pod-0", "main"), more);
    let first: BTreeMap<_, _> = holdings.by_container.into_iter().take(1).collect();
    assert_eq!(first[&name("pod-0", "main")].claims.len(), 2, "a known container got no more devices");
}

fn ids(node: &NodeState, set: Set) -> BTreeSet<DeviceId> {
    uuids(node, set).iter().map(DeviceId::from).collect()
}

/// The kubelet asked for a choice among `offered` and allocated `given`.
fn allocated(node: &NodeState, given: Set, offered: Set) -> Event {
    let offered = ids(node, offered).into_iter().collect();
    Event::Allocated { resource: ResourceName::gpu(), devices: ids(node, given), offered }
}

/// A machine whose GPUs no pod holds.
fn unheld(machine: &str) -> NodeState {
    after(&node(machine), Event::Holders(Some(Holdings::default())))
}

/// The allocation of `pod-0`, which got `given` and is listed beside pods with the sets `others`.
fn admitted(node: &NodeState, given: Set, offered: Set, others: &[Set]) -> Allocation {
    let given_now = after(node, allocated(node, given, offered));
    let listed = after(&given_now, held(node, &[&[given], others].concat()));
    of(&Placements::of(&listed).allocations, "pod-0")
}

#[test]
fn best_at_admission_matches_brute_force() {
    for machine in ["dgx1-v100", "pcie-8x-pix-pairs", "azure-ndv2-v100"] {
        let idle = unheld(machine);
        let topology = idle.topology().clone();
        let oracle = Oracle::new(&topology);
        let all: Set = (1 << topology.gpus().len()) - 1;
        let top = |of, size| top(&oracle, of, size);
        for (number, before) in subsets(all).enumerate().filter(|(number, _)| number % 3 == 0) {
            let state = after(&idle, held(&idle, &[before]));
            let rest: Vec<Set> = subsets(all & !before).filter(|set| set.count_ones() > 1).collect();
            let Some(given) = rest.get(number % rest.len().max(1)) else { continue };
            // In every second case the kubelet asked for no choice.
            let offered = if number % 2 == 0 { all & !before } else { 0 };
            let shown = admitted(&state, *given, offered, &[before]);
            let size = given.count_ones();
            let (then, own, best) = (top(all & !before, size), oracle.collective(*given), top(all, size));
            assert_eq!(shown.best_at_admission, then, "{machine} {before:b} {given:b}");
            let why = [(Some(own) < then, Shortfall::Narrowed), (then < best, Shortfall::Fragmented)];
            let why: Vec<_> = why.into_iter().filter(|(applies, _)| *applies).map(|(_, why)| why).collect();
            assert_eq!(shown.why, why, "{machine} {before:b} {given:b}");
        }
    }
}

#[test]
fn unhealthy_gpus_are_named_as_a_shortfall() {
    let node = unheld("dgx1-v100");
    let shown = admitted(&sick(node.clone(), 0b1101_1110), 0b10_0001, 0b10_0001, &[]);
    assert_eq!((shown.best_at_admission, shown.why), (shown.collective, vec![Shortfall::Sick]));
    // Another pod holds GPU 2, which has an NVLink to GPU 0.
    let state = sick(after(&node, held(&node, &[0b100])), 0b1101_1010);
    let shown = admitted(&state, 0b10_0001, 0b10_0001, &[0b100]);
    assert_eq!(shown.why, [Shortfall::Fragmented, Shortfall::Sick]);
}

#[test]
fn ended_pods_devices_are_free_when_offered() {
    let node = unheld("dgx1-v100");
    let all: Set = 0xff;
    // The kubelet's last list still has a pod that has ended.
    let state = after(&node, held(&node, &[all & !0b10_0001]));
    let best = |offered: Set| admitted(&state, 0b10_0001, offered, &[]).best_at_admission.unwrap();
    assert!(best(all) > best(0), "{} {}", best(all), best(0));
}

#[test]
fn given_device_is_not_free_before_it_is_listed() {
    let node = unheld("dgx1-v100");
    let given = after(&node, allocated(&node, 0b11, 0xff));
    let free = |state: &NodeState| Placements::of(state).free.values().sum::<usize>();
    assert_eq!((free(&node), free(&given)), (8, 6));
    assert!(given.ledger().awaits_listing());
    // The first list may be older than the Allocate. If the second lacks the device too, the pod was not admitted.
    let once = after(&given, held(&node, &[]));
    let twice = after(&once, held(&node, &[]));
    assert_eq!((free(&once), free(&twice)), (6, 8));
    assert!(once.ledger().awaits_listing() && !twice.ledger().awaits_listing());
    let listed = after(&once, held(&node, &[0b11]));
    assert!(!listed.ledger().awaits_listing());
}

/// The state of the next process, which reads this health record.
fn restarted(machine: &str, record: &HealthRecord) -> NodeState {
    let text = serde_json::to_string(record).unwrap();
    let record: HealthRecord = serde_json::from_str(&text).unwrap();
    let state = NodeState::default().apply(Event::Restored(Box::new(record)), NOW).0;
    after(&state, observed(machine))
}

#[test]
fn admission_survives_a_restart_until_the_pod_ends() {
    let node = unheld("dgx1-v100");
    let given = after(&node, allocated(&node, 0b10_0001, 0xff));
    let before = admitted(&node, 0b10_0001, 0xff, &[]);
    let state = restarted("dgx1-v100", &given.record());
    let listed = after(&state, held(&node, &[0b10_0001]));
    assert_eq!(of(&Placements::of(&listed).allocations, "pod-0"), before);
    let unknown = after(&restarted("dgx1-v100", &node.record()), held(&node, &[0b10_0001]));
    let unknown = of(&Placements::of(&unknown).allocations, "pod-0");
    assert_eq!((unknown.best_at_admission, unknown.why, unknown.collective), (None, vec![], before.collective));
    // The first list of a kubelet that starts may lack pods that run.
    let missed = after(&listed, held(&node, &[]));
    assert_eq!(missed.record().admissions.len(), 1);
    assert_eq!(after(&missed, held(&node, &[])).record().admissions, []);
}

#[test]
fn admissions_are_no_more_than_devices() {
    let node = unheld("dgx1-v100");
    let mut state = node.clone();
    for given in subsets(0xff).filter(|set| *set != 0) {
        state = after(&state, allocated(&node, given, 0xff));
    }
    assert_eq!(state.record().admissions.len(), 1, "an admission outlived a later one with one of its GPUs");
}

#[test]
fn claim_is_compared_with_what_was_free_when_prepared() {
    let node = through_dra();
    let device =
        |place: usize| PreparedDevice::whole(&format!("gpu-{place}"), node.topology().gpus()[place].uuid.clone());
    let claim = |name: &str, places: &[usize]| PreparedClaim {
        claim: ClaimName { namespace: "ml".into(), name: name.into(), uid: format!("uid-{name}") },
        prepared: Prepared { devices: places.iter().map(|place| device(*place)).collect(), ..Prepared::default() },
        is_of_another_boot: false,
    };
    let list = |state: &NodeState, claims: &[(&str, &[usize])]| {
        let mut holdings = Holdings::default();
        for (pod, places) in claims {
            let devices = places.iter().map(|place| claimed(pod, &format!("gpu-{place}")));
            let held = ContainerHoldings { claims: devices.collect(), ..Default::default() };
            holdings.claims.extend(held.claims.iter().cloned());
            holdings.add(name(pod, "main"), held);
        }
        after(state, Event::Holders(Some(holdings)))
    };
    let state = after(&node, Event::Prepared(vec![claim("far", &[0, 5]), claim("near", &[1, 2])]));
    assert!(state.ledger().awaits_listing());
    let state = list(&state, &[("far", &[0, 5]), ("near", &[1, 2])]);
    assert!(!state.ledger().awaits_listing());
    let shown = Placements::of(&state).allocations;
    let far = of(&shown, "far");
    assert_eq!((far.best_at_admission, far.why.as_slice()), (far.best, [Shortfall::Scheduler].as_slice()));
    // The claim `far` already had its GPUs when `near` was prepared.
    let near = of(&shown, "near");
    assert!(near.best_at_admission.is_some() && near.best_at_admission <= far.best_at_admission);
    // A claim that the kubelet lists before it is prepared here was prepared by the previous process.
    let earlier = list(&node, &[("far", &[0, 5])]);
    let earlier = list(&after(&earlier, Event::Prepared(vec![claim("far", &[0, 5])])), &[("far", &[0, 5])]);
    assert_eq!(of(&Placements::of(&earlier).allocations, "far").best_at_admission, None);
    let kept = after(&restarted("dgx1-v100", &state.record()), Event::Prepared(vec![claim("far", &[0, 5])]));
    let kept = list(&kept, &[("far", &[0, 5])]);
    assert_eq!(of(&Placements::of(&kept).allocations, "far").why, [Shortfall::Scheduler]);
    assert!(after(&state, Event::Prepared(Vec::new())).record().claim_admissions.is_empty());
}

#[test]
fn nvlink_sharp_needs_nvswitches_and_hopper_or_later() {
    for (machine, mb_per_s) in [
        ("dgx-h100", Some(490_280)),
        ("hgx-h200", Some(490_280)),
        ("aws-p5", Some(490_280)),
        ("hgx-b200", Some(830_872)),
        ("gb200-nvl72-node", Some(640_958)),
        ("dgx-a100", None),
        ("dgx2-v100", None),
        ("dgx1-v100", None),
        ("workstation-a6000", None),
    ] {
        let idle = unheld(machine);
        let gpus = idle.topology().gpus().len();
        let shown = Placements::of(&idle).outlook;
        let most = shown.iter().rfind(|outlook| outlook.size == gpus).unwrap();
        assert_eq!((most.nvls, shown[0].nvls), (mb_per_s, None), "{machine}");
        let held = after(&idle, held(&idle, &[(1 << gpus) - 1]));
        let allocation = of(&Placements::of(&held).allocations, "pod-0");
        assert_eq!((allocation.nvls, allocation.collective), (mb_per_s, most.collective), "{machine}");
        assert!(mb_per_s.is_none() || idle.topology().nvls([0].into_iter()).is_none(), "one GPU");
    }
    let mut seen = machines::load("dgx-h100").unwrap().observed;
    seen.gpus[3].mig = Some(MigObservation { enabled: true, profiles: Vec::new(), devices: Vec::new() });
    let (topology, _) = NodeTopology::assemble(&seen);
    assert_eq!(topology.nvls(0..8), None, "a GPU in MIG mode");
    assert_eq!((topology.nvls(0..3), topology.nvls([0, 99].into_iter())), (Some(315_180), None));
}

#[test]
fn nvlink_sharp_orders_sets_as_rings_do() {
    for machine in ["dgx-h100", "hgx-b200"] {
        let mut seen = machines::load(machine).unwrap().observed;
        for (gpu, links) in [(1, 9), (4, 17), (6, 9)] {
            let groups = seen.gpus[gpu].nvlinks.as_mut().unwrap();
            let mut left = links;
            for group in groups {
                group.links.truncate(left);
                left -= group.links.len();
            }
        }
        let state = after(&NodeState::default(), Event::Observed(Box::new(seen)));
        let (topology, tables) = (state.topology(), state.tables());
        for size in 2..=8 {
            let sets: Vec<Set> = subsets(0xff).filter(|set| set.count_ones() == size).collect();
            let worth = |set: Set| (tables.collective(places(set).collect()), topology.nvls(places(set)));
            let mut worths: Vec<_> = sets.into_iter().map(worth).collect();
            worths.sort();
            assert!(worths.iter().all(|(rings, nvls)| rings.is_some() && nvls.is_some()));
            assert!(worths.is_sorted_by_key(|(_, nvls)| *nvls), "{machine} {size}");
            worths.dedup_by_key(|(rings, _)| *rings);
            let kinds = worths.len();
            worths.dedup_by_key(|(_, nvls)| *nvls);
            assert!(worths.len() == kinds && (kinds > 1 || size > 5), "{machine} {size}: {worths:?}");
        }
    }
}
