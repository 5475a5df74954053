//! [`NodeConditionWriter`]: writes a condition of this node, and removes the startup taints once the condition is
//! `True`.
//!
//! The only writer of nodes. It reads its node, compares, and writes the differences, but only if the node has not
//! changed since it was read. The condition stays when the writer ends: the next process goes on, and [`clear`] removes
//! it from all nodes after linkwise was uninstalled.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::{ApiError, Attempts};
use crate::follower::{Kept, keep};
use crate::server::{ApiServer, check_name, resource};
use linkwise_core::backoff::Backoff;
use linkwise_core::publish::Condition;
use linkwise_core::quantity;

/// The kind, in metrics.
const OBJECT: &str = "nodes";

/// The most retries without a pause, if the kubelet wrote the node between our read and our write.
const MAX_CONFLICTS: usize = 5;

/// The number of nodes in one page of a list: each may have 50 KiB of images, labels and managed fields.
const PAGE: u32 = 50;

/// The node, its condition, and its taints.
#[derive(Clone, Debug, Default)]
pub struct NodeConditionSettings {
    /// The node's name.
    pub node: String,
    /// The condition's type.
    pub kind: String,
    /// The keys of the startup taints.
    pub startup_taints: Vec<String>,
    /// The id of this boot: the taints are removed once in each boot.
    pub boot: String,
    /// The node and the boot for which an earlier process removed the taints: the text that the `untainted`
    /// of [`NodeConditionWriter::new`] got.
    pub untainted: Option<String>,
}

/// Writes one node's condition.
pub struct NodeConditionWriter {
    server: ApiServer,
    settings: NodeConditionSettings,
    /// Gets the node and the boot once the startup taints are removed.
    untainted: Box<dyn Fn(&str) + Send + Sync>,
    /// Set once a startup taint that was added again has been reported.
    is_reported: bool,
    /// The pauses between reads of the node while its status lacks resources.
    pending: Backoff,
}

impl NodeConditionWriter {
    /// Makes no request yet. `untainted` gets the node and the boot once the condition is True and the
    /// startup taints are removed.
    pub fn new(
        server: ApiServer,
        settings: NodeConditionSettings,
        untainted: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        let pending = Backoff::new(server.pace().first, server.pace().reassert);
        Self { server, settings, untainted: Box::new(untainted), is_reported: false, pending }
    }

    /// Keeps the node's condition equal to the wanted one until `shutdown`, or until the channel is closed. Nothing is
    /// written while none is wanted. Errors are logged and tried again.
    pub async fn run(self, mut wanted: watch::Receiver<Option<Arc<Condition>>>, shutdown: CancellationToken) {
        let attempts = Attempts::of("write the node's condition", self.server.pace());
        shutdown.run_until_cancelled(keep(self, attempts, &mut wanted)).await;
    }

    async fn try_to_write(&mut self, wanted: &Condition) -> Result<Duration, ApiError> {
        let NodeConditionSettings { node: name, kind, startup_taints, boot, .. } = self.settings.clone();
        check_name(&name)?;
        let get = |client| async { nodes(client).get(&name).await };
        let mut node = self.server.call(OBJECT, "get", get).await?;
        // A node that was deleted and created again has other taints, and another UID.
        let mark = format!("{boot} {}", node.metadata.uid.as_deref().unwrap_or_default());
        let was_ready = self.settings.untainted.as_ref() == Some(&mark);
        // The kubelet writes changed resources into the node's status within 10 s. Only the first `True` waits for
        // them.
        let allocatable = |name: &str| {
            let count = node.data["status"]["allocatable"][name].as_str().and_then(quantity::parse);
            count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
        };
        let wanted = &if was_ready { wanted.clone() } else { wanted.compared_with(allocatable) };
        if let Some(conditions) = changed(&node, &kind, wanted) {
            node = patch(&mut self.server, &node, &name, Part::Status, json!({ "conditions": conditions })).await?;
            let Condition { status, reason, message, .. } = wanted;
            tracing::info!(node = name, condition = kind, status, reason, why = message, "node condition written");
        }
        let pace = self.server.pace();
        if wanted.reason == Condition::PENDING {
            return Ok(self.pending.failed());
        }
        self.pending.reset();
        let pause = pace.reassert;
        if wanted.status != "True" {
            return Ok(pause);
        }
        let taints = node.data["spec"]["taints"].as_array().cloned().unwrap_or_default();
        let is_ours = |taint: &Value| startup_taints.iter().any(|key| taint["key"] == **key);
        let (ours, rest): (Vec<Value>, Vec<Value>) = taints.into_iter().partition(is_ours);
        if was_ready {
            if !ours.is_empty() && !std::mem::replace(&mut self.is_reported, true) {
                let why = "linkwise removes startup taints once after a boot, and this one was added later";
                let taint = &ours.first().unwrap_or_default()["key"];
                tracing::warn!(node = name, %taint, why, "startup taint stays");
            }
            return Ok(pause);
        }
        if !ours.is_empty() {
            patch(&mut self.server, &node, &name, Part::Spec, json!({ "taints": rest })).await?;
            tracing::info!(node = name, taints = ours.len(), "startup taints removed, the node's GPUs are available");
        }
        (self.untainted)(&mark);
        self.settings.untainted = Some(mark);
        Ok(pause)
    }
}

