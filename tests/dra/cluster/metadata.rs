//! The metadata of a container's devices (KEP-5304), read as `k8s.io/dynamic-resource-allocation/devicemetadata` does.

use std::fs;

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use linkwise_kubelet_box::runtime::{self, ContainerEdits};
use serde_json::{Value, json};

use super::node::{DRIVER, Node, result};
use crate::cluster::support::{until, within};

/// Starts a pod with this claim, and returns the CDI edits of its container.
async fn started(node: &Node, claim: &ClaimRef) -> ContainerEdits {
    let pod = PodClaims::single(&claim.name, claim.clone(), DRIVER);
    let containers = within(node.dra.start_pod(&pod)).await.unwrap();
    runtime::container(&node.at("cdi"), &containers["main"]).unwrap()
}

/// The metadata below this path: the first object whose version the reader knows.
fn read(edits: &ContainerEdits, path: &str) -> Value {
    let folder = format!("/var/run/kubernetes.io/dra-device-attributes/{path}/");
    let files = edits.mounts.iter().filter_map(|(inside, host)| Some((inside.strip_prefix(&folder)?, host)));
    let files: Vec<_> = files.filter(|(name, _)| !name.contains('/') && name.ends_with("-metadata.json")).collect();
    let [(name, host)] = files.as_slice() else { panic!("{path}: {edits:?}") };
    assert_eq!(*name, "gpu.nvidia.com-metadata.json");
    let text = fs::read_to_string(host).unwrap();
    let mut objects = serde_json::Deserializer::from_str(&text).into_iter::<Value>().map(Result::unwrap);
    let known = |object: &Value| object["apiVersion"] == "metadata.resource.k8s.io/v1alpha1";
    objects.find(|object| known(object) && object["kind"] == "DeviceMetadata").unwrap()
}

/// A device's metadata, with its attributes in the slice.
fn device(node: &Node, name: &str) -> Value {
    let slices = node.cluster.slices();
    let mut devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
    let attributes = devices.find(|device| device["name"] == name).unwrap()["attributes"].clone();
    assert!(attributes["uuid"]["string"].is_string(), "{attributes}");
    json!({"driver": DRIVER, "pool": "n/gpu", "name": name, "attributes": attributes})
}

#[tokio::test]
async fn container_reads_its_devices_until_its_claim_ends() {
    let node = Node::start().await;
    let mut first = node.run();
    node.wait_serving(8).await;
    let claim = node.claim("two", &["gpu-0", "gpu-5"]);
    let edits = started(&node, &claim).await;
    let first_read = read(&edits, "resourceclaims/two/gpus");
    let metadata = json!({"name": "two", "namespace": "default", "uid": claim.uid});
    assert_eq!((&first_read["metadata"], &first_read["podClaimName"]), (&metadata, &Value::Null));
    let devices = [device(&node, "gpu-0"), device(&node, "gpu-5")];
    assert_eq!(first_read["requests"], json!([{"name": "gpus", "devices": devices}]));

    // Two more claims have alternatives. The first comes from a template; the annotation of the second is not a name.
    for (name, pod_claim_name, path) in
        [("p-gpus-x7k2p", "gpus", "resourceclaimtemplates/gpus/some"), ("odd", "../../etc", "resourceclaims/odd/some")]
    {
        let mut of_request = result("gpu-1");
        of_request["request"] = "some/one".into();
        let claim = node.claim_of(name, &[of_request], &[]);
        let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
        let mut object = node.cluster.server.object(&key).unwrap();
        object["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": pod_claim_name});
        node.cluster.server.put("kube-controller-manager", &key, object);
        let read = read(&started(&node, &claim).await, path);
        assert_eq!(read["requests"], json!([{"name": "some/one", "devices": [device(&node, "gpu-1")]}]));
        let is_name = path.starts_with("resourceclaimtemplates");
        assert_eq!(read["podClaimName"].as_str(), is_name.then_some(pod_claim_name));
        within(node.dra.stop_pod(name)).await.unwrap();
    }

    // The next process has no slices at first, so it keeps the metadata that containers have.
    node.cluster.server.go_away().await;
    first.kill().await.unwrap();
    let _second = node.run();
    node.wait_registered(2).await;
    assert_eq!(read(&started(&node, &claim).await, "resourceclaims/two/gpus"), first_read);
    node.cluster.server.come_back().await;
    within(node.dra.stop_pod("two")).await.unwrap();
    until(|| node.specs().iter().all(|name| !name.contains(&claim.uid))).await;
}
