//! The connections to one socket of ours: admitted and cut.
//!
//! Called by `session`. tonic serves each connection in a task of its own, which the session does not own; so a
//! connection breaks when the session cuts it. A caller that may not call is refused before a byte is read.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use super::{Occurrence, Report};
use crate::errors::chain;
use crate::uds::{Caller, Listener, Peer};

/// The pause after a failed accept: file descriptors may be exhausted for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The admitted connections of a listener, for ever. `cut` breaks them.
pub(super) fn accepted(
    listener: Listener,
    cut: CancellationToken,
    report: Report,
) -> impl Stream<Item = io::Result<Connection>> {
    stream::unfold((listener, cut, report), |(listener, cut, report)| async move {
        loop {
            match listener.accept().await {
                Ok(Caller { stream, peer, admitted: true }) => {
                    // A token of its own, so that connections do not contend for one lock at each read.
                    let connection = Connection { stream, peer, cut: Box::pin(cut.child_token().cancelled_owned()) };
                    return Some((Ok(connection), (listener, cut, report)));
                }
                Ok(Caller { peer, .. }) => report(Occurrence::Refused { uid: peer.uid, pid: peer.pid }),
                Err(error) => {
                    report(Occurrence::NotAccepted(chain(&error)));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}

/// One connection, until it is cut.
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn is_cut(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
            Poll::Pending => Poll::Pending,
        }
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
