//! Linkwise instead of the GPU part of NVIDIA's DRA driver: under the driver's name, with the variables that the GPU
//! Operator's GPUCluster sets (v26.7.0, `manifests/state-dra-driver/0500_daemonset.yaml`) and a few that the test
//! needs.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::Value;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::node::Node;
use crate::cluster::support::{on_dgx1, until, within};
use crate::run::node::Process;

/// Starts the program of the DaemonSet's container, with a token of the API server as in any pod.
fn start(node: &Node) -> Process {
    let program = node.at("gpu-kubelet-plugin");
    let _ = symlink(env!("CARGO_BIN_EXE_linkwise"), &program);
    // `on_dgx1` sets the pod's variables, and others that stand for the host: its NVIDIA driver and files.
    let mut command = on_dgx1(&node.cluster, &program, &node.at("sys"));
    command.args(["-v", "4"]);
    command.env("HTTP_ENDPOINT", ":0").env("METRICS_PATH", "/metrics").env("LOG_VERBOSITY", "4");
    command.env("NVIDIA_VISIBLE_DEVICES", "void").env("NVIDIA_MIG_CONFIG_DEVICES", "all").env("NAMESPACE", "gpu");
    command.env("CDI_ROOT", node.at("cdi")).env("HOST_ROOT", "/").env("HEALTHCHECK_PORT", "0");
    command.env("KUBELET_REGISTRAR_DIRECTORY_PATH", node.at("reg"));
    command.env("KUBELET_PLUGINS_DIRECTORY_PATH", node.at("plugins"));
    // The test adds these: it reads the log, and parallel tests cannot share the socket in /run.
    command.env("LINKWISE_LOG_FORMAT", "json").env("LINKWISE_ADMIN_SOCKET", node.at("admin.sock"));
    Process::of(command)
}

/// The pods that have GPUs.
fn holders(node: &Node) -> Vec<String> {
    let socket = node.at("admin.sock");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let output = command.env_clear().args(["admin", "--socket"]).arg(socket).arg("state").output().unwrap();
    let state: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let allocations = state["allocations"].as_array().cloned().unwrap_or_default();
    allocations.iter().map(|held| held["pod"].as_str().unwrap().to_owned()).collect()
}

/// The health of a service, as the kubelet's probe asks for it.
async fn health(driver: &Process, service: &str) -> Result<i32, tonic::Code> {
    let line = driver.logged(|line| line["message"] == "serving gRPC health checks").await;
    let (_, port) = line["address"].as_str().unwrap().rsplit_once(':').unwrap();
    let channel = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    let answer = client.check(HealthCheckRequest { service: service.to_owned() }).await;
    answer.map(|answer| answer.into_inner().status).map_err(|status| status.code())
}

#[tokio::test]
async fn gpu_cluster_runs_linkwise_as_its_dra_driver() {
    let node = Node::start().await;
    let mut driver = start(&node);
    node.wait_registered(1).await;
    node.wait_published(8).await;
    assert_eq!(within(health(&driver, "liveness")).await, Ok(1));
    assert_eq!(within(health(&driver, "readiness")).await, Err(tonic::Code::NotFound));
    let claim = node.claim("c", &["gpu-0", "gpu-3"]);
    let nodes = node.start_pod("p", &claim).await;
    assert_eq!(nodes, ["/dev/nvidia0", "/dev/nvidia3"]);
    // Linkwise found the socket of PodResources below the host's root.
    until(|| holders(&node).contains(&"p".to_owned())).await;

    // The container restarts and reads the claims from the driver's own folder on the node.
    driver.child.kill().await.unwrap();
    let kept = || fs::read_dir(node.at("plugins/linkwise/claims")).unwrap().count();
    assert_eq!(kept(), 1);
    let _driver = start(&node);
    node.wait_registered(2).await;
    let refused = node.refusal("q", &node.claim("taken", &["gpu-3"])).await;
    assert!(refused.contains("default/c") && refused.contains("gpu-3"), "{refused}");
    within(node.dra.stop_pod("p")).await.unwrap();
    until(|| kept() == 0).await;
}
