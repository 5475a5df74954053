//! The settings that name GPUs, models, resources and XIDs: `resources` and what stands under `linkwise:` beside single
//! values.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use super::choices::XidAction;
use super::given::{Given, choice, resource_name};
use super::row::tell;
use super::{Origin, Setting};
use crate::config::PolicyArg;
use crate::config::file::{File, Finding, Node, Problem, Value};
use crate::state::{Pattern, ResourceName};
use crate::topology::{GpuUuid, PciAddress};

/// Names for GPUs and MIG devices, by what they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// Whole GPUs: the first pattern that matches the model (`NVIDIA A100-SXM4-40GB`) gives the name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<NamedPattern>,
    /// MIG devices: the same by profile (`1g.5gb`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<NamedPattern>,
}

/// A pattern and the resource that what it matches belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamedPattern {
    /// What to match.
    pub pattern: Pattern,
    /// The resource.
    pub name: ResourceName,
    /// Where the file says so.
    #[serde(skip)]
    pub line: u64,
}

/// GPUs that are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Excluded {
    /// Which.
    pub gpu: GpuFilter,
    /// Where the file says so.
    #[serde(skip)]
    pub line: u64,
}

/// A GPU, or all of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuFilter {
    /// By NVML's index.
    Index(u32),
    /// By NVML's UUID.
    Uuid(GpuUuid),
    /// By its place.
    Pci(PciAddress),
    /// By its model.
    Model(Pattern),
}

impl fmt::Display for GpuFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Pci(address) => address.fmt(f),
            Self::Model(pattern) => pattern.fmt(f),
        }
    }
}

impl Serialize for GpuFilter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A value of the file, by hand.
fn from_file<T: Default>(file: &File, path: &str, read: impl FnOnce(&Node) -> T) -> Setting<T> {
    match file.at(path) {
        Some(node) => Setting { value: read(node), origin: Origin::File { line: node.line } },
        None => Setting { value: T::default(), origin: Origin::Default },
    }
}

/// Reads `resources`, which counts only with naming.
pub fn resources(file: &File, naming: bool, findings: &mut Vec<Finding>) -> Setting<Resources> {
    let gpus = patterns(file, "resources.gpus", findings);
    let mig = patterns(file, "resources.mig", findings);
    if naming || (gpus.is_empty() && mig.is_empty()) {
        return from_file(file, "resources", |_| Resources { gpus, mig });
    }
    if let Some(node) = file.at("resources") {
        tell(findings, node.line, "resources", Problem::NamingOff);
    }
    Setting { value: Resources::default(), origin: Origin::Default }
}

fn patterns(file: &File, path: &str, findings: &mut Vec<Finding>) -> Vec<NamedPattern> {
    let Some(Node { value: Value::List(items), .. }) = file.at(path) else { return Vec::new() };
    let mut patterns = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let path = format!("{path}[{number}]");
        let Value::Map(_) = item.value else { continue };
        let found = |key| {
            item.value.get(key).ok_or(Problem::Missing(key)).map_err(|problem| (item.line, path.clone(), problem))
        };
        let pattern = found("pattern").and_then(|node| match &node.value {
            Value::Text(text) if !text.is_empty() => Ok(Pattern::new(text)),
            _ => Err((node.line, format!("{path}.pattern"), Given::Node(node).refused("a pattern such as *A100*"))),
        });
        let name = found("name").and_then(|node| {
            resource_name(Given::Node(node)).map_err(|problem| (node.line, format!("{path}.name"), problem))
        });
        match (pattern, name) {
            (Ok(pattern), Ok(name)) => patterns.push(NamedPattern { pattern, name, line: item.line }),
            (pattern, name) => {
                for (line, key, problem) in pattern.err().into_iter().chain(name.err()) {
                    tell(findings, line, key, problem);
                }
            }
        }
    }
    patterns
}

