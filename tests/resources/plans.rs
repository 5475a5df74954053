//! Plans on a machine: the texts about impossible parts of a plan, and the resources that are offered nevertheless.

use std::collections::BTreeSet;

use linkwise_core::allocation::{AllocationPolicy, AllocationRequest, DeviceId};
use linkwise_core::state::{
    Effect, Event, Filter, GpuSelector, Health, MigInstance, MigStrategy, NamePattern, NodeState, Pattern, PlanProblem,
    ResourceName, ResourcePlan, SharedDevices, SharedResource, Sharing, SharingKind, UnhealthyReason,
};
use linkwise_core::topology::{NodeObservation, NodeTopology, NumaNodeId};

use crate::resources::{
    NOW, after, dgx, gpu, mig, mixed, no_holders, planned, problems, renamed, resource, seen, sharing, sliced, with,
};

fn replicated(name: &str, replicas: u32) -> SharedResource {
    SharedResource::new(resource(name), replicas)
}

fn offered(snapshot: &NodeState) -> Vec<(String, usize)> {
    let healthy =
        |resource| snapshot.offers().of(resource).filter(|(_, device)| device.health == Health::Healthy).count();
    let all = snapshot.offers().resources().keys().map(|resource| (resource.to_string(), healthy(resource)));
    all.filter(|(_, count)| *count > 0).collect()
}

/// A UUID that no GPU of the machine has.
const GONE: &str = "GPU-99999999-0000-4000-8000-000000000000";

/// The impossible parts of a plan are withheld from the first scan on, and the rest is offered.
#[test]
fn impossible_plan_is_withheld_and_named() {
    let on_mig = |kind, shared| ResourcePlan { mig_strategy: MigStrategy::Mixed, ..sharing(kind, shared) };
    let slicing = |shared| on_mig(SharingKind::TimeSlicing, shared);
    let by_mps = |shared| on_mig(SharingKind::Mps, shared);
    let devices = |devices| SharedResource { devices, ..replicated("nvidia.com/gpu", 2) };
    let list = |text: &str| SharedDevices::List(vec![text.parse().unwrap()]);
    let renamed = |name: &str, to: &str| SharedResource { rename: Some(resource(to)), ..replicated(name, 2) };
    let long = format!("{}.com/{}", "x".repeat(40), "y".repeat(60));
    let name = NamePattern { pattern: Pattern::new("*"), name: resource(&long) };
    let by_default = Sharing::new(SharingKind::TimeSlicing, vec![replicated(&long, 2)]);
    let by_default = Sharing { rename_by_default: true, ..by_default };
    let cases = [
        (
            mig(MigStrategy::Single),
            "MIG strategy single: the MIG devices differ (1g.10gb on 0000:0f:00.0, 0000:4e:00.0; 1g.10gb+me on \
             0000:4e:00.0; 2c.4g.40gb on 0000:47:00.0; 2g.20gb on 0000:4e:00.0; 3g.40gb on 0000:47:00.0); none is \
             offered",
            0,
        ),
        (
            slicing(vec![replicated("nvidia.com/gpu", 1)]),
            "nvidia.com/gpu: replicas is 1, at least 2 are needed; it is not offered",
            13,
        ),
        (
            slicing(vec![replicated("nvidia.com/mig-1g.10gb", u32::MAX)]),
            "nvidia.com/mig-1g.10gb would have 34359738360 slots, at most 16384 are possible; each device gets 2048",
            16_390,
        ),
        (
            slicing(vec![devices(SharedDevices::Count(2))]),
            "nvidia.com/gpu: 2 of its devices are to be shared, the node has 1; these are shared",
            15,
        ),
        (
            slicing(vec![devices(list("1"))]),
            "nvidia.com/gpu has no device 1 that could be shared; the others are shared",
            14,
        ),
        (
            slicing(vec![devices(list(GONE))]),
            "nvidia.com/gpu has no device GPU-99999999-0000-4000-8000-000000000000 that could be shared; the others \
             are shared",
            14,
        ),
        (
            by_mps(vec![replicated("nvidia.com/mig-3g.40gb", 2)]),
            "nvidia.com/mig-3g.40gb is to be shared by MPS, but GPUs 0000:47:00.0 are in MIG mode; it is not offered",
            13,
        ),
        (
            sharing(SharingKind::Mps, vec![replicated("nvidia.com/gpu", 2)]),
            "nvidia.com/gpu is to be shared by MPS, but GPUs 0000:0f:00.0, 0000:47:00.0, 0000:4e:00.0 are in MIG mode; \
             it is not offered",
            0,
        ),
        (
            by_mps(vec![replicated("nvidia.com/gpu", 49)]),
            "nvidia.com/gpu is to be shared by MPS with 49 replicas, but the MPS server of GPU 0000:07:00.0 takes 48 \
             clients at most; it is not offered",
            13,
        ),
        (
            slicing(vec![renamed("nvidia.com/gpu", "nvidia.com/mig-2g.20gb")]),
            "nvidia.com/gpu is to be shared as nvidia.com/mig-2g.20gb, which is another resource's name; it is not \
             offered",
            13,
        ),
        (
            slicing(vec![renamed("nvidia.com/gpu", "a.b/c"), renamed("nvidia.com/mig-2g.20gb", "a.b/c")]),
            "nvidia.com/mig-2g.20gb is to be shared as a.b/c, which is another resource's name; it is not offered",
            14,
        ),
        (
            ResourcePlan { sharing: Some(by_default), gpu_names: vec![name], ..ResourcePlan::default() },
            &*format!("'{long}.shared' is not a resource name that kubelets accept; it is not offered"),
            0,
        ),
    ];
    for (plan, problem, devices) in cases {
        let (snapshot, mut effects) = NodeState::default().apply(planned(&plan), NOW);
        let (snapshot, of_scan) = snapshot.apply(seen(mixed()), NOW);
        effects.extend(of_scan);
        let texts = problems(&effects);
        assert!(texts.iter().any(|text| text == problem), "{problem}\nin {texts:#?}");
        let count: usize = offered(&snapshot).iter().map(|(_, count)| count).sum();
        assert_eq!(count, devices, "{problem}: {:?}", offered(&snapshot));
        // A problem is reported once.
        let (_, effects) = snapshot.apply(seen(mixed()), NOW);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::PlanProblem(_))), "{effects:?}");
    }
}

