//! A whole node over the kubelet in the box: what is offered, what a pod gets, and what changes while it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use linkwise_core::publish::injection::HostDevices;
use linkwise_core::state::{
    Event, Filter, GpuSelector, MigStrategy, MpsGpu, MpsShare, NamePattern, Pattern, ResourcePlan, SharedDevices,
    SharedResource, Sharing, SharingKind,
};
use linkwise_core::topology::{GpuObservation, NodeObservation};
use linkwise_kubelet::device_plugin::Settings;
use linkwise_kubelet_box::{Allocation, KubeletBox, Options, Pod, State};
use linkwise_node::node::{Node, NodeSettings};
use tokio::sync::{mpsc, watch};

use crate::resources::look::Driver;
use crate::resources::{mixed, resource};

const GPU: &str = "nvidia.com/gpu";

/// A node in its life: the kubelet, and the way to tell what happens.
struct Scene {
    kubelet: KubeletBox,
    events: mpsc::Sender<Event>,
}

impl Scene {
    async fn plan(&self, plan: ResourcePlan) {
        self.events.send(Event::Planned(Box::new(plan))).await.unwrap();
    }

    async fn see(&self, seen: NodeObservation) {
        self.events.send(Event::Observed(Box::new(seen))).await.unwrap();
    }

    /// Waits until the kubelet lists exactly these resources with so many healthy devices, those without any left out.
    async fn offers(&self, wanted: &[(&str, usize)]) -> Arc<State> {
        let wanted: BTreeMap<String, usize> = wanted.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let offered = |state: &State| {
            let healthy = wanted.iter().all(|(name, count)| {
                let resource = &state.resources[name.as_str()];
                resource.connected && resource.healthy.len() == *count
            });
            let others = NAMES.iter().filter(|name| !wanted.contains_key(**name));
            healthy && others.into_iter().all(|name| state.resources[*name].healthy.is_empty())
        };
        self.kubelet.wait(offered).await.unwrap_or_else(|error| panic!("{wanted:?}: {error}"))
    }

    /// What a pod of one container gets.
    async fn pod(&self, name: &str, of: &str, count: u32) -> Result<Allocation, String> {
        let admitted = self.kubelet.admit(&Pod::single(name, of, count), None).await.map_err(|error| chain(&error))?;
        Ok(admitted.grant("main", of).unwrap().allocation.clone())
    }
}

/// Every resource that a test here offers.
const NAMES: [&str; 9] = [
    GPU,
    "nvidia.com/gpu.shared",
    "nvidia.com/a100",
    "nvidia.com/half",
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/mig-1g.10gb.me",
    "nvidia.com/mig-2g.20gb",
    "nvidia.com/mig-3g.40gb",
    "nvidia.com/mig-2c.4g.40gb",
];

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

/// Plays a script on a node that passes device nodes.
async fn on<T>(script: impl AsyncFnOnce(&Scene) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = KubeletBox::start(Options::new(folder.path())).unwrap();
    let mut settings = Settings::new(folder.path().join(Options::SOCKET));
    let control_nodes = vec!["/dev/nvidiactl".into()];
    let host_devices = HostDevices { dev_root: "/".into(), control_nodes, ..HostDevices::default() };
    let host_devices = watch::Sender::new(Arc::new(host_devices));
    settings.injection.device_nodes = true;
    settings.host_devices = host_devices.subscribe();
    let metrics_address = "127.0.0.1:0".parse().unwrap();
    let node = Node::start(NodeSettings {
        kubelet: settings,
        metrics_address,
        numa_hints: Default::default(),
        health: Default::default(),
    });
    let node = node.await.unwrap();
    let (scene, shutdown) = (Scene { kubelet, events: node.events() }, node.shutdown());
    let play = async {
        let outcome = script(&scene).await;
        shutdown.cancel();
        outcome
    };
    let (served, outcome) = tokio::join!(node.serve(), play);
    served.unwrap();
    assert_eq!(scene.kubelet.violations(), [], "nothing that harms a kubelet");
    scene.kubelet.stop().await.unwrap();
    outcome
}

fn mig(strategy: MigStrategy) -> ResourcePlan {
    ResourcePlan { mig_strategy: strategy, ..ResourcePlan::default() }
}