/// Reads `linkwise.filter.exclude`.
pub fn exclude(file: &File, findings: &mut Vec<Finding>) -> Setting<Vec<Excluded>> {
    const PATH: &str = "linkwise.filter.exclude";
    const EXPECTED: &str = "a list of indices, UUIDs, PCI addresses or models";
    from_file(file, PATH, |node| {
        let Value::List(items) = &node.value else {
            tell(findings, node.line, PATH, Given::Node(node).refused(EXPECTED));
            return Vec::new();
        };
        let mut excluded = Vec::new();
        for (number, item) in items.iter().enumerate() {
            match filter(&item.value) {
                Some(gpu) => excluded.push(Excluded { gpu, line: item.line }),
                None => {
                    let problem = Given::Node(item).refused("an index, a UUID, a PCI address or a model");
                    tell(findings, item.line, format!("{PATH}[{number}]"), problem);
                }
            }
        }
        excluded
    })
}

/// What is none of the other names is a model.
fn filter(value: &Value) -> Option<GpuFilter> {
    let text = match value {
        Value::Whole(number) => return u32::try_from(*number).ok().map(GpuFilter::Index),
        Value::Text(text) if !text.trim().is_empty() => text,
        _ => return None,
    };
    let index = || text.parse().ok().map(GpuFilter::Index);
    let uuid = || text.starts_with("GPU-").then(|| text.parse().ok().map(GpuFilter::Uuid)).flatten();
    let address = || text.parse().ok().map(GpuFilter::Pci);
    Some(index().or_else(uuid).or_else(address).unwrap_or_else(|| GpuFilter::Model(Pattern::new(text))))
}

/// Reads a mapping by its keys.
fn mapping<K: Ord, V>(
    file: &File,
    path: &str,
    findings: &mut Vec<Finding>,
    key: impl Fn(&str) -> Result<K, Problem>,
    value: impl Fn(Given<'_>) -> Result<V, Problem>,
) -> Setting<BTreeMap<K, V>> {
    from_file(file, path, |node| {
        let Value::Map(entries) = &node.value else {
            tell(findings, node.line, path, Given::Node(node).refused("a mapping"));
            return BTreeMap::new();
        };
        let mut read = BTreeMap::new();
        for entry in entries {
            let path = format!("{path}.{}", entry.key);
            match (key(&entry.key), value(Given::Node(&entry.node))) {
                (Ok(key), Ok(value)) => drop(read.insert(key, value)),
                (key, value) => {
                    let key = key.err().map(|problem| (entry.line, problem));
                    let value = value.err().map(|problem| (entry.node.line, problem));
                    for (line, problem) in key.into_iter().chain(value) {
                        tell(findings, line, &path, problem);
                    }
                }
            }
        }
        read
    })
}

/// Reads `linkwise.health.xids`.
pub fn xids(file: &File, findings: &mut Vec<Finding>) -> Setting<BTreeMap<u64, XidAction>> {
    let xid = |key: &str| super::given::whole(Given::Text(key), 1, u64::from(u32::MAX));
    mapping(file, "linkwise.health.xids", findings, xid, choice::<XidAction>)
}

/// Reads `linkwise.policies`.
pub fn policies(file: &File, findings: &mut Vec<Finding>) -> Setting<BTreeMap<ResourceName, PolicyArg>> {
    mapping(file, "linkwise.policies", findings, |key| resource_name(Given::Text(key)), choice::<PolicyArg>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_left_out_by_any_of_its_names() {
        let text = |text: &str| filter(&Value::Text(text.to_owned())).unwrap();
        assert_eq!(filter(&Value::Whole(3)), Some(GpuFilter::Index(3)));
        assert_eq!(text("3"), GpuFilter::Index(3));
        assert!(matches!(text("GPU-00000001-0000-4000-8000-000000000000"), GpuFilter::Uuid(_)));
        assert!(matches!(text("0000:3b:00.0"), GpuFilter::Pci(_)));
        assert_eq!(text("*T400*"), GpuFilter::Model(Pattern::new("*T400*")));
        for nonsense in [Value::Whole(-1), Value::Bool(true), Value::Text(" ".into()), Value::List(vec![])] {
            assert_eq!(filter(&nonsense), None);
        }
    }
}