#[test]
fn rows_of_one_resource_share_different_gpus() {
    let row = |name: &str, replicas: u32, gpu: &str| {
        let devices = SharedDevices::List(vec![gpu.parse().unwrap()]);
        SharedResource { rename: Some(resource(name)), devices, ..replicated("nvidia.com/gpu", replicas) }
    };
    let rows = vec![row("nvidia.com/x", 2, "0"), row("nvidia.com/y", 3, "1")];
    let snapshot = with(&sharing(SharingKind::TimeSlicing, rows), dgx(8));
    let expected = [("nvidia.com/gpu", 6), ("nvidia.com/x", 2), ("nvidia.com/y", 3)];
    assert_eq!(offered(&snapshot), expected.map(|(name, count)| (name.to_owned(), count)));
    assert_eq!(snapshot.offers().problems(), []);
}

#[test]
fn slot_id_above_63_characters_is_refused() {
    let mut node = mixed();
    node.gpus.truncate(1);
    node.gpus[0].uuid = format!("GPU-{}", "x".repeat(56)).parse().unwrap();
    let snapshot = after(NodeState::default(), [seen(node)]);
    let (snapshot, effects) = snapshot.apply(planned(&sliced(10)), NOW);
    assert_eq!((problems(&effects), offered(&snapshot)), (vec![], vec![(gpu().to_string(), 10)]));
    let (_, effects) = snapshot.apply(planned(&sliced(11)), NOW);
    assert!(problems(&effects)[0].contains("::10 is longer than 63 characters"), "{effects:?}");
}

