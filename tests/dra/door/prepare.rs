//! Prepare and Unprepare: the files they leave, repeated and concurrent calls, and claims that change between calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use linkwise_core::claims::ClaimName;
use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::HostDevices;
use linkwise_kubelet_box::dra::{ClaimUse, PodClaim, PodClaims};

use super::node::{
    Answer, DRIVER, Node, TEST_TIMEOUT, assert_refused, end, file_names, hardware, name, pod, reference, resolve,
    restart, start, start_container, until, wait_connected,
};

#[tokio::test]
async fn claim_gets_its_gpus_by_its_own_cdi_names() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus", "gpu-3"), ("gpus", "gpu-0")]);
    let got = start_container(&kubelet, &claim).await.unwrap();
    assert_eq!(hardware(&got), [node.gpu(3), node.gpu(0)]);
    assert_eq!(got.gpus(), ["/dev/nvidia3", "/dev/nvidia0"]);
    assert_eq!(got.env["NVIDIA_VISIBLE_DEVICES"], "void");
    let own = |gpu: &str| [format!("linkwise.dev/device=a-gpus-{gpu}"), "linkwise.dev/claim=a-gpus".to_owned()];
    assert_eq!(kubelet.state().claims["a"].cdi, [own("gpu-3"), own("gpu-0")].concat());
    let own_specs = || file_names(&node.settings.cdi_folder).iter().filter(|name| name.contains("-a.")).count();
    assert_eq!(own_specs(), 2);
    let specs = vec!["linkwise.dev-claim-a.json".to_owned()];
    assert_eq!((node.claim_specs(), node.checkpoints()), (specs, vec!["a.json".to_owned()]));
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(node.checkpoint("a")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    end(&kubelet, &claim).await;
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    assert_eq!(own_specs(), 0);
    node.wait_prepared_claims(0).await;
    node.wait_metric("dra_prepared_devices", 0).await;
}

#[tokio::test]
async fn subrequests_and_requests_go_to_their_containers() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus/quad", "gpu-0"), ("gpus/quad", "gpu-1"), ("one", "gpu-2")]);
    let uses = |request: &str| vec![ClaimUse { claim: "gpus".to_owned(), request: Some(request.to_owned()) }];
    let mut pod = pod(&claim);
    pod.containers.insert("train".to_owned(), uses("gpus"));
    pod.containers.insert("side".to_owned(), uses("one"));
    let devices = kubelet.start_pod(&pod).await.unwrap();
    let got = |container: &str| hardware(&resolve(&kubelet, &devices[container]).unwrap());
    assert_eq!(got("main").len(), 3);
    assert_eq!(got("train"), [node.gpu(0), node.gpu(1)]);
    assert_eq!(got("side"), [node.gpu(2)]);
}

/// A pod with these claims and no containers.
fn pod_with_claims(claims: &[ClaimName]) -> PodClaims {
    let of_pod = |claim: &ClaimName| {
        let drivers = BTreeSet::from([DRIVER.to_owned()]);
        PodClaim { name: claim.uid.clone(), claim: reference(claim), drivers }
    };
    PodClaims { pod: "p".to_owned(), claims: claims.iter().map(of_pod).collect(), containers: BTreeMap::new() }
}

#[tokio::test]
async fn two_claims_that_race_for_a_gpu_do_not_share_it() {
    let (node, kubelet) = Node::serving().await;
    // One call has both claims, so they are prepared at the same time. They have one GPU in common.
    let claims = [
        node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-1")]),
        node.claim("b", &[("gpus", "gpu-1"), ("gpus", "gpu-2")]),
    ];
    let pod = pod_with_claims(&claims);
    let error = kubelet.start_pod(&pod).await.unwrap_err().to_string();
    assert!(error.contains("device gpu-1") && error.contains("is prepared for the claim ml/claim-"), "{error}");
    assert_eq!(node.checkpoints().len(), 1);
}

#[tokio::test]
async fn one_error_in_a_batch_spares_the_other_claims() {
    let (node, kubelet) = Node::serving().await;
    let claims = [node.claim("a", &[("gpus", "gpu-0")]), node.claim("b", &[("gpus", "gpu-99")])];
    let pod = pod_with_claims(&claims);
    let error = kubelet.start_pod(&pod).await.unwrap_err().to_string();
    assert!(error.contains("claim b: there is no device 'gpu-99' on this node"), "{error}");
    assert_eq!(node.checkpoints(), ["a.json"]);
    node.claim("b", &[("gpus", "gpu-1")]);
    // The kubelet asks for both again. The second read of the first claim fails, and Prepare does not need it.
    node.set_answer("a", Answer::Failed);
    kubelet.start_pod(&pod).await.unwrap();
    assert_eq!(node.checkpoints().len(), 2);
    kubelet.stop_pod("p").await.unwrap();
    assert_eq!(node.checkpoints(), [""; 0]);
}

