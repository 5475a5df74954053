//! The connections to one of our sockets: admits them and cuts them.
//!
//! tonic serves each connection in a task of its own, which the server's owner does not own; so the owner ends a
//! connection by cutting it. A caller without permission is refused before a byte is read.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use super::{Refusal, Report};
use crate::Counted;
use crate::uds::{Caller, Listener, Peer};
use linkwise_core::errors::chain;

/// The pause after a failed accept: file descriptors may be exhausted for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts the admitted connections of a listener, for ever. `cut` ends them; `open` counts those on which the caller
/// has sent something. A kubelet considers a plugin connected just before it sends HTTP/2's preface (grpc-go,
/// http2_client.go: `ConnBegin`), and may call another plugin until then.
pub fn accepted(
    listener: Listener,
    cut: CancellationToken,
    open: watch::Sender<usize>,
    report: Report<Refusal>,
) -> impl Stream<Item = io::Result<Connection>> {
    stream::unfold((listener, cut, open, report), |(listener, cut, open, report)| async move {
        loop {
            match listener.accept().await {
                Ok(Caller { stream, peer, is_admitted: true }) => {
                    // Each connection has a token of its own, so that connections do not contend for one lock at each
                    // read.
                    let broken = Box::pin(cut.child_token().cancelled_owned());
                    let connection = Connection { stream, peer, cut: broken, open: open.clone(), counted: None };
                    return Some((Ok(connection), (listener, cut, open, report)));
                }
                Ok(Caller { peer, .. }) => report(Refusal::Caller(peer)),
                Err(error) => {
                    report(Refusal::NotAccepted(chain(&error)));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}

/// One connection, until it is cut.
pub struct Connection {
    stream: UnixStream,
    peer: Peer,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    open: watch::Sender<usize>,
    /// Set from the first bytes on.
    counted: Option<Counted>,
}

impl Connection {
    /// The outcome of a read or a write: an error instead of waiting, once the connection is cut.
    fn unless_cut<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_pending() && self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        outcome
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (before, this) = (buf.filled().len(), &mut *self);
        let read = Pin::new(&mut this.stream).poll_read(context, buf);
        if buf.filled().len() > before {
            this.counted.get_or_insert_with(|| Counted::new(&this.open));
        }
        this.unless_cut(context, read)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, buf);
        self.unless_cut(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bufs);
        self.unless_cut(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;

    use futures_util::StreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::uds::{self, Callers};

    #[tokio::test]
    async fn connection_counts_from_its_first_bytes_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.sock");
        let (_file, listener) = uds::listen(&path, Callers::default()).unwrap();
        let open = watch::Sender::new(0);
        let mut connections = pin!(accepted(listener, CancellationToken::new(), open.clone(), Arc::new(|_| ())));
        let (mut caller, _) = uds::connect(&path).await.unwrap();
        let mut connection = connections.next().await.unwrap().unwrap();
        assert_eq!(*open.borrow(), 0, "counted before its first bytes");
        caller.write_all(b"PRI").await.unwrap();
        connection.read_exact(&mut [0; 3]).await.unwrap();
        assert_eq!(*open.borrow(), 1);
        drop(connection);
        assert_eq!(*open.borrow(), 0);
    }
}
