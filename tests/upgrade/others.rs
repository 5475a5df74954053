//! From a plugin that knows no takeover: the NVIDIA plugin, an older linkwise.

use linkwise_kubelet_box::Connections;

use crate::upgrade::fleet::{GPUS, World};
use crate::upgrade::node::{GPU, KUBELETS, registered};
use crate::upgrade::predecessor::Predecessor;

/// The pod of another plugin is replaced by ours, in a rollout that starts ours first.
async fn replaced(connections: Connections, socket: &str) {
    let world = World::new(connections);
    let folder = world.setup.kubelet_socket.parent().unwrap();
    let ids = GPUS.map(|(id, ..)| id.to_owned()).to_vec();
    let other = Predecessor::start_at(folder, socket, &ids).await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    let load = world.load(50);
    world.kubelet.wait(|state| state.resources[GPU].calls.allocate > 5).await.unwrap();
    let ours = world.start("pod-1").await;
    ours.ready().await;
    other.end().await;
    ours.settled().await;
    let tally = load.end().await;
    assert!(tally.rejected.is_empty(), "{tally:?}");
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
    // The kubelet knows whom it has: the end is noticed.
    ours.end().await;
    let state = world.kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert!(state.resources[GPU].healthy.is_empty(), "{state:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nvidia_plugin_is_replaced() {
    for connections in KUBELETS {
        replaced(connections, "nvidia-gpu.sock").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_linkwise_is_replaced() {
    for connections in KUBELETS {
        replaced(connections, "linkwise-nvidia.com_gpu-0123abcd.sock").await;
    }
}
