//! A fleet's rolling update with `maxSurge: 1`: the controller in the box orders pods, and each node runs them. A node
//! that cannot see its GPUs does not stop the others.

use std::collections::BTreeMap;

use linkwise_kubelet_box::{DaemonPod, KubeletBox, rolling_update};

use crate::upgrade::fleet::{GPUS, KUBELETS, Running, World};
use crate::upgrade::node::{GPU, Setup, machine, registered, until};

/// A pod on a node; its container is started again when it ends.
struct Pod {
    uid: String,
    is_new: bool,
    running: Running,
}

/// A node and its pods, the oldest first.
struct Node {
    world: World,
    pods: Vec<Pod>,
    started: usize,
}

impl Node {
    /// A node with a driver, and with its old pod.
    async fn new(setup: Setup) -> Self {
        let world = World::of(setup, KUBELETS[0]);
        let mut node = Self { world, pods: Vec::new(), started: 0 };
        node.start(false).await;
        node
    }

    async fn start(&mut self, is_new: bool) {
        self.started += 1;
        let uid = format!("pod-{}", self.started);
        let running = self.world.start(&uid).await;
        self.pods.push(Pod { uid, is_new, running });
    }

    /// The pods as the API server shows them.
    async fn seen(&mut self, node: &str) -> Vec<DaemonPod> {
        let mut seen = Vec::new();
        for pod in &mut self.pods {
            if pod.running.process.has_ended() {
                pod.running = self.world.start(&pod.uid).await;
            }
            let is_ready = pod.running.is_ready().await;
            let (name, is_new) = (format!("{node}/{}", pod.uid), pod.is_new);
            seen.push(DaemonPod { name, is_new, is_ready, is_ending: false });
        }
        seen
    }

    async fn delete(&mut self, uid: &str) {
        let at = self.pods.iter().position(|pod| pod.uid == uid).unwrap();
        let mut pod = self.pods.remove(at);
        pod.running.process.signal("TERM");
        pod.running.process.ended().await;
    }

    fn kubelet(&self) -> &KubeletBox {
        &self.world.kubelet
    }
}

fn setup() -> Setup {
    let mut setup = Setup::with(&machine(&GPUS));
    for (option, milliseconds) in [("poll", 20), ("pause", 10), ("grace", 100)] {
        setup = setup.arg(format!("--nvml-{option}-ms={milliseconds}"));
    }
    GPUS.iter().for_each(|(_, pci, _)| setup.on_bus(pci));
    setup
}

/// A node whose old pod serves its GPUs.
async fn serving() -> Node {
    serving_on(setup()).await
}

async fn serving_on(setup: Setup) -> Node {
    let node = Node::new(setup).await;
    registered(node.kubelet(), 1, GPUS.len()).await;
    node.pods[0].running.ready().await;
    node
}

/// The driver fails, as long as new processes ask it.
fn breaks(setup: &Setup) {
    setup.tell("init 9");
    setup.tell("fail * nvmlDeviceGetCount_v2 9");
}

fn mends(setup: &Setup) {
    setup.tell("init 0");
    setup.tell("unfail * nvmlDeviceGetCount_v2");
}

/// Carries out the controller's orders until each node has its new pod alone.
async fn rolls_out(fleet: &mut BTreeMap<&str, Node>) {
    let fleet = tokio::sync::Mutex::new(fleet);
    until(async || {
        let mut fleet = fleet.lock().await;
        let mut nodes = BTreeMap::new();
        for (name, node) in fleet.iter_mut() {
            nodes.insert((*name).to_owned(), node.seen(name).await);
        }
        if nodes.values().all(|pods| matches!(&pods[..], [pod] if pod.is_new)) {
            return Ok(());
        }
        let orders = rolling_update(&nodes, 1);
        for pod in orders.delete {
            let (node, uid) = pod.split_once('/').unwrap();
            fleet.get_mut(node).unwrap().delete(uid).await;
        }
        for node in orders.create_on {
            fleet.get_mut(node.as_str()).unwrap().start(true).await;
        }
        Err(nodes)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_a_driver_stops_no_rollout() {
    // In this order the controller begins with the nodes that cannot see their GPUs.
    let away = serving().await;
    breaks(&away.world.setup);
    away.pods[0].running.process.said("NVML unavailable for longer than the grace period").await;
    let never = setup();
    breaks(&never);
    let never = Node::new(never).await;
    let released = serving().await;
    released.pods[0].running.process.signal("USR1");
    released.pods[0].running.process.said("an operator releases the driver").await;
    let well = serving().await;
    let mut fleet = BTreeMap::from([("1 away", away), ("2 never", never), ("3 released", released), ("4 well", well)]);
    rolls_out(&mut fleet).await;
    // Devices that were offered are offered still, with no gap.
    for name in ["1 away", "3 released", "4 well"] {
        let node = &fleet[name];
        let state = node.kubelet().state();
        assert_eq!((node.kubelet().gaps(GPU), node.kubelet().violations()), (vec![], vec![]), "{name}");
        assert_eq!(state.resources[GPU].healthy.len(), GPUS.len(), "{name}: {state:#?}");
        node.pods[0].running.ready().await;
    }
    assert!(!fleet["2 never"].pods[0].running.is_ready().await, "it offers nothing");
    // The new ones take the driver up when it is there again.
    mends(&fleet["1 away"].world.setup);
    fleet["3 released"].pods[0].running.process.signal("USR2");
    for name in ["1 away", "3 released"] {
        fleet[name].pods[0].running.process.said("NVML available").await;
        assert!(fleet[name].kubelet().gaps(GPU).is_empty(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_with_its_driver_keeps_its_node() {
    let mut node = serving().await;
    // A process that has begun has the driver; the next one does not get it.
    node.world.setup.tell("init 9");
    node.start(true).await;
    node.pods[1].running.process.said("has the driver, and keeps its place").await;
    let (status, last) = node.pods[1].running.process.ended().await;
    assert!(!status.success(), "its container is made anew: {last:?}");
    assert!(node.pods[0].running.is_ready().await);
    assert_eq!((node.kubelet().gaps(GPU), node.kubelet().violations()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withheld_gpus_stay_so_after_their_place_was_taken() {
    let mut node = serving_on(setup().arg("--on-nvml-loss=unhealthy")).await;
    breaks(&node.world.setup);
    node.kubelet().wait(|state| state.resources[GPU].healthy.is_empty()).await.unwrap();
    node.start(true).await;
    node.pods[1].running.ready().await;
    node.delete("pod-1").await;
    let state = node.kubelet().state();
    assert_eq!((state.resources[GPU].healthy.len(), state.resources[GPU].unhealthy.len()), (0, GPUS.len()));
    // The next one finds an owner that has never seen the GPUs itself.
    node.start(true).await;
    node.pods[1].running.ready().await;
    mends(&node.world.setup);
    node.kubelet().wait(|state| state.resources[GPU].healthy.len() == GPUS.len()).await.unwrap();
}
