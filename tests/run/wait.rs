//! `linkwise wait` beside a running linkwise, as the chart's test pod calls it: the answer for a served node, and the
//! cause if a node is not served.

use std::os::unix::net::UnixListener;

use linkwise_kubelet_box::Pod;
use tokio::process::Command;
use tokio::time::timeout;

use crate::run::node::{GPU, LIMIT, Setup, machine, wait_registered};

/// `linkwise wait` on this machine, with a timeout in seconds.
fn command(setup: &Setup, seconds: u32) -> Command {
    let mut command = Command::new(&setup.program);
    // As in the test pod: no driver, no machine, no admin socket.
    command.env_clear().arg("wait").arg("--kubelet-socket").arg(&setup.kubelet_socket);
    command.arg("--pod-resources-socket").arg(setup.pod_resources());
    command.arg("--dra-registry-dir").arg(setup.at("registry"));
    command.args(["--timeout", &seconds.to_string()]).env("NODE_NAME", "gpu-1").kill_on_drop(true);
    command
}

/// Runs a command, and returns its exit code, standard output and standard error.
async fn run(mut command: Command) -> (Option<i32>, String, String) {
    let output = timeout(LIMIT, command.output()).await.expect("the command did not end in time").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Asserts that the command ends with code 1 after one second, with these words.
async fn assert_fails(setup: &Setup, words: &[&str]) {
    let (code, _, text) = run(command(setup, 1)).await;
    assert_eq!(code, Some(1), "{text}");
    for word in [&["gpu-1 is not served after 1 s"], words].concat() {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

async fn assert_succeeds(setup: &Setup, answer: &str) {
    assert_eq!(run(command(setup, 60)).await, (Some(0), answer.to_owned(), String::new()));
}

#[tokio::test]
async fn served_node_answers_with_its_devices() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    assert_succeeds(&node.setup, "gpu-1: linkwise serves nvidia.com/gpu: 8 healthy, 0 held by pods\n").await;
    // No GPU has to be free.
    kubelet.admit(&Pod::single("all", GPU, 8), None).await.unwrap();
    assert_succeeds(&node.setup, "gpu-1: linkwise serves nvidia.com/gpu: 8 healthy, 8 held by pods\n").await;
}

#[tokio::test]
async fn wait_outlasts_a_late_start() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    let waiting = tokio::spawn(run(command(&setup, 60)));
    let _node = setup.start().await;
    wait_registered(&kubelet, 1, 8).await;
    let (code, text, _) = waiting.await.unwrap();
    assert_eq!((code, text.contains("nvidia.com/gpu: 8 healthy")), (Some(0), true), "{text}");
}

#[tokio::test]
async fn unserved_node_fails_with_its_cause() {
    let setup = Setup::on("dgx1-v100");
    assert_fails(&setup, &["No such file", "--root-dir", "kubeletRootDir"]).await;
    let _kubelet = setup.kubelet();
    assert_fails(&setup, &["linkwise offers nothing here", "no pod on this node", "no GPU"]).await;
    // A killed pod leaves its socket behind.
    drop(UnixListener::bind(setup.kubelet_socket.with_file_name("linkwise-nvidia.com_gpu-1.sock")).unwrap());
    assert_fails(&setup, &["linkwise-nvidia.com_gpu-1.sock does not answer"]).await;
}

#[tokio::test]
async fn node_of_unhealthy_gpus_is_not_served() {
    let (node, kubelet) = Setup::with(&machine(&[("GPU-a", "0000:01:00.0", "")])).serve(1).await;
    node.setup.tell("xid 0 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    assert_fails(&node.setup, &["no healthy device of nvidia.com/gpu", "linkwise doctor"]).await;
}

#[tokio::test]
async fn missing_pod_resources_is_named() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet_with(|options| options.pod_resources = None);
    let node = setup.start().await;
    wait_registered(&kubelet, 1, 8).await;
    assert_fails(&node.setup, &["the kubelet does not answer on"]).await;
}

/// A node whose GPUs all go through DRA has no resource of the device plugin.
#[tokio::test]
async fn listening_dra_driver_counts_as_serving() {
    let setup = Setup::on("dgx1-v100");
    let _kubelet = setup.kubelet();
    std::fs::create_dir(setup.at("registry")).unwrap();
    let socket = setup.at("registry/linkwise-00000001@gpu.nvidia.com-reg.sock");
    let driver = UnixListener::bind(&socket).unwrap();
    assert_succeeds(&setup, "gpu-1: linkwise serves claims, by its DRA driver\n").await;
    drop(driver);
    assert_fails(&setup, &["linkwise offers nothing here"]).await;
}
