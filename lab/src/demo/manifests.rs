//! The manifests of the demo's cluster: the repository's own ones, and pods as users write them.

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The policy for unchanged pods, its binding, and the templates of claims.
const UNCHANGED_PODS: [&str; 5] = [
    include_str!("../../../manifests/dra/unchanged-pods/policy.yaml"),
    include_str!("../../../manifests/dra/unchanged-pods/binding.yaml"),
    include_str!("../../../manifests/dra/templates/linkwise-gpus-2.yaml"),
    include_str!("../../../manifests/dra/templates/linkwise-gpus-4.yaml"),
    include_str!("../../../manifests/dra/templates/linkwise-gpus-8.yaml"),
];

/// The manifests that give claims to pods with `nvidia.com/gpu: N`.
pub(super) fn unchanged_pods() -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for text in UNCHANGED_PODS.into_iter().flat_map(|text| text.split("\n---\n")) {
        let object: Value = serde_saphyr::from_str(text).context("a manifest of the repository is not YAML")?;
        match object["items"].as_array() {
            Some(items) => objects.extend(items.iter().cloned()),
            None => objects.push(object),
        }
    }
    Ok(objects)
}

/// A pod that requests GPUs as users of a device plugin do.
pub(super) fn pod(name: &str, container: &str, gpus: usize) -> Value {
    let limits = json!({"nvidia.com/gpu": gpus});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": container, "image": "ubuntu:24.04", "resources": {"limits": limits}}]},
    })
}
