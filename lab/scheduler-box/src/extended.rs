//! Pods that request an extended resource (`nvidia.com/gpu: 2`) which a DeviceClass names: the claim that the scheduler
//! makes for them (gate `DRAExtendedResource`, on from 1.36).
//!
//! k8s@1.36: `pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go`.

use std::cmp::Reverse;

use serde_json::{Value, json};

use crate::Cluster;
use crate::api::DeviceClass;

impl Cluster {
    /// The claim for a pod: one request for each container and resource. `containers` holds the extended resources of
    /// each container, by name, with their numbers. Resources that no class names are left to device plugins. `None` if
    /// no resource is for DRA.
    ///
    /// The caller checks that no device plugin of the node has the resource: then the real scheduler makes no claim.
    pub fn extended_claim(&self, namespace: &str, pod: &str, containers: &[Vec<(&str, u64)>]) -> Option<Value> {
        let mut requests = Vec::new();
        for (container, resources) in containers.iter().enumerate() {
            for (place, (resource, count)) in resources.iter().enumerate() {
                if let Some(class) = self.class_of(resource) {
                    let exactly = json!({
                        "deviceClassName": class.metadata.name, "allocationMode": "ExactCount", "count": count,
                    });
                    requests
                        .push(json!({"name": format!("container-{container}-request-{place}"), "exactly": exactly}));
                }
            }
        }
        (!requests.is_empty()).then(|| {
            json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {
                    "name": format!("{pod}-extended-resources"), "namespace": namespace,
                    "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"},
                },
                "spec": {"devices": {"requests": requests}},
            })
        })
    }

    /// The class of a resource: the newest of several; of those created at the same time, the first by name.
    fn class_of(&self, resource: &str) -> Option<&DeviceClass> {
        let named = self.classes.iter().filter(|class| class.spec.extended_resource.as_deref() == Some(resource));
        named.max_by_key(|class| (&class.metadata.created, Reverse(&class.metadata.name)))
    }
}
