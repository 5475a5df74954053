//! A plugin that is killed between any two steps of its work. The next plugin finishes or undoes the work.
//!
//! Prepare reads the claim, writes a CDI spec and the checkpoint `Started` if the claim asks for MIG devices or MPS,
//! writes the final spec and the checkpoint `Completed`, and answers. Unprepare removes the spec, then the checkpoint.

use std::fs;
use std::time::Duration;

use super::node::{
    Answer, DRIVER, Node, TEST_TIMEOUT, assert_refused, end, kill_during_start, name, restart, start, start_at_last,
    until, wait_connected,
};

/// The files that a killed plugin leaves of the claim `a`.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    pub checkpoint: Option<&'static str>,
    pub boot: &'static str,
    pub spec: bool,
}

/// The files after the last step.
pub const WHOLE: Left = Left { checkpoint: Some("Completed"), boot: "this boot", spec: true };

/// The files after each step in this boot, and two states of another boot.
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

/// Changes the files of the prepared claim `a` to those that are left.
pub fn leave(node: &Node, left: Left) {
    match left.checkpoint {
        None => fs::remove_file(node.checkpoint("a")).unwrap(),
        Some(progress) => node.edit_checkpoint("a", |text| {
            text.replace("\"Completed\"", &format!("{progress:?}")).replace("this boot", left.boot)
        }),
    }
    if !left.spec {
        fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-a.json")).unwrap();
    }
}

/// A node whose plugin was killed and left these files, and the hardware of the claim's container.
async fn killed(left: Left) -> (Node, Vec<String>) {
    let (mut node, kubelet) = Node::new().with_nics().served().await;
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
        assert_eq!(node.file_counts(), (1, 1), "{left:?}");
        let text = node.checkpoint_text("a");
        assert!(text.contains("\"Completed\"") && text.contains("\"this boot\""), "{left:?}: {text}");
        end(&kubelet, &claim).await;
        assert_eq!(node.file_counts(), (0, 0), "{left:?}");
    }
}

#[tokio::test]
async fn killed_prepare_is_undone_by_unprepare() {
    for left in STATES {
        let (mut node, _) = killed(left).await;
        node.set_answer("a", Answer::Failed);
        let kubelet = node.serve().await;
        let claim = name("a");
        // The kubelet unprepares only claims that it tried to prepare; this attempt may fail.
        let _ = start(&kubelet, &claim).await;
        end(&kubelet, &claim).await;
        assert_eq!(node.file_counts(), (0, 0), "{left:?}");
        node.started_claim(&kubelet, "b", &[("gpus", "gpu-5")]).await;
    }
}

#[tokio::test]
async fn claim_survives_sweeps_while_the_api_server_fails() {
    let (mut node, devices) = killed(STATES[5]).await;
    node.settings.sweep = Duration::from_millis(1);
    node.set_answer("a", Answer::Failed);
    node.start();
    // The first sweep restores the spec, and later sweeps keep the claim although the API server fails.
    until(|| node.reads("a") >= 4 && !node.claim_specs().is_empty()).await;
    let kubelet = node.kubelet().await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), devices);
}

#[tokio::test]
async fn deleted_claim_is_kept_while_holders_are_unknown() {
    let (mut node, kubelet) = Node::new().with_nics().served().await;
    for (uid, gpu) in [("a", "gpu-0"), ("b", "gpu-1")] {
        node.started_claim(&kubelet, uid, &[("gpus", gpu)]).await;
    }
    node.halt(&kubelet).await;
    node.kubelet_list_fails();
    node.delete("a");
    fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-b.json")).unwrap();
    node.start();
    // The sweep checks `a` before it restores the spec of `b`.
    until(|| node.claim_specs().len() == 2).await;
    assert_eq!(node.checkpoints(), ["a.json", "b.json"]);
    // A list starts the next sweep at once.
    node.kubelet_lists(&[]);
    until(|| node.checkpoints() == ["b.json"]).await;
}

#[tokio::test]
async fn spec_without_checkpoint_stays_until_unlisted() {
    let (mut node, kubelet) = Node::serving().await;
    for (uid, gpu) in [("a", "gpu-0"), ("b", "gpu-1")] {
        node.started_claim(&kubelet, uid, &[("gpus", gpu)]).await;
    }
    node.crash(&kubelet).await;
    leave(&node, STATES[1]);
    node.settings.sweep = Duration::from_millis(1);
    node.kubelet_list_fails();
    node.start();
    for is_listed in [false, true] {
        if is_listed {
            node.kubelet_lists(&["a"]);
        }
        // Each sweep reads `b` before it checks the specs, so two reads enclose a whole check.
        let reads = node.reads("b");
        until(|| node.reads("b") > reads + 1).await;
        assert_eq!(node.file_counts(), (1, 2), "{is_listed}");
    }
    node.kubelet_lists_nothing();
    until(|| node.claim_specs() == ["linkwise.dev-claim-b.json"]).await;
}

