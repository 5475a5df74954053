//! A stand-in for the NVIDIA plugin, as far as the kubelet sees it: its socket's name, its ids, its answers. It speaks
//! the wire types only, so that it cannot agree with linkwise's mistakes.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use linkwise_kubelet_api::v1beta1 as wire;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Request, Response, Status};

/// Its socket in the kubelet's folder for nvidia.com/gpu.
const SOCKET: &str = "nvidia-gpu.sock";

/// A plugin that is served and registered.
pub struct Predecessor {
    socket: PathBuf,
    server: JoinHandle<()>,
    ids: Arc<watch::Sender<Vec<String>>>,
}

/// One channel to the process that listens on a socket.
async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await
}

impl Predecessor {
    /// Removes what an earlier one left, serves, and registers: in this order, as it does.
    pub async fn start(folder: &Path, resource: &str, ids: Vec<String>) -> Self {
        Self::start_at(folder, SOCKET, resource, ids).await
    }

    /// The same with a socket of another name: another plugin.
    pub async fn start_at(folder: &Path, name: &str, resource: &str, ids: Vec<String>) -> Self {
        let socket = folder.join(name);
        let _ = std::fs::remove_file(&socket);
        let ids = Arc::new(watch::Sender::new(ids));
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let service = wire::device_plugin_server::DevicePluginServer::new(Service(Arc::clone(&ids)));
        let server = tokio::spawn(async move {
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        let request = wire::RegisterRequest {
            version: wire::VERSION.into(),
            endpoint: name.into(),
            resource_name: resource.into(),
            options: Some(wire::DevicePluginOptions {
                pre_start_required: false,
                get_preferred_allocation_available: true,
            }),
        };
        let kubelet = connect(&folder.join(wire::KUBELET_SOCKET)).await.unwrap();
        wire::registration_client::RegistrationClient::new(kubelet).register(request).await.unwrap();
        Self { socket, server, ids }
    }

    /// Ends as it does: its server stops, and its socket is removed.
    pub async fn end(self) {
        self.server.abort();
        // Its streams end with it.
        self.ids.send_replace(Vec::new());
        let _ = self.server.await;
        std::fs::remove_file(&self.socket).unwrap();
    }
}

struct Service(Arc<watch::Sender<Vec<String>>>);

#[tonic::async_trait]
impl wire::device_plugin_server::DevicePlugin for Service {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<wire::Empty>,
    ) -> Result<Response<wire::DevicePluginOptions>, Status> {
        let options = wire::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
        Ok(Response::new(options))
    }

    async fn list_and_watch(&self, _: Request<wire::Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut lists = self.0.subscribe();
        let (send, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let ids = lists.borrow_and_update().clone();
                // Nothing on the list is the end.
                if ids.is_empty() {
                    return;
                }
                let device = |id| wire::Device { id, health: wire::HEALTHY.into(), topology: None };
                let devices = ids.into_iter().map(device).collect();
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
    ) -> Result<Response<wire::PreferredAllocationResponse>, Status> {
        let respond = |asked: wire::ContainerPreferredAllocationRequest| {
            let mut ids = asked.available_device_i_ds;
            ids.sort();
            ids.truncate(usize::try_from(asked.allocation_size).unwrap());
            wire::ContainerPreferredAllocationResponse { device_i_ds: ids }
        };
        let container_responses = request.into_inner().container_requests.into_iter().map(respond).collect();
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::AllocateResponse>, Status> {
        let respond = |asked: wire::ContainerAllocateRequest| {
            // A slot is its GPU, once.
            let gpu = |id: &String| id.split("::").next().unwrap().to_owned();
            let gpus: std::collections::BTreeSet<String> = asked.devices_ids.iter().map(gpu).collect();
            let visible = gpus.into_iter().collect::<Vec<_>>().join(",");
            wire::ContainerAllocateResponse {
                envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), visible)].into(),
                ..Default::default()
            }
        };
        let container_responses = request.into_inner().container_requests.into_iter().map(respond).collect();
        Ok(Response::new(wire::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<wire::PreStartContainerRequest>,
    ) -> Result<Response<wire::PreStartContainerResponse>, Status> {
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}
