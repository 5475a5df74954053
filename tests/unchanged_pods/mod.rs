//! The admission policies of manifests/dra: unchanged-pods, which gives claims to pods with `nvidia.com/gpu: N`, and
//! several-claims, which limits the alternatives of a pod with several claims. Also the templates of the claims.

mod forms;
mod limits;
mod policy;
mod rules;
pub mod several;
mod templates;

use std::path::Path;

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use serde_json::{Value, json};

const GPUS: &str = "nvidia.com/gpu";
/// A namespace with the policy's label and the templates.
pub const ON: &str = "on";
/// A namespace with the templates only.
const OFF: &str = "off";
/// A namespace with the label and the templates of exact claims.
const EXACT: &str = "exact";
/// A namespace with the label, and templates without the annotation that names the templates of further claims.
const UNNAMED: &str = "unnamed";
/// A namespace with the label only.
const EMPTY: &str = "empty";

/// Reads a file of the repository with one object.
pub fn read(path: &str) -> Value {
    let [object] = documents(path).try_into().unwrap_or_else(|all| panic!("{path}: {all:?}"));
    object
}

/// Reads the objects of a file of the repository.
fn documents(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path));
    let text = text.unwrap_or_else(|error| panic!("{path}: {error}"));
    let read = |text: &str| serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{path}: {error}"));
    text.split("\n---\n").map(read).collect()
}

/// Reads the objects of the files that a kustomization names.
pub fn resources(folder: &str) -> Vec<Value> {
    let kustomization = read(&format!("{folder}/kustomization.yaml"));
    let files = kustomization["resources"].as_array().unwrap().iter();
    let objects = files.flat_map(|file| documents(&format!("{folder}/{}", file.as_str().unwrap())));
    objects.flat_map(|object| object["items"].as_array().cloned().unwrap_or_else(|| vec![object])).collect()
}

/// Starts an API server with both policies and the namespaces.
pub async fn server() -> ApiServerBox {
    server_with(|_| {}).await
}

/// Starts the server with a change to the policies and bindings.
async fn server_with(change: impl Fn(&mut Value)) -> ApiServerBox {
    let server = ApiServerBox::start(&ResourceType::ALL).await;
    let mut policies: Vec<Value> =
        ["unchanged-pods", "several-claims"].iter().flat_map(|of| resources(&format!("manifests/dra/{of}"))).collect();
    policies.iter_mut().for_each(change);
    for object in policies {
        let resource =
            ResourceType::ALL.iter().find(|resource| resource.kind == object["kind"]).expect("the box lacks the kind");
        let key = resource.key(None, object["metadata"]["name"].as_str().unwrap());
        server.create("kubectl", &key, object).unwrap_or_else(|status| panic!("{status}"));
    }
    let (alternatives, exact) = (Some("manifests/dra/templates"), Some("manifests/dra/templates-exact"));
    let lists = [(ON, true, alternatives), (OFF, false, alternatives), (UNNAMED, true, alternatives)];
    let namespaces = lists.into_iter().chain([(EXACT, true, exact), (EMPTY, true, None)]);
    for (namespace, is_on, folder) in namespaces {
        let labels = if is_on { json!({"linkwise.dev/unchanged-pods": "true"}) } else { json!({}) };
        let key = ResourceType::NAMESPACES.key(None, namespace);
        server.put("kubectl", &key, json!({"metadata": {"labels": labels}}));
        for mut template in folder.map(resources).unwrap_or_default() {
            if namespace == UNNAMED {
                template["metadata"].as_object_mut().unwrap().remove("annotations");
            }
            put_template(&server, namespace, template);
        }
    }
    server
}

pub fn put_template(server: &ApiServerBox, namespace: &str, template: Value) {
    let key =
        ResourceType::RESOURCE_CLAIM_TEMPLATES.key(Some(namespace), template["metadata"]["name"].as_str().unwrap());
    server.create("kubectl", &key, template).unwrap_or_else(|status| panic!("{status}"));
}

/// Creates and removes a pod; returns the stored pod without the fields that each object gets, or the refusal.
fn created(server: &ApiServerBox, namespace: &str, pod: &Value) -> Result<Value, String> {
    let key = ResourceType::PODS.key(Some(namespace), "pod");
    let stored = server.create("kubectl", &key, pod.clone());
    server.remove(&key);
    let mut pod = stored.map_err(|status| status["message"].as_str().unwrap().to_owned())?;
    let metadata = pod["metadata"].as_object_mut().unwrap();
    metadata.retain(|field, _| !["uid", "resourceVersion", "managedFields", "namespace"].contains(&field.as_str()));
    Ok(pod)
}
