//! The end of the process, and what an earlier one left behind.

use std::os::unix::net::{UnixListener, UnixStream};

use linkwise::kubelet_box::Fault;

use crate::node::{GPU, Setup, registered, until};

#[tokio::test]
async fn a_signal_to_end_ends_streams_and_sockets_and_is_no_failure() {
    for signal in ["TERM", "INT"] {
        let (mut node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
        assert_eq!(node.setup.sockets().len(), 1);
        node.process.signal(signal);
        let (status, words) = node.process.ended().await;
        assert_eq!((status.code(), words), (Some(0), Vec::<String>::new()));
        assert!(node.setup.sockets().is_empty());
        let state = kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
        assert!(!state.resources[GPU].connected && state.violations.is_empty());
        let line = node.process.logged(|line| line["message"] == "ending").await;
        assert_eq!(line["signal"], format!("SIG{signal}").as_str());
        // The process that speaks to NVML is gone too: nobody listens on the control socket.
        let control = node.setup.at("control");
        until(async || UnixStream::connect(&control).map_or(Ok(()), |_| Err("it still listens"))).await;
    }
}

#[tokio::test]
async fn nothing_that_hangs_holds_up_the_end() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    kubelet.set_fault(Fault::Hang);
    let mut node = setup.start().await;
    kubelet.wait(|state| state.registering == 1).await.unwrap();
    node.setup.tell("hang nvmlEventSetWait_v2");
    node.setup.tell("hang nvmlDeviceGetTemperature");
    // A scraper that keeps its connection.
    let _scraper = tokio::net::TcpStream::connect(node.address).await.unwrap();
    node.process.signal("TERM");
    assert_eq!(node.process.ended().await.0.code(), Some(0));
    assert!(node.setup.sockets().is_empty());
}

#[tokio::test]
async fn the_socket_of_a_dead_predecessor_goes_and_a_live_one_stays() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    let mut predecessor = setup.spawn();
    registered(&kubelet, 1, 8).await;
    predecessor.signal("KILL");
    assert!(!predecessor.ended().await.0.success());
    let left = setup.sockets();
    assert_eq!(left.len(), 1, "what is killed cannot clean up");
    let foreign = setup.at("k/linkwise-nvidia.com_gpu-00000000.sock");
    let _alive = UnixListener::bind(&foreign).unwrap();
    let node = setup.start().await;
    registered(&kubelet, 2, 8).await;
    let sockets = node.setup.sockets();
    assert!(sockets.contains(&foreign) && !sockets.contains(&left[0]) && sockets.len() == 2, "{sockets:?}");
}
