//! Callers of our sockets: other users, other processes, clients without gRPC, clients that send too much.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use hyper_util::rt::TokioIo;
use linkwise_kubelet::device_plugin::{Phase, Settings};
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_box::{Fault, KubeletBox, Pod};
use linkwise_system::uds::Callers;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use wire::device_plugin_client::DevicePluginClient;

use crate::run::kubelet::InProcessPlugin;
use crate::run::node::{GPU, LIMIT, Setup, kubelet_in, sockets_in, uuid, wait_registered};

pub async fn client(path: PathBuf) -> Result<DevicePluginClient<Channel>, tonic::transport::Error> {
    Ok(DevicePluginClient::new(channel(path).await?))
}

pub async fn channel(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { std::io::Result::Ok(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await
}

#[tokio::test]
async fn caller_with_other_uid_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = kubelet_in(folder.path(), |_| {});
    // No process has this uid, so that even the test's own calls are refused.
    let callers = Callers::only(4_000_000_000);
    let plugin = InProcessPlugin::start(Settings { callers, ..Settings::new(folder.path().join("kubelet.sock")) });
    // The kubelet that dials back runs in the test's own process.
    let own_uid = std::fs::metadata(folder.path()).unwrap().uid();
    plugin.log.wait(&["refused a caller", &format!("uid={own_uid} pid={}", std::process::id())]).await;
    assert!(*plugin.phase.borrow() != Phase::Serving);
    assert_eq!(kubelet.state().resources[GPU].calls.list_and_watch, 0);
    plugin.end().await;
}

/// Plays the other process of [`stream_of_another_process_does_not_count`], which starts it in a folder with one of
/// our sockets. Does nothing in a folder without one.
#[tokio::test]
#[ignore = "the other process of another test"]
async fn the_other_process() {
    let sockets = sockets_in(Path::new("k"));
    let Some(socket) = sockets.first() else { return };
    let mut client = client(socket.clone()).await.unwrap();
    let mut stream = client.list_and_watch(wire::Empty {}).await.unwrap().into_inner();
    while let Ok(Some(list)) = stream.message().await {
        assert_eq!(list.devices.len(), 8);
        std::fs::write("listed", "").unwrap();
    }
}

#[tokio::test]
async fn stream_of_another_process_does_not_count() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    // The kubelet accepts the registration, and never dials back.
    kubelet.set_fault(Fault::AnswerWithoutDial);
    let node = setup.start().await;
    node.process.said("\"registered\"").await;
    let mut other = tokio::process::Command::new(std::env::current_exe().unwrap());
    other.args(["run::callers::the_other_process", "--exact", "--ignored"]).current_dir(node.setup.at(""));
    let mut other = other.stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    crate::run::node::until(async || std::fs::metadata(node.setup.at("listed"))).await;
    // The other process gets its list, and linkwise stays unready.
    let answer = node.ready(503, "waiting for the kubelet's ListAndWatch").await;
    assert!(answer.body.contains(GPU));
    kubelet.set_fault(Fault::None);
    wait_registered(&kubelet, 1, 8).await;
    node.ready(200, "").await;
    // The session ended because the kubelet opened no stream, although the other process had one all the time.
    node.process.said("the kubelet did not open ListAndWatch within").await;
    assert_eq!(node.process.count("PodResources has not listed our devices"), 0);
    let _ = other.kill().await;
}

#[tokio::test]
#[cfg_attr(not(is_root), ignore = "only root can start a process as another user")]
async fn refused_user_is_counted_and_logged_once() {
    const NOBODY: u32 = 65_534;
    let mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let refused = format!("linkwise_refused_callers_total{{resource=\"{GPU}\"}}");
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let folder = node.setup.at("k");
    // The file modes admit every user: only the uid that the kernel reports counts.
    for (path, open) in [(node.setup.at(""), 0o755), (folder, 0o777), (node.setup.sockets().remove(0), 0o666)] {
        mode(&path, open);
    }
    let program = node.setup.at("linkwise");
    // `cp` makes the copy, not this process: a child that another test has just forked would keep the copy open for
    // writing, and such a program cannot be started (ETXTBSY).
    let copied = std::process::Command::new("cp").arg(&node.setup.program).arg(&program).status().unwrap();
    assert!(copied.success());
    let mut pids = Vec::new();
    for _ in 0..2 {
        let mut doctor = tokio::process::Command::new(&program);
        doctor.args(["doctor", "--kubelet-socket"]).arg(&node.setup.kubelet_socket).uid(NOBODY);
        let doctor = doctor.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        pids.push(doctor.id());
        let output = timeout(LIMIT, doctor.wait_with_output()).await.unwrap().unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        assert!(!output.contains("linkwise serves linkwise-nvidia.com_gpu-"), "{output}");
    }
    assert_undisturbed(&node, &kubelet, "pod").await;
    node.metric(&refused, 2).await;
    let line = node.process.said("refused a caller").await;
    assert_eq!((line["uid"].as_u64(), line["pid"].as_u64()), (Some(NOBODY.into()), pids[0].map(Into::into)));
    assert_eq!(node.process.count("refused a caller"), 1, "a further refusal was logged");
}

