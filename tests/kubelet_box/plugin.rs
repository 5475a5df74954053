//! A plugin whose answers a test sets, and which records its calls. It uses only the wire types, so that it shares no
//! mistake with linkwise.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use hyper_util::rt::TokioIo;
use linkwise_kubelet_api::v1beta1 as wire;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::{Endpoint, Server, Uri};
use tonic::{Request, Response, Status};
use tower::util::MapRequestLayer;

pub const GPU: &str = "nvidia.com/gpu";

/// The plugin's answers.
#[derive(Clone, Debug, Default)]
pub struct Script {
    pub options: wire::DevicePluginOptions,
    /// The preferred ids, a list for each container response.
    pub preferred: Vec<Vec<String>>,
    pub preferred_fails: Option<Status>,
    /// The id with which Allocate fails.
    pub allocate_fails: Option<String>,
    /// The number of the first Allocate call without an answer, counted from one; later calls have none either.
    pub allocate_hangs_from: Option<usize>,
    /// Delays Allocate's answer until [`Plugin::answer`].
    pub allocate_waits: bool,
    pub allocate_is_empty: bool,
}

/// The calls that the plugin received.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub authorities: Vec<String>,
    pub preferred: Vec<wire::PreferredAllocationRequest>,
    pub allocate: Vec<wire::AllocateRequest>,
}

#[derive(Debug)]
struct Shared {
    /// `None` ends the streams.
    devices: watch::Sender<Option<Vec<wire::Device>>>,
    script: Mutex<Script>,
    seen: Mutex<Seen>,
    called: Notify,
    answer: Notify,
}

pub struct Plugin {
    dir: PathBuf,
    pub endpoint: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn healthy(id: &str) -> wire::Device {
    wire::Device { id: id.into(), health: wire::HEALTHY.into(), topology: None }
}

/// Reads devices from a list such as `a b! c:0 d:0,1`: ids, `!` for unhealthy, NUMA nodes after a colon.
pub fn devices(list: &str) -> Vec<wire::Device> {
    let device = |word: &str| {
        let (id, nodes) = word.split_once(':').unwrap_or((word, ""));
        let nodes: Vec<_> = nodes.split(',').filter_map(|n| n.parse().ok()).map(|id| wire::NumaNode { id }).collect();
        let health = if id.ends_with('!') { wire::UNHEALTHY } else { wire::HEALTHY };
        let topology = (!nodes.is_empty()).then_some(wire::TopologyInfo { nodes });
        wire::Device { id: id.trim_end_matches('!').into(), health: health.into(), topology }
    };
    list.split_whitespace().map(device).collect()
}

impl Plugin {
    /// Serves a plugin with these devices on `<dir>/<endpoint>`.
    pub fn serve(dir: &Path, endpoint: &str, list: &str) -> Self {
        Self::serve_devices(dir, endpoint, devices(list))
    }

    /// Serves a plugin with healthy devices, whose ids may have colons.
    pub fn serve_each(dir: &Path, endpoint: &str, ids: &[String]) -> Self {
        Self::serve_devices(dir, endpoint, ids.iter().map(|id| healthy(id)).collect())
    }

    fn serve_devices(dir: &Path, endpoint: &str, devices: Vec<wire::Device>) -> Self {
        let shared = Arc::new(Shared {
            devices: watch::Sender::new(Some(devices)),
            script: Mutex::default(),
            seen: Mutex::default(),
            called: Notify::new(),
            answer: Notify::new(),
        });
        let incoming = UnixListenerStream::new(UnixListener::bind(dir.join(endpoint)).unwrap());
        let service = wire::device_plugin_server::DevicePluginServer::new(Service(Arc::clone(&shared)));
        let recorder = Arc::clone(&shared);
        let authority = MapRequestLayer::new(move |request: tonic::codegen::http::Request<tonic::body::Body>| {
            let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
            recorder.seen.lock().unwrap().authorities.push(authority);
            request
        });
        let server = tokio::spawn(async move {
            Server::builder().layer(authority).serve_with_incoming(service, incoming).await.unwrap();
        });
        Self { dir: dir.into(), endpoint: endpoint.into(), shared, server }
    }

    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.shared.script.lock().unwrap());
    }

    /// Offers GetPreferredAllocation with these ids as its answer.
    pub fn advise(&self, ids: &str) {
        self.script(|script| {
            script.options.get_preferred_allocation_available = true;
            script.preferred = vec![ids.split_whitespace().map(String::from).collect()];
        });
    }

    pub fn seen(&self) -> Seen {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Sends a new list on all streams.
    pub fn list(&self, list: &str) {
        self.shared.devices.send_replace(Some(devices(list)));
    }

    /// Ends all streams; the server keeps running.
    pub fn end_streams(&self) {
        self.shared.devices.send_replace(None);
    }

    /// Stops the server, and ends all streams.
    pub async fn end(mut self) {
        self.server.abort();
        self.end_streams();
        let _ = (&mut self.server).await;
    }

    /// Waits until the kubelet follows no stream of this plugin.
    pub async fn wait_streams_gone(&self) {
        tokio::time::timeout(std::time::Duration::from_secs(20), self.shared.devices.closed()).await.unwrap();
    }

    /// Waits for an Allocate call.
    pub async fn wait_called(&self) {
        self.shared.called.notified().await;
    }

    /// Answers the Allocate call that waits.
    pub fn answer(&self) {
        self.shared.answer.notify_one();
    }

    pub async fn register(&self) -> Result<(), Status> {
        register(&self.dir, &self.endpoint, GPU).await
    }
}

