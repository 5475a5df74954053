//! Upgrades of nodes that cannot see their GPUs. While the old pod is ready, a DaemonSet's controller waits until the
//! new one is (pkg/controller/daemon/update.go): a new pod that is never ready would stop the upgrade of all nodes.

use crate::upgrade::fleet::{GPUS, Running, World};
use crate::upgrade::node::{GPU, KUBELETS, Setup, machine};

fn setup() -> Setup {
    let setup = Setup::with(&machine(&GPUS)).nvml_ms(&[("poll", 50), ("pause", 10), ("grace", 100)]);
    GPUS.iter().for_each(|(_, pci, _)| setup.on_bus(pci));
    setup
}

/// A node whose pod serves its GPUs.
async fn serving(setup: Setup) -> (World, Running) {
    let world = World::of(setup, KUBELETS[0]);
    let running = world.owner().await;
    (world, running)
}

/// Makes the driver fail for the running agent and for new ones.
fn break_driver(setup: &Setup) {
    setup.tell_all(&["init 9", "fail * nvmlDeviceGetCount_v2 9"]);
}

fn mend_driver(setup: &Setup) {
    setup.tell_all(&["init 0", "unfail * nvmlDeviceGetCount_v2"]);
}

/// Replaces the old pod. Asserts that devices stay offered without a gap, and that the new pod uses the driver again.
async fn replace_without_gap(world: World, old: Running, mend: impl AsyncFnOnce(&World, &Running)) {
    let new = world.replace(old, "pod-2").await;
    let state = world.kubelet.state();
    assert_eq!(state.resources[GPU].healthy.len(), GPUS.len(), "{state:#?}");
    mend(&world, &new).await;
    new.process.said("NVML available").await;
    new.wait_ready().await;
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_a_driver_stops_no_rollout() {
    let (world, old) = serving(setup()).await;
    break_driver(&world.setup);
    old.process.said("NVML unavailable for longer than the grace period").await;
    replace_without_gap(world, old, async |world, _| mend_driver(&world.setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_with_a_released_driver_stops_no_rollout() {
    let (world, old) = serving(setup()).await;
    old.process.signal("USR1");
    old.process.said("an operator releases the driver").await;
    replace_without_gap(world, old, async |_, new| new.process.signal("USR2")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_with_its_driver_keeps_its_node() {
    let (world, old) = serving(setup()).await;
    // The old pod keeps the driver; the new one cannot initialise NVML.
    world.setup.tell("init 9");
    let mut new = world.start("pod-2").await;
    new.process.said("has the driver, and keeps its place").await;
    let (status, last) = new.process.ended().await;
    assert!(!status.success(), "the new process must fail, so that the kubelet recreates its container: {last:?}");
    assert!(old.is_ready().await);
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withheld_gpus_stay_withheld_over_takeovers() {
    let (world, old) = serving(setup().arg("--on-nvml-loss=unhealthy")).await;
    break_driver(&world.setup);
    world.kubelet.wait(|state| state.resources[GPU].healthy.is_empty()).await.unwrap();
    let new = world.replace(old, "pod-2").await;
    let state = world.kubelet.state();
    assert_eq!((state.resources[GPU].healthy.len(), state.resources[GPU].unhealthy.len()), (0, GPUS.len()));
    // The next pod takes over from an owner that has never seen the GPUs itself.
    let _newest = world.replace(new, "pod-3").await;
    mend_driver(&world.setup);
    world.kubelet.wait(|state| state.resources[GPU].healthy.len() == GPUS.len()).await.unwrap();
}
