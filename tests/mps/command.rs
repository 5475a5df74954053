//! Tests of `linkwise mps-control-daemon` as a real process.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use linkwise_core::state::{MpsGpu, MpsShare, ResourceName};
use linkwise_host::mps::{Limits, Marker, Orders, readiness};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::cluster::support::until;
use crate::mps::node::{Node, pid_in, runs, why_not_ready};
use crate::run::node::{LIMIT, signal, started_by};

/// A built-in machine with eight GPUs of 80 GB.
pub const MACHINE: &str = "dgx-h100";

/// Orders this number of replicas of `nvidia.com/gpu`, as the plugin does; `None` orders nothing.
pub fn order(node: &Node, replicas: Option<u32>) {
    let resources = replicas.map(|replicas| (ResourceName::gpu(), wanted(replicas))).into_iter().collect();
    Orders { resources, ..Orders::default() }.write(node.layout()).unwrap();
}

fn command(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let path = format!("{}:/usr/bin:/bin", node.bin().display());
    command.args(["mps-control-daemon", "--mps-container-root"]).arg(node.layout().root()).args(args);
    // The GPU operator sets CONFIG_FILE for the daemon too, although only the plugin reads the file.
    command.env_remove("LINKWISE_LOG").env("CONFIG_FILE", "/nowhere");
    command.env("PATH", path).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// A running `linkwise mps-control-daemon`.
pub struct Daemon {
    pub child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Daemon {
    /// Starts the process with an order for ten replicas.
    fn start_shared(node: &Node) -> Self {
        order(node, Some(10));
        Self::start(node)
    }

    pub fn start(node: &Node) -> Self {
        Self::with_args(node, &[])
    }

    /// Starts the process in a mount namespace whose mounts the host does not see.
    pub fn in_a_container_without_propagation(node: &Node) -> Self {
        Self::of(started_by(&["unshare", "--mount", "--propagation", "private"], &command(node, &[])))
    }

    fn with_args(node: &Node, args: &[&str]) -> Self {
        Self::of(command(node, args))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Waits for a line of the log with this text.
    pub async fn logged(&mut self, text: &str) -> String {
        let wait = async {
            loop {
                let line = self.log.next_line().await.unwrap().expect("the process still runs");
                if line.contains(text) {
                    return line;
                }
            }
        };
        timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("no log line '{text}'"))
    }

    /// Kills the process, and waits for its end.
    pub async fn kill(&mut self) {
        signal("KILL", self.child.id().unwrap());
        timeout(LIMIT, self.child.wait()).await.unwrap().unwrap();
    }

    /// Ends the process by SIGTERM, and waits for its end.
    async fn end(&mut self) {
        self.signal("-TERM");
        self.logged("MPS daemon ended").await;
        assert!(timeout(LIMIT, self.child.wait()).await.unwrap().unwrap().success());
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

/// Runs a process that has to fail; returns its log.
async fn refused(node: &Node, args: &[&str]) -> String {
    let Output { status, stderr, .. } = timeout(LIMIT, command(node, args).output()).await.unwrap().unwrap();
    let log = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{log}");
    log
}

/// The limits that the plugin expects on [`MACHINE`].
pub fn wanted(replicas: u32) -> Limits {
    let gpus = linkwise_host::machines::load(MACHINE).unwrap().observed.gpus.into_iter();
    let gpus = gpus.map(|gpu| MpsGpu { uuid: gpu.uuid, index: gpu.index, memory_mib: gpu.memory_mib }).collect();
    Limits::of(&MpsShare { replicas, gpus, whole_node: true })
}

/// The UUIDs of the machine's GPUs, sorted.
fn gpus() -> Vec<String> {
    let mut gpus: Vec<String> = wanted(1).gpus().map(ToString::to_string).collect();
    gpus.sort_unstable();
    gpus
}

#[tokio::test]
async fn mps_removed_after_a_kill_restores_compute_mode() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start_shared(&node);
    daemon.logged("limits confirmed").await;
    let (orphan, marker) = (node.pid(&gpu), node.layout().marker(&gpu));
    let text = fs::read_to_string(&marker).unwrap();
    daemon.kill().await;
    // The control daemon survives, because its process group was not killed. The next process replaces it.
    assert_eq!((fs::read_to_string(marker).unwrap(), runs(orphan)), (text, true));
    assert!(why_not_ready(readiness(node.layout(), &gpu, &wanted(10))).contains("is gone and left"));
    assert_eq!((node.modes("DEFAULT"), node.exclusive()), (vec![], gpus()));
    // GPUs that are still shared stay exclusive.
    let mut daemon = Daemon::start_shared(&node);
    daemon.logged("limits confirmed").await;
    until(|| !runs(orphan)).await;
    assert_eq!(readiness(node.layout(), &gpu, &wanted(10)), Ok(()));
    assert_eq!((node.modes("DEFAULT"), node.exclusive()), (vec![], gpus()));
    daemon.kill().await;
    order(&node, None);
    let mut daemon = Daemon::start(&node);
    daemon.logged("linkwise orders no MPS daemon on this node").await;
    until(|| node.exclusive().is_empty()).await;
    assert_eq!(node.modes("DEFAULT"), gpus());
}

/// The children of a process, zombies included.
fn children(parent: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten();
    let lists = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[tokio::test]
async fn init_process_reaps_orphaned_mps_servers() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    order(&node, Some(10));
    let mut daemon = Daemon::with_args(&node, &["--init"]);
    let init = daemon.child.id().unwrap();
    for _ in 0..2 {
        daemon.logged("limits confirmed").await;
        let server = pid_in(&node.layout().pipe(&gpu).join("state/server"));
        signal("KILL", node.pid(&gpu));
        daemon.logged("MPS daemon failed").await;
        // The server lost its parent, was killed with its group, and left no zombie.
        until(|| !Path::new(&format!("/proc/{server}")).exists()).await;
    }
    until(|| children(init).len() == 1).await;
    daemon.logged("limits confirmed").await;
    let control = node.pid(&gpu);
    daemon.end().await;
    assert!(!runs(control));
}

#[tokio::test]
async fn second_process_on_an_mps_root_is_refused() {
    let (node, gpu) = (Node::new(), ResourceName::gpu());
    let mut daemon = Daemon::start_shared(&node);
    daemon.logged("limits confirmed").await;
    // With --init, the parent ends with its child's exit code.
    for args in [&[][..], &["--init"]] {
        let log = refused(&node, args).await;
        assert_eq!(log.matches("another linkwise mps-control-daemon serves").count(), 1, "reported once: {log}");
    }
    assert_eq!(readiness(node.layout(), &gpu, &wanted(10)), Ok(()));
}

#[tokio::test]
async fn start_without_a_usable_root_fails() {
    for (root, why) in
        [("/nowhere", "no folder /nowhere"), ("/proc/self", "cannot write to the MPS root: /proc/self/.lock")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        let output = command.args(["mps-control-daemon", "--mps-container-root", root]).output().await.unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && log.contains(why), "{log}");
    }
}

#[test]
fn marker_without_a_folder_is_an_error() {
    let node = Node::new();
    let path = node.layout().marker(&ResourceName::gpu());
    assert!(Marker::set(&path, &wanted(10)).is_err());
}
