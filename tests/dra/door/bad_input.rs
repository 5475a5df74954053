//! Claims that cannot be prepared, and folders and checkpoints that are broken. An error names its cause, and other
//! claims are prepared.

use std::fs;
use std::time::Duration;

use linkwise_kubelet_box::dra::DraError;

use super::node::{
    Answer, Node, TEST_TIMEOUT, assert_refused, claim, configured, end, name, refusal, restart, start, start_at_last,
    until,
};

#[tokio::test]
async fn failed_prepare_names_its_cause_and_leaves_nothing() {
    let (node, kubelet) = Node::serving_with(|settings| settings.claim_timeout = Duration::from_millis(50)).await;
    node.started_claim(&kubelet, "good", &[("gpus", "gpu-7")]).await;
    let mut pending = claim("b", &[("gpus", "gpu-0")]);
    pending.status.allocation = None;
    let mps = r#"{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}"#;
    let by_mps = configured(claim("h", &[("gpus", "gpu-0")]), mps);
    for (uid, answer, complaint) in [
        ("a", Answer::Claim(claim("a", &[("gpus", "gpu-99")])), "no device 'gpu-99' on this node; there are gpu-0, "),
        ("b", Answer::Claim(pending), "the claim ml/claim-b has no allocation"),
        ("h", Answer::Claim(by_mps), "the claim asks for MPS, which this node does not have for"),
        ("i", Answer::Failed, "cannot read the claim ml/claim-i: connection refused"),
        ("j", Answer::Silent, "cannot read the claim ml/claim-j: the API server did not answer within 50ms"),
        ("../x", Answer::Failed, "'../x' is not the UID of a claim"),
    ] {
        let bad = node.set_answer(uid, answer);
        assert_refused(&kubelet, &bad, &[complaint]).await;
        end(&kubelet, &bad).await;
        assert_eq!(node.checkpoints(), ["good.json"], "{uid}");
        assert_eq!(node.claim_specs(), ["linkwise.dev-claim-good.json"], "{uid}");
    }
    assert!(kubelet.state().claims["good"].prepared);
}

#[tokio::test]
async fn gpu_of_a_moved_claim_goes_to_the_next_claim() {
    let (node, kubelet) = Node::serving().await;
    let [_, second] = node.rivals(&kubelet).await;
    // The claim is allocated on another node now, but a container here still has the GPU.
    let mut moved = claim("a", &[("gpus", "gpu-0")]);
    moved.status.allocation.as_mut().unwrap().devices.results[0].pool = "other/gpu".to_owned();
    node.set_answer("a", Answer::Claim(moved));
    let before = node.state.borrow().clone();
    node.kubelet_lists(&["a"]);
    assert_refused(&kubelet, &second, &["is prepared for the claim ml/claim-a"]).await;
    node.state.send_replace(before);
    assert_eq!(start(&kubelet, &second).await.unwrap(), [node.gpu(0)]);
    assert_eq!(node.checkpoints(), ["b.json"]);
}

#[tokio::test]
async fn unreadable_checkpoints_stay_and_block_no_claim() {
    let (mut node, kubelet) = Node::serving().await;
    let good = node.claim("good", &[("gpus", "gpu-0")]);
    let first = start(&kubelet, &good).await.unwrap();
    node.halt(&kubelet).await;
    let text = node.checkpoint_text("good");
    fs::write(node.checkpoint("half"), text.as_bytes().split_at(text.len() / 2).0).unwrap();
    fs::write(node.checkpoint("newer"), text.replace("\"version\": 1", "\"version\": 7")).unwrap();
    fs::write(node.checkpoint("long"), " ".repeat((1 << 20) + 1)).unwrap();
    fs::write(node.checkpoint("copy"), &text).unwrap();
    fs::write(node.settings.checkpoints.join("notes.txt"), "hello").unwrap();
    fs::create_dir(node.settings.checkpoints.join("folder.json")).unwrap();
    fs::write(node.settings.checkpoints.join(".linkwise-draft"), "{").unwrap();
    // During the test no list of the kubelet shows that a claim has ended.
    node.settings.listed_within = TEST_TIMEOUT;
    node.serve_again(&kubelet).await;
    node.set_answer("good", Answer::Failed);
    assert_eq!(start(&kubelet, &good).await.unwrap(), first);
    let parse = |line: &String| {
        let (path, why) =
            line.split_once("checkpoint of a claim unreadable, keeping it path=")?.1.split_once(" why=\"")?;
        Some(format!("{} {}", path.rsplit('/').next()?, why.trim_end().trim_end_matches('"').split(':').next()?))
    };
    let logged: Vec<String> = node.log.lines.borrow().iter().filter_map(parse).collect();
    assert_eq!(
        logged,
        [
            "notes.txt its name is not that of a checkpoint",
            "copy.json it belongs to the claim with the UID 'good'",
            "folder.json Is a directory (os error 21)",
            "half.json it is not complete JSON",
            "long.json it is longer than 1048576 bytes",
            "newer.json its version is 7; this linkwise reads 1",
        ]
    );
    assert!(!node.settings.checkpoints.join(".linkwise-draft").exists());
    // A claim whose checkpoint is incomplete is prepared again, and Unprepare removes all its files.
    let half = node.claim("half", &[("gpus", "gpu-1")]);
    assert_eq!(start(&kubelet, &half).await.unwrap(), [node.gpu(1)]);
    end(&kubelet, &half).await;
    let left = ["copy.json", "folder.json", "good.json", "long.json", "newer.json", "notes.txt"];
    assert_eq!(node.checkpoints(), left);
}

