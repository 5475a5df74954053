//! The Registration client: tells the kubelet about a resource and our socket.

use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::Endpoint;

use super::convert;
use crate::inventory::ResourceName;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::registration_client::RegistrationClient;

/// Why the kubelet does not know us.
#[derive(Debug, Error)]
pub(super) enum RegisterError {
    #[error("cannot connect to {path}")]
    Connect { path: String, source: tonic::transport::Error },
    #[error("the kubelet refused to register {resource}: {} ({})", .status.message(), .status.code())]
    Refused { resource: ResourceName, status: Status },
    #[error("the kubelet did not answer Register for {resource} within {after:?}")]
    Late { resource: ResourceName, after: Duration },
}

/// Registers a resource served on the socket named `endpoint` beside the kubelet's.
pub(super) async fn register(
    kubelet_socket: &Path,
    endpoint: &str,
    resource: &ResourceName,
    timeout: Duration,
) -> Result<(), RegisterError> {
    let call = async {
        let path = kubelet_socket.to_owned();
        // The address is not used: the connector below knows the socket.
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_| {
                let path = path.clone();
                async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
            }))
            .await
            .map_err(|source| RegisterError::Connect { path: kubelet_socket.display().to_string(), source })?;
        let request = wire::RegisterRequest {
            version: wire::VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.as_str().to_owned(),
            options: Some(convert::options()),
        };
        let answer = RegistrationClient::new(channel).register(request).await;
        answer.map(|_| ()).map_err(|status| RegisterError::Refused { resource: resource.clone(), status })
    };
    let late = |_| RegisterError::Late { resource: resource.clone(), after: timeout };
    tokio::time::timeout(timeout, call).await.map_err(late)?
}
