//! The crash of the process that serves, with a spare in its pod.

use linkwise_kubelet_box::Connections;

use crate::upgrade::fleet::{GPUS, KUBELETS, World};
use crate::upgrade::node::{GPU, registered, until};

/// The container of the process that serves crashes and is restarted, twice: the spare serves in between each time.
async fn crashed(connections: Connections) {
    let world = World::new(connections);
    let mut first = world.start("pod").await;
    registered(&world.kubelet, 1, GPUS.len()).await;
    first.ready().await;
    let mut spare = world.start_spare("pod").await;
    for crash in 1..=2 {
        spare.able().await;
        first.kill().await;
        spare.process.logged(|line| line["stage"] == "Owning").await;
        // Each crash has its gap, and its end.
        until(async || match world.kubelet.gaps(GPU).len() {
            gaps if gaps == crash => Ok(()),
            gaps => Err(gaps),
        })
        .await;
        assert_eq!(world.kubelet.state().resources[GPU].healthy.len(), GPUS.len());
        // The container is restarted, and takes its place again; the spare's process ends, and is restarted too.
        first = world.start("pod").await;
        first.ready().await;
        spare.process.ended().await;
        first.settled().await;
        spare = world.start_spare("pod").await;
    }
    assert_eq!(world.kubelet.violations(), []);
    spare.end().await;
    first.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spare_serves_after_each_crash_from_1_25() {
    crashed(KUBELETS[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spare_serves_after_each_crash_from_1_37() {
    crashed(KUBELETS[1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spare_serves_after_each_crash_up_to_1_24() {
    crashed(KUBELETS[2]).await;
}
