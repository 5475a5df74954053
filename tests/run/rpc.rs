//! The device plugin's calls, made by the tests' own client: GetPreferredAllocation never fails, Allocate is strict.

use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_box::KubeletBox;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_prost::ProstCodec;
use wire::device_plugin_client::DevicePluginClient;

use crate::run::callers::{channel, client};
use crate::run::node::{GPU, Node, Setup, machine, uuid};

async fn serve(setup: Setup, gpus: usize) -> (Node, KubeletBox, DevicePluginClient<Channel>) {
    let (node, kubelet) = setup.serve(gpus).await;
    let client = client(node.setup.sockets().remove(0)).await.unwrap();
    (node, kubelet, client)
}

fn strings(ids: &[&str]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

fn question(available: &[&str], must_include: &[&str], size: i32) -> wire::ContainerPreferredAllocationRequest {
    wire::ContainerPreferredAllocationRequest {
        available_device_i_ds: strings(available),
        must_include_device_i_ds: strings(must_include),
        allocation_size: size,
    }
}

async fn preferred(
    client: &mut DevicePluginClient<Channel>,
    container_requests: Vec<wire::ContainerPreferredAllocationRequest>,
) -> Vec<Vec<String>> {
    let answer = client.get_preferred_allocation(wire::PreferredAllocationRequest { container_requests }).await;
    let answer = answer.expect("advice failed").into_inner();
    answer.container_responses.into_iter().map(|container| container.device_i_ds).collect()
}

fn fallbacks(reason: &str) -> String {
    format!("linkwise_preferred_allocation_fallbacks_total{{resource=\"nvidia.com/gpu\",reason=\"{reason}\"}}")
}

/// Four GPUs named a to d, c and d at the lower addresses.
fn four() -> Setup {
    let gpus = [
        ("GPU-c", "0000:01:00.0", ""),
        ("GPU-d", "0000:02:00.0", ""),
        ("GPU-a", "0000:03:00.0", ""),
        ("GPU-b", "0000:04:00.0", ""),
    ];
    Setup::with(&machine(&gpus))
}

#[tokio::test]
async fn options_offer_preferred_allocation_only() {
    let (_node, _kubelet, mut client) = serve(four(), 4).await;
    let options = client.get_device_plugin_options(wire::Empty {}).await.unwrap().into_inner();
    assert!(options.get_preferred_allocation_available && !options.pre_start_required);
    let request = wire::PreStartContainerRequest { devices_ids: strings(&["GPU-a", "GPU-z"]) };
    client.pre_start_container(request).await.unwrap();
}

/// The available ids, the ids that must be included, the size, the answer, the reason of the fallback.
type Case = (&'static [&'static str], &'static [&'static str], i32, &'static [&'static str], &'static str);

#[tokio::test]
async fn preferred_allocation_never_errors() {
    let (node, _kubelet, mut client) = serve(four(), 4).await;
    // An answer has the ids that must be included, then available ids, each in sorted order, up to the size.
    let cases: [Case; 11] = [
        (&["GPU-d", "GPU-z", "GPU-a"], &[], 2, &["GPU-a", "GPU-d"], "unknown_device"),
        (&["GPU-z", "GPU-y", "GPU-x"], &[], 2, &["GPU-x", "GPU-y"], "unknown_device"),
        (&["GPU-a", "GPU-b"], &["GPU-z"], 2, &["GPU-z", "GPU-a"], "unknown_device"),
        (&["GPU-a", ""], &[], 1, &[""], "unknown_device"),
        (&["GPU-a", "GPU-b"], &[], 0, &[], "size"),
        (&["GPU-a", "GPU-b"], &[], -1, &[], "size"),
        (&["GPU-a", "GPU-b"], &["GPU-b"], i32::MIN, &[], "size"),
        (&["GPU-b", "GPU-a"], &["GPU-d"], 10_000, &["GPU-d", "GPU-a", "GPU-b"], "size"),
        (&["GPU-a", "GPU-a", "GPU-a"], &[], 2, &["GPU-a"], "size"),
        (&["GPU-a", "GPU-b"], &["GPU-d", "GPU-c"], 1, &["GPU-c"], "size"),
        (&[], &[], 1, &[], "size"),
    ];
    let (mut unknown, mut size) = (0, 0);
    for (available, must_include, count, expected, reason) in cases {
        let answers = preferred(&mut client, vec![question(available, must_include, count)]).await;
        assert_eq!(answers, [strings(expected)], "{count} of {available:?} with {must_include:?}");
        *(if reason == "size" { &mut size } else { &mut unknown }) += 1;
        node.metric(&fallbacks("unknown_device"), unknown).await;
        if size > 0 {
            node.metric(&fallbacks("size"), size).await;
        }
    }
    let total = "linkwise_preferred_allocations_total{resource=\"nvidia.com/gpu\",outcome=";
    node.metric(&format!("{total}\"fallback\"}}"), 11).await;
    // Each reason is logged once, however often it comes.
    node.process.said("in sorted order, size").await;
    let logged = |line: &&String| line.contains("preferred in sorted order") && line.contains("WARN");
    assert_eq!(node.process.lines().iter().filter(logged).count(), 2);
    // Repeated ids are not a fault.
    let answers = preferred(&mut client, vec![question(&["GPU-a", "GPU-b", "GPU-a", "GPU-b"], &["GPU-b"], 2)]).await;
    assert_eq!(answers, [strings(&["GPU-a", "GPU-b"])]);
    node.metric(&format!("{total}\"exact\"}}"), 1).await;
}

