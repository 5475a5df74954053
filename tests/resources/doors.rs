//! Which GPUs go through DRA, and how they change between it and the device plugin: nobody gets a GPU that another has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::claims::ClaimName;
use linkwise_core::state::{
    ClaimedDevice, DRA_GRACE, Door, DraGpus, DraWait, Effect, Event, GpuSelector, Health, HealthRecord, Holdings,
    NodeState, PreparedClaim, ResourceName, ResourcePlan,
};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::resources::mixed;

const NOON: Duration = Duration::from_secs(1_000_000);

/// Three GPUs: the histories below look often.
static MACHINE: LazyLock<NodeObservation> = LazyLock::new(|| {
    let mut seen = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    seen.gpus.truncate(3);
    seen
});

fn seen() -> NodeObservation {
    MACHINE.clone()
}

fn uuid(at: usize) -> GpuUuid {
    MACHINE.gpus[at].uuid.clone()
}

fn planned(dra: DraGpus) -> Event {
    Event::Planned(Box::new(ResourcePlan { dra, ..ResourcePlan::default() }))
}

fn some(gpus: &[usize]) -> DraGpus {
    DraGpus::Some(gpus.iter().map(|at| GpuSelector::Uuid(uuid(*at))).collect())
}

/// What the kubelet lists: pods by the device plugin, and GPUs of claims.
fn listed(pods: &[usize], claims: &[usize]) -> Event {
    let containers = pods.iter().map(|at| (ResourceName::gpu(), DeviceId::from(uuid(*at).to_string())));
    let claims = claims.iter().map(|at| ClaimedDevice {
        claim: format!("default/claim-{at}"),
        driver: "gpu.nvidia.com".to_owned(),
        pool: "node".to_owned(),
        device: format!("gpu-{at}"),
        cdi_names: vec![uuid(*at).to_string()],
    });
    Event::Holders(Some(Holdings { containers: containers.collect(), claims: claims.collect(), ..Holdings::default() }))
}

fn prepared(gpus: &[usize]) -> Event {
    Event::Prepared(gpus.iter().map(|at| claim(*at)).collect())
}

fn claim(at: usize) -> PreparedClaim {
    let claim = ClaimName { namespace: "default".into(), name: format!("claim-{at}"), uid: format!("uid-{at}") };
    let (gpus, devices) = (BTreeSet::from([uuid(at)]), BTreeSet::from([format!("gpu-{at}")]));
    PreparedClaim { claim, gpus, devices, made: BTreeSet::new() }
}

struct World {
    state: NodeState,
    now: Duration,
    doors: Vec<(GpuUuid, Option<Door>)>,
}

impl World {
    fn of(events: impl IntoIterator<Item = Event>) -> Self {
        let mut world = Self { state: NodeState::default(), now: NOON, doors: Vec::new() };
        events.into_iter().for_each(|event| world.tell(event));
        world
    }

    fn tell(&mut self, event: Event) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, self.now);
        self.state = state;
        self.doors.extend(effects.into_iter().filter_map(|effect| match effect {
            Effect::DoorChanged(gpu, door) => Some((gpu, door)),
            _ => None,
        }));
        let deadline = self.state.next_deadline();
        assert!(deadline.is_none_or(|deadline| deadline > self.now), "{deadline:?} has passed at {:?}", self.now);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.tell(Event::Tick);
    }

    fn door(&self, at: usize) -> Door {
        self.state.door(&uuid(at)).unwrap()
    }

    /// Whether the device plugin gives the GPU out.
    fn allocates(&self, at: usize) -> bool {
        self.state.allocate(&ResourceName::gpu(), &[DeviceId::from(uuid(at).to_string())]).is_ok()
    }
}

fn observed() -> Event {
    Event::Observed(Box::new(seen()))
}

