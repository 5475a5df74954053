//! The DaemonSet of our pod, as the owner of the object: when it is deleted, Kubernetes deletes the object too.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;

use super::NodeFeatureSettings;
use crate::error::ApiError;
use crate::server::ApiServer;

/// Looks the DaemonSet up. `None` without a pod's name, if the pod belongs to no DaemonSet, or if the server does not
/// show it; then the object stays when linkwise is removed.
///
/// # Errors
///
/// The server failed for a reason that may pass.
pub(super) async fn daemon_set(
    server: &mut ApiServer,
    settings: &NodeFeatureSettings,
) -> Result<Option<OwnerReference>, ApiError> {
    let Some(pod) = settings.pod.clone() else { return Ok(None) };
    let namespace = settings.namespace.clone();
    let get = |client| async move { Api::<Pod>::namespaced(client, &namespace).get_metadata(&pod).await };
    let pod = match server.call("pods", "get", get).await {
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
    // A pod blocks the deletion of its DaemonSet. The object need not do so, and on some clusters that would take a
    // right.
    Ok(owner.map(|owner| OwnerReference { block_owner_deletion: None, ..owner }))
}
