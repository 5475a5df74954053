//! The connections to one socket of ours: admitted, counted, cut.
//!
//! Called by `session`. tonic serves each connection in a task of its own, which outlives the server; so a connection
//! counts itself, and breaks when the session cuts it. A caller that may not call is refused before a byte is read.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use super::{Observer, Occurrence};
use crate::errors::chain;
use crate::state::ResourceName;
use crate::uds::{Caller, Listener, Peer};

/// The pause after a failed accept: file descriptors may be exhausted for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the connections of one session have in common.
#[derive(Clone)]
pub(super) struct Gate {
    /// How many connections are open.
    pub open: watch::Sender<usize>,
    /// Breaks the connections.
    pub cut: CancellationToken,
    pub resource: ResourceName,
    pub observer: Observer,
}

/// The admitted connections of a listener, for ever.
pub(super) fn accepted(listener: Listener, gate: Gate) -> impl Stream<Item = io::Result<Connection>> {
    stream::unfold((listener, Arc::new(gate)), |(listener, gate)| async move {
        loop {
            match listener.accept().await {
                Ok(Caller { stream, peer, admitted: true }) => {
                    let connection = Connection::new(stream, peer, &gate);
                    return Some((Ok(connection), (listener, gate)));
                }
                Ok(Caller { peer, .. }) => {
                    (gate.observer)(&gate.resource, Occurrence::Refused { uid: peer.uid, pid: peer.pid });
                }
                Err(error) => {
                    (gate.observer)(&gate.resource, Occurrence::NotAccepted(chain(&error)));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}

/// One connection. It counts as open until it is dropped.
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    open: watch::Sender<usize>,
}

impl Connection {
    fn new(stream: UnixStream, peer: Peer, gate: &Gate) -> Self {
        gate.open.send_modify(|open| *open += 1);
        // A token of its own, so that connections do not contend for one lock at each read.
        let cut = Box::pin(gate.cut.child_token().cancelled_owned());
        Self { stream, peer, cut, open: gate.open.clone() }
    }

    fn is_cut(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.send_modify(|open| *open = open.saturating_sub(1));
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
        match Pin::new(&mut self.stream).poll_read(context, buf) {
            Poll::Pending => self.is_cut(context),
            ready => ready,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(context, buf) {
            Poll::Pending => self.is_cut(context).map_ok(|()| 0),
            ready => ready,
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write_vectored(context, bufs) {
            Poll::Pending => self.is_cut(context).map_ok(|()| 0),
            ready => ready,
        }
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
