//! The end of linkwise, and the sockets that an earlier linkwise left behind.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use linkwise_kubelet_api::v1beta1::Empty;
use linkwise_kubelet_box::{Fault, Pod};
use tokio::time::timeout;

use crate::run::node::{GPU, LIMIT, Setup, fifo, signal, until, wait_registered, writer};

#[tokio::test]
async fn signal_ends_streams_and_sockets_with_success() {
    for signal in ["TERM", "INT"] {
        let (mut node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
        assert_eq!(node.setup.sockets().len(), 1);
        node.process.signal(signal);
        let (status, lines) = node.process.ended().await;
        assert_eq!((status.code(), lines), (Some(0), Vec::<String>::new()));
        assert!(node.setup.sockets().is_empty());
        let state = kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
        assert!(!state.resources[GPU].connected && state.violations.is_empty());
        let line = node.process.logged(|line| line["message"] == "ending").await;
        assert_eq!(line["signal"], format!("SIG{signal}").as_str());
        // The NVML agent is gone too: the control socket has no listener.
        let control = fake_nvml::Control::new(node.setup.at("control"));
        until(async || if control.is_heard() { Err("it still listens") } else { Ok(()) }).await;
    }
}

#[tokio::test]
async fn hung_kubelet_does_not_delay_shutdown() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    kubelet.set_fault(Fault::Hang);
    let mut node = setup.start().await;
    kubelet.wait(|state| state.registering == 1).await.unwrap();
    node.setup.tell_all(&["hang nvmlEventSetWait_v2", "hang nvmlDeviceGetTemperature"]);
    // A scraper that keeps its connection.
    let _scraper = tokio::net::TcpStream::connect(node.address).await.unwrap();
    node.process.end().await;
    assert!(node.setup.sockets().is_empty());
}

#[tokio::test]
async fn unread_log_loses_lines_not_time() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    let (_unread, mut full) = UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[b'\n'; 4096]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    let setup = setup.arg("--log=debug");
    let mut process = setup.command().stderr(OwnedFd::from(full)).spawn().unwrap();
    wait_registered(&kubelet, 1, 8).await;
    // More lines than the log's queue takes.
    let mut client = crate::run::callers::client(setup.sockets().remove(0)).await.unwrap();
    for _ in 0..2_000 {
        timeout(LIMIT, client.get_device_plugin_options(Empty {})).await.expect("no answer in time").unwrap();
    }
    signal("TERM", process.id().unwrap());
    let status = timeout(LIMIT, process.wait()).await.expect("linkwise did not end in time").unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(setup.sockets().is_empty());
}

#[tokio::test]
async fn hung_sysfs_file_delays_nothing() {
    let mut setup = Setup::on("dgx1-v100");
    setup.library = "/no/such/libnvidia-ml.so.1".into();
    setup.on_bus("0000:3b:00.0");
    let vendor = setup.at("sys/bus/pci/devices/0000:3b:00.0/vendor");
    fifo(&vendor);
    let mut node = setup.start().await;
    let _silent = writer(&vendor).await;
    node.ready(503, "the GPUs have not been discovered yet").await;
    node.process.end().await;
}

#[tokio::test]
async fn hung_disk_delays_no_admission_and_no_shutdown() {
    let setup = Setup::on("dgx1-v100");
    // No writer ever comes: the thread of linkwise that opens the file hangs in the kernel to the end.
    fifo(&setup.at("k/linkwise/linkwise_health.json"));
    let (mut node, kubelet) = setup.serve(8).await;
    node.process.said("it cannot be read in time").await;
    node.setup.tell("xid 2 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    kubelet.admit(&Pod::single("pod", GPU, 4), None).await.unwrap();
    node.process.end().await;
    assert!(node.setup.sockets().is_empty());
}

#[tokio::test]
async fn only_dead_sockets_of_ours_are_removed() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    let mut predecessor = setup.spawn();
    wait_registered(&kubelet, 1, 8).await;
    predecessor.signal("KILL");
    assert!(!predecessor.ended().await.0.success());
    let left = setup.sockets();
    assert_eq!(left.len(), 1, "the killed process removed its socket");
    // A dead socket of ours from another MIG layout, a stranger's dead socket, and two live sockets with our names.
    let at = |name: &str| setup.at(&format!("k/{name}"));
    let dead = at("linkwise-nvidia.com_mig-3g.20gb-01234567.sock");
    let foreign = at("linkwise-nvidia.com_gpu-00000000.sock");
    let others = [at("linkwise-nvidia.com_mig-2g.10gb-01234567.sock"), at("other.sock")];
    drop([&dead, &others[1]].map(|path| UnixListener::bind(path).unwrap()));
    let _alive = [&foreign, &others[0]].map(|path| UnixListener::bind(path).unwrap());
    let node = setup.start().await;
    wait_registered(&kubelet, 2, 8).await;
    let sockets = node.setup.sockets();
    // The new socket may have its second name already, because linkwise takes the foreign socket for a live owner's.
    assert!(sockets.contains(&foreign) && !sockets.contains(&left[0]), "{sockets:?}");
    assert!(!dead.exists() && others.iter().all(|path| path.exists()), "{sockets:?}");
}
