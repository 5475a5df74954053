//! A stream that holds a guard for as long as it is open.
//!
//! gRPC's channels close their connections in tasks of their own; the guards are how `stop` sees
//! that the last one has gone. Used by `endpoint` (client side) and `registration` (server side).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tonic::transport::server::Connected;

/// Held by everything that has to end before the box has stopped.
pub(super) type Guard = mpsc::Sender<()>;

/// A Unix stream and its guard.
#[derive(Debug)]
pub(super) struct Guarded {
    stream: UnixStream,
    _guard: Guard,
}

impl Guarded {
    pub(super) fn new(stream: UnixStream, guard: Guard) -> Self {
        Self { stream, _guard: guard }
    }
}

impl Connected for Guarded {
    type ConnectInfo = ();
    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Guarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Guarded {
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
