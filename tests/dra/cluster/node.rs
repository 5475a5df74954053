//! A node whose GPUs go through DRA: `linkwise run` as a process, with the kubelet and the API server in the box.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options, Pod, runtime};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::cluster::support::{Cluster, on_dgx1, until, within};
use crate::mps::node::SharedFolder;

pub const DRIVER: &str = "gpu.nvidia.com";

pub struct Node {
    pub cluster: Cluster,
    /// The MPS root, if the node has one. It is unmounted before `folder` is removed: fields are dropped in this order.
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

    /// Starts a node with other options of the kubelet, whose DRA manager looks for plugins at this interval.
    pub async fn start_with(change: impl FnOnce(&mut Options), reconcile: Duration) -> Self {
        let (cluster, folder) = (Cluster::of_node().await, tempfile::tempdir().unwrap());
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
        let mut command = on_dgx1(&self.cluster, env!("CARGO_BIN_EXE_linkwise"), &self.at("sys"));
        command.arg("run").env("CONFIG_FILE", self.at("config.yaml")).env("KUBELET_SOCKET", self.at("k/kubelet.sock"));
        command.env("LINKWISE_POD_RESOURCES_SOCKET", self.at("pod-resources/kubelet.sock"));
        command.env("LINKWISE_DRA_PLUGINS_DIR", self.at("plugins")).env("LINKWISE_DRA_REGISTRY_DIR", self.at("reg"));
        command.env("LINKWISE_CDI_DIR", self.at("cdi")).env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0");
        command.env("LINKWISE_ADMIN_SOCKET", self.at("admin.sock"));
        command
    }

    pub fn run(&self) -> Child {
        self.program().spawn().unwrap()
    }

    /// Starts a pod's process with this UID; its settings let `all` or `none` of the GPUs go through DRA.
    fn run_as(&self, pod: &str, gpus: &str) -> Child {
        let mut command = self.program();
        command.env("LINKWISE_POD_UID", pod).env("LINKWISE_DRA_GPUS", gpus);
        command.env("LINKWISE_ADMIN_SOCKET", self.at(&format!("{pod}.sock"))).spawn().unwrap()
    }

    /// Waits until a process has published this many devices, and the kubelet has registered its plugin.
    pub async fn wait_serving(&self, devices: usize) {
        self.wait_published(devices).await;
        self.wait_registered(1).await;
    }

    /// Starts a node and a process, and waits until the process serves the eight GPUs.
    async fn serving() -> (Self, Child) {
        let node = Self::start().await;
        let process = node.run();
        node.wait_serving(8).await;
        (node, process)
    }

    /// Sets the GPUs that go through DRA: `all` or `none`.
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

