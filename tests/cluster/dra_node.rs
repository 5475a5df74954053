//! A node whose GPUs go through DRA: `linkwise run` as a process, beside a kubelet and an API server in a box.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault, Key, ResourceType};
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options, Pod, runtime};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::cluster::support::{Cluster, until, within};
use crate::mps::node::SharedFolder;

pub const DRIVER: &str = "gpu.nvidia.com";

pub struct Node {
    pub cluster: Cluster,
    /// The MPS root, where the node has one. Unmounted before the folder is removed: fields are dropped in this order.
    pub mps: OnceLock<SharedFolder>,
    folder: tempfile::TempDir,
    /// The kubelet's device manager, with the PodResources API.
    pub kubelet: KubeletBox,
    pub dra: DraKubelet,
}

impl Node {
    pub async fn start() -> Self {
        Self::start_with(|_| (), DraOptions::new("").reconcile).await
    }

    /// The same with another kubelet, whose DRA manager looks for plugins this often.
    pub async fn start_with(change: impl FnOnce(&mut Options), reconcile: Duration) -> Self {
        let (cluster, folder) = (Cluster::start().await, tempfile::tempdir().unwrap());
        cluster.label_node("n", json!({}));
        let at = |name: &str| folder.path().join(name);
        for name in ["sys", "k", "reg", "plugins", "cdi"] {
            fs::create_dir(at(name)).unwrap();
        }
        let mut options = Options::new(at("k"));
        options.pod_resources = Some(at("pod-resources/kubelet.sock"));
        change(&mut options);
        let kubelet = KubeletBox::start(options).unwrap();
        let dra = DraKubelet::start(DraOptions { reconcile, ..DraOptions::new(at("reg")) }).unwrap();
        kubelet.list_claims_of(&dra);
        let node = Self { cluster, mps: OnceLock::new(), folder, kubelet, dra };
        node.configure("all");
        node
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn program(&self) -> Command {
        let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx1-v100.yaml");
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        command
            .arg("run")
            .env_clear()
            .envs(self.cluster.variables())
            .env("NODE_NAME", "n")
            .env("LINKWISE_SYSFS", self.at("sys"));
        command.env("FAKE_NVML_MACHINE", machine).env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
        command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path());
        command.env("CONFIG_FILE", self.at("config.yaml")).env("KUBELET_SOCKET", self.at("k/kubelet.sock"));
        command.env("LINKWISE_POD_RESOURCES_SOCKET", self.at("pod-resources/kubelet.sock"));
        command.env("LINKWISE_DRA_PLUGINS_DIR", self.at("plugins")).env("LINKWISE_DRA_REGISTRY_DIR", self.at("reg"));
        command.env("LINKWISE_CDI_DIR", self.at("cdi")).env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0");
        command.env("LINKWISE_ADMIN_SOCKET", self.at("admin.sock"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command
    }

    pub fn run(&self) -> Child {
        self.program().spawn().unwrap()
    }

    /// GPUs go through DRA from now on, or not: `all` or `none`.
    pub fn configure(&self, gpus: &str) {
        fs::write(self.at("config.yaml"), format!("version: v1\nlinkwise: {{dra: {{gpus: {gpus}}}}}\n")).unwrap();
    }

    pub fn devices(&self) -> Vec<String> {
        self.devices_where(|_| true)
    }

    /// The published devices that a scheduler may allocate.
    pub fn untainted(&self) -> Vec<String> {
        self.devices_where(|device| device["taints"].as_array().is_none_or(Vec::is_empty))
    }

    /// The ids that the kubelet has as healthy.
    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        self.kubelet.state().resources.get(resource).map(|state| state.healthy.clone()).unwrap_or_default()
    }

    fn devices_where(&self, wanted: impl Fn(&Value) -> bool) -> Vec<String> {
        let slices = self.cluster.server.objects(&ResourceType::RESOURCE_SLICES);
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
        let wanted = devices.filter(wanted);
        let mut names: Vec<String> = wanted.map(|device| device["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    pub async fn publishes(&self, count: usize) {
        until(|| self.devices().len() == count).await;
    }

    pub async fn is_registered(&self, registrations: u64) {
        let is = |state: &linkwise_kubelet_box::dra::DraState| {
            state
                .drivers
                .get(DRIVER)
                .is_some_and(|driver| driver.registrations >= registrations && driver.connected == 1)
        };
        within(self.dra.wait(is)).await.unwrap();
    }

    /// Creates a claim that the scheduler has allocated these devices to.
    pub fn claim(&self, name: &str, devices: &[&str]) -> ClaimRef {
        let key: Key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
        let result = |device: &&str| json!({"request": "gpus", "driver": DRIVER, "pool": "n/gpu", "device": device});
        let results: Vec<Value> = devices.iter().map(result).collect();
        let requests = json!([{"name": "gpus", "exactly":
            {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": devices.len()}}]);
        let claim = json!({
            "spec": {"devices": {"requests": requests}},
            "status": {"allocation": {"devices": {"results": results}}},
        });
        self.cluster.server.put("kube-scheduler", &key, claim);
        let uid = self.cluster.server.object(&key).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
        ClaimRef { namespace: "default".into(), name: name.into(), uid }
    }

    /// Starts a pod with a claim, as often as it takes; returns the device nodes of its GPUs, MIG devices included.
    pub async fn start_pod(&self, pod: &str, claim: &ClaimRef) -> Vec<String> {
        let pod = PodClaims::single(pod, claim.clone(), DRIVER);
        within(async {
            loop {
                if let Ok(containers) = self.dra.start_pod(&pod).await {
                    return self.hardware(&containers["main"]);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
    }

    /// The names of the checkpoints' files.
    pub fn checkpoints(&self) -> Vec<String> {
        let files = fs::read_dir(self.at("k/linkwise/claims")).into_iter().flatten();
        let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        // A draft that a killed process left goes with the next start.
        names.retain(|name| name.ends_with(".json"));
        names.sort();
        names
    }

    /// The names of the CDI specs.
    pub fn specs(&self) -> Vec<String> {
        let files = fs::read_dir(self.at("cdi")).unwrap();
        let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        // A draft that a killed process left goes with a start a minute later.
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        names
    }

    /// Those of claims.
    pub fn claim_specs(&self) -> Vec<String> {
        self.specs().into_iter().filter(|name| name.contains("-claim-")).collect()
    }

    /// The device nodes of GPUs and MIG devices that a runtime gives a container for these CDI devices.
    pub fn hardware(&self, cdi: &[String]) -> Vec<String> {
        self.resolved(cdi).unwrap()
    }

    /// The same, or the text with which the runtime refuses the container.
    pub fn resolved(&self, cdi: &[String]) -> Result<Vec<String>, String> {
        let edits = runtime::container(&self.at("cdi"), cdi)?;
        let mig = edits.nodes.iter().filter(|node| node.starts_with("/dev/nvidia-caps/")).cloned();
        Ok(edits.gpus().into_iter().chain(mig).collect())
    }
}

#[tokio::test]
async fn claim_becomes_cdi_devices() {
    let node = Node::start().await;
    let mut process = node.run();
    node.publishes(8).await;
    node.is_registered(1).await;
    let claim = node.claim("two", &["gpu-0", "gpu-3"]);
    let cdi = node.start_pod("p", &claim).await;
    assert_eq!(cdi, ["/dev/nvidia0", "/dev/nvidia3"]);
    // Another claim for one of them is refused, and says which has it.
    let other = node.claim("other", &["gpu-3"]);
    let refusal = node.dra.start_pod(&PodClaims::single("q", other, DRIVER)).await.unwrap_err().to_string();
    assert!(refusal.contains("default/two") && refusal.contains("gpu-3"), "{refusal}");
    within(node.dra.stop_pod("p")).await.unwrap();
    within(node.dra.stop_pod("q")).await.unwrap();
    assert!(process.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn node_that_the_kubelet_refuses_publishes_nothing() {
    let node = Node::start().await;
    node.dra.refuse(Some("not today"));
    let _process = node.run();
    within(node.dra.wait(|state| state.refused.len() >= 3)).await.unwrap();
    assert_eq!(node.cluster.count("POST", "resourceslices"), 0);
    node.dra.refuse(None);
    node.publishes(8).await;
}

#[tokio::test]
async fn prepared_claims_outlive_api_server_kubelet_and_agent() {
    let node = Node::start().await;
    let mut first = node.run();
    node.publishes(8).await;
    node.is_registered(1).await;
    let claim = node.claim("one", &["gpu-5"]);
    let cdi = node.start_pod("p", &claim).await;
    node.cluster.server.go_away().await;
    first.kill().await.unwrap();
    let _second = node.run();
    node.dra.restart().await.unwrap();
    node.is_registered(2).await;
    assert_eq!(node.start_pod("p", &claim).await, cdi, "from the checkpoint");
    node.cluster.server.come_back().await;
    // As that kubelet's start would: nothing else creates them again.
    node.cluster.server.wipe_slices("n", None);
    node.publishes(8).await;
    within(node.dra.stop_pod("p")).await.unwrap();
}

#[tokio::test]
async fn held_gpus_change_doors_when_their_holders_end() {
    let node = Node::start().await;
    node.configure("none");
    let mut process = node.run();
    let plugins = || node.healthy("nvidia.com/gpu").len();
    until(|| plugins() == 8).await;
    let pod = |name: &str| Pod::single(name, "nvidia.com/gpu", 1);
    node.kubelet.admit(&pod("q"), None).await.unwrap();
    // The file changes: the same process goes on, through the other door.
    node.configure("all");
    node.publishes(7).await;
    node.is_registered(1).await;
    let held = || node.kubelet.state().resources["nvidia.com/gpu"].unhealthy.clone();
    assert_eq!((plugins(), held().len()), (0, 1), "the kubelet goes on looking it up");
    let gpu = held().first().unwrap().chars().last().unwrap();
    let claim = node.claim("held", &[&format!("gpu-{gpu}")]);
    let refusal = node.dra.start_pod(&PodClaims::single("p", claim, DRIVER)).await.unwrap_err().to_string();
    assert!(refusal.contains("is held by a pod, as nvidia.com/gpu"), "{refusal}");
    assert!(node.kubelet.remove_pod("q"));
    node.publishes(8).await;
    let free = if gpu == '0' { 1 } else { 0 };
    let claim = node.claim("free", &[&format!("gpu-{free}")]);
    assert_eq!(node.start_pod("r", &claim).await.len(), 1);
    node.configure("none");
    until(|| plugins() == 7).await;
    assert!(
        node.untainted().is_empty() && !node.healthy("nvidia.com/gpu").iter().any(|id| id.ends_with(&free.to_string()))
    );
    // Allocated before, prepared after: it stays pending, and is told why.
    let claim = node.claim("late", &["gpu-7"]);
    let refusal = node.dra.start_pod(&PodClaims::single("s", claim, DRIVER)).await.unwrap_err().to_string();
    assert!(refusal.contains("this node's GPUs go through the device plugin"), "{refusal}");
    within(node.dra.stop_pod("r")).await.unwrap();
    until(|| plugins() == 8).await;
    assert!(process.try_wait().unwrap().is_none());
    assert_eq!(node.kubelet.violations(), []);
}

/// Pods of the device plugin have ended, and the kubelet's checkpoint still names them: the kubelet takes them out when
/// a plugin sends it a list.
#[tokio::test]
async fn ended_pods_keep_no_gpu_from_dra_in_a_takeover() {
    let node = Node::start().await;
    node.configure("none");
    let start = |pod: &str, gpus: &str| {
        let mut command = node.program();
        command.env("LINKWISE_POD_UID", pod).env("LINKWISE_DRA_GPUS", gpus);
        command.env("LINKWISE_ADMIN_SOCKET", node.at(&format!("{pod}.sock"))).spawn().unwrap()
    };
    let mut before = start("before", "none");
    until(|| node.healthy("nvidia.com/gpu").len() == 8).await;
    for pod in ["a", "b"] {
        node.kubelet.admit(&Pod::single(pod, "nvidia.com/gpu", 4), None).await.unwrap();
    }
    for pod in ["a", "b"] {
        assert!(node.kubelet.remove_pod(pod));
    }
    let file = fs::read_to_string(node.at("k/kubelet_internal_checkpoint")).unwrap();
    assert_eq!(file.matches("PodUID").count(), 2, "{file}");
    let _after = start("after", "all");
    // The process before goes on meanwhile, as a pod does until the next one is ready.
    node.publishes(8).await;
    until(|| node.untainted().len() == 8).await;
    node.is_registered(1).await;
    let claim = node.claim("one", &["gpu-0"]);
    assert_eq!(node.start_pod("p", &claim).await.len(), 1);
    assert!(before.try_wait().unwrap().is_none());
    assert_eq!(node.kubelet.violations(), []);
}

#[tokio::test]
async fn api_server_that_lies_costs_only_the_claim() {
    let node = Node::start().await;
    let _process = node.run();
    node.publishes(8).await;
    node.is_registered(1).await;
    let (good, bad) = (node.claim("good", &["gpu-0"]), node.claim("bad", &["gpu-1"]));
    let lies = [
        Answer::Text("{\"metadata\": {\"name\": 3}}".to_owned()),
        Answer::Text(json!({"metadata": {"namespace": "default", "name": "bad", "uid": "other"}}).to_string()),
        Answer::Refusal(403, "no right to read claims", None),
    ];
    for lie in lies {
        node.cluster.server.fail(Fault::of("GET", "resourceclaims/bad", 1, lie));
        assert!(node.dra.start_pod(&PodClaims::single("bad", bad.clone(), DRIVER)).await.is_err());
    }
    assert_eq!(node.start_pod("good", &good).await.len(), 1);
    assert_eq!(node.start_pod("bad", &bad).await.len(), 1);
}