#[tokio::test]
async fn repeated_prepare_needs_no_api_server() {
    let (mut node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let first = start(&kubelet, &claim).await.unwrap();
    node.set_answer("a", Answer::Failed);
    restart(&kubelet).await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), first);
    node.stop().await;
    kubelet.restart().await.unwrap();
    node.start();
    wait_connected(&kubelet).await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), first);
    let repeated = |line: &&String| line.contains("claim prepared") && line.contains("repeated=true");
    assert_eq!(node.log.lines.borrow().iter().filter(repeated).count(), 2);
}

/// A kubelet that lost its state did not unprepare the claim, and the scheduler gave the claim another GPU since.
#[tokio::test]
async fn claim_moved_to_another_gpu_is_prepared_again() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(0)]);
    kubelet.lose_state();
    node.claim("a", &[("gpus", "gpu-5")]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(5)]);
    node.wait_prepared_claims(1).await;
    // While the API server fails, the checkpoint is used.
    node.set_answer("a", Answer::Failed);
    kubelet.lose_state();
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [node.gpu(5)]);
}

#[tokio::test]
async fn reboot_reads_the_claim_again() {
    let (mut node, kubelet) = Node::new().with_nics().served().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let first = start(&kubelet, &claim).await.unwrap();
    assert_eq!(first, [node.gpu(0)]);
    node.halt(&kubelet).await;
    // /var/run/cdi is in memory, so a reboot empties it.
    std::fs::remove_dir_all(&node.settings.cdi_folder).unwrap();
    std::fs::create_dir(&node.settings.cdi_folder).unwrap();
    node.settings.boot = Some("the next boot".to_owned());
    node.serve_again(&kubelet).await;
    let reads = node.reads("a");
    assert_eq!(start(&kubelet, &claim).await.unwrap(), first);
    assert!(node.reads("a") > reads, "Prepare did not read the claim after the reboot");
    assert_eq!(node.claim_specs(), ["linkwise.dev-claim-a.json"]);
}

#[tokio::test]
async fn nearest_nics_are_in_the_claims_spec() {
    let mut node = Node::new();
    let rdma = RdmaNodes {
        devices: [("mlx5_0".to_owned(), "/dev/infiniband/uverbs0".to_owned())].into(),
        common: vec!["/dev/infiniband/rdma_cm".to_owned()],
    };
    node.host.send_replace(Arc::new(HostDevices { rdma: Some(rdma), ..HostDevices::default() }));
    let kubelet = node.serve().await;
    // CDI names contain the request without its subrequest.
    node.started_claim(&kubelet, "a", &[("near/one", "gpu-0"), ("far", "gpu-7")]).await;
    let path = node.settings.cdi_folder.join("linkwise.dev-claim-a.json");
    let spec: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(spec["kind"], "linkwise.dev/claim");
    let device = |name: &str| {
        let of_name = spec["devices"].as_array().unwrap().iter().find(|device| device["name"] == name);
        let mut edits = of_name.unwrap()["containerEdits"].clone();
        // The only mount is the device metadata.
        assert_eq!(edits.as_object_mut().unwrap().remove("mounts").unwrap().as_array().unwrap().len(), 1);
        edits
    };
    let near = serde_json::json!({"env": ["LINKWISE_NICS=mlx5_0"], "deviceNodes": [
        {"path": "/dev/nvidia0"}, {"path": node.gpu(0)},
        {"path": "/dev/infiniband/uverbs0", "hostPath": "/dev/infiniband/uverbs0"},
        {"path": "/dev/infiniband/rdma_cm", "hostPath": "/dev/infiniband/rdma_cm"}]});
    assert_eq!(device("a-near"), near);
    let nodes = [serde_json::json!({"path": "/dev/nvidia7"}), serde_json::json!({"path": node.gpu(7)})];
    let far = serde_json::json!({"env": ["LINKWISE_NICS="], "deviceNodes": nodes});
    assert_eq!(device("a-far"), far);
}

#[tokio::test]
async fn concurrent_prepares_of_a_claim_prepare_it_once() {
    let (node, kubelet) = Node::serving().await;
    let other = node.kubelet().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let (first, second) = tokio::join!(start(&kubelet, &claim), start(&other, &claim));
    assert_eq!(first.unwrap(), second.unwrap());
    assert_eq!(node.reads("a"), 2, "the second call did not check the claim's devices");
}

