//! The connections to the sockets of device plugins and DRA drivers.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tonic::transport::{Channel, Endpoint, Error, Uri};
use tower::service_fn;

/// A number of open connections.
pub(super) type Counter = watch::Sender<usize>;

/// Dials a socket. The URI gives the `:authority` of the requests. `connections` tracks the tasks of the connection,
/// and `open` counts it while it is open.
pub(super) async fn dial(path: &Path, uri: Uri, connections: &TaskTracker, open: Counter) -> Result<Channel, Error> {
    let path = path.to_owned();
    let connector = service_fn(move |_: Uri| {
        let (path, open) = (path.clone(), open.clone());
        async move {
            let stream = UnixStream::connect(path).await?;
            open.send_modify(|open| *open += 1);
            Ok::<_, io::Error>(TokioIo::new(Counted { stream, open }))
        }
    });
    let endpoint = Endpoint::from(uri).executor(Tracked(connections.clone()));
    endpoint.connect_with_connector(connector).await
}

/// The URI of a socket for which a kubelet sends the authority `localhost`.
pub(super) fn localhost() -> Uri {
    Uri::from_static("http://localhost")
}

/// Runs the tasks of gRPC's connections so that `stop` can wait for the last one.
struct Tracked(TaskTracker);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tracked {
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

/// A connection that is counted while it is open.
struct Counted {
    stream: UnixStream,
    open: Counter,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.send_modify(|open| *open = open.saturating_sub(1));
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
