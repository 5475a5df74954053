//! Allocations of MIG devices that are made for claims: each device that fits is allocated, and no hardware twice.
//!
//! The oracle is a table from NVIDIA's MIG user guide for the A100 80 GB.

use std::collections::BTreeSet;

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{DraFacts, DraSettings, devices, mig_counters};
use linkwise_core::state::ResourcePlan;
use linkwise_core::topology::{MigEngines, MigObservation, MigPlacement, MigProfileObservation};
use linkwise_host::machines;
use linkwise_scheduler_box::{Cluster, Failure};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::dra::model::published::{DRIVER, accepted, claim, printed};
use crate::dra::published::checker::check;
use crate::dra::published::limits::idle;
use crate::dra::published::mig::MACHINE;

/// A profile: memory slices; multiprocessors, decoders, JPEG engines, optical flow accelerators; possible first slices.
struct Profile {
    name: &'static str,
    slices: u32,
    engines: [u32; 4],
    starts: &'static [u32],
}

const PROFILES: [Profile; 7] = [
    Profile { name: "1g.10gb", slices: 1, engines: [14, 0, 0, 0], starts: &[0, 1, 2, 3, 4, 5, 6] },
    Profile { name: "1g.10gb+me", slices: 1, engines: [14, 1, 1, 1], starts: &[0, 1, 2, 3, 4, 5, 6] },
    Profile { name: "1g.20gb", slices: 2, engines: [14, 1, 0, 0], starts: &[0, 2, 4, 6] },
    Profile { name: "2g.20gb", slices: 2, engines: [28, 1, 0, 0], starts: &[0, 2, 4] },
    Profile { name: "3g.40gb", slices: 4, engines: [42, 2, 0, 0], starts: &[0, 4] },
    Profile { name: "4g.40gb", slices: 4, engines: [56, 2, 0, 0], starts: &[0] },
    Profile { name: "7g.80gb", slices: 8, engines: [98, 5, 1, 1], starts: &[0] },
];

/// The engines of the whole GPU.
const ENGINES: [u32; 4] = [98, 5, 1, 1];

/// The instances of a GPU, each as its profile's index and its first memory slice.
type Gpu = Vec<(usize, u32)>;

/// Returns true if a GPU can have all these instances at once.
fn is_possible(gpu: &Gpu) -> bool {
    let mut taken = BTreeSet::new();
    let mut used = [0; 4];
    gpu.iter().all(|(profile, start)| {
        let Profile { slices, engines, starts, .. } = &PROFILES[*profile];
        used.iter_mut().zip(engines).for_each(|(used, more)| *used += more);
        starts.contains(start) && (*start..start + slices).all(|slice| taken.insert(slice))
    }) && used.iter().zip(ENGINES).all(|(used, most)| *used <= most)
}

fn fits(gpu: &Gpu, profile: usize) -> bool {
    PROFILES[profile].starts.iter().any(|start| is_possible(&[gpu.as_slice(), &[(profile, *start)]].concat()))
}

fn cluster() -> Cluster {
    let list = printed(&["dra", "--node", MACHINE, "--node-name", "node", "--dra-dynamic-mig"]);
    let slices: Vec<Value> = list["items"].as_array().unwrap().iter().map(|slice| accepted(slice, None)).collect();
    let expression = format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig'");
    let class =
        json!({"metadata": {"name": "mig.nvidia.com"}, "spec": {"selectors": [{"cel": {"expression": expression}}]}});
    Cluster::new(&slices, &[class], &[]).unwrap()
}

/// The claim for each profile, as `linkwise claim` prints it.
fn claims() -> Vec<Value> {
    PROFILES.iter().map(|profile| claim(&["--mig", profile.name])).collect()
}

/// The instance of an allocation, read from the device's name.
fn instance(allocation: &Value, profile: usize) -> (usize, u32) {
    let results = allocation["devices"]["results"].as_array().unwrap();
    assert_eq!(results.len(), 1, "{allocation}");
    let name = results[0]["device"].as_str().unwrap();
    let label = PROFILES[profile].name.replace('.', "").replace('+', "-");
    let rest = name.strip_prefix(&format!("gpu-0-mig-{label}-")).unwrap_or_else(|| panic!("{name}: {label}"));
    (profile, rest.split_once('-').unwrap().1.parse().unwrap())
}

