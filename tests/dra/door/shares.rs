//! Claims that share a GPU never get more shares than it has, even after kills and deleted claims.

use std::sync::Arc;

use linkwise_core::claims::{Claim, ClaimName};
use linkwise_core::state::{ResourceName, ResourcePlan, SharedResource, Sharing, SharingKind};
use linkwise_kubelet_box::dra::DraKubelet;

use super::node::{Answer, Node, end, observed_state, refusal, start};

/// A DGX-1 whose GPUs of 32 GiB have two shares each.
async fn shared() -> (Node, DraKubelet) {
    let rows = vec![SharedResource::new(ResourceName::gpu(), 2)];
    let sharing = Some(Sharing::new(SharingKind::TimeSlicing, rows));
    let plan = ResourcePlan { sharing, ..ResourcePlan::default() };
    let mut node = Node::new();
    node.state.send_replace(Arc::new(observed_state("dgx1-v100", plan, |_| {})));
    let kubelet = node.serve().await;
    (node, kubelet)
}

/// Creates a claim for this many shares of GPU 0.
fn share(node: &Node, uid: &str, shares: &str) -> ClaimName {
    let mut claim: Claim = super::node::claim(uid, &[("gpus", "gpu-0")]);
    let result = &mut claim.status.allocation.as_mut().unwrap().devices.results[0];
    result.share_id = Some(format!("share-{uid}"));
    let consumed = [("shares", shares), ("memory", "1Gi")];
    result.consumed_capacity = consumed.map(|(name, amount)| (name.to_owned(), amount.to_owned())).into();
    node.set_answer(uid, Answer::Claim(claim))
}

#[tokio::test]
async fn two_claims_share_a_gpu_and_a_third_is_refused() {
    let (mut node, kubelet) = shared().await;
    let [a, b, c] = ["a", "b", "c"].map(|uid| share(&node, uid, "1"));
    for claim in [&a, &b] {
        assert_eq!(start(&kubelet, claim).await.unwrap(), [node.gpu(0)]);
    }
    let holders = "held by the claim ml/claim-a (UID a), the claim ml/claim-b (UID b)";
    let why = refusal(&kubelet, &c).await;
    assert!(why.ends_with(&format!("1 of 2 shares are allocated to the claim, but 2 are {holders}")), "{why}");
    let whole = node.claim("d", &[("gpus", "gpu-0")]);
    let why = refusal(&kubelet, &whole).await;
    assert!(why.ends_with("is prepared for the claim ml/claim-a (UID a)"), "{why}");
    kubelet.stop().await;
    node.kill_and_start().await;
    let kubelet = node.kubelet().await;
    assert!(refusal(&kubelet, &c).await.ends_with(holders));
    assert_eq!(start(&kubelet, &a).await.unwrap(), [node.gpu(0)]);
    end(&kubelet, &a).await;
    assert_eq!(start(&kubelet, &c).await.unwrap(), [node.gpu(0)]);
    assert_eq!(node.checkpoints(), ["b.json", "c.json"]);
}

#[tokio::test]
async fn killed_prepare_keeps_its_shares() {
    let (mut node, kubelet) = shared().await;
    let [a, b] = ["a", "b"].map(|uid| share(&node, uid, "2"));
    start(&kubelet, &a).await.unwrap();
    node.crash(&kubelet).await;
    node.edit_checkpoint("a", |text| text.replace("\"Completed\"", "\"Started\""));
    let kubelet = node.serve().await;
    assert!(refusal(&kubelet, &b).await.ends_with("but 2 are held by the claim ml/claim-a (UID a)"));
    assert_eq!(start(&kubelet, &a).await.unwrap(), [node.gpu(0)]);
    end(&kubelet, &a).await;
    assert_eq!(start(&kubelet, &b).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn shares_of_deleted_claims_are_free() {
    let (node, kubelet) = shared().await;
    let [a, b, c] = ["a", "b", "c"].map(|uid| share(&node, uid, "1"));
    for claim in [&a, &b] {
        start(&kubelet, claim).await.unwrap();
    }
    // The kubelet did not unprepare the deleted claim.
    node.delete("b");
    assert_eq!(start(&kubelet, &c).await.unwrap(), [node.gpu(0)]);
    node.log.wait(&["claim unprepared: it no longer exists", "uid=\"b\""]).await;
    assert_eq!(node.checkpoints(), ["a.json", "c.json"]);
}
