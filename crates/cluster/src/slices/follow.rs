//! [`SliceFollower`]: the ResourceSlices of one driver on one node, as they are now and whenever they change.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, WatchParams};
use kube::core::WatchEvent;
use linkwise::backoff::Backoff;
use serde_json::Value;
use tokio::sync::watch;

use crate::attempts::{Attempts, shortened};
use crate::error::ApiError;
use crate::server::ApiServer;

use super::SliceSettings;
use super::stored::Stored;

/// The kind, in metrics.
pub(super) const OBJECT: &str = "resourceslices";

/// How much longer than asked for a watch may be silent.
const GRACE: Duration = Duration::from_secs(30);

/// Follows the slices.
pub(super) struct SliceFollower {
    server: ApiServer,
    settings: SliceSettings,
    attempts: Attempts,
    /// Whether the last watch began and broke: then only an event shows that watches work again.
    broken: bool,
    /// Paces watches that end too soon, or whose version has expired.
    turns: Backoff,
}

pub(super) fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceSlice");
    ApiResource::from_gvk_with_plural(&kind, OBJECT)
}

/// Lists our slices. Returns the version of the list too.
pub(super) async fn list(
    server: &mut ApiServer,
    settings: &SliceSettings,
) -> Result<(BTreeMap<String, Value>, String), ApiError> {
    let params = ListParams::default().fields(&settings.selector());
    let list = |client| async move { Api::<DynamicObject>::all_with(client, &resource()).list(&params).await };
    let list = server.call(OBJECT, "list", list).await?;
    let mut slices = BTreeMap::new();
    for object in list.items {
        let slice = value(&object)?;
        if settings.covers(&slice) {
            slices.insert(object.metadata.name.unwrap_or_default(), slice);
        }
    }
    Ok((slices, list.metadata.resource_version.unwrap_or_default()))
}

pub(super) fn value(object: &DynamicObject) -> Result<Value, ApiError> {
    serde_json::to_value(object).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Takes over a list.
pub(super) fn listed(stored: &watch::Sender<Stored>, slices: BTreeMap<String, Value>) {
    stored.send_if_modified(|stored| stored.listed(slices));
}

impl SliceFollower {
    pub fn new(server: ApiServer, settings: SliceSettings) -> Self {
        let pace = *server.pace();
        let attempts = Attempts::of("follow the ResourceSlices", &pace);
        Self { server, settings, attempts, broken: false, turns: Backoff::new(pace.first, pace.longest) }
    }

    /// Follows for ever. Errors are logged and tried again.
    pub async fn run(mut self, stored: &watch::Sender<Stored>) {
        loop {
            let pause = self.turn(stored).await;
            tokio::time::sleep(pause).await;
        }
    }

    /// Lists the slices and follows them until that breaks. Returns the pause before the next turn.
    async fn turn(&mut self, stored: &watch::Sender<Stored>) -> Duration {
        let mut version = match list(&mut self.server, &self.settings).await {
            Ok((slices, version)) => {
                listed(stored, slices);
                version
            }
            Err(error) => return self.attempts.failed(&error),
        };
        let began = Instant::now();
        loop {
            let opened = Instant::now();
            match self.watch(version, stored).await {
                // A watch that the server ended in its time is continued; one that ended at once costs a pause.
                Ok(last) if opened.elapsed() >= self.server.pace().first => version = last,
                Ok(_) => return shortened(self.turns.failed_after(began.elapsed())),
                // What was read is too old to continue from: no fault, the slices are read anew.
                Err(error) if error.code() == Some(410) => return shortened(self.turns.failed_after(began.elapsed())),
                Err(error) => return self.attempts.failed(&error),
            }
        }
    }

    /// Follows the slices from a version until the server ends the watch. Returns the last version.
    async fn watch(&mut self, mut version: String, stored: &watch::Sender<Stored>) -> Result<String, ApiError> {
        let lasts = shortened(self.server.pace().watch);
        // What the API takes, in seconds.
        let seconds = u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX).clamp(1, 294);
        let (params, from) =
            (WatchParams::default().fields(&self.settings.selector()).timeout(seconds), version.clone());
        let watch =
            |client| async move { Api::<DynamicObject>::all_with(client, &resource()).watch(&params, &from).await };
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
            let (object, deleted) = match event? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
                WatchEvent::Deleted(object) => (object, true),
                WatchEvent::Bookmark(bookmark) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(_) => continue,
            };
            version = object.metadata.resource_version.clone().unwrap_or_default();
            let object = value(&object)?;
            if self.settings.covers(&object) {
                stored.send_if_modified(|stored| stored.event(object, deleted));
            }
            self.works();
        }
        self.works();
        Ok(version)
    }

    fn works(&mut self) {
        self.broken = false;
        self.attempts.succeeded();
    }
}
