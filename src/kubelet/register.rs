//! The Registration client: tells the kubelet about a resource and our socket. And how to connect to a socket of the
//! kubelet's, which `pod_resources` does too.

use std::path::Path;

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::callers::Peer;
use super::convert;
use crate::quote::one_line;
use crate::state::ResourceName;
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::registration_client::RegistrationClient;

/// Why the kubelet does not know us.
#[derive(Debug, Error)]
pub(super) enum RegisterError {
    #[error("cannot connect to {path}")]
    Connect { path: String, source: tonic::transport::Error },
    #[error("the kubelet refused to register {resource}: {} ({})", one_line(.status.message()), .status.code())]
    Refused { resource: ResourceName, status: Box<Status> },
}

/// Registers a resource served on the socket named `endpoint` beside the kubelet's. Who listens there is told to `met`
/// before the kubelet is asked anything. It may wait for ever: the caller has the deadline.
pub(super) async fn register(
    kubelet_socket: &Path,
    endpoint: &str,
    resource: &ResourceName,
    met: impl Fn(Peer) + Clone + Send + Sync + 'static,
) -> Result<(), RegisterError> {
    let channel = connect(kubelet_socket, met).await;
    let channel =
        channel.map_err(|source| RegisterError::Connect { path: kubelet_socket.display().to_string(), source })?;
    let request = wire::RegisterRequest {
        version: wire::VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.as_str().to_owned(),
        options: Some(convert::options()),
    };
    let answer = RegistrationClient::new(channel).register(request).await;
    let refused = |status| RegisterError::Refused { resource: resource.clone(), status: Box::new(status) };
    answer.map(|_| ()).map_err(refused)
}

/// Connects to a Unix socket; `met` is told who listens there.
pub(super) async fn connect(
    socket: &Path,
    met: impl Fn(Peer) + Clone + Send + Sync + 'static,
) -> Result<Channel, tonic::transport::Error> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let (path, met) = (path.clone(), met.clone());
        async move {
            let stream = UnixStream::connect(path).await?;
            met(Peer::of(&stream)?);
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    // The address is not used: the connector knows the socket.
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await
}