#[test]
fn gpus_that_offer_nothing_are_named() {
    let mut node = mixed();
    node.gpus[0].display = Some(true);
    node.gpus[2].mig.as_mut().unwrap().devices.clear();
    let filter = Filter { exclude_displays: true, ..Filter::default() };
    let plan = ResourcePlan { filter, ..mig(MigStrategy::Mixed) };
    let (snapshot, effects) = after(NodeState::default(), [planned(&plan)]).apply(seen(node.clone()), NOW);
    let expected = [
        "GPU 0000:07:00.0 (GPU-00000000-0000-0000-0000-000000000000): it has an active display; it is not offered",
        "GPU 0000:47:00.0: MIG mode is on, but it has no MIG device; it offers nothing",
    ];
    assert_eq!(problems(&effects), expected);
    assert_eq!(offered(&snapshot).iter().map(|(_, count)| count).sum::<usize>(), 10);

    let plan = ResourcePlan { filter: Filter::default(), ..plan };
    let (_, effects) = snapshot.apply(planned(&plan), NOW);
    assert!(!problems(&effects).iter().any(|text| text.contains("display")), "the GPU is offered: {effects:?}");
    node.gpus[0].model = Some("NVIDIA DGX Display".to_owned());
    let (_, effects) = after(NodeState::default(), [planned(&plan)]).apply(seen(node), NOW);
    let adapter = "GPU 0000:07:00.0 (NVIDIA DGX Display): it is a DGX's display adapter; it is not offered";
    assert_eq!(problems(&effects), [adapter, expected[1]]);
}

/// Like the NVIDIA plugin, linkwise offers nothing if the strategy is single and only some GPUs are in MIG mode.
#[test]
fn single_wants_all_gpus_in_one_mode() {
    let mut node = mixed();
    node.gpus.truncate(2);
    let snapshot = after(NodeState::default(), [planned(&mig(MigStrategy::Single))]);
    let (snapshot, effects) = snapshot.apply(seen(node), NOW);
    let problem = "MIG strategy single: GPUs 0000:0f:00.0 are in MIG mode and 0000:07:00.0 are not; none is offered";
    assert_eq!((problems(&effects), offered(&snapshot)), (vec![problem.to_owned()], vec![]));
}

/// The machine with all four GPUs divided like the second one.
fn uniform() -> NodeObservation {
    let mut node = mixed();
    for gpu in [0, 2, 3] {
        node.gpus[gpu].mig = node.gpus[1].mig.clone();
        for device in &mut node.gpus[gpu].mig.as_mut().unwrap().devices {
            device.uuid = format!("{}-{gpu}", device.uuid).parse().unwrap();
        }
    }
    node
}

/// The remaining devices stay offered when one GPU is divided differently. Its new devices are not offered.
#[test]
fn single_keeps_devices_when_one_gpu_differs() {
    let snapshot = with(&mig(MigStrategy::Single), uniform());
    assert_eq!(offered(&snapshot), [(gpu().to_string(), 28)]);
    let mut other = uniform();
    other.gpus[3].mig = mixed().gpus[3].mig.clone();
    let snapshot = after(snapshot, [seen(other)]);
    assert_eq!((offered(&snapshot), snapshot.offers().of(&gpu()).count()), (vec![(gpu().to_string(), 21)], 28));
    assert_eq!(offered(&after(snapshot, [seen(uniform())])), [(gpu().to_string(), 28)]);
}

#[test]
fn mig_devices_have_the_numa_node_of_their_gpu() {
    let snapshot = with(&mig(MigStrategy::Mixed), mixed());
    let small = resource("nvidia.com/mig-1g.10gb");
    let nodes = snapshot.offers().of(&small).map(|(_, device)| (device.gpu.index, device.numa_nodes.clone()));
    assert_eq!(nodes.collect::<BTreeSet<_>>(), [(1, vec![NumaNodeId(0)]), (3, vec![NumaNodeId(1)])].into());
}

