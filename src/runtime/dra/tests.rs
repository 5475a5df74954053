//! When a pool is made, and how long the node is ready while its slices are not current.

use std::collections::BTreeSet;

use super::*;
use crate::allocation::DeviceId;
use crate::claims::ClaimName;
use crate::machines;
use crate::publish::dra::SliceDevice;
use crate::state::{DraGpus, Holdings, ResourceName, ResourcePlan, Timestamp};
use crate::topology::{GpuUuid, NodeObservation};

/// An API server that keeps everything and has nothing of ours.
const SERVER: Server =
    Server { drops_taints: false, drops_counters: false, found: Some(StoredSets::Nothing), version: None };

struct World {
    state: NodeState,
    maker: PoolMaker,
}

impl World {
    /// A node all of whose GPUs are to go to DRA, with so many of them. The kubelet's first list came before NVML's.
    fn new(gpus: usize) -> Self {
        let maker = PoolMaker {
            empty: Pool::new("gpu.nvidia.com", "n", Vec::new()),
            evict_from_lost: false,
            dynamic_mig: false,
            sizes: GroupSizes::default(),
            sets: DraSets::Off,
            switch: SetsSwitch::default(),
            started: Instant::now(),
            layouts: LayoutCache::default(),
            reported: Once::new(),
            last: None,
        };
        let mut world = Self { state: NodeState::default(), maker };
        world.apply(Event::Planned(Box::new(ResourcePlan { dra: DraGpus::All, ..ResourcePlan::default() })));
        world.listed(&[]);
        assert!(world.pool().is_none(), "nothing was seen");
        world.see(gpus);
        assert!(world.pool().is_none(), "two lists decide");
        world
    }

    fn apply(&mut self, event: Event) {
        self.state = std::mem::take(&mut self.state).apply(event, Timestamp::from_secs(1_000)).0;
    }

    fn see(&mut self, gpus: usize) {
        self.apply(Event::Observed(Box::new(observed(gpus))));
    }

    fn pool(&mut self) -> Option<&[SliceDevice]> {
        self.make(SERVER);
        self.maker.last.as_deref().map(|pool| pool.devices.as_slice())
    }

    /// What the pool is with this server, and what is to be said about sets.
    fn make(&mut self, server: Server) -> Option<SetsNote> {
        self.maker.make(&self.state, server).1
    }

    /// How many sets are in the pool, and how many of all devices consume counters.
    fn sets(&self) -> (usize, usize) {
        let pool = self.maker.last.as_deref().unwrap();
        let is_set = |device: &&SliceDevice| device.name.starts_with("gpus-");
        let counted = pool.devices.iter().filter(|device| !device.consumes_counters.is_empty()).count();
        assert_eq!(pool.counters.is_empty(), counted == 0);
        (pool.devices.iter().filter(is_set).count(), counted)
    }

    /// The kubelet lists pods that hold these GPUs through the device plugin.
    fn listed(&mut self, held: &[GpuUuid]) {
        let containers = held.iter().map(|uuid| (ResourceName::gpu(), DeviceId::from(uuid.to_string())));
        self.apply(Event::Holders(Some(Holdings { containers: containers.collect(), ..Holdings::default() })));
    }
}

fn observed(gpus: usize) -> NodeObservation {
    let mut observed = machines::load("dgx1-v100").unwrap().observed;
    observed.gpus.truncate(gpus);
    observed
}

#[test]
fn last_gpu_that_goes_leaves_the_pool() {
    for is_claimed in [false, true] {
        let mut world = World::new(1);
        world.listed(&[]);
        assert!(world.pool().is_none(), "the next list decides");
        world.listed(&[]);
        let [device] = world.pool().unwrap() else { panic!("{:?}", world.pool()) };
        assert!(device.taints.is_empty());
        if is_claimed {
            let claim = ClaimName { namespace: "default".into(), name: "a".into(), uid: "1".into() };
            let gpus = BTreeSet::from([observed(1).gpus[0].uuid.clone()]);
            world.apply(Event::Prepared(vec![PreparedClaim {
                claim,
                gpus,
                devices: BTreeSet::from(["gpu-0".to_owned()]),
                made: BTreeSet::new(),
            }]));
        }
        world.see(0);
        let left: Vec<bool> = world.pool().unwrap().iter().map(|device| !device.taints.is_empty()).collect();
        assert_eq!(left, if is_claimed { vec![true] } else { vec![] });
    }
}

