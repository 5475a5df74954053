//! The plugin is killed between each two steps of its work; the next one finishes or undoes it.
//!
//! The steps of Prepare: the claim is read; names and checkpoint Started, if it asks for MIG devices or MPS; CDI spec;
//! checkpoint Completed; the answer. Of Unprepare: the spec goes; the checkpoint goes.

use std::fs;
use std::time::Duration;

use super::node::{
    Answer, DRIVER, LIMIT, Node, connected, end, is_refused, killed_once, name, restarted, start, start_at_last, until,
};

/// What a killed plugin leaves of the claim `a`.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    pub checkpoint: Option<&'static str>,
    pub boot: &'static str,
    pub spec: bool,
}

/// After the last step.
pub const WHOLE: Left = Left { checkpoint: Some("Completed"), boot: "this boot", spec: true };

/// After each step, and in another boot.
pub const STATES: [Left; 8] = [
    Left { checkpoint: None, boot: "", spec: false },
    Left { checkpoint: None, boot: "", spec: true },
    Left { checkpoint: Some("Started"), boot: "this boot", spec: false },
    Left { checkpoint: Some("Started"), boot: "this boot", spec: true },
    WHOLE,
    Left { checkpoint: Some("Completed"), boot: "this boot", spec: false },
    Left { checkpoint: Some("Completed"), boot: "another boot", spec: false },
    Left { checkpoint: Some("Started"), boot: "another boot", spec: true },
];

/// Makes it so that this is left of the claim `a`, which was prepared.
pub fn leave(node: &Node, left: Left) {
    match left.checkpoint {
        None => fs::remove_file(node.checkpoint("a")).unwrap(),
        Some(progress) => node.rewrite("a", |text| {
            text.replace("\"Completed\"", &format!("{progress:?}")).replace("this boot", left.boot)
        }),
    }
    if !left.spec {
        node.remove_spec();
    }
}

/// A node whose plugin was killed so, and what the claim's container gets.
async fn killed(left: Left) -> (Node, Vec<String>) {
    let mut node = Node::new().with_nics();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-5")]);
    let devices = start(&kubelet, &claim).await.unwrap();
    node.crash(&kubelet).await;
    leave(&node, left);
    (node, devices)
}

#[tokio::test]
async fn killed_prepare_is_finished_by_the_next_plugin() {
    for left in STATES {
        let (mut node, devices) = killed(left).await;
        let kubelet = node.serve().await;
        let claim = name("a");
        assert_eq!(start(&kubelet, &claim).await.unwrap(), devices, "{left:?}");
        assert_eq!(node.left(), (1, 1), "{left:?}");
        let text = node.kept("a");
        assert!(text.contains("\"Completed\"") && text.contains("\"this boot\""), "{left:?}: {text}");
        end(&kubelet, &claim).await;
        assert_eq!(node.left(), (0, 0), "{left:?}");
    }
}

#[tokio::test]
async fn killed_prepare_is_undone_by_unprepare() {
    for left in STATES {
        let (mut node, _) = killed(left).await;
        // The API server is away, and not needed.
        node.set("a", Answer::Failed);
        let kubelet = node.serve().await;
        let claim = name("a");
        // The kubelet's cache has the claim, whatever came of its Prepare.
        let _ = start(&kubelet, &claim).await;
        end(&kubelet, &claim).await;
        assert_eq!(node.left(), (0, 0), "{left:?}");
        // The GPUs are free.
        node.given(&kubelet, "b", &[("gpus", "gpu-5")]).await;
    }
}

#[tokio::test]
async fn claim_that_exists_survives_the_sweep() {
    let (mut node, devices) = killed(STATES[5]).await;
    node.settings.sweep = Duration::from_millis(1);
    node.set("a", Answer::Failed);
    node.start();
    // The first sweep restores its spec; an API server that fails is no reason to forget a claim.
    until(|| node.reads("a") >= 4 && !node.claim_specs().is_empty()).await;
    let kubelet = node.kubelet().await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), devices);
}

#[tokio::test]
async fn claim_that_is_gone_stays_while_holders_are_unknown() {
    let mut node = Node::new().with_nics();
    let kubelet = node.serve().await;
    for (uid, gpu) in [("a", "gpu-0"), ("b", "gpu-1")] {
        start(&kubelet, &node.claim(uid, &[("gpus", gpu)])).await.unwrap();
    }
    node.halt(&kubelet).await;
    node.unlisted();
    node.delete("a");
    fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-b.json")).unwrap();
    node.start();
    // The sweep restores the spec of `b` after it looked at `a`.
    until(|| node.claim_specs().len() == 2).await;
    assert_eq!(node.checkpoints(), ["a.json", "b.json"]);
    // The next sweep comes with the list, long before its time.
    node.listed(&[]);
    until(|| node.checkpoints() == ["b.json"]).await;
}

#[tokio::test]
async fn spec_without_checkpoint_stays_while_listed() {
    let (mut node, kubelet) = Node::serving().await;
    for (uid, gpu) in [("a", "gpu-0"), ("b", "gpu-1")] {
        node.given(&kubelet, uid, &[("gpus", gpu)]).await;
    }
    node.crash(&kubelet).await;
    leave(&node, STATES[1]);
    node.settings.sweep = Duration::from_millis(1);
    node.unlisted();
    node.start();
    for is_listed in [false, true] {
        if is_listed {
            node.listed(&["a"]);
        }
        // Each sweep reads `b` before it looks at specs: this waits for a whole one.
        let reads = node.reads("b");
        until(|| node.reads("b") > reads + 1).await;
        assert_eq!(node.left(), (1, 2), "{is_listed}");
    }
    node.nothing_listed();
    until(|| node.claim_specs() == ["linkwise.dev-claim-b.json"]).await;
}

