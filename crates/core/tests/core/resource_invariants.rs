//! Compares the resources of random plans on random machines with what NVIDIA's rules make of plan and observation.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::{AllocationRequest, DeviceId};
use linkwise_core::state::{
    DeviceSelector, Door, Event, Filter, GpuSelector, MigStrategy, NamePattern, NodeState, Pattern, ResourceName,
    ResourcePlan, SharedDevices, SharedResource, Sharing, SharingKind,
};
use linkwise_core::topology::{MigDeviceObservation, MigObservation, NodeObservation, NodeTopology};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::random_node;

const NOW: Duration = Duration::from_secs(1_000);
const MAX_GPUS: usize = 5;

/// The random properties of a GPU: MIG mode and MIG devices (slices, and true for media engines), the number of a
/// model, and true if it drives a display.
type Properties = (Option<(bool, Vec<(u32, bool)>)>, Option<usize>, Option<bool>);

fn properties() -> impl Strategy<Value = Vec<Properties>> {
    let devices = vec((1..4_u32, any::<bool>()), 0..4);
    vec((option::of((any::<bool>(), devices)), option::of(0..2_usize), option::weighted(0.3, any::<bool>())), MAX_GPUS)
}

fn mig_device(gpu: usize, index: u32, (slices, media): (u32, bool)) -> MigDeviceObservation {
    let device = serde_json::json!({
        "index": 2 * index, "uuid": format!("MIG-{gpu}-{index}"), "gpu_instance": index, "compute_instance": 0,
        "gpu_slices": slices, "compute_slices": slices, "memory_mib": 9_728 * slices,
        "extension": if media { "media" } else { "none" },
    });
    serde_json::from_value(device).unwrap()
}

fn with_properties(mut seen: NodeObservation, properties: &[Properties]) -> NodeObservation {
    for (at, (gpu, (mig, model, display))) in seen.gpus.iter_mut().zip(properties).enumerate() {
        gpu.memory_mib = Some(81_920);
        gpu.model = model.map(|model| ["NVIDIA A100", "NVIDIA H100"][model].to_owned());
        gpu.display = *display;
        gpu.mig = mig.as_ref().map(|(enabled, devices)| MigObservation {
            enabled: *enabled,
            profiles: Vec::new(),
            devices: (0..).zip(devices).map(|(index, device)| mig_device(at, index, *device)).collect(),
        });
    }
    seen
}

const NAMES: [&str; 5] =
    ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb.me", "example.com/x"];

fn name() -> impl Strategy<Value = ResourceName> {
    (0..NAMES.len()).prop_map(|at| NAMES[at].parse().unwrap())
}

fn devices() -> impl Strategy<Value = SharedDevices> {
    let selector = prop_oneof![
        (0..6_u32).prop_map(DeviceSelector::Index),
        (0..6_u32, 0..5_u32).prop_map(|(gpu, index)| DeviceSelector::MigIndex(gpu, index)),
        (0..6_u32).prop_map(|gpu| DeviceSelector::Uuid(format!("GPU-{gpu:02}"))),
    ];
    prop_oneof![
        4 => Just(SharedDevices::All),
        2 => (0..4_u32).prop_map(SharedDevices::Count),
        2 => vec(selector, 1..3).prop_map(SharedDevices::List),
    ]
}

