//! The door of a node: a GPU that a pod or claim holds through one door is not offered through the other.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Availability, Door, Effect, Event, Filter, GpuSelector, Health, HealthRecord, Holdings, NodeState, PreparedClaim,
    ResourceDevice, ResourceName, ResourcePlan, UnhealthyReason,
};
use linkwise_core::topology::{GpuUuid, NodeObservation};

use crate::resources::{NOW, World, claimed, dgx, mixed, no_holders, seen};

static MACHINE: LazyLock<NodeObservation> = LazyLock::new(|| dgx(3));

fn uuid(at: usize) -> GpuUuid {
    MACHINE.gpus[at].uuid.clone()
}

fn id(at: usize) -> ResourceDevice {
    (ResourceName::gpu(), DeviceId::from(uuid(at).to_string()))
}

fn planned(door: Door) -> Event {
    Event::Planned(Box::new(ResourcePlan { door, ..ResourcePlan::default() }))
}

/// The kubelet's list: GPUs of pods through the device plugin, and GPUs of claims.
fn holdings(pods: &[usize], claims: &[usize]) -> Holdings {
    let claims = claims.iter().map(|at| {
        let (claim, device) = (format!("default/claim-{at}"), format!("gpu-{at}"));
        claimed(&claim, &device, uuid(*at).as_str())
    });
    Holdings { containers: pods.iter().map(|at| id(*at)).collect(), claims: claims.collect(), ..Holdings::default() }
}

fn listed(pods: &[usize], claims: &[usize]) -> Event {
    Event::Holders(Some(holdings(pods, claims)))
}

fn prepared(gpus: &[usize]) -> Event {
    Event::Prepared(gpus.iter().map(|at| claim(*at)).collect())
}

fn claim(at: usize) -> PreparedClaim {
    crate::resources::prepared("default", &format!("claim-{at}"), &format!("gpu-{at}"), uuid(at))
}

impl World {
    /// Returns true if the device plugin gives the GPU out.
    fn allocates(&self, at: usize) -> bool {
        self.state.allocate(&ResourceName::gpu(), &[id(at).1]).is_ok()
    }

    /// The GPUs that new claims may get, by index.
    fn through_dra(&self) -> Vec<usize> {
        let offered = self.state.offers().through_dra().iter().filter(|device| device.health == Health::Healthy);
        let places = offered.filter_map(|device| (0..3).find(|at| device.gpu.uuid == uuid(*at)));
        places.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The ids of the resource's list.
    fn listed_ids(&self) -> Vec<String> {
        self.state.offers().of(&ResourceName::gpu()).map(|(id, _)| id.to_string()).collect()
    }

    /// The reason why a GPU is not offered through its door.
    fn reason(&self, at: usize) -> Option<UnhealthyReason> {
        self.state.held_through_other_door().get(&uuid(at)).map(|reason| (*reason).clone())
    }
}

fn observed() -> Event {
    seen(MACHINE.clone())
}

fn held_as(at: usize) -> Option<UnhealthyReason> {
    Some(UnhealthyReason::HeldElsewhere { resource: "nvidia.com/gpu".to_owned(), id: uuid(at).to_string() })
}

#[test]
fn two_lists_without_holder_move_gpu_to_dra() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    assert_eq!((world.reason(0), world.state.door(&uuid(0))), (Some(UnhealthyReason::HoldersUnknown), Some(Door::Dra)));
    assert!(world.state.offers_any(), "a standby can take over");
    assert_eq!(world.state.gpus().len(), 3, "reports show the GPUs");
    for _ in 0..2 {
        assert!(world.through_dra().is_empty() && world.state.offers().awaits_holders());
        world.apply(no_holders());
    }
    assert_eq!((world.through_dra(), world.reason(0)), (vec![0, 1, 2], None));
    let changed = world.effects.iter().filter(|effect| matches!(effect, Effect::DoorChanged(..))).cloned();
    assert_eq!(changed.collect::<Vec<_>>(), [0, 1, 2].map(|at| Effect::DoorChanged(uuid(at), true)));
    assert_eq!(world.state.record().dra, [0, 1, 2].map(uuid).into());
    assert!(world.state.offers().resources().is_empty() && !world.state.offers().awaits_holders());
}

