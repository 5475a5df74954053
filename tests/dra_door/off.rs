//! Claims that are left when the node's door is the device plugin: the kubelet's list alone says when a claim is over.

use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{ClaimedDevice, Door, Event, Holdings, NodeState, ResourcePlan};
use linkwise_kubelet::dra::Phase;

use super::node::{DRIVER, LIMIT, Node, POOL, end, read_claim, refusal, start, until};

/// The kubelet lists these claims, each with GPU 0.
fn listed(node: &Node, claims: &[&str]) {
    let claimed = |uid: &&str| ClaimedDevice {
        claim: format!("ml/claim-{uid}"),
        driver: DRIVER.to_owned(),
        pool: POOL.to_owned(),
        device: "gpu-0".to_owned(),
        cdi_names: Vec::new(),
    };
    let holdings = Holdings { claims: claims.iter().map(claimed).collect(), ..Holdings::default() };
    apply(node, Event::Holders(Some(holdings)));
}

fn apply(node: &Node, event: Event) {
    let before = NodeState::clone(&node.state.borrow());
    node.state.send_replace(Arc::new(before.apply(event, Duration::from_secs(1)).0));
}

/// The next plugin is that of a process with this door.
fn change_door(node: &mut Node, door: Door) {
    node.settings.serves = door == Door::Dra;
    apply(node, Event::Planned(Box::new(ResourcePlan { door, ..ResourcePlan::default() })));
}

const SWEPT: &str = "claim unprepared: it no longer exists";

/// A node whose claim `a` is prepared, and which was switched off while no plugin ran.
async fn off() -> Node {
    off_with(false).await
}

/// The same; with an API server, or without one that could be asked then.
async fn off_with(api_server: bool) -> Node {
    let mut node = Node::running().with_nics();
    let kubelet = node.kubelet().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    start(&kubelet, &claim).await.unwrap();
    assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (1, 1));
    listed(&node, &["a"]);
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
    listed(&node, &[]);
    listed(&node, &[]);
    // A kubelet that starts lists nothing, and never an init container that has ended: the cluster has the last word.
    let asked = async {
        while node.reads("a") <= reads + 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, asked).await.unwrap();
    assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (1, 1));
}

#[tokio::test]
async fn claim_is_over_when_the_kubelet_lists_it_no_more() {
    let mut node = off().await;
    let reads = node.reads("a");
    node.start();
    node.holds(1).await;
    // One list without it may be older than the claim.
    listed(&node, &[]);
    assert_eq!(node.checkpoints().len(), 1);
    listed(&node, &[]);
    node.log.has(&[SWEPT]).await;
    assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (0, 0));
    assert_eq!(node.reads("a"), reads, "nobody asks the API server, which still has the claim");
}

#[tokio::test]
async fn kubelet_unprepares_claims_that_are_left() {
    let mut node = off().await;
    node.start();
    let kubelet = node.kubelet().await;
    let claim = super::node::name("a");
    start(&kubelet, &claim).await.unwrap();
    // One that was allocated and not prepared when the door changed.
    let reads = node.reads("late");
    let late = refusal(&kubelet, &node.claim("late", &[("gpus", "gpu-1")])).await;
    assert!(late.contains("this node's GPUs go through the device plugin (linkwise.dra.gpus: none)"), "{late}");
    assert_eq!((node.checkpoints().len(), node.reads("late")), (1, reads));
    end(&kubelet, &claim).await;
    assert!(node.checkpoints().is_empty() && node.claim_specs().is_empty());
}

#[tokio::test]
async fn kubelet_finds_the_plugin_while_it_lists_a_claim() {
    let mut node = off().await;
    // The answer that the claim is unprepared did not reach the kubelet.
    std::fs::remove_file(node.checkpoint("a")).unwrap();
    node.start();
    let kubelet = node.kubelet().await;
    end(&kubelet, &super::node::name("a")).await;
    kubelet.stop().await;
    node.stop().await;
    assert!(node.settings.checkpoints.is_dir());
    (0..2).for_each(|_| listed(&node, &[]));
    node.start();
    until(|| !node.settings.checkpoints.exists()).await;
}

#[tokio::test]
async fn kubelet_finds_no_plugin_without_claims() {
    let mut node = Node::new();
    change_door(&mut node, Door::Plugin);
    // Of another driver with our name.
    listed(&node, &["a"]);
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
    listed(&node, &[]);
    listed(&node, &[]);
    node.log.has(&["a claim that is over leaves something behind", "CDI spec"]).await;
    node.log.has(&[SWEPT]).await;
    node.holds(0).await;
    assert!(node.checkpoints().is_empty(), "it holds its GPU no more");
    // DRA on again: nothing of it stands in the way of another claim.
    node.stop().await;
    change_door(&mut node, Door::Dra);
    node.settings.read_claim = Some(read_claim(&node.cluster));
    (0..2).for_each(|_| listed(&node, &[]));
    node.start();
    let kubelet = node.kubelet().await;
    let claim = node.claim("b", &[("gpus", "gpu-0")]);
    assert_eq!(start(&kubelet, &claim).await.unwrap()[0], node.gpu(0));
}
