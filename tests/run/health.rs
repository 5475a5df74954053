//! Health over restarts of the process, and operators' settings for XIDs.

use std::path::PathBuf;

use serde_json::Value;

use crate::run::node::{Setup, seen, uuid, wait_registered, wait_unhealthy};

pub fn record_file(setup: &Setup) -> PathBuf {
    setup.at("k/linkwise/linkwise_health.json")
}

/// Waits until the health record has a reason for this GPU.
pub async fn wait_kept(setup: &Setup, gpu: &str) {
    let has_reason = |text: &String| {
        let record: Value = serde_json::from_str(text).unwrap_or_default();
        record["gpus"][gpu]["reasons"].as_array().is_some_and(|reasons| !reasons.is_empty())
    };
    seen(async || std::fs::read_to_string(record_file(setup)).unwrap_or_default(), has_reason).await;
}

#[tokio::test]
async fn reset_reason_survives_restarts_until_reboot() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 2 79");
    let bad = uuid(1, 2);
    wait_kept(&node.setup, &bad).await;
    let line = node.process.logged(|line| line["message"] == "the GPU is unhealthy").await;
    assert!(line["ends_with"].as_str().unwrap().contains("a node reboot"), "{line}");
    assert!(line["since"].as_u64().unwrap() > 1_700_000_000, "{line}");
    node.metric(&format!("linkwise_gpu_failures_total{{uuid=\"{bad}\",reason=\"xid\"}}"), 1).await;

    // After a restart on the same boot the GPU is unhealthy on the first list.
    let node = node.end().await.start().await;
    wait_registered(&kubelet, 2, 7).await;
    wait_unhealthy(&kubelet, &[2]).await;
    let setup = node.end().await;

    // A record of another boot makes no GPU unhealthy.
    let text = std::fs::read_to_string(record_file(&setup)).unwrap();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    assert!(record["identity"]["boot"].is_string(), "{text}");
    record["identity"]["boot"] = "another".into();
    std::fs::write(record_file(&setup), record.to_string()).unwrap();
    let node = setup.start().await;
    wait_registered(&kubelet, 3, 8).await;
    node.end().await;
}

#[tokio::test]
async fn kubelet_that_clears_its_folder_keeps_the_record() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 2 79");
    wait_kept(&node.setup, &uuid(1, 2)).await;
    let setup = node.end().await;
    // A starting kubelet removes files and leaves folders. The box still needs its socket.
    for entry in std::fs::read_dir(setup.at("k")).unwrap().map(Result::unwrap) {
        if !entry.file_type().unwrap().is_dir() && entry.file_name() != "kubelet.sock" {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let node = setup.start().await;
    wait_registered(&kubelet, 2, 7).await;
    node.end().await;
}

#[tokio::test]
async fn broken_or_newer_record_costs_one_log_line() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    std::fs::create_dir(record_file(&setup).parent().unwrap()).unwrap();
    std::fs::write(record_file(&setup), "{\"version\": 1, \"gpus\": [").unwrap();
    let node = setup.start().await;
    let line = node.process.logged(|line| line["message"] == "health record not used").await;
    assert!(line["aside"].as_str().unwrap().ends_with("linkwise_health.json.broken"), "{line}");
    wait_registered(&kubelet, 1, 8).await;
    assert!(record_file(&node.setup).with_extension("json.broken").exists());
    let setup = node.end().await;
    std::fs::write(record_file(&setup), "{\"version\": 7, \"anything\": []}").unwrap();
    let node = setup.start().await;
    let line = node.process.said("another version of linkwise").await;
    assert_eq!(line["version"], 7);
    wait_registered(&kubelet, 2, 8).await;
    node.end().await;
}

#[tokio::test]
async fn unwritable_record_is_logged_once() {
    let (mut node, kubelet) = Setup::on("dgx1-v100").arg("--state-dir=/dev/null/nowhere").serve(8).await;
    node.setup.tell_all(&["xid 2 79", "xid 3 79"]);
    wait_registered(&kubelet, 1, 6).await;
    let line = node.process.said("cannot write the health record").await;
    assert_eq!(line["file"], "/dev/null/nowhere/linkwise_health.json");
    node.process.end().await;
    assert_eq!(node.process.count("cannot write the health record"), 1);
}

#[tokio::test]
async fn disabled_health_checks_leave_gpus_in_service() {
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=50");
    let setup = setup.env("DP_DISABLE_HEALTHCHECKS", "all,1").env("DP_ENABLE_HEALTHCHECKS", "13,many");
    let (node, kubelet) = setup.serve(8).await;
    let line = node.process.logged(|line| line["message"] == "not an XID number: ignored").await;
    assert_eq!((&line["variable"], &line["passed_over"]), (&"DP_ENABLE_HEALTHCHECKS".into(), &"many".into()));
    node.setup.tell_all(&["xid 2 79", "xid 3 13"]);
    wait_unhealthy(&kubelet, &[3]).await;
    // A reason that polls find is reported and changes nothing.
    node.setup.tell("lost 4");
    let line = node.process.said("health checks are disabled: the GPU stays healthy").await;
    assert_eq!(line["gpu"], uuid(1, 4));
    let series = format!("linkwise_gpu_unhealthy_since_seconds{{uuid=\"{}\",reason=\"lost\"}}", uuid(1, 4));
    node.metrics(|text| text.contains(&series)).await;
    wait_unhealthy(&kubelet, &[3]).await;
}