#[test]
fn gpu_that_a_pod_holds_moves_once_the_pod_ends() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    for _ in 0..3 {
        world.apply(listed(&[0], &[]));
    }
    assert_eq!((world.through_dra(), world.reason(0)), (vec![1, 2], held_as(0)));
    assert_eq!(world.listed_ids(), [uuid(0).to_string()], "the kubelet needs the ids that pods hold");
    assert!(!world.allocates(0));
    let status = world.state.gpus().into_iter().find(|status| status.gpu.uuid == uuid(0)).unwrap();
    assert_eq!((status.is_healthy, status.availability), (false, Availability::Held));
    // Only the kubelet's checkpoint has the id: of an init container, or of a pod that has ended.
    let checkpoint = Holdings { init_containers: [id(0)].into(), ..Holdings::default() };
    for _ in 0..3 {
        world.apply(Event::Holders(Some(checkpoint.clone())));
        assert_eq!((world.reason(0), world.listed_ids().len()), (held_as(0), 1));
    }
    world.apply(no_holders());
    world.apply(listed(&[0], &[]));
    world.apply(no_holders());
    assert_eq!(world.through_dra(), [1, 2], "one list is too few");
    world.apply(no_holders());
    assert_eq!((world.through_dra(), world.listed_ids()), (vec![0, 1, 2], vec![]));
}

#[test]
fn ids_of_other_plugins_are_not_adopted() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    let theirs = [("example.com/gpu".parse().unwrap(), id(0).1)];
    (0..3).for_each(|_| world.apply(Event::Holders(Some(theirs.iter().cloned().collect()))));
    assert!(world.state.offers().resources().is_empty());
    assert_eq!(world.through_dra(), [1, 2], "a pod of the other plugin has GPU 0");
}

#[test]
fn unknown_holders_keep_gpus_from_dra() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    for _ in 0..5 {
        world.apply(Event::Holders(None));
        world.apply(no_holders());
        world.apply(Event::Holders(None));
    }
    assert_eq!((world.through_dra(), world.reason(0)), (vec![], Some(UnhealthyReason::HoldersUnknown)));
    world.apply(no_holders());
    world.apply(no_holders());
    world.apply(Event::Holders(None));
    assert_eq!(world.through_dra(), [0, 1, 2], "GPUs that moved to DRA stay there");
}

