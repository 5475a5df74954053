//! Registrations with the kubelet: one that announces a resource and our socket, and one that fails on purpose.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::layer::layer_fn;
use tower::service_fn;

use super::channel::{ConnectError, connect};
use super::session::socket_path;
use super::{Settings, convert};
use crate::registration::{BindError, listen};
use linkwise_core::quote::one_line;
use linkwise_core::state::ResourceName;
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::registration_client::RegistrationClient;
use linkwise_system::grpc::accepted;
use linkwise_system::uds::Peer;

/// The answer to the kubelet's calls to a socket whose registration fails on purpose. The kubelet logs it.
const REFUSAL: &str = "refused on purpose: linkwise takes over from the plugin before it";

/// The cause of a registration that failed.
#[derive(Debug, Error)]
pub(super) enum RegisterError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the kubelet refused to register {resource}: {} ({})", one_line(.status.message()), .status.code())]
    Refused { resource: ResourceName, status: Box<Status> },
}

/// Registers a resource that is served on the socket named `endpoint` in the kubelet's folder. `kubelet` gets
/// the process that listens on kubelet.sock, before the request is sent. The call may wait for ever: the caller has the
/// deadline.
pub(super) async fn register(
    kubelet_socket: &Path,
    endpoint: &str,
    resource: &ResourceName,
    kubelet: &OnceLock<Peer>,
) -> Result<(), RegisterError> {
    let (channel, peer) = connect(kubelet_socket).await?;
    kubelet.get_or_init(|| peer);
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

/// The cause of a failed detachment: the kubelet may not have forgotten the client under the resource's name.
#[derive(Debug, Error)]
pub(super) enum DetachError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("cannot detach from the plugin before us")]
    Ask(#[source] RegisterError),
    #[error("the kubelet accepted the registration that fails on purpose")]
    Accepted,
    #[error("the server of the registration that fails on purpose ended")]
    Ended,
}

/// Makes the kubelet forget the client under the resource's name, by the registration of a socket that refuses
/// GetDevicePluginOptions. The caller has the deadline.
///
/// Kubelets up to 1.36 keep one client for each resource name, and when any stream of the resource ends they disconnect
/// that client, whichever it is: the end of the plugin before us would end our registration. A registration whose
/// GetDevicePluginOptions fails takes the client out of that place (`connectClient`, `runClient` in
/// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go), and leaves endpoint, stream and devices as they are. Newer
/// kubelets keep clients by socket path, so the failed registration changes nothing.
pub(super) async fn detach(settings: &Settings, resource: &ResourceName, random: u64) -> Result<(), DetachError> {
    let (path, name) = socket_path(settings, resource, random);
    let (_file, listener) = listen(&path, &settings.callers)?;
    let cut = CancellationToken::new();
    let _cut = cut.clone().drop_guard();
    let (open, dialled) = watch::channel(0);
    let connections = accepted(listener, cut, open, Arc::new(|_| ()));
    let refuse =
        |_: http::Request<Body>| async { Ok::<_, Infallible>(Status::unavailable(REFUSAL).into_http::<Body>()) };
    let mut server = tonic::transport::Server::builder().layer(layer_fn(move |_: Routes| service_fn(refuse)));
    let server = server.add_routes(Routes::default());
    let kubelet = OnceLock::new();
    let answer = tokio::select! {
        answer = register(&settings.kubelet_socket, &name, resource, &kubelet) => answer,
        _ = server.serve_with_incoming(connections) => return Err(DetachError::Ended),
    };
    match answer {
        // The kubelet dials, asks and forgets the client before it answers.
        Err(RegisterError::Refused { .. }) if dialled.has_changed().is_ok_and(|changed| changed) => Ok(()),
        Err(error) => Err(DetachError::Ask(error)),
        Ok(()) => Err(DetachError::Accepted),
    }
}
