//! Claims that share GPUs by MPS: `linkwise run` and `linkwise mps-control-daemon` as two processes with one MPS root,
//! and stand-ins for nvidia-cuda-mps-control and nvidia-smi.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use linkwise_host::mps::{Layout, unmount_own_shms};
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use serde_json::{Value, json};
use tokio::process::Child;

use crate::cluster::support::{like, until, within};
pub use crate::dra::cluster::node::result as whole;
use crate::dra::cluster::node::{DRIVER, Node};
use crate::mps::node::SharedFolder;

/// A node of 8 V100 with an MPS root and the driver's two programs.
async fn node() -> Node {
    let node = Node::start().await;
    prepare(&node);
    node
}

/// Puts an MPS root and the driver's two programs on a node.
pub fn prepare(node: &Node) {
    for folder in ["mps", "bin"] {
        fs::create_dir(node.at(folder)).unwrap();
    }
    if cfg!(may_mount) {
        node.mps.set(SharedFolder::new(&node.at("mps"))).unwrap();
    }
    for program in ["nvidia-cuda-mps-control", "nvidia-smi"] {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mps").join(program);
        symlink(ours.canonicalize().unwrap(), node.at("bin").join(program)).unwrap();
    }
}

fn run(node: &Node) -> Child {
    node.program().arg("--mps-container-root").arg(node.at("mps")).env("MPS_ROOT", "/host/mps").spawn().unwrap()
}

/// Starts the privileged process, with the settings of `linkwise run`.
pub fn daemons(node: &Node) -> Daemons {
    let path = format!("{}:/usr/bin:/bin", node.at("bin").display());
    let mut daemon = like(&node.program(), env!("CARGO_BIN_EXE_linkwise"));
    daemon.args(["mps-control-daemon", "--mps-container-root"]).arg(node.at("mps")).env("PATH", path);
    Daemons { process: daemon.spawn().unwrap(), root: node.at("mps") }
}

/// The privileged process. Dropping it also ends the control daemons that survive the process.
pub struct Daemons {
    pub process: Child,
    root: PathBuf,
}

impl Drop for Daemons {
    fn drop(&mut self) {
        let _ = unmount_own_shms(&Layout::new(&self.root), |_| false);
        for daemon in fs::read_dir(self.root.join("dra.linkwise.dev")).into_iter().flatten().flatten() {
            if let Ok(pid) = fs::read_to_string(daemon.path().join("pipe/nvidia-cuda-mps-control.pid")) {
                let group = format!("-{}", pid.trim());
                let _ = std::process::Command::new("kill").args(["-9", "--", &group]).stderr(Stdio::null()).status();
            }
        }
    }
}

/// Creates a claim with these results of the allocation, and NVIDIA's configuration for MPS if `mps` is given.
pub fn claim(node: &Node, name: &str, results: &[Value], mps: Option<Value>) -> ClaimRef {
    let config = mps.map(|mps| {
        let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
            "sharing": {"strategy": "MPS", "mpsConfig": mps}});
        json!({"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}})
    });
    node.claim_of(name, results, config.as_slice())
}

/// The result of an allocation for a share of a device.
pub fn share(device: &str, id: &str, shares: &str, memory: &str) -> Value {
    let mut result = whole(device);
    result["shareID"] = json!(id);
    result["consumedCapacity"] = json!({"shares": shares, "memory": memory});
    result
}

