//! Spans of admissions: what a collector gets of them, and that nobody misses a collector that is away.

use std::io;
use std::path::Path;
use std::sync::Arc;

use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_box::Pod;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use wire::device_plugin_client::DevicePluginClient;

use crate::dra_node::Node;
use crate::support::{until, within};

const GPU: &str = "nvidia.com/gpu";

/// A collector in a box.
#[derive(Clone, Default)]
struct Collector(Arc<watch::Sender<Vec<ResourceSpans>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send_modify(|all| all.extend(request.into_inner().resource_spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts it; returns it with its address.
    async fn start() -> (Self, String) {
        let (collector, listener) = (Self::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Server::builder().add_service(TraceServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, url)
    }

    fn spans(&self) -> Vec<Span> {
        let all = self.0.borrow().clone();
        all.into_iter().flat_map(|of| of.scope_spans).flat_map(|of| of.spans).collect()
    }

    async fn waits_for(&self, is: impl Fn(&Span) -> bool) -> Span {
        let mut all = self.0.subscribe();
        within(all.wait_for(|_| self.spans().iter().any(&is))).await.unwrap();
        self.spans().into_iter().find(is).unwrap()
    }
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|found| found.value.clone()?.value) {
        Some(AnyValue::StringValue(text)) => text,
        other => panic!("{key}: {other:?} of {attributes:?}"),
    }
}

/// A connection to the plugin whose socket is in this folder.
async fn plugin(folder: &Path) -> DevicePluginClient<tonic::transport::Channel> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let socket = names.into_iter().find(|path| path.to_str().unwrap().contains("linkwise-")).unwrap();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    DevicePluginClient::new(channel)
}

#[tokio::test]
async fn admission_has_spans_with_what_was_chosen() {
    let (node, (collector, url)) = (Node::start().await, Collector::start().await);
    node.configure("none");
    let mut running = node.program().env("LINKWISE_TRACES_ENDPOINT", url).spawn().unwrap();
    until(|| node.healthy(GPU).len() == 8).await;
    node.kubelet.admit(&Pod::single("p", GPU, 2), None).await.unwrap();
    let choice = collector.waits_for(|span| span.name == "GetPreferredAllocation").await;
    assert_eq!(text(&choice.attributes, "linkwise.resource"), GPU);
    assert_eq!(text(&choice.attributes, "linkwise.narrowed"), "false");
    let report = text(&choice.attributes, "linkwise.choice");
    assert!(report.starts_with("GPU 2,3 (2 of 8): collective 40000 MB/s"), "{report}");
    assert!(choice.parent_span_id.is_empty() && choice.end_time_unix_nano > choice.start_time_unix_nano);
    let allocate = collector.waits_for(|span| span.name == "Allocate").await;
    let devices = "GPU-00000001-0000-4000-8000-000000000002,GPU-00000001-0000-4000-8000-000000000003";
    assert_eq!(text(&allocate.attributes, "linkwise.devices"), devices);
    let resource = collector.0.borrow()[0].resource.clone().unwrap();
    assert_eq!(text(&resource.attributes, "service.name"), "linkwise");
    assert_eq!(text(&resource.attributes, "k8s.node.name"), "n");
    // A kubelet that sends its trace context, and asks for what is not there.
    let unknown = wire::ContainerAllocateRequest { devices_ids: vec!["none".to_owned()] };
    let mut request = Request::new(wire::AllocateRequest { container_requests: vec![unknown] });
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    plugin(&node.at("k")).await.allocate(request).await.unwrap_err();
    let refused = collector.waits_for(|span| !span.parent_span_id.is_empty()).await;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(format!("00-{}-{}-01", hex(&refused.trace_id), hex(&refused.parent_span_id)), parent);
    assert_eq!(refused.status.unwrap().message, "INVALID_ARGUMENT");
    assert!(text(&refused.attributes, "linkwise.refusal").contains("none"));
    assert!(collector.spans().iter().all(|span| span.name != "ListAndWatch"));
    running.kill().await.unwrap();
}

#[tokio::test]
async fn claim_has_a_span() {
    let (node, (collector, url)) = (Node::start().await, Collector::start().await);
    let mut running = node.program().env("LINKWISE_TRACES_ENDPOINT", url).spawn().unwrap();
    node.publishes(8).await;
    node.is_registered(1).await;
    let claim = node.claim("c", &["gpu-1"]);
    node.start_pod("p", &claim).await;
    let prepared = collector.waits_for(|span| span.name == "prepare claim").await;
    assert_eq!(text(&prepared.attributes, "linkwise.claim"), "default/c");
    assert_eq!(text(&prepared.attributes, "linkwise.devices"), "gpu-1");
    collector.waits_for(|span| span.name == "NodePrepareResources").await;
    running.kill().await.unwrap();
}

#[tokio::test]
async fn collector_that_is_away_holds_up_nothing() {
    let node = Node::start().await;
    node.configure("none");
    // Without an API server too: it is another neighbour.
    let mut program = node.program();
    program.env_remove("KUBERNETES_SERVICE_HOST").env("LINKWISE_TRACES_ENDPOINT", "http://127.0.0.1:1");
    let mut running = program.spawn().unwrap();
    until(|| node.healthy(GPU).len() == 8).await;
    for _ in 0..400 {
        node.kubelet.admit(&Pod::single("p", GPU, 2), None).await.unwrap();
        node.kubelet.remove_pod("p");
    }
    assert!(running.try_wait().unwrap().is_none());
    running.kill().await.unwrap();
}