#[test]
fn gpu_on_its_way_to_dra_names_its_holder() {
    let mut world = World::of([planned(some(&[0])), observed()]);
    let device = (ResourceName::gpu(), DeviceId::from(uuid(0).to_string()));
    let why = |world: &World| world.state.dra_waits().into_values().collect::<Vec<_>>();
    assert_eq!(why(&world), [DraWait::Holders], "no list yet");
    world.tell(listed(&[0], &[]));
    assert_eq!(why(&world), [DraWait::Pod(device.clone())]);
    // The pod has ended, and the kubelet has not written its checkpoint since; linkwise has started anew.
    let checkpoint = Holdings { init_containers: [device.clone()].into(), ..Holdings::default() };
    world.tell(Event::Holders(Some(checkpoint)));
    assert_eq!(why(&world), [DraWait::Checkpoint(device)]);
    world.tell(listed(&[], &[0]));
    assert_eq!(why(&world), [DraWait::Held(["default/claim-0".to_owned()].into())], "another DRA driver's claim");
    world.tell(Event::Holders(None));
    assert_eq!(why(&world), [DraWait::Holders], "the kubelet does not answer");
    // The first list after a silence may be that of a kubelet that starts.
    (0..3).for_each(|_| world.tell(listed(&[], &[])));
    assert_eq!((world.door(0), why(&world)), (Door::Dra, vec![]));
}

#[test]
fn gpu_goes_to_dra_after_two_lists_without_holder() {
    let mut world = World::of([planned(some(&[0])), observed()]);
    assert_eq!((world.door(0), world.door(1)), (Door::ToDra, Door::Plugin));
    assert!(!world.allocates(0) && world.allocates(1));
    for _ in 0..2 {
        assert!(world.state.offers().through_dra().is_empty());
        world.tell(listed(&[], &[]));
    }
    assert_eq!(world.door(0), Door::Dra);
    let through: Vec<_> = world.state.offers().through_dra().iter().map(|device| device.gpu.uuid.clone()).collect();
    assert_eq!(through, [uuid(0)]);
    assert_eq!(world.doors, [(uuid(0), Some(Door::ToDra)), (uuid(0), Some(Door::Dra))]);
    assert_eq!(world.state.record().dra, BTreeSet::from([uuid(0)]));
    assert!(world.state.gpus().iter().any(|status| status.gpu.uuid == uuid(0) && status.is_healthy));
}

#[test]
fn held_gpu_waits_until_its_pod_has_ended() {
    let mut world = World::of([planned(DraGpus::None), observed(), listed(&[0], &[]), planned(DraGpus::All)]);
    for _ in 0..3 {
        world.tell(listed(&[0], &[]));
    }
    assert_eq!((world.door(0), world.door(1)), (Door::ToDra, Door::Dra));
    assert!(!world.allocates(0), "no other pod gets it either");
    assert!(world.state.offers().awaits_holders());
    for _ in 0..3 {
        world.tell(listed(&[], &[]));
    }
    assert_eq!(world.door(0), Door::Dra);
    assert!(!world.state.offers().awaits_holders());
}

#[test]
fn nothing_goes_to_dra_while_holders_are_unknown() {
    let mut world = World::of([planned(DraGpus::All), observed()]);
    for _ in 0..5 {
        world.tell(Event::Holders(None));
        world.tell(listed(&[], &[]));
        world.tell(Event::Holders(None));
    }
    assert_eq!(world.door(0), Door::ToDra);
    world.tell(listed(&[], &[]));
    world.tell(listed(&[], &[]));
    world.tell(Event::Holders(None));
    assert_eq!(world.door(0), Door::Dra, "what went stays");
}

#[test]
fn gpu_waits_for_claims_of_another_driver() {
    let mut world = World::of([planned(some(&[0, 1])), observed(), prepared(&[1])]);
    for _ in 0..3 {
        world.tell(listed(&[], &[0, 1]));
    }
    assert_eq!((world.door(0), world.door(1)), (Door::ToDra, Door::Dra), "GPU 1 is our own claim's");
    for _ in 0..2 {
        assert_eq!(world.door(0), Door::ToDra);
        world.tell(listed(&[], &[1]));
    }
    assert_eq!(world.door(0), Door::Dra);
}

