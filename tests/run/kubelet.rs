//! A kubelet that is late, restarts, refuses, hangs or drops its stream; sockets and folders that disappear.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_host::machines;
use linkwise_kubelet::device_plugin::{Phase, Plugin, PluginMetrics, Settings, Sources};
use linkwise_kubelet::readiness::Readiness;
use linkwise_kubelet_box::{Fault, KubeletBox, Pod, Restart};
use linkwise_nvml::supervisor::Idle;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::run::log::Log;
use crate::run::node::{GPU, LIMIT, Node, Setup, allocation, kubelet_in, wait_registered};

const CONNECTED: &str = "linkwise_kubelet_connected{resource=\"nvidia.com/gpu\"}";

fn registrations(outcome: &str) -> String {
    format!("linkwise_registrations_total{{resource=\"nvidia.com/gpu\",outcome=\"{outcome}\"}}")
}

/// The socket of the only resource.
fn socket(node: &Node) -> PathBuf {
    let sockets = node.setup.sockets();
    assert_eq!(sockets.len(), 1, "{sockets:?}");
    sockets[0].clone()
}

/// Waits for the second registration, with one open stream and no violation.
async fn wait_registered_again(node: &Node, kubelet: &KubeletBox) {
    let state = wait_registered(kubelet, 2, 8).await;
    assert_eq!((state.registrations, state.open_streams, kubelet.violations().len()), (2, 1, 0));
    node.metric(&registrations("ok"), 2).await;
    node.metric(CONNECTED, 1).await;
}

#[tokio::test]
async fn kubelet_restart_keeps_pods_devices() {
    for after in [Restart::Kubelet, Restart::Node] {
        let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
        let held = allocation(&kubelet, "pod", GPU, 4).await;
        let first = socket(&node);
        kubelet.restart(after).await.unwrap();
        wait_registered_again(&node, &kubelet).await;
        assert!(socket(&node) != first, "the kubelet may still be connected to this name");
        let in_use = kubelet.state().resources[GPU].in_use();
        assert_eq!(in_use.into_iter().collect::<Vec<_>>(), held.devices);
        assert_eq!(kubelet.restart_container("pod", "main").unwrap()[GPU], held);
        let again = kubelet.admit(&Pod::single("pod", GPU, 4), None).await.unwrap();
        assert!(again.grant("main", GPU).unwrap().reused);
        kubelet.admit(&Pod::single("other", GPU, 4), None).await.unwrap();
        assert_eq!(kubelet.state().resources[GPU].free().len(), 0);
    }
}

#[tokio::test]
async fn deleted_socket_leads_to_registration() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let first = socket(&node);
    std::fs::remove_file(&first).unwrap();
    wait_registered_again(&node, &kubelet).await;
    assert!(socket(&node) != first && !first.exists());
    node.process.said("is gone or was replaced").await;
}

#[tokio::test]
async fn foreign_file_in_our_sockets_place_stays() {
    let (mut node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let first = socket(&node);
    let other = node.setup.at("k/other");
    std::fs::write(&other, "another's").unwrap();
    std::fs::rename(&other, &first).unwrap();
    wait_registered_again(&node, &kubelet).await;
    node.process.end().await;
    assert_eq!(std::fs::read_to_string(&first).unwrap(), "another's");
    assert_eq!(node.setup.sockets(), [first]);
}

#[tokio::test]
async fn late_kubelet_folder_is_found() {
    let node = Setup::on("dgx1-v100").start().await;
    let why = format!("there is no folder {}", node.setup.at("k").display());
    let line = node.process.logged(|line| line["message"] == "waiting for the kubelet").await;
    assert_eq!((line["level"].as_str(), line["why"].as_str()), (Some("WARN"), Some(why.as_str())));
    let answer = node.ready(503, &why).await;
    assert!(answer.body.contains("nvidia.com/gpu: waiting for kubelet.sock"), "{answer:?}");
    assert_eq!(node.get("/livez").await.status, 200);
    let kubelet = node.setup.kubelet();
    wait_registered(&kubelet, 1, 8).await;
    assert_eq!(node.ready(200, "ready").await.body, "ready\n");
    // linkwise follows a folder that is removed and created again, as when an operator cleans up.
    kubelet.stop().await.unwrap();
    node.ready(503, GPU).await;
    assert_eq!(node.get("/livez").await.status, 200);
    std::fs::remove_dir_all(node.setup.at("k")).unwrap();
    node.ready(503, "waiting for kubelet.sock; there is no folder").await;
    let kubelet = node.setup.kubelet();
    wait_registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn failed_bind_names_folder_and_is_retried() {
    let mut setup = Setup::on("dgx1-v100");
    // A socket's path has at most 107 bytes: the kubelet's fits into this folder, ours does not.
    let room = 107 - "/kubelet.sock".len() - setup.at("").to_str().unwrap().len();
    let folder = setup.at(&"f".repeat(room));
    setup.kubelet_socket = folder.join("kubelet.sock");
    let (node, kubelet) = setup.start_beside_kubelet().await;
    let line = node.process.logged(|line| line["message"] == "the session with the kubelet ended").await;
    let cause = format!("cannot bind a socket in {}", folder.display());
    assert!(line["why"].as_str().unwrap().starts_with(&cause), "{line}");
    node.ready(503, &cause).await;
    assert_eq!((node.get("/livez").await.status, kubelet.state().resources.len()), (200, 0));

    // A bind that fails again is retried again.
    let socket = node.setup.kubelet_socket.clone();
    let plugin = InProcessPlugin::start(quick(socket));
    plugin.log.wait_times(3, &[&format!("\"{cause}")]).await;
    plugin.end().await;
}

#[tokio::test]
async fn refused_registration_is_retried() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    kubelet.set_fault(Fault::Refuse { code: Code::ResourceExhausted, message: "not today".into() });
    let node = setup.start().await;
    kubelet.wait(|state| state.refused >= 2).await.unwrap();
    let line = node.process.logged(|line| line["message"] == "cannot register with the kubelet").await;
    assert!(line["error"].as_str().unwrap().contains("refused to register nvidia.com/gpu: not today"), "{line}");
    node.ready(503, "not today").await;
    kubelet.set_fault(Fault::None);
    wait_registered(&kubelet, 1, 8).await;
    node.metric(&registrations("ok"), 1).await;
    node.ready(200, "").await;
}

#[tokio::test]
async fn unanswered_register_is_retried_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = kubelet_in(folder.path(), |_| {});
    kubelet.set_fault(Fault::Hang);
    let register_timeout = Duration::from_millis(50);
    let plugin = InProcessPlugin::start(Settings { register_timeout, ..quick(folder.path().join("kubelet.sock")) });
    let cause = "\"the kubelet did not answer Register within 50ms\"";
    plugin.log.wait(&["cannot register with the kubelet", &format!("error={cause}")]).await;
    plugin.log.wait_times(2, &["repeated", &format!("Registered(Err({cause}))")]).await;
    plugin.end().await;
}

