//! config-manager as a process, called by the name that NVIDIA's chart gives it.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use linkwise_api_server_box::{Answer, Fault};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::cluster::support::{Cluster, config_map, until, within};
use crate::run::node::{Process, get};

/// The default of NODE_LABEL.
const LABEL: &str = "nvidia.com/device-plugin.config";

/// A node with an API server, a mounted ConfigMap and the folder of the link that config-manager writes.
struct Node {
    cluster: Cluster,
    folder: tempfile::TempDir,
}

impl Node {
    async fn start(files: &[(&str, &str)]) -> Self {
        let (cluster, folder) = (Cluster::start().await, tempfile::tempdir().unwrap());
        fs::create_dir(folder.path().join("config")).unwrap();
        symlink(env!("CARGO_BIN_EXE_linkwise"), folder.path().join("config-manager")).unwrap();
        config_map(&folder.path().join("available-configs"), files);
        Self { cluster, folder }
    }

    fn label(&self, value: &str) {
        self.cluster.label_node("n", json!({ LABEL: value }));
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn destination(&self) -> PathBuf {
        self.at("config/config.yaml")
    }

    /// The configuration to which the link leads.
    fn text(&self) -> Option<String> {
        fs::read_to_string(self.destination()).ok()
    }

    async fn wait_text(&self, text: &str) {
        until(|| self.text().as_deref() == Some(text)).await;
    }

    /// Starts config-manager with the chart's environment, overridden by `variables`.
    fn run(&self, variables: &[(&str, &str)]) -> Process {
        let mut command = Command::new(self.at("config-manager"));
        command.arg0("config-manager").env_clear().envs(self.cluster.variables());
        let empty = ["KUBECONFIG", "DEFAULT_CONFIG", "SIGNAL", "PROCESS_TO_SIGNAL"].map(|name| (name, ""));
        let set = [("ONESHOT", "false"), ("NODE_NAME", "n"), ("NODE_LABEL", LABEL), ("SEND_SIGNAL", "false")];
        command.envs(empty).envs(set).env("FALLBACK_STRATEGIES", "named,single");
        command.env("CONFIG_FILE_SRCDIR", self.at("available-configs")).env("CONFIG_FILE_DST", self.destination());
        command.envs(variables.iter().copied()).args(["--api-pause-ms", "5", "--keep-after-ms", "200"]);
        command.kill_on_drop(true);
        Process::of(command)
    }

    /// Starts config-manager and waits for its end; returns its status and its log.
    async fn run_to_end(&self, variables: &[(&str, &str)]) -> (ExitStatus, String) {
        let (status, log) = self.run(variables).ended().await;
        (status, log.join("\n"))
    }
}

async fn wait_log(process: &Process, text: &str) -> String {
    let line = process.logged(|line| line.as_str().is_some_and(|line| line.contains(text))).await;
    line.as_str().unwrap().to_owned()
}

/// Ends a process as the kubelet does; returns its log.
async fn terminate(mut process: Process) -> String {
    process.signal("TERM");
    let (status, log) = process.ended().await;
    assert!(status.success(), "{status}: {log:?}");
    log.join("\n")
}

/// A process that prints a line for each SIGUSR1. SIGHUP would not do: under `nohup` it is ignored, and a shell cannot
/// trap a signal that its parent ignores.
struct Neighbour {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Neighbour {
    async fn start(name: &str) -> Self {
        // The script forks nothing, because a forked shell would have its name too until it executes another program.
        let script = "trap 'echo signalled' USR1; echo ready; while :; do read -r line; done";
        let mut command = Command::new("sh");
        command.arg0(name).args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(within(lines.next_line()).await.unwrap().as_deref(), Some("ready"));
        Self { _child: child, lines }
    }