/// A node with all GPUs in DRA.
fn in_dra() -> World {
    let world = World::of([planned(DraGpus::All), observed(), listed(&[], &[]), listed(&[], &[])]);
    assert_eq!(world.door(0), Door::Dra);
    world
}

#[test]
fn gpu_leaves_dra_after_grace_when_no_claim_has_it() {
    let mut world = in_dra();
    world.tell(prepared(&[1]));
    world.tell(listed(&[], &[2]));
    world.tell(planned(DraGpus::None));
    assert_eq!(world.door(0), Door::FromDra(NOON));
    assert!(!world.allocates(0));
    assert_eq!(world.state.next_deadline(), Some(NOON + DRA_GRACE));
    world.pass(DRA_GRACE.saturating_sub(Duration::from_secs(1)));
    assert!(world.door(0).is_dra());
    world.pass(Duration::from_secs(1));
    assert_eq!((world.door(0), world.allocates(0)), (Door::Plugin, true));
    for claimed in [1, 2] {
        assert!(world.door(claimed).is_dra() && !world.allocates(claimed), "a claim has it");
    }
    assert_eq!(world.state.next_deadline(), None, "time alone changes nothing for those");
    world.tell(prepared(&[]));
    world.tell(listed(&[], &[]));
    assert!(world.allocates(1) && world.allocates(2));
    assert!(world.state.record().dra.is_empty());
}

#[test]
fn change_of_mind_within_grace_costs_nothing() {
    let mut world = in_dra();
    world.tell(planned(DraGpus::None));
    world.pass(DRA_GRACE / 2);
    world.tell(planned(DraGpus::All));
    assert_eq!(world.door(0), Door::Dra);
    world.pass(DRA_GRACE);
    assert_eq!(world.door(0), Door::Dra);
}

#[test]
fn restart_continues_on_the_way_out_of_dra() {
    let record = in_dra().state.record();
    let restored = || Event::Restored(Box::new(record.clone()));
    let mut world = World::of([restored(), planned(DraGpus::None), observed(), listed(&[], &[])]);
    assert_eq!(world.door(0), Door::FromDra(NOON), "slices of before may still be read");
    world.pass(DRA_GRACE);
    assert_eq!(world.door(0), Door::Plugin);
    let world = World::of([restored(), planned(DraGpus::All), observed()]);
    assert_eq!(world.door(0), Door::Dra, "before anybody lists holders");
}

#[test]
fn claim_of_before_keeps_its_gpu_from_the_plugin() {
    // The record is lost, and the kubelet lists nothing yet.
    let mut world = World::of([prepared(&[0]), planned(DraGpus::None), observed(), Event::Holders(None)]);
    assert!(!world.allocates(0) && world.allocates(1));
    world.tell(prepared(&[]));
    assert!(world.allocates(0));
}

#[test]
fn gpu_that_another_plugin_gave_out_is_unhealthy_in_dra() {
    let mut world = in_dra();
    world.tell(listed(&[0], &[]));
    let health = |world: &World| {
        let devices = world.state.offers().through_dra();
        devices.iter().find(|device| device.gpu.uuid == uuid(0)).unwrap().health.clone()
    };
    assert!(matches!(health(&world), Health::Unhealthy { .. }), "{:?}", health(&world));
    world.tell(listed(&[], &[]));
    assert_eq!(health(&world), Health::Healthy);
}

#[test]
fn mig_devices_go_with_their_gpu() {
    let world =
        World::of([planned(DraGpus::All), Event::Observed(Box::new(mixed())), listed(&[], &[]), listed(&[], &[])]);
    let devices = world.state.offers().through_dra();
    assert_eq!(devices.iter().filter(|device| device.mig.is_none()).count(), 1);
    assert_eq!(
        devices.len(),
        1 + mixed().gpus.iter().filter_map(|gpu| Some(gpu.mig.as_ref()?.devices.len())).sum::<usize>()
    );
    assert!(world.state.offers().resources().is_empty());
}

