//! A question to somebody else's socket in the kubelet's folder: does a device plugin answer there?

use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_client::DevicePluginClient;

/// Why no device plugin was found on a socket.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// Nobody accepts; refused where whoever made the socket is gone.
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    /// Somebody accepts, and speaks no gRPC or no device plugin API.
    #[error("it accepts, and is no device plugin")]
    Stranger,
    /// Somebody listens, and says nothing; or accepts nobody, and so many wait for that already that the kernel takes no more.
    #[error("somebody listens, and does not answer within {0:?}")]
    Silent(Duration),
}

impl ProbeError {
    /// Whether whoever made the socket is gone.
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
        let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
            // EAGAIN of connect(2): the backlog is full.
            std::io::ErrorKind::WouldBlock => ProbeError::Silent(limit),
            _ => ProbeError::Connect(error),
        })?;
        let mut stream = Some(TokioIo::new(stream));
        // The one connection that there is; the address is not used.
        let connector = tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected)) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
        let mut client = DevicePluginClient::new(channel.map_err(|_| ProbeError::Stranger)?);
        let answer = client.get_device_plugin_options(wire::Empty {}).await;
        answer.map(|_| ()).map_err(|_| ProbeError::Stranger)
    };
    tokio::time::timeout(limit, ask).await.unwrap_or(Err(ProbeError::Silent(limit)))
}
