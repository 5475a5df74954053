//! [`NodeFeatureWriter`]: the NodeFeature object that carries this node's labels to Node Feature Discovery.
//!
//! The only writer of NodeFeatures. It follows a channel of labels and keeps the object as they are, by server-side
//! apply; the object stays when the writer ends. It has the name that GPU Feature Discovery gives it: one that GPU
//! Feature Discovery manages is replaced, any other manager's is left alone and reported.

mod owner;
mod standing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, Preconditions,
};
use linkwise::quote::quoted;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::attempts::{Attempts, shortened};
use crate::error::ApiError;
use crate::server::ApiServer;

use standing::{MANAGER, Standing, is_updated, standing};

/// The kind, in metrics.
pub(crate) const OBJECT: &str = "nodefeatures";

/// Labels of a node, by key.
type Labels = BTreeMap<String, String>;

/// Which object is written, and as whose.
#[derive(Clone, Debug, Default)]
pub struct NodeFeatureSettings {
    /// The node.
    pub node: String,
    /// The object's namespace.
    pub namespace: String,
    /// The name of our pod in that namespace, where it is known: its DaemonSet becomes the object's owner, so that the
    /// labels go with it. A pod never is: its successor could not take the object over.
    pub pod: Option<String>,
    /// Whether GPU Feature Discovery's object was replaced. All writers of a process share it: one that comes again is
    /// of a GPU Feature Discovery that runs.
    pub replaced: Arc<AtomicBool>,
}

/// Whether the object is ours.
#[derive(Clone, Debug, Default)]
pub struct NodeFeatureMetrics {
    foreign: Gauge,
}

impl NodeFeatureMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "1 while another program manages this node's NodeFeature object, which is left alone then";
        registry.register("node_feature_foreign", help, metrics.foreign.clone());
        metrics
    }

    /// Whether another program manages the object.
    pub fn is_foreign(&self) -> bool {
        self.foreign.get() == 1
    }
}

/// What became of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It has the labels.
    Written,
    /// It is another program's.
    LeftAlone,
}

/// Writes one NodeFeature.
pub struct NodeFeatureWriter {
    server: ApiServer,
    settings: NodeFeatureSettings,
    metrics: NodeFeatureMetrics,
    attempts: Attempts,
    /// Our DaemonSet; the outer `None` before it was looked up.
    owner: Option<Option<OwnerReference>>,
    /// What this process wrote last.
    written: Option<Arc<Labels>>,
    /// Whether the server forbids to patch or delete: then objects are created and updated, as NVIDIA's role allows.
    by_update: bool,
    /// The managers that were reported last.
    reported: Option<String>,
}

impl NodeFeatureWriter {
    /// Asks nothing yet.
    pub fn new(server: ApiServer, settings: NodeFeatureSettings, metrics: NodeFeatureMetrics) -> Self {
        let attempts = Attempts::of("write the NodeFeature of Node Feature Discovery", server.pace());
        Self { server, settings, metrics, attempts, owner: None, written: None, by_update: false, reported: None }
    }