#[tokio::test]
async fn list_older_than_a_claim_frees_no_gpu() {
    let (node, kubelet) = Node::serving_with(|settings| settings.listed_within = TEST_TIMEOUT).await;
    let [_, second] = node.rivals(&kubelet).await;
    // The claim is deleted by force while its pod runs. The kubelet's list is older than that pod.
    node.delete("a");
    assert_refused(&kubelet, &second, &["is prepared for the claim ml/claim-a"]).await;
    assert_eq!(node.checkpoints(), ["a.json"]);
}

#[tokio::test]
async fn one_list_without_a_claim_frees_no_gpu() {
    let (node, kubelet) = Node::serving().await;
    let [_, second] = node.rivals(&kubelet).await;
    node.delete("a");
    node.kubelet_lists(&["a"]);
    for _ in 0..2 {
        assert_refused(&kubelet, &second, &["is prepared for the claim ml/claim-a"]).await;
        node.kubelet_lists(&[]);
    }
    assert_eq!(start(&kubelet, &second).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn prepare_undoes_no_claim_while_holders_are_unknown() {
    let (node, kubelet) = Node::serving_with(|settings| settings.boot = None).await;
    let claim = node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    node.delete("a");
    restart(&kubelet).await;
    node.kubelet_list_fails();
    for left in [["a.json"].as_slice(), &[]] {
        assert_refused(&kubelet, &claim, &["there is no such claim"]).await;
        assert_eq!(node.checkpoints(), left);
        node.kubelet_lists(&[]);
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
    // The minor numbers changed: in the previous boot each claim had the other's GPU.
    for (uid, from, to) in [("a", 0, 1), ("b", 1, 0)] {
        node.edit_checkpoint(uid, |text| text.replace(node.uuid(from).as_str(), node.uuid(to).as_str()));
    }
    node.settings.boot = Some("the next boot".to_owned());
    node.serve_again(&kubelet).await;
    for (claim, minor) in claims.iter().zip(0..) {
        assert_eq!(start(&kubelet, claim).await.unwrap(), [node.gpu(minor)]);
    }
}

#[tokio::test]
async fn plugin_killed_while_reading_a_claim_leaves_nothing() {
    let (mut node, kubelet) = Node::serving_with(|settings| settings.claim_timeout = TEST_TIMEOUT).await;
    let claim = node.set_answer("a", Answer::Silent);
    kill_during_start(&node, &kubelet, &claim, || node.reads("a") > 0).await;
    assert_eq!(node.checkpoints(), [""; 0]);
    node.claim("a", &[("gpus", "gpu-0")]);
    node.kill_and_start().await;
    wait_connected(&kubelet).await;
    assert_eq!(start_at_last(&kubelet, &claim).await, [node.gpu(0)]);
}

#[tokio::test]
async fn plugin_killed_before_its_last_step_leaves_nothing() {
    let mut node = Node::new();
    (node.settings.specs_timeout, node.settings.prepare_timeout) = (TEST_TIMEOUT, TEST_TIMEOUT);
    let kubelet = node.serve().await;
    node.scan_nothing();
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    kill_during_start(&node, &kubelet, &claim, || node.has_metric("dra_prepared_claims", 1)).await;
    node.kill_and_start().await;
    node.scan();
    // The kubelet got no answer, so the GPU is free.
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    let other = node.claim("b", &[("gpus", "gpu-0")]);
    start_at_last(&kubelet, &other).await;
    assert_refused(&kubelet, &claim, &["is prepared for the claim ml/claim-b"]).await;
}

/// Older releases published sets of GPUs as devices. Their checkpoints name the set for each of its GPUs.
#[tokio::test]
async fn checkpoint_of_a_set_holds_its_gpus() {
    for progress in ["Started", "Completed"] {
        let (mut node, kubelet) = Node::serving().await;
        let claim = node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-3")]);
        let devices = start(&kubelet, &claim).await.unwrap();
        node.crash(&kubelet).await;
        node.edit_checkpoint("a", |text| {
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
            // Only the eight GPUs have health; the set has none.
            kubelet.wait(|state| state.drivers[DRIVER].health.len() == 8).await.unwrap();
        } else {
            assert_refused(&kubelet, &claim, &["there is no device 'gpus-2-0-3' on this node; there are gpu-0, gpu-1"])
                .await;
        }
        assert_refused(&kubelet, &other, &["is prepared for the claim ml/claim-a"]).await;
        end(&kubelet, &claim).await;
        assert_eq!(node.checkpoints(), [""; 0], "{progress}");
        start(&kubelet, &other).await.unwrap();
    }
}