/// The folders of the claims' control daemons under the MPS root, sorted.
pub fn folders(node: &Node) -> Vec<PathBuf> {
    let entries = fs::read_dir(node.at("mps/dra.linkwise.dev")).into_iter().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

fn text(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The number of nvidia-smi calls that set a GPU to this compute mode.
fn mode_calls(node: &Node, mode: &str) -> usize {
    text(node.at("bin/modes")).lines().filter(|call| call.ends_with(&format!("-c {mode}"))).count()
}

/// The edits of a claim's only request.
fn edits(node: &Node, claim: &ClaimRef) -> Value {
    let spec = text(node.at("cdi").join(format!("linkwise.dev-claim-{}.json", claim.uid)));
    serde_json::from_str::<Value>(&spec).unwrap()["devices"][0]["containerEdits"].clone()
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn claim_has_its_own_control_daemon_until_its_end() {
    let node = node().await;
    let (mut plugin, mut privileged) = (run(&node), daemons(&node));
    node.wait_serving(8).await;
    let limits = json!({"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "4Gi"});
    let two = claim(&node, "two", &[whole("gpu-0"), whole("gpu-3")], Some(limits));
    let hardware = node.start_pod("p", &two).await;
    assert_eq!(hardware, ["/dev/nvidia0", "/dev/nvidia3"]);
    let [folder] = &folders(&node)[..] else { panic!("{:?}", folders(&node)) };
    let state = |file: &str| text(folder.join("pipe/state").join(file));
    assert_eq!((state("threads"), state("memory-0"), state("memory-1")), ("30.0".into(), "4096".into(), "4096".into()));
    let name = folder.file_name().unwrap().to_str().unwrap();
    let environment = state("environment");
    assert!(environment.contains(&format!("CUDA_VISIBLE_DEVICES={name},GPU-")), "{environment}");
    assert_eq!((mode_calls(&node, "EXCLUSIVE_PROCESS"), mode_calls(&node, "DEFAULT")), (2, 0));
    let pipe = format!("dra.linkwise.dev/{name}/pipe");
    let edits = edits(&node, &two);
    assert_eq!(edits["env"], json!([format!("CUDA_MPS_PIPE_DIRECTORY=/mps/{pipe}")]));
    let mounts = [0, 1].map(|mount: usize| &edits["mounts"][mount]["hostPath"]);
    let shm = format!("/host/mps/dra.linkwise.dev/{name}/shm");
    assert_eq!(mounts, [&json!(format!("/host/mps/{pipe}")), &json!(shm)]);
    let pid = text(folder.join("pipe/nvidia-cuda-mps-control.pid"));
    // The plugin is killed, and orders.json is torn. The next plugin gives the same orders, and the daemon runs on.
    plugin.kill().await.unwrap();
    fs::write(node.at("mps/.dra/orders.json"), "{").unwrap();
    let _plugin = run(&node);
    node.wait_registered(2).await;
    assert_eq!(node.start_pod("p", &two).await, hardware);
    assert_eq!(text(folder.join("pipe/nvidia-cuda-mps-control.pid")), pid);
    // The privileged process is killed. A pod that starts afterwards waits for the next process.
    privileged.process.kill().await.unwrap();
    node.dra.restart().await.unwrap();
    node.wait_registered(3).await;
    let pod = PodClaims::single("p", two, DRIVER);
    let (started, _privileged) = tokio::join!(within(node.dra.start_pod(&pod)), async {
        until(|| text(node.at("mps/.dra/orders.json")).contains(name)).await;
        daemons(&node)
    });
    assert_eq!(node.hardware(&started.unwrap()["main"]), hardware);
    assert_ne!(text(folder.join("pipe/nvidia-cuda-mps-control.pid")), pid);
    // The daemon ends with the claim. The next claim gets the GPU once its compute mode is DEFAULT again.
    within(node.dra.stop_pod("p")).await.unwrap();
    let plain = claim(&node, "plain", &[whole("gpu-0")], None);
    node.start_pod("q", &plain).await;
    assert_eq!(mode_calls(&node, "DEFAULT"), 2);
    assert_eq!(fs::read_dir(node.at("mps/.exclusive")).unwrap().count(), 0);
    assert!(!folder.join(".started").exists() && !text(node.at("mps/.dra/orders.json")).contains("threadPercentage"));
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn next_claim_of_a_gpu_finds_shared_memory_empty() {
    let node = node().await;
    let _processes = (run(&node), daemons(&node));
    node.wait_serving(8).await;
    let mut left = None;
    for pod in ["one", "two", "three"] {
        let claim = claim(&node, pod, &[whole("gpu-2")], Some(json!({})));
        node.start_pod(pod, &claim).await;
        let [folder] = &folders(&node)[..] else { panic!("{:?}", folders(&node)) };
        let file = folder.join("shm/left");
        assert!(!file.exists(), "{pod} finds the shared memory of {left:?}");
        fs::write(&file, pod).unwrap();
        left = Some(pod);
        within(node.dra.stop_pod(pod)).await.unwrap();
    }
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn claims_share_a_gpu_through_one_control_daemon() {
    let node = node().await;
    let sharing = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}";
    fs::write(node.at("config.yaml"), format!("version: v1\n{sharing}\nlinkwise: {{dra: {{gpus: all}}}}\n")).unwrap();
    let _processes = (run(&node), daemons(&node));
    node.wait_serving(8).await;
    let half = claim(&node, "half", &[share("gpu-1", "a", "2", "8Gi")], Some(json!({})));
    let less = json!({"defaultActiveThreadPercentage": 10, "defaultPinnedDeviceMemoryLimit": "1500M"});
    let quarter = claim(&node, "quarter", &[share("gpu-1", "b", "1", "4Gi")], Some(less));
    let without = claim(&node, "without", &[share("gpu-1", "c", "1", "1Gi")], None);
    for (pod, claim) in [("p", &half), ("q", &quarter), ("r", &without)] {
        node.start_pod(pod, claim).await;
    }
    let [folder] = &folders(&node)[..] else { panic!("{:?}", folders(&node)) };
    assert_eq!(text(folder.join("pipe/state/threads")), "100.0");
    assert_eq!(mode_calls(&node, "EXCLUSIVE_PROCESS"), 0, "the GPU of a claim without MPS became exclusive");
    let env = |claim: &ClaimRef| edits(&node, claim)["env"].clone();
    let pipe = format!("CUDA_MPS_PIPE_DIRECTORY=/mps/dra.linkwise.dev/{}/pipe", folder.file_name().unwrap().display());
    let [threads, memory] = ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"];
    assert_eq!(env(&half), json!([format!("{threads}=50"), format!("{memory}=0=8192M"), pipe]));
    assert_eq!(env(&quarter), json!([format!("{threads}=10"), format!("{memory}=0=1430M"), pipe]));
    let mounts = edits(&node, &without)["mounts"].as_array().unwrap().len();
    assert_eq!(mounts, 1, "a claim without MPS mounts more than its metadata");
    // The daemon ends with the last claim that asks for it.
    let marker = folder.join(".started");
    let pid = text(folder.join("pipe/nvidia-cuda-mps-control.pid"));
    within(node.dra.stop_pod("p")).await.unwrap();
    let again = claim(&node, "again", &[share("gpu-1", "d", "2", "8Gi")], Some(json!({})));
    node.start_pod("s", &again).await;
    assert_eq!(text(folder.join("pipe/nvidia-cuda-mps-control.pid")), pid);
    for pod in ["q", "s"] {
        assert!(marker.exists());
        within(node.dra.stop_pod(pod)).await.unwrap();
    }
    until(|| !marker.exists()).await;
}

#[tokio::test]
async fn mps_of_claims_without_an_mps_root_is_refused() {
    let node = node().await;
    let mut command = node.program();
    let _plugin = command.arg("--mps-container-root").arg(node.at("nowhere")).spawn().unwrap();
    node.wait_serving(8).await;
    let asks = claim(&node, "asks", &[whole("gpu-0")], Some(json!({})));
    let why = node.refusal("p", &asks).await;
    for part in ["this node does not have for claims", "the MPS root is not mounted", "overlay dra-mps", "docs/mps.md"]
    {
        assert!(why.contains(part), "{why}");
    }
    assert_eq!(node.checkpoints(), [""; 0]);
    let plain = claim(&node, "plain", &[whole("gpu-0")], None);
    node.start_pod("q", &plain).await;
}
