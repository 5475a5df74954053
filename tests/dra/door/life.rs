//! Registration with the kubelet, restarts of either side, and sockets.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use linkwise_core::state::{NodeState, NumaHints};
use linkwise_kubelet::dra::Phase;
use linkwise_kubelet_box::dra::{DraKubelet, DraState};
use linkwise_system::uds::Callers;
use tokio::time::timeout;

use super::node::{DRIVER, Node, TEST_TIMEOUT, end, file_names, start, wait_connected, yield_times};

fn registrations(state: &DraState) -> u64 {
    state.drivers.get(DRIVER).map_or(0, |driver| driver.registrations)
}

#[tokio::test]
async fn plugin_registers_after_gpus_and_a_scan() {
    let mut node = Node::new();
    let state = node.state.send_replace(Arc::new(NodeState::new(NumaHints::default())));
    node.cdi.send_replace(None);
    node.start();
    let kubelet = DraKubelet::start(node.kubelet_options()).unwrap();
    node.wait_phase(Phase::WaitingForGpus).await;
    assert_eq!(file_names(&node.settings.registry), [""; 0]);
    node.state.send_replace(state);
    // Without a scan the plugin does not bind, even after its task has run.
    yield_times(1000).await;
    assert_eq!(file_names(&node.settings.registry), [""; 0]);
    node.scan();
    wait_connected(&kubelet).await;
    node.wait_phase(Phase::Registered).await;
    node.stop().await;
    let left = [&node.settings.registry, &node.settings.plugins.join(DRIVER)].map(|folder| file_names(folder)).concat();
    assert_eq!(left, [""; 0], "a socket is left");
    kubelet.wait(|state| state.drivers[DRIVER].endpoints.is_empty()).await.unwrap();
}

#[tokio::test]
async fn kubelet_that_restarts_registers_the_plugin_again() {
    let (node, kubelet) = Node::serving().await;
    let sockets = file_names(&node.settings.registry);
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let devices = start(&kubelet, &claim).await.unwrap();
    kubelet.stop().await;
    node.wait_phase(Phase::Disconnected).await;
    kubelet.start_again().unwrap();
    assert!(!kubelet.state().claims["a"].prepared);
    wait_connected(&kubelet).await;
    assert_eq!((registrations(&kubelet.state()), file_names(&node.settings.registry)), (2, sockets));
    assert_eq!(start(&kubelet, &claim).await.unwrap(), devices);
    end(&kubelet, &claim).await;
}

#[tokio::test]
async fn deleted_sockets_are_bound_again() {
    let (node, kubelet) = Node::serving().await;
    for (number, folder) in [&node.settings.registry, &node.settings.plugins.join(DRIVER)].into_iter().enumerate() {
        let [name] = file_names(folder).try_into().unwrap();
        fs::remove_file(folder.join(name)).unwrap();
        let expected = u64::try_from(number).unwrap() + 2;
        let again = |state: &DraState| registrations(state) == expected && state.drivers[DRIVER].connected == 1;
        kubelet.wait(again).await.unwrap();
    }
    node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
}

#[tokio::test]
async fn plugin_with_a_silent_socket_does_not_answer() {
    let mut node = Node::new();
    // With these settings the plugin does not notice that another socket replaces its own.
    (node.settings.inotify, node.settings.poll) = (false, TEST_TIMEOUT);
    let plugin = node.start();
    let _kubelet = node.kubelet().await;
    assert!(plugin.answers().await);
    let socket = node.settings.registry.join(file_names(&node.settings.registry).remove(0));
    fs::remove_file(&socket).unwrap();
    let _silent = UnixListener::bind(socket).unwrap();
    assert!(!timeout(TEST_TIMEOUT, plugin.answers()).await.unwrap());
}