fn shared(sharing: Sharing) -> ResourcePlan {
    ResourcePlan { sharing: Some(sharing), ..ResourcePlan::default() }
}

fn time_slicing(replicas: u32) -> Sharing {
    Sharing::new(SharingKind::TimeSlicing, vec![SharedResource::new(resource(GPU), replicas)])
}

fn gpu(index: u32) -> String {
    format!("GPU-00000000-0000-0000-0000-{index:012}")
}

fn mig_uuid(number: u32) -> String {
    format!("MIG-{number:08x}-0000-0000-0000-000000000000")
}

fn visible(allocation: &Allocation) -> Vec<&str> {
    allocation.envs["NVIDIA_VISIBLE_DEVICES"].split(',').collect()
}

fn nodes(allocation: &Allocation) -> Vec<&str> {
    allocation.device_specs.iter().map(|node| node.host_path.as_str()).collect()
}

const MIXED_OFFER: [(&str, usize); 6] = [
    (GPU, 1),
    ("nvidia.com/mig-1g.10gb", 8),
    ("nvidia.com/mig-1g.10gb.me", 1),
    ("nvidia.com/mig-2g.20gb", 1),
    ("nvidia.com/mig-3g.40gb", 1),
    ("nvidia.com/mig-2c.4g.40gb", 2),
];

#[tokio::test]
async fn mig_none_offers_whole_gpus() {
    on(async |scene| {
        scene.see(mixed()).await;
        let state = scene.offers(&[(GPU, 4)]).await;
        assert_eq!(state.resources[GPU].healthy, (0..4).map(gpu).collect());
    })
    .await;
}

#[tokio::test]
async fn mig_mixed_offers_each_profile_with_its_nodes() {
    on(async |scene| {
        scene.plan(mig(MigStrategy::Mixed)).await;
        scene.see(mixed()).await;
        let state = scene.offers(&MIXED_OFFER).await;
        let one = &state.resources["nvidia.com/mig-1g.10gb"];
        assert_eq!(one.healthy, (0x10..0x17).chain([0x30]).map(mig_uuid).collect());
        // The parent's NUMA node.
        assert_eq!(
            (&one.numa[&mig_uuid(0x10)], &one.numa[&mig_uuid(0x30)]),
            (&BTreeSet::from([0]), &BTreeSet::from([1]))
        );
        let half = scene.pod("half", "nvidia.com/mig-2c.4g.40gb", 1).await.unwrap();
        assert_eq!(visible(&half), [mig_uuid(0x21)]);
        let expected =
            ["/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap291", "/dev/nvidia-caps/nvidia-cap292", "/dev/nvidiactl"];
        assert_eq!(nodes(&half), expected);
        // Two of one profile come from two GPUs; what is common to MIG devices of one GPU is named once.
        let two = scene.pod("two", "nvidia.com/mig-1g.10gb", 2).await.unwrap();
        assert_eq!(visible(&two), [mig_uuid(0x10), mig_uuid(0x30)]);
        let three = scene.pod("three", "nvidia.com/mig-1g.10gb", 3).await.unwrap();
        assert_eq!(visible(&three), [0x11, 0x12, 0x13].map(mig_uuid));
        assert_eq!(nodes(&three).len(), 1 + 3 * 2 + 1);
        assert_eq!(visible(&scene.pod("whole", GPU, 1).await.unwrap()), [gpu(0)]);
    })
    .await;
}

/// All four GPUs cut into the same.
fn uniform() -> NodeObservation {
    let mut seen = mixed();
    let layout = seen.gpus[1].mig.clone();
    for (number, gpu) in seen.gpus.iter_mut().enumerate() {
        gpu.mig = layout.clone();
        for device in gpu.mig.iter_mut().flat_map(|mig| &mut mig.devices) {
            device.uuid = mig_uuid(u32::try_from(number).unwrap() * 0x100 + device.index).parse().unwrap();
        }
    }
    seen
}

