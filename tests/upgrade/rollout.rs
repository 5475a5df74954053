//! From one linkwise to the next, again and again.

use linkwise_kubelet_box::Connections;

use crate::cluster::older::older_program;
use crate::upgrade::fleet::{GPUS, KUBELETS, World};
use crate::upgrade::node::{GPU, registered};

async fn rollouts(connections: Connections, times: usize) {
    let world = World::new(connections);
    let mut running = world.start("pod-0").await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    running.ready().await;
    let load = world.load(50);
    for time in 1..=times {
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
async fn takeovers_in_a_row_reject_no_pod_up_to_1_36() {
    rollouts(KUBELETS[0], 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_from_1_37() {
    rollouts(KUBELETS[1], 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: make test-long"]
async fn hundred_takeovers_reject_no_pod() {
    for connections in KUBELETS {
        rollouts(connections, 100).await;
    }
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
async fn settled_successor_hands_over_up_to_1_36() {
    settled(KUBELETS[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_successor_hands_over_from_1_37() {
    settled(KUBELETS[1]).await;
}

/// From an older release and back, three times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs LINKWISE_OLDER: make test-upgrade"]
async fn upgrade_and_way_back_reject_no_pod() {
    let older = older_program();
    for connections in KUBELETS {
        let mut world = World::new(connections);
        let newer = std::mem::replace(&mut world.setup.program, older.clone());
        let mut running = world.start("pod-0").await;
        registered(&world.kubelet, 1, GPUS.len()).await;
        running.ready().await;
        let load = world.load(50);
        for time in 1..=6 {
            world.setup.program = if time % 2 == 1 { newer.clone() } else { older.clone() };
            running = world.replace(running, &format!("pod-{time}")).await;
        }
        let tally = load.end().await;
        assert!(tally.rejected.is_empty(), "{connections:?}: {tally:?}");
        assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]), "{connections:?}");
        running.end().await;
    }
}
