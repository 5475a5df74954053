//! Health and versions by polls, scans and events: lost GPUs, NVLinks, MIG devices, recovery actions.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::{AllocationRequest, DeviceId};
use linkwise_core::state::{
    DeviceSelector, Effect, Event, Health, HealthPoll, MigInstance, MigStrategy, NodeState, Reach, RecoveryAction,
    ResourceName, ResourcePlan, SharedDevices, UnhealthyReason,
};
use linkwise_core::topology::{CudaVersion, GpuUuid, MigObservation, NodeObservation, NvLinkRemote};
use linkwise_host::machines;

use crate::resources::{NOW, mig, mixed, planned, resource, seen, sliced};

/// A machine whose GPUs are polled every ten seconds.
struct World {
    observed: NodeObservation,
    state: NodeState,
    now: Duration,
    effects: Vec<Effect>,
}

impl World {
    fn new(observed: NodeObservation) -> Self {
        Self::planned(observed, ResourcePlan::default())
    }

    fn planned(observed: NodeObservation, plan: ResourcePlan) -> Self {
        let mut world = Self { observed, state: NodeState::default(), now: NOW, effects: Vec::new() };
        world.apply(planned(&plan));
        world.apply(seen(world.observed.clone()));
        world
    }

    fn apply(&mut self, event: Event) {
        (self.state, self.effects) = std::mem::take(&mut self.state).apply(event, self.now);
    }

    fn dgx() -> Self {
        Self::new(machines::load("dgx1-v100").unwrap().observed)
    }

    /// Applies a scan that lacks GPU 0.
    fn scan_without_first(&mut self) {
        let mut fewer = self.observed.clone();
        fewer.gpus.remove(0);
        self.apply(seen(fewer));
    }

    fn uuid(&self, gpu: usize) -> GpuUuid {
        self.observed.gpus[gpu].uuid.clone()
    }

    /// The links from one GPU to another.
    fn links(&self, gpu: usize, far_end: usize) -> Vec<u32> {
        let remote = NvLinkRemote::Gpu(self.observed.gpus[far_end].pci);
        let ends = self.observed.gpus[gpu].nvlinks.iter().flatten().filter(|end| end.remote == remote);
        ends.flat_map(|end| end.links.clone()).collect()
    }

    /// Polls all GPUs ten seconds later. GPU `lost` is off the bus, and the other GPUs' links to `unlinked` are down.
    fn poll(&mut self, lost: Option<usize>, unlinked: Option<usize>) {
        self.now += Duration::from_secs(10);
        let polls = (0..self.observed.gpus.len()).map(|gpu| {
            let down = unlinked.map(|far_end| self.links(gpu, far_end)).unwrap_or_default();
            let poll = if lost == Some(gpu) {
                HealthPoll { reach: Reach::Lost { call: "nvmlDeviceGetTemperature".into() }, ..HealthPoll::default() }
            } else {
                HealthPoll { reach: Reach::Answers, nvlinks_down: Some(down), ..HealthPoll::default() }
            };
            (self.uuid(gpu), poll)
        });
        let polls = Event::Polled(polls.collect());
        self.apply(polls);
    }

    fn unhealthy(&self) -> BTreeSet<usize> {
        let gpus = (0..self.observed.gpus.len()).filter(|gpu| {
            let uuid = self.uuid(*gpu);
            self.state.gpus().iter().any(|status| status.gpu.uuid == uuid && !status.is_healthy)
        });
        gpus.collect()
    }
}

#[test]
fn links_to_a_lost_gpu_fail_that_gpu_alone() {
    for machine in ["dgx1-v100", "nvlink-bridge-pairs"] {
        let mut world = World::new(machines::load(machine).unwrap().observed);
        assert!((1..8).any(|gpu| !world.links(gpu, 0).is_empty()), "no GPU is linked to GPU 0");
        world.poll(None, None);
        world.poll(Some(0), Some(0));
        assert_eq!(world.unhealthy(), [0].into());
        // The next scan lacks the GPU.
        world.scan_without_first();
        world.poll(Some(0), Some(0));
        assert_eq!(world.unhealthy(), [0].into());
        // After a restart of linkwise the GPU is missing from the start.
        let record = Box::new(world.state.hardware().record());
        world.state = NodeState::default();
        world.apply(Event::Restored(record));
        world.scan_without_first();
        world.poll(Some(0), Some(0));
        assert_eq!(world.unhealthy(), BTreeSet::new(), "the other GPUs are healthy");
    }
}

#[test]
fn links_to_a_gpu_in_mig_mode_may_be_down() {
    let mut world = World::dgx();
    let mig = |world: &mut World, enabled| {
        let mut observed = world.observed.clone();
        observed.gpus[0].mig = Some(MigObservation { enabled, devices: Vec::new(), profiles: Vec::new() });
        world.apply(seen(observed));
    };
    mig(&mut world, false);
    world.poll(None, None);
    world.poll(None, Some(0));
    world.poll(None, Some(0));
    let linked: BTreeSet<usize> = (1..8).filter(|gpu| !world.links(*gpu, 0).is_empty()).collect();
    assert!(linked.len() > 2 && world.unhealthy() == linked, "{linked:?}: {:?}", world.unhealthy());
    mig(&mut world, true);
    world.poll(None, Some(0));
    assert_eq!(world.unhealthy(), BTreeSet::new());
    world.poll(None, Some(0));
    assert_eq!(world.unhealthy(), BTreeSet::new());
}

