//! The objects, their versions and what has changed.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::apply;

/// A kind of object that the server has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResourceType {
    /// Group and version, such as `v1` or `resource.k8s.io/v1`.
    pub api: &'static str,
    /// The resource in paths, such as `nodes`.
    pub plural: &'static str,
    /// The kind, such as `Node`.
    pub kind: &'static str,
    /// Whether its objects are in namespaces.
    pub namespaced: bool,
}

impl ResourceType {
    /// The API's nodes.
    pub const NODES: Self = Self { api: "v1", plural: "nodes", kind: "Node", namespaced: false };
    /// The API's pods.
    pub const PODS: Self = Self { api: "v1", plural: "pods", kind: "Pod", namespaced: true };
    /// Node Feature Discovery's features of nodes.
    pub const NODE_FEATURES: Self =
        Self { api: "nfd.k8s-sigs.io/v1alpha1", plural: "nodefeatures", kind: "NodeFeature", namespaced: true };

    /// An object of this kind.
    pub fn key(&self, namespace: Option<&str>, name: &str) -> Key {
        Key { resource: self.clone(), namespace: namespace.map(str::to_owned), name: name.to_owned() }
    }
}

/// What identifies an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Its kind.
    pub resource: ResourceType,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

/// Why an object was not changed: code, reason and message of a Status.
pub(super) type Refusal = (u16, &'static str, String);

/// One change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub version: u64,
    /// ADDED, MODIFIED or DELETED.
    pub kind: &'static str,
    pub key: Key,
    pub object: Value,
}

/// All objects.
#[derive(Debug)]
pub(super) struct Store {
    types: Vec<ResourceType>,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    /// Of the last change.
    version: u64,
    /// Changes up to this one are forgotten.
    expired: u64,
}

impl Store {
    pub fn new(types: &[ResourceType]) -> Self {
        Self { types: types.to_vec(), objects: BTreeMap::new(), changes: Vec::new(), version: 1, expired: 0 }
    }

    /// A kind by its path.
    pub fn resource(&self, api: &str, plural: &str) -> Option<&ResourceType> {
        self.types.iter().find(|known| known.api == api && known.plural == plural)
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    /// The objects of a kind, of one namespace or of all.
    pub fn list(&self, resource: &ResourceType, namespace: Option<&str>) -> Vec<&Value> {
        let meant =
            |key: &&Key| key.resource == *resource && namespace.is_none_or(|one| key.namespace.as_deref() == Some(one));
        self.objects.iter().filter(|(key, _)| meant(key)).map(|(_, object)| object).collect()
    }

    /// The changes after a version; `None` where some of them are forgotten.
    pub fn changes_after(&self, version: u64) -> Option<Vec<Change>> {
        let changes = || self.changes.iter().filter(|change| change.version > version).cloned().collect();
        (version >= self.expired).then(changes)
    }

    pub fn expire(&mut self) {
        self.version += 1;
        self.expired = self.version;
        self.changes.clear();
    }

    /// Creates or replaces an object.
    pub fn put(&mut self, manager: &str, key: &Key, object: Value) -> Value {
        let object = apply::update(self.get(key), &named(object, key), manager);
        self.write(key, object)
    }

    /// Creates an object.
    pub fn create(&mut self, manager: &str, key: &Key, object: Value) -> Result<Value, Refusal> {
        match self.get(key) {
            Some(_) => Err((409, "AlreadyExists", format!("{} \"{}\" already exists", key.resource.plural, key.name))),
            None => Ok(self.put(manager, key, object)),
        }
    }

    /// Replaces an object that is as the client saw it.
    pub fn replace(&mut self, manager: &str, key: &Key, object: Value) -> Result<Value, Refusal> {
        let live = self.get(key).ok_or_else(|| not_found(key))?;
        let seen = &object["metadata"]["resourceVersion"];
        if !seen.is_null() && *seen != live["metadata"]["resourceVersion"] {
            return Err(conflict(key, "the object has been modified"));
        }
        Ok(self.put(manager, key, object))
    }

    /// Applies a configuration.
    pub fn apply(&mut self, manager: &str, key: &Key, config: &Value, force: bool) -> Result<Value, Refusal> {
        let live = self.get(key);
        let applied = apply::apply(live, config, manager, force)
            .map_err(|fields| conflict(key, &format!("other managers own {}", fields.join(", "))))?;
        Ok(self.write(key, named(applied, key)))
    }

    /// Deletes an object that is as the client saw it.
    pub fn delete(&mut self, key: &Key, options: &Value) -> Result<Value, Refusal> {
        let live = self.get(key).ok_or_else(|| not_found(key))?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][field];
            if !wanted.is_null() && *wanted != live["metadata"][field] {
                return Err(conflict(key, "a precondition does not hold"));
            }
        }
        self.remove(key).ok_or_else(|| not_found(key))
    }

    /// Deletes an object.
    pub fn remove(&mut self, key: &Key) -> Option<Value> {
        let object = self.objects.remove(key)?;
        self.version += 1;
        let (version, mut last) = (self.version, object.clone());
        last["metadata"]["resourceVersion"] = json!(version.to_string());
        self.changes.push(Change { version, kind: "DELETED", key: key.clone(), object: last });
        Some(object)
    }

    /// Keeps an object; one that is as before keeps its version too.
    fn write(&mut self, key: &Key, mut object: Value) -> Value {
        let live = self.objects.get(key);
        let uid = live.map_or_else(|| json!(format!("uid-{}", self.version)), |live| live["metadata"]["uid"].clone());
        object["metadata"]["uid"] = uid;
        if let Some(live) = live {
            object["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"].clone();
            if object == *live {
                return object;
            }
        }
        let kind = if live.is_some() { "MODIFIED" } else { "ADDED" };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.changes.push(Change { version: self.version, kind, key: key.clone(), object: object.clone() });
        self.objects.insert(key.clone(), object.clone());
        object
    }
}

fn named(mut object: Value, key: &Key) -> Value {
    object["apiVersion"] = json!(key.resource.api);
    object["kind"] = json!(key.resource.kind);
    object["metadata"]["name"] = json!(key.name);
    if let Some(namespace) = &key.namespace {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

pub(super) fn not_found(key: &Key) -> Refusal {
    (404, "NotFound", format!("{} \"{}\" not found", key.resource.plural, key.name))
}

fn conflict(key: &Key, why: &str) -> Refusal {
    (409, "Conflict", format!("Operation cannot be fulfilled on {} \"{}\": {why}", key.resource.plural, key.name))
}
