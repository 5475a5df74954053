//! The stored objects, their versions, and the changes that watches send.

use std::cell::Cell;
use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::admission::{self, validating::AdmissionRequest};
use crate::apply;
use crate::refusal::Refusal;
use crate::resource::{self, Gates};

/// The group and version of admission policies, and of DRA's objects.
const ADMISSION: &str = "admissionregistration.k8s.io/v1";
const DRA: &str = "resource.k8s.io/v1";

/// A kind of object that the server stores.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResourceType {
    /// Group and version, such as `v1` or `resource.k8s.io/v1`.
    pub api: &'static str,
    /// The resource in paths, such as `nodes`.
    pub plural: &'static str,
    /// The kind, such as `Node`.
    pub kind: &'static str,
    /// Set if objects of this kind belong to namespaces.
    pub namespaced: bool,
}

impl ResourceType {
    /// The API's nodes.
    pub const NODES: Self = Self::of("v1", "nodes", "Node", false);
    /// The API's pods.
    pub const PODS: Self = Self::of("v1", "pods", "Pod", true);
    /// Namespaces.
    pub const NAMESPACES: Self = Self::of("v1", "namespaces", "Namespace", false);
    /// Limits and defaults for the pods of a namespace.
    pub const LIMIT_RANGES: Self = Self::of("v1", "limitranges", "LimitRange", true);
    /// Events.
    pub const EVENTS: Self = Self::of("events.k8s.io/v1", "events", "Event", true);
    /// Policies that change the objects that clients create.
    pub const MUTATING_ADMISSION_POLICIES: Self =
        Self::of(ADMISSION, "mutatingadmissionpolicies", "MutatingAdmissionPolicy", false);
    /// Bindings of mutating policies.
    pub const MUTATING_ADMISSION_POLICY_BINDINGS: Self =
        Self::of(ADMISSION, "mutatingadmissionpolicybindings", "MutatingAdmissionPolicyBinding", false);
    /// Policies that refuse requests to change objects.
    pub const VALIDATING_ADMISSION_POLICIES: Self =
        Self::of(ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", false);
    /// Bindings of validating policies.
    pub const VALIDATING_ADMISSION_POLICY_BINDINGS: Self =
        Self::of(ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", false);
    /// Features of nodes, for Node Feature Discovery.
    pub const NODE_FEATURES: Self = Self::of("nfd.k8s-sigs.io/v1alpha1", "nodefeatures", "NodeFeature", true);
    /// The devices that DRA drivers publish.
    pub const RESOURCE_SLICES: Self = Self::of(DRA, "resourceslices", "ResourceSlice", false);
    /// Claims for published devices.
    pub const RESOURCE_CLAIMS: Self = Self::of(DRA, "resourceclaims", "ResourceClaim", true);
    /// Templates of claims.
    pub const RESOURCE_CLAIM_TEMPLATES: Self = Self::of(DRA, "resourceclaimtemplates", "ResourceClaimTemplate", true);
    /// Classes of devices.
    pub const DEVICE_CLASSES: Self = Self::of(DRA, "deviceclasses", "DeviceClass", false);

    /// All kinds above.
    pub const ALL: [Self; 14] = [
        Self::NODES,
        Self::PODS,
        Self::NAMESPACES,
        Self::LIMIT_RANGES,
        Self::EVENTS,
        Self::MUTATING_ADMISSION_POLICIES,
        Self::MUTATING_ADMISSION_POLICY_BINDINGS,
        Self::VALIDATING_ADMISSION_POLICIES,
        Self::VALIDATING_ADMISSION_POLICY_BINDINGS,
        Self::NODE_FEATURES,
        Self::RESOURCE_SLICES,
        Self::RESOURCE_CLAIMS,
        Self::RESOURCE_CLAIM_TEMPLATES,
        Self::DEVICE_CLASSES,
    ];

    const fn of(api: &'static str, plural: &'static str, kind: &'static str, namespaced: bool) -> Self {
        Self { api, plural, kind, namespaced }
    }

    /// The fields, besides name and namespace, by which a field selector may select objects of this kind.
    fn selectable(&self) -> &'static [&'static str] {
        if *self == Self::RESOURCE_SLICES { &["spec.nodeName", "spec.driver"] } else { &[] }
    }

    /// The key of an object of this kind.
    pub fn key(&self, namespace: Option<&str>, name: &str) -> Key {
        Key { resource: self.clone(), namespace: namespace.map(str::to_owned), name: name.to_owned() }
    }
}

/// The identity of an object: kind, namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The kind of the object.
    pub resource: ResourceType,
    /// The namespace; `None` for a cluster-scoped object.
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
}

/// A change of an object, as watches send it.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub version: u64,
    /// ADDED, MODIFIED or DELETED.
    pub kind: &'static str,
    pub key: Key,
    pub object: Value,
}

/// A field selector: the values that an object's fields must have, by their JSON pointers.
#[derive(Debug, Default)]
pub(super) struct Selector(Vec<(String, String)>);

