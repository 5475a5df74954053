//! MIG devices made for claims by the whole program: `linkwise run`, its NVML agent, and the fake NVML library.

use std::fmt::Write as _;
use std::fs;

use fake_nvml::Control;
use linkwise_kubelet_box::dra::PodClaims;
use tokio::process::{Child, Command};

use crate::cluster::support::{until, within};
use crate::dra::cluster::node::{DRIVER, Node};
pub use crate::dra::published::mig::DEVICE;
use crate::dra::published::mig::MACHINE;
use crate::run::node::Process;

/// 2g.20gb from memory slice 4.
pub const OTHER: &str = "gpu-0-mig-2g20gb-14-4";

/// The number of published devices: the MIG devices that GPU 0 could have, by profile, and GPU 1.
const DEVICES: usize = 7 + 7 + 4 + 3 + 2 + 1 + 1 + 1;

/// A node with a GPU in MIG mode, and the control of its driver.
async fn node() -> (Node, Control) {
    let node = Node::start().await;
    let control = prepare(&node);
    (node, control)
}

/// Lists the capabilities of MIG devices as the kernel does; returns the control of the node's driver.
pub fn prepare(node: &Node) -> Control {
    let mut list = String::new();
    for instance in 1..15 {
        writeln!(list, "gpu0/gi{instance}/access {}", 9 * instance).unwrap();
        writeln!(list, "gpu0/gi{instance}/ci0/access {}", 9 * instance + 1).unwrap();
    }
    let folder = node.at("proc/driver/nvidia-caps");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("mig-minors"), list).unwrap();
    Control::new(node.at("nvml"))
}

pub fn program(node: &Node) -> Command {
    let mut command = node.program();
    command.arg("--procfs").arg(node.at("proc")).env("LINKWISE_DRA_DYNAMIC_MIG", "true");
    command.env("FAKE_NVML_MACHINE", MACHINE).env("FAKE_NVML_CONTROL", node.at("nvml"));
    command
}

/// Starts a process, and waits until it publishes all devices and the kubelet has registered a process this often.
async fn run(node: &Node, registrations: u64) -> Child {
    let process = program(node).spawn().unwrap();
    node.wait_published(DEVICES).await;
    node.wait_registered(registrations).await;
    process
}

fn assert_nothing_left(node: &Node) {
    assert_eq!((instances(node), node.checkpoints().len()), (0, 0));
}

/// The number of GPU 0's instances in the layout that the driver wrote last.
pub fn instances(node: &Node) -> usize {
    let text = fs::read_to_string(node.at("nvml.journal")).unwrap_or_default();
    let last = text.lines().rev().find_map(|line| line.strip_prefix("mig 0 ")).unwrap_or("{}");
    let layout: serde_json::Value = serde_json::from_str(last).unwrap();
    let count = |key: &str| layout[key].as_array().map_or(0, Vec::len);
    count("devices") + count("bare")
}

fn slices(node: &Node) -> Vec<serde_json::Value> {
    node.cluster.slices().into_iter().map(|slice| slice["spec"].clone()).collect()
}

