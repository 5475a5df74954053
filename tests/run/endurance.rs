//! The same fault again and again. What takes minutes is ignored: `make test-long` runs it.

use std::collections::BTreeSet;
use std::time::Duration;

use linkwise_kubelet_box::{KubeletBox, Pod, Restart};
use tokio::task::JoinSet;

use crate::run::node::{GPU, Node, Setup, registered};

/// What holds whenever everything has settled: every id is with one pod at most, none is lost, nothing is left behind.
fn sound(node: &Node, kubelet: &KubeletBox) {
    let state = kubelet.state();
    let gpu = &state.resources[GPU];
    let held: Vec<&String> = gpu.allocated.values().flat_map(|pod| pod.values()).flatten().collect();
    let distinct: BTreeSet<&String> = held.iter().copied().collect();
    assert_eq!(held.len(), distinct.len(), "an id twice: {held:?}");
    assert_eq!((gpu.healthy.len(), gpu.unhealthy.len(), gpu.open_streams), (8, 0, 1));
    assert_eq!((state.violations.len(), node.setup.sockets().len()), (0, 1));
}

async fn restarts(times: u64) {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let kubelet = std::sync::Arc::new(kubelet);
    let mut pods = JoinSet::new();
    for round in 0..times {
        // Pods in flight: some are admitted before the kubelet goes, some are not, some of theirs stay.
        for number in 0..3 {
            let kubelet = std::sync::Arc::clone(&kubelet);
            pods.spawn(async move {
                let name = format!("pod-{round}-{number}");
                let _ = kubelet.admit(&Pod::single(&name, GPU, 1 + number), None).await;
                if number > 0 {
                    kubelet.remove_pod(&name);
                }
            });
        }
        kubelet.restart(if round % 2 == 0 { Restart::Kubelet } else { Restart::Node }).await.unwrap();
        while pods.join_next().await.is_some() {}
        if round % 8 == 7 {
            for round in 0..=round {
                kubelet.remove_pod(&format!("pod-{round}-0"));
            }
        }
        registered(&kubelet, 1, 8).await;
        // The session that the kubelet's end ended may have been the last but one.
        node.ready(200, "").await;
        sound(&node, &kubelet);
    }
    for round in 0..times {
        kubelet.remove_pod(&format!("pod-{round}-0"));
    }
    kubelet.admit(&Pod::single("last", GPU, 8), None).await.unwrap();
}

#[tokio::test]
async fn ten_kubelet_restarts_with_pods_in_flight() {
    restarts(10).await;
}

#[tokio::test]
#[ignore = "takes a minute: make test-long"]
async fn kubelet_restarts_200_times_with_pods_in_flight() {
    restarts(200).await;
}

async fn kills(times: u64) {
    let (mut node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    // No two runs alike, and none needs a clock.
    let mut seed = u64::from(std::process::id());
    for round in 0..times {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let after = Duration::from_millis((seed >> 33) % 300);
        let name = format!("pod-{}", round % 4);
        kubelet.remove_pod(&name);
        let pod = Pod::single(&name, GPU, 2);
        // The fault: at any point of an admission, of a start, of a registration.
        tokio::select! {
            () = tokio::time::sleep(after) => {}
            _ = async {
                let _ = kubelet.admit(&pod, None).await;
                std::future::pending::<()>().await;
            } => {}
        }
        node.process.signal("KILL");
        assert!(!node.process.ended().await.0.success());
        node.process = node.setup.spawn();
        if round % 4 == 3 {
            // Every fourth is left alone until it serves; the others are killed on their way.
            kubelet
                .wait(|state| state.resources[GPU].connected && state.resources[GPU].healthy.len() == 8)
                .await
                .unwrap();
            node.process.said("\"serving\"").await;
            sound(&node, &kubelet);
        }
    }
    for number in 0..4 {
        kubelet.remove_pod(&format!("pod-{number}"));
    }
    node.process.said("\"serving\"").await;
    registered(&kubelet, 1, 8).await;
    sound(&node, &kubelet);
    kubelet.admit(&Pod::single("last", GPU, 8), None).await.unwrap();
    node.process.signal("TERM");
    assert!(node.process.ended().await.0.success());
    assert!(node.setup.sockets().is_empty());
}

#[tokio::test]
async fn agent_killed_anywhere_leaves_nothing_behind() {
    kills(8).await;
}

#[tokio::test]
#[ignore = "takes minutes: make test-long"]
async fn agent_killed_200_times_leaves_nothing_behind() {
    kills(200).await;
}