impl Selector {
    /// Reads a `fieldSelector` such as `spec.nodeName=a,spec.driver=b`.
    pub fn parse(resource: &ResourceType, text: &str) -> Result<Self, Refusal> {
        let mut wanted = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let pair = part.split_once("==").or_else(|| part.split_once('='));
            let (field, value) = pair.ok_or_else(|| Refusal::bad_request(format!("invalid selector: '{part}'")))?;
            let known =
                ["metadata.name", "metadata.namespace"].into_iter().chain(resource.selectable().iter().copied());
            if !known.clone().any(|known| known == field) {
                return Err(Refusal::bad_request(format!("field label not supported: {field}")));
            }
            wanted.push((format!("/{}", field.replace('.', "/")), value.to_owned()));
        }
        Ok(Self(wanted))
    }

    /// Returns true if the object has the wanted values.
    pub fn selects(&self, object: &Value) -> bool {
        let text = |field: &str| object.pointer(field).and_then(Value::as_str).unwrap_or_default();
        self.0.iter().all(|(field, value)| text(field) == value)
    }
}

/// All objects of the server.
#[derive(Debug, Default)]
pub(super) struct Store {
    types: Vec<ResourceType>,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    /// The version of the last change.
    version: u64,
    /// The store has forgotten the changes up to this version.
    expired: u64,
    /// The feature gates, which decide which fields of objects are dropped.
    pub gates: Gates,
    /// Set while the server starts.
    pub is_starting: bool,
    /// The number of patches evaluated for mutating policies.
    pub patches: Cell<usize>,
}

impl Store {
    pub fn new(types: &[ResourceType]) -> Self {
        Self { types: types.to_vec(), version: 1, ..Self::default() }
    }

    /// The kind that has this resource name in paths.
    pub fn resource(&self, api: &str, plural: &str) -> Option<&ResourceType> {
        self.types.iter().find(|known| known.api == api && known.plural == plural)
    }

    /// The kind of this name.
    pub fn resource_of_kind(&self, api: &str, kind: &str) -> Option<&ResourceType> {
        self.types.iter().find(|known| known.api == api && known.kind == kind)
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    /// The objects of a kind in one namespace, or in all namespaces.
    pub fn list(&self, resource: &ResourceType, namespace: Option<&str>) -> Vec<&Value> {
        let is_listed =
            |key: &&Key| key.resource == *resource && namespace.is_none_or(|one| key.namespace.as_deref() == Some(one));
        self.objects.iter().filter(|(key, _)| is_listed(key)).map(|(_, object)| object).collect()
    }

    /// The changes after a version; `None` if the store has forgotten some of them.
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
        let object = apply::update(self.get(key), &identified(object, key), manager);
        self.write(key, object)
    }

    /// Creates an object. If the object has no name, the server generates one from `generateName`.
    pub fn create(&mut self, manager: &str, key: &Key, mut object: Value) -> Result<Value, Refusal> {
        let mut key = key.clone();
        if key.name.is_empty() {
            let base = object["metadata"]["generateName"].as_str().unwrap_or_default();
            key.name = self.generate(base).ok_or_else(|| {
                Refusal::new(422, "Invalid", "metadata.name: Required value: name or generateName is required")
            })?;
        }
        if self.get(&key).is_some() {
            return Err(Refusal::exists(&key));
        }
        admission::check(&key, &object)?;
        if key.resource == ResourceType::PODS {
            object = identified(object, &key);
            resource::pod::complete(&mut object)?;
            admission::limits::complete(self, &key, &mut object);
            admission::mutate(self, &key, &mut object)?;
            admission::limits::check(self, &key, &object)?;
            let (unknown_user, plural) = (Value::Null, key.resource.plural);
            let request =
                AdmissionRequest { operation: "CREATE", user: &unknown_user, key: &key, object: &object, plural };
            admission::validating::admit(self, &request)?;
        }
        resource::admit(self.gates, &key, None, &mut object, &self.now())?;
        Ok(self.put(manager, &key, object))
    }

    /// Replaces an object, if it has not changed since the client read it.
    pub fn replace(&mut self, manager: &str, key: &Key, mut object: Value) -> Result<Value, Refusal> {
        let live = self.current(key, &object)?;
        resource::admit(self.gates, key, Some(live), &mut object, &self.now())?;
        Ok(self.put(manager, key, object))
    }

    /// Replaces the status of an object, and nothing else, if the object has not changed since the client read it.
    pub fn replace_status(&mut self, manager: &str, key: &Key, sent: &Value) -> Result<Value, Refusal> {
        let live = self.current(key, sent)?;
        let mut object = live.clone();
        object["status"] = sent["status"].clone();
        resource::admit_status(key, live, &mut object)?;
        Ok(self.put(manager, key, object))
    }

    /// The object after a merge patch (RFC 7386). The spec stays if `is_status` is set, else the status.
    pub fn merged(&self, key: &Key, patch: &Value, is_status: bool) -> Result<Value, Refusal> {
        let live = self.current(key, patch)?;
        let mut object = live.clone();
        merge(&mut object, patch);
        let kept = if is_status { "spec" } else { "status" };
        object[kept] = live[kept].clone();
        Ok(object)
    }

