//! The settings that are mappings or lists, which only the file can set: `resources`, `sharing`,
//! `linkwise.filter.exclude` and `linkwise.health.xids`. Items keep their places in the file, because `rules` reports
//! these places.
//!
//! Without `linkwise.naming` the effect of `sharing` is the NVIDIA plugin's: a shared resource has its own name, with
//! `.shared` or without, and all devices of it are shared.

use std::collections::BTreeMap;

use serde::Serialize;

use super::file::{Finding, Node, Severity};
use super::value::{self, Value, boolean, choice, gpu_selector, resource_name, whole};
use super::{Origin, Setting};
use linkwise_core::quote::excerpt;
use linkwise_core::state::{
    GpuSelector, MAX_MPS_CLIENTS, MAX_SLOTS, NamePattern, Pattern, ResourceName, SharedDevices, SharedResource,
    Sharing, SharingKind, XidClass,
};

/// The note on settings that need `linkwise.naming`.
const NAMING_OFF: &str =
    "ignored, as the NVIDIA plugin ignores it; set 'linkwise: {naming: true}' in this file to apply it";

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
pub(super) struct Item<T> {
    pub value: T,
    pub line: u64,
    /// The path, such as `resources.gpus[0]`.
    pub key: String,
}

impl<T> Item<T> {
    /// An error at one of the item's keys.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> Finding {
        Finding::error(self.line, format!("{}.{key}", self.key), problem)
    }

    fn with<U>(self, value: U) -> Item<U> {
        Item { value, line: self.line, key: self.key }
    }
}

/// The lists of the file, as [`Reader::lists`] reads them.
pub(super) struct Lists {
    pub gpus: Vec<Item<NamePattern>>,
    pub mig: Vec<Item<NamePattern>>,
    pub sharing: Option<Sharing>,
    pub shared: Vec<Item<SharedResource>>,
    pub exclude: Vec<Item<GpuSelector>>,
}

impl Lists {
    /// Returns true if GPUs are shared by MPS.
    pub fn is_mps(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.kind == SharingKind::Mps)
    }
}

/// The key of a kind of sharing, below `sharing`.
pub(super) fn key(kind: SharingKind) -> &'static str {
    match kind {
        SharingKind::TimeSlicing => "timeSlicing",
        SharingKind::Mps => "mps",
    }
}

/// A setting that only the file can set, with its line there as its origin.
pub(super) fn from_file<T: Default>(file: &Node, path: &str, value: Option<T>) -> Setting<T> {
    let read = value.zip(file.at(path)).map(|(value, node)| Setting { value, origin: Origin::File(node.line) });
    read.unwrap_or_default()
}

/// The values of some items, without their places.
pub(super) fn values<T: Clone>(items: &[Item<T>]) -> Vec<T> {
    items.iter().map(|item| item.value.clone()).collect()
}

/// Reads lists and mappings, and collects the findings about them.
pub(super) struct Reader<'a> {
    pub file: &'a Node,
    /// The value of `linkwise.naming`.
    pub naming: bool,
    pub findings: &'a mut Vec<Finding>,
}