#[test]
fn gpu_that_is_gone_stays_while_a_claim_has_it() {
    let mut world = in_dra();
    world.tell(prepared(&[0]));
    let mut fewer = seen();
    fewer.gpus.remove(0);
    world.tell(Event::Observed(Box::new(fewer)));
    let devices = world.state.offers().through_dra();
    let gone = devices.iter().find(|device| device.gpu.uuid == uuid(0)).unwrap();
    assert!(matches!(&gone.health, Health::Unhealthy { .. }), "{:?}", gone.health);
    world.pass(DRA_GRACE * 2);
    assert!(world.state.door(&uuid(0)).is_some());
    world.tell(prepared(&[]));
    assert!(world.state.door(&uuid(0)).is_none());
    world.tell(observed());
    assert_eq!(world.door(0), Door::ToDra, "back, it is as new");
}

#[test]
fn claim_with_admin_access_keeps_no_gpu_in_dra() {
    let mut world = in_dra();
    let look = PreparedClaim { claim: claim(0).claim, ..PreparedClaim::default() };
    world.tell(Event::Prepared(vec![look, claim(1)]));
    world.tell(listed(&[], &[0, 1]));
    world.tell(planned(DraGpus::None));
    world.pass(DRA_GRACE);
    assert_eq!((world.door(0), world.allocates(0)), (Door::Plugin, true));
    assert!(world.door(1).is_dra() && !world.allocates(1), "this one takes it");
}

#[test]
fn no_deadline_is_left_where_all_gpus_are_gone() {
    let mut world = in_dra();
    world.tell(planned(DraGpus::None));
    world.tell(Event::Observed(Box::new(NodeObservation { gpus: Vec::new(), ..seen() })));
    world.pass(DRA_GRACE);
    assert_eq!(world.state.next_deadline(), None);
    world.tell(observed());
    assert_eq!(world.door(0), Door::Plugin, "its grace period is over");
}

/// A node with all GPUs in DRA, whose API server is asked before they leave.
fn in_dra_of_a_cluster() -> World {
    let mut world = World { state: NodeState::default().asking_for_allocations(), now: NOON, doors: Vec::new() };
    [planned(DraGpus::All), observed(), listed(&[], &[]), listed(&[], &[])].into_iter().for_each(|it| world.tell(it));
    assert_eq!(world.door(0), Door::Dra);
    world
}

/// The API server's slices offer these GPUs.
fn offered(gpus: &[usize]) -> Event {
    Event::SlicesStored(gpus.iter().map(|at| format!("gpu-{at}")).collect())
}

/// The API server's answer about what the state asks: claims have these GPUs allocated.
fn allocated(world: &World, gpus: &[usize]) -> Event {
    let claims = gpus.iter().map(|at| (format!("default/claim-{at}"), BTreeSet::from([format!("gpu-{at}")])));
    Event::Allocations { gpus: world.state.awaiting_allocations(), claims: claims.collect() }
}

#[test]
fn gpu_leaves_dra_when_no_allocation_can_come_and_none_is_written() {
    let mut world = in_dra_of_a_cluster();
    world.tell(offered(&[0, 1, 2]));
    world.tell(planned(some(&[2])));
    let why = |world: &World, at: usize| world.state.dra_waits().get(&uuid(at)).cloned();
    world.pass(DRA_GRACE * 3);
    assert_eq!((why(&world, 0), why(&world, 2)), (Some(DraWait::Slices), None), "the slices still offer it");
    world.tell(offered(&[2]));
    let end = world.now + DRA_GRACE;
    assert_eq!(why(&world, 0), Some(DraWait::Claims(end)));
    world.pass(DRA_GRACE.saturating_sub(Duration::from_secs(1)));
    assert!(world.state.awaiting_allocations().is_empty());
    // An answer from before proves nothing.
    world.tell(Event::Allocations { gpus: BTreeSet::from([uuid(0), uuid(1)]), claims: BTreeMap::new() });
    world.pass(Duration::from_secs(1));
    assert_eq!(why(&world, 0), Some(DraWait::ApiServer));
    assert_eq!(world.state.awaiting_allocations(), BTreeSet::from([uuid(0), uuid(1)]));
    assert!(!world.allocates(0) && !world.allocates(1));
    world.tell(allocated(&world, &[1]));
    assert_eq!((world.door(0), world.allocates(0)), (Door::Plugin, true));
    let claim = BTreeSet::from(["default/claim-1".to_owned()]);
    assert_eq!((world.allocates(1), why(&world, 1)), (false, Some(DraWait::Held(claim))), "not even reserved");
    world.pass(DRA_GRACE * 100);
    assert!(world.door(1).is_dra());
    assert_eq!(world.state.awaiting_allocations(), BTreeSet::from([uuid(1)]), "it is asked again");
    world.tell(allocated(&world, &[]));
    assert_eq!((world.door(1), world.allocates(1)), (Door::Plugin, true));
}

