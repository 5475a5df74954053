//! [`NodeFeatureWriter`]: the NodeFeature object that carries this node's labels to Node Feature Discovery.
//!
//! The only writer of NodeFeatures. It follows a channel of labels and keeps the object equal to them, by server-side
//! apply; the object stays when the writer ends. The object has the name that GPU Feature Discovery gives it. An
//! object of GPU Feature Discovery is replaced once. An object that only other programs manage is left alone and
//! reported.
//!
//! The DaemonSet of our pod is the object's owner: when it is deleted, Kubernetes deletes the object too.

mod ownership;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::{ApiError, Attempts};
use crate::follower::{Kept, keep};
use crate::server::{self, ApiServer, typed};
use linkwise_core::quote::quoted;
use ownership::{MANAGER, Ownership, is_updated, ownership};

/// The kind, in metrics.
pub(crate) const OBJECT: &str = "nodefeatures";

/// Labels of a node, by key.
type Labels = BTreeMap<String, String>;

/// The identity of the object, and its owner.
#[derive(Clone, Debug, Default)]
pub struct NodeFeatureSettings {
    /// The node.
    pub node: String,
    /// The object's namespace.
    pub namespace: String,
    /// The name of our pod in that namespace, if it is known: its DaemonSet becomes the object's owner, so that the
    /// labels are deleted with it. The pod itself is never the owner, because the next pod could not take the object
    /// over.
    pub pod: Option<String>,
    /// Set once GPU Feature Discovery's object was replaced. All writers of a process share it: if such an object
    /// appears again, a GPU Feature Discovery is running.
    pub replaced: Arc<AtomicBool>,
}

/// Writes one NodeFeature.
pub struct NodeFeatureWriter {
    server: ApiServer,
    settings: NodeFeatureSettings,
    /// Our DaemonSet; the outer `None` means that it was not looked up yet.
    owner: Option<Option<OwnerReference>>,
    /// The labels that this writer last wrote, or last found to be current.
    written: Option<Arc<Labels>>,
    /// Set if the server forbids patches or deletions: then objects are created and updated, as NVIDIA's role allows.
    uses_update: bool,
    /// The managers that were reported last.
    reported: Option<String>,
}

impl NodeFeatureWriter {
    /// Makes no request yet.
    pub fn new(server: ApiServer, settings: NodeFeatureSettings) -> Self {
        Self { server, settings, owner: None, written: None, uses_update: false, reported: None }
    }

    /// Keeps the object equal to the labels until `shutdown`, or until the channel is closed. Nothing is written while
    /// there are no labels. Errors are logged and tried again.
    pub async fn run(self, mut labels: watch::Receiver<Option<Arc<Labels>>>, shutdown: CancellationToken) {
        let attempts = Attempts::of("write the NodeFeature of Node Feature Discovery", self.server.pace());
        shutdown.run_until_cancelled(keep(self, attempts, &mut labels)).await;
    }
}

impl Kept for NodeFeatureWriter {
    type Wanted = Labels;

    /// An object of another program is left alone, and looked at less often.
    async fn write(&mut self, labels: &Arc<Labels>) -> Result<Duration, ApiError> {
        if self.owner.is_none() {
            self.owner = Some(self.daemon_set().await?);
        }
        let wanted = object(&self.settings, self.owner.clone().flatten(), labels);
        let found = self.read().await?;
        let replaced = self.settings.replaced.load(Relaxed);
        match ownership(found.as_ref(), &wanted, self.written.as_deref(), replaced) {
            Ownership::Current => {}
            Ownership::Foreign(managers) => {
                self.report(managers);
                return Ok(self.server.pace().longest);
            }
            Ownership::Replaceable => {
                self.replace(found.as_ref(), &wanted).await?;
                self.settings.replaced.store(true, Relaxed);
                let (name, namespace) = (self.name(), &self.settings.namespace);
                tracing::info!(name, namespace, "NodeFeature taken over from GPU Feature Discovery");
            }
            // An apply would not remove fields that an update wrote.
            Ownership::Ours if !self.uses_update && found.as_ref().is_some_and(is_updated) => {
                self.replace(found.as_ref(), &wanted).await?;
            }
            Ownership::Ours => self.put(found.as_ref(), &wanted).await?,
        }
        self.reported = None;
        self.written = Some(Arc::clone(labels));
        Ok(self.server.pace().reassert)
    }
}

impl NodeFeatureWriter {
    /// Deletes the object, if it has not changed since it was read, and makes a new one, so that no old field stays.
    async fn replace(&mut self, found: Option<&DynamicObject>, wanted: &Value) -> Result<(), ApiError> {
        if let (Some(found), false) = (found, self.uses_update) {
            let (metadata, name) = (&found.metadata, self.name());
            let as_found =
                Preconditions { uid: metadata.uid.clone(), resource_version: metadata.resource_version.clone() };
            let params = DeleteParams::default().preconditions(as_found);
            let api = self.api();
            let delete = |client| async move { api(client).delete(&name, &params).await };
            match self.server.call(OBJECT, "delete", delete).await {
                Ok(_) => return self.put(None, wanted).await,
                Err(error) if error.code() == Some(404) => return self.put(None, wanted).await,
                Err(error) if error.code() == Some(403) => self.update_from_now_on(&error),
                Err(error) => return Err(error),
            }
        }
        // An update replaces the whole object as well.
        self.put(found, wanted).await
    }

