//! The doctor's findings about the GPUs: from NVML, from a running linkwise, and from the health record.

use linkwise_core::state::HealthRecord;

use super::*;
use crate::run::health::{record_file, wait_kept};
use crate::run::mig::four_gpus;
use crate::run::node::{GPU, Node, stranger, uuid, wait_unhealthy};

/// The findings on one GPU: status, text and advice of each.
fn findings_on(report: &Value, gpu: &str) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let findings = report["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == "gpus");
    let own = findings.filter(|finding| text(&finding["what"]).contains(gpu));
    own.map(|finding| (text(&finding["status"]), text(&finding["what"]), text(&finding["advice"]))).collect()
}

/// Asserts that the GPU has one finding, with this status, text and advice.
fn check(report: &Value, gpu: &str, status: &str, words: &str, advice: &str) {
    let lines = findings_on(report, gpu);
    let [(found, what, what_to_do)] = lines.as_slice() else { panic!("{gpu}: {lines:?}") };
    assert!(found == status && what.contains(words) && what_to_do.contains(advice), "{gpu}: {lines:?}");
}

/// A linkwise with frequent polls on a machine without faults.
async fn running(has_admin_socket: bool) -> (Node, KubeletBox) {
    let (setup, kubelet) = healthy();
    // The driver reports GPU 4's recovery action, which is none.
    setup.tell("recovery 4 0");
    let socket = has_admin_socket.then(|| setup.admin_socket());
    let socket = socket.iter().flat_map(|socket| ["--admin-socket".into(), socket.clone().into_os_string()]);
    let node = setup.arg("--nvml-poll-ms=50").args(socket).start().await;
    wait_registered(&kubelet, 1, 8).await;
    (node, kubelet)
}

#[tokio::test]
async fn unhealthy_gpu_reports_reason_and_remedy() {
    let (setup, _kubelet) = healthy();
    setup.tell_all(&["recovery 1 1", "rows 2 false true", "fail 5 nvmlDeviceGetTemperature 999"]);
    // A row that waits for a reset is not a reason.
    setup.tell("rows 6 true false");
    let report = look(&setup, &[]).await;
    check(&report, &uuid(1, 0), "ok", "Tesla V100", "");
    check(&report, &uuid(1, 1), "failed", "the driver asks for: GPU reset", "the requested action, after which");
    check(&report, &uuid(1, 2), "failed", "a row remapping failed", "another GPU in its place");
    check(&report, &uuid(1, 5), "failed", "nvmlDeviceGetTemperature failed", "the call passing");
    check(&report, &uuid(1, 6), "ok", "Tesla V100", "");
    found(&report, "gpus", "skipped", "no linkwise answers on");
    let text = run(setup.doctor()).await.1;
    assert!(text.contains("the driver asks for: GPU reset\n           -> "), "{text}");
}

#[tokio::test]
async fn fabric_joining_warns_and_fabric_failure_fails() {
    let fabric = ", nvlinks: [], fabric: {cluster: 11111111-2222-3333-4444-555555555555, clique: 0}";
    let gpus = [("GPU-a", "0000:01:00.0", fabric), ("GPU-b", "0000:02:00.0", fabric)];
    let (setup, _kubelet) = with_host(Setup::with(&machine(&gpus)));
    setup.tell_all(&["fabric 0 3 999", "fabric 1 2 0"]);
    let report = look(&setup, &[]).await;
    check(&report, "GPU-a", "failed", "not joined to the NVLink fabric: status 999", "joined to its fabric");
    check(&report, "GPU-b", "warning", "still joining the NVLink fabric", "the GPU joined to its fabric");
}