    async fn wait_signal(&mut self) {
        assert_eq!(within(self.lines.next_line()).await.unwrap().as_deref(), Some("signalled"));
    }
}

#[tokio::test]
async fn sidecar_follows_the_label_and_sends_signals() {
    let node = Node::start(&[("a", "a: 1"), ("b", "b: 1")]).await;
    node.label("a");
    let name = format!("neighbour-of-{}", std::process::id());
    let mut neighbour = Neighbour::start(&name).await;
    let process = node.run(&[("SEND_SIGNAL", "true"), ("SIGNAL", "10"), ("PROCESS_TO_SIGNAL", &name)]);
    node.wait_text("a: 1").await;
    neighbour.wait_signal().await;
    node.label("b");
    node.wait_text("b: 1").await;
    neighbour.wait_signal().await;
    wait_log(&process, "configuration=\"b\"").await;
    wait_log(&process, "signal sent").await;
    // A reader sees a change of the ConfigMap through the link, so config-manager sends no signal.
    fs::write(node.at("available-configs/b"), "b: 2").unwrap();
    node.wait_text("b: 2").await;
    let log = terminate(process).await;
    assert!(log.contains("ending"), "{log}");
    assert_eq!(log.matches("signal sent").count(), 2, "{log}");
    assert!(node.destination().is_symlink());
}

#[tokio::test]
async fn unknown_label_keeps_the_previous_configuration() {
    let node = Node::start(&[("a", "a: 1"), ("b", "b: 1")]).await;
    node.label("a");
    let process = node.run(&[]);
    node.wait_text("a: 1").await;
    node.label("missing");
    let line = wait_log(&process, "no configuration selected, keeping the previous one").await;
    assert!(line.contains("the node's label names 'missing', but the folder has 'a', 'b'"), "{line}");
    assert_eq!(node.text().as_deref(), Some("a: 1"));
    // Once the ConfigMap has a file of this name, it is selected although the label does not change.
    fs::write(node.at("available-configs/missing"), "m: 1").unwrap();
    node.wait_text("m: 1").await;
    fs::remove_file(node.at("available-configs/missing")).unwrap();
    until(|| process.lines().iter().filter(|line| line.contains("the folder has 'a', 'b'")).count() == 2).await;
    node.label("b");
    node.wait_text("b: 1").await;
    let log = terminate(process).await;
    assert_eq!(log.matches("keeping the previous one").count(), 2, "{log}");
}

#[tokio::test]
async fn oneshot_without_configuration_fails_with_reason() {
    let node = Node::start(&[("a", "a: 1"), ("b", "b: 1")]).await;
    node.label("missing");
    let (status, log) = node.run_to_end(&[("ONESHOT", "true")]).await;
    assert_eq!((status.code(), status.signal()), (Some(1), None));
    assert!(log.contains("the node's label names 'missing', but the folder has 'a', 'b'"), "{log}");
    assert_eq!(node.text(), None);
    node.cluster.label_node("n", json!({}));
    let (status, log) = node.run_to_end(&[("ONESHOT", "true")]).await;
    assert!(!status.success() && log.contains("no fallback applies; the folder has 'a', 'b'"), "{log}");
}

#[tokio::test]
async fn oneshot_that_cannot_select_keeps_configuration() {
    let node = Node::start(&[("a", "a: 1")]).await;
    fs::write(node.destination(), "kept: 1").unwrap();
    node.label("missing");
    let (status, log) = node.run_to_end(&[("ONESHOT", "true")]).await;
    assert!(status.success() && log.contains("keeping the previous one"), "{log}");
    let unavailable = Answer::Refusal(503, "not ready", None);
    node.cluster.server.fail(Fault::of("GET", "", usize::MAX, unavailable));
    let (status, log) = node.run_to_end(&[("ONESHOT", "true")]).await;
    assert!(status.success() && log.contains("node not read in time, keeping the configuration in place"), "{log}");
    assert_eq!(node.text().as_deref(), Some("kept: 1"));
}

#[tokio::test]
async fn server_outage_is_logged_once_and_retried() {
    let node = Node::start(&[("a", "a: 1"), ("b", "b: 1")]).await;
    node.label("a");
    let process = node.run(&[]);
    node.wait_text("a: 1").await;
    node.cluster.server.wait_for_watches(1).await;
    node.cluster.server.go_away().await;
    wait_log(&process, "API server request failed, trying again").await;
    node.label("b");
    node.cluster.server.come_back().await;
    wait_log(&process, "API server answers again").await;
    node.wait_text("b: 1").await;
    let log = terminate(process).await;
    assert_eq!(log.matches("unreachable").count(), 1, "{log}");
}

#[tokio::test]
async fn forbidden_list_is_named_in_the_log() {
    let node = Node::start(&[("a", "a: 1")]).await;
    node.label("a");
    let forbidden = Answer::Refusal(403, "nodes is forbidden: User \"x\" cannot list resource \"nodes\"", None);
    node.cluster.server.fail(Fault::of("GET", "nodes?", 3, forbidden));
    let process = node.run(&[]);
    let line = wait_log(&process, "API server request failed, trying again").await;
    assert!(line.contains("403") && line.contains("cannot list resource"), "{line}");
    node.wait_text("a: 1").await;
    let log = terminate(process).await;
    assert_eq!(log.matches("API server request failed").count(), 1, "{log}");
}

#[tokio::test]
async fn missing_process_to_signal_is_logged() {
    let node = Node::start(&[("a", "a: 1")]).await;
    node.label("a");
    let process = node.run(&[("SEND_SIGNAL", "true"), ("PROCESS_TO_SIGNAL", "no-such-neighbour")]);
    wait_log(&process, "no such process to signal").await;
    assert_eq!(node.text().as_deref(), Some("a: 1"));
    terminate(process).await;
}

#[tokio::test]
async fn kubeconfig_is_used_if_given() {
    let node = Node::start(&[("a", "a: 1")]).await;
    node.label("a");
    let kubeconfig = node.at("kubeconfig");
    let ca = node.cluster.folder().join("ca.crt");
    let cluster = json!({"server": node.cluster.server.url(), "certificate-authority": ca});
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "box", "user": "me"}}],
        "clusters": [{"name": "box", "cluster": cluster}], "users": [{"name": "me", "user": {"token": "first"}}],
    });
    fs::write(&kubeconfig, config.to_string()).unwrap();
    let variables =
        [("ONESHOT", "true"), ("KUBECONFIG", kubeconfig.to_str().unwrap()), ("KUBERNETES_SERVICE_HOST", "")];
    let (status, log) = node.run_to_end(&variables).await;
    assert!(status.success() && node.text().as_deref() == Some("a: 1"), "{log}");
}

