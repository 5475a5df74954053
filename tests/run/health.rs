//! Health over restarts of the process, and what operators say of XIDs.

use std::path::PathBuf;

use linkwise_kubelet_box::KubeletBox;
use serde_json::Value;

use crate::run::node::{GPU, Node, Setup, registered, until, uuid};

pub fn file(setup: &Setup) -> PathBuf {
    setup.at("k/linkwise/linkwise_health.json")
}

/// Waits until the GPU is in what is kept.
pub async fn kept(setup: &Setup, gpu: &str) {
    let mut tries = 0;
    loop {
        let text = std::fs::read_to_string(file(setup)).unwrap_or_default();
        let record: Value = serde_json::from_str(&text).unwrap_or_default();
        if record["gpus"][gpu]["reasons"].as_array().is_some_and(|reasons| !reasons.is_empty()) {
            return;
        }
        tries += 1;
        assert!(tries < 6000, "{text}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// Ends the process; the machine stays.
pub async fn end(mut node: Node) -> Setup {
    node.process.signal("TERM");
    assert!(node.process.ended().await.0.success());
    node.setup
}

/// Waits for the list after a registration: so many healthy devices.
async fn lists(kubelet: &KubeletBox, registrations: u64, healthy: usize) {
    registered(kubelet, registrations, healthy).await;
}

#[tokio::test]
async fn reset_reason_survives_restarts_until_reboot() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 2 79");
    let bad = uuid(1, 2);
    kept(&node.setup, &bad).await;
    let line = node.process.logged(|line| line["message"] == "the GPU is unhealthy").await;
    assert!(line["ends_with"].as_str().unwrap().contains("node rebooted"), "{line}");
    assert!(line["since"].as_u64().unwrap() > 1_700_000_000, "{line}");
    node.metric(&format!("linkwise_gpu_failures_total{{uuid=\"{bad}\",reason=\"xid\"}}"), 1).await;

    // Started again on the same boot: unhealthy on the first list.
    let node = end(node).await.start().await;
    lists(&kubelet, 2, 7).await;
    assert_eq!(kubelet.state().resources[GPU].unhealthy.iter().collect::<Vec<_>>(), [&bad]);
    let setup = end(node).await;

    // After another boot it stands against no GPU.
    let text = std::fs::read_to_string(file(&setup)).unwrap();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    assert!(record["identity"]["boot"].is_string(), "{text}");
    record["identity"]["boot"] = "another".into();
    std::fs::write(file(&setup), record.to_string()).unwrap();
    let node = setup.start().await;
    lists(&kubelet, 3, 8).await;
    end(node).await;
}

#[tokio::test]
async fn a_kubelet_that_clears_its_folder_leaves_the_record() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 2 79");
    kept(&node.setup, &uuid(1, 2)).await;
    let setup = end(node).await;
    // What kubelets do at their start: every file goes but their checkpoint, and folders stay.
    for entry in std::fs::read_dir(setup.at("k")).unwrap().map(Result::unwrap) {
        if !entry.file_type().unwrap().is_dir() && entry.file_name() != "kubelet.sock" {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let node = setup.start().await;
    lists(&kubelet, 2, 7).await;
    end(node).await;
}

#[tokio::test]
async fn a_record_that_is_broken_or_new_costs_a_line_in_the_log() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    std::fs::create_dir(file(&setup).parent().unwrap()).unwrap();
    std::fs::write(file(&setup), "{\"version\": 1, \"gpus\": [").unwrap();
    let node = setup.start().await;
    let line = node.process.logged(|line| line["message"] == "health record not used").await;
    assert!(line["aside"].as_str().unwrap().ends_with("linkwise_health.json.broken"), "{line}");
    lists(&kubelet, 1, 8).await;
    assert!(file(&node.setup).with_extension("json.broken").exists());
    let setup = end(node).await;
    std::fs::write(file(&setup), "{\"version\": 7, \"anything\": []}").unwrap();
    let node = setup.start().await;
    let line = node.process.said("another version of linkwise").await;
    assert_eq!(line["version"], 7);
    lists(&kubelet, 2, 8).await;
    end(node).await;
}

#[tokio::test]
async fn a_record_that_cannot_be_written_is_told_of_once() {
    let (node, kubelet) = Setup::on("dgx1-v100").arg("--state-dir=/dev/null/nowhere").serve(8).await;
    node.setup.tell("xid 2 79");
    node.setup.tell("xid 3 79");
    lists(&kubelet, 1, 6).await;
    let line = node.process.said("cannot write the health record").await;
    assert_eq!(line["file"], "/dev/null/nowhere/linkwise_health.json");
    let told = || node.process.lines().iter().filter(|line| line.contains("cannot write the health record")).count();
    assert_eq!(told(), 1);
    let (mut node, told) = (node, 1);
    node.process.signal("TERM");
    assert!(node.process.ended().await.0.success());
    let lines = node.process.lines();
    assert_eq!(lines.iter().filter(|line| line.contains("cannot write the health record")).count(), told);
}

#[tokio::test]
async fn disabled_health_checks_leave_gpus_in_service() {
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=20");
    let setup = setup.env("DP_DISABLE_HEALTHCHECKS", "all,1").env("DP_ENABLE_HEALTHCHECKS", "13,many");
    let (node, kubelet) = setup.serve(8).await;
    let line = node.process.logged(|line| line["message"] == "not an XID number: ignored").await;
    assert_eq!(
        (line["variable"].as_str(), line["passed_over"].as_str()),
        (Some("DP_ENABLE_HEALTHCHECKS"), Some("many"))
    );
    node.setup.tell("xid 2 79");
    node.setup.tell("xid 3 13");
    lists(&kubelet, 1, 7).await;
    let state = kubelet.state();
    assert_eq!(state.resources[GPU].unhealthy.iter().collect::<Vec<_>>(), [&uuid(1, 3)]);
    // What polls find is reported and changes nothing.
    node.setup.tell("lost 4");
    let line = node.process.said("health checks are disabled: the GPU stays healthy").await;
    assert_eq!(line["gpu"], uuid(1, 4));
    let series = format!("linkwise_gpu_unhealthy_since_seconds{{uuid=\"{}\",reason=\"lost\"}}", uuid(1, 4));
    until(async || {
        let text = node.get("/metrics").await.body;
        if text.contains(&series) { Ok(()) } else { Err(text) }
    })
    .await;
    assert_eq!(kubelet.state().resources[GPU].unhealthy.len(), 1);
}
