//! The settings that are mappings or lists: `resources`, `linkwise.filter.exclude`, `linkwise.health.xids` and
//! `linkwise.policies`. The functions that read such values also collect the findings about them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::given::{Given, gpu_selector, resource_name};
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Node, Value};
use linkwise_core::quote::excerpt;
use linkwise_core::state::{GpuSelector, NamePattern, Pattern};

/// The note on settings that need `linkwise.naming`.
pub const NAMING_OFF: &str =
    "ignored, as the NVIDIA plugin ignores it; 'linkwise: {naming: true}' in this file makes it count";

/// Names for GPUs and MIG devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// Names for whole GPUs by their model: the first pattern that matches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<NamePattern>,
    /// Names for MIG devices by their profile: the first pattern that matches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<NamePattern>,
}

/// An item of a list in the file, and its place.
pub struct Item<T> {
    pub value: T,
    pub line: u64,
    /// The path, such as `resources.gpus[0]`.
    pub key: String,
}

impl<T> Item<T> {
    /// An error of one of its keys.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> Finding {
        Finding::error(self.line, format!("{}.{key}", self.key), problem)
    }
}

/// The values of some items, without their places.
pub fn values<T: Clone>(items: &[Item<T>]) -> Vec<T> {
    items.iter().map(|item| item.value.clone()).collect()
}

/// One mapping of the file, read key by key; collects the faults of the keys.
pub struct Fields<'a> {
    pub node: &'a Node,
    pub path: &'a str,
    pub findings: &'a mut Vec<Finding>,
}

impl Fields<'_> {
    /// The value of a required key.
    pub fn required<T>(&mut self, key: &str, read: impl Fn(Given<'_>) -> Result<T, String>) -> Option<T> {
        if self.node.value.get(key).is_none() {
            self.findings.push(Finding::error(self.node.line, self.path, format!("'{key}' is missing")));
        }
        self.optional(key, read)?
    }

    /// The value of a key: `Some(None)` if it is missing, `None` if it is wrong.
    pub fn optional<T>(&mut self, key: &str, read: impl Fn(Given<'_>) -> Result<T, String>) -> Option<Option<T>> {
        let Some(node) = self.node.value.get(key) else { return Some(None) };
        let wrong = |problem| {
            self.findings.push(Finding::error(node.line, format!("{}.{key}", self.path), problem));
        };
        read(Given::Node(node)).map_err(wrong).ok().map(Some)
    }
}

/// The items of a list that are mappings, each with its path. [`File::parse`] has reported the others.
pub fn mappings<'a>(list: Option<&'a Node>, path: &str) -> Vec<Item<&'a Node>> {
    let Some(Node { value: Value::List(items), .. }) = list else { return Vec::new() };
    let items = items.iter().enumerate().filter(|(_, node)| matches!(node.value, Value::Map(_)));
    items.map(|(number, node)| Item { value: node, line: node.line, key: format!("{path}[{number}]") }).collect()
}

/// A setting that only the file can make, with its origin.
pub fn from_file<T: Default>(file: &File, path: &str, read: impl FnOnce(&Node) -> T) -> Setting<T> {
    match file.at(path) {
        Some(node) => Setting { value: read(node), origin: Origin::File(node.line) },
        None => Setting::default(),
    }
}

/// Reads `resources`, which takes effect only with `linkwise.naming`, and the items of `gpus` and of `mig` in it.
pub fn resources(
    file: &File,
    naming: bool,
    findings: &mut Vec<Finding>,
) -> (Setting<Resources>, Vec<Item<NamePattern>>, Vec<Item<NamePattern>>) {
    let gpus = patterns(file, "resources.gpus", findings);
    let mig = patterns(file, "resources.mig", findings);
    if naming || gpus.is_empty() && mig.is_empty() {
        let resources = from_file(file, "resources", |_| Resources { gpus: values(&gpus), mig: values(&mig) });
        return (resources, gpus, mig);
    }
    findings.extend(file.at("resources").map(|node| Finding::note(node.line, "resources", NAMING_OFF)));
    (Setting::default(), Vec::new(), Vec::new())
}

fn patterns(file: &File, path: &str, findings: &mut Vec<Finding>) -> Vec<Item<NamePattern>> {
    let pattern = |given: Given<'_>| match given {
        Given::Node(Node { value: Value::Text(text), .. }) if !text.is_empty() => Ok(Pattern::new(text)),
        _ => Err(given.refused("a pattern such as *A100*")),
    };
    let read = |item: Item<&Node>| {
        let mut fields = Fields { node: item.value, path: &item.key, findings };
        let (pattern, name) = (fields.required("pattern", pattern), fields.required("name", resource_name));
        Some(Item { value: NamePattern { pattern: pattern?, name: name? }, line: item.line, key: item.key })
    };
    mappings(file.at(path), path).into_iter().filter_map(read).collect()
}

/// Reads `linkwise.filter.exclude`.
pub fn exclude(file: &File, findings: &mut Vec<Finding>) -> Vec<Item<GpuSelector>> {
    const PATH: &str = "linkwise.filter.exclude";
    let Some(node) = file.at(PATH) else { return Vec::new() };
    let Value::List(items) = &node.value else {
        let problem = Given::Node(node).refused("a list of indices, UUIDs, PCI addresses or models");
        findings.push(Finding::error(node.line, PATH, problem));
        return Vec::new();
    };
    let read = |(number, item): (usize, &Node)| {
        let (line, key) = (item.line, format!("{PATH}[{number}]"));
        match gpu_selector(Given::Node(item)) {
            Ok(value) => Some(Item { value, line, key }),
            Err(problem) => {
                findings.push(Finding::error(line, &key, problem));
                None
            }
        }
    };
    items.iter().enumerate().filter_map(read).collect()
}

/// Reads a mapping whose keys are data: `linkwise.health.xids`, `linkwise.policies`.
pub fn mapping<K: Ord, V>(
    file: &File,
    path: &str,
    findings: &mut Vec<Finding>,
    key: impl Fn(Given<'_>) -> Result<K, String>,
    value: impl Fn(Given<'_>) -> Result<V, String>,
) -> Setting<BTreeMap<K, V>> {
    from_file(file, path, |node| {
        let Value::Map(entries) = &node.value else {
            findings.push(Finding::error(node.line, path, Given::Node(node).refused("a mapping")));
            return BTreeMap::new();
        };
        let mut read = BTreeMap::new();
        for entry in entries {
            match (key(Given::Text(&entry.key)), value(Given::Node(&entry.node))) {
                (Ok(key), Ok(value)) => drop(read.insert(key, value)),
                (key, value) => {
                    let key = key.err().map(|problem| (entry.line, problem));
                    let value = value.err().map(|problem| (entry.node.line, problem));
                    let path = format!("{path}.{}", excerpt(&entry.key));
                    let wrong = key.into_iter().chain(value);
                    findings.extend(wrong.map(|(line, problem)| Finding::error(line, &path, problem)));
                }
            }
        }
        read
    })
}
