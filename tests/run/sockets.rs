//! Sockets in a wrong state, the kubelet's and ours, and a shortage of file descriptors and inotify watches.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use linkwise_kubelet::device_plugin::{Phase, Settings};
use linkwise_kubelet_api::v1beta1::Empty;
use linkwise_kubelet_box::Restart;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::run::kubelet::InProcessPlugin;
use crate::run::node::{GPU, LIMIT, Node, Setup, kubelet_in, limit, sockets_in, until, wait_registered};

#[tokio::test]
async fn kubelet_found_after_any_file_at_its_socket() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let path = node.setup.kubelet_socket.clone();
    kubelet.stop().await.unwrap();
    node.ready(503, GPU).await;
    std::fs::remove_file(&path).unwrap();
    node.ready(503, &format!("there is no {}", path.display())).await;
    std::fs::write(&path, "").unwrap();
    node.ready(503, &format!("{} is not a socket", path.display())).await;
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    node.ready(503, &format!("{} is not a socket", path.display())).await;
    // A socket without a listener.
    std::fs::remove_dir(&path).unwrap();
    drop(UnixListener::bind(&path).unwrap());
    node.ready(503, "cannot connect to").await;
    // A socket whose listener accepts no connection.
    std::fs::remove_file(&path).unwrap();
    let silent = UnixListener::bind(&path).unwrap();
    node.ready(503, "registering").await;
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    node.ready(503, "is not a socket").await;
    drop(silent);
    std::fs::remove_file(&path).unwrap();
    kubelet.start_again(Restart::Kubelet).unwrap();
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    assert_eq!((node.setup.sockets().len(), kubelet.violations().len()), (1, 0));
}

#[tokio::test]
async fn chmod_of_kubelet_sock_ends_no_session() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    std::fs::set_permissions(&node.setup.kubelet_socket, std::fs::Permissions::from_mode(0o660)).unwrap();
    // A linkwise that notices this removal has checked the mode too, and would report a kubelet restart first.
    std::fs::remove_file(&node.setup.sockets()[0]).unwrap();
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    node.process.said("our socket is gone").await;
    assert_eq!(node.process.count("the kubelet restarted"), 0);
}

#[tokio::test]
async fn polling_suffices_without_inotify() {
    let folder = tempfile::tempdir().unwrap();
    let poll = Duration::from_millis(20);
    let settings = Settings { inotify: false, poll, ..Settings::new(folder.path().join("k/kubelet.sock")) };
    let mut plugin = InProcessPlugin::start(settings);
    let kubelet = kubelet_in(folder.path().join("k"), |_| {});
    plugin.wait_phase(Phase::Serving).await;
    // Only a look at the file shows this change.
    std::fs::remove_file(&sockets_in(&folder.path().join("k"))[0]).unwrap();
    plugin.log.wait(&["the session with the kubelet ended", "why=\"our socket is gone or was replaced\""]).await;
    wait_registered(&kubelet, 2, 8).await;
    plugin.wait_phase(Phase::Serving).await;
    kubelet.restart(Restart::Kubelet).await.unwrap();
    wait_registered(&kubelet, 3, 8).await;
    plugin.wait_phase(Phase::Serving).await;
    plugin.end().await;
}

