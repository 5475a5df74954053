//! The availability of GPUs over random histories, compared with the test's own records: each GPU has one
//! availability, and each change is published.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::publish::placement::{Outlook, Placements};
use linkwise_core::publish::view::{NodeView, Sums, view};
use linkwise_core::state::{
    Availability, ClaimedDevice, Door, Effect, Event, Health, Holdings, MigStrategy, NodeState, ResourceDevice,
    ResourceName, ResourcePlan,
};
use linkwise_core::topology::{GpuUuid, MigObservation, NodeObservation};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::resources::{claimed, dgx, mig, mixed, planned, prepared, seen, sliced};

/// An admission has ended when this number of lists in a row lack it.
const MISSED_LISTS: u8 = 2;

/// Devices that one Allocate gave to a container.
#[derive(Clone, Debug)]
struct Admission {
    resource: ResourceName,
    ids: BTreeSet<DeviceId>,
    is_listed: bool,
    missed: u8,
}

/// The records of a kubelet and a DRA plugin, and the node's state.
struct World {
    machine: NodeObservation,
    plan: ResourcePlan,
    state: NodeState,
    published: NodeState,
    now: Duration,
    /// The devices that each running pod has.
    pods: Vec<(ResourceName, BTreeSet<DeviceId>)>,
    claims: BTreeMap<String, GpuUuid>,
    admissions: Vec<Admission>,
    /// The last list: ids, and the GPUs of claims.
    list: Option<(BTreeSet<ResourceDevice>, BTreeSet<GpuUuid>)>,
}

/// The figures of a state: each GPU's availability, the GPUs of each availability, the free GPUs, and the outlook.
type Figures = (Vec<(GpuUuid, Availability)>, BTreeMap<Availability, usize>, usize, Vec<Outlook>);

fn figures(state: &NodeState) -> Figures {
    let gpus = state.gpus().iter().map(|status| (status.gpu.uuid.clone(), status.availability)).collect();
    let placements = Placements::of(state);
    let Sums { gpus: counts, free, .. } = view(state, &placements, BTreeMap::new(), NodeView::default()).sums;
    (gpus, counts, free.values().sum(), placements.outlook)
}

impl World {
    fn new(machine: NodeObservation, plan: ResourcePlan) -> Self {
        let (state, published) = Default::default();
        let now = Duration::from_secs(1_000);
        let (pods, claims, admissions, list) = Default::default();
        let mut world = Self { machine, plan, state, published, now, pods, claims, admissions, list };
        world.apply(planned(&world.plan));
        world.apply(seen(world.machine.clone()));
        world
    }

    fn apply(&mut self, event: Event) {
        self.now += Duration::from_secs(1);
        let (state, effects) = std::mem::take(&mut self.state).apply(event, self.now);
        self.state = state;
        if effects.contains(&Effect::Publish) {
            self.published = self.state.clone();
        }
    }

    /// The GPU behind an id, by the machine as it was built.
    fn gpu(&self, id: &DeviceId) -> GpuUuid {
        let uuid = id.as_str().split("::").next().unwrap();
        let has = |mig: &MigObservation| mig.devices.iter().any(|one| one.uuid.as_str() == uuid);
        let mut gpus = self.machine.gpus.iter();
        let gpu = gpus.find(|gpu| gpu.uuid.as_str() == uuid || gpu.mig.as_ref().is_some_and(has));
        gpu.unwrap_or_else(|| panic!("{uuid}")).uuid.clone()
    }

