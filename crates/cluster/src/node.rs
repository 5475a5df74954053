//! [`NodeFollower`]: keeps up with the labels of one node as they change.
//!
//! Lists and watches one node by a field selector, its metadata only. It publishes on a `watch` channel, and is the
//! only reader of nodes. The last published labels stay while the API server is away.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectMeta, PartialObjectMeta, WatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::follower::{Events, Followed, Follower};
use crate::server::ApiServer;

/// The API server's answer about the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeLabels {
    /// The node does not exist.
    Absent,
    /// The node's labels.
    Of(BTreeMap<String, String>),
}

/// Follows one node.
pub struct NodeFollower {
    server: ApiServer,
    node: String,
}

impl NodeFollower {
    /// Makes no request yet.
    pub fn new(server: ApiServer, node: String) -> Self {
        Self { server, node }
    }

    /// Publishes the labels until `shutdown`. Errors are logged and tried again.
    pub async fn run(self, labels: watch::Sender<Option<NodeLabels>>, shutdown: CancellationToken) {
        let followed = Labels { node: self.node, labels };
        let follower = Follower::new(self.server, "follow the node", followed);
        shutdown.run_until_cancelled(follower.run()).await;
    }
}

/// The node's labels, and the channel on which they are published.
struct Labels {
    node: String,
    labels: watch::Sender<Option<NodeLabels>>,
}

impl Followed for Labels {
    const OBJECT: &'static str = "nodes";
    type Object = PartialObjectMeta<Node>;

    fn selector(&self) -> String {
        format!("metadata.name={}", self.node)
    }

    async fn list(&mut self, server: &mut ApiServer) -> Result<String, ApiError> {
        let params = ListParams::default().fields(&self.selector());
        let list = |client| async move { Api::<Node>::all(client).list_metadata(&params).await };
        let list = server.call(Self::OBJECT, "list", list).await?;
        let found = list.items.into_iter().map(|node| node.metadata).find(|metadata| self.is_meant(metadata));
        self.publish(found.map_or(NodeLabels::Absent, of));
        Ok(list.metadata.resource_version.unwrap_or_default())
    }

    async fn watch(client: Client, params: WatchParams, from: String) -> kube::Result<Events<Self::Object>> {
        Ok(Api::<Node>::all(client).watch_metadata(&params, &from).await?.boxed())
    }

    fn event(&mut self, object: PartialObjectMeta<Node>, deleted: bool) -> Result<(), ApiError> {
        if self.is_meant(&object.metadata) {
            self.publish(if deleted { NodeLabels::Absent } else { of(object.metadata) });
        }
        Ok(())
    }
}

impl Labels {
    /// Returns true if this is the node: the server may send other nodes too.
    fn is_meant(&self, metadata: &ObjectMeta) -> bool {
        metadata.name.as_ref() == Some(&self.node)
    }

    fn publish(&self, now: NodeLabels) {
        self.labels.send_if_modified(|last| {
            let changed = last.as_ref() != Some(&now);
            *last = Some(now);
            changed
        });
    }
}

fn of(metadata: ObjectMeta) -> NodeLabels {
    NodeLabels::Of(metadata.labels.unwrap_or_default())
}