#[test]
fn display_is_offered_and_display_adapter_is_not() {
    let mut node = mixed();
    node.gpus[0].display = Some(true);
    for (model, count) in
        [("NVIDIA A100", 4), ("DGX Display", 3), ("NVIDIA DGX Display", 3), ("NVIDIA DGX Display 2", 4)]
    {
        node.gpus[0].model = Some(model.to_owned());
        let snapshot = with(&ResourcePlan::default(), node.clone());
        assert_eq!(offered(&snapshot), [(gpu().to_string(), count)], "{model}");
        let id = DeviceId::from(&node.gpus[0].uuid);
        assert_eq!(snapshot.offers().is_healthy(&gpu(), &id), count == 4, "{model}");
    }
}

#[test]
fn gpus_are_selected_by_index_uuid_or_address() {
    let mut node = mixed();
    let devices = vec!["1".parse().unwrap(), node.gpus[2].uuid.as_str().parse().unwrap()];
    let rename = Some(resource("nvidia.com/half"));
    let half = SharedResource { rename, devices: SharedDevices::List(devices), ..replicated("nvidia.com/gpu", 2) };
    let exclude = vec![GpuSelector::Pci(node.gpus[3].pci)];
    let filter = Filter { exclude, exclude_displays: true };
    let plan = ResourcePlan { filter, ..sharing(SharingKind::TimeSlicing, vec![half]) };
    let snapshot = with(&plan, node.clone());
    let half = ("nvidia.com/half".to_owned(), 4);
    assert_eq!(offered(&snapshot), [(gpu().to_string(), 1), half.clone()]);
    assert!(snapshot.offers().is_healthy(&gpu(), &DeviceId::from(&node.gpus[0].uuid)));
    // The whole GPU gets a display.
    node.gpus[0].display = Some(true);
    assert_eq!(offered(&after(snapshot, [seen(node)])), [half]);
}

#[test]
fn impossible_new_plan_waits_while_old_one_stays() {
    let wanted = mig(MigStrategy::Single);
    let (snapshot, effects) = after(NodeState::default(), [seen(mixed())]).apply(planned(&wanted), NOW);
    let texts = problems(&effects);
    assert!(texts[0].contains("the MIG devices differ") && texts[2].contains("the previous plan stays"), "{texts:?}");
    let whole = vec![(gpu().to_string(), 4)];
    assert_eq!((offered(&snapshot), snapshot.offers().plan()), (whole, &ResourcePlan::default()));
    assert!(snapshot.offers().problems().contains(&PlanProblem::OldPlanStays));
    // Later the node fits the plan.
    let snapshot = after(snapshot, [seen(uniform())]);
    assert_eq!((offered(&snapshot), snapshot.offers().plan()), (vec![(gpu().to_string(), 28)], &wanted));
    assert_eq!(snapshot.offers().problems(), []);
}

#[test]
fn name_that_a_mig_profile_takes_keeps_no_slots_of_a_gpu() {
    let taken = resource("nvidia.com/mig-2g.20gb");
    let shared = SharedResource { rename: Some(taken.clone()), ..replicated("nvidia.com/gpu", 2) };
    let plan = ResourcePlan { mig_strategy: MigStrategy::Mixed, ..sharing(SharingKind::TimeSlicing, vec![shared]) };
    let mut whole = mixed();
    whole.gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    let snapshot = with(&plan, whole);
    assert_eq!(offered(&snapshot), [(taken.to_string(), 8)]);
    let snapshot = after(snapshot, [seen(mixed())]);
    assert!(snapshot.offers().problems().iter().any(|problem| matches!(problem, PlanProblem::NameTaken(..))));
    assert!(offered(&snapshot).contains(&(taken.to_string(), 1)), "{:?}", offered(&snapshot));
}