    /// A pod gets up to three healthy devices that no other pod has.
    fn admit(&mut self, pick: usize) {
        let resources: Vec<ResourceName> = self.state.offers().resources().keys().cloned().collect();
        let Some(resource) = resources.get(pick % resources.len().max(1)).cloned() else { return };
        let taken: BTreeSet<_> = self.pods.iter().filter(|(of, _)| *of == resource).flat_map(|(_, ids)| ids).collect();
        let healthy = self.state.offers().of(&resource).filter(|(_, device)| device.health == Health::Healthy);
        let free: Vec<DeviceId> = healthy.map(|(id, _)| id.clone()).filter(|id| !taken.contains(id)).collect();
        let ids: BTreeSet<DeviceId> = free.iter().skip(pick / 7 % 4).take(1 + pick / 3 % 3).cloned().collect();
        if ids.is_empty() {
            return;
        }
        self.admissions.retain(|admission| admission.resource != resource || admission.ids.is_disjoint(&ids));
        let admission = Admission { resource: resource.clone(), ids: ids.clone(), is_listed: false, missed: 0 };
        self.admissions.push(admission);
        self.pods.push((resource.clone(), ids.clone()));
        self.apply(Event::Allocated { resource, devices: ids, offered: free });
    }

    /// Sends the kubelet's list, which lacks the last `without` pods and as many of the first claims.
    fn list(&mut self, without: usize) {
        let pods = self.pods.iter().take(self.pods.len().saturating_sub(without));
        let ids: BTreeSet<ResourceDevice> =
            pods.flat_map(|(resource, ids)| ids.iter().map(|id| (resource.clone(), id.clone()))).collect();
        for admission in &mut self.admissions {
            let is_in = admission.ids.iter().all(|id| ids.contains(&(admission.resource.clone(), id.clone())));
            admission.is_listed |= is_in;
            admission.missed = if is_in { 0 } else { admission.missed + 1 };
        }
        self.admissions.retain(|admission| admission.missed < MISSED_LISTS);
        let claims = self.claims.iter().skip(without).map(|(name, gpu)| {
            // The machines' UUIDs end with the minor number, by which a device is named.
            let minor: u32 = gpu.as_str().rsplit('-').next().unwrap().parse().unwrap();
            claimed(&format!("ml/{name}"), &format!("gpu-{minor}"), gpu.as_str())
        });
        let claims: BTreeSet<ClaimedDevice> = claims.collect();
        self.list = Some((ids.clone(), claims.iter().map(|one| one.cdi_names[0].parse().unwrap()).collect()));
        // A third of the ids belong to init containers.
        let (containers, init_containers) = ids.into_iter().enumerate().partition::<Vec<_>, _>(|(at, _)| at % 3 > 0);
        let [containers, init_containers] =
            [containers, init_containers].map(|part| part.into_iter().map(|(_, id)| id).collect());
        self.apply(Event::Holders(Some(Holdings { containers, init_containers, claims, ..Holdings::default() })));
    }

    fn prepare(&mut self) {
        let prepared = self.claims.iter().map(|(name, gpu)| prepared("ml", name, "gpu", gpu.clone())).collect();
        self.apply(Event::Prepared(prepared));
    }

    /// Restarts linkwise with the health record of the previous process.
    fn restart(&mut self) {
        let record = self.state.record();
        self.state = NodeState::default();
        self.list = None;
        let admissions = record.admissions.iter().map(|kept| {
            let (resource, ids) = (kept.resource.parse().unwrap(), kept.devices.iter().map(|id| id.clone().into()));
            Admission { resource, ids: ids.collect(), is_listed: false, missed: 0 }
        });
        self.admissions = admissions.collect();
        self.apply(planned(&self.plan));
        self.apply(Event::Restored(Box::new(record)));
        self.apply(seen(self.machine.clone()));
        self.prepare();
    }

    fn step(&mut self, (kind, pick): (u8, usize)) {
        let gpu = self.machine.gpus[pick % self.machine.gpus.len()].uuid.clone();
        match kind {
            // A pod starts. If its end is the next step, no list has it.
            0..=3 => self.admit(pick),
            4..=6 if !self.pods.is_empty() => drop(self.pods.remove(pick % self.pods.len())),
            7..=9 => self.list(0),
            10 => self.list(1 + pick % 3),
            11 => self.apply(Event::Holders(None)),
            12 => self.apply(Event::Xid { gpu, code: 79, instance: None }),
            13 => self.apply(Event::Cleared(gpu)),
            14 => {
                let mut without = self.machine.clone();
                without.gpus.retain(|seen| seen.uuid != gpu);
                self.apply(seen(without));
            }
            15 => self.apply(seen(self.machine.clone())),
            16 | 17 if self.state.door(&gpu) == Some(Door::Dra) && !self.claims.values().any(|held| *held == gpu) => {
                self.claims.insert(format!("claim-{pick}"), gpu);
                self.prepare();
            }
            18 => {
                self.claims.pop_first();
                self.prepare();
            }
            19 => self.restart(),
            _ => {}
        }
    }