#[tokio::test]
async fn each_container_request_gets_one_answer() {
    let (_node, _kubelet, mut client) = serve(four(), 4).await;
    assert!(preferred(&mut client, Vec::new()).await.is_empty());
    let questions = vec![question(&["GPU-b"], &[], 1), question(&["GPU-z"], &[], 1), question(&["GPU-d"], &[], 1)];
    let answers = preferred(&mut client, questions).await;
    assert_eq!(answers, [strings(&["GPU-b"]), strings(&["GPU-z"]), strings(&["GPU-d"])]);
    // More ids than a node has.
    let many: Vec<String> = (0..5_000).map(|number| format!("GPU-{number:05}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(preferred(&mut client, vec![question(&many, &[], 3)]).await, [strings(&many[..3])]);
}

#[tokio::test]
async fn impossible_allocate_is_refused_by_name() {
    let (node, kubelet, mut client) = serve(Setup::on("dgx1-v100"), 8).await;
    node.setup.tell("xid 3 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    let mut allocate = async |ids: &[&str]| {
        let container_requests = vec![wire::ContainerAllocateRequest { devices_ids: strings(ids) }];
        client.allocate(wire::AllocateRequest { container_requests }).await.map(tonic::Response::into_inner)
    };
    let long = allocate(&["x".repeat(1 << 20).as_str()]).await.unwrap_err();
    let line = node.process.logged(|line| line["message"] == "refused to allocate").await;
    assert!(line.to_string().len() < 1024 && long.message().len() < 1024, "{}", long.message().len());
    let (healthy, unhealthy) = (uuid(1, 0), uuid(1, 3));
    let [no_device, device] = [
        |id: &str| format!("{GPU} has no device '{id}' on this node"),
        |id: &str| format!("device '{id}' of {GPU} is "),
    ];
    let cases: [(&[&str], Code, String); 4] = [
        (&[&healthy, "GPU-unknown"], Code::InvalidArgument, no_device("GPU-unknown")),
        (&[""], Code::InvalidArgument, no_device("")),
        (&[&healthy, &healthy], Code::InvalidArgument, device(&healthy) + "asked for twice"),
        (&[&healthy, &unhealthy], Code::FailedPrecondition, device(&unhealthy) + "unhealthy: XID 79"),
    ];
    for (ids, code, why) in cases {
        let status = allocate(ids).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, why.as_str()));
    }
    assert!(allocate(&[&unhealthy]).await.unwrap_err().message().contains("XID 79"));
    assert_eq!(allocate(&[&healthy]).await.unwrap().container_responses.len(), 1);
    node.metric("linkwise_allocations_total{resource=\"nvidia.com/gpu\",outcome=\"refused\"}", 6).await;
    node.metric("linkwise_allocations_total{resource=\"nvidia.com/gpu\",outcome=\"ok\"}", 1).await;
    let rpcs = |code: &str| format!("linkwise_rpcs_total{{resource=\"{GPU}\",method=\"Allocate\",code=\"{code}\"}}");
    node.metric(&rpcs("INVALID_ARGUMENT"), 4).await;
    node.metric(&rpcs("FAILED_PRECONDITION"), 2).await;
    node.metric(&rpcs("OK"), 1).await;
}

#[tokio::test]
async fn unknown_method_is_unimplemented_in_one_series() {
    let (node, _kubelet, _client) = serve(four(), 4).await;
    let mut client = tonic::client::Grpc::new(channel(node.setup.sockets().remove(0)).await.unwrap());
    for path in ["/v1beta1.DevicePlugin/Dance", "/v1beta1.Registration/Register", "/other.Service/Any"] {
        client.ready().await.unwrap();
        let codec = ProstCodec::<wire::Empty, wire::Empty>::default();
        let answer = client.unary(Request::new(wire::Empty {}), PathAndQuery::from_static(path), codec).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented, "{path}");
    }
    let unknown = format!("linkwise_rpcs_total{{resource=\"{GPU}\",method=\"unknown\",code=\"UNIMPLEMENTED\"}}");
    node.metric(&unknown, 3).await;
    let text = node.get("/metrics").await.body;
    assert!(!text.contains("Dance") && !text.contains("Any"), "an unknown method makes a series of its own: {text}");
}