#[test]
fn names_come_from_the_first_pattern_that_matches() {
    let name = |pattern: &str, name: &str| NamePattern { pattern: Pattern::new(pattern), name: resource(name) };
    let gpu_names =
        vec![name("H100", "nvidia.com/h100"), name("A100*80GB", "nvidia.com/a100-80"), name("*", "nvidia.com/x")];
    let mig_names = vec![name("3g.", "nvidia.com/large")];
    let snapshot = with(&ResourcePlan { gpu_names, mig_names, ..mig(MigStrategy::Mixed) }, mixed());
    let names: Vec<&str> = snapshot.offers().resources().keys().map(ResourceName::as_str).collect();
    let expected = "a100-80 large mig-1g.10gb mig-1g.10gb.me mig-2c.4g.40gb mig-2g.20gb".split(' ');
    assert_eq!(names, expected.map(|name| format!("nvidia.com/{name}")).collect::<Vec<_>>());
}

/// The ids that are chosen when all devices of a resource are available.
fn preferred(snapshot: &NodeState, resource: &ResourceName, size: usize) -> Vec<String> {
    let available = snapshot.offers().of(resource).map(|(id, _)| id.clone()).collect();
    let (answer, _) = snapshot.preferred(resource, &AllocationRequest { available, must_include: Vec::new(), size });
    answer.devices.iter().map(|id| id.as_str().to_owned()).collect()
}

#[test]
fn policy_counts_the_use_of_other_resources() {
    let one = resource("nvidia.com/mig-1g.10gb");
    let mut plan = mig(MigStrategy::Mixed);
    let snapshot = with(&plan, mixed());
    let parent = |snapshot: &NodeState| {
        let id = DeviceId::from(preferred(snapshot, &one, 1).remove(0));
        snapshot.offers().of(&one).find(|(known, _)| **known == id).unwrap().1.gpu.index
    };
    // GPUs 1 and 3 have devices of this profile. A pod holds another device of GPU 3.
    let other = resource("nvidia.com/mig-2g.20gb");
    let id = snapshot.offers().of(&other).next().unwrap().0.clone();
    let held = || Event::Holders(Some([(other.clone(), id.clone())].into_iter().collect()));
    let (snapshot, effects) = snapshot.apply(held(), NOW);
    assert_eq!((parent(&snapshot), effects), (1, vec![Effect::Publish]));
    plan.shared_policy = Some(AllocationPolicy::Packed);
    let snapshot = after(snapshot, [planned(&plan)]);
    assert_eq!(parent(&snapshot), 3);
    let (snapshot, effects) = snapshot.apply(held(), NOW);
    assert_eq!(effects, [], "the same list changes nothing");
    let snapshot = after(snapshot, [Event::Holders(None)]);
    assert_eq!(parent(&snapshot), 3, "the kubelet restarts, the pod runs on");
}

#[test]
fn withdrawn_id_leaves_after_two_lists_without_it() {
    let snapshot = after(NodeState::default(), [seen(mixed()), planned(&renamed())]);
    let left = |snapshot: &NodeState| snapshot.offers().of(&gpu()).count();
    let health = |snapshot: &NodeState| snapshot.offers().of(&gpu()).next().unwrap().1.health.clone();
    assert_eq!(left(&snapshot), 4);
    assert_eq!(health(&snapshot), Health::Unhealthy { reason: UnhealthyReason::Withdrawn, since: NOW });
    let id = snapshot.offers().of(&gpu()).next().unwrap().0.clone();
    let held = || Event::Holders(Some([(gpu(), id.clone())].into_iter().collect()));
    let unknown = after(snapshot.clone(), [Event::Holders(None), Event::Holders(None)]);
    assert_eq!(left(&unknown), 4, "holders are unknown");
    let snapshot = after(snapshot, [held()]);
    assert_eq!(left(&snapshot), 4, "this list may be older than a pod");
    let (snapshot, effects) = snapshot.apply(held(), NOW);
    assert_eq!((left(&snapshot), effects), (1, vec![Effect::Publish]));
    let snapshot = after(snapshot, [no_holders(), no_holders()]);
    assert_eq!(left(&snapshot), 0);
    assert_eq!(snapshot.offers().resources().len(), 1);
    // Back to the first plan.
    let snapshot = after(snapshot, [planned(&ResourcePlan::default()), no_holders(), no_holders()]);
    assert_eq!(offered(&snapshot), [(gpu().to_string(), 4)]);
}

