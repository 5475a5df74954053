//! The Registration client: announces a resource and our socket to the kubelet.

use std::path::Path;
use std::sync::OnceLock;

use thiserror::Error;
use tonic::Status;

use super::channel::{ConnectError, connect};
use super::convert;
use linkwise_core::quote::one_line;
use linkwise_core::state::ResourceName;
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::registration_client::RegistrationClient;
use linkwise_system::uds::Peer;

/// The cause of a registration that failed.
#[derive(Debug, Error)]
pub(super) enum RegisterError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the kubelet refused to register {resource}: {} ({})", one_line(.status.message()), .status.code())]
    Refused { resource: ResourceName, status: Box<Status> },
}

/// Registers a resource that is served on the socket named `endpoint` beside the kubelet's. `kubelet` gets the
/// process that listens on kubelet.sock, before the request is sent. It may wait for ever: the caller has the deadline.
pub(super) async fn register(
    kubelet_socket: &Path,
    endpoint: &str,
    resource: &ResourceName,
    kubelet: &OnceLock<Peer>,
) -> Result<(), RegisterError> {
    let (channel, listens) = connect(kubelet_socket).await?;
    kubelet.get_or_init(|| listens);
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