#[test]
fn slices_that_offer_a_gpu_again_begin_its_wait_anew() {
    let mut world = in_dra_of_a_cluster();
    world.tell(planned(DraGpus::None));
    world.tell(offered(&[]));
    world.pass(DRA_GRACE);
    let answer = allocated(&world, &[]);
    world.tell(offered(&[0]));
    world.tell(answer);
    assert!(world.door(0).is_dra() && world.allocates(1), "a claim may be on its way to GPU 0");
    world.tell(offered(&[]));
    world.pass(DRA_GRACE);
    world.tell(allocated(&world, &[]));
    assert!(world.allocates(0));
}

#[test]
fn late_claim_takes_a_free_gpu_back() {
    let mut world = World::of([planned(DraGpus::None), observed(), listed(&[], &[])]);
    world.tell(prepared(&[0]));
    assert_eq!((world.door(0), world.allocates(0)), (Door::ToDra, false), "from this snapshot on no pod gets it");
    for _ in 0..3 {
        assert_eq!(world.door(0), Door::ToDra);
        world.tell(listed(&[], &[]));
    }
    assert_eq!(world.door(0), Door::FromDra(NOON), "for this claim only");
    let through: Vec<_> = world.state.offers().through_dra().iter().map(|device| &device.health).collect();
    assert!(matches!(through[..], [Health::Unhealthy { .. }]), "{through:?}");
    world.tell(prepared(&[]));
    world.pass(DRA_GRACE);
    assert_eq!((world.door(0), world.allocates(0)), (Door::Plugin, true));
}

#[test]
fn late_claim_leaves_a_gpu_to_the_pod_that_has_it() {
    let mut world = World::of([planned(DraGpus::None), observed(), listed(&[], &[])]);
    // A pod was given it, and the first list is too old to have the pod.
    world.tell(prepared(&[0]));
    world.tell(listed(&[], &[]));
    for _ in 0..5 {
        world.tell(listed(&[0], &[]));
        assert_eq!(world.door(0), Door::ToDra);
    }
    assert!(world.state.ledger().holder_beside(world.state.topology(), &uuid(0), "node").is_some());
    // The claim is refused.
    world.tell(prepared(&[]));
    world.tell(listed(&[], &[]));
    assert_eq!((world.door(0), world.allocates(0)), (Door::Plugin, true));
}