/// Asserts that the one registration stands, and that pods are admitted.
async fn assert_undisturbed(node: &crate::run::node::Node, kubelet: &KubeletBox, pod: &str) {
    let state = kubelet.state().resources[GPU].clone();
    assert_eq!((state.registrations, state.open_streams, state.connected), (1, 1, true));
    kubelet.admit(&Pod::single(pod, GPU, 1), None).await.unwrap();
    assert!(kubelet.remove_pod(pod));
    assert_eq!(node.get("/readyz").await.status, 200);
}

#[tokio::test]
async fn non_http2_client_disturbs_no_other() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    let with = |frames: &[u8]| [preface, settings, frames].concat();
    let cases: [(&str, Vec<u8>); 9] = [
        ("another protocol", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("noise", (0..4096_u32).map(|number| u8::try_from(number * 7 % 251).unwrap()).collect()),
        ("half a preface", preface[..10].iter().copied().chain(std::iter::repeat_n(b'x', 64)).collect()),
        ("a frame above every size limit", with(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1])),
        ("settings of a wrong length", with(&[0, 0, 5, 4, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5])),
        ("data on stream 0", with(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 1])),
        ("invalid headers", with(&[0, 0, 4, 1, 5, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff])),
        ("a window of 0", with(&[0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
        ("a continuation of nothing", with(&[0, 0, 1, 9, 4, 0, 0, 0, 1, 0])),
    ];
    for (index, (what, bytes)) in cases.into_iter().enumerate() {
        let mut stream = UnixStream::connect(&node.setup.sockets()[0]).await.unwrap();
        // linkwise may close the connection while the test still writes.
        let _ = stream.write_all(&bytes).await;
        let mut answer = Vec::new();
        let end = timeout(LIMIT, stream.read_to_end(&mut answer)).await;
        assert!(end.is_ok(), "{what}: not closed");
        assert_undisturbed(&node, &kubelet, &format!("pod-{index}")).await;
    }
    // A client that sends nothing, or half a request, delays no other.
    let mut silent = Vec::new();
    for bytes in [&[][..], &preface[..5], preface, &with(&[0, 0, 9, 1, 4, 0, 0, 0, 1, 0x83])] {
        let mut stream = UnixStream::connect(&node.setup.sockets()[0]).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        silent.push(stream);
    }
    assert_undisturbed(&node, &kubelet, "last").await;
}

#[tokio::test]
async fn oversized_message_is_refused() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let mut client = client(node.setup.sockets().remove(0)).await.unwrap();
    let container_requests = vec![wire::ContainerAllocateRequest { devices_ids: vec!["x".repeat(5 << 20)] }];
    let refused = client.allocate(wire::AllocateRequest { container_requests }).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    // Headers that are too large.
    let mut request = tonic::Request::new(wire::Empty {});
    request.metadata_mut().insert("x-long", "x".repeat(1 << 20).parse().unwrap());
    assert!(client.get_device_plugin_options(request).await.is_err());
    assert_undisturbed(&node, &kubelet, "pod").await;
}

#[tokio::test]
async fn many_streams_and_calls_are_all_answered() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let socket = node.setup.sockets().remove(0);
    let ids: Vec<String> = kubelet.state().resources[GPU].healthy.iter().cloned().collect();
    let mut streams = Vec::new();
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        let client = client(socket.clone()).await.unwrap();
        for _ in 0..8 {
            let mut client = client.clone();
            let opened = timeout(LIMIT, client.list_and_watch(wire::Empty {})).await;
            let mut stream = opened.expect("the stream did not open in time").unwrap().into_inner();
            assert_eq!(timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap().devices.len(), 8);
            streams.push(stream);
        }
        for _ in 0..1250 {
            let (mut client, ids) = (client.clone(), ids.clone());
            calls.spawn(async move {
                let question = wire::ContainerPreferredAllocationRequest {
                    available_device_i_ds: ids,
                    must_include_device_i_ds: Vec::new(),
                    allocation_size: 4,
                };
                let request = wire::PreferredAllocationRequest { container_requests: vec![question] };
                let answer = client.get_preferred_allocation(request).await.unwrap().into_inner();
                answer.container_responses[0].device_i_ds.clone()
            });
        }
    }
    // Meanwhile a pod is admitted.
    kubelet.admit(&Pod::single("pod", GPU, 4), None).await.unwrap();
    let answers = timeout(LIMIT, calls.join_all()).await.unwrap();
    assert!(answers.len() == 10_000 && answers.iter().all(|answer| *answer == answers[0] && answer.len() == 4));
    node.setup.tell("xid 7 79");
    for stream in &mut streams {
        // A list that repeats the last one may come first.
        let told = async {
            loop {
                let list = stream.message().await.unwrap().unwrap();
                assert_eq!(list.devices.len(), 8);
                let unhealthy = list.devices.into_iter().filter(|device| device.health == wire::UNHEALTHY);
                let unhealthy: Vec<String> = unhealthy.map(|device| device.id).collect();
                if !unhealthy.is_empty() {
                    break unhealthy;
                }
            }
        };
        assert_eq!(timeout(LIMIT, told).await.unwrap(), [uuid(1, 7)]);
    }
    let state = kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    assert_eq!((state.resources[GPU].registrations, state.resources[GPU].open_streams), (1, 1));
}
