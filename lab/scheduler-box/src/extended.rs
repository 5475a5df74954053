//! The claim that the scheduler makes for a pod with an extended resource (`nvidia.com/gpu: 2`) of a DeviceClass
//! (gate `DRAExtendedResource`, on by default since 1.36).
//!
//! k8s@1.36: `pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go`.

use std::cmp::Reverse;

use serde_json::{Value, json};

use crate::Cluster;
use crate::api::DeviceClass;

impl Cluster {
    /// The claim for a pod, with one request for each container and resource. `containers` lists the extended resources
    /// of each container, with their counts. A resource that no class names is left to device plugins; `None` if this
    /// holds for all resources.
    ///
    /// Call it only if no device plugin of the node serves the resource: else the scheduler makes no claim.
    pub fn extended_claim(&self, namespace: &str, pod: &str, containers: &[Vec<(&str, u64)>]) -> Option<Value> {
        let mut requests = Vec::new();
        for (container, resources) in containers.iter().enumerate() {
            for (index, (resource, count)) in resources.iter().enumerate() {
                if let Some(class) = self.class_of(resource) {
                    let exactly = json!({
                        "deviceClassName": class.metadata.name, "allocationMode": "ExactCount", "count": count,
                    });
                    requests
                        .push(json!({"name": format!("container-{container}-request-{index}"), "exactly": exactly}));
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

    /// The newest class that names the resource. Among classes of the same age, the first by name.
    fn class_of(&self, resource: &str) -> Option<&DeviceClass> {
        let named = self.classes.iter().filter(|class| class.spec.extended_resource.as_deref() == Some(resource));
        named.max_by_key(|class| (&class.metadata.created, Reverse(&class.metadata.name)))
    }
}