fn plan() -> impl Strategy<Value = ResourcePlan> {
    let pattern = || {
        (prop_oneof![Just("*"), Just("A100"), Just("NVIDIA*H"), Just("1g")], name())
            .prop_map(|(pattern, name)| NamePattern { pattern: Pattern::new(pattern), name })
    };
    let shared = (name(), option::weighted(0.3, name()), devices(), prop_oneof![9 => 2..6_u32, 1 => 0..2_u32])
        .prop_map(|(name, rename, devices, replicas)| SharedResource { name, rename, devices, replicas });
    let sharing =
        (any::<bool>(), any::<bool>(), any::<bool>(), vec(shared, 1..4)).prop_map(|(mps, rename, one, resources)| {
            let kind = if mps { SharingKind::Mps } else { SharingKind::TimeSlicing };
            Sharing { kind, rename_by_default: rename, fail_requests_greater_than_one: one, resources }
        });
    let exclude = prop_oneof![
        (0..9_u32).prop_map(GpuSelector::Index),
        Just(GpuSelector::Model(Pattern::new("H100"))),
        (0..9_u32).prop_map(|gpu| GpuSelector::Uuid(format!("GPU-{gpu:02}").parse().unwrap())),
    ];
    let strategy = prop_oneof![Just(MigStrategy::None), Just(MigStrategy::Single), Just(MigStrategy::Mixed)];
    let patterns = || vec(pattern(), 0..3);
    (strategy, patterns(), patterns(), option::of(sharing), vec(exclude, 0..2), any::<bool>()).prop_map(
        |(mig_strategy, gpu_names, mig_names, sharing, exclude, exclude_displays)| ResourcePlan {
            door: Door::Plugin,
            mig_strategy,
            gpu_names,
            mig_names,
            sharing,
            filter: Filter { exclude, exclude_displays },
            shared_policy: None,
        },
    )
}

