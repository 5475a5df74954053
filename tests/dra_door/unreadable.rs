//! Checkpoints that cannot be read, or not by this version: they stay, and hold what they have, until the kubelet or the
//! cluster says that their claim is over.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{ClaimedDevice, Event, Holdings, NodeState, NumaHints};
use linkwise_kubelet_box::dra::DraKubelet;
use serde_json::{Value, json};

use super::node::{DRIVER, LIMIT, Node, POOL, connected, end, name, pod, refusal, start, state, until};

/// A node whose claim `a` has GPU 0, and whose plugin has stopped.
async fn stopped() -> (Node, DraKubelet) {
    let mut node = Node::running();
    let kubelet = node.kubelet().await;
    start(&kubelet, &node.claim("a", &[("gpus", "gpu-0")])).await.unwrap();
    kubelet.stop().await;
    node.stop().await;
    (node, kubelet)
}

fn edit(node: &Node, change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut checkpoint: Value = serde_json::from_slice(&fs::read(node.checkpoint("a")).unwrap()).unwrap();
    change(&mut checkpoint);
    fs::write(node.checkpoint("a"), checkpoint.to_string()).unwrap();
    checkpoint.to_string().into_bytes()
}

/// The kubelet lists the claim `a` with GPU 0, or nothing, or cannot be asked.
fn listed(node: &Node, list: Option<bool>) {
    let claimed = ClaimedDevice {
        claim: "ml/claim-a".to_owned(),
        driver: DRIVER.to_owned(),
        pool: POOL.to_owned(),
        device: "gpu-0".to_owned(),
        cdi_names: Vec::new(),
    };
    let holdings =
        list.map(|has| Holdings { claims: has.then_some(claimed).into_iter().collect(), ..Holdings::default() });
    let before = NodeState::clone(&node.state.borrow());
    node.state.send_replace(Arc::new(before.apply(Event::Holders(holdings), Duration::from_secs(1)).0));
}

#[tokio::test]
async fn checkpoint_of_a_later_version_holds_its_gpus() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 3] = [
        (|it| it["version"] = json!(7), "its version is 7; this linkwise reads 1"),
        (|it| it["progress"] = json!("Paused"), "it is no checkpoint: unknown variant"),
        (|it| it["prepared"]["mps"] = json!("other"), "it is no checkpoint: invalid type"),
    ];
    for (change, why) in changes {
        let (mut node, kubelet) = stopped().await;
        let text = edit(&node, change);
        node.settings.sweep = Duration::from_millis(1);
        node.start();
        kubelet.start_again().unwrap();
        connected(&kubelet).await;
        node.log.has(&["checkpoint of a claim unreadable, keeping it", why]).await;
        let reads = node.reads("a");
        until(|| node.reads("a") > reads + 2).await;
        assert_eq!(fs::read(node.checkpoint("a")).unwrap(), text, "sweeps leave it");
        assert_eq!(node.claim_specs(), ["linkwise.dev-claim-a.json"]);
        let other = node.claim("b", &[("gpus", "gpu-0")]);
        let refused = refusal(&kubelet, &other).await;
        assert!(refused.contains("is prepared for the claim ml/claim-a"), "{refused}");
        let refused = refusal(&kubelet, &name("a")).await;
        assert!(refused.contains(&format!("cannot be read, and is kept: {why}")), "{refused}");
        assert_eq!(fs::read(node.checkpoint("a")).unwrap(), text);
        end(&kubelet, &name("a")).await;
        assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
        start(&kubelet, &other).await.unwrap();
    }
}

#[tokio::test]
async fn unreadable_checkpoint_of_a_claim_that_is_gone_is_swept() {
    let (mut node, _kubelet) = stopped().await;
    edit(&node, |it| it["version"] = json!(7));
    node.delete("a");
    listed(&node, None);
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    let reads = node.reads("a");
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!(node.checkpoints(), ["a.json"], "nobody knows whether its container runs");
    listed(&node, Some(false));
    listed(&node, Some(false));
    until(|| node.checkpoints().is_empty() && node.claim_specs().is_empty()).await;
}

