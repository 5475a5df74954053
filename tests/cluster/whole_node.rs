//! A node as the chart makes it: device plugin, GPU Feature Discovery and config-manager run as three processes of one
//! image, beside the boxes of the kubelet and the API server.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Stdio;

use linkwise_api_server_box::{Key, ResourceType};
use linkwise_kubelet_box::{KubeletBox, Options, Pod, ResourceState};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::cluster::support::{Cluster, config_map, on_dgx1, within};
use crate::run::node::Process;

const GPU: &str = "nvidia.com/gpu";
const LABEL: &str = "nvidia.com/device-plugin.config";
const SHARED: &str =
    "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n";

/// The cluster, and the node's folder, which has the image's links.
struct Node {
    cluster: Cluster,
    folder: tempfile::TempDir,
}

impl Node {
    async fn start() -> Self {
        let (cluster, folder) = (Cluster::start().await, tempfile::tempdir().unwrap());
        for name in ["nvidia-device-plugin", "gpu-feature-discovery", "config-manager"] {
            symlink(env!("CARGO_BIN_EXE_linkwise"), folder.path().join(name)).unwrap();
        }
        for name in ["sys", "config", "kubelet"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        config_map(&folder.path().join("available-configs"), &[("default", "version: v1\n"), ("shared", SHARED)]);
        Self { cluster, folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program of the image, with the environment of its container.
    fn program(&self, name: &str) -> Command {
        let mut command = on_dgx1(&self.cluster, self.at(name), &self.at("sys"));
        command.env("NAMESPACE", "gpu");
        command
    }

    fn config_manager(&self, oneshot: bool) -> Command {
        let mut command = self.program("config-manager");
        command.env("CONFIG_FILE_SRCDIR", self.at("available-configs")).env("CONFIG_FILE_DST", self.configuration());
        command.env("ONESHOT", oneshot.to_string()).env("SEND_SIGNAL", (!oneshot).to_string());
        // A full path, because other plugins may run on the machine of the test.
        command.env("FALLBACK_STRATEGIES", "named,single").env("PROCESS_TO_SIGNAL", self.at("nvidia-device-plugin"));
        command
    }

    fn plugin(&self) -> Command {
        let mut command = self.program("nvidia-device-plugin");
        command.env("CONFIG_FILE", self.configuration()).env("KUBELET_SOCKET", self.at("kubelet/kubelet.sock"));
        command.env("LINKWISE_POD_RESOURCES_SOCKET", self.at("pod-resources/kubelet.sock"));
        command.env("LINKWISE_CDI_DIR", self.at("cdi")).env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0");
        command
    }

    fn feature_discovery(&self) -> Command {
        let mut command = self.program("gpu-feature-discovery");
        command.env("CONFIG_FILE", self.configuration());
        command
    }

    fn configuration(&self) -> PathBuf {
        self.at("config/config.yaml")
    }

    fn kubelet(&self) -> KubeletBox {
        let mut options = Options::new(self.at("kubelet"));
        options.pod_resources = Some(self.at("pod-resources/kubelet.sock"));
        KubeletBox::start(options).unwrap()
    }

    /// Waits until the node's labels, as NFD gets them, have these values.
    async fn wait_labels(&self, expected: Value) {
        let key: Key = ResourceType::NODE_FEATURES.key(Some("gpu"), "nvidia-features-for-n");
        let expected = expected.as_object().unwrap();
        let has = |object: &Value| expected.iter().all(|(label, value)| object["spec"]["labels"][label] == *value);
        within(self.cluster.server.wait_for_object(&key, |object| object.is_some_and(has))).await;
    }
}

async fn wait_offered(kubelet: &KubeletBox, wanted: impl Fn(&ResourceState) -> bool) {
    within(kubelet.wait(|state| state.resources.get(GPU).is_some_and(&wanted))).await.unwrap();
}

fn still_runs(child: &mut Child) -> bool {
    child.try_wait().unwrap().is_none()
}

#[tokio::test]
async fn node_feature_stays_while_nvml_crashes_at_start() {
    let node = Node::start().await;
    // The PCI bus is empty, because these GPUs exist in the simulated NVML only.
    fs::create_dir_all(node.at("sys/bus/pci/devices")).unwrap();
    let feature_discovery = || {
        let mut command = node.program("gpu-feature-discovery");
        command.env("FAKE_NVML_CONTROL", node.at("control")).stderr(Stdio::piped());
        command
    };
    assert!(within(feature_discovery().arg("--oneshot").status()).await.unwrap().success());
    let key = ResourceType::NODE_FEATURES.key(Some("gpu"), "nvidia-features-for-n");
    let before = node.cluster.server.object(&key).unwrap();
    assert_eq!(before["spec"]["labels"]["nvidia.com/gpu.count"], "8");

    fake_nvml::Control::new(node.at("control")).send("crash nvmlInit_v2").unwrap();
    let ended = within(feature_discovery().arg("--oneshot").output()).await.unwrap();
    let log = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && log.contains("the NVML library crashed in nvmlInit_v2"), "{log}");
    let process = Process::of(feature_discovery());
    process.said("keeping the previous labels").await;
    assert_eq!(node.cluster.server.object(&key).unwrap(), before);
}

#[tokio::test]
async fn node_label_switches_sharing_under_running_pod() {
    let node = Node::start().await;
    node.cluster.label_node("n", json!({}));
    assert!(within(node.config_manager(true).status()).await.unwrap().success());
    let kubelet = node.kubelet();
    let mut processes =
        [node.plugin(), node.feature_discovery(), node.config_manager(false)].map(|mut it| it.spawn().unwrap());
    wait_offered(&kubelet, |gpus| gpus.healthy.len() == 8).await;
    node.wait_labels(json!({"nvidia.com/gpu.count": "8", "nvidia.com/gpu.replicas": "1"})).await;
    within(kubelet.admit(&Pod::single("running", GPU, 2), None)).await.unwrap();
    let held = kubelet.state().resources[GPU].in_use();

    node.cluster.label_node("n", json!({ LABEL: "shared" }));
    wait_offered(&kubelet, |gpus| gpus.healthy.iter().filter(|id| id.contains("::")).count() >= 24).await;
    node.wait_labels(json!({
        "nvidia.com/gpu.count": "8", "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing",
    }))
    .await;
    assert_eq!(fs::read_link(node.configuration()).unwrap(), node.at("available-configs/shared"));
    let gpus = kubelet.state().resources[GPU].clone();
    assert_eq!((gpus.registrations, gpus.in_use(), kubelet.violations().len()), (1, held, 0));

    // Without the label the default configuration is selected again.
    node.cluster.label_node("n", json!({}));
    wait_offered(&kubelet, |gpus| gpus.healthy.len() == 8).await;
    node.wait_labels(json!({"nvidia.com/gpu.replicas": "1", "nvidia.com/gpu.sharing-strategy": "none"})).await;
    let gpus = kubelet.state().resources[GPU].clone();
    assert_eq!((gpus.registrations, kubelet.violations().len()), (1, 0));
    assert!(processes.iter_mut().all(still_runs), "a process ended");
}