#[tokio::test]
async fn recreated_claim_waits_for_the_old_one_to_end() {
    let (node, kubelet) = Node::serving().await;
    let old = node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    // The claim is deleted and created again under its name, with the same GPU.
    let new = ClaimName { uid: "a2".to_owned(), ..old.clone() };
    let mut claim = super::node::claim("a", &[("gpus", "gpu-0")]);
    claim.metadata.uid = "a2".to_owned();
    node.set_answer("a", Answer::Claim(claim));
    let error = start(&kubelet, &new).await.unwrap_err().to_string();
    assert!(error.starts_with("old ResourceClaim with same name ml/claim-a"), "{error}");
    end(&kubelet, &old).await;
    assert_eq!(start(&kubelet, &new).await.unwrap(), [node.gpu(0)]);
    assert_eq!(node.checkpoints(), ["a2.json"]);
}

#[tokio::test]
async fn unprepare_reads_no_claim_and_accepts_unknown_ones() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    node.delete("a");
    let reads = node.reads("a");
    end(&kubelet, &claim).await;
    assert_eq!((node.reads("a"), node.checkpoints()), (reads, vec![]));
    // The pod of a claim that was never prepared is ended after the refusal.
    let unknown = name("never");
    assert_refused(&kubelet, &unknown, &["there is no such claim"]).await;
    end(&kubelet, &unknown).await;
    node.log.wait(&["claim unprepared claim=", "uid=\"a\""]).await;
    node.log.wait(&["claim unprepared: it was not prepared here", "uid=\"never\""]).await;
}

#[tokio::test]
async fn claim_shared_by_pods_is_unprepared_with_the_last() {
    let (node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let other = PodClaims { pod: "other".to_owned(), ..pod(&claim) };
    start(&kubelet, &claim).await.unwrap();
    kubelet.start_pod(&other).await.unwrap();
    assert_eq!(kubelet.state().claims["a"].calls, 1, "the kubelet asked again");
    end(&kubelet, &claim).await;
    assert_eq!(node.checkpoints(), ["a.json"]);
    kubelet.stop_pod("other").await.unwrap();
    assert_eq!(node.checkpoints(), [""; 0]);
}

#[tokio::test]
async fn unanswered_read_delays_only_its_claim() {
    let (node, kubelet) = Node::serving_with(|settings| settings.claim_timeout = TEST_TIMEOUT).await;
    let (slow, fast) = (node.set_answer("slow", Answer::Silent), node.claim("fast", &[("gpus", "gpu-1")]));
    // The task below owns its kubelet, so the test needs a second one.
    let other = node.kubelet().await;
    let waits = tokio::spawn(async move { start(&other, &slow).await });
    until(|| node.reads("slow") > 0).await;
    assert_eq!(start(&kubelet, &fast).await.unwrap(), [node.gpu(1)]);
    waits.abort();
}

#[tokio::test]
async fn abandoned_prepare_does_not_block_the_next_claim() {
    let (node, kubelet) = Node::serving_with(|settings| settings.prepare_timeout = Duration::from_secs(3)).await;
    let [abandoned, next] = ["a", "b"].map(|uid| node.claim(uid, &[("gpus", "gpu-0")]));
    let pause = node.state.pause_entries().await;
    assert_refused(&kubelet, &abandoned, &["was not prepared within"]).await;
    drop(pause);
    until(|| node.state.borrow().ledger().prepared("a").is_some()).await;
    assert_eq!(start(&kubelet, &next).await.unwrap(), [node.gpu(0)]);
    assert!(node.state.borrow().ledger().prepared("a").is_none());
}

#[tokio::test]
async fn sweep_removes_an_abandoned_prepare_from_the_ledger() {
    let mut node = Node::new();
    node.settings.prepare_timeout = Duration::from_secs(3);
    node.settings.sweep = Duration::from_millis(50);
    let kubelet = node.serve().await;
    let abandoned = node.claim("a", &[("gpus", "gpu-0")]);
    let pause = node.state.pause_entries().await;
    assert_refused(&kubelet, &abandoned, &["was not prepared within"]).await;
    let mut state = node.state.subscribe();
    drop(pause);
    for is_there in [true, false] {
        let wait = state.wait_for(|state| state.ledger().prepared("a").is_some() == is_there);
        tokio::time::timeout(TEST_TIMEOUT, wait).await.unwrap().unwrap();
    }
}