#[tokio::test]
async fn exhausted_descriptors_recover() {
    let mut setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    // Enough descriptors to start, and some for connections.
    let script = setup.at("few");
    std::fs::write(&script, format!("#!/bin/sh\nulimit -n 64\nexec {} \"$@\"\n", setup.program.display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
    setup.program = script;
    let node = setup.start().await;
    wait_registered(&kubelet, 1, 8).await;
    node.ready(200, "").await;
    // As many callers as there is room for, and more.
    let own = node.setup.sockets().remove(0);
    let mut callers = Vec::new();
    for _ in 0..100 {
        callers.push(UnixStream::connect(&own).await.unwrap());
    }
    let line = node.process.logged(|line| line["message"] == "cannot accept a connection").await;
    assert!(line["error"].as_str().unwrap().contains("Too many open files"), "{line}");
    // When they have gone, the next caller is served on the same socket.
    callers.clear();
    let mut client = crate::run::callers::client(own.clone()).await.unwrap();
    timeout(LIMIT, client.get_device_plugin_options(Empty {})).await.expect("no answer in time").unwrap();
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    for _ in 0..100 {
        callers.push(UnixStream::connect(&own).await.unwrap());
    }
    // The kubelet restarts while no socket can be bound and no call made.
    kubelet.restart(Restart::Kubelet).await.unwrap();
    drop(callers);
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    assert_eq!(node.setup.sockets().len(), 1);
    let times = node.process.count("cannot accept a connection");
    assert!(times <= 2, "logged for each caller, not once for each session: {times}");
    // linkwise accepts at most ten times a second, and not as often as the processor can.
    let again = node.process.logged(|line| line["phase"] == "serving" && line["repeated"].as_u64() > Some(0)).await;
    assert!(again["repeated"].as_u64().unwrap() <= 10 * LIMIT.as_secs(), "{again}");
}

/// The number of linkwise's inotify watches on a folder, found by its inode.
fn watches(node: &Node, folder: &str) -> usize {
    let folder = format!(" ino:{:x} ", std::fs::metadata(node.setup.at(folder)).unwrap().ino());
    let files = std::fs::read_dir(format!("/proc/{}/fdinfo", node.process.id())).unwrap().flatten();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    texts.filter(|text| text.contains(&folder)).count()
}

/// A node without DRA does not mount DRA's folder, and a folder that is missing is looked for each second.
#[tokio::test]
async fn folder_of_dra_is_not_watched_without_dra() {
    let setup = Setup::on("dgx1-v100");
    std::fs::create_dir(setup.at("registry")).unwrap();
    let registry = setup.at("registry");
    let (node, _kubelet) = setup.arg("--dra-registry-dir").arg(registry).serve(8).await;
    assert_eq!((watches(&node, "k"), watches(&node, "registry")), (1, 0));
}

#[tokio::test]
async fn failed_inotify_watch_is_retried() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let watches = || watches(&node, "k");
    assert_eq!(watches(), 1);
    limit(node.process.id(), "nofile=3:");
    // A new folder, which cannot be watched and in which no socket can be bound.
    kubelet.stop().await.unwrap();
    std::fs::rename(node.setup.at("k"), node.setup.at("old")).unwrap();
    kubelet.start_again(Restart::Kubelet).unwrap();
    let line = node.process.logged(|line| line["why"].as_str().is_some_and(|why| why.contains("open files"))).await;
    assert_eq!((line["message"].as_str(), watches()), (Some("the session with the kubelet ended"), 0), "{line}");
    limit(node.process.id(), "nofile=1024:");
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    // The next look, at most a second later, adds the watch.
    until(async || if watches() == 1 { Ok(()) } else { Err("the new folder is not watched") }).await;
}

#[tokio::test]
async fn probe_is_answered_after_descriptor_shortage() {
    let (node, _kubelet) = Setup::on("dgx1-v100").serve(8).await;
    limit(node.process.id(), "nofile=3:");
    let mut stream = tokio::net::TcpStream::connect(node.address).await.unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    // Once this caller is refused, the probe has been too: one thread accepts both.
    let own = node.setup.sockets().remove(0);
    let caller = UnixStream::connect(&own).await.unwrap();
    node.process.said("cannot accept a connection").await;
    limit(node.process.id(), "nofile=1024:");
    drop(caller);
    let mut answer = String::new();
    timeout(LIMIT, stream.read_to_string(&mut answer)).await.expect("no answer in time").unwrap();
    assert!(answer.ends_with("alive\n"), "{answer}");
    node.ready(200, "").await;
}
