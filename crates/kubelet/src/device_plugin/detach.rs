//! A registration that fails on purpose, so that the kubelet forgets which client has the resource's name.
//!
//! Called by `life`, beside a plugin of the resource that was there before us. Kubelets up to 1.36 keep one client for
//! each resource name, and when any stream of the resource ends they disconnect that client, whichever it is: the end
//! of the plugin before us would end our registration. A registration whose GetDevicePluginOptions fails takes the
//! client out of that place (`connectClient`, `runClient` in pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go),
//! and leaves endpoint, stream and devices as they are. Newer kubelets keep clients by socket path: there it changes
//! nothing. Kubelets up to 1.24 never ask for options and would call this socket from then on (`addEndpoint` in
//! pkg/kubelet/cm/devicemanager/manager.go): it must not be registered there.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use futures_util::stream::Empty;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::Settings;
use super::register::{RegisterError, register};
use super::session::socket_path;
use crate::registration::{BindError, listen};
use linkwise_core::state::ResourceName;
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use linkwise_system::grpc::accepted;

/// The cause of a name that the kubelet may not have forgotten.
#[derive(Debug, Error)]
pub(super) enum DetachError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("the kubelet was not asked")]
    Ask(#[source] RegisterError),
    #[error("the kubelet took a registration that failed")]
    Taken,
    #[error("the server of the registration that fails ended")]
    Ended,
}

/// Registers a socket whose plugin refuses to tell its options. This may wait for ever: the caller has the deadline.
pub(super) async fn detach(settings: &Settings, resource: &ResourceName, random: u64) -> Result<(), DetachError> {
    let (path, name) = socket_path(settings, resource, random);
    let (_file, listener) = listen(&path, &settings.callers)?;
    let cut = CancellationToken::new();
    let _cut = cut.clone().drop_guard();
    let refusing = Refusing::default();
    let asked = Arc::clone(&refusing.asked);
    let connections = accepted(listener, cut, watch::Sender::default(), Arc::new(|_| ()));
    let server = tonic::transport::Server::builder().add_service(DevicePluginServer::new(refusing));
    let kubelet = OnceLock::new();
    let answer = tokio::select! {
        answer = register(&settings.kubelet_socket, &name, resource, &kubelet) => answer,
        _ = server.serve_with_incoming(connections) => return Err(DetachError::Ended),
    };
    match answer {
        // The kubelet forgets the client before it answers.
        Err(RegisterError::Refused { .. }) if asked.load(Ordering::Acquire) => Ok(()),
        Err(error) => Err(DetachError::Ask(error)),
        Ok(()) => Err(DetachError::Taken),
    }
}

/// Offers nothing, and refuses every call.
#[derive(Default)]
struct Refusing {
    /// True once the kubelet has asked for the options.
    asked: Arc<AtomicBool>,
}

fn refusal() -> Status {
    Status::unavailable("refused on purpose: linkwise takes over from the plugin before it")
}

#[tonic::async_trait]
impl DevicePlugin for Refusing {
    type ListAndWatchStream = Pin<Box<Empty<Result<wire::ListAndWatchResponse, Status>>>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<wire::Empty>,
    ) -> Result<Response<wire::DevicePluginOptions>, Status> {
        self.asked.store(true, Ordering::Release);
        Err(refusal())
    }

    async fn list_and_watch(&self, _: Request<wire::Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        Err(refusal())
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<wire::PreferredAllocationRequest>,
    ) -> Result<Response<wire::PreferredAllocationResponse>, Status> {
        Err(refusal())
    }

    async fn allocate(&self, _: Request<wire::AllocateRequest>) -> Result<Response<wire::AllocateResponse>, Status> {
        Err(refusal())
    }

    async fn pre_start_container(
        &self,
        _: Request<wire::PreStartContainerRequest>,
    ) -> Result<Response<wire::PreStartContainerResponse>, Status> {
        Err(refusal())
    }
}
