//! The connections to one socket of ours: admitted and cut.
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
use crate::uds::{Caller, Listener, Peer};
use linkwise_core::errors::chain;

/// The pause after a failed accept: file descriptors may be exhausted for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts the admitted connections of a listener, for ever. `cut` breaks them; `open` has their number.
pub fn accepted(
    listener: Listener,
    cut: CancellationToken,
    open: watch::Sender<usize>,
    report: Report<Refusal>,
) -> impl Stream<Item = io::Result<Connection>> {
    stream::unfold((listener, cut, open, report), |(listener, cut, open, report)| async move {
        loop {
            match listener.accept().await {
                Ok(Caller { stream, peer, admitted: true }) => {
                    // Each connection has a token of its own, so that connections do not contend for one lock at each
                    // read.
                    let broken = Box::pin(cut.child_token().cancelled_owned());
                    let connection = Connection { stream, peer, cut: broken, _open: Open::new(open.clone()) };
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
    _open: Open,
}

/// Counts a connection as long as it is open.
struct Open(watch::Sender<usize>);

impl Open {
    fn new(count: watch::Sender<usize>) -> Self {
        count.send_modify(|open| *open += 1);
        Self(count)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open = open.saturating_sub(1));
    }
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