#[tokio::test]
async fn mig_single_offers_uniform_mig_devices_as_gpus() {
    on(async |scene| {
        scene.plan(mig(MigStrategy::Single)).await;
        scene.see(uniform()).await;
        scene.offers(&[(GPU, 28)]).await;
        let pod = scene.pod("pod", GPU, 1).await.unwrap();
        assert_eq!(visible(&pod), [mig_uuid(0)]);
        // One GPU cut otherwise: of what was offered, that which is still there stays; nothing new is added.
        let mut other = uniform();
        other.gpus[3].mig = mixed().gpus[3].mig.clone();
        scene.see(other).await;
        let state = scene.offers(&[(GPU, 21)]).await;
        assert_eq!(state.resources[GPU].unhealthy.len(), 7);
        scene.see(uniform()).await;
        scene.offers(&[(GPU, 28)]).await;
    })
    .await;
}

#[tokio::test]
async fn single_on_a_mixed_node_offers_nothing() {
    on(async |scene| {
        scene.plan(mig(MigStrategy::Single)).await;
        scene.see(mixed()).await;
        // A plan that can be had shows that the one before was looked at.
        let plan = ResourcePlan {
            gpu_names: vec![NamePattern { pattern: Pattern::new("A100"), name: resource("nvidia.com/a100") }],
            ..ResourcePlan::default()
        };
        scene.plan(plan).await;
        let state = scene.offers(&[("nvidia.com/a100", 4)]).await;
        assert_eq!(state.resources[GPU].registrations, 0);
    })
    .await;
}

#[tokio::test]
async fn a_mig_layout_that_changes_is_followed_live() {
    on(async |scene| {
        let driver = Driver::new();
        let observe = async || {
            let (gpus, failures) = driver.look().await;
            NodeObservation { gpus, failures, ..mixed() }
        };
        scene.plan(mig(MigStrategy::Mixed)).await;
        scene.see(observe().await).await;
        scene.offers(&MIXED_OFFER).await;
        // GPU 0 goes into MIG mode with one large device, GPU 1 leaves it.
        driver.tell(
            "mig 0 {enabled: true, devices: [{index: 0, uuid: MIG-big, gpu_instance: 1, compute_instance: 0, \
             gpu_slices: 3, compute_slices: 3, memory_mib: 40192}]}",
        );
        driver.tell("mig 1 {enabled: false}");
        scene.see(observe().await).await;
        let changed = [
            (GPU, 1),
            ("nvidia.com/mig-1g.10gb", 1),
            ("nvidia.com/mig-1g.10gb.me", 1),
            ("nvidia.com/mig-2g.20gb", 1),
            ("nvidia.com/mig-3g.40gb", 2),
            ("nvidia.com/mig-2c.4g.40gb", 2),
        ];
        let state = scene.offers(&changed).await;
        assert_eq!(state.resources[GPU].healthy, [gpu(1)].into());
        // What a pod may hold stays on the list.
        assert_eq!(state.resources[GPU].unhealthy, [gpu(0)].into());
        assert_eq!(state.resources["nvidia.com/mig-1g.10gb"].unhealthy, (0x10..0x17).map(mig_uuid).collect());
        assert!(scene.pod("lost", "nvidia.com/mig-1g.10gb", 2).await.is_err());
    })
    .await;
}

#[tokio::test]
async fn time_slices_spread_over_gpus() {
    on(async |scene| {
        scene.plan(shared(time_slicing(4))).await;
        scene.see(mixed()).await;
        let state = scene.offers(&[(GPU, 16)]).await;
        let slots: BTreeSet<String> =
            (0..4).flat_map(|at| (0..4).map(move |slot| format!("{}::{slot}", gpu(at)))).collect();
        assert_eq!(state.resources[GPU].healthy, slots);
        let two = scene.pod("two", GPU, 2).await.unwrap();
        assert_eq!(visible(&two).len(), 2, "distinct GPUs");
        let most = scene.pod("most", GPU, 9).await.unwrap();
        assert_eq!(most.devices.len(), 9);
        assert_eq!(visible(&most), (0..4).map(gpu).collect::<Vec<_>>());
        let paths = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia3", "/dev/nvidiactl"];
        assert_eq!(nodes(&most), paths);
    })
    .await;
}