#[tokio::test]
async fn unwritable_checkpoint_folder_fails_the_claim() {
    let (node, kubelet) = Node::serving().await;
    // A file in the folder's place makes each write fail, as a full disk does.
    let folder = node.settings.checkpoints.clone();
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    let (claim, other) = (node.claim("a", &[("gpus", "gpu-0")]), node.claim("b", &[("gpus", "gpu-0")]));
    let error = refusal(&kubelet, &claim).await;
    assert!(error.starts_with("cannot write the checkpoint of the claim: "), "{error}");
    fs::remove_file(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(0)]);
    end(&kubelet, &claim).await;
    assert_eq!(start(&kubelet, &other).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn broken_cdi_folder_does_not_fail_unprepare() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    fs::remove_dir_all(&node.settings.cdi_folder).unwrap();
    fs::write(&node.settings.cdi_folder, "").unwrap();
    end(&kubelet, &claim).await;
    assert_eq!(node.checkpoints(), [""; 0]);
}

#[tokio::test]
async fn unwritable_cdi_folder_fails_the_claim() {
    let (node, kubelet) = Node::new().with_nics().served().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let folder = &node.settings.cdi_folder;
    fs::remove_dir_all(folder).unwrap();
    fs::write(folder, "").unwrap();
    let error = refusal(&kubelet, &claim).await;
    assert!(error.starts_with("cannot write the CDI spec of the claim: "), "{error}");
    fs::remove_file(folder).unwrap();
    fs::create_dir(folder).unwrap();
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(0)]);
    end(&kubelet, &claim).await;
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
}

#[tokio::test]
async fn device_missing_from_scans_fails_the_claim_by_name() {
    let (node, kubelet) = Node::serving_with(|settings| settings.specs_timeout = Duration::from_millis(50)).await;
    node.scan_nothing();
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let error = refusal(&kubelet, &claim).await;
    let not_found = "cannot write the CDI spec of the claim: no scan of the host has found ";
    assert!(error.starts_with(not_found) && error.contains(&node.gpu(0)), "{error}");
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    node.scan();
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(0)]);
    // Prepare refuses a prepared claim too, because its container would fail later.
    node.scan_nothing();
    restart(&kubelet).await;
    let error = refusal(&kubelet, &name("a")).await;
    assert!(error.starts_with(not_found), "{error}");
    assert_eq!(node.checkpoints(), ["a.json"], "the checkpoint of a claim in use is lost");
}

#[tokio::test]
async fn claim_waits_for_the_scan_that_has_its_device() {
    let (node, kubelet) = Node::serving_with(|settings| settings.specs_timeout = TEST_TIMEOUT).await;
    node.scan_nothing();
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let scans = async {
        until(|| node.reads("a") > 0).await;
        // The claim waits on after a scan without its GPU.
        node.scan_nothing();
        node.scan();
    };
    let (started, ()) = tokio::join!(start(&kubelet, &claim), scans);
    assert_eq!(started.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn slow_prepare_ends_before_the_kubelets_deadline() {
    let mut node = Node::new();
    (node.settings.claim_timeout, node.settings.prepare_timeout) = (TEST_TIMEOUT, Duration::from_millis(50));
    let kubelet = node.serve().await;
    let claim = node.set_answer("a", Answer::Silent);
    assert_eq!(refusal(&kubelet, &claim).await, "the claim was not prepared within 50ms");
    node.claim("a", &[("gpus", "gpu-0")]);
    node.settings.prepare_timeout = TEST_TIMEOUT;
    node.kill_and_start().await;
    start_at_last(&kubelet, &claim).await;
}

#[tokio::test]
async fn claim_that_cannot_be_unprepared_keeps_its_gpu() {
    let (node, kubelet) = Node::serving().await;
    let [claim, other] = node.rivals(&kubelet).await;
    // A folder in the file's place cannot be removed, as on a disk that became read-only.
    let path = node.checkpoint("a");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let ended = kubelet.stop_pod(&super::node::pod(&claim).pod).await;
    let Err(DraError::Claim { error, .. }) = ended else { panic!("{ended:?}") };
    assert!(error.starts_with("cannot remove the checkpoint of the claim: "), "{error}");
    assert_refused(&kubelet, &other, &["is prepared for the claim ml/claim-a (UID a)"]).await;
    fs::remove_dir(&path).unwrap();
    end(&kubelet, &claim).await;
    assert_eq!(start(&kubelet, &other).await.unwrap(), [node.gpu(0)]);
}
