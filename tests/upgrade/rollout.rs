//! Takeovers in a row, an upgrade from an older release and back, and the replacement of a plugin that knows no
//! takeover: the NVIDIA plugin, an older linkwise.

use std::path::PathBuf;

use linkwise_kubelet_box::Connections;

use crate::cluster::older::older_program;
use crate::run::swap::{NVIDIA_SOCKET, OtherPlugin};
use crate::upgrade::fleet::{GPUS, World};
use crate::upgrade::node::{GPU, KUBELETS, wait_registered};

/// Makes takeovers in a row; every second program is the older one, if there is one.
async fn rollouts(connections: Connections, times: usize, older: Option<PathBuf>) {
    let mut world = World::new(connections);
    let newer = world.setup.program.clone();
    let older = older.unwrap_or_else(|| newer.clone());
    world.setup.program = older.clone();
    let mut running = world.owner().await;
    let load = world.load(50);
    for time in 1..=times {
        if time % 4 == 0 {
            // Every fourth takeover starts from a pod that no longer serves beside its predecessor.
            running.wait_settled().await;
        }
        world.setup.program = if time % 2 == 1 { newer.clone() } else { older.clone() };
        running = world.replace(running, &format!("pod-{time}")).await;
        let state = world.kubelet.state();
        assert_eq!(state.resources[GPU].healthy.len(), GPUS.len(), "takeover {time}: {state:#?}");
    }
    running.wait_settled().await;
    let tally = load.end().await;
    assert!(tally.rejected.is_empty(), "{connections:?}: {tally:?}");
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]), "{connections:?}");
    running.end().await;
    let state = world.kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert!(state.resources[GPU].healthy.is_empty(), "{state:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_up_to_1_36() {
    rollouts(KUBELETS[0], 10, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeovers_in_a_row_reject_no_pod_from_1_37() {
    rollouts(KUBELETS[1], 10, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: make test-long"]
async fn hundred_takeovers_reject_no_pod() {
    for connections in KUBELETS {
        rollouts(connections, 100, None).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs LINKWISE_OLDER: make test-upgrade"]
async fn upgrade_and_rollback_reject_no_pod() {
    for connections in KUBELETS {
        rollouts(connections, 6, Some(older_program())).await;
    }
}

/// Replaces the pod of another plugin by ours, in a rollout that starts ours first.
async fn replace_other_plugin(connections: Connections, socket: &str) {
    let world = World::new(connections);
    let folder = world.setup.kubelet_socket.parent().unwrap();
    let ids = GPUS.map(|(id, ..)| id.to_owned()).to_vec();
    let other = OtherPlugin::start(folder, socket, &ids).await;
    wait_registered(&world.kubelet, 1, GPUS.len()).await;
    let load = world.load(50);
    world.kubelet.wait(|state| state.resources[GPU].calls.allocate > 5).await.unwrap();
    let ours = world.start("pod-1").await;
    ours.wait_ready().await;
    other.end().await;
    ours.wait_settled().await;
    let tally = load.end().await;
    assert!(tally.rejected.is_empty(), "{tally:?}");
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
    // The kubelet is connected to our plugin, and notices its end.
    ours.end().await;
    let state = world.kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert!(state.resources[GPU].healthy.is_empty(), "{state:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nvidia_plugin_is_replaced() {
    for connections in KUBELETS {
        replace_other_plugin(connections, NVIDIA_SOCKET).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_linkwise_is_replaced() {
    for connections in KUBELETS {
        replace_other_plugin(connections, "linkwise-nvidia.com_gpu-0123abcd.sock").await;
    }
}