#[test]
fn neighbours_recover_once_the_far_end_proves_lost() {
    let mut world = World::dgx();
    world.poll(None, Some(0));
    assert!(world.unhealthy().contains(&1), "GPU 0 may not be the cause");
    world.apply(Event::Xid { gpu: world.uuid(0), code: 79, instance: None });
    world.poll(None, Some(0));
    assert_eq!(world.unhealthy(), [0].into(), "the neighbours recover without a hold time");
    // GPU 0 answers after its reset, and its links are up, while its hold time still runs.
    world.poll(None, None);
    assert_eq!(world.unhealthy(), [0].into());
}

#[test]
fn unknown_recovery_action_warns_and_fails_no_gpu() {
    let mut world = World::dgx();
    let (uuid, action) = (world.uuid(3), RecoveryAction::from(12));
    let poll = HealthPoll { reach: Reach::Answers, recovery_action: Some(action), ..HealthPoll::default() };
    let polls = BTreeMap::from([(uuid.clone(), poll)]);
    world.apply(Event::Polled(polls.clone()));
    assert_eq!(world.effects, [Effect::UnknownRecoveryAction(uuid, action), Effect::Keep]);
    world.apply(Event::Polled(polls));
    assert_eq!((world.effects.as_slice(), world.unhealthy()), ([].as_slice(), BTreeSet::new()));
}

#[test]
fn each_failing_mig_instance_is_reported() {
    let mut world = World::planned(mixed(), mig(MigStrategy::Mixed));
    let gpu = world.uuid(1);
    let name = resource("nvidia.com/mig-1g.10gb");
    let devices: Vec<_> = world.state.offers().of(&name).filter(|(_, device)| device.gpu.uuid == gpu).collect();
    let (first, second) = (devices[0].1.clone(), devices[1].1.clone());
    for device in [&first, &second] {
        let instance: Option<MigInstance> = device.instance();
        world.apply(Event::Xid { gpu: gpu.clone(), code: 79, instance });
        let health = Health::Unhealthy { reason: UnhealthyReason::Xid { code: 79, instance }, since: NOW };
        let mig = device.mig.as_ref().map(|mig| mig.uuid.clone());
        let changed = Effect::HealthChanged { gpu: gpu.clone(), mig, health };
        assert!(world.effects.contains(&changed), "{:?}", world.effects);
    }
    let gpus = world.state.gpus();
    let status = gpus.iter().find(|status| status.gpu.uuid == gpu).unwrap();
    assert!(status.is_healthy, "the GPU's other MIG devices are healthy");
    assert_eq!(status.reasons.len(), 2);
    // A fault of the whole GPU is reported once, not for each instance.
    world.apply(Event::DoubleBitEcc(gpu.clone()));
    let reported = world.effects.iter().filter(|effect| matches!(effect, Effect::HealthChanged { .. }));
    let health = Health::Unhealthy { reason: UnhealthyReason::DoubleBitEcc, since: NOW };
    assert_eq!(reported.collect::<Vec<_>>(), [&Effect::HealthChanged { gpu, mig: None, health }]);
}

#[test]
fn gpu_without_its_last_mig_device_is_not_gone() {
    for has_fault in [false, true] {
        let mut world = World::planned(mixed(), mig(MigStrategy::Mixed));
        let gpu = world.uuid(1);
        if has_fault {
            world.apply(Event::DoubleBitEcc(gpu.clone()));
        }
        let mut emptied = world.observed.clone();
        emptied.gpus[1].mig.as_mut().unwrap().devices.clear();
        world.apply(seen(emptied));
        let is_of_gpu =
            |effect: &&Effect| matches!(effect, Effect::HealthChanged { gpu: of, mig: None, .. } if *of == gpu);
        assert_eq!(world.effects.iter().find(is_of_gpu), None);
        let gpus = world.state.gpus();
        let status = gpus.iter().find(|status| status.gpu.uuid == gpu).unwrap();
        assert_eq!((status.is_healthy, status.reasons.len()), (!has_fault, usize::from(has_fault)), "{status:?}");
    }
}

#[test]
fn shared_gpus_keep_rules_when_one_goes() {
    let mut plan = sliced(4);
    let sharing = plan.sharing.as_mut().unwrap();
    sharing.fail_requests_greater_than_one = true;
    sharing.resources[0].devices = SharedDevices::List((0..8).map(DeviceSelector::Index).collect());
    let mut world = World::dgx();
    world.apply(planned(&plan));
    let mut fewer = world.observed.clone();
    fewer.gpus.pop();
    world.apply(seen(fewer));
    let healthy: Vec<DeviceId> = {
        let devices = world.state.offers().of(&ResourceName::gpu());
        devices.filter(|(_, device)| device.health == Health::Healthy).map(|(id, _)| id.clone()).collect()
    };
    assert_eq!(healthy.len(), 28);
    let refused = world.state.allocate(&ResourceName::gpu(), &healthy[..2]).unwrap_err().to_string();
    assert!(refused.contains("a container may have 1"), "{refused}");
    let request = AllocationRequest { available: healthy, must_include: Vec::new(), size: 2 };
    let (chosen, report) = world.state.preferred(&ResourceName::gpu(), &request);
    assert_eq!(report.fallback, None);
    let gpus: BTreeSet<&str> = chosen.devices.iter().filter_map(|id| id.as_str().split("::").next()).collect();
    assert_eq!(gpus.len(), 2, "the slots are of two GPUs");
}

#[test]
fn driver_and_cuda_versions_follow_the_last_scan() {
    let cuda = CudaVersion { major: 13, minor: 0 };
    let mut observed = mixed();
    (observed.driver_version, observed.cuda_version) = (Some("580.82.07".to_owned()), Some(cuda));
    let mut world = World::new(observed);
    let versions = world.state.hardware().versions();
    assert_eq!((versions.driver.as_deref(), versions.cuda), (Some("580.82.07"), Some(cuda)));
    world.apply(seen(NodeObservation { driver_version: None, ..mixed() }));
    assert_eq!(world.state.hardware().versions().driver, None);
}
