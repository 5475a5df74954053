//! Claims that remain after the node's GPUs changed from DRA to the device plugin. Without rights to read claims, a
//! sweep learns only from the kubelet's list that a claim has ended.

use linkwise_core::state::{Door, Event, ResourcePlan};
use linkwise_kubelet::dra::Phase;

use super::node::{Node, assert_refused, end, name, read_claim, start, until};

/// Sets the door of the process whose plugin starts next.
fn change_door(node: &mut Node, door: Door) {
    node.settings.serves = door == Door::Dra;
    node.apply(Event::Planned(Box::new(ResourcePlan { door, ..ResourcePlan::default() })));
}

const SWEPT: &str = "claim unprepared: it no longer exists";

/// A node whose claim `a` was prepared before DRA was switched off, without an API server.
async fn off() -> Node {
    off_with(false).await
}

/// Such a node, with an API server or without.
async fn off_with(api_server: bool) -> Node {
    let (mut node, kubelet) = Node::new().with_nics().served().await;
    node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    assert_eq!(node.file_counts(), (1, 1));
    node.kubelet_lists(&["a"]);
    node.stop().await;
    if !api_server {
        node.settings.read_claim = None;
    }
    change_door(&mut node, Door::Plugin);
    node
}

#[tokio::test]
async fn unlisted_claim_stays_while_the_api_server_has_it() {
    let mut node = off_with(true).await;
    let reads = node.reads("a");
    node.start();
    node.wait_prepared_claims(1).await;
    node.kubelet_lists_nothing();
    // The kubelet's list can lack a claim in use: it is empty when the kubelet starts, and never has init containers
    // that have ended. So linkwise keeps the claim while the API server has it.
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!(node.file_counts(), (1, 1));
}

#[tokio::test]
async fn claim_ends_when_the_kubelet_stops_listing_it() {
    let mut node = off().await;
    let reads = node.reads("a");
    node.start();
    node.wait_prepared_claims(1).await;
    // One list without the claim may be older than the claim.
    node.kubelet_lists(&[]);
    assert_eq!(node.checkpoints().len(), 1);
    node.kubelet_lists(&[]);
    node.log.wait(&[SWEPT]).await;
    assert_eq!(node.file_counts(), (0, 0));
    assert_eq!(node.reads("a"), reads, "the plugin read the claim from the API server");
}

#[tokio::test]
async fn kubelet_unprepares_claims_that_are_left() {
    let mut node = off().await;
    let kubelet = node.serve().await;
    let claim = name("a");
    start(&kubelet, &claim).await.unwrap();
    // This claim was allocated, but not prepared, when the door changed.
    let reads = node.reads("late");
    let late = node.claim("late", &[("gpus", "gpu-1")]);
    assert_refused(&kubelet, &late, &["this node's GPUs go through the device plugin (linkwise.dra.gpus: none)"]).await;
    assert_eq!((node.checkpoints().len(), node.reads("late")), (1, reads));
    end(&kubelet, &claim).await;
    assert!(node.checkpoints().is_empty() && node.claim_specs().is_empty());
}

#[tokio::test]
async fn kubelet_finds_the_plugin_while_it_lists_a_claim() {
    let mut node = off().await;
    // The claim was unprepared, but the answer did not reach the kubelet.
    std::fs::remove_file(node.checkpoint("a")).unwrap();
    let kubelet = node.serve().await;
    end(&kubelet, &name("a")).await;
    node.halt(&kubelet).await;
    assert!(node.settings.checkpoints.is_dir());
    node.kubelet_lists_nothing();
    node.start();
    until(|| !node.settings.checkpoints.exists()).await;
}

#[tokio::test]
async fn kubelet_finds_no_plugin_without_claims() {
    let mut node = Node::new();
    change_door(&mut node, Door::Plugin);
    // The listed claim is that of another driver with our name.
    node.kubelet_lists(&["a"]);
    node.start();
    node.wait_phase(Phase::WaitingForGpus).await;
    // The plugin's task and its disk operations can run meanwhile.
    for _ in 0..200 {
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    }
    let binds = |line: &String| line.contains(Phase::Binding.words());
    assert!(!node.log.lines.borrow().iter().any(binds));
    assert_eq!(std::fs::read_dir(&node.settings.registry).unwrap().count(), 0);
    assert!(!node.settings.checkpoints.exists(), "the folder of checkpoints was created");
}

#[tokio::test]
async fn spec_that_cannot_be_removed_is_left_behind() {
    let mut node = off().await;
    let spec = node.settings.cdi_folder.join(&node.claim_specs()[0]);
    std::fs::remove_file(&spec).unwrap();
    std::fs::create_dir(&spec).unwrap();
    node.start();
    node.kubelet_lists_nothing();
    node.log.wait(&["cleanup of a finished claim is incomplete", "CDI spec"]).await;
    node.log.wait(&[SWEPT]).await;
    node.wait_prepared_claims(0).await;
    assert!(node.checkpoints().is_empty(), "the claim still holds its GPU");
    // With DRA on again, the left spec does not block another claim.
    node.stop().await;
    change_door(&mut node, Door::Dra);
    node.settings.read_claim = Some(read_claim(&node.cluster));
    node.kubelet_lists_nothing();
    let kubelet = node.serve().await;
    let claim = node.claim("b", &[("gpus", "gpu-0")]);
    assert_eq!(start(&kubelet, &claim).await.unwrap()[0], node.gpu(0));
}
