//! What a cluster would get by the commands of a page: charts and folders are rendered, and what kubectl names is looked
//! for among the objects.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::commands::helm::{Helm, list, repository};
use crate::commands::kustomize::rendered;
use crate::commands::page::Typed;
use crate::commands::shell::{is_placeholder, options};
use crate::commands::typed::folder;

const NAMESPACE: [&str; 2] = ["-n", "--namespace"];

/// Words in capitals that stand for the reader's are as names must be.
fn lower(word: &str) -> String {
    let is_name = |part: &str| part.len() > 2 && part.bytes().all(|byte| byte.is_ascii_uppercase());
    let parts = word.split_inclusive(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let lowered = parts.map(|part| {
        let name = part.trim_end_matches(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        if is_name(name) { part.to_lowercase() } else { part.to_owned() }
    });
    lowered.collect()
}

/// Whether a command installs or upgrades by our chart.
pub fn is_our_chart(words: &[String]) -> bool {
    words[0] == "helm" && words.iter().any(|word| word == "charts/linkwise")
}

/// The objects that our chart makes by this command.
pub fn chart(helm: &Helm, typed: &Typed) -> Vec<Value> {
    let words = typed.parts().remove(0);
    let [_, verb, release, path, flags @ ..] = &words[..] else { panic!("{}: {}", typed.place, typed.text) };
    assert_eq!(path, "charts/linkwise", "{}: helm {verb} RELEASE CHART FLAGS", typed.place);
    assert!(!options(flags, &NAMESPACE).is_empty(), "{}: no namespace: helm takes `default`", typed.place);
    let text = typed.text.as_str();
    match verb.as_str() {
        "install" => assert!(text.contains("image.repository="), "{}: there is no public image", typed.place),
        "upgrade" => {
            let keeps = text.contains("--reuse-values") || !options(flags, &["-f", "--values"]).is_empty();
            assert!(keeps, "{}: an upgrade with --set alone forgets the values of before", typed.place);
        }
        "template" => {}
        _ => panic!("{}: helm {verb}", typed.place),
    }
    let flags =
        flags.iter().filter(|flag| !["--reuse-values", "--install", "--create-namespace"].contains(&flag.as_str()));
    let flags: Vec<String> = flags.map(|flag| lower(flag)).collect();
    let folder = folder();
    helm.of_chart(&repository("charts/linkwise"), &lower(release), &flags, folder.path())
        .unwrap_or_else(|error| panic!("{}: {error}", typed.place))
}

/// The folder of `kubectl apply -k` and the like.
pub fn kustomization(words: &[String]) -> Option<&str> {
    (words[0] == "kubectl").then(|| options(words, &["-k"])).and_then(|folders| folders.first().copied())
}

/// The objects of a folder, in the namespace of the command where it names one; `None` for another command.
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

/// NVIDIA's static manifest, from which nodes are migrated.
pub fn nvidias() -> Value {
    let containers = json!([{"name": "nvidia-device-plugin-ctr"}]);
    let name = "nvidia-device-plugin-daemonset";
    json!({
        "kind": "DaemonSet",
        "metadata": {"namespace": "kube-system", "name": name},
        "spec": {"template": {"spec": {"containers": containers}}},
    })
}

/// An object's kind, where we have objects of it.
fn kind(word: &str) -> Option<&'static str> {
    match word {
        "ds" | "daemonset" | "daemonsets" => Some("DaemonSet"),
        "cm" | "configmap" | "configmaps" => Some("ConfigMap"),
        "pod" | "pods" | "po" => Some("Pod"),
        _ => None,
    }
}

/// The objects that words name: `ds/NAME`, `ds NAME`.
fn named(words: &[String]) -> BTreeSet<(&'static str, &str)> {
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
    // Pods are the reader's own, but for those that we name.
    let is_own = |kind: &str, name: &str| kind != "Pod" || name.contains("linkwise") || name.contains("nvidia");
    found.retain(|(kind, name)| !is_placeholder(name) && is_own(kind, name));
    found
}

/// What is wrong with the names in a kubectl command, among these objects.
pub fn wrong_names(words: &[String], objects: &[Value]) -> Result<(), String> {
    let ours = words.iter().position(|word| word == "--").map_or(words, |end| &words[..end]);
    let namespace = options(ours, &NAMESPACE).first().copied();
    if namespace.is_some_and(is_placeholder) {
        return Ok(());
    }
    for (kind, name) in named(&ours[1..]) {
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
        let wanted = options(ours, &["-c", "--container"]);
        let images = ours.iter().filter(|_| ours.contains(&"image".to_owned()));
        let images = images.filter_map(|word| word.split_once('=').filter(|(name, _)| !name.starts_with('-')));
        for container in wanted.into_iter().chain(images.map(|(container, _)| container)) {
            if !containers.contains(&container) {
                return Err(format!("{kind} {name} has no container {container}, but {}", containers.join(", ")));
            }
        }
        // kubectl takes any pod of the selector.
        let takes_any = ours.iter().any(|word| ["exec", "logs", "port-forward"].contains(&word.as_str()));
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