    /// The GPUs of which a pod or claim holds a part; `None` while no list has come.
    fn held(&self) -> Option<BTreeSet<GpuUuid>> {
        let (ids, claims) = self.list.as_ref()?;
        let unlisted =
            self.admissions.iter().filter(|admission| !admission.is_listed).flat_map(|admission| &admission.ids);
        let by_id = ids.iter().map(|(_, id)| id).chain(unlisted).map(|id| self.gpu(id));
        Some(by_id.chain(claims.iter().cloned()).chain(self.claims.values().cloned()).collect())
    }

    fn check(&self) {
        let figures = figures(&self.state);
        let (gpus, counts, free, outlook) = &figures;
        assert_eq!(counts.values().sum::<usize>(), gpus.len(), "the counts do not add up to all GPUs");
        assert_eq!(counts[&Availability::Free], *free);
        let held = self.held();
        let offers = self.state.offers();
        for (uuid, availability) in gpus {
            let of_gpu = offers.devices().chain(offers.through_dra()).filter(|device| device.gpu.uuid == *uuid);
            let healthy: Vec<bool> =
                of_gpu.filter(|one| one.health == Health::Healthy).map(|one| one.mig.is_some()).collect();
            let expected = match &held {
                Some(held) if held.contains(uuid) => Availability::Held,
                None if !healthy.is_empty() => Availability::Unknown,
                _ if healthy.contains(&false) => Availability::Free,
                _ if healthy.contains(&true) => Availability::Mig,
                _ => Availability::Unhealthy,
            };
            assert_eq!((*availability, uuid), (expected, uuid));
        }
        let free_of = |uuid: &GpuUuid| gpus.contains(&(uuid.clone(), Availability::Free));
        for outlook in outlook {
            assert!(outlook.gpus.iter().all(free_of), "{outlook:?}");
            assert!(outlook.size > 1 || outlook.gpus.is_empty() == (*free == 0), "{outlook:?}");
        }
        assert_eq!(self::figures(&self.published), figures, "a change was not published");
    }
}

/// Nodes with whole GPUs, slots, MIG devices, and GPUs of DRA.
fn worlds() -> [World; 4] {
    static DGX: LazyLock<NodeObservation> = LazyLock::new(|| dgx(4));
    [
        World::new(DGX.clone(), ResourcePlan::default()),
        World::new(DGX.clone(), sliced(3)),
        World::new(mixed(), mig(MigStrategy::Mixed)),
        World::new(DGX.clone(), ResourcePlan { door: Door::Dra, ..ResourcePlan::default() }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn availability_matches_records_and_is_published(steps in vec((0..20_u8, 0..1000_usize), 1..50)) {
        for mut world in worlds() {
            world.check();
            for step in &steps {
                world.step(*step);
                world.check();
            }
        }
    }
}

#[test]
fn gpu_of_an_unlisted_pod_is_free_after_two_lists() {
    let [mut world, ..] = worlds();
    world.list(0);
    world.step((0, 0));
    assert_eq!(figures(&world.published).1[&Availability::Held], 1, "the GPU is held from its admission on");
    world.pods.clear();
    world.list(0);
    world.list(0);
    let (_, counts, free, outlook) = figures(&world.published);
    assert_eq!((counts[&Availability::Held], counts[&Availability::Free], free), (0, 4, 4));
    assert!(outlook.iter().all(|outlook| outlook.gpus.len() == outlook.size), "{outlook:?}");
}