    /// Keeps the object as the labels are until `shutdown`, or until the channel is closed. Nothing is written while
    /// there are no labels. Errors are logged and tried again.
    pub async fn run(mut self, mut labels: watch::Receiver<Option<Arc<Labels>>>, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.follow(&mut labels)).await;
    }

    async fn follow(&mut self, labels: &mut watch::Receiver<Option<Arc<Labels>>>) {
        loop {
            let wanted = labels.borrow_and_update().clone();
            let pause = match wanted {
                None => Duration::MAX,
                Some(wanted) => match self.write(&wanted).await {
                    Ok(outcome) => {
                        self.attempts.succeeded();
                        let pace = self.server.pace();
                        shortened(if outcome == Outcome::Written { pace.reassert } else { pace.longest })
                    }
                    Err(error) => {
                        // Also where the labels change meanwhile: the server may have asked for the pause.
                        tokio::time::sleep(self.attempts.failed(&error)).await;
                        continue;
                    }
                },
            };
            if let Ok(Err(_)) = tokio::time::timeout(pause, labels.changed()).await {
                return;
            }
        }
    }

    /// Compares the object with the labels, and writes it where it differs.
    async fn write(&mut self, labels: &Arc<Labels>) -> Result<Outcome, ApiError> {
        let owner = match &self.owner {
            Some(owner) => owner.clone(),
            None => self.owner.insert(owner::daemon_set(&mut self.server, &self.settings).await?).clone(),
        };
        let wanted = object(&self.settings, owner, labels);
        let found = self.found().await?;
        let standing = standing(found.as_ref(), &wanted, self.written.as_deref(), self.settings.replaced.load(Relaxed));
        self.metrics.foreign.set(i64::from(matches!(standing, Standing::Foreign(_))));
        match standing {
            Standing::Same => {}
            Standing::Foreign(managers) => {
                self.report(managers);
                return Ok(Outcome::LeftAlone);
            }
            Standing::Replaceable => {
                self.replace(found.as_ref(), &wanted).await?;
                self.settings.replaced.store(true, Relaxed);
                let (name, namespace) = (self.name(), &self.settings.namespace);
                tracing::info!(name, namespace, "NodeFeature taken over from GPU Feature Discovery");
            }
            // What an update wrote, an apply would not take away again.
            Standing::Ours if !self.by_update && found.as_ref().is_some_and(is_updated) => {
                self.replace(found.as_ref(), &wanted).await?;
            }
            Standing::Ours => self.put(found.as_ref(), &wanted).await?,
        }
        self.reported = None;
        self.written = Some(Arc::clone(labels));
        Ok(Outcome::Written)
    }

    /// Deletes the object as it was found, so that nothing of it stays, and makes a new one.
    async fn replace(&mut self, found: Option<&DynamicObject>, wanted: &Value) -> Result<(), ApiError> {
        if let (Some(found), false) = (found, self.by_update) {
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
        // An update replaces all of it as well.
        self.put(found, wanted).await
    }

    /// Writes the object over the one that was found.
    async fn put(&mut self, found: Option<&DynamicObject>, wanted: &Value) -> Result<(), ApiError> {
        let name = self.name();
        if !self.by_update {
            let (api, name, params) = (self.api(), name.clone(), PatchParams::apply(MANAGER).force());
            let apply = |client| async move { api(client).patch_metadata(&name, &params, &Patch::Apply(wanted)).await };
            match self.server.call(OBJECT, "apply", apply).await {
                Err(error) if error.code() == Some(403) => self.update_from_now_on(&error),
                result => return result.map(drop),
            }
        }
        let mut wanted: DynamicObject =
            serde_json::from_value(wanted.clone()).map_err(|error| ApiError::Malformed(error.to_string()))?;
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
        // Refused as well, so it was not the verb: the next attempt applies again.
        self.by_update &= !result.as_ref().is_err_and(|error| error.code() == Some(403));
        result
    }

    /// The object as it is.
    async fn found(&mut self) -> Result<Option<DynamicObject>, ApiError> {
        let (api, name) = (self.api(), self.name());
        let get = |client| async move { api(client).get(&name).await };
        match self.server.call(OBJECT, "get", get).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.code() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn update_from_now_on(&mut self, error: &ApiError) {
        let error = error.to_string();
        tracing::info!(error, "no right to patch and delete NodeFeatures, updating them instead");
        self.by_update = true;
    }

    fn report(&mut self, managers: String) {
        if self.reported.as_ref() != Some(&managers) {
            let (name, namespace) = (self.name(), &self.settings.namespace);
            tracing::warn!(name, namespace, managers, "NodeFeature belongs to another program, left alone");
            self.reported = Some(managers);
        }
    }

    /// GPU Feature Discovery's name for it.
    fn name(&self) -> String {
        format!("nvidia-features-for-{}", self.settings.node)
    }

    fn api(&self) -> impl FnOnce(kube::Client) -> Api<DynamicObject> + use<> {
        let namespace: Arc<str> = self.settings.namespace.as_str().into();
        move |client| Api::namespaced_with(client, &namespace, &resource())
    }
}

pub(crate) fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("nfd.k8s-sigs.io", "v1alpha1", "NodeFeature");
    ApiResource::from_gvk_with_plural(&kind, "nodefeatures")
}

/// The object that carries the labels.
fn object(settings: &NodeFeatureSettings, owner: Option<OwnerReference>, labels: &Labels) -> Value {
    let mut object = json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": format!("nvidia-features-for-{}", settings.node),
            "namespace": settings.namespace,
            // The second one is a field that only we have: an update that changes no other would leave the object
            // without us among its managers.
            "labels": {"nfd.node.kubernetes.io/node-name": settings.node, "app.kubernetes.io/managed-by": MANAGER},
        },
        "spec": {"features": {"flags": {}, "attributes": {}, "instances": {}}, "labels": labels},
    });
    if let (Some(owner), Some(metadata)) = (owner, object.pointer_mut("/metadata").and_then(Value::as_object_mut)) {
        metadata.insert("ownerReferences".to_owned(), json!([owner]));
    }
    object
}

/// Names of managers, for a message.
fn listed<'a>(managers: impl Iterator<Item = &'a str>) -> String {
    managers.map(quoted).collect::<Vec<_>>().join(", ")
}