#[tokio::test]
async fn missing_option_or_access_is_named() {
    let node = Node::start(&[("a", "a: 1")]).await;
    for (variable, problem) in [
        ("NODE_NAME", "--node-name (NODE_NAME) must not be empty"),
        ("CONFIG_FILE_DST", "--config-file-dst (CONFIG_FILE_DST) must not be empty"),
        ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_HOST is not set"),
    ] {
        let (status, log) = node.run_to_end(&[(variable, "")]).await;
        assert!(status.code() == Some(1) && log.contains(problem), "{variable}: {log}");
    }
}

#[tokio::test]
async fn probes_and_metrics_show_the_selection() {
    let node = Node::start(&[("a", "a: 1")]).await;
    node.label("a");
    let process = node.run(&[("LINKWISE_CONFIG_MANAGER_METRICS_ADDRESS", "127.0.0.1:0")]);
    let line = wait_log(&process, "config-manager is up").await;
    let address = line.rsplit_once("metrics=").unwrap().1.parse().unwrap();
    node.wait_text("a: 1").await;
    wait_log(&process, "configuration selected").await;
    while get(address, "/readyz").await.status != 200 {}
    let metrics = get(address, "/metrics").await.body;
    for series in
        ["linkwise_config_selected 1", "linkwise_api_requests_total{object=\"nodes\",verb=\"list\",outcome=\"ok\"} 1"]
    {
        assert!(metrics.contains(series), "{metrics}");
    }
    terminate(process).await;
}
