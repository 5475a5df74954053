//! gRPC over one connection to another process's Unix socket, and a probe for a device plugin.
//!
//! [`connect`] has no deadline: its callers have their own.

use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};

use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_client::DevicePluginClient;
use linkwise_system::uds::{self, Peer};

/// The cause of a failed connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No process accepts on the socket.
    #[error("cannot connect to {0}")]
    Socket(String, #[source] io::Error),
    /// A process accepts, and HTTP/2 cannot begin.
    #[error("cannot begin HTTP/2 on {0}")]
    Handshake(String, #[source] tonic::transport::Error),
}

/// Connects to a socket; returns the channel of this one connection, and the process that listens.
pub(crate) async fn connect(socket: &Path) -> Result<(Channel, Peer), ConnectError> {
    let path = || socket.display().to_string();
    let connected = uds::connect(socket).await;
    let (stream, peer) = connected.map_err(|source| ConnectError::Socket(path(), source))?;
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    // The address is required, and not used.
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    let channel = channel.map_err(|source| ConnectError::Handshake(path(), source))?;
    Ok((channel, peer))
}

/// The cause of a probe that found no device plugin.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// No process accepts; ECONNREFUSED if the process that made the socket has ended.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// A process accepts, and speaks no gRPC or not the device plugin API.
    #[error("a process listens, and is not a device plugin")]
    Stranger,
    /// A process listens and does not answer, or its backlog is full.
    #[error("a process listens, and does not answer within {0:?}")]
    Silent(Duration),
}

impl ProbeError {
    /// Returns true if the process that made the socket has ended.
    pub fn is_dead(&self) -> bool {
        matches!(self, Self::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }
}

/// Calls GetDevicePluginOptions, which changes nothing. ListAndWatch could take the kubelet's stream away, because many
/// plugins feed only one.
pub async fn probe(socket: &Path, limit: Duration) -> Result<(), ProbeError> {
    let ask = async {
        let (channel, _) = connect(socket).await.map_err(|error| match error {
            // EAGAIN of connect(2): the backlog is full.
            ConnectError::Socket(_, error) if error.kind() == io::ErrorKind::WouldBlock => ProbeError::Silent(limit),
            ConnectError::Socket(_, error) => ProbeError::Connect(error),
            ConnectError::Handshake(..) => ProbeError::Stranger,
        })?;
        let answer = DevicePluginClient::new(channel).get_device_plugin_options(wire::Empty {}).await;
        answer.map(|_| ()).map_err(|_| ProbeError::Stranger)
    };
    tokio::time::timeout(limit, ask).await.unwrap_or(Err(ProbeError::Silent(limit)))
}