#[tokio::test]
async fn reasons_of_running_linkwise_are_reported() {
    let (node, kubelet) = running(true).await;
    let setup = &node.setup;
    let report = look(setup, &[]).await;
    found(&report, "gpus", "ok", "linkwise answers on");
    check(&report, &uuid(1, 2), "ok", "Tesla V100", "");
    // The driver reports no recovery action for these GPUs, and only the running linkwise saw their events.
    setup.tell_all(&["xid 2 79", "link 3 0 down"]);
    wait_unhealthy(&kubelet, &[2, 3]).await;
    let report = look(setup, &[]).await;
    check(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    check(&report, &uuid(1, 3), "failed", "NVLinks down: 0", "the links active");
    // A reason that both NVML and linkwise report is one finding.
    setup.tell("recovery 4 1");
    wait_unhealthy(&kubelet, &[2, 3, 4]).await;
    let report = look(setup, &[]).await;
    check(&report, &uuid(1, 4), "failed", "the driver asks for: GPU reset", "the requested action, after which");
    // After an operator has cleared the GPU, linkwise offers it, and the doctor says so.
    assert_eq!(run(setup.admin(&["clear", &uuid(1, 4)])).await.0, Some(0));
    wait_unhealthy(&kubelet, &[2, 3]).await;
    check(&look(setup, &[]).await, &uuid(1, 4), "warning", "linkwise has no reason against the GPU", "cleared it");
    // An unavailable driver changes none of linkwise's reasons.
    setup.tell("init 999");
    let report = look(setup, &[]).await;
    found(&report, "gpus", "skipped", "NVML unavailable");
    check(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "the plugin registered again");
}

#[tokio::test]
async fn health_record_counts_on_same_boot() {
    let (node, _kubelet) = running(false).await;
    let file = record_file(&node.setup);
    node.setup.tell("xid 2 79");
    wait_kept(&node.setup, &uuid(1, 2)).await;
    let mut record: HealthRecord = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let report = look(&node.setup, &[]).await;
    found(&report, "gpus", "ok", "linkwise_health.json: used as the health record of this boot");
    check(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    // This link was active while linkwise ran.
    let setup = &node.end().await;
    setup.tell("link 3 0 down");
    let report = look(setup, &[]).await;
    check(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    check(&report, &uuid(1, 3), "failed", "NVLinks down: 0", "the links active");
    // Another state folder has no record, and a record of another boot does not count.
    check(&look(setup, &["--state-dir", "/no/such"]).await, &uuid(1, 2), "ok", "Tesla V100", "");
    record.identity.boot = Some("another".to_owned());
    fs::write(&file, serde_json::to_string(&record).unwrap()).unwrap();
    check(&look(setup, &[]).await, &uuid(1, 2), "ok", "Tesla V100", "");
    // A file that the doctor cannot use is left as it is.
    for (text, status, words) in [
        ("{", "warning", "linkwise_health.json: the file is not a health record"),
        ("{\"version\": 7}", "skipped", "of version 7"),
    ] {
        fs::write(&file, text).unwrap();
        found(&look(setup, &[]).await, "gpus", status, words);
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}

#[tokio::test]
async fn foreign_admin_socket_is_a_warning() {
    let (setup, _kubelet) = healthy();
    fs::create_dir_all(setup.admin_socket().parent().unwrap()).unwrap();
    let hanging = UnixListener::bind(setup.admin_socket()).unwrap();
    let report = look(&setup, &["--timeout", "1"]).await;
    found(&report, "gpus", "warning", "no answer on");
    check(&report, &uuid(1, 2), "ok", "Tesla V100", "");
    // The first connection is that of the doctor that gave up.
    let speaking = stranger(hanging, 2, b"HTTP/1.1 200 OK\r\n\r\nhello\n");
    found(&look(&setup, &[]).await, "gpus", "warning", "another program answers on");
    speaking.join().unwrap();
}

#[tokio::test]
async fn released_driver_warns() {
    let (node, _kubelet) = running(true).await;
    assert_eq!(run(node.setup.admin(&["release"])).await.0, Some(0));
    found(&look(&node.setup, &[]).await, "gpus", "warning", "an operator released the driver");
}

#[tokio::test]
async fn plan_that_cannot_be_met_is_named() {
    let (setup, kubelet) = healthy();
    let (file, socket) = (setup.at("config.yaml"), setup.admin_socket());
    let shared = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: 9}]}}";
    fs::write(&file, format!("version: v1\nlinkwise: {{naming: true}}\n{shared}\n")).unwrap();
    let node = setup.arg("--config-file").arg(file).arg("--admin-socket").arg(socket).start().await;
    wait_registered(&kubelet, 1, 16).await;
    let report = look(&node.setup, &[]).await;
    found(&report, "gpus", "warning", "9 of its devices are to be shared, the node has 8");
    advised(&report, "9 of its devices", "change the configuration");
}

#[tokio::test]
async fn mixed_mig_under_strategy_single_offers_nothing() {
    let (setup, _kubelet) = with_host(four_gpus());
    let socket = setup.admin_socket();
    let node = setup.arg("--mig-strategy=single").arg("--admin-socket").arg(socket).start().await;
    node.ready(503, "nothing can be offered; MIG strategy single").await;
    node.metric("linkwise_gpus", 4).await;
    node.metric(r#"linkwise_gpus_by_availability{availability="withheld"}"#, 4).await;
    found(&look(&node.setup, &[]).await, "gpus", "failed", "cannot be offered: MIG strategy single");
}

#[tokio::test]
async fn plan_that_dra_meets_in_part_warns() {
    let (setup, _kubelet) = healthy();
    let (account, socket) = (setup.at("account"), setup.admin_socket());
    fs::create_dir(&account).unwrap();
    fs::write(account.join("token"), "token").unwrap();
    let setup = setup.config("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n");
    let setup = setup.env("NODE_NAME", "n").env("KUBERNETES_SERVICE_HOST", "127.0.0.1").arg("--dra-gpus=all");
    let setup = setup.env("LINKWISE_SERVICE_ACCOUNT_DIR", account.to_str().unwrap());
    let node = setup.arg("--admin-socket").arg(socket).start().await;
    node.metric(r#"linkwise_plan_problems{resource="nvidia.com/gpu",reason="dra_not_by_mps"}"#, 1).await;
    found(&look(&node.setup, &[]).await, "gpus", "warning", "with DRA each claim asks for MPS itself");
}
