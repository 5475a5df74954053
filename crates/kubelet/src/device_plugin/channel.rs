//! gRPC over one connection to another process's Unix socket.
//!
//! Used by `register`, `pod_resources` and `probe`, each of which has its own deadline.

use std::io;
use std::path::Path;

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};

use linkwise_system::uds::{self, Peer};

/// The cause of a missing connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No process accepts.
    #[error("cannot connect to {path}")]
    Socket {
        /// The socket.
        path: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// A process accepts, and HTTP/2 cannot begin.
    #[error("no HTTP/2 on {path}")]
    Handshake {
        /// The socket.
        path: String,
        /// The reason.
        source: tonic::transport::Error,
    },
}

/// Connects to a socket; returns the channel, which has this one connection, and which process listens.
pub(super) async fn connect(socket: &Path) -> Result<(Channel, Peer), ConnectError> {
    let path = || socket.display().to_string();
    let connected = uds::connect(socket).await;
    let (stream, peer) = connected.map_err(|source| ConnectError::Socket { path: path(), source })?;
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    // The address is required, and not used.
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    let channel = channel.map_err(|source| ConnectError::Handshake { path: path(), source })?;
    Ok((channel, peer))
}
