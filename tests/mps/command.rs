//! `linkwise mps-control-daemon` as a real process.

use std::fs;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use linkwise::mps::{Limits, Marker, Readiness, look};
use linkwise::state::{MpsGpu, MpsShare, ResourceName};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::node::{LIMIT, Node, kill, runs, until, waiting};

/// A built-in machine of 8 GPUs of 80 GiB.
const MACHINE: &str = "dgx-h100";

/// GPUs in so many replicas, in the NVIDIA plugin's words.
fn sharing(name: &str, replicas: u32) -> String {
    format!("version: v1\nsharing:\n  mps:\n    resources:\n    - name: {name}\n      replicas: {replicas}\n")
}

/// Writes the configuration whole: nobody reads half of it.
fn configure(node: &Node, text: &str) -> PathBuf {
    let (file, new) = (node.layout().root().join("config.yaml"), node.layout().root().join("config.new"));
    fs::write(&new, text).unwrap();
    fs::rename(new, &file).unwrap();
    file
}

fn command(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let file = format!("{}/src/machines/{MACHINE}.yaml", env!("CARGO_MANIFEST_DIR"));
    let path = format!("{}:/usr/bin:/bin", node.bin().display());
    command.args(["mps-control-daemon", "--mps-container-root"]).arg(node.layout().root()).args(args);
    command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path()).env("FAKE_NVML_MACHINE", file);
    command.env_remove("FAKE_NVML_CONTROL").env_remove("LINKWISE_LOG").env_remove("CONFIG_FILE");
    command.arg("--sysfs").arg(node.layout().root()).env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
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
        Self::with(node, &sharing("nvidia.com/gpu", 10))
    }

    fn with(node: &Node, config: &str) -> Self {
        let file = configure(node, config);
        let mut child = command(node, &["--config-file", file.to_str().unwrap()]).spawn().unwrap();
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
fn wanted(replicas: u32) -> Limits {
    let gpus = linkwise::machines::load(MACHINE).unwrap().observed.gpus.into_iter();
    let gpus = gpus.map(|gpu| MpsGpu { uuid: gpu.uuid, index: gpu.index, memory_mib: gpu.memory_mib }).collect();
    Limits::of(&MpsShare { replicas, gpus, whole_node: true })
}

#[tokio::test]
async fn sigterm_ends_it_in_order() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    let line = daemon.says("its limits hold").await;
    assert!(line.contains("resource=nvidia.com/gpu") && line.contains("threads=10"), "{line}");
    assert_eq!(look(node.layout(), &gpu, &wanted(10)), Readiness::Ready);
    assert_eq!(node.kept(&gpu, "memory-7"), (wanted(10).memory[7].mib.unwrap()).to_string());
    let pid = node.pid(&gpu);
    daemon.signal("-TERM");
    daemon.says("the MPS daemon ended").await;
    assert!(timeout(LIMIT, daemon.child.wait()).await.unwrap().unwrap().success());
    assert!(!runs(pid));
    assert!(waiting(&look(node.layout(), &gpu, &wanted(10))).contains("does not serve"));
}

#[tokio::test]
async fn other_replicas_are_other_limits_and_the_same_ones_end_nothing() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    daemon.says("its limits hold").await;
    let before = node.pid(&gpu);
    daemon.signal("-HUP");
    daemon.says("configuration reloaded, unchanged").await;
    // Of no matter for MPS.
    configure(&node, &(sharing("nvidia.com/gpu", 10) + "linkwise: {numaHints: off}\n"));
    daemon.says("configuration applied").await;
    assert_eq!((node.pid(&gpu), look(node.layout(), &gpu, &wanted(10))), (before, Readiness::Ready));
    configure(&node, &sharing("nvidia.com/gpu", 4));
    daemon.says("the MPS daemon ended").await;
    let line = daemon.says("its limits hold").await;
    assert!(line.contains("threads=25"), "{line}");
    assert_ne!(node.pid(&gpu), before);
    assert_eq!(look(node.layout(), &gpu, &wanted(4)), Readiness::Ready);
    assert!(waiting(&look(node.layout(), &gpu, &wanted(10))).contains("other limits"));
    // A file that is wrong changes nothing; one that shares nothing ends the daemon.
    let serving = node.pid(&gpu);
    configure(&node, &sharing("nvidia.com/gpu", 1));
    daemon.says("configuration rejected, keeping the previous one").await;
    assert!(runs(serving));
    configure(&node, "version: v1\n");
    daemon.says("the MPS daemon ended").await;
    until(|| !runs(serving)).await;
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
    assert!(waiting(&look(node.layout(), &gpu, &wanted(10))).contains("is gone and left"));
    // The control daemon lives on, where its process group was not ended with the container, and gives way.
    assert!(runs(orphan));
    let mut next = Daemon::start(&node);
    next.says("its limits hold").await;
    until(|| !runs(orphan)).await;
    assert_eq!(look(node.layout(), &gpu, &wanted(10)), Readiness::Ready);
    next.signal("-TERM");
    timeout(LIMIT, next.child.wait()).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_second_daemon_on_a_root_is_refused_and_disturbs_nothing() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start(&node);
    daemon.says("its limits hold").await;
    let said = refused(&node, &[]).await;
    assert!(said.contains("another linkwise mps-control-daemon serves"), "{said}");
    assert_eq!(look(node.layout(), &gpu, &wanted(10)), Readiness::Ready);
}

#[tokio::test]
async fn what_mps_cannot_do_is_named() {
    let node = Node::new();
    let mut daemon = Daemon::with(&node, &sharing("nvidia.com/gpu", 49));
    let line = daemon.says("49 replicas").await;
    assert!(line.contains("the MPS server of GPU 0000:1b:00.0 takes 48 clients at most"), "{line}");
    daemon.says("nothing to do but to wait").await;
    let long = ["a".repeat(60), "b".repeat(40)].join(".");
    let naming = format!(
        "linkwise: {{naming: true}}\nresources:\n  gpus: [{{pattern: '*', name: {long}/gpu}}]\n{}",
        sharing(&format!("{long}/gpu"), 2)
    );
    configure(&node, &naming);
    daemon.says("longer than a socket's path may be").await;
}

#[tokio::test]
async fn it_does_not_start_where_it_could_not_work() {
    let node = Node::new();
    let file = configure(&node, &sharing("nvidia.com/gpu", 1));
    let said = refused(&node, &["--config-file", file.to_str().unwrap()]).await;
    assert!(said.contains("config.yaml: line 6: sharing.mps.resources[0].replicas"), "{said}");
    for (root, why) in
        [("/nowhere", "no folder /nowhere"), ("/proc/self", "cannot write to the MPS root: /proc/self/.lock")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        let output = command.args(["mps-control-daemon", "--mps-container-root", root]).output().await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
}

/// The marker that stands for a resource is whole at every moment; its folder may not be.
#[test]
fn a_marker_without_a_folder_is_an_error() {
    let node = Node::new();
    let path = node.layout().marker(&ResourceName::gpu());
    assert!(Marker::set(&path, &wanted(10)).is_err() && Marker::clear(&path).is_ok());
}
