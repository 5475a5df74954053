//! [`Follower`]: keeps up with objects as they change. It lists them, watches their changes, and lists them again if a
//! watch breaks. The objects go to a [`Followed`].
//!
//! [`follow_node`] lists and watches one node by a field selector, its metadata only, and publishes its labels on a
//! `watch` channel. The last published labels stay while the API server is away.
//!
//! [`keep`] does the opposite: it keeps an object equal to the content of a channel.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectMeta, PartialObjectMeta, WatchParams};
use kube::core::WatchEvent;
use kube::{Api, Client, Resource};
use tokio::sync::watch;

use crate::error::{ApiError, Attempts, shortened};
use crate::server::ApiServer;
use linkwise_core::backoff::Backoff;
use linkwise_system::send_if_new;

/// The time for which a watch may be silent beyond its duration.
const GRACE: Duration = Duration::from_secs(30);

/// The events of a watch.
pub(crate) type Events<T> = BoxStream<'static, kube::Result<WatchEvent<T>>>;

/// The consumer of the followed objects.
pub(crate) trait Followed {
    /// The kind, in metrics.
    const OBJECT: &'static str;

    /// An object in the form that a watch sends.
    type Object: Resource;

    /// The field selector of the objects. A server may send other objects too.
    fn selector(&self) -> String;

    /// Lists and stores the objects. Returns the version from which to watch.
    fn list(&mut self, server: &mut ApiServer) -> impl Future<Output = Result<String, ApiError>> + Send;

    /// Begins a watch from a version.
    fn watch(
        client: Client,
        params: WatchParams,
        from: String,
    ) -> impl Future<Output = kube::Result<Events<Self::Object>>> + Send;

    /// Stores a changed object, or removes a deleted one, which comes in its last form.
    ///
    /// # Errors
    ///
    /// The object cannot be read.
    fn event(&mut self, object: Self::Object, is_deleted: bool) -> Result<(), ApiError>;
}

/// Follows objects.
pub(crate) struct Follower<F> {
    server: ApiServer,
    followed: F,
    attempts: Attempts,
    /// Set if the last watch began and broke: then the beginning of a watch does not show that watches work.
    is_broken: bool,
    /// Paces watches that end too soon, or whose version has expired.
    pauses: Backoff,
}

impl<F: Followed> Follower<F> {
    /// Makes no request yet. `request` names the follower's requests in the log.
    pub fn new(server: ApiServer, request: &'static str, followed: F) -> Self {
        let pace = *server.pace();
        let (attempts, pauses) = (Attempts::of(request, &pace), Backoff::new(pace.first, pace.longest));
        Self { server, followed, attempts, is_broken: false, pauses }
    }

    /// Follows for ever. Errors are logged and tried again.
    pub async fn run(mut self) {
        loop {
            let pause = self.list_and_watch().await;
            tokio::time::sleep(pause).await;
        }
    }

    /// Lists and follows the objects until a request fails or a watch ends too soon. Returns the pause until the next
    /// list.
    async fn list_and_watch(&mut self) -> Duration {
        let mut version = match self.followed.list(&mut self.server).await {
            Ok(version) => version,
            Err(error) => return self.attempts.failed(&error),
        };
        let began = Instant::now();
        loop {
            let opened = Instant::now();
            match self.watch(version).await {
                // A watch that lasted is continued. If it ended at once, the objects are listed again after a pause.
                Ok(last) if opened.elapsed() >= self.server.pace().first => version = last,
                Ok(_) => return shortened(self.pauses.failed_after(began.elapsed())),
                // The version is too old to continue from. This is not a fault; the objects are listed again.
                Err(error) if error.code() == Some(410) => return shortened(self.pauses.failed_after(began.elapsed())),
                Err(error) => return self.attempts.failed(&error),
            }
        }
    }