#[tokio::test]
async fn replaced_kubelet_folder_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let first = kubelet_in(at("first"), |_| {});
    std::os::unix::fs::symlink("first", at("k")).unwrap();
    // A plugin that polls every hour depends on inotify in the second folder.
    let poll = Duration::from_secs(3600);
    let mut plugin = InProcessPlugin::start(Settings { poll, ..Settings::new(at("k/kubelet.sock")) });
    wait_registered(&first, 1, 8).await;
    std::fs::create_dir(at("second")).unwrap();
    std::os::unix::fs::symlink("second", at("new")).unwrap();
    std::fs::rename(at("new"), at("k")).unwrap();
    first.stop().await.unwrap();
    plugin.wait_phase(Phase::WaitingForKubelet).await;
    let second = kubelet_in(at("second"), |_| {});
    wait_registered(&second, 1, 8).await;
    plugin.end().await;
}

#[tokio::test]
async fn dropped_stream_leads_to_registration() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    assert!(kubelet.disconnect(GPU));
    wait_registered_again(&node, &kubelet).await;
    node.process.said("ListAndWatch stream is gone").await;
}

/// A plugin that runs in this process on a machine of eight GPUs, and its log.
pub struct InProcessPlugin {
    pub phase: watch::Receiver<Phase>,
    pub log: Log,
    shutdown: CancellationToken,
    running: JoinHandle<()>,
}

/// Settings with short pauses.
pub fn quick(socket: PathBuf) -> Settings {
    Settings { longest_pause: Duration::from_millis(64), ..Settings::new(socket) }
}

impl InProcessPlugin {
    pub fn start(settings: Settings) -> Self {
        let (plugin, log) = (plugin(settings), Log::start());
        let (phase, shutdown) = (plugin.phase(), CancellationToken::new());
        let end = shutdown.clone();
        let running = tokio::spawn(async move { plugin.run(end).await.unwrap() });
        Self { phase, log, shutdown, running }
    }

    pub async fn wait_phase(&mut self, wanted: Phase) {
        timeout(LIMIT, self.phase.wait_for(|phase| *phase == wanted)).await.unwrap().unwrap();
    }

    pub async fn end(self) {
        self.shutdown.cancel();
        timeout(LIMIT, self.running).await.unwrap().unwrap();
    }
}

fn plugin(settings: Settings) -> Plugin {
    let machine = machines::load("dgx1-v100").unwrap();
    let (snapshot, _) = NodeState::default().apply(Event::Observed(Box::new(machine.observed)), Duration::ZERO);
    let sender = watch::Sender::new(Arc::new(snapshot));
    let sources = Sources {
        snapshot: sender.subscribe(),
        metrics: PluginMetrics::register(&mut Registry::default()),
        readiness: Readiness::new(Idle::Waiting(String::new())),
        events: mpsc::channel(1).0,
        // Streams end with this sender: the closure keeps it as long as the plugin lives.
        chosen: Arc::new(move |_, _, _| drop(sender.subscribe())),
        renew: watch::channel(0).1,
    };
    Plugin::new(ResourceName::gpu(), Arc::new(settings), sources)
}

#[tokio::test]
async fn returning_kubelet_ends_the_pause() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join(linkwise_kubelet_box::Options::SOCKET);
    // A kubelet that ended leaves its socket behind.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let longest_pause = Duration::from_secs(64 * 3600);
    let mut plugin = InProcessPlugin::start(Settings { longest_pause, ..Settings::new(socket) });
    // The immediate retry (logged as `Ended`, not `ended`) has failed too: the next pause is half an hour at least.
    plugin.log.wait_times(2, &["nded", "the registration failed: cannot connect"]).await;
    plugin.wait_phase(Phase::Pausing).await;
    let kubelet = kubelet_in(folder.path(), |_| {});
    wait_registered(&kubelet, 1, 8).await;
    plugin.end().await;
}