#[tokio::test]
async fn more_than_one_slot_is_refused_where_configured() {
    for (kind, fail, refused) in [
        (SharingKind::TimeSlicing, None, false),
        (SharingKind::TimeSlicing, Some(true), true),
        (SharingKind::Mps, None, true),
        (SharingKind::Mps, Some(false), false),
    ] {
        on(async |scene| {
            let mut sharing = Sharing { kind, ..Sharing::new(kind, time_slicing(2).resources) };
            sharing.fail_requests_greater_than_one = fail.unwrap_or(sharing.fail_requests_greater_than_one);
            sharing.rename_by_default = true;
            scene.plan(shared(sharing)).await;
            let mut seen = mixed();
            for gpu in &mut seen.gpus {
                gpu.mig = None;
            }
            if kind == SharingKind::Mps {
                let gpus = seen.gpus.iter();
                let gpu = |gpu: &GpuObservation| MpsGpu {
                    uuid: gpu.uuid.clone(),
                    index: gpu.index,
                    memory_mib: gpu.memory_mib,
                };
                let share = MpsShare { replicas: 2, gpus: gpus.map(gpu).collect(), whole_node: true };
                let ready = BTreeMap::from([(resource("nvidia.com/gpu.shared"), share)]);
                scene.events.send(Event::MpsReady(ready)).await.unwrap();
            }
            scene.see(seen).await;
            scene.offers(&[("nvidia.com/gpu.shared", 8)]).await;
            scene.pod("one", "nvidia.com/gpu.shared", 1).await.unwrap();
            let two = scene.pod("two", "nvidia.com/gpu.shared", 2).await;
            match two {
                Err(error) if refused => {
                    let words =
                        "2 devices of nvidia.com/gpu.shared are asked for, which is shared: a container may have 1";
                    assert!(error.contains(words), "{error}");
                }
                other => assert!(!refused && other.is_ok(), "{kind:?} {fail:?}: {other:?}"),
            }
        })
        .await;
    }
}

#[tokio::test]
async fn display_is_offered_and_display_adapter_is_not() {
    on(async |scene| {
        scene.plan(ResourcePlan::default()).await;
        let mut seen = mixed();
        seen.gpus[0].display = Some(true);
        scene.see(seen.clone()).await;
        scene.offers(&[(GPU, 4)]).await;
        for name in ["DGX Display", "NVIDIA DGX Display"] {
            seen.gpus[0].model = Some(name.to_owned());
            scene.see(seen.clone()).await;
            let state = scene.offers(&[(GPU, 3)]).await;
            assert!(!state.resources[GPU].healthy.contains(&gpu(0)));
        }
        seen.gpus[0].model = Some("NVIDIA DGX Display 2".to_owned());
        scene.see(seen).await;
        scene.offers(&[(GPU, 4)]).await;
    })
    .await;
}

#[tokio::test]
async fn partial_sharing_with_rename_and_filter() {
    on(async |scene| {
        let half = SharedResource {
            rename: Some(resource("nvidia.com/half")),
            devices: SharedDevices::List(vec!["1".parse().unwrap(), gpu(2).parse().unwrap()]),
            ..SharedResource::new(resource(GPU), 2)
        };
        let exclude = vec![GpuSelector::Pci("0000:4e:00.0".parse().unwrap())];
        let plan = ResourcePlan {
            filter: Filter { exclude, exclude_displays: true },
            ..shared(Sharing::new(SharingKind::TimeSlicing, vec![half]))
        };
        scene.plan(plan).await;
        let mut seen = mixed();
        scene.see(seen.clone()).await;
        let state = scene.offers(&[(GPU, 1), ("nvidia.com/half", 4)]).await;
        assert_eq!(state.resources[GPU].healthy, [gpu(0)].into());
        // A display on the GPU that is whole.
        seen.gpus[0].display = Some(true);
        scene.see(seen).await;
        scene.offers(&[("nvidia.com/half", 4)]).await;
        // Another plan while it runs; the pod's slot stays on the list, and its GPU is offered whole again.
        let pod = scene.pod("pod", "nvidia.com/half", 1).await.unwrap();
        scene
            .plan(ResourcePlan {
                filter: Filter { exclude: Vec::new(), exclude_displays: false },
                ..ResourcePlan::default()
            })
            .await;
        let state = scene.offers(&[(GPU, 4)]).await;
        assert!(state.resources["nvidia.com/half"].unhealthy.is_superset(&pod.devices.into_iter().collect()));
    })
    .await;
}