    /// Writes the object over the found one.
    async fn put(&mut self, found: Option<&DynamicObject>, wanted: &Value) -> Result<(), ApiError> {
        let name = self.name();
        if !self.uses_update {
            let (api, name, params) = (self.api(), name.clone(), PatchParams::apply(MANAGER).force());
            let apply = |client| async move { api(client).patch_metadata(&name, &params, &Patch::Apply(wanted)).await };
            match self.server.call(OBJECT, "apply", apply).await {
                Err(error) if error.code() == Some(403) => self.update_from_now_on(&error),
                result => return result.map(drop),
            }
        }
        let mut wanted = typed(wanted.clone())?;
        let (api, params) = (self.api(), PostParams { field_manager: Some(MANAGER.to_owned()), ..Default::default() });
        let result = match found {
            Some(found) => {
                wanted.metadata.resource_version.clone_from(&found.metadata.resource_version);
                let update = |client| async move { api(client).replace(&name, &params, &wanted).await };
                self.server.call(OBJECT, "update", update).await.map(drop)
            }
            None => {
                let create = |client| async move { api(client).create(&params, &wanted).await };
                self.server.call(OBJECT, "create", create).await.map(drop)
            }
        };
        // If the update is refused as well, the verb was not the reason: the next attempt applies again.
        self.uses_update &= !result.as_ref().is_err_and(|error| error.code() == Some(403));
        result
    }

    /// Reads the object; `None` if it does not exist.
    async fn read(&mut self) -> Result<Option<DynamicObject>, ApiError> {
        let (api, name) = (self.api(), self.name());
        let get = |client| async move { api(client).get(&name).await };
        match self.server.call(OBJECT, "get", get).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.code() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Looks up the DaemonSet of our pod. `None` without a pod's name, if the pod belongs to no DaemonSet, or if the
    /// server does not show the pod; then the object stays when linkwise is removed.
    ///
    /// # Errors
    ///
    /// The server failed in another way, so another attempt may succeed.
    async fn daemon_set(&mut self) -> Result<Option<OwnerReference>, ApiError> {
        let Some(pod) = self.settings.pod.clone() else { return Ok(None) };
        let namespace = self.settings.namespace.clone();
        let get = |client| async move { Api::<Pod>::namespaced(client, &namespace).get_metadata(&pod).await };
        let pod = match self.server.call("pods", "get", get).await {
            Ok(pod) => pod,
            Err(error) if matches!(error.code(), Some(403 | 404)) => {
                let error = error.to_string();
                tracing::warn!(error, "own pod unreadable, the NodeFeature gets no owner and stays after an uninstall");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let owners = pod.metadata.owner_references.into_iter().flatten();
        let owner = owners.into_iter().find(|owner| owner.kind == "DaemonSet");
        // A pod's reference blocks the deletion of its DaemonSet. The object need not block it, and on some clusters
        // that would take another right.
        Ok(owner.map(|owner| OwnerReference { block_owner_deletion: None, ..owner }))
    }

    fn update_from_now_on(&mut self, error: &ApiError) {
        let error = error.to_string();
        tracing::info!(error, "no right to patch and delete NodeFeatures, updating them instead");
        self.uses_update = true;
    }

    fn report(&mut self, managers: String) {
        if self.reported.as_ref() != Some(&managers) {
            let (name, namespace) = (self.name(), &self.settings.namespace);
            tracing::warn!(name, namespace, managers, "NodeFeature belongs to another program, left alone");
            self.reported = Some(managers);
        }
    }

    /// GPU Feature Discovery's name for the object.
    fn name(&self) -> String {
        format!("nvidia-features-for-{}", self.settings.node)
    }

    fn api(&self) -> impl FnOnce(kube::Client) -> Api<DynamicObject> + use<> {
        let namespace: Arc<str> = self.settings.namespace.as_str().into();
        move |client| Api::namespaced_with(client, &namespace, &resource())
    }
}

pub(crate) fn resource() -> ApiResource {
    server::resource("nfd.k8s-sigs.io", "v1alpha1", "NodeFeature", OBJECT)
}

/// The object that carries the labels.
fn object(settings: &NodeFeatureSettings, owner: Option<OwnerReference>, labels: &Labels) -> Value {
    let mut object = json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": format!("nvidia-features-for-{}", settings.node),
            "namespace": settings.namespace,
            // Only linkwise sets the second label. Without it, an update that changes nothing else would leave linkwise
            // out of the object's managers.
            "labels": {"nfd.node.kubernetes.io/node-name": settings.node, "app.kubernetes.io/managed-by": MANAGER},
        },
        "spec": {"features": {"flags": {}, "attributes": {}, "instances": {}}, "labels": labels},
    });
    if let (Some(owner), Some(metadata)) = (owner, object.pointer_mut("/metadata").and_then(Value::as_object_mut)) {
        metadata.insert("ownerReferences".to_owned(), json!([owner]));
    }
    object
}

/// The names of managers, for a message.
fn quoted_names<'a>(managers: impl Iterator<Item = &'a str>) -> String {
    managers.map(quoted).collect::<Vec<_>>().join(", ")
}
