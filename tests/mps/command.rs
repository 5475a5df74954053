//! `linkwise mps-control-daemon` as a real process.

use std::fs;
use std::process::{Output, Stdio};

use linkwise::inventory::ResourceName;
use linkwise::mps::{Limits, Marker, MpsResource, Readiness, look};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::node::{LIMIT, Node, kill, runs, until, waiting};

/// A built-in machine of 8 GPUs of 80 GiB.
const MACHINE: &str = "dgx-h100";

fn command(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let file = format!("{}/src/machines/{MACHINE}.yaml", env!("CARGO_MANIFEST_DIR"));
    let path = format!("{}:/usr/bin:/bin", node.bin().display());
    command.args(["mps-control-daemon", "--container-root"]).arg(node.layout().root()).args(args);
    command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path()).env("FAKE_NVML_MACHINE", file);
    command.env_remove("FAKE_NVML_CONTROL").env_remove("LINKWISE_LOG").env_remove("LINKWISE_MPS_RESOURCE");
    command.env("PATH", path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

/// A daemon that runs.
struct Daemon {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Daemon {
    fn start(node: &Node) -> Self {
        let mut child = command(node, &["--resource", "nvidia.com/gpu=10"]).spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Waits for a line of the log.
    async fn says(&mut self, words: &str) -> String {
        let wait = async {
            loop {
                let line = self.log.next_line().await.unwrap().expect("the log ended");
                if line.contains(words) {
                    return line;
                }
            }
        };
        timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("it does not say '{words}'"))
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

/// Runs a daemon that ends by itself.
async fn refused(node: &Node, args: &[&str]) -> String {
    let Output { status, stderr, .. } = timeout(LIMIT, command(node, args).output()).await.unwrap().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{said}");
    said
}

/// What the plugin calls for on the same machine.
fn wanted() -> Limits {
    let gpus = linkwise::machines::load(MACHINE).unwrap().observed.gpus;
    let gpu = |gpu: linkwise::topology::GpuObservation| linkwise::mps::MpsGpu {
        uuid: gpu.uuid,
        index: gpu.index,
        memory_mib: gpu.memory_mib,
        compute_capability: gpu.compute_capability,
        mig: false,
    };
    let gpus = gpus.into_iter().map(gpu).collect();
    MpsResource { name: ResourceName::gpu(), gpus, replicas: 10, whole_node: true }.limits().unwrap()
}

#[tokio::test]
async fn sigterm_ends_it_in_order() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    let line = daemon.says("its limits hold").await;
    assert!(line.contains("resource=nvidia.com/gpu") && line.contains("threads=10"), "{line}");
    assert_eq!(look(node.layout(), &gpu, &wanted()), Readiness::Ready);
    assert_eq!(node.kept(&gpu, "memory-7"), (wanted().memory[7].mib.unwrap()).to_string());
    let pid = node.pid(&gpu);
    daemon.signal("-TERM");
    daemon.says("the MPS daemon ended").await;
    assert!(timeout(LIMIT, daemon.child.wait()).await.unwrap().unwrap().success());
    assert!(!runs(pid));
    assert!(waiting(&look(node.layout(), &gpu, &wanted())).contains("does not serve"));
}

#[tokio::test]
async fn sighup_starts_the_daemons_anew() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    daemon.says("its limits hold").await;
    let before = node.pid(&gpu);
    daemon.signal("-HUP");
    daemon.says("the MPS daemon ended").await;
    daemon.says("its limits hold").await;
    assert_ne!(node.pid(&gpu), before);
    assert_eq!(look(node.layout(), &gpu, &wanted()), Readiness::Ready);
}

#[tokio::test]
async fn what_a_killed_daemon_left_behind_is_nobodys_word() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    daemon.says("its limits hold").await;
    let orphan = node.pid(&gpu);
    let text = fs::read_to_string(node.layout().marker(&gpu)).unwrap();
    kill(daemon.child.id().unwrap());
    timeout(LIMIT, daemon.child.wait()).await.unwrap().unwrap();
    assert_eq!(fs::read_to_string(node.layout().marker(&gpu)).unwrap(), text);
    assert!(waiting(&look(node.layout(), &gpu, &wanted())).contains("is gone and left"));
    // The control daemon lives on, where its process group was not ended with the container, and gives way.
    assert!(runs(orphan));
    let mut next = Daemon::start(&node);
    next.says("its limits hold").await;
    until(|| !runs(orphan)).await;
    assert_eq!(look(node.layout(), &gpu, &wanted()), Readiness::Ready);
    next.signal("-TERM");
    timeout(LIMIT, next.child.wait()).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_second_daemon_on_a_root_is_refused_and_disturbs_nothing() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    daemon.says("its limits hold").await;
    let said = refused(&node, &["--resource", "nvidia.com/gpu=10"]).await;
    assert!(said.contains("another linkwise mps-control-daemon serves"), "{said}");
    assert_eq!(look(node.layout(), &gpu, &wanted()), Readiness::Ready);
}

#[tokio::test]
async fn what_cannot_work_is_refused_in_one_line() {
    let node = Node::new();
    let said = refused(&node, &["--resource", "nvidia.com/gpu=49"]).await;
    assert!(said.contains("49 replicas of GPU-") && said.contains("takes 48 clients at most"), "{said}");
    let long = format!("{}/gpu=2", ["a".repeat(60), "b".repeat(40)].join("."));
    let said = refused(&node, &["--resource", &long]).await;
    assert!(said.contains("longer than a socket's path may be"), "{said}");
    let said = refused(&node, &["--resource", "nvidia.com/gpu"]).await;
    assert!(said.contains("expected NAME=N"), "{said}");
    for (root, why) in
        [("/nowhere", "no folder /nowhere"), ("/proc/self", "cannot write to the MPS root: /proc/self/.lock")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        let output = command.args(["mps-control-daemon", "--container-root", root]).output().await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
}

/// The marker that stands for a resource is whole at every moment; its folder may not be.
#[test]
fn a_marker_without_a_folder_is_an_error() {
    let node = Node::new();
    let path = node.layout().marker(&ResourceName::gpu());
    assert!(Marker::set(&path, &wanted()).is_err() && Marker::clear(&path).is_ok());
}