#[tokio::test]
async fn disk_that_fails_for_a_moment_costs_no_claim() {
    let (mut node, kubelet) = stopped().await;
    // A folder in the file's place cannot be read either.
    let (path, aside) = (node.checkpoint("a"), node.settings.plugins.join("aside"));
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    listed(&node, Some(true));
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    kubelet.start_again().unwrap();
    connected(&kubelet).await;
    // The kubelet's list has the GPU's holder.
    let (other, free) = (node.claim("b", &[("gpus", "gpu-0")]), node.claim("c", &[("gpus", "gpu-1")]));
    let refused = refusal(&kubelet, &other).await;
    assert!(refused.contains("the kubelet lists it with the claim ml/claim-a"), "{refused}");
    start(&kubelet, &free).await.unwrap();
    let refused = refusal(&kubelet, &name("a")).await;
    assert!(refused.contains("cannot be read, and is kept: Is a directory"), "{refused}");
    listed(&node, None);
    let refused = refusal(&kubelet, &node.claim("d", &[("gpus", "gpu-2")])).await;
    assert!(refused.contains("the kubelet cannot be asked"), "{refused}");
    assert_eq!(node.claim_specs(), ["linkwise.dev-claim-a.json", "linkwise.dev-claim-c.json"]);
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    node.set("a", super::node::Answer::Failed);
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)], "from the checkpoint");
    assert!(refusal(&kubelet, &other).await.contains("is prepared for the claim ml/claim-a"));
}

#[tokio::test]
async fn torn_checkpoint_goes_when_the_kubelet_lists_no_claim() {
    let (mut node, _kubelet) = stopped().await;
    fs::write(node.checkpoint("a"), "{\"version\": 1, ").unwrap();
    listed(&node, Some(true));
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    node.log.has(&["checkpoint of a claim unreadable, keeping it"]).await;
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (1, 1));
    listed(&node, Some(false));
    listed(&node, Some(false));
    until(|| node.checkpoints().is_empty() && node.claim_specs().is_empty()).await;
}

#[tokio::test]
async fn fields_of_a_later_version_survive() {
    let (mut node, kubelet) = stopped().await;
    edit(&node, |it| {
        it["later"] = json!({"a": [1, 2]});
        it["prepared"]["later"] = json!(true);
        it["prepared"]["devices"][0]["later"] = json!("x");
        it["prepared"]["edits"] = json!({"gpus": {"env": {"OLD": "1"}}});
    });
    // Another boot: it is planned anew, and written.
    node.settings.boot = Some("the next boot".to_owned());
    node.start();
    kubelet.start_again().unwrap();
    connected(&kubelet).await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
    let now: Value = serde_json::from_slice(&fs::read(node.checkpoint("a")).unwrap()).unwrap();
    assert_eq!((&now["boot"], &now["later"]), (&json!("the next boot"), &json!({"a": [1, 2]})));
    assert_eq!((&now["prepared"]["later"], &now["prepared"]["devices"][0]["later"]), (&json!(true), &json!("x")));
    assert_eq!(now["prepared"].get("edits"), None, "the version before would write them over the claim's spec");
}

#[tokio::test]
async fn checkpoint_that_a_version_before_set_aside_is_read() {
    let (mut node, kubelet) = stopped().await;
    fs::rename(node.checkpoint("a"), node.settings.checkpoints.join("a.json.ignored")).unwrap();
    node.set("a", super::node::Answer::Failed);
    node.start();
    kubelet.start_again().unwrap();
    connected(&kubelet).await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
    assert_eq!(node.checkpoints(), ["a.json"]);
}

#[tokio::test]
async fn claims_are_unprepared_without_gpus() {
    let (mut node, kubelet) = stopped().await;
    // A reboot, after which the driver does not come up.
    node.settings.boot = Some("the next boot".to_owned());
    node.state.send_replace(Arc::new(NodeState::new(NumaHints::default())));
    node.cdi.send_replace(None);
    node.start();
    kubelet.start_again().unwrap();
    connected(&kubelet).await;
    let claim = node.claim("b", &[("gpus", "gpu-1")]);
    let refused = refusal(&kubelet, &claim).await;
    assert!(refused.contains("there is no device 'gpu-1' on this node"), "{refused}");
    end(&kubelet, &name("a")).await;
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    // The driver comes, and with it the pod that the kubelet has tried to start ever since.
    let waiting = pod(&claim);
    let (started, ()) = tokio::join!(tokio::time::timeout(LIMIT, kubelet.start_pod_at_last(&waiting)), async {
        node.state.send_replace(Arc::new(state("dgx1-v100")));
        node.scan();
    });
    let got = super::node::resolve(&kubelet, &started.unwrap()["main"]).unwrap();
    assert_eq!(super::node::hardware(&got), [node.gpu(1)]);
}
