//! The container runtime's half of CDI: resolves the CDI names of a container into device nodes, mounts and variables.
//!
//! It follows the CDI library (container-device-interface: `Cache.InjectDevices` in pkg/cdi/cache.go,
//! `ContainerEdits.Apply` in pkg/cdi/container-edits.go), and containerd, which calls the library (`WithCDI` in
//! pkg/cri/opts: a repeated name counts once). All JSON files of the folder are read each time. One that is not a
//! spec is skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

/// The changes that CDI devices make to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerEdits {
    /// The device nodes, by their paths in the container, in the order in which they were added.
    pub nodes: Vec<String>,
    /// The host's paths of the device nodes, by their paths in the container.
    pub hosts: BTreeMap<String, String>,
    /// The environment variables.
    pub env: BTreeMap<String, String>,
    /// The host's paths of the mounts, by their paths in the container.
    pub mounts: BTreeMap<String, String>,
    /// The targets of the links that hooks make, by the paths of the links: `create-symlinks --link TARGET::LINK`.
    pub links: BTreeMap<String, String>,
}

impl ContainerEdits {
    /// The device nodes of GPUs: `/dev/nvidia0` ...
    pub fn gpus(&self) -> Vec<String> {
        let is_gpu = |node: &&String| {
            node.strip_prefix("/dev/nvidia").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
        };
        self.nodes.iter().filter(is_gpu).cloned().collect()
    }

    fn apply(&mut self, edits: &Value) {
        let entries = |key: &str| edits[key].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        for variable in entries("env") {
            let variable = text(&variable);
            let (name, value) = variable.split_once('=').unwrap_or((&variable, ""));
            self.env.insert(name.to_owned(), value.to_owned());
        }
        for node in entries("deviceNodes") {
            let path = text(&node["path"]);
            self.nodes.retain(|other| *other != path);
            self.hosts.insert(path.clone(), text(node.get("hostPath").unwrap_or(&node["path"])));
            self.nodes.push(path);
        }
        for mount in entries("mounts") {
            self.mounts.insert(text(&mount["containerPath"]), text(&mount["hostPath"]));
        }
        let args = entries("hooks").into_iter().flat_map(|hook| hook["args"].as_array().cloned().unwrap_or_default());
        let links = args.filter_map(|arg| {
            let (target, link) = arg.as_str()?.split_once("::")?;
            Some((link.to_owned(), target.to_owned()))
        });
        self.links.extend(links);
    }
}

/// Resolves CDI names by the specs in a folder. If no spec or more than one has a name, returns the error with which a
/// runtime refuses the container.
pub fn container(folder: &Path, names: &[String]) -> Result<ContainerEdits, String> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let specs: Vec<Value> = files.filter_map(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok()).collect();
    let mut devices: BTreeMap<String, Vec<(usize, &Value)>> = BTreeMap::new();
    for (number, spec) in specs.iter().enumerate() {
        for device in spec["devices"].as_array().into_iter().flatten() {
            if let (Some(kind), Some(name)) = (spec["kind"].as_str(), device["name"].as_str()) {
                devices.entry(format!("{kind}={name}")).or_default().push((number, &device["containerEdits"]));
            }
        }
    }
    let (mut edits, mut seen, mut unresolvable) = (ContainerEdits::default(), BTreeSet::new(), Vec::new());
    let mut used = BTreeSet::new();
    for name in names.iter().filter(|name| seen.insert(*name)) {
        // A name that several specs have is a conflict and is not resolved.
        let Some([(spec, own)]) = devices.get(name).map(Vec::as_slice) else {
            unresolvable.push(name.as_str());
            continue;
        };
        if used.insert(*spec)
            && let Some(spec) = specs.get(*spec)
        {
            edits.apply(&spec["containerEdits"]);
        }
        edits.apply(own);
    }
    if unresolvable.is_empty() {
        Ok(edits)
    } else {
        Err(format!("unresolvable CDI devices {}", unresolvable.join(", ")))
    }
}
