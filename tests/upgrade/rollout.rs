//! From one linkwise to the next, again and again.

use linkwise_kubelet_box::Connections;

use crate::upgrade::fleet::{GPUS, KUBELETS, World};
use crate::upgrade::node::{GPU, registered};

/// Takeovers on each kind of kubelet. `benches/upgrade.rs` has a hundred of each.
const TIMES: usize = 25;

async fn rollouts(connections: Connections) {
    let world = World::new(connections);
    let mut running = world.start("pod-0").await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    running.ready().await;
    let load = world.load(50);
    for time in 1..=TIMES {
        running = world.replace(running, &format!("pod-{time}")).await;
        let state = world.kubelet.state();
        assert_eq!(state.resources[GPU].healthy.len(), GPUS.len(), "takeover {time}: {state:#?}");
    }
    let tally = load.end().await;
    assert!(tally.rejected.is_empty(), "{tally:?}");
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_from_1_25() {
    rollouts(KUBELETS[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_from_1_37() {
    rollouts(KUBELETS[1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_up_to_1_24() {
    rollouts(KUBELETS[2]).await;
}

/// A new one settles when the old one has been gone for a while; the next takeover finds it settled.
async fn settled(connections: Connections) {
    let world = World::new(connections);
    let first = world.start("pod-0").await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    first.ready().await;
    let load = world.load(50);
    let mut running = world.replace(first, "pod-1").await;
    for time in 2..4 {
        running.settled().await;
        running = world.replace(running, &format!("pod-{time}")).await;
    }
    running.settled().await;
    assert!(load.end().await.rejected.is_empty());
    running.end().await;
    let state = world.kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert!(state.resources[GPU].healthy.is_empty(), "{state:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_successor_hands_over_from_1_25() {
    settled(KUBELETS[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_successor_hands_over_from_1_37() {
    settled(KUBELETS[1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_successor_hands_over_up_to_1_24() {
    settled(KUBELETS[2]).await;
}