/// What may happen to a node.
#[derive(Clone, Debug)]
enum Step {
    Plan(usize),
    /// A pod asks the device plugin.
    Allocate(usize),
    EndPod(usize),
    Prepare(usize),
    Unprepare(usize),
    /// The kubelet lists everything, or cannot be asked, or forgets the newest pod.
    List,
    NoList,
    OldList,
    Pass(u64),
    /// Our process dies and starts again, with its record or without it.
    Restart {
        loses_record: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let gpu = || 0..3usize;
    prop_oneof![
        2 => (0..4usize).prop_map(Step::Plan),
        4 => gpu().prop_map(Step::Allocate),
        3 => gpu().prop_map(Step::EndPod),
        4 => gpu().prop_map(Step::Prepare),
        3 => gpu().prop_map(Step::Unprepare),
        6 => Just(Step::List),
        1 => Just(Step::NoList),
        2 => Just(Step::OldList),
        3 => (1..900u64).prop_map(Step::Pass),
        1 => any::<bool>().prop_map(|loses_record| Step::Restart { loses_record }),
    ]
}

/// What holds outside of the state: the ledger of this test.
#[derive(Default)]
struct Truth {
    plan: DraGpus,
    pods: Vec<usize>,
    claims: BTreeMap<usize, ()>,
    record: HealthRecord,
    last_was_old: bool,
}

impl Truth {
    fn list(&self, pods: &[usize]) -> Event {
        // PodResources lists claims late: the checkpoints are what counts.
        listed(pods, &[])
    }

    fn prepared(&self) -> Event {
        prepared(&self.claims.keys().copied().collect::<Vec<_>>())
    }

    fn follow(&mut self, world: &mut World, step: &Step) {
        match step {
            Step::Plan(which) => {
                self.plan = [DraGpus::None, DraGpus::All, some(&[0]), some(&[1, 2])][*which].clone();
                world.tell(planned(self.plan.clone()));
            }
            // The kubelet gives an id to one pod at a time.
            Step::Allocate(gpu) if !self.pods.contains(gpu) && world.allocates(*gpu) => {
                assert!(!self.claims.contains_key(gpu), "a claim has GPU {gpu}");
                self.pods.push(*gpu);
            }
            Step::EndPod(gpu) => self.pods.retain(|held| held != gpu),
            Step::Prepare(gpu) if !self.claims.contains_key(gpu) && world.door(*gpu).is_dra() => {
                self.claims.insert(*gpu, ());
                world.tell(self.prepared());
                if world.door(*gpu).is_dra() {
                    assert!(!self.pods.contains(gpu), "a pod has GPU {gpu}");
                } else {
                    self.claims.remove(gpu);
                    world.tell(self.prepared());
                }
            }
            Step::Unprepare(gpu) => {
                self.claims.remove(gpu);
                world.tell(self.prepared());
            }
            Step::List => world.tell(self.list(&self.pods)),
            Step::NoList => world.tell(Event::Holders(None)),
            Step::OldList if !self.last_was_old => {
                let older = self.pods.len().saturating_sub(1);
                world.tell(self.list(&self.pods[..older]));
                self.last_was_old = true;
                return;
            }
            Step::Pass(seconds) => world.pass(Duration::from_secs(*seconds)),
            Step::Restart { loses_record } => {
                let record = if *loses_record { HealthRecord::default() } else { self.record.clone() };
                world.state = NodeState::default();
                // Nothing is published before the kubelet was asked.
                let events =
                    [Event::Restored(Box::new(record)), self.prepared(), planned(self.plan.clone()), observed()];
                events.into_iter().for_each(|event| world.tell(event));
                world.tell(self.list(&self.pods));
            }
            Step::Allocate(_) | Step::Prepare(_) | Step::OldList => return,
        }
        self.last_was_old &= !matches!(step, Step::List);
        self.record = world.state.record();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_gpu_is_held_through_two_doors(steps in vec(step(), 1..60)) {
        let mut world = World::of([planned(DraGpus::None), observed(), listed(&[], &[])]);
        let mut truth = Truth::default();
        for step in &steps {
            truth.follow(&mut world, step);
        }
        // Left alone, every GPU ends where the plan has it.
        truth.pods.clear();
        truth.claims.clear();
        world.tell(truth.prepared());
        for _ in 0..4 {
            world.tell(listed(&[], &[]));
            world.pass(DRA_GRACE);
        }
        for gpu in &world.state.topology().gpus().to_vec() {
            let wanted = if truth.plan.include(gpu) { Door::Dra } else { Door::Plugin };
            prop_assert_eq!(world.state.door(&gpu.uuid), Some(wanted));
        }
    }
}
