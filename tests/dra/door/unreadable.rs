//! Checkpoints of other versions, broken ones, and a node that lost its GPUs. An unreadable checkpoint stays and holds
//! its GPUs until the kubelet unprepares its claim, or a sweep finds that the claim has ended.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{NodeState, NumaHints};
use linkwise_kubelet_box::dra::DraKubelet;
use serde_json::{Value, json};

use super::node::{
    Answer, Node, TEST_TIMEOUT, assert_refused, end, hardware, name, pod, resolve, start, state, until, yield_times,
};

/// A node whose claim `a` has GPU 0. Its kubelet and its plugin have stopped.
async fn stopped() -> (Node, DraKubelet) {
    let (mut node, kubelet) = Node::serving().await;
    node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    node.halt(&kubelet).await;
    (node, kubelet)
}

/// Changes the checkpoint of the claim `a`, and returns its new text.
fn edit(node: &Node, change: impl FnOnce(&mut Value)) -> String {
    node.edit_checkpoint("a", |text| {
        let mut checkpoint: Value = serde_json::from_str(&text).unwrap();
        change(&mut checkpoint);
        checkpoint.to_string()
    });
    node.checkpoint_text("a")
}

#[tokio::test]
async fn checkpoint_of_a_later_version_holds_its_gpus() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 3] = [
        (|it| it["version"] = json!(7), "its version is 7; this linkwise reads 1"),
        (|it| it["progress"] = json!("Paused"), "it is not a checkpoint: unknown variant"),
        (|it| it["prepared"]["mps"] = json!("other"), "it is not a checkpoint: invalid type"),
    ];
    for (change, why) in changes {
        let (mut node, kubelet) = stopped().await;
        let text = edit(&node, change);
        node.settings.sweep = Duration::from_millis(1);
        node.serve_again(&kubelet).await;
        node.log.wait(&["checkpoint of a claim unreadable, keeping it", why]).await;
        let reads = node.reads("a");
        until(|| node.reads("a") > reads + 2).await;
        assert_eq!(node.checkpoint_text("a"), text, "a sweep changed the checkpoint");
        assert_eq!(node.claim_specs(), ["linkwise.dev-claim-a.json"]);
        let rival = node.claim("b", &[("gpus", "gpu-0")]);
        assert_refused(&kubelet, &rival, &["is prepared for the claim ml/claim-a"]).await;
        assert_refused(&kubelet, &name("a"), &[&format!("cannot read the checkpoint of the claim, keeping it: {why}")])
            .await;
        assert_eq!(node.checkpoint_text("a"), text);
        end(&kubelet, &name("a")).await;
        assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
        start(&kubelet, &rival).await.unwrap();
    }
}

#[tokio::test]
async fn unreadable_checkpoint_of_a_deleted_claim_is_swept() {
    let (mut node, _kubelet) = stopped().await;
    edit(&node, |it| it["version"] = json!(7));
    node.delete("a");
    node.kubelet_list_fails();
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    let reads = node.reads("a");
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!(node.checkpoints(), ["a.json"], "swept, although a pod may use the claim");
    node.kubelet_lists_nothing();
    until(|| node.checkpoints().is_empty() && node.claim_specs().is_empty()).await;
}

#[tokio::test]
async fn brief_disk_failure_loses_no_claim() {
    let (mut node, kubelet) = stopped().await;
    // A folder in the file's place makes reading fail, as a broken disk does.
    let (path, aside) = (node.checkpoint("a"), node.settings.plugins.join("aside"));
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    node.kubelet_lists(&["a"]);
    node.settings.sweep = Duration::from_millis(1);
    node.serve_again(&kubelet).await;
    // The kubelet's list names the GPU's holder.
    let (rival, apart) = (node.claim("b", &[("gpus", "gpu-0")]), node.claim("c", &[("gpus", "gpu-1")]));
    assert_refused(&kubelet, &rival, &["the kubelet lists it with the claim ml/claim-a"]).await;
    start(&kubelet, &apart).await.unwrap();
    assert_refused(&kubelet, &name("a"), &["cannot read the checkpoint of the claim, keeping it: Is a directory"])
        .await;
    node.kubelet_list_fails();
    assert_refused(&kubelet, &node.claim("d", &[("gpus", "gpu-2")]), &["the kubelet cannot be asked"]).await;
    assert_eq!(node.claim_specs(), ["linkwise.dev-claim-a.json", "linkwise.dev-claim-c.json"]);
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    node.set_answer("a", Answer::Failed);
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)], "the claim lost its device");
    assert_refused(&kubelet, &rival, &["is prepared for the claim ml/claim-a"]).await;
}

#[tokio::test]
async fn torn_checkpoint_is_swept_once_no_claim_is_listed() {
    let (mut node, _kubelet) = stopped().await;
    fs::write(node.checkpoint("a"), "{\"version\": 1, ").unwrap();
    node.kubelet_lists(&["a"]);
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    node.log.wait(&["checkpoint of a claim unreadable, keeping it"]).await;
    yield_times(1000).await;
    assert_eq!(node.file_counts(), (1, 1));
    node.kubelet_lists_nothing();
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
    // After a reboot the claim is planned and written again.
    node.settings.boot = Some("the next boot".to_owned());
    node.serve_again(&kubelet).await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
    let now: Value = serde_json::from_str(&node.checkpoint_text("a")).unwrap();
    assert_eq!((&now["boot"], &now["later"]), (&json!("the next boot"), &json!({"a": [1, 2]})));
    assert_eq!((&now["prepared"]["later"], &now["prepared"]["devices"][0]["later"]), (&json!(true), &json!("x")));
    assert_eq!(now["prepared"].get("edits"), None, "the previous version would write them over the claim's spec");
}

#[tokio::test]
async fn checkpoint_set_aside_by_an_older_version_is_read() {
    let (mut node, kubelet) = stopped().await;
    fs::rename(node.checkpoint("a"), node.settings.checkpoints.join("a.json.ignored")).unwrap();
    node.set_answer("a", Answer::Failed);
    node.serve_again(&kubelet).await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
    assert_eq!(node.checkpoints(), ["a.json"]);
}

#[tokio::test]
async fn claims_are_unprepared_without_gpus() {
    let (mut node, kubelet) = stopped().await;
    // After a reboot the NVIDIA driver does not load.
    node.settings.boot = Some("the next boot".to_owned());
    node.state.send_replace(Arc::new(NodeState::new(NumaHints::default())));
    node.cdi.send_replace(None);
    node.serve_again(&kubelet).await;
    let claim = node.claim("b", &[("gpus", "gpu-1")]);
    assert_refused(&kubelet, &claim, &["there is no device 'gpu-1' on this node"]).await;
    end(&kubelet, &name("a")).await;
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    // The driver loads, and a retry of the kubelet starts the pod.
    let waiting = pod(&claim);
    let (started, ()) = tokio::join!(tokio::time::timeout(TEST_TIMEOUT, kubelet.start_pod_at_last(&waiting)), async {
        node.state.send_replace(Arc::new(state("dgx1-v100")));
        node.scan();
    });
    let got = resolve(&kubelet, &started.unwrap()["main"]).unwrap();
    assert_eq!(hardware(&got), [node.gpu(1)]);
}
