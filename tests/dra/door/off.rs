//! Claims that are left when the node's door is the device plugin: the kubelet's list alone says when a claim is over.

use linkwise_core::state::{Door, Event, ResourcePlan};
use linkwise_kubelet::dra::Phase;

use super::node::{Node, end, is_refused, name, read_claim, start, until};

/// The next plugin is that of a process with this door.
fn change_door(node: &mut Node, door: Door) {
    node.settings.serves = door == Door::Dra;
    node.apply(Event::Planned(Box::new(ResourcePlan { door, ..ResourcePlan::default() })));
}

const SWEPT: &str = "claim unprepared: it no longer exists";

/// A node whose claim `a` is prepared, and which was switched off while no plugin ran.
async fn off() -> Node {
    off_with(false).await
}

/// The same; with an API server, or without one that could be asked then.
async fn off_with(api_server: bool) -> Node {
    let mut node = Node::new().with_nics();
    let kubelet = node.serve().await;
    node.given(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    assert_eq!(node.left(), (1, 1));
    node.listed(&["a"]);
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
    node.holds(1).await;
    node.nothing_listed();
    // A kubelet that starts lists nothing, and never an init container that has ended: the cluster has the last word.
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!(node.left(), (1, 1));
}

#[tokio::test]
async fn claim_ends_when_the_kubelet_stops_listing_it() {
    let mut node = off().await;
    let reads = node.reads("a");
    node.start();
    node.holds(1).await;
    // One list without it may be older than the claim.
    node.listed(&[]);
    assert_eq!(node.checkpoints().len(), 1);
    node.listed(&[]);
    node.log.has(&[SWEPT]).await;
    assert_eq!(node.left(), (0, 0));
    assert_eq!(node.reads("a"), reads, "nobody asks the API server, which still has the claim");
}

#[tokio::test]
async fn kubelet_unprepares_claims_that_are_left() {
    let mut node = off().await;
    let kubelet = node.serve().await;
    let claim = name("a");
    start(&kubelet, &claim).await.unwrap();
    // One that was allocated and not prepared when the door changed.
    let reads = node.reads("late");
    is_refused(
        &kubelet,
        &node.claim("late", &[("gpus", "gpu-1")]),
        &["this node's GPUs go through the device plugin (linkwise.dra.gpus: none)"],
    )
    .await;
    assert_eq!((node.checkpoints().len(), node.reads("late")), (1, reads));
    end(&kubelet, &claim).await;
    assert!(node.checkpoints().is_empty() && node.claim_specs().is_empty());
}

#[tokio::test]
async fn kubelet_finds_the_plugin_while_it_lists_a_claim() {
    let mut node = off().await;
    // The answer that the claim is unprepared did not reach the kubelet.
    std::fs::remove_file(node.checkpoint("a")).unwrap();
    let kubelet = node.serve().await;
    end(&kubelet, &name("a")).await;
    node.halt(&kubelet).await;
    assert!(node.settings.checkpoints.is_dir());
    node.nothing_listed();
    node.start();
    until(|| !node.settings.checkpoints.exists()).await;
}

#[tokio::test]
async fn kubelet_finds_no_plugin_without_claims() {
    let mut node = Node::new();
    change_door(&mut node, Door::Plugin);
    // Of another driver with our name.
    node.listed(&["a"]);
    node.start();
    node.was(Phase::WaitingForGpus).await;
    // The plugin's task has its turns, on the disk too.
    for _ in 0..200 {
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    }
    let binds = |line: &String| line.contains(Phase::Binding.words());
    assert!(!node.log.lines.borrow().iter().any(binds));
    assert_eq!(std::fs::read_dir(&node.settings.registry).unwrap().count(), 0);
    assert!(!node.settings.checkpoints.exists(), "no folder is made");
}

#[tokio::test]
async fn spec_that_cannot_be_removed_is_left_behind() {
    let mut node = off().await;
    let spec = node.settings.cdi_folder.join(&node.claim_specs()[0]);
    std::fs::remove_file(&spec).unwrap();
    std::fs::create_dir(&spec).unwrap();
    node.start();
    node.nothing_listed();
    node.log.has(&["cleanup of a finished claim is incomplete", "CDI spec"]).await;
    node.log.has(&[SWEPT]).await;
    node.holds(0).await;
    assert!(node.checkpoints().is_empty(), "it holds its GPU no more");
    // DRA on again: nothing of it stands in the way of another claim.
    node.stop().await;
    change_door(&mut node, Door::Dra);
    node.settings.read_claim = Some(read_claim(&node.cluster));
    node.nothing_listed();
    let kubelet = node.serve().await;
    let claim = node.claim("b", &[("gpus", "gpu-0")]);
    assert_eq!(start(&kubelet, &claim).await.unwrap()[0], node.gpu(0));
}