#[tokio::test]
async fn list_older_than_a_claim_frees_no_gpu() {
    let mut node = Node::new();
    node.settings.listed_within = LIMIT;
    let kubelet = node.serve().await;
    let [_, second] = node.rivals(&kubelet).await;
    // Deleted by force: its pod still runs, and the kubelet was asked before that pod started.
    node.delete("a");
    is_refused(&kubelet, &second, &["is prepared for the claim ml/claim-a"]).await;
    assert_eq!(node.checkpoints(), ["a.json"]);
}

#[tokio::test]
async fn first_list_of_a_new_kubelet_frees_no_gpu() {
    let (node, kubelet) = Node::serving().await;
    let [_, second] = node.rivals(&kubelet).await;
    node.delete("a");
    node.listed(&["a"]);
    for _ in 0..2 {
        is_refused(&kubelet, &second, &["is prepared for the claim ml/claim-a"]).await;
        node.listed(&[]);
    }
    assert_eq!(start(&kubelet, &second).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn prepare_undoes_no_claim_while_holders_are_unknown() {
    let mut node = Node::new();
    node.settings.boot = None;
    let kubelet = node.serve().await;
    let claim = node.given(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    node.delete("a");
    restarted(&kubelet).await;
    node.unlisted();
    for left in [["a.json"].as_slice(), &[]] {
        is_refused(&kubelet, &claim, &["there is no such claim"]).await;
        assert_eq!(node.checkpoints(), left);
        node.listed(&[]);
    }
}

#[tokio::test]
async fn claims_of_another_boot_exchange_their_gpus() {
    let (mut node, kubelet) = Node::serving().await;
    let claims = [("a", "gpu-0"), ("b", "gpu-1")].map(|(uid, gpu)| node.claim(uid, &[("gpus", gpu)]));
    for claim in &claims {
        start(&kubelet, claim).await.unwrap();
    }
    node.halt(&kubelet).await;
    // The minor numbers moved: in the last boot each had the other's GPU.
    for (uid, from, to) in [("a", 0, 1), ("b", 1, 0)] {
        node.rewrite(uid, |text| text.replace(node.uuid(from).as_str(), node.uuid(to).as_str()));
    }
    node.settings.boot = Some("the next boot".to_owned());
    node.serve_again(&kubelet).await;
    for (claim, minor) in claims.iter().zip(0..) {
        assert_eq!(start(&kubelet, claim).await.unwrap(), [node.gpu(minor)]);
    }
}

#[tokio::test]
async fn plugin_killed_while_reading_a_claim_leaves_nothing() {
    let mut node = Node::new();
    node.settings.claim_timeout = LIMIT;
    let kubelet = node.serve().await;
    let claim = node.set("a", Answer::Silent);
    killed_once(&node, &kubelet, &claim, || node.reads("a") > 0).await;
    assert_eq!(node.checkpoints(), [""; 0]);
    node.claim("a", &[("gpus", "gpu-0")]);
    node.kill_and_start().await;
    connected(&kubelet).await;
    assert_eq!(start_at_last(&kubelet, &claim).await, [node.gpu(0)]);
}

#[tokio::test]
async fn plugin_killed_before_its_last_step_leaves_nothing() {
    let mut node = Node::new();
    (node.settings.specs_timeout, node.settings.prepare_timeout) = (LIMIT, LIMIT);
    let kubelet = node.serve().await;
    node.scan_nothing();
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    killed_once(&node, &kubelet, &claim, || node.shows("dra_prepared_claims", 1)).await;
    node.kill_and_start().await;
    node.scan();
    // The kubelet was told nothing: its GPU is free.
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    let other = node.claim("b", &[("gpus", "gpu-0")]);
    start_at_last(&kubelet, &other).await;
    is_refused(&kubelet, &claim, &["is prepared for the claim ml/claim-b"]).await;
}

/// Checkpoints of when sets of GPUs were devices name the set for each of its GPUs.
#[tokio::test]
async fn checkpoint_of_a_set_holds_its_gpus() {
    for progress in ["Started", "Completed"] {
        let (mut node, kubelet) = Node::serving().await;
        let claim = node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-3")]);
        let devices = start(&kubelet, &claim).await.unwrap();
        node.crash(&kubelet).await;
        node.rewrite("a", |text| {
            let text = text.replace("Completed", progress);
            let text = text.replace("\"gpu-0\"", "\"gpus-2-0-3\"").replace("\"gpu-3\"", "\"gpus-2-0-3\"");
            assert_eq!(text.matches("gpus-2-0-3").count(), 2, "{text}");
            text
        });
        node.claim("a", &[("gpus", "gpus-2-0-3")]);
        let kubelet = node.serve().await;
        let other = node.claim("b", &[("gpus", "gpu-3")]);
        if progress == "Completed" {
            assert_eq!(start(&kubelet, &claim).await.unwrap(), devices);
            // Neither sick nor gone: a set has no health of its own.
            kubelet.wait(|state| state.drivers[DRIVER].health.len() == 8).await.unwrap();
        } else {
            is_refused(&kubelet, &claim, &["there is no device 'gpus-2-0-3' on this node; there are gpu-0, gpu-1"])
                .await;
        }
        is_refused(&kubelet, &other, &["is prepared for the claim ml/claim-a"]).await;
        end(&kubelet, &claim).await;
        assert_eq!(node.checkpoints(), [""; 0], "{progress}");
        start(&kubelet, &other).await.unwrap();
    }
}