    /// The stored object that a client wants to change, if it has the version and the UID that the client sent.
    fn current(&self, key: &Key, sent: &Value) -> Result<&Value, Refusal> {
        let live = self.get(key).ok_or_else(|| Refusal::not_found(key))?;
        let metadata = &sent["metadata"];
        if !metadata["name"].is_null() && metadata["name"] != key.name.as_str() {
            return Err(Refusal::bad_request("the name of the object does not match the name on the URL"));
        }
        for field in ["resourceVersion", "uid"] {
            if !metadata[field].is_null() && metadata[field] != live["metadata"][field] {
                return Err(Refusal::conflict(key, "the object has been modified"));
            }
        }
        Ok(live)
    }

    /// Returns the first 58 characters of `base` and five more that make the name unique (`SimpleNameGenerator`).
    fn generate(&self, base: &str) -> Option<String> {
        const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
        let base: String = base.chars().take(58).collect();
        let mut rest = self.version.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 16;
        let mut name = base.clone();
        for _ in 0..5 {
            let count = LETTERS.len() as u64;
            name.push(char::from(*LETTERS.get(usize::try_from(rest % count).ok()?)?));
            rest /= count;
        }
        (!base.is_empty()).then_some(name)
    }

    /// The server's time. Each change takes one second, so that no two writes have the same time.
    fn now(&self) -> String {
        let (minutes, seconds) = (self.version / 60, self.version % 60);
        let (hours, minutes) = (minutes / 60, minutes % 60);
        let (days, hours) = (hours / 24, hours % 24);
        format!("2026-01-{:02}T{hours:02}:{minutes:02}:{seconds:02}Z", days % 28 + 1)
    }

    /// Applies a configuration (server-side apply).
    pub fn apply(&mut self, manager: &str, key: &Key, config: &Value, force: bool) -> Result<Value, Refusal> {
        let live = self.get(key);
        let mut applied = apply::apply(live, config, manager, force)
            .map_err(|fields| Refusal::conflict(key, &format!("other managers own {}", fields.join(", "))))?;
        resource::admit(self.gates, key, live, &mut applied, &self.now())?;
        Ok(self.write(key, identified(applied, key)))
    }

    /// Deletes an object, if the preconditions in the client's options hold.
    pub fn delete(&mut self, key: &Key, options: &Value) -> Result<Value, Refusal> {
        let live = self.get(key).ok_or_else(|| Refusal::not_found(key))?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][field];
            if !wanted.is_null() && *wanted != live["metadata"][field] {
                return Err(Refusal::conflict(key, "a precondition does not hold"));
            }
        }
        self.remove(key).ok_or_else(|| Refusal::not_found(key))
    }

    /// Deletes the selected objects of a kind.
    pub fn remove_selected(&mut self, resource: &ResourceType, namespace: Option<&str>, selector: &Selector) {
        let is_selected = |object: &&Value| selector.selects(object);
        let key = |object: &Value| {
            let text = |field: &str| object["metadata"][field].as_str();
            resource.key(text("namespace"), text("name").unwrap_or_default())
        };
        let keys: Vec<Key> = self.list(resource, namespace).into_iter().filter(is_selected).map(key).collect();
        for key in keys {
            self.remove(&key);
        }
    }

    /// Deletes an object without any checks.
    pub fn remove(&mut self, key: &Key) -> Option<Value> {
        let object = self.objects.remove(key)?;
        self.version += 1;
        let (version, mut last) = (self.version, object.clone());
        last["metadata"]["resourceVersion"] = json!(version.to_string());
        self.changes.push(Change { version, kind: "DELETED", key: key.clone(), object: last });
        Some(object)
    }

    /// Stores an object. An unchanged object keeps its version, and no watch sees it.
    fn write(&mut self, key: &Key, mut object: Value) -> Value {
        let live = self.objects.get(key);
        let uid = live.map_or_else(|| json!(format!("uid-{}", self.version)), |live| live["metadata"]["uid"].clone());
        object["metadata"]["uid"] = uid;
        if resource::has_generation(&key.resource) {
            let before = live.map_or(0, |live| live["metadata"]["generation"].as_u64().unwrap_or_default());
            let changed = live.is_none_or(|live| live["spec"] != object["spec"]);
            object["metadata"]["generation"] = json!(before + u64::from(changed));
        }
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

fn identified(mut object: Value, key: &Key) -> Value {
    object["apiVersion"] = json!(key.resource.api);
    object["kind"] = json!(key.resource.kind);
    object["metadata"]["name"] = json!(key.name);
    if let Some(namespace) = &key.namespace {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

/// Applies a merge patch (RFC 7386).
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else { return object.clone_from(patch) };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, change) in changes {
        match change {
            Value::Null => drop(object.as_object_mut().and_then(|object| object.remove(key))),
            change => merge(&mut object[key], change),
        }
    }
}
