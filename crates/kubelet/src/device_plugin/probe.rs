//! Asks another process's socket in the kubelet's folder whether a device plugin answers there.

use std::path::Path;
use std::time::Duration;

use thiserror::Error;

use super::channel::{ConnectError, connect};
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_client::DevicePluginClient;

/// The cause where no device plugin was found on a socket.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// No process accepts; refused where the process that made the socket has ended.
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    /// A process accepts, and speaks no gRPC or not the device plugin API.
    #[error("it accepts, and is no device plugin")]
    Stranger,
    /// A process listens and does not answer, or its backlog is full.
    #[error("a process listens, and does not answer within {0:?}")]
    Silent(Duration),
}

impl ProbeError {
    /// Returns true if the process that made the socket has ended.
    pub fn is_dead(&self) -> bool {
        matches!(self, Self::Connect(error) if error.kind() == std::io::ErrorKind::ConnectionRefused)
    }
}

/// Asks for the plugin's options, which changes nothing. ListAndWatch would: plugins feed one stream only.
///
/// # Errors
///
/// See [`ProbeError`].
pub async fn probe(socket: &Path, limit: Duration) -> Result<(), ProbeError> {
    let ask = async {
        let (channel, _) = connect(socket).await.map_err(|error| match error {
            // EAGAIN of connect(2): the backlog is full.
            ConnectError::Socket { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock => {
                ProbeError::Silent(limit)
            }
            ConnectError::Socket { source, .. } => ProbeError::Connect(source),
            ConnectError::Handshake { .. } => ProbeError::Stranger,
        })?;
        let answer = DevicePluginClient::new(channel).get_device_plugin_options(wire::Empty {}).await;
        answer.map(|_| ()).map_err(|_| ProbeError::Stranger)
    };
    tokio::time::timeout(limit, ask).await.unwrap_or(Err(ProbeError::Silent(limit)))
}
