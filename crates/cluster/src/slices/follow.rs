//! [`Slices`]: keeps up with the ResourceSlices of one driver on one node as they change.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use kube::api::{ApiResource, DynamicObject, ListParams, WatchParams};
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::watch;

use crate::error::ApiError;
use crate::follower::{Events, Followed};
use crate::server::{self, ApiServer};

use super::SliceSettings;
use super::stored::Stored;

/// The kind, in metrics.
pub(crate) const OBJECT: &str = "resourceslices";

pub(crate) fn resource() -> ApiResource {
    server::resource("resource.k8s.io", "v1", "ResourceSlice", OBJECT)
}

/// Lists our slices. Also returns the version of the list.
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

pub(crate) fn value(object: &DynamicObject) -> Result<Value, ApiError> {
    serde_json::to_value(object).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Stores a list. The writer is notified of each list, even an equal one: the server may have another release.
pub(super) fn listed(stored: &watch::Sender<Stored>, slices: BTreeMap<String, Value>) {
    stored.send_modify(|stored| {
        stored.listed(slices);
    });
}

/// The slices, and the channel on which they are published.
pub(super) struct Slices {
    pub settings: SliceSettings,
    pub stored: watch::Sender<Stored>,
}

impl Followed for Slices {
    const OBJECT: &'static str = OBJECT;
    type Object = DynamicObject;

    fn selector(&self) -> String {
        self.settings.selector()
    }

    async fn list(&mut self, server: &mut ApiServer) -> Result<String, ApiError> {
        let (slices, version) = list(server, &self.settings).await?;
        listed(&self.stored, slices);
        Ok(version)
    }

    async fn watch(client: Client, params: WatchParams, from: String) -> kube::Result<Events<DynamicObject>> {
        Ok(Api::all_with(client, &resource()).watch(&params, &from).await?.boxed())
    }

    fn event(&mut self, object: DynamicObject, deleted: bool) -> Result<(), ApiError> {
        let object = value(&object)?;
        if self.settings.covers(&object) {
            self.stored.send_if_modified(|stored| stored.event(object, deleted));
        }
        Ok(())
    }
}