    /// Follows the objects from a version until the watch ends or falls silent. Returns the last version.
    async fn watch(&mut self, mut version: String) -> Result<String, ApiError> {
        let duration = shortened(self.server.pace().watch);
        // The API takes seconds.
        let seconds = u32::try_from(duration.as_secs()).unwrap_or(u32::MAX).max(1);
        let params = WatchParams::default().fields(&self.followed.selector()).timeout(seconds);
        let from = version.clone();
        let mut events = self.server.call(F::OBJECT, "watch", |client| F::watch(client, params, from)).await?;
        if !self.is_broken {
            self.attempts.succeeded();
        }
        while let Ok(Some(event)) = tokio::time::timeout(duration + GRACE, events.next()).await {
            let change = match event {
                Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => Ok((object, false)),
                Ok(WatchEvent::Deleted(object)) => Ok((object, true)),
                Ok(WatchEvent::Bookmark(bookmark)) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                Ok(WatchEvent::Error(status)) => Err(ApiError::refused(&status, None)),
                Err(error) => Err(ApiError::of(&error, None)),
            };
            if let Err(error) = &change {
                self.server.count(F::OBJECT, "watch", Some(error));
                self.is_broken = true;
            }
            let (object, is_deleted) = change?;
            version = object.meta().resource_version.clone().unwrap_or_default();
            self.followed.event(object, is_deleted)?;
            self.record_success();
        }
        self.record_success();
        Ok(version)
    }

    fn record_success(&mut self) {
        self.is_broken = false;
        self.attempts.succeeded();
    }
}

/// The writer of one object.
pub(crate) trait Kept {
    /// The wanted content of the object.
    type Wanted: Send + Sync;

    /// Compares the object with the wanted content, and writes it if it differs. Returns the time until the next
    /// comparison.
    fn write(&mut self, wanted: &Arc<Self::Wanted>) -> impl Future<Output = Result<Duration, ApiError>> + Send;
}

/// Keeps an object equal to the content of a channel until the channel is closed: compares them after each change, and
/// once in a while. Nothing is written while the channel has no content. Errors are logged and tried again.
pub(crate) async fn keep<W: Kept>(
    mut writer: W,
    mut attempts: Attempts,
    wanted: &mut watch::Receiver<Option<Arc<W::Wanted>>>,
) {
    loop {
        let now = wanted.borrow_and_update().clone();
        let pause = match now {
            None => Duration::MAX,
            Some(now) => match writer.write(&now).await {
                Ok(pause) => {
                    attempts.succeeded();
                    shortened(pause)
                }
                Err(error) => {
                    // The pause is kept even if the channel changes meanwhile: the server may have asked for it.
                    tokio::time::sleep(attempts.failed(&error)).await;
                    continue;
                }
            },
        };
        if let Ok(Err(_)) = tokio::time::timeout(pause, wanted.changed()).await {
            return;
        }
    }
}

/// The API server's answer about the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeLabels {
    /// The node does not exist.
    Absent,
    /// The node's labels.
    Of(BTreeMap<String, String>),
}

/// Publishes the labels of a node, for ever. Errors are logged and tried again.
pub async fn follow_node(server: ApiServer, node: String, labels: watch::Sender<Option<NodeLabels>>) {
    Follower::new(server, "follow the node", Labels { node, labels }).run().await;
}

/// Follows a node's labels, and publishes them on a channel.
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
        self.publish(found.map_or(NodeLabels::Absent, node_labels));
        Ok(list.metadata.resource_version.unwrap_or_default())
    }

    async fn watch(client: Client, params: WatchParams, from: String) -> kube::Result<Events<Self::Object>> {
        Ok(Api::<Node>::all(client).watch_metadata(&params, &from).await?.boxed())
    }

    fn event(&mut self, object: PartialObjectMeta<Node>, is_deleted: bool) -> Result<(), ApiError> {
        if self.is_meant(&object.metadata) {
            self.publish(if is_deleted { NodeLabels::Absent } else { node_labels(object.metadata) });
        }
        Ok(())
    }
}

impl Labels {
    /// Returns true if this is the followed node: the server may send other nodes too.
    fn is_meant(&self, metadata: &ObjectMeta) -> bool {
        metadata.name.as_ref() == Some(&self.node)
    }

    fn publish(&self, now: NodeLabels) {
        send_if_new(&self.labels, Some(now));
    }
}

fn node_labels(metadata: ObjectMeta) -> NodeLabels {
    NodeLabels::Of(metadata.labels.unwrap_or_default())
}
