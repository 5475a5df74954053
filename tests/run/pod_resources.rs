//! PodResources: it confirms registrations, and lists which pods hold which devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise_core::state::{Event, Holdings, ResourceName};
use linkwise_host::machines;
use linkwise_kubelet::device_plugin::pod_resources::{self, HolderSources, Holders};
use linkwise_kubelet::device_plugin::{Phase, Settings};
use linkwise_kubelet_box::Fault;
use linkwise_node::node::{Node, NodeSettings};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::run::kubelet::InProcessPlugin;
use crate::run::node::{GPU, LIMIT, Setup, kubelet_in, place, uuid, wait_registered};

#[tokio::test]
async fn forgotten_registration_is_made_again() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    kubelet.set_fault(Fault::Forget);
    let node = setup.start().await;
    // The stream is open, and yet no pod could get a GPU.
    kubelet.wait(|state| state.resources[GPU].open_streams == 1).await.unwrap();
    node.ready(503, "waiting for PodResources to list our devices").await;
    kubelet.set_fault(Fault::None);
    // The kubelet has forgotten the registration, so that only a new one helps.
    wait_registered(&kubelet, 2, 8).await;
    node.process.said("PodResources has not listed our devices").await;
    node.ready(200, "").await;
}

#[tokio::test]
async fn stream_confirms_without_pod_resources() {
    // No socket; a file that is not a socket; a socket that never answers.
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "").unwrap();
    let _silent = UnixListener::bind(at("silent")).unwrap();
    for socket in ["missing", "file", "silent"] {
        let dir = at(&format!("k-{socket}"));
        let kubelet = kubelet_in(&dir, |_| {});
        let settings = Settings { pod_resources_socket: Some(at(socket)), ..Settings::new(dir.join("kubelet.sock")) };
        let mut plugin = InProcessPlugin::start(settings);
        plugin.wait_phase(Phase::Serving).await;
        assert_eq!(kubelet.state().resources[GPU].registrations, 1, "{socket}");
        plugin.end().await;
    }
}

#[tokio::test]
async fn resource_of_unhealthy_devices_is_confirmed() {
    let setup = Setup::with(&crate::run::node::machine(&[("GPU-a", "0000:01:00.0", "")]));
    let (node, kubelet) = setup.serve(1).await;
    node.setup.tell("xid 0 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    kubelet.restart(linkwise_kubelet_box::Restart::Kubelet).await.unwrap();
    // PodResources lists only healthy devices, none of ours.
    kubelet.wait(|state| state.resources[GPU].registrations == 2 && state.resources[GPU].connected).await.unwrap();
    node.ready(200, "").await;
}

#[tokio::test]
async fn holders_are_known_only_with_pod_resources() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p/kubelet.sock");
    let sources = HolderSources { socket: socket.clone(), folder: folder.path().join("k") };
    assert_eq!(pod_resources::holders(&sources).await, Holders::default());
    let kubelet = kubelet_in(folder.path().join("k"), |options| options.pod_resources = Some(socket.clone()));
    assert_eq!(pod_resources::holders(&sources).await.held, Some(Holdings::default()));
    kubelet.hold(place("earlier", GPU), [uuid(1, 2), "GPU-gone".to_owned()]);
    kubelet.hold(place("earlier", "other.vendor/nic"), ["nic0".to_owned()]);
    let settings =
        Settings { pod_resources_socket: Some(socket), ..Settings::new(folder.path().join("k/kubelet.sock")) };
    let node = Node::start(NodeSettings::new(settings)).await.unwrap();
    let (mut snapshots, shutdown, events) = (node.snapshot(), node.shutdown(), node.events());
    assert!(!snapshots.borrow().ledger().is_known(), "holders are known before the kubelet was asked");
    let running = tokio::spawn(node.serve());
    let observed = machines::load("dgx1-v100").unwrap().observed;
    events.send(Event::Observed(Box::new(observed))).await.unwrap();
    let known = timeout(LIMIT, snapshots.wait_for(|state| state.ledger().is_known())).await.unwrap().unwrap().clone();
    // Held devices are known even if no plugin of ours lists them.
    let gpu = |id: &str| (ResourceName::gpu(), id.to_owned());
    let named: Vec<(ResourceName, String)> =
        known.ledger().devices().map(|(name, id)| (name.clone(), id.to_string())).collect();
    assert!(named.contains(&gpu("GPU-gone")) && named.contains(&gpu(&uuid(1, 2))), "{named:?}");
    assert!(named.contains(&("other.vendor/nic".parse().unwrap(), "nic0".to_owned())) && named.len() == 3);
    shutdown.cancel();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn holders_are_unknown_once_the_kubelet_stops() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p/kubelet.sock");
    let kubelet = kubelet_in(folder.path().join("k"), |options| options.pod_resources = Some(socket.clone()));
    let (sender, mut holders) = watch::channel(Holders::default());
    let (set_often, often) = watch::channel(false);
    let shutdown = CancellationToken::new();
    let sources = HolderSources { socket, folder: folder.path().join("k") };
    let following = pod_resources::follow_holders(&sources, sender, often, Arc::default(), shutdown.clone());
    let seen = async {
        timeout(LIMIT, holders.wait_for(|now| now.held.is_some())).await.unwrap().unwrap();
        kubelet.stop().await.unwrap();
        set_often.send_replace(true);
        timeout(LIMIT, holders.wait_for(|now| now.held.is_none())).await.unwrap().unwrap();
        shutdown.cancel();
    };
    tokio::join!(following, seen);
}

#[tokio::test]
async fn reading_page_and_metrics_asks_the_kubelet_nothing() {
    /// Longer than the shortest pause between two requests.
    const QUIET: Duration = Duration::from_millis(1500);
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    // Waits until linkwise is at rest, when it asks the kubelet only every half minute.
    let mut before = 0;
    while std::mem::replace(&mut before, kubelet.lists()) != kubelet.lists() {
        tokio::time::sleep(QUIET).await;
    }
    let begin = Instant::now();
    while begin.elapsed() < 2 * QUIET {
        for path in ["/", "/metrics"] {
            assert_eq!(node.get(path).await.status, 200);
        }
    }
    let asked = kubelet.lists() - before;
    assert!(asked <= 1, "{asked} requests in {:?}", 2 * QUIET);
}
