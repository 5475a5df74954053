//! A second implementation of the part of the CDI format that linkwise writes: SPEC.md and the schema of the CDI
//! project (version 1.1.0) as strict types, and the rules of the project's library. It shares no code with linkwise.

use std::collections::BTreeSet;

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Spec {
    cdi_version: String,
    kind: String,
    #[serde(default)]
    annotations: serde_json::Map<String, serde_json::Value>,
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    annotations: serde_json::Map<String, serde_json::Value>,
    container_edits: Edits,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Edits {
    env: Vec<String>,
    device_nodes: Vec<Node>,
    mounts: Vec<Mount>,
    hooks: Vec<Hook>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Node {
    path: String,
    host_path: Option<String>,
    #[serde(default)]
    permissions: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    #[serde(default)]
    options: Vec<String>,
    r#type: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Hook {
    hook_name: String,
    path: String,
    #[serde(default)]
    args: Vec<String>,
}

const HOOKS: [&str; 6] = ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];

/// Returns the violations of the format in a spec, a line each.
pub fn check(text: &str) -> Vec<String> {
    let spec: Spec = match serde_json::from_str(text) {
        Ok(spec) => spec,
        Err(error) => return vec![error.to_string()],
    };
    let mut wrong = Vec::new();
    let mut must = |ok: bool, what: String| {
        if !ok {
            wrong.push(what);
        }
    };
    let (vendor, class) = spec.kind.split_once('/').unwrap_or((&spec.kind, ""));
    let label = |text: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        edge(text.chars().next())
            && edge(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    must(label(vendor) && label(class), format!("kind {}", spec.kind));
    must(!spec.devices.is_empty(), "no devices".to_owned());
    let mut names = BTreeSet::new();
    for device in &spec.devices {
        let name = &device.name;
        must(label(&name.replace(':', "-")) && !name.starts_with(':') && !name.ends_with(':'), format!("name {name}"));
        must(names.insert(name), format!("{name} twice"));
        let edits = &device.container_edits;
        let empty = edits.env.is_empty() && edits.device_nodes.is_empty() && edits.mounts.is_empty();
        must(!empty || !edits.hooks.is_empty(), format!("{name} is empty"));
    }
    let edits = || spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    let absolute = |path: &str| path.starts_with('/') && !path.contains("//") && !path.contains("/../");
    for edits in edits() {
        for env in &edits.env {
            must(env.split_once('=').is_some_and(|(name, _)| !name.is_empty()), format!("env {env}"));
        }
        for node in &edits.device_nodes {
            must(absolute(&node.path), format!("node {}", node.path));
            must(node.host_path.as_deref().is_none_or(absolute), format!("node {:?}", node.host_path));
            must(node.permissions.chars().all(|c| "rwm".contains(c)), format!("rights {}", node.permissions));
        }
        for mount in &edits.mounts {
            must(absolute(&mount.host_path), format!("mount {}", mount.host_path));
            must(absolute(&mount.container_path), format!("mount {}", mount.container_path));
            must(mount.options.iter().all(|option| !option.is_empty()), "an empty option".to_owned());
        }
        for hook in &edits.hooks {
            must(HOOKS.contains(&hook.hook_name.as_str()), format!("hook {}", hook.hook_name));
            must(absolute(&hook.path), format!("hook {}", hook.path));
            must(!hook.args.is_empty(), format!("hook {} has no argv[0]", hook.path));
        }
    }
    // The version must be the lowest that has every feature in use, by the CDI project's table.
    let has_mount_types = edits().any(|edits| edits.mounts.iter().any(|mount| mount.r#type.is_some()));
    let has_host_paths = edits().any(|edits| edits.device_nodes.iter().any(|node| node.host_path.is_some()));
    let begins_with_digit = spec.devices.iter().any(|device| !device.name.starts_with(char::is_alphabetic));
    let annotated = !spec.annotations.is_empty() || spec.devices.iter().any(|device| !device.annotations.is_empty());
    let minimum = if annotated || class.contains('.') {
        "0.6.0"
    } else if has_host_paths || begins_with_digit {
        "0.5.0"
    } else if has_mount_types {
        "0.4.0"
    } else {
        "0.3.0"
    };
    must(spec.cdi_version == minimum, format!("version {}, {minimum} is enough and needed", spec.cdi_version));
    wrong
}
