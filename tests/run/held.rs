//! Devices that pods hold, and that disappear while linkwise is down.

use std::collections::BTreeSet;

use linkwise_kubelet_box::Pod;
use serde_json::{Value, json};

use crate::run::node::{GPU, Setup, uuid, wait_registered, wait_unhealthy};
use crate::run::rediscovery::quick;

#[tokio::test]
async fn lost_gpu_stays_listed_until_its_pod_ends() {
    let (node, kubelet) = quick().serve(8).await;
    for pod in ["first", "second"] {
        kubelet.admit(&Pod::single(pod, GPU, 4), None).await.unwrap();
    }
    let setup = node.end().await;
    // GPU 7 is lost, GPU 0 is taken out; a different pod holds each.
    setup.tell_all(&["lost 7", "remove 0"]);
    let (lost, removed) = (uuid(1, 7), uuid(1, 0));
    let node = setup.start().await;
    wait_registered(&kubelet, 2, 6).await;
    wait_unhealthy(&kubelet, &[0, 7]).await;
    // No list, not even the first one, lacked a device that the kubelet looks up.
    assert_eq!(kubelet.violations(), []);
    node.ready(200, "").await;
    let line = node.process.said("pods hold devices that this node does not offer").await;
    assert_eq!(line["devices"], format!("{removed}, {lost}"));
    node.metric("linkwise_devices{resource=\"nvidia.com/gpu\",health=\"unhealthy\"}", 2).await;
    node.metric("linkwise_gpus", 6).await;

    node.setup.tell("add 0");
    wait_unhealthy(&kubelet, &[7]).await;
    // Once its pod has ended, GPU 7 leaves the list.
    for pod in ["first", "second"] {
        assert!(kubelet.remove_pod(pod));
    }
    kubelet.wait(|state| state.resources[GPU].unhealthy.is_empty()).await.unwrap();
    wait_registered(&kubelet, 1, 7).await;
    assert_eq!(kubelet.violations(), []);
}

/// Writes the kubelet's checkpoint of devices. PodResources does not list init containers that have ended.
fn checkpoint(setup: &Setup, ids: &[&str]) {
    let entry = |id: &&str| {
        json!({"PodUID": "pod", "ContainerName": "init", "ResourceName": GPU, "DeviceIDs": {"0": [id]},
               "AllocResp": ""})
    };
    let entries: Vec<Value> = ids.iter().map(entry).collect();
    let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}).to_string();
    std::fs::write(setup.kubelet_socket.with_file_name("kubelet_internal_checkpoint"), text).unwrap();
}

#[tokio::test]
async fn init_containers_device_stays_listed_until_pod_ends() {
    let setup = quick();
    let kubelet = setup.kubelet_with(|options| options.writes_checkpoint = false);
    checkpoint(&setup, &["GPU-gone"]);
    let node = setup.start().await;
    let gone = BTreeSet::from(["GPU-gone".to_owned()]);
    kubelet.wait(|state| state.resources[GPU].connected && state.resources[GPU].unhealthy == gone).await.unwrap();
    checkpoint(&node.setup, &[]);
    kubelet.wait(|state| state.resources[GPU].unhealthy.is_empty()).await.unwrap();
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn unreadable_checkpoint_is_logged_and_delays_nothing() {
    let setup = quick();
    let kubelet = setup.kubelet_with(|options| options.writes_checkpoint = false);
    std::fs::write(setup.kubelet_socket.with_file_name("kubelet_internal_checkpoint"), "{").unwrap();
    let node = setup.start().await;
    kubelet.wait(|state| state.resources[GPU].healthy.len() == 8).await.unwrap();
    let line = node.process.said("devices of init containers are unknown").await;
    assert!(line["cause"].as_str().unwrap().contains("kubelet_internal_checkpoint"), "{line}");
}
