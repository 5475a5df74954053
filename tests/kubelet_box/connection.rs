//! Registrations, streams, their faults, and starts and ends of the kubelet.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_box::{BoxError, Connections, Options, Pod, Restart};
use tonic::Code;

use crate::kubelet_box::plugin::{GPU, Plugin, register, send};
use crate::kubelet_box::{SHORT_TIMEOUT, ids, kubelet, node, unchanged};

#[tokio::test]
async fn kubelet_start_removes_sockets_only() {
    let (dir, kubelet) = kubelet(unchanged);
    kubelet.stop().await.unwrap();
    assert!(dir.path().join("kubelet.sock").exists(), "the socket's file must stay when the kubelet ends");
    let left = UnixListener::bind(dir.path().join("left.sock")).unwrap();
    std::fs::write(dir.path().join("kubelet_internal_checkpoint"), "{}").unwrap();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    kubelet.start_again(Restart::Node).unwrap();
    drop(left);
    let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ["folder", "kubelet.sock", "kubelet_internal_checkpoint"]);
    let mode = std::fs::metadata(dir.path().join("kubelet.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(kubelet.start_again(Restart::Node), Err(BoxError::Running)));
}

#[tokio::test]
async fn register_is_dialled_back_before_its_answer() {
    let (dir, kubelet) = kubelet(unchanged);
    let plugin = Plugin::serve(dir.path(), "gpu.sock", "a:0 b! c");
    plugin.register().await.unwrap();
    let answered = kubelet.state();
    assert_eq!((answered.resources[GPU].registrations, answered.resources[GPU].calls.options), (1, 1));
    let state = kubelet.wait(|s| s.resources[GPU].numa.len() == 3).await.unwrap();
    let gpu = &state.resources[GPU];
    assert_eq!((&gpu.healthy, &gpu.unhealthy), (&ids("a c"), &ids("b")));
    assert_eq!((gpu.numa["a"].iter().copied().collect(), gpu.numa["c"].len()), (vec![0], 0));
    assert!(gpu.connected && gpu.open_streams == 1 && state.violations.is_empty());
    assert_eq!(plugin.seen().authorities, ["localhost", "localhost"]);
    plugin.list("a! b");
    let state = kubelet.wait(|s| s.resources[GPU].healthy == ids("b")).await.unwrap();
    assert_eq!(state.resources[GPU].unhealthy, ids("a"));
}

#[tokio::test]
async fn invalid_registration_is_refused() {
    let (dir, kubelet) = kubelet(unchanged);
    let _plugin = Plugin::serve(dir.path(), "gpu.sock", "a");
    let request = |version: &str, endpoint: &str, resource: &str| wire::RegisterRequest {
        version: version.into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: None,
    };
    let bad = [
        (request("v1", "gpu.sock", GPU), "version \"v1\" is not supported"),
        (request("v1beta1", "gpu.sock", "gpu"), "\"gpu\" is not an extended resource name"),
        (request("v1beta1", "../gpu.sock", GPU), "endpoint \"../gpu.sock\" is not a file name"),
    ];
    for (request, why) in bad {
        let status = send(dir.path(), request).await.unwrap_err();
        assert!(status.code() == Code::Unknown && status.message().contains(why), "{status}");
    }
    assert_eq!((kubelet.state().refused, kubelet.state().resources.len()), (3, 0));
    send(dir.path(), request("v1beta1", "gpu.sock", GPU)).await.unwrap();
}

#[tokio::test]
async fn unreachable_plugin_is_refused() {
    let (dir, kubelet) = kubelet(|options| options.dial_timeout = SHORT_TIMEOUT);
    let missing = register(dir.path(), "missing.sock", GPU).await.unwrap_err();
    assert!(missing.code() == Code::Unknown && missing.message().contains("missing.sock"), "{missing}");
    let _silent = UnixListener::bind(dir.path().join("silent.sock")).unwrap();
    let silent = register(dir.path(), "silent.sock", GPU).await.unwrap_err();
    assert!(silent.message().contains("GetDevicePluginOptions had no answer"), "{silent}");
    assert_eq!(kubelet.state().refused, 2);
    kubelet.stop().await.unwrap();
}

#[tokio::test]
async fn dial_is_retried_and_outlives_its_caller() {
    let (dir, kubelet) = kubelet(|options| options.dial_timeout = Duration::from_secs(60));
    tokio::select! {
        answer = register(dir.path(), "gpu.sock", GPU) => panic!("Register answered too early: {answer:?}"),
        state = kubelet.wait(|s| s.registering == 1) => drop(state.unwrap()),
    }
    kubelet.wait(|s| s.registering == 0).await.unwrap();
    let _plugin = Plugin::serve(dir.path(), "gpu.sock", "a");
    kubelet.wait(|s| s.resources[GPU].healthy == ids("a")).await.unwrap();
}

#[tokio::test]
async fn stream_end_removes_devices_then_resource() {
    let (_dir, kubelet, plugin) = node("a b", |options| options.grace = SHORT_TIMEOUT, |_| {}).await;
    let pod = Pod::single("pod", GPU, 1);
    kubelet.admit(&pod, None).await.unwrap();
    plugin.end_streams();
    let down = kubelet.wait(|s| !s.resources[GPU].connected).await.unwrap();
    assert!(down.resources[GPU].healthy.is_empty());
    let gone = kubelet.wait(|s| s.resources[GPU].removed).await.unwrap();
    assert_eq!((gone.resources[GPU].unhealthy.len(), gone.resources[GPU].in_use().len()), (0, 1));
    plugin.list("a b");
    plugin.register().await.unwrap();
    kubelet.wait(|s| s.resources[GPU].healthy.len() == 2 && !s.resources[GPU].removed).await.unwrap();
}

#[tokio::test]
async fn end_of_old_stream_loses_new_registration() {
    let (dir, kubelet, old) = node("a b", unchanged, |_| {}).await;
    let new = Plugin::serve(dir.path(), "new.sock", "a b c");
    new.register().await.unwrap();
    let both = kubelet.wait(|s| s.resources[GPU].healthy.len() == 3).await.unwrap();
    assert_eq!((both.resources[GPU].open_streams, both.resources[GPU].registrations), (2, 2));
    old.end_streams();
    new.wait_streams_gone().await;
    let state = kubelet.wait(|s| s.resources[GPU].open_streams == 0).await.unwrap();
    assert!(!state.resources[GPU].connected && state.resources[GPU].unhealthy.len() == 3);
}

#[tokio::test]
async fn registration_after_end_of_old_stream_stays() {
    let (dir, kubelet, old) = node("a b", unchanged, |_| {}).await;
    old.end_streams();
    kubelet.wait(|s| s.resources[GPU].open_streams == 0).await.unwrap();
    let new = Plugin::serve(dir.path(), "new.sock", "a b c");
    new.register().await.unwrap();
    drop(old);
    let state = kubelet.wait(|s| s.resources[GPU].healthy.len() == 3).await.unwrap();
    assert!(state.resources[GPU].connected && state.resources[GPU].open_streams == 1);
}

#[tokio::test]
async fn restart_keeps_allocations_not_registrations() {
    let (dir, kubelet, plugin) = node("a b", unchanged, |_| {}).await;
    kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap();
    kubelet.restart(Restart::Kubelet).await.unwrap();
    plugin.wait_streams_gone().await;
    assert!(!dir.path().join("gpu.sock").exists(), "a kubelet must remove plugins' sockets when it starts");
    let state = kubelet.state();
    assert_eq!((state.resources[GPU].healthy.len(), state.resources[GPU].in_use().len()), (0, 1));
    assert!(state.running && !state.resources[GPU].connected);
    drop(plugin);
    let plugin = Plugin::serve(dir.path(), "gpu.sock", "a b");
    plugin.register().await.unwrap();
    let state = kubelet.wait(|s| s.resources[GPU].healthy.len() == 2).await.unwrap();
    assert_eq!((state.resources[GPU].free().len(), state.violations.len()), (1, 0));
}

#[tokio::test]
async fn resource_not_back_after_restart_is_removed() {
    let (_dir, kubelet, _plugin) = node("a b", |options| options.grace = SHORT_TIMEOUT, |_| {}).await;
    kubelet.restart(Restart::Kubelet).await.unwrap();
    kubelet.wait(|s| s.resources[GPU].removed).await.unwrap();
}

/// Makes the kubelet one from 1.37 on, which keeps a connection for each socket.
fn newer(options: &mut Options) {
    options.connections = Connections::BySocket;
}

#[tokio::test]
async fn newer_kubelet_keeps_new_registration() {
    let (dir, kubelet, old) = node("a b", newer, |_| {}).await;
    let new = Plugin::serve(dir.path(), "new.sock", "a b c");
    new.register().await.unwrap();
    kubelet.wait(|s| s.resources[GPU].healthy.len() == 3).await.unwrap();
    old.end_streams();
    let state = kubelet.wait(|s| s.resources[GPU].open_streams == 1).await.unwrap();
    assert!(state.resources[GPU].connected && state.resources[GPU].healthy.len() == 3);
    kubelet.admit(&Pod::single("pod", GPU, 3), None).await.unwrap();
    assert_eq!((new.seen().allocate.len(), old.seen().allocate.len()), (1, 0));
    assert!(kubelet.gaps(GPU).is_empty(), "{:?}", kubelet.gaps(GPU));
}

#[tokio::test]
async fn newer_kubelet_refuses_connected_socket() {
    let (dir, kubelet, plugin) = node("a b", newer, |_| {}).await;
    let refused = plugin.register().await.unwrap_err();
    assert!(refused.message().contains("gpu.sock is already connected"), "{refused}");
    plugin.end_streams();
    kubelet.wait(|s| s.resources[GPU].open_streams == 0).await.unwrap();
    assert!(plugin.register().await.is_err(), "the kubelet must not notice that the stream ended");
    let new = Plugin::serve(dir.path(), "new.sock", "c");
    new.register().await.unwrap();
    kubelet.wait(|s| s.resources[GPU].healthy == ids("c")).await.unwrap();
}

#[tokio::test]
async fn allocate_on_replaced_connection_is_answered() {
    let (dir, kubelet, old) =
        node("a b", unchanged, |plugin| plugin.script(|script| script.allocate_waits = true)).await;
    let new = Plugin::serve(dir.path(), "new.sock", "a b");
    let replace = async {
        old.wait_called().await;
        new.register().await.unwrap();
        kubelet.wait(|s| s.resources[GPU].open_streams == 2).await.unwrap();
        old.end_streams();
        kubelet.wait(|s| s.resources[GPU].healthy.is_empty()).await.unwrap();
        new.wait_streams_gone().await;
        let third = Plugin::serve(dir.path(), "third.sock", "a b");
        third.register().await.unwrap();
        kubelet.wait(|s| s.resources[GPU].healthy.len() == 2).await.unwrap();
        old.answer();
        third
    };
    let pod = Pod::single("pod", GPU, 1);
    let (admitted, _third) = tokio::join!(kubelet.admit(&pod, None), replace);
    admitted.unwrap();
    assert_eq!((kubelet.gaps(GPU).len(), old.seen().allocate.len()), (1, 1));
    kubelet.admit(&Pod::single("next", GPU, 1), None).await.unwrap();
}