#[tokio::test]
async fn registry_folder_created_later_is_found() {
    let mut node = Node::new();
    fs::remove_dir(&node.settings.registry).unwrap();
    node.settings.poll = std::time::Duration::from_millis(5);
    node.start();
    node.log.wait(&["waiting for the kubelet", "there is no folder"]).await;
    node.kubelet().await;
}

#[tokio::test]
async fn refused_registration_is_logged_and_retried() {
    let mut node = Node::new();
    let kubelet = DraKubelet::start(node.kubelet_options()).unwrap();
    kubelet.refuse(Some("no\nplugins today"));
    node.start();
    node.log.wait(&["cannot register with the kubelet", "error=\"no plugins today\""]).await;
    kubelet.refuse(None);
    wait_connected(&kubelet).await;
    node.wait_phase(Phase::Registered).await;
}

#[tokio::test]
async fn only_sockets_of_dead_predecessors_are_removed() {
    let mut node = Node::new();
    let services = node.settings.plugins.join(DRIVER);
    fs::create_dir_all(&services).unwrap();
    let at = |name: &str| -> PathBuf { node.settings.registry.join(name) };
    let dead = [at("linkwise-00000001@gpu.nvidia.com-reg.sock"), services.join("linkwise-00000001.sock")];
    dead.iter().for_each(|path| drop(UnixListener::bind(path).unwrap()));
    let _alive = UnixListener::bind(at("linkwise-00000002@gpu.nvidia.com-reg.sock")).unwrap();
    drop(UnixListener::bind(at("gpu.nvidia.com-reg.sock")).unwrap());
    node.start();
    node.wait_phase(Phase::Offered).await;
    assert!(dead.iter().all(|path| !path.exists()));
    let kept = file_names(&node.settings.registry);
    assert_eq!(kept.len(), 3, "{kept:?}");
    assert!(kept.contains(&"gpu.nvidia.com-reg.sock".to_owned()), "{kept:?}: another driver's socket is gone");
    assert!(kept.contains(&"linkwise-00000002@gpu.nvidia.com-reg.sock".to_owned()), "{kept:?}: a live socket is gone");
}

#[tokio::test]
async fn callers_of_another_user_are_refused() {
    let mut node = Node::new();
    node.settings.callers = Callers::only(u32::MAX);
    node.start();
    let kubelet = DraKubelet::start(node.kubelet_options()).unwrap();
    node.log.wait(&["refused a caller"]).await;
    assert_eq!(registrations(&kubelet.state()), 0);
}

#[tokio::test]
async fn kubelet_deletes_slices_of_a_driver_that_stays_away() {
    let mut node = Node::new();
    node.start();
    let mut options = node.kubelet_options();
    options.wipe_after = std::time::Duration::from_millis(1);
    let (wiped, mut wipes) = tokio::sync::mpsc::channel(64);
    options.wipe = Some(Arc::new(move |driver| drop(wiped.try_send(driver.map(str::to_owned)))));
    let kubelet = DraKubelet::start(options).unwrap();
    assert_eq!(wipes.recv().await, Some(None), "the start of a kubelet did not delete all drivers' slices");
    wait_connected(&kubelet).await;
    let before = kubelet.state().drivers[DRIVER].wiped;
    node.stop().await;
    kubelet.wait(|state| state.drivers[DRIVER].wiped > before).await.unwrap();
    assert_eq!(wipes.recv().await, Some(Some(DRIVER.to_owned())));
    node.start();
    wait_connected(&kubelet).await;
}

#[tokio::test]
async fn sockets_are_bound_again_if_no_kubelet_registers() {
    let mut node = Node::new();
    // This is long enough for a kubelet on a busy machine.
    node.settings.offer_timeout = std::time::Duration::from_millis(500);
    node.start();
    node.log.wait(&["waiting for the kubelet", "has not registered the plugin"]).await;
    node.wait_phase(Phase::Ending).await;
    // After any number of new sockets, a kubelet that starts registers the plugin.
    node.kubelet().await;
}