/// Registers a plugin's endpoint with the kubelet.
pub async fn register(dir: &Path, endpoint: &str, resource: &str) -> Result<(), Status> {
    let request = wire::RegisterRequest {
        version: wire::VERSION.into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        // The kubelet asks the plugin for its options and ignores these.
        options: Some(wire::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true }),
    };
    send(dir, request).await
}

pub async fn send(dir: &Path, request: wire::RegisterRequest) -> Result<(), Status> {
    let path = dir.join(wire::KUBELET_SOCKET);
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
    wire::registration_client::RegistrationClient::new(channel).register(request).await.map(|_| ())
}

struct Service(Arc<Shared>);

impl Service {
    fn script(&self) -> Script {
        self.0.script.lock().unwrap().clone()
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl wire::device_plugin_server::DevicePlugin for Service {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(&self, _: Request<wire::Empty>) -> Answer<wire::DevicePluginOptions> {
        Ok(Response::new(self.script().options))
    }

    async fn list_and_watch(&self, _: Request<wire::Empty>) -> Answer<Self::ListAndWatchStream> {
        let mut lists = self.0.devices.subscribe();
        let (send, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let list = lists.borrow_and_update().clone();
                let Some(devices) = list else { return };
                let sent = send.send(Ok(wire::ListAndWatchResponse { devices })).await;
                tokio::select! {
                    changed = lists.changed(), if sent.is_ok() => if changed.is_err() { return },
                    () = send.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<wire::PreferredAllocationRequest>,
    ) -> Answer<wire::PreferredAllocationResponse> {
        self.0.seen.lock().unwrap().preferred.push(request.into_inner());
        let script = self.script();
        let respond = |device_i_ds| wire::ContainerPreferredAllocationResponse { device_i_ds };
        let container_responses = script.preferred.into_iter().map(respond).collect();
        match script.preferred_fails {
            Some(status) => Err(status),
            None => Ok(Response::new(wire::PreferredAllocationResponse { container_responses })),
        }
    }

    async fn allocate(&self, request: Request<wire::AllocateRequest>) -> Answer<wire::AllocateResponse> {
        let request = request.into_inner();
        let ids = request.container_requests.iter().flat_map(|container| container.devices_ids.clone());
        let mut ids: Vec<String> = ids.collect();
        ids.sort();
        let calls = {
            let mut seen = self.0.seen.lock().unwrap();
            seen.allocate.push(request);
            seen.allocate.len()
        };
        self.0.called.notify_one();
        let script = self.script();
        if script.allocate_waits {
            self.0.answer.notified().await;
        }
        if script.allocate_hangs_from.is_some_and(|from| calls >= from) {
            std::future::pending::<()>().await;
        }
        if let Some(id) = script.allocate_fails.filter(|id| ids.contains(id)) {
            return Err(Status::failed_precondition(format!("{id} is out of order")));
        }
        // Several slots of a GPU give its UUID once.
        let gpus: BTreeSet<&str> = ids.iter().filter_map(|id| id.split("::").next()).collect();
        let visible = gpus.into_iter().collect::<Vec<_>>().join(",");
        let [container_path, host_path, permissions] = ["/dev/x", "/dev/y", "rw"].map(str::to_owned);
        let response = wire::ContainerAllocateResponse {
            envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), visible)].into(),
            mounts: vec![wire::Mount { container_path: "/m".into(), host_path: "/h".into(), read_only: true }],
            devices: vec![wire::DeviceSpec { container_path, host_path, permissions }],
            annotations: [("k".to_owned(), "v".to_owned())].into(),
            cdi_devices: ids.iter().map(|id| wire::CdiDevice { name: format!("{GPU}={id}") }).collect(),
        };
        let container_responses = if script.allocate_is_empty { vec![] } else { vec![response] };
        Ok(Response::new(wire::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<wire::PreStartContainerRequest>,
    ) -> Answer<wire::PreStartContainerResponse> {
        Err(Status::unimplemented("the kubelet in the box does not call it"))
    }
}
