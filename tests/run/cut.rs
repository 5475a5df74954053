//! A kubelet whose connection breaks in the middle of our messages, each time a few bytes later.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use linkwise_kubelet::device_plugin::{Phase, Settings};
use linkwise_kubelet_api::v1beta1 as wire;
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use wire::device_plugin_client::DevicePluginClient;
use wire::registration_server::{Registration, RegistrationServer};

use crate::run::kubelet::{InProcessPlugin, quick};
use crate::run::node::LIMIT;

/// A kubelet that reads `step` bytes more after each registration than after the previous one, and then disconnects.
struct Kubelet {
    folder: PathBuf,
    step: u64,
    registrations: Arc<AtomicU64>,
    /// The number of registrations up to a list, and the number of devices on it, for each list.
    listed: mpsc::Sender<(u64, usize)>,
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<wire::RegisterRequest>) -> Result<Response<wire::Empty>, Status> {
        let number = self.registrations.fetch_add(1, Ordering::SeqCst) + 1;
        let (path, left) = (self.folder.join(request.into_inner().endpoint), number * self.step);
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            // The connection breaks once `left` bytes have been read.
            async move {
                let (read, write) = UnixStream::connect(path).await?.into_split();
                io::Result::Ok(TokioIo::new(tokio::io::join(read.take(left), write)))
            }
        });
        let listed = self.listed.clone();
        tokio::spawn(async move {
            let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await?;
            let stream = DevicePluginClient::new(channel).list_and_watch(wire::Empty {}).await;
            let mut stream = stream.map_err(|status| status.to_string())?.into_inner();
            while let Ok(Some(list)) = stream.message().await {
                let _ = listed.send((number, list.devices.len())).await;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        });
        Ok(Response::new(wire::Empty {}))
    }
}

#[tokio::test]
async fn plugin_registers_until_its_stream_is_not_cut() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kubelet.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let registrations = Arc::new(AtomicU64::new(0));
    let (listed, mut lists) = mpsc::channel(1);
    // Our settings, headers and list are some 600 bytes, so that more than twenty cuts fall inside them.
    let kubelet = Kubelet { folder: folder.path().into(), step: 25, registrations: registrations.clone(), listed };
    let server =
        tokio::spawn(Server::builder().add_service(RegistrationServer::new(kubelet)).serve_with_incoming(incoming));
    let stream_timeout = Duration::from_millis(200);
    let mut plugin = InProcessPlugin::start(Settings { stream_timeout, ..quick(socket) });
    let (number, devices) = timeout(LIMIT, lists.recv()).await.unwrap().unwrap();
    assert!(number > 10 && devices == 8, "a whole list after {number} registrations");
    plugin.wait_phase(Phase::Serving).await;
    plugin.end().await;
    server.abort();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["kubelet.sock"]);
}