#[tokio::test]
async fn mig_device_is_made_for_a_claim_and_destroyed() {
    let (node, _control) = node().await;
    let mut process = run(&node, 1).await;
    let before = slices(&node);
    let claim = node.claim("one", &[DEVICE]);
    let hardware = node.start_pod("p", &claim).await;
    assert!(hardware.len() == 3 && hardware[0] == "/dev/nvidia0", "the GPU, and two capabilities: {hardware:?}");
    assert_eq!(instances(&node), 1);
    // A kill changes neither the claim nor the slices.
    process.kill().await.unwrap();
    let mut process = run(&node, 2).await;
    assert_eq!(node.start_pod("p", &claim).await, hardware);
    assert_eq!((slices(&node), instances(&node)), (before.clone(), 1));
    within(node.dra.stop_pod("p")).await.unwrap();
    assert_nothing_left(&node);
    assert!(!node.specs().iter().any(|name| name.contains("-claim-")), "{:?}", node.specs());
    assert_eq!(slices(&node), before);
    assert!(process.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn hung_mig_order_restarts_agent_and_leaves_nothing() {
    let (node, control) = node().await;
    let mut command = program(&node);
    command.args(["--nvml-call-ms=1000", "--nvml-pause-ms=10"]);
    let _process = command.spawn().unwrap();
    node.wait_serving(DEVICES).await;
    // The GPU instance is made, but not the compute instance.
    control.send("hang 0 nvmlGpuInstanceCreateComputeInstance").unwrap();
    let claim = node.claim("one", &[DEVICE]);
    let refusal = node.refusal("p", &claim).await;
    assert!(refusal.contains("nvmlGpuInstanceCreateComputeInstance of GPU-"), "{refusal}");
    assert!(refusal.contains("did not return within 1s"), "{refusal}");
    control.send("unhang 0 nvmlGpuInstanceCreateComputeInstance").unwrap();
    assert_eq!(node.start_pod("p", &claim).await.len(), 3);
    assert_eq!(instances(&node), 1);
    within(node.dra.stop_pod("p")).await.unwrap();
    assert_nothing_left(&node);
}

/// An order that comes while no agent runs waits for the next agent.
#[tokio::test]
async fn order_waits_for_the_agent_that_replaces_another() {
    let (node, control) = node().await;
    let mut command = program(&node);
    command.args(["--nvml-poll-ms=50", "--nvml-pause-ms=10"]).env("LINKWISE_LOG_FORMAT", "json");
    fs::create_dir_all(node.at("sys/module/nvidia")).unwrap();
    let driver = |version: &str| {
        fs::write(node.at("version"), format!("{version}\n")).unwrap();
        fs::rename(node.at("version"), node.at("sys/module/nvidia/version")).unwrap();
    };
    driver("580.95.05");
    let process = Process::of(command);
    node.wait_serving(DEVICES).await;
    control.send("hang nvmlInit_v2").unwrap();
    driver("590.44.01");
    process.said("the driver was 580.95.05").await;
    let pod = PodClaims::single("waits", node.claim("waits", &[DEVICE]), DRIVER);
    let ready = async {
        until(|| control.processes() == 1).await;
        control.send("unhang nvmlInit_v2").unwrap();
    };
    let (started, ()) = tokio::join!(node.dra.start_pod(&pod), ready);
    assert_eq!((started.unwrap().len(), instances(&node)), (1, 1));
}

#[tokio::test]
async fn order_cut_by_a_kill_is_undone_by_the_next_process() {
    let (node, control) = node().await;
    let mut process = run(&node, 1).await;
    control.send("hang 0 nvmlGpuInstanceCreateComputeInstance").unwrap();
    let claim = node.claim("one", &[DEVICE]);
    let pod = PodClaims::single("p", claim.clone(), DRIVER);
    let killed = async {
        until(|| instances(&node) == 1).await;
        process.kill().await.unwrap();
    };
    let (started, ()) = tokio::join!(node.dra.start_pod(&pod), killed);
    started.unwrap_err();
    assert_eq!((instances(&node), node.checkpoints()), (1, vec![format!("{}.json", claim.uid)]));
    // This spec comes with the checkpoint, so that its CDI names resolve if an older release gives them to the kubelet.
    let device_spec = format!("linkwise.dev-device-{}.json", claim.uid);
    assert!(node.specs().contains(&device_spec), "{:?}", node.specs());
    control.send("unhang 0 nvmlGpuInstanceCreateComputeInstance").unwrap();
    // The start undoes the order, without a call of the kubelet.
    let _process = run(&node, 1).await;
    until(|| instances(&node) + node.checkpoints().len() == 0).await;
    assert!(!node.specs().contains(&device_spec), "{:?}", node.specs());
}

/// The second process has the strategy `mixed`, no right to destroy devices, and a file in the way of DRA's folders.
#[tokio::test]
async fn mig_device_goes_to_device_plugin_once_dra_is_off() {
    let (node, control) = node().await;
    let mut process = run(&node, 1).await;
    let claim = node.claim("one", &[DEVICE]);
    node.start_pod("p", &claim).await;
    process.kill().await.unwrap();
    control.send("fail 0 nvmlComputeInstanceDestroy 4").unwrap();
    let mut command = program(&node);
    command.env("LINKWISE_DRA_DYNAMIC_MIG", "false").env("MIG_STRATEGY", "mixed").args(["--claims-listed-ms", "300"]);
    for (variable, name) in
        [("LINKWISE_DRA_REGISTRY_DIR", "reg"), ("LINKWISE_DRA_PLUGINS_DIR", "plugins"), ("LINKWISE_CDI_DIR", "cdi")]
    {
        command.env(variable, node.at("config.yaml").join(name));
    }
    node.configure("none");
    command.env_remove("NODE_NAME").env("LINKWISE_SERVICE_ACCOUNT_DIR", node.at("no-token"));
    let mut process = command.spawn().unwrap();
    until(|| node.healthy("nvidia.com/gpu").len() == 1).await;
    const MIG: &str = "nvidia.com/mig-2g.20gb";
    assert!(node.healthy(MIG).is_empty(), "the device of a running pod is offered");
    within(node.dra.stop_pod("p")).await.unwrap_err();
    node.dra.delete_by_force("p");
    until(|| node.healthy(MIG).len() == 1).await;
    assert_eq!((instances(&node), node.checkpoints().len()), (1, 0));
    assert!(process.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn dropped_counters_keep_mig_gpu_unpublished() {
    let (node, _control) = node().await;
    node.cluster.server.set_gates(linkwise_api_server_box::Gates::OFF);
    let _process = program(&node).spawn().unwrap();
    node.wait_published(1).await;
    assert_eq!(node.devices(), ["gpu-1"]);
}