#[test]
fn pool_is_empty_where_pods_hold_all_gpus() {
    let mut world = World::new(2);
    let held: Vec<GpuUuid> = observed(2).gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    world.listed(&held);
    assert_eq!(world.pool(), Some(&[][..]), "no list can change that before a pod ends");
}

#[test]
fn sets_come_and_go_with_setting_server_and_claims() {
    let mut world = World::new(4);
    world.maker.sets = DraSets::Auto;
    (0..2).for_each(|_| world.listed(&[]));
    let newest = Server { version: ServerVersion::parse("v1.37.0"), ..SERVER };
    assert_eq!(world.make(Server { found: None, ..newest }), None);
    assert!(world.maker.last.is_none(), "the stored slices are not read yet");
    let old = Server { version: ServerVersion::parse("v1.36.3"), ..SERVER };
    assert!(matches!(world.make(old), Some(SetsNote::Waits(_))));
    assert_eq!(world.sets(), (0, 0));
    assert_eq!(world.make(newest), None);
    assert_eq!(world.sets(), (7, 11), "six pairs and one of four");
    let claim = ClaimName { namespace: "default".into(), name: "a".into(), uid: "1".into() };
    let gpus = observed(4).gpus.iter().take(2).map(|gpu| gpu.uuid.clone()).collect();
    let devices = BTreeSet::from(["gpus-2-0-1".to_owned()]);
    world.apply(Event::Prepared(vec![PreparedClaim { claim, gpus, devices, made: BTreeSet::new() }]));
    // The next process finds counters, and has another setting.
    world.maker.switch = SetsSwitch::default();
    world.maker.sets = DraSets::Off;
    let found = Server { found: Some(StoredSets::Counters), ..SERVER };
    assert_eq!(world.make(found), Some(SetsNote::Withdrawn));
    assert_eq!(world.sets(), (7, 11));
    assert!(world.maker.last.as_ref().unwrap().devices.iter().filter(|it| it.taints.is_empty()).count() == 4);
    let after = world.maker.switch.deadline(Duration::ZERO).unwrap();
    world.maker.started = Instant::now().checked_sub(after + Duration::from_secs(1)).unwrap();
    world.make(found);
    assert_eq!(world.sets(), (1, 5), "the one that the claim has");
    world.apply(Event::Prepared(Vec::new()));
    assert_eq!(world.make(found), None);
    assert_eq!(world.sets(), (0, 0));
    assert_eq!(world.pool().unwrap().len(), 4);
}

#[test]
fn counters_that_are_dropped_leave_gpus_without() {
    let mut world = World::new(2);
    world.maker.sets = DraSets::On;
    (0..2).for_each(|_| world.listed(&[]));
    world.make(SERVER);
    assert_eq!(world.sets(), (1, 3));
    let dropped = Server { drops_counters: true, ..SERVER };
    assert_eq!(world.make(dropped), Some(SetsNote::Dropped));
    assert_eq!(world.sets(), (0, 0));
}

#[test]
fn node_stays_ready_for_a_minute_after_slices_differ() {
    let (mut grace, mut now) = (Grace::default(), Instant::now());
    assert_eq!(grace.ends(false, now), None, "nothing was stored yet");
    for _ in 0..2 {
        now += 10 * GRACE;
        assert_eq!(grace.ends(true, now), None);
        now += 10 * GRACE;
        let ends = now + GRACE;
        for seconds in [0, 30, 29] {
            now += Duration::from_secs(seconds);
            assert_eq!(grace.ends(false, now), Some(ends));
        }
        now += Duration::from_secs(1);
        assert_eq!(grace.ends(false, now), None);
    }
}