#[test]
fn lists_beside_another_linkwise_do_not_count() {
    let early = || Event::Holders(Some(Holdings { is_early: true, ..Holdings::default() }));
    let mut world = World::of([planned(Door::Dra), observed(), early(), early(), early(), no_holders()]);
    assert_eq!(world.through_dra(), [0; 0], "the other linkwise may give GPUs out after each early list");
    world.apply(no_holders());
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

#[test]
fn linkwise_without_pod_resources_waits_for_no_list() {
    let world = World::with(NodeState::default().without_lists(), [planned(Door::Dra), observed()]);
    assert_eq!(world.through_dra(), [0, 1, 2]);
    for claims in [&[1][..], &[]] {
        let events = [all_of_dra(), prepared(claims), planned(Door::Plugin), observed()];
        let world = World::with(NodeState::default().without_lists(), events);
        let allocated = [0, 1, 2].map(|at| world.allocates(at));
        assert_eq!(allocated, [true, claims.is_empty(), true], "only linkwise's own claims keep GPUs");
        assert_eq!(world.state.record().dra, claims.iter().map(|at| uuid(*at)).collect());
    }
}

#[test]
fn gpu_waits_for_claims_of_another_dra_driver() {
    let mut world = World::of([planned(Door::Dra), observed(), prepared(&[1])]);
    for _ in 0..3 {
        world.apply(listed(&[], &[0, 1]));
    }
    assert_eq!(world.through_dra(), [1, 2], "GPU 1 belongs to a claim of linkwise");
    assert!(matches!(world.reason(0), Some(UnhealthyReason::Claimed { claim, .. }) if claim == "default/claim-0"));
    world.apply(listed(&[], &[1]));
    world.apply(listed(&[], &[1]));
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

fn empty_record() -> HealthRecord {
    NodeState::default().record()
}

/// The record of a process that offered all GPUs through DRA.
fn all_of_dra() -> Event {
    Event::Restored(Box::new(HealthRecord { dra: [0, 1, 2].map(uuid).into(), ..empty_record() }))
}

#[test]
fn claims_keep_their_gpus_from_the_device_plugin() {
    // The kubelet's list still lacks claim 0.
    let mut world = World::of([all_of_dra(), prepared(&[0]), planned(Door::Plugin), observed(), listed(&[], &[1])]);
    assert_eq!([0, 1, 2].map(|at| world.allocates(at)), [false, false, true]);
    assert!(world.through_dra().is_empty() && world.state.is_with_dra(&uuid(0)));
    assert_eq!(world.state.door(&uuid(0)), Some(Door::Plugin));
    let claimed =
        |at: usize| UnhealthyReason::Claimed { claim: format!("default/claim-{at}"), device: uuid(at).to_string() };
    assert_eq!(world.reason(0), Some(claimed(0)));
    world.apply(prepared(&[]));
    world.apply(listed(&[], &[1]));
    assert_eq!([0, 1, 2].map(|at| world.allocates(at)), [true, false, true], "GPU 0 waits for no second list");
    world.apply(no_holders());
    assert!(world.allocates(1));
    assert!(world.state.record().dra.is_empty());
}

#[test]
fn first_list_waits_for_the_claims() {
    let fresh = || NodeState::default().awaiting(|first| (first.scan, first.claims) = (true, true));
    let publishes = |state: NodeState, event: Event| {
        let (state, effects) = state.apply(event, NOW);
        (state, effects.contains(&Effect::Publish))
    };
    let (state, published) = publishes(fresh(), observed());
    assert!(!published, "claims may hold any GPU");
    assert!(publishes(state, prepared(&[0])).1);
    assert!(publishes(fresh().awaiting(|first| first.claims = false), observed()).1, "a standby waits for no claim");
}

#[test]
fn restart_keeps_doors_of_the_record() {
    let record = HealthRecord { dra: [uuid(0)].into(), ..empty_record() };
    let mut world = World::of([Event::Restored(Box::new(record)), planned(Door::Dra), observed()]);
    assert_eq!(world.through_dra(), [0], "before the first list");
    world.apply(listed(&[0], &[]));
    assert_eq!(world.through_dra(), [0; 0], "another plugin gave GPU 0 to a pod");
    world.apply(no_holders());
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

#[test]
fn mig_devices_move_to_dra_with_their_gpu() {
    let lists = [no_holders(), no_holders()];
    let world = World::of([planned(Door::Dra), seen(mixed())].into_iter().chain(lists));
    let devices = world.state.offers().through_dra();
    assert_eq!(devices.iter().filter(|device| device.mig.is_none()).count(), 1);
    let mig: usize = mixed().gpus.iter().filter_map(|gpu| Some(gpu.mig.as_ref()?.devices.len())).sum();
    assert_eq!((devices.len(), world.state.offers().resources().len()), (1 + mig, 0));
}

#[test]
fn missing_gpu_stays_while_a_claim_has_it() {
    let mut world = World::of([planned(Door::Dra), observed(), no_holders(), no_holders(), prepared(&[0])]);
    let mut fewer = MACHINE.clone();
    fewer.gpus.remove(0);
    world.apply(seen(fewer));
    let devices = world.state.offers().through_dra();
    let gone = devices.iter().find(|device| device.gpu.uuid == uuid(0)).unwrap();
    assert!(matches!(&gone.health, Health::Unhealthy { reason: UnhealthyReason::Gone, .. }), "{:?}", gone.health);
    world.apply(prepared(&[]));
    assert!(!world.state.is_with_dra(&uuid(0)));
    world.apply(observed());
    assert_eq!(world.reason(0), Some(UnhealthyReason::HoldersUnknown), "a GPU that is back waits like a new one");
}

#[test]
fn filtered_gpu_stays_while_a_claim_has_it() {
    let mut world = World::of([planned(Door::Dra), observed(), no_holders(), no_holders(), prepared(&[0])]);
    let filter = Filter { exclude: [0, 1].map(GpuSelector::Index).into(), ..Filter::default() };
    world.apply(Event::Planned(Box::new(ResourcePlan { filter, door: Door::Dra, ..ResourcePlan::default() })));
    assert_eq!((world.through_dra(), world.state.offers().through_dra().len()), (vec![2], 2));
    assert_eq!(world.state.door(&uuid(0)), None);
    world.apply(prepared(&[]));
    assert_eq!(world.state.offers().through_dra().len(), 1);
}

#[test]
fn claim_with_admin_access_keeps_no_gpu() {
    let mut admin = claim(0);
    admin.prepared.devices[0].admin = true;
    let world =
        World::of([Event::Prepared(vec![admin, claim(1)]), planned(Door::Plugin), observed(), listed(&[], &[0, 1])]);
    assert_eq!([0, 1].map(|at| world.allocates(at)), [true, false]);
}
