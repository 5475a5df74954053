//! The door of a node: a GPU that is held through the other one is offered by neither, and nobody gets a GPU that
//! another has.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use linkwise_core::allocation::DeviceId;
use linkwise_core::claims::ClaimName;
use linkwise_core::state::{
    Availability, ClaimedDevice, Door, Effect, Event, Filter, GpuSelector, Health, HealthRecord, Holdings, NodeState,
    Prepared, PreparedClaim, PreparedDevice, ResourceDevice, ResourceName, ResourcePlan, UnhealthyReason,
};
use linkwise_core::topology::{GpuUuid, NodeObservation};

use crate::resources::{NOW, World, dgx, mixed, nobody, seen};

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

/// What the kubelet lists: pods by the device plugin, and GPUs of claims.
fn holdings(pods: &[usize], claims: &[usize]) -> Holdings {
    let claims = claims.iter().map(|at| ClaimedDevice {
        claim: format!("default/claim-{at}"),
        driver: "gpu.nvidia.com".to_owned(),
        pool: "node".to_owned(),
        device: format!("gpu-{at}"),
        cdi_names: vec![uuid(*at).to_string()],
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
    let claim = ClaimName { namespace: "default".into(), name: format!("claim-{at}"), uid: format!("uid-{at}") };
    let devices = vec![PreparedDevice::whole(&format!("gpu-{at}"), uuid(at))];
    PreparedClaim { claim, prepared: Prepared { devices, ..Prepared::default() }, is_of_another_boot: false }
}

impl World {
    /// Returns true if the device plugin gives the GPU out.
    fn allocates(&self, at: usize) -> bool {
        self.state.allocate(&ResourceName::gpu(), &[id(at).1]).is_ok()
    }

    /// The GPUs that new claims may get, by their places.
    fn through_dra(&self) -> Vec<usize> {
        let offered = self.state.offers().through_dra().iter().filter(|device| device.health == Health::Healthy);
        let places: BTreeSet<usize> =
            offered.filter_map(|device| (0..3).find(|at| device.gpu.uuid == uuid(*at))).collect();
        places.into_iter().collect()
    }

    /// The ids that the kubelet is told of.
    fn on_list(&self) -> Vec<String> {
        self.state.offers().of(&ResourceName::gpu()).map(|(id, _)| id.to_string()).collect()
    }

    /// The first reason why a GPU is not offered.
    fn why(&self, at: usize) -> Option<UnhealthyReason> {
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
fn gpu_goes_through_dra_after_two_lists_without_holder() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    assert_eq!((world.why(0), world.state.door(&uuid(0))), (Some(UnhealthyReason::HoldersUnknown), Some(Door::Dra)));
    assert!(
        world.state.offers_any() && world.state.gpus().len() == 3,
        "a successor can take over, and people see them"
    );
    for _ in 0..2 {
        assert!(world.through_dra().is_empty() && world.state.offers().awaits_holders());
        world.tell(nobody());
    }
    assert_eq!((world.through_dra(), world.why(0)), (vec![0, 1, 2], None));
    let changed = world.effects.iter().filter(|effect| matches!(effect, Effect::DoorChanged(..))).cloned();
    assert_eq!(changed.collect::<Vec<_>>(), [0, 1, 2].map(|at| Effect::DoorChanged(uuid(at), true)));
    assert_eq!(world.state.record().dra, [0, 1, 2].map(uuid).into());
    assert!(world.state.offers().resources().is_empty() && !world.state.offers().awaits_holders());
}

#[test]
fn gpu_of_a_pod_waits_and_names_the_pod() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    for _ in 0..3 {
        world.tell(listed(&[0], &[]));
    }
    assert_eq!((world.through_dra(), world.why(0)), (vec![1, 2], held_as(0)));
    assert_eq!(world.on_list(), [uuid(0).to_string()], "the kubelet looks up the ids that pods hold");
    assert!(!world.allocates(0));
    let status = world.state.gpus().into_iter().find(|status| status.gpu.uuid == uuid(0)).unwrap();
    assert_eq!((status.is_healthy, status.availability), (false, Availability::Held));
    // Only the checkpoint of the kubelet has it: an init container's, or a pod's that has ended.
    let checkpoint = Holdings { init_containers: [id(0)].into(), ..Holdings::default() };
    for _ in 0..3 {
        world.tell(Event::Holders(Some(checkpoint.clone())));
        assert_eq!((world.why(0), world.on_list().len()), (held_as(0), 1));
    }
    world.tell(nobody());
    world.tell(listed(&[0], &[]));
    world.tell(nobody());
    assert_eq!(world.through_dra(), [1, 2], "one list in a row is too few");
    world.tell(nobody());
    assert_eq!((world.through_dra(), world.on_list()), (vec![0, 1, 2], vec![]));
}

#[test]
fn ids_of_other_plugins_are_not_adopted() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    let theirs = [("example.com/gpu".parse().unwrap(), id(0).1)];
    (0..3).for_each(|_| world.tell(Event::Holders(Some(theirs.iter().cloned().collect()))));
    assert!(world.state.offers().resources().is_empty());
    assert_eq!(world.through_dra(), [1, 2], "their pod has the GPU all the same");
}

#[test]
fn nothing_goes_through_dra_while_holders_are_unknown() {
    let mut world = World::of([planned(Door::Dra), observed()]);
    for _ in 0..5 {
        world.tell(Event::Holders(None));
        world.tell(nobody());
        world.tell(Event::Holders(None));
    }
    assert_eq!((world.through_dra(), world.why(0)), (vec![], Some(UnhealthyReason::HoldersUnknown)));
    world.tell(nobody());
    world.tell(nobody());
    world.tell(Event::Holders(None));
    assert_eq!(world.through_dra(), [0, 1, 2], "what went stays");
}

#[test]
fn lists_beside_another_linkwise_free_nothing() {
    let early = || Event::Holders(Some(Holdings { is_early: true, ..Holdings::default() }));
    let mut world = World::of([planned(Door::Dra), observed(), early(), early(), early(), nobody()]);
    assert_eq!(world.through_dra(), [0; 0], "the other one may have given a GPU after each of the first three");
    world.tell(nobody());
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

#[test]
fn pod_without_the_socket_waits_for_no_list() {
    let world = World::with(NodeState::default().without_lists(), [planned(Door::Dra), observed()]);
    assert_eq!(world.through_dra(), [0, 1, 2]);
    for claims in [&[1][..], &[]] {
        let off = [all_of_dra(), prepared(claims), planned(Door::Plugin), observed()];
        let world = World::with(NodeState::default().without_lists(), off);
        let allocated = [0, 1, 2].map(|at| world.allocates(at));
        assert_eq!(allocated, [true, claims.is_empty(), true], "our own checkpoints decide");
        assert_eq!(world.state.record().dra, claims.iter().map(|at| uuid(*at)).collect());
    }
}

#[test]
fn gpu_waits_for_claims_of_another_driver() {
    let mut world = World::of([planned(Door::Dra), observed(), prepared(&[1])]);
    for _ in 0..3 {
        world.tell(listed(&[], &[0, 1]));
    }
    assert_eq!(world.through_dra(), [1, 2], "GPU 1 is our own claim's");
    assert!(matches!(world.why(0), Some(UnhealthyReason::Claimed { claim, .. }) if claim == "default/claim-0"));
    world.tell(listed(&[], &[1]));
    world.tell(listed(&[], &[1]));
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

/// The record of a node of which nothing is known.
fn no_record() -> HealthRecord {
    NodeState::default().record()
}

/// The record of a process that offered all GPUs through DRA.
fn all_of_dra() -> Event {
    Event::Restored(Box::new(HealthRecord { dra: [0, 1, 2].map(uuid).into(), ..no_record() }))
}

#[test]
fn claims_keep_their_gpus_from_the_device_plugin() {
    // The kubelet's list is late, as it may be.
    let mut world = World::of([all_of_dra(), prepared(&[0]), planned(Door::Plugin), observed(), listed(&[], &[1])]);
    assert_eq!([0, 1, 2].map(|at| world.allocates(at)), [false, false, true]);
    assert!(world.through_dra().is_empty() && world.state.is_with_dra(&uuid(0)));
    assert_eq!(world.state.door(&uuid(0)), Some(Door::Plugin));
    let by =
        |at: usize| UnhealthyReason::Claimed { claim: format!("default/claim-{at}"), device: uuid(at).to_string() };
    assert_eq!(world.why(0), Some(by(0)));
    world.tell(prepared(&[]));
    world.tell(listed(&[], &[1]));
    assert_eq!([0, 1, 2].map(|at| world.allocates(at)), [true, false, true], "at once, without any wait");
    world.tell(nobody());
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
    assert!(!published, "a claim may have any GPU");
    assert!(publishes(state, prepared(&[0])).1);
    assert!(publishes(fresh().awaiting(|first| first.claims = false), observed()).1, "a standby's are another's");
}

#[test]
fn restart_goes_on_from_the_record() {
    let record = HealthRecord { dra: [uuid(0)].into(), ..no_record() };
    let mut world = World::of([Event::Restored(Box::new(record)), planned(Door::Dra), observed()]);
    assert_eq!(world.through_dra(), [0], "before anybody lists holders");
    world.tell(listed(&[0], &[]));
    assert_eq!(world.through_dra(), [0; 0], "another plugin has served the node since");
    world.tell(nobody());
    assert_eq!(world.through_dra(), [0, 1, 2]);
}

#[test]
fn mig_devices_go_with_their_gpu() {
    let lists = [nobody(), nobody()];
    let world = World::of([planned(Door::Dra), seen(mixed())].into_iter().chain(lists));
    let devices = world.state.offers().through_dra();
    assert_eq!(devices.iter().filter(|device| device.mig.is_none()).count(), 1);
    let mig: usize = mixed().gpus.iter().filter_map(|gpu| Some(gpu.mig.as_ref()?.devices.len())).sum();
    assert_eq!((devices.len(), world.state.offers().resources().len()), (1 + mig, 0));
}

#[test]
fn gpu_that_is_gone_stays_while_a_claim_has_it() {
    let mut world = World::of([planned(Door::Dra), observed(), nobody(), nobody(), prepared(&[0])]);
    let mut fewer = MACHINE.clone();
    fewer.gpus.remove(0);
    world.tell(seen(fewer));
    let devices = world.state.offers().through_dra();
    let gone = devices.iter().find(|device| device.gpu.uuid == uuid(0)).unwrap();
    assert!(matches!(&gone.health, Health::Unhealthy { reason: UnhealthyReason::Gone, .. }), "{:?}", gone.health);
    world.tell(prepared(&[]));
    assert!(!world.state.is_with_dra(&uuid(0)));
    world.tell(observed());
    assert_eq!(world.why(0), Some(UnhealthyReason::HoldersUnknown), "back, it is as new");
}

#[test]
fn gpu_that_a_filter_leaves_out_stays_for_its_claim() {
    let mut world = World::of([planned(Door::Dra), observed(), nobody(), nobody(), prepared(&[0])]);
    let filter = Filter { exclude: [0, 1].map(GpuSelector::Index).into(), ..Filter::default() };
    world.tell(Event::Planned(Box::new(ResourcePlan { filter, door: Door::Dra, ..ResourcePlan::default() })));
    assert_eq!((world.through_dra(), world.state.offers().through_dra().len()), (vec![2], 2));
    assert_eq!(world.state.door(&uuid(0)), None);
    world.tell(prepared(&[]));
    assert_eq!(world.state.offers().through_dra().len(), 1);
}

#[test]
fn claim_with_admin_access_keeps_no_gpu() {
    let mut look = claim(0);
    look.prepared.devices[0].admin = true;
    let world =
        World::of([Event::Prepared(vec![look, claim(1)]), planned(Door::Plugin), observed(), listed(&[], &[0, 1])]);
    assert_eq!([0, 1].map(|at| world.allocates(at)), [true, false]);
}