impl Reader<'_> {
    pub fn lists(mut self) -> Lists {
        let (mut gpus, mut mig) = (self.patterns("resources.gpus"), self.patterns("resources.mig"));
        let exclude = self.exclude();
        let has_patterns = gpus.iter().chain(&mig).next().is_some();
        if has_patterns && !self.naming {
            self.note(self.file.at("resources"), "resources", NAMING_OFF);
            (gpus, mig) = Default::default();
        }
        let (slicing, mps) = (self.sharing(SharingKind::TimeSlicing), self.sharing(SharingKind::Mps));
        if let (Some(_), Some(_), Some(node)) = (&slicing, &mps, self.file.at("sharing.timeSlicing")) {
            let problem = "time-slicing and MPS exclude each other: sharing.timeSlicing is ignored, as the NVIDIA \
                           plugin ignores it";
            self.findings.push(Finding::at(node.line, "sharing.timeSlicing", Severity::Warning, problem));
        }
        let (sharing, shared) = mps.or(slicing).unzip();
        Lists { gpus, mig, sharing, shared: shared.unwrap_or_default(), exclude }
    }

    /// Adds a note about a value, if there is one.
    fn note(&mut self, node: Option<&Node>, key: &str, problem: &str) {
        self.findings.extend(node.map(|node| Finding::at(node.line, key, Severity::Note, problem)));
    }

    /// Returns the value that a reader returned, or reports its error.
    fn read<T>(&mut self, line: u64, key: &str, read: Result<T, String>) -> Option<T> {
        read.map_err(|problem| self.findings.push(Finding::error(line, key, problem))).ok()
    }

    /// The value of a key: `Some(None)` if it is missing, `None` if it is wrong.
    fn optional<T>(
        &mut self,
        of: &Item<&Node>,
        key: &str,
        read: impl Fn(&Value) -> Result<T, String>,
    ) -> Option<Option<T>> {
        let Some(node) = of.value.get(key) else { return Some(None) };
        self.read(node.line, &format!("{}.{key}", of.key), read(&node.value)).map(Some)
    }

    /// The value of a required key.
    fn required<T>(&mut self, of: &Item<&Node>, key: &str, read: impl Fn(&Value) -> Result<T, String>) -> Option<T> {
        if of.value.get(key).is_none() {
            self.findings.push(Finding::error(of.line, &of.key, format!("'{key}' is missing")));
        }
        self.optional(of, key, read)?
    }

    fn patterns(&mut self, path: &str) -> Vec<Item<NamePattern>> {
        let pattern = |value: &Value| match value {
            Value::Text(text) if !text.is_empty() => Ok(Pattern::new(text)),
            _ => Err(value.refused("a pattern such as *A100*")),
        };
        let items = mappings(self.file.at(path), path);
        let read = |item: Item<&Node>| {
            let (pattern, name) =
                (self.required(&item, "pattern", pattern), self.required(&item, "name", resource_name));
            Some(item.with(NamePattern { pattern: pattern?, name: name? }))
        };
        items.filter_map(read).collect()
    }

    fn exclude(&mut self) -> Vec<Item<GpuSelector>> {
        const PATH: &str = "linkwise.filter.exclude";
        let Some(node) = self.file.at(PATH) else { return Vec::new() };
        if !matches!(node.value, Value::List(_)) {
            let problem = node.value.refused("a list of indices, UUIDs, PCI addresses or models");
            self.findings.push(Finding::error(node.line, PATH, problem));
        }
        let read = |item: Item<&Node>| {
            let selector = self.read(item.line, &item.key, gpu_selector(&item.value.value))?;
            Some(item.with(selector))
        };
        items(Some(node), PATH).filter_map(read).collect()
    }

    /// Reads `linkwise.health.xids`, a mapping whose keys are data.
    pub fn xids(&mut self) -> Setting<BTreeMap<u64, XidClass>> {
        const PATH: &str = "linkwise.health.xids";
        let mut classes = BTreeMap::new();
        let Some(node) = self.file.at(PATH) else { return Setting::default() };
        let Value::Map(entries) = &node.value else {
            self.findings.push(Finding::error(node.line, PATH, node.value.refused("a mapping")));
            return from_file(self.file, PATH, Some(classes));
        };
        for entry in entries {
            let path = format!("{PATH}.{}", excerpt(&entry.key));
            let xid = whole(&Value::Word(entry.key.clone()), 1, u64::from(u32::MAX));
            let (xid, class) =
                (self.read(entry.line, &path, xid), self.read(entry.node.line, &path, choice(&entry.node.value)));
            classes.extend(xid.zip(class));
        }
        from_file(self.file, PATH, Some(classes))
    }

    fn sharing(&mut self, kind: SharingKind) -> Option<(Sharing, Vec<Item<SharedResource>>)> {
        let path = format!("sharing.{}", key(kind));
        let node = self.file.at(&path)?;
        let whole = Item { value: node, line: node.line, key: path };
        let mut sharing = Sharing::new(kind, Vec::new());
        for (key, value) in [
            ("renameByDefault", &mut sharing.rename_by_default),
            ("failRequestsGreaterThanOne", &mut sharing.fail_requests_greater_than_one),
        ] {
            *value = self.optional(&whole, key, boolean).flatten().unwrap_or(*value);
        }
        let list = node.get("resources");
        let is_empty = list.is_none_or(|list| matches!(&list.value, Value::List(items) if items.is_empty()));
        if is_empty && matches!(node.value, Value::Map(_)) {
            self.findings.push(Finding::error(node.line, &whole.key, "'resources' is missing"));
        }
        let mut resources: Vec<Item<SharedResource>> = Vec::new();
        for item in mappings(list, &format!("{}.resources", whole.key)) {
            let Some(value) = self.shared(kind, &item, sharing.rename_by_default) else { continue };
            let earlier = resources.iter_mut().find(|earlier| !self.naming && earlier.value.name == value.name);
            if let Some(earlier) = earlier {
                let problem =
                    "its resource is listed before; the larger number of replicas counts, as with the NVIDIA plugin";
                self.findings.push(Finding::at(item.line, item.key, Severity::Note, problem));
                earlier.value.replicas = earlier.value.replicas.max(value.replicas);
            } else {
                resources.push(item.with(value));
            }
        }
        sharing.resources = values(&resources);
        (!resources.is_empty()).then_some((sharing, resources))
    }

    /// Reads one resource in its effective form, in which `rename` may be the default name.
    fn shared(&mut self, kind: SharingKind, item: &Item<&Node>, rename_by_default: bool) -> Option<SharedResource> {
        let name = self.required(item, "name", resource_name);
        let rename = self.optional(item, "rename", resource_name);
        let devices = self.optional(item, "devices", value::devices);
        let limit = if kind == SharingKind::Mps { MAX_MPS_CLIENTS } else { MAX_SLOTS };
        let replicas = self.required(item, "replicas", |value| whole(value, 2, limit));
        let (name, mut rename, mut devices) = (name?, rename?, devices?.unwrap_or_default());
        let by_default = match rename_by_default.then(|| format!("{name}.shared").parse::<ResourceName>()) {
            Some(Err(error)) if rename.is_none() || !self.naming => {
                self.findings.push(item.error("name", format!("with renameByDefault, {error}")));
                None
            }
            by_default => by_default.and_then(Result::ok),
        };
        if self.naming {
            rename = rename.or(by_default);
        } else {
            let renamed = rename.is_some() && rename != by_default;
            for (key, ignored) in [("rename", renamed), ("devices", devices != SharedDevices::All)] {
                let node = item.value.get(key).filter(|_| ignored);
                self.note(node, &format!("{}.{key}", item.key), NAMING_OFF);
            }
            (rename, devices) = (by_default, SharedDevices::All);
        }
        Some(SharedResource { name, rename, devices, replicas: replicas? })
    }
}

/// The items of a list, each with its path.
fn items<'a>(list: Option<&'a Node>, path: &str) -> impl Iterator<Item = Item<&'a Node>> {
    let items = if let Some(Node { value: Value::List(items), .. }) = list { items.as_slice() } else { &[] };
    let numbered = items.iter().enumerate();
    numbered.map(move |(number, node)| Item { value: node, line: node.line, key: format!("{path}[{number}]") })
}

/// The items of a list that are mappings. [`Node::parse`] has reported the others.
fn mappings<'a>(list: Option<&'a Node>, path: &str) -> impl Iterator<Item = Item<&'a Node>> {
    items(list, path).filter(|item| matches!(item.value.value, Value::Map(_)))
}