impl Kept for NodeConditionWriter {
    type Wanted = Condition;

    async fn write(&mut self, wanted: &Arc<Condition>) -> Result<Duration, ApiError> {
        let mut conflicts = 0;
        loop {
            match self.try_to_write(wanted).await {
                Err(error) if error.code() == Some(409) && conflicts < MAX_CONFLICTS => conflicts += 1,
                written => return written,
            }
        }
    }
}

fn nodes(client: kube::Client) -> Api<DynamicObject> {
    Api::all_with(client, &resource("", "v1", "Node", OBJECT))
}

/// The part of a node that a request writes.
#[derive(Clone, Copy)]
enum Part {
    Spec,
    Status,
}

/// Writes a part of a node, if the node is still as it was read.
async fn patch(
    server: &mut ApiServer,
    read: &DynamicObject,
    name: &str,
    part: Part,
    content: Value,
) -> Result<DynamicObject, ApiError> {
    let version = &read.metadata.resource_version;
    let (params, field) = (PatchParams::default(), if matches!(part, Part::Spec) { "spec" } else { "status" });
    let body = Patch::Merge(json!({ "metadata": { "resourceVersion": version }, field: content }));
    let patch = |client| async move {
        match part {
            Part::Spec => nodes(client).patch(name, &params, &body).await,
            Part::Status => nodes(client).patch_status(name, &params, &body).await,
        }
    };
    server.call(OBJECT, "patch", patch).await
}

fn conditions(node: &DynamicObject) -> Vec<Value> {
    node.data["status"]["conditions"].as_array().cloned().unwrap_or_default()
}

/// The node's conditions with the wanted one; `None` if the node has it already.
fn changed(node: &DynamicObject, kind: &str, wanted: &Condition) -> Option<Vec<Value>> {
    let mut all = conditions(node);
    let Condition { status, reason, message, .. } = wanted;
    let now = json!(Time(Timestamp::now()));
    let mut own = json!({"type": kind, "status": status, "reason": reason, "message": message,
                         "lastHeartbeatTime": now, "lastTransitionTime": now});
    let Some(stored) = all.iter_mut().find(|condition| condition["type"] == kind) else {
        all.push(own);
        return Some(all);
    };
    let is_same = |field: &&str| stored[*field] == own[*field];
    if ["status", "reason", "message"].iter().all(is_same) {
        return None;
    }
    if stored["status"] == own["status"] {
        own["lastTransitionTime"] = stored["lastTransitionTime"].clone();
    }
    *stored = own;
    Some(all)
}

/// Removes a condition from all nodes. Returns the number of nodes that had it.
///
/// # Errors
///
/// See [`ApiError`]. Nodes that were cleared before the error stay cleared.
pub async fn clear(mut server: ApiServer, kind: &str) -> Result<usize, ApiError> {
    let (mut cleared, mut conflicts, mut page) = (0, 0, ListParams::default().limit(PAGE));
    loop {
        let params = page.clone();
        let list = |client| async move { nodes(client).list(&params).await };
        let found = server.call(OBJECT, "list", list).await?;
        for node in &found.items {
            let mut rest = conditions(node);
            let count = rest.len();
            rest.retain(|condition| condition["type"] != kind);
            let name = node.metadata.name.clone().unwrap_or_default();
            if rest.len() == count {
                continue;
            }
            match patch(&mut server, node, &name, Part::Status, json!({ "conditions": rest })).await {
                Ok(_) => cleared += 1,
                Err(error) if error.code() == Some(404) => {}
                Err(error) if error.code() == Some(409) => conflicts += 1,
                Err(error) => return Err(error),
            }
        }
        match found.metadata.continue_.filter(|rest| !rest.is_empty()) {
            Some(rest) => page = page.continue_token(&rest),
            // The kubelets of some nodes wrote them in between.
            None if conflicts > 0 => (conflicts, page) = (0, ListParams::default().limit(PAGE)),
            None => return Ok(cleared),
        }
    }
}