/// The UUIDs of the GPUs and MIG devices that the plan offers, before sharing, by NVIDIA's rules.
fn planned(topology: &NodeTopology, seen: &NodeObservation, plan: &ResourcePlan) -> BTreeSet<String> {
    let mut planned = BTreeSet::new();
    for gpu in topology.gpus() {
        let raw =
            seen.gpus.iter().find(|raw| raw.uuid == gpu.uuid && raw.pci == gpu.pci && raw.index == gpu.index).unwrap();
        let is_excluded = plan.filter.exclude.iter().any(|selector| match selector {
            GpuSelector::Index(index) => raw.index == *index,
            GpuSelector::Uuid(uuid) => raw.uuid == *uuid,
            GpuSelector::Pci(pci) => raw.pci == *pci,
            GpuSelector::Model(_) => raw.model.as_deref() == Some("NVIDIA H100"),
        });
        if is_excluded || (raw.display == Some(true) && plan.filter.exclude_displays) {
            continue;
        }
        match &raw.mig {
            Some(mig) if mig.enabled && plan.mig_strategy != MigStrategy::None => {
                planned.extend(mig.devices.iter().map(|device| device.uuid.to_string()));
            }
            _ => drop(planned.insert(raw.uuid.to_string())),
        }
    }
    planned
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resources_follow_plan_and_machine(
        seen in random_node::node(MAX_GPUS),
        properties in properties(),
        plan in plan(),
        before in option::of(plan()),
    ) {
        let seen = with_properties(seen, &properties);
        let mut snapshot = NodeState::default();
        let fresh = before.is_none();
        if let Some(before) = before {
            snapshot = snapshot.apply(Event::Planned(Box::new(before)), NOW).0;
            snapshot = snapshot.apply(Event::Observed(Box::new(seen.clone())), NOW).0;
        }
        snapshot = snapshot.apply(Event::Planned(Box::new(plan)), NOW).0;
        snapshot = snapshot.apply(Event::Observed(Box::new(seen.clone())), NOW).0;
        let plan = snapshot.offers().plan().clone();
        let mps = plan.sharing.as_ref().is_some_and(|sharing| sharing.kind == SharingKind::Mps);
        for (resource, devices) in snapshot.offers().resources().iter().map(|(name, of)| (name, of.devices())) {
            let without_daemon = devices.iter().filter(|(_, device)| mps && device.slot.is_some());
            for (id, _) in without_daemon {
                prop_assert!(!snapshot.offers().is_healthy(resource, id) && !fresh, "{id} is new or healthy");
            }
        }
        let ready = snapshot.mps_shares().clone();
        snapshot = snapshot.apply(Event::MpsReady(ready), NOW).0;
        let topology = NodeTopology::assemble(&seen).0;
        let planned = planned(&topology, &seen, &plan);

        let mut offered: BTreeMap<String, BTreeMap<ResourceName, BTreeSet<Option<u32>>>> = BTreeMap::new();
        for (resource, devices) in snapshot.offers().resources().iter().map(|(name, of)| (name, of.devices())) {
            prop_assert!(!devices.is_empty(), "{resource} has no device");
            for (id, device) in devices {
                prop_assert!(id.as_str().len() <= 63 && *id == device.id());
                let name = device.slot.map_or(device.uuid().to_owned(), |slot| format!("{}::{slot}", device.uuid()));
                prop_assert_eq!(id.as_str(), name);
                if snapshot.offers().is_healthy(resource, id) {
                    let resources = offered.entry(device.uuid().to_owned()).or_default();
                    let slots = resources.entry(resource.clone()).or_default();
                    prop_assert!(slots.insert(device.slot), "{id}: its slot is offered twice");
                }
            }
        }
        for (uuid, resources) in &offered {
            // A device that only the previous plan offered is unhealthy now, unless a problem keeps it on offer.
            let is_planned = planned.contains(uuid) || !snapshot.offers().problems().is_empty();
            prop_assert!(is_planned, "{uuid} is not planned");
            if !fresh {
                continue;
            }
            prop_assert!(planned.contains(uuid), "{uuid} is not planned");
            prop_assert_eq!(resources.len(), 1, "{} is in several resources", uuid);
            let slots = resources.values().next().unwrap();
            if !slots.contains(&None) {
                let shared = plan.sharing.as_ref().unwrap().resources.iter();
                let count = slots.len();
                prop_assert_eq!(slots, &(0..u32::try_from(count).unwrap()).map(Some).collect::<BTreeSet<_>>());
                prop_assert!(shared.into_iter().any(|shared| shared.replicas as usize == count), "{count} slots");
            } else {
                prop_assert_eq!(slots.len(), 1, "offered whole and in slots");
            }
        }
        // Without a problem no device is missing.
        if fresh && snapshot.offers().problems().is_empty() {
            prop_assert_eq!(offered.keys().cloned().collect::<BTreeSet<_>>(), planned);
        }
        // GPUs in MIG mode have no slots of MPS.
        for device in snapshot.offers().devices() {
            if fresh && mps && device.slot.is_some() {
                prop_assert!(device.mig.is_none() && !device.gpu.mig_enabled);
            }
        }
        // The preferred devices are as many as requested, on as many GPUs as possible.
        for (resource, devices) in snapshot.offers().resources().iter().map(|(name, of)| (name, of.devices())) {
            let available: Vec<DeviceId> =
                devices.keys().filter(|id| snapshot.offers().is_healthy(resource, id)).cloned().collect();
            for size in 1..=available.len().min(7) {
                let request = AllocationRequest { available: available.clone(), must_include: Vec::new(), size };
                let (answer, report) = snapshot.preferred(resource, &request);
                prop_assert_eq!(answer.devices.len(), size);
                prop_assert!(report.fallback.is_none(), "{:?}", report.fallback);
                let distinct: BTreeSet<&str> = answer.devices.iter().map(|id| devices[id].gpu.uuid.as_str()).collect();
                let gpus: BTreeSet<&str> = available.iter().map(|id| devices[id].gpu.uuid.as_str()).collect();
                prop_assert_eq!(distinct.len(), size.min(gpus.len()), "on fewer GPUs than possible");
                let allocated = snapshot.allocate(resource, &answer.devices);
                let one_each = plan.sharing.as_ref().is_some_and(|sharing| sharing.fail_requests_greater_than_one);
                let has_slots = answer.devices.iter().any(|id| devices[id].slot.is_some());
                prop_assert_eq!(allocated.is_err(), one_each && has_slots && size > 1);
            }
        }
    }
}
