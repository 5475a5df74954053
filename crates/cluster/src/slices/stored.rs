//! [`Stored`]: the API server's slices, as last seen.
//!
//! [`Slices`] keeps up with the ResourceSlices of one driver on one node as they change; [`all_slices`] reads those of
//! all nodes, for a command that a person runs once.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use kube::api::{ApiResource, DynamicObject, ListParams, WatchParams};
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::watch;

use super::{Disturbances, is_on, selector};
use crate::error::{ApiError, ApiMetrics};
use crate::follower::{Events, Followed};
use crate::server::{self, Access, ApiServer, Pace};
use linkwise_core::state::DRA_DRIVER;

/// The stored slices by name, as last seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Stored {
    pub slices: BTreeMap<String, Value>,
    /// Set once the slices were listed.
    pub is_known: bool,
    /// The number of lists so far. The writer reads the server's release after each, because a server that comes back
    /// may have another one.
    pub lists: u64,
    pub disturbances: Disturbances,
    /// The version of the object that `disturbances` counted last as changed.
    last_change: Option<u64>,
}

/// The version of an object as a number, as etcd's are; `u64::MAX` for any other text.
fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok()).unwrap_or(u64::MAX)
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

impl Stored {
    /// Stores an object, unless the known one is at least as new. Returns true if anything changed.
    fn put(&mut self, object: Value) -> bool {
        let name = name(&object).to_owned();
        if self.slices.get(&name).is_some_and(|known| version(known) >= version(&object) && version(known) != u64::MAX)
        {
            return false;
        }
        self.slices.insert(name, object);
        true
    }

    /// Stores the server's answer to a write of ours.
    pub fn written(&mut self, object: Value) {
        let version = version(&object);
        // If the event came before the answer, it was counted as a change by another program.
        if !self.put(object) && self.last_change == Some(version) {
            self.last_change = None;
            self.disturbances.changes = self.disturbances.changes.saturating_sub(1);
        }
    }

    /// Records that linkwise deleted an object.
    pub fn removed(&mut self, name: &str) {
        if self.slices.remove(name).is_none() {
            // The event came before the answer.
            self.disturbances.deletions = self.disturbances.deletions.saturating_sub(1);
        }
    }

    /// Stores an object from the watch, or removes a deleted one. Returns true if anything changed.
    pub fn event(&mut self, object: Value, is_deleted: bool) -> bool {
        let version_now = version(&object);
        if is_deleted {
            let name = name(&object);
            let is_older = self.slices.get(name).is_some_and(|known| version(known) > version_now);
            let changed = !is_older && self.slices.remove(name).is_some();
            self.disturbances.deletions += u64::from(changed);
            return changed;
        }
        let changed = self.put(object);
        if changed {
            self.last_change = Some(version_now);
            self.disturbances.changes += 1;
        }
        changed
    }

    /// Stores a list. Returns true if anything changed.
    pub fn listed(&mut self, slices: BTreeMap<String, Value>) -> bool {
        let is_as_known = |(name, found): (&String, &Value)| {
            self.slices.get(name).is_some_and(|known| version(known) == version(found))
        };
        let (is_changed, is_less) = (!slices.iter().all(is_as_known), slices.len() < self.slices.len());
        if self.is_known {
            self.disturbances.changes += u64::from(is_changed);
            self.disturbances.deletions += u64::from(is_less);
        }
        let is_news = !self.is_known || is_changed || is_less;
        (self.slices, self.is_known) = (slices, true);
        self.lists = self.lists.wrapping_add(1);
        is_news
    }
}

/// The kind, in metrics.
pub(crate) const OBJECT: &str = "resourceslices";

pub(crate) fn resource() -> ApiResource {
    server::resource("resource.k8s.io", "v1", "ResourceSlice", OBJECT)
}

/// Lists our slices. Also returns the version of the list.
pub(super) async fn list(server: &mut ApiServer, node: &str) -> Result<(BTreeMap<String, Value>, String), ApiError> {
    let params = ListParams::default().fields(&selector(node));
    let list = |client| async move { Api::<DynamicObject>::all_with(client, &resource()).list(&params).await };
    let list = server.call(OBJECT, "list", list).await?;
    let mut slices = BTreeMap::new();
    for object in list.items {
        let slice = value(&object)?;
        if is_on(node, &slice) {
            slices.insert(object.metadata.name.unwrap_or_default(), slice);
        }
    }
    Ok((slices, list.metadata.resource_version.unwrap_or_default()))
}

