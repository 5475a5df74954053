//! A kubelet whose connection breaks in the middle of whatever we say, byte by byte.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use linkwise_kubelet::device_plugin::{Phase, Settings};
use linkwise_kubelet_api::v1beta1 as wire;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use wire::device_plugin_client::DevicePluginClient;
use wire::registration_server::{Registration, RegistrationServer};

use crate::run::kubelet::plugin;
use crate::run::node::LIMIT;

/// A connection that breaks once so many bytes have been read.
struct Brittle {
    stream: UnixStream,
    left: usize,
}

impl AsyncRead for Brittle {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.left == 0 {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let mut bytes = vec![0; self.left.min(buf.remaining())];
        let mut part = ReadBuf::new(&mut bytes);
        let read = Pin::new(&mut self.stream).poll_read(context, &mut part);
        buf.put_slice(part.filled());
        let count = part.filled().len();
        self.left -= count;
        read
    }
}

impl AsyncWrite for Brittle {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A kubelet that follows each plugin for `step` bytes more than the one before.
struct Kubelet {
    folder: PathBuf,
    step: usize,
    registrations: Arc<AtomicUsize>,
    listed: mpsc::Sender<(usize, usize)>,
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<wire::RegisterRequest>) -> Result<Response<wire::Empty>, Status> {
        let number = self.registrations.fetch_add(1, Ordering::SeqCst) + 1;
        let (path, left) = (self.folder.join(request.into_inner().endpoint), number * self.step);
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { io::Result::Ok(TokioIo::new(Brittle { stream: UnixStream::connect(path).await?, left })) }
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
async fn stream_cut_at_any_byte_leads_to_registration() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kubelet.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let registrations = Arc::new(AtomicUsize::new(0));
    let (listed, mut lists) = mpsc::channel(1);
    // Our settings, headers and the list are some 600 bytes: twenty cuts and more in the midst of them.
    let kubelet = Kubelet { folder: folder.path().into(), step: 25, registrations: registrations.clone(), listed };
    let server =
        tokio::spawn(Server::builder().add_service(RegistrationServer::new(kubelet)).serve_with_incoming(incoming));
    let settings = Settings {
        stream_timeout: Duration::from_millis(200),
        longest_pause: Duration::from_millis(64),
        ..Settings::new(socket)
    };
    let (plugin, _log) = plugin(settings);
    let mut phase = plugin.phase();
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(plugin.run(shutdown.clone()));
    let (number, devices) = timeout(LIMIT, lists.recv()).await.unwrap().unwrap();
    assert!(number > 10 && devices == 8, "a whole list after {number} registrations");
    timeout(LIMIT, phase.wait_for(|phase| *phase == Phase::Serving)).await.unwrap().unwrap();
    shutdown.cancel();
    timeout(LIMIT, running).await.unwrap().unwrap().unwrap();
    server.abort();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["kubelet.sock"]);
}
