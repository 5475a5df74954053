//! [`NodeFollower`]: the labels of one node, as they are now and whenever they change.
//!
//! Lists and watches one node by a field selector, its metadata only. It publishes on a `watch` channel, and is the
//! only reader of nodes. What it published last stays while the API server is away.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, ObjectMeta, WatchParams};
use kube::core::WatchEvent;
use linkwise::backoff::Backoff;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::attempts::{Attempts, shortened};
use crate::error::ApiError;
use crate::server::ApiServer;

/// The kind, in metrics.
const OBJECT: &str = "nodes";

/// How much longer than asked for a watch may be silent.
const GRACE: Duration = Duration::from_secs(30);

/// What the API server has of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeLabels {
    /// There is no node of that name.
    Absent,
    /// Its labels.
    Of(BTreeMap<String, String>),
}

/// Follows one node.
pub struct NodeFollower {
    server: ApiServer,
    node: String,
    attempts: Attempts,
    /// Whether the last watch began and broke: then only an event shows that watches work again.
    broken: bool,
    /// Paces watches that end too soon, or whose version has expired.
    turns: Backoff,
}

impl NodeFollower {
    /// Asks nothing yet.
    pub fn new(server: ApiServer, node: String) -> Self {
        let pace = *server.pace();
        let (attempts, turns) = (Attempts::of("follow the node", &pace), Backoff::new(pace.first, pace.longest));
        Self { server, node, attempts, broken: false, turns }
    }

    /// Publishes the labels until `shutdown`. Errors are logged and tried again.
    pub async fn run(mut self, labels: watch::Sender<Option<NodeLabels>>, shutdown: CancellationToken) {
        let follow = async {
            loop {
                let pause = self.turn(&labels).await;
                tokio::time::sleep(pause).await;
            }
        };
        shutdown.run_until_cancelled(follow).await;
    }

    /// Reads the node and follows it until that breaks. Returns the pause before the next turn.
    async fn turn(&mut self, labels: &watch::Sender<Option<NodeLabels>>) -> Duration {
        let mut version = match self.list(labels).await {
            Ok(version) => version,
            Err(error) => return self.attempts.failed(&error),
        };
        let began = Instant::now();
        loop {
            let opened = Instant::now();
            match self.watch(version, labels).await {
                // A watch that the server ended in its time is continued; one that ended at once costs a pause.
                Ok(last) if opened.elapsed() >= self.server.pace().first => version = last,
                Ok(_) => return shortened(self.turns.failed_after(began.elapsed())),
                // What was read is too old to continue from: no fault, the node is read anew.
                Err(error) if error.code() == Some(410) => return shortened(self.turns.failed_after(began.elapsed())),
                Err(error) => return self.attempts.failed(&error),
            }
        }
    }

    /// Reads the node. Returns the version from which to watch.
    async fn list(&mut self, labels: &watch::Sender<Option<NodeLabels>>) -> Result<String, ApiError> {
        let params = ListParams::default().fields(&self.only());
        let list = |client| async move { Api::<Node>::all(client).list_metadata(&params).await };
        let list = self.server.call(OBJECT, "list", list).await?;
        let found = list.items.into_iter().map(|node| node.metadata).find(|metadata| self.is_meant(metadata));
        publish(labels, found.map_or(NodeLabels::Absent, of));
        Ok(list.metadata.resource_version.unwrap_or_default())
    }

    /// Follows the node from a version until the server ends the watch. Returns the last version.
    async fn watch(
        &mut self,
        mut version: String,
        labels: &watch::Sender<Option<NodeLabels>>,
    ) -> Result<String, ApiError> {
        let lasts = shortened(self.server.pace().watch);
        // What the API takes, in seconds.
        let seconds = u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX).clamp(1, 294);
        let (params, from) = (WatchParams::default().fields(&self.only()).timeout(seconds), version.clone());
        let watch = |client| async move { Api::<Node>::all(client).watch_metadata(&params, &from).await };
        let mut events = pin!(self.server.call(OBJECT, "watch", watch).await?);
        if !self.broken {
            self.attempts.succeeded();
        }
        while let Ok(Some(event)) = tokio::time::timeout(lasts + GRACE, events.next()).await {
            let event = event.map_err(|error| ApiError::of(&error, None)).and_then(|event| match event {
                WatchEvent::Error(status) => Err(ApiError::refused(&status, None)),
                event => Ok(event),
            });
            if let Err(error) = &event {
                self.server.count(OBJECT, "watch", Some(error));
                self.broken = true;
            }
            let (metadata, deleted) = match event? {
                WatchEvent::Added(node) | WatchEvent::Modified(node) => (node.metadata, false),
                WatchEvent::Deleted(node) => (node.metadata, true),
                WatchEvent::Bookmark(bookmark) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(_) => continue,
            };
            if self.is_meant(&metadata) {
                version = metadata.resource_version.clone().unwrap_or_default();
                publish(labels, if deleted { NodeLabels::Absent } else { of(metadata) });
                self.works();
            }
        }
        self.works();
        Ok(version)
    }

    fn works(&mut self) {
        self.broken = false;
        self.attempts.succeeded();
    }

    fn only(&self) -> String {
        format!("metadata.name={}", self.node)
    }

    /// Whether this is the node: the server may send what was not asked for.
    fn is_meant(&self, metadata: &ObjectMeta) -> bool {
        metadata.name.as_ref() == Some(&self.node)
    }
}

fn of(metadata: ObjectMeta) -> NodeLabels {
    NodeLabels::Of(metadata.labels.unwrap_or_default())
}

fn publish(labels: &watch::Sender<Option<NodeLabels>>, now: NodeLabels) {
    labels.send_if_modified(|last| {
        let changed = last.as_ref() != Some(&now);
        *last = Some(now);
        changed
    });
}
