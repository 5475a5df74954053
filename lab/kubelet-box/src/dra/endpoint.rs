//! The connections to one driver. Each registration dials the registration socket. The socket of the driver's services
//! stays connected while the driver is registered.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use linkwise_kubelet_api::dra_health::v1::dra_resource_health_client::DraResourceHealthClient as HealthV1;
use linkwise_kubelet_api::dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient as HealthV1Alpha1;
use linkwise_kubelet_api::dra_health::v1alpha1::{NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Channel, Uri};
use tonic::{Status, Streaming};

use super::super::socket::{Counter, dial};
use super::ClaimRef;

/// A socket could not be dialled.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The `:authority` that grpc-go would send is not valid for HTTP/2 libraries written in Rust.
    #[error("'{0}' is not a valid authority")]
    Authority(String, #[source] http::Error),
    /// The socket could not be connected.
    #[error("cannot connect to {0}")]
    Connect(PathBuf, #[source] tonic::transport::Error),
}

/// The `:authority` that grpc-go derives from a target. It percent-encodes all but alphanumerics and some characters
/// (grpc-go 1.81, clientconn.go, `encodeAuthority`).
pub fn authority(target: &str) -> String {
    let mut encoded = String::new();
    for byte in target.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded += &format!("%{byte:02X}");
        }
    }
    encoded
}

/// Dials a registration socket by its bare path, from which grpc-go makes the authority.
pub(super) async fn dial_registration(path: &Path, connections: &TaskTracker) -> Result<Channel, DialError> {
    let authority = authority(&path.display().to_string());
    let uri = Uri::builder().scheme("http").authority(authority.as_str()).path_and_query("/").build();
    let uri = uri.map_err(|source| DialError::Authority(authority, source))?;
    let channel = dial(path, uri, connections, Counter::default()).await;
    channel.map_err(|source| DialError::Connect(path.to_owned(), source))
}

/// The answers of a driver, by the UID of the claim.
type Answers<T> = Result<HashMap<String, T>, Status>;

/// A registered endpoint of a driver. Clones share it.
#[derive(Clone)]
pub(super) struct Driver {
    /// The registration socket through which the driver registered.
    pub registration: PathBuf,
    /// The socket of the driver's services.
    pub endpoint: PathBuf,
    /// The health service that the kubelet watches, if any.
    pub health: Option<&'static str>,
    /// The current connection.
    pub channel: watch::Sender<Option<Channel>>,
    /// The number of open connections. A connection counts as soon as it is connected, before anything is sent
    /// (grpc-go, internal/transport/http2_client.go: `ConnBegin` comes before the preface; `HandleConn` in
    /// pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go).
    pub open: Counter,
    /// Cancelled when the driver is deregistered.
    pub closed: CancellationToken,
}

impl Driver {
    pub fn is_connected(&self) -> bool {
        *self.open.borrow() > 0
    }

    /// The connection. Waits for one that is being made.
    async fn connected(&self) -> Result<Channel, Status> {
        let (mut channel, mut open) = (self.channel.subscribe(), self.open.subscribe());
        tokio::select! {
            biased;
            Ok(channel) = channel.wait_for(Option::is_some) => channel.clone(),
            _ = open.wait_for(|open| *open == 0) => None,
        }
        .ok_or_else(|| Status::unavailable("no connection to the driver"))
    }

    /// Makes a call, which fails if the driver is deregistered, because a kubelet closes the connection then
    /// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go: `remove`).
    async fn until_closed<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let closing = || Err(Status::cancelled("grpc: the client connection is closing"));
        self.closed.run_until_cancelled(call).await.unwrap_or_else(closing)
    }

    pub async fn prepare(self, claims: Vec<ClaimRef>) -> Answers<wire::NodePrepareResourceResponse> {
        let request = wire::NodePrepareResourcesRequest { claims: claims.into_iter().map(on_wire).collect() };
        let channel = self.connected().await?;
        let answer = self.until_closed(DraPluginClient::new(channel).node_prepare_resources(request)).await;
        Ok(answer?.into_inner().claims)
    }

    pub async fn unprepare(self, claims: Vec<ClaimRef>) -> Answers<wire::NodeUnprepareResourceResponse> {
        let request = wire::NodeUnprepareResourcesRequest { claims: claims.into_iter().map(on_wire).collect() };
        let channel = self.connected().await?;
        let answer = self.until_closed(DraPluginClient::new(channel).node_unprepare_resources(request)).await;
        Ok(answer?.into_inner().claims)
    }

    /// Opens the health stream if the kubelet watches one.
    pub async fn watch_health(
        &self,
        channel: Channel,
    ) -> Option<Result<Streaming<NodeWatchResourcesResponse>, Status>> {
        let request = NodeWatchResourcesRequest {};
        let answer = match self.health? {
            linkwise_kubelet_api::dra_health::v1::SERVICE => HealthV1::new(channel).node_watch_resources(request).await,
            _ => HealthV1Alpha1::new(channel).node_watch_resources(request).await,
        };
        Some(answer.map(tonic::Response::into_inner))
    }
}

fn on_wire(claim: ClaimRef) -> wire::Claim {
    wire::Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authority_is_encoded_as_by_grpc_go() {
        let path = "/var/lib/kubelet/plugins_registry/linkwise-1@gpu.nvidia.com-reg.sock";
        let encoded = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Flinkwise-1@gpu.nvidia.com-reg.sock";
        assert_eq!(authority(path), encoded);
        assert_eq!(authority("/a b%é"), "%2Fa%20b%25%C3%A9");
    }
}