/// The cluster after claims for these profiles.
fn cluster_after(profiles: &[usize], claims: &[Value]) -> Cluster {
    let mut cluster = cluster();
    for profile in profiles {
        let placement = cluster.allocate("node", std::slice::from_ref(&claims[*profile])).unwrap();
        cluster.occupy(&placement.allocations[0]).unwrap();
    }
    cluster
}

#[test]
fn two_halves_leave_no_room() {
    let claims = claims();
    let cluster = cluster_after(&[4, 4], &claims);
    for (claim, profile) in claims.iter().zip(&PROFILES) {
        let refused = cluster.allocate("node", std::slice::from_ref(claim));
        assert!(matches!(refused, Err(Failure::Refused(_))), "{}: {refused:?}", profile.name);
    }
}

#[test]
fn small_instances_leave_half_the_gpu() {
    cluster_after(&[0, 0, 0, 5], &claims());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_memory_slice_or_engine_is_given_twice(
        steps in prop::collection::vec((0..PROFILES.len(), any::<prop::sample::Index>(), any::<bool>()), 1..40),
    ) {
        let (mut cluster, claims) = (cluster(), claims());
        let mut held: Vec<(Value, (usize, u32))> = Vec::new();
        for (profile, which, ends) in steps {
            if ends && !held.is_empty() {
                let (ended, _) = held.swap_remove(which.index(held.len()));
                cluster.release(&ended).unwrap();
            }
            let gpu: Gpu = held.iter().map(|(_, instance)| *instance).collect();
            let outcome = cluster.allocate("node", std::slice::from_ref(&claims[profile]));
            prop_assert_eq!(outcome.is_ok(), fits(&gpu, profile), "{:?} {}", gpu, PROFILES[profile].name);
            if let Ok(placement) = outcome {
                let allocation = placement.allocations.into_iter().next().unwrap();
                cluster.occupy(&allocation).unwrap();
                let instance = instance(&allocation, profile);
                prop_assert!(is_possible(&[gpu, vec![instance]].concat()));
                held.push((allocation, instance));
            }
        }
    }
}

/// As much MIG as a GPU can have: 43 placements of profiles, eight memory slices, engines of each kind.
fn fullest_mig() -> MigObservation {
    let profile = |number: u32, gpu_slices: u32, size: u32, starts: &[u32]| MigProfileObservation {
        id: 100 + number,
        number,
        gpu_slices,
        memory_mib: 17_000 * u64::from(size),
        instances: u32::try_from(starts.len()).unwrap(),
        engines: MigEngines { multiprocessors: 16 * gpu_slices, copy: 1, decoder: 1, encoder: 1, jpeg: 1, ofa: 1 },
        placements: starts.iter().map(|start| MigPlacement { start: *start, size }).collect(),
    };
    let (seven, four, three) = ([0, 1, 2, 3, 4, 5, 6], [0, 2, 4, 6], [0, 2, 4]);
    let profiles = vec![
        profile(0, 1, 1, &seven),
        profile(7, 1, 1, &seven),
        profile(10, 1, 1, &seven),
        profile(13, 1, 1, &seven),
        profile(9, 1, 2, &four),
        profile(1, 2, 2, &three),
        profile(11, 2, 2, &three),
        profile(2, 3, 4, &[0, 4]),
        profile(3, 4, 4, &[0]),
        profile(12, 4, 4, &[0]),
        profile(4, 7, 8, &[0]),
    ];
    MigObservation { enabled: true, devices: Vec::new(), profiles }
}

#[test]
fn mig_everywhere_is_within_the_limits() {
    for machine in machines::built_in() {
        let mut observed = machines::load(machine.name).unwrap().observed;
        for gpu in &mut observed.gpus {
            gpu.mig = Some(fullest_mig());
            gpu.memory_mib = Some(143_771);
        }
        let (state, layout) = idle(&observed, ResourcePlan::default());
        let settings = DraSettings { dynamic_mig: true, ..DraSettings::default() };
        let facts = DraFacts::of_state(&state, &layout, settings);
        let ((devices, problems), counters) = (devices(&facts), mig_counters(&facts));
        assert_eq!((devices.len(), problems), (43 * observed.gpus.len(), Vec::new()), "{}", machine.name);
        let pool = Pool { counters, ..Pool::new("node", devices) };
        assert!(pool.devices.iter().all(|device| device.consumes_counters.len() == 1), "{}", machine.name);
        check(&pool.slices(1).iter().map(|slice| serde_json::to_value(slice).unwrap()).collect::<Vec<_>>());
    }
}