pub(crate) fn value(object: &DynamicObject) -> Result<Value, ApiError> {
    serde_json::to_value(object).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Follows the slices of a node, and publishes them on a channel.
pub(super) struct Slices {
    pub node: String,
    pub stored: watch::Sender<Stored>,
}

impl Followed for Slices {
    const OBJECT: &'static str = OBJECT;
    type Object = DynamicObject;

    fn selector(&self) -> String {
        selector(&self.node)
    }

    async fn list(&mut self, server: &mut ApiServer) -> Result<String, ApiError> {
        let (slices, version) = list(server, &self.node).await?;
        // The writer is notified of each list, even an equal one: the server may have another release.
        self.stored.send_modify(|stored| _ = stored.listed(slices));
        Ok(version)
    }

    async fn watch(client: Client, params: WatchParams, from: String) -> kube::Result<Events<DynamicObject>> {
        Ok(Api::all_with(client, &resource()).watch(&params, &from).await?.boxed())
    }

    fn event(&mut self, object: DynamicObject, is_deleted: bool) -> Result<(), ApiError> {
        let object = value(&object)?;
        if is_on(&self.node, &object) {
            self.stored.send_if_modified(|stored| stored.event(object, is_deleted));
        }
        Ok(())
    }
}

/// The number of slices in one answer: a slice has some 10 kB.
const PAGE: u32 = 500;

/// The driver's ResourceSlices in the cluster.
///
/// # Errors
///
/// See [`ApiError`].
pub async fn all_slices(access: Access) -> Result<Vec<Value>, ApiError> {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let (mut slices, mut token) = (Vec::new(), None);
    loop {
        let params = ListParams::default().fields(&format!("spec.driver={DRA_DRIVER}")).limit(PAGE);
        let params = ListParams { continue_token: token, ..params };
        let list = |client| async move { Api::<DynamicObject>::all_with(client, &resource()).list(&params).await };
        let page = server.call(OBJECT, "list", list).await?;
        for slice in &page.items {
            slices.push(value(slice)?);
        }
        token = page.metadata.continue_.filter(|token| !token.is_empty());
        if token.is_none() {
            return Ok(slices);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(version: u64) -> Value {
        json!({"metadata": {"name": "a", "resourceVersion": version.to_string()}})
    }

    fn changes(stored: &Stored) -> u64 {
        stored.disturbances.changes
    }

    #[test]
    fn event_before_the_answer_is_no_disturbance() {
        let mut stored = Stored::default();
        assert!(stored.event(slice(1), false));
        stored.written(slice(1));
        assert_eq!(stored.disturbances, Disturbances::default());
        // A write that changed nothing comes back unchanged.
        stored.written(slice(1));
        stored.event(slice(2), false);
        stored.written(slice(1));
        assert_eq!(changes(&stored), 1, "somebody else's");
        assert!(stored.event(slice(3), true));
        stored.removed("a");
        assert_eq!(stored.disturbances, Disturbances { changes: 1, deletions: 0 });
    }

    #[test]
    fn answer_before_the_event_is_no_disturbance() {
        let mut stored = Stored::default();
        stored.written(slice(1));
        assert!(!stored.event(slice(1), false));
        stored.removed("a");
        assert!(!stored.event(slice(2), true));
        assert_eq!(stored.disturbances, Disturbances::default());
    }

    #[test]
    fn list_tells_changes_from_deletions() {
        let list = |version| BTreeMap::from([("a".to_owned(), slice(version))]);
        let mut stored = Stored::default();
        assert!(stored.listed(list(1)), "the first one");
        assert!(!stored.listed(list(1)));
        assert!(stored.listed(list(2)));
        assert_eq!(stored.disturbances, Disturbances { changes: 1, deletions: 0 });
        assert!(stored.listed(BTreeMap::new()));
        assert_eq!(stored.disturbances, Disturbances { changes: 1, deletions: 1 });
        assert!(stored.listed(list(4)));
        assert_eq!(changes(&stored), 2);
    }
}