#[test]
fn fault_follows_hardware_through_plan_changes() {
    let faulty = mixed().gpus[1].uuid.clone();
    let xid = || Event::Xid { gpu: faulty.clone(), code: 79, instance: None };
    let with_xid = |snapshot: &NodeState| {
        let devices = snapshot.offers().devices();
        let with_xid =
            devices.filter(|it| matches!(&it.health, Health::Unhealthy { reason: UnhealthyReason::Xid { .. }, .. }));
        with_xid.map(|device| (device.gpu.index, device.mig.is_some(), device.slot)).collect::<BTreeSet<_>>()
    };
    let snapshot = after(NodeState::default(), [seen(mixed()), xid()]);
    assert_eq!(with_xid(&snapshot), BTreeSet::from([(1, false, None)]));
    // The GPU's slots, under another name, and its MIG devices have the fault, too.
    let slots = SharedResource { rename: Some(resource("a.b/c")), ..replicated("nvidia.com/gpu", 2) };
    let snapshot = after(snapshot, [planned(&sharing(SharingKind::TimeSlicing, vec![slots]))]);
    assert_eq!(with_xid(&snapshot), BTreeSet::from([(1, false, Some(0)), (1, false, Some(1))]));
    assert_eq!(offered(&snapshot), [("a.b/c".to_owned(), 6)]);
    let plan = mig(MigStrategy::Mixed);
    let snapshot = after(snapshot, [planned(&plan)]);
    assert_eq!(with_xid(&snapshot), BTreeSet::from([(1, true, None)]));
    let one = resource("nvidia.com/mig-1g.10gb");
    let healthy =
        |snapshot: &NodeState| snapshot.offers().of(&one).filter(|(_, it)| it.health == Health::Healthy).count();
    assert_eq!(healthy(&snapshot), 1);
    // A fault that happened while the device was not offered counts.
    let snapshot = with(&plan, mixed());
    let faulty = after(snapshot.clone(), [xid(), planned(&ResourcePlan::default())]);
    assert_eq!(with_xid(&faulty), BTreeSet::from([(1, false, None)]));
    // A fault of one instance is a fault of its device alone.
    let instance = Some(MigInstance { gpu_instance: 9, compute_instance: Some(0) });
    let snapshot = after(snapshot, [Event::Xid { gpu: mixed().gpus[1].uuid.clone(), code: 79, instance }]);
    assert_eq!(healthy(&snapshot), 7);
}

#[test]
fn mig_devices_are_ordered_and_unique() {
    let mut node = mixed();
    let taken = node.gpus[1].mig.as_ref().unwrap().devices[0].uuid.clone();
    let devices = &mut node.gpus[3].mig.as_mut().unwrap().devices;
    devices.reverse();
    devices[0].uuid = taken;
    let (topology, warnings) = NodeTopology::assemble(&node);
    let order: Vec<(usize, u32)> = topology.mig_devices().iter().map(|mig| (mig.parent, mig.index)).collect();
    let whole_order: Vec<(usize, u32)> =
        (0..7).map(|index| (1, index)).chain([(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]).collect();
    assert_eq!(order, whole_order);
    let texts: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let expected = "GPU 0000:4e:00.0: one of its MIG devices is left out, because another MIG device has the same \
                    UUID, MIG-00000010-0000-0000-0000-000000000000";
    assert_eq!(texts, [expected]);
    // A topology that is restricted to some GPUs has their MIG devices.
    let some = topology.restricted(&[3, 0]);
    assert_eq!(some.mig_devices().iter().map(|mig| (mig.parent, mig.index)).collect::<Vec<_>>(), [(0, 0), (0, 1)]);
}
