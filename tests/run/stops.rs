//! Processes that are stopped (SIGSTOP), and connections that do not end.

use linkwise_kubelet_box::{Pod, Restart};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::run::node::{GPU, LIMIT, Setup, signal, wait_registered, wait_unhealthy};

#[tokio::test]
async fn stopped_process_catches_up() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    kubelet.admit(&Pod::single("pod", GPU, 4), None).await.unwrap();
    node.process.signal("STOP");
    // The kubelet notices that a plugin is stopped only when the kubelet calls the plugin or restarts.
    kubelet.restart(Restart::Kubelet).await.unwrap();
    let state = kubelet.state();
    assert!(!state.resources[GPU].connected && state.resources[GPU].in_use().len() == 4);
    node.process.signal("CONT");
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    // A process that was stopped during a single call answers it, and keeps its registration.
    node.process.signal("STOP");
    let pod = Pod::single("other", GPU, 4);
    let asked = kubelet.admit(&pod, None);
    let mut asked = std::pin::pin!(asked);
    run_until_asked(&kubelet, &mut asked).await;
    node.process.signal("CONT");
    timeout(LIMIT, asked).await.unwrap().unwrap();
    let state = kubelet.state();
    assert_eq!((state.resources[GPU].registrations, state.resources[GPU].free().len()), (2, 0));
    assert_eq!(state.violations, []);
}

/// Stops linkwise and its agent for a time, as a freezer does, and asserts that agent and registration stay.
async fn freeze_and_resume(seconds: f64) {
    let limits = if seconds < 10.0 { ["--nvml-call-ms=500", "--nvml-poll-ms=50"].as_slice() } else { &[] };
    let (node, kubelet) = Setup::on("dgx1-v100").args(limits).serve(8).await;
    let agent = node.agent(&[]).await;
    let uptime = || {
        let text = std::fs::read_to_string("/proc/uptime").unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    node.process.signal("STOP");
    signal("STOP", agent);
    let over = uptime() + seconds;
    let mut look = tokio::time::interval(std::time::Duration::from_millis(50));
    while uptime() < over {
        look.tick().await;
    }
    // The agent continues later: linkwise, which was stopped too, must not take this for a hung call.
    node.process.signal("CONT");
    node.ready(200, "ready").await;
    signal("CONT", agent);
    node.setup.tell("xid 3 79");
    wait_unhealthy(&kubelet, &[3]).await;
    kubelet.admit(&Pod::single("after", GPU, 7), None).await.unwrap();
    assert_eq!(node.agent_ids(), [agent], "{:#?}", node.process.lines());
    let state = kubelet.state();
    assert_eq!((state.resources[GPU].registrations, &state.violations[..]), (1, &[][..]));
}

#[tokio::test]
async fn frozen_node_resumes_unchanged() {
    freeze_and_resume(3.0).await;
}

#[tokio::test]
#[ignore = "takes a minute: make test-long"]
async fn node_frozen_for_a_minute_resumes_unchanged() {
    freeze_and_resume(61.0).await;
}

/// Runs an admission until its first call is made, which a stopped process cannot answer.
async fn run_until_asked(
    kubelet: &linkwise_kubelet_box::KubeletBox,
    admission: &mut (impl Future<Output: std::fmt::Debug> + Unpin),
) {
    let calls = kubelet.state().resources[GPU].calls.preferred;
    tokio::select! {
        answer = admission => panic!("answered by a process that is stopped: {answer:?}"),
        state = kubelet.wait(|state| state.resources[GPU].calls.preferred > calls) => drop(state.unwrap()),
    }
}

/// A connection with an open stream whose caller reads nothing and closes nothing.
async fn stuck(socket: &std::path::Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // SETTINGS with a window of 0: no byte of a list may be sent.
    bytes.extend([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]);
    // HEADERS of POST /v1beta1.DevicePlugin/ListAndWatch, in plain literals, and an empty message.
    let literal = |name: &str, value: &str| {
        let mut field = vec![0];
        for text in [name, value] {
            field.push(u8::try_from(text.len()).unwrap());
            field.extend(text.as_bytes());
        }
        field
    };
    let fields = [
        literal(":method", "POST"),
        literal(":scheme", "http"),
        literal(":path", "/v1beta1.DevicePlugin/ListAndWatch"),
        literal(":authority", "localhost"),
        literal("content-type", "application/grpc"),
        literal("te", "trailers"),
    ]
    .concat();
    bytes.extend([0, 0, u8::try_from(fields.len()).unwrap(), 1, 4, 0, 0, 0, 1]);
    bytes.extend(fields);
    bytes.extend([0, 0, 5, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
    stream.write_all(&bytes).await.unwrap();
    stream
}

#[tokio::test]
async fn unclosed_connection_is_cut_at_kubelet_restart() {
    let (mut node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let mut stuck_one = stuck(&node.setup.sockets()[0]).await;
    // linkwise has read the request: its settings and an acknowledgement have come.
    let mut some = [0; 16];
    stuck_one.read_exact(&mut some).await.unwrap();
    kubelet.restart(Restart::Kubelet).await.unwrap();
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "").await;
    // linkwise closes the old connection.
    let mut rest = Vec::new();
    let _ = timeout(LIMIT, stuck_one.read_to_end(&mut rest)).await.expect("the old connection stays open");
    // Such a connection does not delay the shutdown either.
    let _stuck = stuck(&node.setup.sockets()[0]).await;
    node.process.end().await;
    assert!(node.setup.sockets().is_empty());
}
