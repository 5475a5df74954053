//! The conditions for making a pool, and the time for which the node is ready although its slices are not current.

use super::*;
use linkwise_core::allocation::DeviceId;
use linkwise_core::claims::{ClaimName, Prepared, PreparedDevice};
use linkwise_core::publish::dra::SliceDevice;
use linkwise_core::state::{Door, Event, Holdings, PreparedClaim, ResourceName, ResourcePlan, Timestamp};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_host::machines;

/// An API server that stores all fields and has no slices of this node.
fn server() -> StoredPool {
    StoredPool { is_read: true, ..StoredPool::default() }
}

struct World {
    state: NodeState,
    maker: PoolMaker,
}

impl World {
    /// A node with this number of GPUs, all for DRA. The kubelet's first list came before NVML's first scan.
    fn new(gpus: usize) -> Self {
        let maker = PoolMaker {
            empty: Pool::new("n", Vec::new()),
            evict_from_lost: false,
            dynamic_mig: false,
            layouts: LayoutCache::default(),
            reported: Reported::new(),
            last: None,
        };
        let mut world = Self { state: NodeState::default(), maker };
        world.apply(Event::Prepared(Vec::new()));
        world.apply(Event::Planned(Box::new(ResourcePlan { door: Door::Dra, ..ResourcePlan::default() })));
        world.list(&[]);
        assert!(world.pool().is_none(), "no scan was made");
        world.see(gpus);
        assert!(world.pool().is_none(), "DRA gets the GPUs after two lists");
        world
    }

    fn apply(&mut self, event: Event) {
        self.state = std::mem::take(&mut self.state).apply(event, Timestamp::from_secs(1_000)).0;
    }

    fn see(&mut self, gpus: usize) {
        self.apply(Event::Observed(Box::new(observed(gpus))));
    }

    fn pool(&mut self) -> Option<&[SliceDevice]> {
        self.maker.make(&self.state, &server());
        self.maker.last.as_deref().map(|pool| pool.devices.as_slice())
    }

    /// The kubelet lists pods that hold these GPUs through the device plugin.
    fn list(&mut self, held: &[GpuUuid]) {
        let containers = held.iter().map(|uuid| (ResourceName::gpu(), DeviceId::from(uuid.to_string())));
        self.apply(Event::Holders(Some(Holdings { containers: containers.collect(), ..Holdings::default() })));
    }
}

fn observed(gpus: usize) -> NodeObservation {
    let mut observed = machines::load("dgx1-v100").unwrap().observed;
    observed.gpus.truncate(gpus);
    observed
}

fn claim_of_first() -> PreparedClaim {
    PreparedClaim {
        claim: ClaimName { namespace: "default".into(), name: "a".into(), uid: "1".into() },
        prepared: Prepared {
            devices: vec![PreparedDevice::whole("gpu-0", observed(1).gpus[0].uuid.clone())],
            ..Prepared::default()
        },
        is_of_another_boot: false,
    }
}

#[test]
fn pool_waits_for_checkpoints_in_the_ledger() {
    let mut world = World::new(2);
    (0..2).for_each(|_| world.list(&[]));
    world.apply(Event::ClaimsHandedOver);
    assert!(world.pool().is_none(), "another process has the claims");
    world.apply(Event::Prepared(vec![claim_of_first()]));
    assert_eq!(world.pool().unwrap().len(), 2);
}

#[test]
fn last_gpu_that_goes_leaves_pool_unless_claimed() {
    for is_claimed in [false, true] {
        let mut world = World::new(1);
        world.list(&[]);
        assert!(world.pool().is_none(), "DRA gets the GPU after the next list");
        world.list(&[]);
        let [device] = world.pool().unwrap() else { panic!("{:?}", world.pool()) };
        assert!(device.taints.is_empty());
        if is_claimed {
            world.apply(Event::Prepared(vec![claim_of_first()]));
        }
        world.see(0);
        let tainted: Vec<bool> = world.pool().unwrap().iter().map(|device| !device.taints.is_empty()).collect();
        assert_eq!(tainted, if is_claimed { vec![true] } else { vec![] });
    }
}

#[test]
fn pool_is_empty_if_pods_hold_all_gpus() {
    let mut world = World::new(2);
    let held: Vec<GpuUuid> = observed(2).gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    world.list(&held);
    assert_eq!(world.pool(), Some(&[][..]), "no list frees a GPU before a pod ends");
}

#[test]
fn pool_waits_until_stored_slices_are_read() {
    let mut world = World::new(2);
    (0..2).for_each(|_| world.list(&[]));
    world.maker.make(&world.state, &StoredPool::default());
    assert!(world.maker.last.is_none());
    assert_eq!(world.pool().unwrap().len(), 2);
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
