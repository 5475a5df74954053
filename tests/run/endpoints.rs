//! /metrics, /livez, /readyz: what they answer is the state of the node.

use crate::run::node::{GPU, Setup, registered};

#[tokio::test]
async fn metrics_are_openmetrics_and_current() {
    let (node, kubelet) = Setup::on("dgx-h100").serve(8).await;
    for unknown in ["/nothing", "/metrics/../../etc/passwd"] {
        assert_eq!(node.get(unknown).await.status, 404);
    }
    let answer = node.get("/metrics").await;
    assert_eq!(answer.status, 200);
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(answer.head.contains(kind), "{}", answer.head);
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    node.metric("linkwise_devices{resource=\"nvidia.com/gpu\",health=\"healthy\"}", 8).await;
    node.metric("linkwise_registrations_total{resource=\"nvidia.com/gpu\",outcome=\"ok\"}", 1).await;
    node.metric("linkwise_kubelet_connected{resource=\"nvidia.com/gpu\"}", 1).await;
    node.metric("linkwise_nvml_agent_up", 1).await;
    let build = format!("linkwise_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    node.metric(&build, 1).await;
    let gpu = "linkwise_gpu{uuid=\"GPU-00000002-0000-4000-8000-000000000004\",index=\"4\",pci=\"0000:9d:00.0\",\
               model=\"NVIDIA H100 80GB HBM3\",numa=\"1\"}";
    node.metric(gpu, 1).await;
    // The stream that ended with the kubelet is counted, and not as a success.
    kubelet.stop().await.unwrap();
    node.metric("linkwise_kubelet_connected{resource=\"nvidia.com/gpu\"}", 0).await;
    let gone = "linkwise_rpcs_total{resource=\"nvidia.com/gpu\",method=\"ListAndWatch\",code=\"CANCELLED\"}";
    node.metric(gone, 1).await;
}

#[tokio::test]
async fn ready_once_kubelet_holds_a_stream() {
    let node = Setup::on("dgx1-v100").start().await;
    let answer = node.ready(503, "nvidia.com/gpu: waiting for").await;
    assert!(answer.body.contains("kubelet.sock"), "{answer:?}");
    assert_eq!(node.get("/livez").await.status, 200);
    let kubelet = node.setup.kubelet();
    registered(&kubelet, 1, 8).await;
    assert_eq!(node.ready(200, "ready").await.body, "ready\n");
    kubelet.stop().await.unwrap();
    node.ready(503, GPU).await;
    assert_eq!(node.get("/livez").await.status, 200);
}
