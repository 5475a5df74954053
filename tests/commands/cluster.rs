//! The objects that a page's commands create: charts and folders are rendered, and the objects that kubectl names are
//! looked up among them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::commands::helm::{Helm, list, repository};
use crate::commands::kustomize::rendered;
use crate::commands::page::Typed;
use crate::commands::shell::{is_placeholder, options};
use crate::commands::typed::folder;

const NAMESPACE: [&str; 2] = ["-n", "--namespace"];

/// Changes placeholders (`NAME`) to the lower case of object names.
fn lower_placeholders(word: &str) -> String {
    let is_name = |part: &str| part.len() > 2 && part.bytes().all(|byte| byte.is_ascii_uppercase());
    let parts = word.split_inclusive(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let lowered = parts.map(|part| {
        let name = part.trim_end_matches(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        if is_name(name) { part.to_lowercase() } else { part.to_owned() }
    });
    lowered.collect()
}

/// Returns true for a helm command about our chart.
pub fn is_our_chart(words: &[String]) -> bool {
    words[0] == "helm" && words.iter().any(|word| word == "charts/linkwise")
}

/// Renders our chart as a helm command does.
pub fn chart_objects(helm: &Helm, typed: &Typed) -> Vec<Value> {
    let words = typed.parts().remove(0);
    let [_, verb, release, path, flags @ ..] = &words[..] else { panic!("{}: {}", typed.place, typed.text) };
    assert_eq!(path, "charts/linkwise", "{}: expected helm {verb} RELEASE CHART FLAGS", typed.place);
    assert!(!options(flags, &NAMESPACE).is_empty(), "{}: no namespace: helm takes `default`", typed.place);
    let text = typed.text.as_str();
    match verb.as_str() {
        "install" => assert!(text.contains("image.repository="), "{}: there is no public image", typed.place),
        "upgrade" => {
            let keeps = text.contains("--reuse-values") || !options(flags, &["-f", "--values"]).is_empty();
            assert!(keeps, "{}: an upgrade with --set alone forgets the release's values", typed.place);
        }
        "template" => {}
        _ => panic!("{}: helm {verb}", typed.place),
    }
    let flags =
        flags.iter().filter(|flag| !["--reuse-values", "--install", "--create-namespace"].contains(&flag.as_str()));
    let flags: Vec<String> = flags.map(|flag| lower_placeholders(flag)).collect();
    let folder = folder();
    helm.of_chart(&repository("charts/linkwise"), &lower_placeholders(release), &flags, folder.path())
        .unwrap_or_else(|error| panic!("{}: {error}", typed.place))
}

/// The folder of `kubectl apply -k` and similar commands.
pub fn kustomization(words: &[String]) -> Option<&str> {
    (words[0] == "kubectl").then(|| options(words, &["-k"])).and_then(|folders| folders.first().copied())
}

/// Renders the folder of a kubectl command, in its `--namespace`; `None` for other commands.
pub fn folder_objects(typed: &Typed) -> Option<Vec<Value>> {
    let words = typed.parts().remove(0);
    let path = repository(kustomization(&words)?);
    assert!(path.join("kustomization.yaml").is_file(), "{}: no folder {}", typed.place, path.display());
    let mut objects = rendered(&path);
    if let Some(namespace) = options(&words, &NAMESPACE).first() {
        objects.iter_mut().for_each(|object| object["metadata"]["namespace"] = json!(namespace));
    }
    Some(objects)
}

/// The DaemonSet of NVIDIA's static manifest, which operators replace.
pub fn nvidia_daemon_set() -> Value {
    let containers = json!([{"name": "nvidia-device-plugin-ctr"}]);
    let name = "nvidia-device-plugin-daemonset";
    json!({
        "kind": "DaemonSet",
        "metadata": {"namespace": "kube-system", "name": name},
        "spec": {"template": {"spec": {"containers": containers}}},
    })
}

/// The kind that a word means, if we install objects of that kind.
fn kind(word: &str) -> Option<&'static str> {
    match word {
        "ds" | "daemonset" | "daemonsets" => Some("DaemonSet"),
        "cm" | "configmap" | "configmaps" => Some("ConfigMap"),
        "pod" | "pods" | "po" => Some("Pod"),
        _ => None,
    }
}

/// The objects that a command names: `ds/NAME`, `ds NAME`.
fn named_objects(words: &[String]) -> BTreeSet<(&'static str, &str)> {
    let mut found = BTreeSet::new();
    for (word, next) in words.iter().zip(words.iter().skip(1).map(String::as_str).chain([""])) {
        if let Some((before, name)) = word.split_once('/') {
            found.extend(kind(before).map(|kind| (kind, name)));
        } else if let Some(kind) = kind(word)
            && !next.is_empty()
            && !next.starts_with('-')
        {
            found.insert((kind, next));
        }
    }
    // Other pods than ours and NVIDIA's are the reader's.
    let is_own = |kind: &str, name: &str| kind != "Pod" || name.contains("linkwise") || name.contains("nvidia");
    found.retain(|(kind, name)| !is_placeholder(name) && is_own(kind, name));
    found
}

/// Checks that a kubectl command names objects and containers that exist.
pub fn check_names(words: &[String], objects: &[Value]) -> Result<(), String> {
    let of_kubectl = words.iter().position(|word| word == "--").map_or(words, |end| &words[..end]);
    let namespace = options(of_kubectl, &NAMESPACE).first().copied();
    if namespace.is_some_and(is_placeholder) {
        return Ok(());
    }
    for (kind, name) in named_objects(&of_kubectl[1..]) {
        let Some(namespace) = namespace else { return Err(format!("{kind} {name} without a namespace")) };
        let is = |object: &&Value| {
            object["kind"] == kind && object["metadata"]["name"] == name && object["metadata"]["namespace"] == namespace
        };
        let Some(object) = objects.iter().find(is) else {
            let all = objects.iter().filter(|object| object["kind"] == kind);
            let all: Vec<String> =
                all.map(|it| format!("{}/{}", it["metadata"]["namespace"], it["metadata"]["name"])).collect();
            return Err(format!("no {kind} {namespace}/{name}, but {}", all.join(", ")));
        };
        let containers = list(object, "/spec/template/spec/containers");
        let containers: Vec<&str> = containers.iter().map(|it| it["name"].as_str().unwrap()).collect();
        let wanted = options(of_kubectl, &["-c", "--container"]);
        let images = of_kubectl.iter().filter(|_| of_kubectl.contains(&"image".to_owned()));
        let images = images.filter_map(|word| word.split_once('=').filter(|(name, _)| !name.starts_with('-')));
        for container in wanted.into_iter().chain(images.map(|(container, _)| container)) {
            if !containers.contains(&container) {
                return Err(format!("{kind} {name} has no container {container}, but {}", containers.join(", ")));
            }
        }
        // These commands of kubectl take any pod that matches the selector.
        let takes_any = of_kubectl.iter().any(|word| ["exec", "logs", "port-forward"].contains(&word.as_str()));
        let selector = object["spec"]["selector"]["matchLabels"].as_object().filter(|_| takes_any);
        let is_alike = |other: &&Value| {
            let labels = &other["spec"]["template"]["metadata"]["labels"];
            let is_other = other["kind"] == kind && other["metadata"]["name"] != name;
            let has_labels = selector.is_some_and(|selector| selector.iter().all(|(key, value)| labels[key] == *value));
            is_other && has_labels && other["metadata"]["namespace"] == namespace
        };
        if let Some(other) = objects.iter().find(is_alike) {
            return Err(format!("{kind} {name} selects pods of {} too", other["metadata"]["name"]));
        }
    }
    Ok(())
}