    /// The ids of a resource that are healthy for the kubelet.
    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        self.kubelet.state().resources.get(resource).map(|state| state.healthy.clone()).unwrap_or_default()
    }

    fn devices_where(&self, wanted: impl Fn(&Value) -> bool) -> Vec<String> {
        let slices = self.cluster.slices();
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
        let wanted = devices.filter(wanted);
        let mut names: Vec<String> = wanted.map(|device| device["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    pub async fn wait_published(&self, count: usize) {
        until(|| self.devices().len() == count).await;
    }

    pub async fn wait_registered(&self, registrations: u64) {
        let registered = self.dra.wait(|state| {
            let driver = state.drivers.get(DRIVER);
            driver.is_some_and(|driver| driver.registrations >= registrations && driver.connected == 1)
        });
        within(registered).await.unwrap();
    }

    /// Creates a claim to which these devices are allocated.
    pub fn claim(&self, name: &str, devices: &[&str]) -> ClaimRef {
        self.claim_of(name, &devices.iter().map(|device| result(device)).collect::<Vec<_>>(), &[])
    }

    /// Creates a claim with these results of the allocation and this configuration.
    pub fn claim_of(&self, name: &str, results: &[Value], config: &[Value]) -> ClaimRef {
        let uid = self.cluster.server.put_allocated_claim(name, results, config);
        ClaimRef { namespace: "default".into(), name: name.into(), uid }
    }

    /// Starts a pod with a claim, with retries until it starts. Returns the device nodes of its GPUs and MIG devices.
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

    /// Starts a pod with a claim, and returns the error.
    pub async fn refusal(&self, pod: &str, claim: &ClaimRef) -> String {
        let started = within(self.dra.start_pod(&PodClaims::single(pod, claim.clone(), DRIVER))).await;
        started.unwrap_err().to_string()
    }

    /// The names of the files in a folder, sorted, without the drafts of a killed process, which a later start removes.
    fn names(&self, folder: &str) -> Vec<String> {
        let files = fs::read_dir(self.at(folder)).into_iter().flatten();
        let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        names
    }

    /// The file names of the checkpoints.
    pub fn checkpoints(&self) -> Vec<String> {
        self.names("k/linkwise/claims")
    }

    /// The file names of the CDI specs.
    pub fn specs(&self) -> Vec<String> {
        self.names("cdi")
    }

    /// The file names of the claims' CDI specs.
    pub fn claim_specs(&self) -> Vec<String> {
        self.specs().into_iter().filter(|name| name.contains("-claim-")).collect()
    }

    /// The device nodes of GPUs and MIG devices that a container gets by these CDI names.
    pub fn hardware(&self, cdi: &[String]) -> Vec<String> {
        self.resolved(cdi).unwrap()
    }

    /// The device nodes of [`Self::hardware`], or the error with which the runtime refuses the container.
    pub fn resolved(&self, cdi: &[String]) -> Result<Vec<String>, String> {
        let edits = runtime::container(&self.at("cdi"), cdi)?;
        let mig = edits.nodes.iter().filter(|node| node.starts_with("/dev/nvidia-caps/")).cloned();
        Ok(edits.gpus().into_iter().chain(mig).collect())
    }
}

/// The result of an allocation for a device of this node.
pub fn result(device: &str) -> Value {
    json!({"request": "gpus", "driver": DRIVER, "pool": "n/gpu", "device": device})
}

#[tokio::test]
async fn node_that_the_kubelet_refuses_publishes_nothing() {
    let node = Node::start().await;
    node.dra.refuse(Some("not today"));
    let _process = node.run();
    within(node.dra.wait(|state| state.refused.len() >= 3)).await.unwrap();
    assert_eq!(node.cluster.count("POST", "resourceslices"), 0);
    node.dra.refuse(None);
    node.wait_published(8).await;
}

#[tokio::test]
async fn prepared_claim_survives_restarts_and_server_outage() {
    let (node, mut first) = Node::serving().await;
    let claim = node.claim("one", &["gpu-5"]);
    let hardware = node.start_pod("p", &claim).await;
    node.cluster.server.go_away().await;
    first.kill().await.unwrap();
    let _second = node.run();
    node.dra.restart().await.unwrap();
    node.wait_registered(2).await;
    assert_eq!(node.start_pod("p", &claim).await, hardware, "not from the checkpoint");
    node.cluster.server.come_back().await;
    // A kubelet that starts deletes the slices.
    node.cluster.server.wipe_slices("n", None);
    node.wait_published(8).await;
    within(node.dra.stop_pod("p")).await.unwrap();
}

#[tokio::test]
async fn held_gpus_change_doors_when_their_holders_end() {
    let node = Node::start().await;
    node.configure("none");
    let mut process = node.run();
    let offered = || node.healthy("nvidia.com/gpu").len();
    until(|| offered() == 8).await;
    let pod = |name: &str| Pod::single(name, "nvidia.com/gpu", 1);
    node.kubelet.admit(&pod("q"), None).await.unwrap();
    // The process stays when the file changes, and the free GPUs go through the other door.
    node.configure("all");
    node.wait_published(7).await;
    node.wait_registered(1).await;
    let held = || node.kubelet.state().resources["nvidia.com/gpu"].unhealthy.clone();
    assert_eq!((offered(), held().len()), (0, 1), "the held GPU left the list");
    let gpu = held().first().unwrap().chars().last().unwrap();
    let claim = node.claim("held", &[&format!("gpu-{gpu}")]);
    let refusal = node.refusal("p", &claim).await;
    assert!(refusal.contains("is held by a pod, as nvidia.com/gpu"), "{refusal}");
    assert!(node.kubelet.remove_pod("q"));
    node.wait_published(8).await;
    let free = if gpu == '0' { 1 } else { 0 };
    let claim = node.claim("free", &[&format!("gpu-{free}")]);
    assert_eq!(node.start_pod("r", &claim).await.len(), 1);
    node.configure("none");
    until(|| offered() == 7).await;
    assert!(node.untainted().is_empty());
    assert!(!node.healthy("nvidia.com/gpu").iter().any(|id| id.ends_with(&free.to_string())));
    // A claim that is allocated before the change and prepared after it is refused with the reason.
    let claim = node.claim("late", &["gpu-7"]);
    let refusal = node.refusal("s", &claim).await;
    assert!(refusal.contains("this node's GPUs go through the device plugin"), "{refusal}");
    within(node.dra.stop_pod("r")).await.unwrap();
    until(|| offered() == 8).await;
    assert!(process.try_wait().unwrap().is_none());
    assert_eq!(node.kubelet.violations(), []);
}

/// The taint by which the cluster evicts a claim's pod survives a takeover.
#[tokio::test]
async fn cordon_taints_a_claims_gpu_until_uncordon() {
    let node = Node::start().await;
    let mut before = node.run_as("before", "all");
    node.wait_serving(8).await;
    let claim = node.claim("one", &["gpu-3"]);
    let hardware = node.start_pod("p", &claim).await;
    let admin = async |pod: &str, args: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_linkwise"));
        command.args(["admin", "--socket"]).arg(node.at(&format!("{pod}.sock"))).args(args);
        let output = command.output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let state: Value = serde_json::from_str(&admin("before", &["state"]).await).unwrap();
    let gpu = state["gpus"][3]["uuid"].as_str().unwrap().to_owned();
    let answer = admin("before", &["cordon", &gpu, "--reason", "a hot cable", "--evict"]).await;
    assert!(answer.ends_with("its taint evicts the pods whose claims have it\n"), "{answer}");
    let evicted = || {
        let taint = |device: &Value| {
            let [taint] = device["taints"].as_array()?.as_slice() else { return None };
            Some((taint["key"].clone(), taint["effect"].clone()))
        };
        node.devices_where(|device| taint(device) == Some(("linkwise.dev/cordoned".into(), "NoExecute".into())))
    };
    until(|| evicted() == ["gpu-3"] && node.untainted().len() == 7).await;
    // The claim can still be prepared, because its pod may tolerate the taint.
    assert_eq!(node.start_pod("p", &claim).await, hardware);

    let _after = node.run_as("after", "all");
    node.wait_registered(2).await;
    before.kill().await.unwrap();
    until(|| evicted() == ["gpu-3"] && node.untainted().len() == 7).await;
    admin("after", &["uncordon", &gpu]).await;
    until(|| node.untainted().len() == 8).await;
    within(node.dra.stop_pod("p")).await.unwrap();
    assert_eq!(node.kubelet.violations(), []);
}

/// The kubelet's checkpoint names pods of the device plugin that have ended, until a plugin sends the kubelet a list.
#[tokio::test]
async fn ended_pods_keep_no_gpu_from_dra_in_a_takeover() {
    let node = Node::start().await;
    node.configure("none");
    let mut before = node.run_as("before", "none");
    until(|| node.healthy("nvidia.com/gpu").len() == 8).await;
    for pod in ["a", "b"] {
        node.kubelet.admit(&Pod::single(pod, "nvidia.com/gpu", 4), None).await.unwrap();
    }
    for pod in ["a", "b"] {
        assert!(node.kubelet.remove_pod(pod));
    }
    let file = fs::read_to_string(node.at("k/kubelet_internal_checkpoint")).unwrap();
    assert_eq!(file.matches("PodUID").count(), 2, "{file}");
    let _after = node.run_as("after", "all");
    // The previous process still runs, as a pod does until the next one is ready.
    node.wait_published(8).await;
    until(|| node.untainted().len() == 8).await;
    node.wait_registered(1).await;
    let claim = node.claim("one", &["gpu-0"]);
    assert_eq!(node.start_pod("p", &claim).await.len(), 1);
    assert!(before.try_wait().unwrap().is_none());
    assert_eq!(node.kubelet.violations(), []);
}
