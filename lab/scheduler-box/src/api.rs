//! The parts of `resource.k8s.io/v1` that the model reads, by the JSON names of its objects.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Failure;

/// Reads an object.
pub(crate) fn read<T: DeserializeOwned>(object: &Value) -> Result<T, Failure> {
    T::deserialize(object).map_err(|error| {
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let name = format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]));
        Failure::Malformed { name, why: error.to_string() }
    })
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Metadata {
    pub name: String,
    pub namespace: String,
    #[serde(rename = "creationTimestamp")]
    pub created: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Slice {
    pub metadata: Metadata,
    pub spec: SliceSpec,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SliceSpec {
    pub driver: String,
    pub pool: Pool,
    pub node_name: Option<String>,
    pub all_nodes: Option<bool>,
    pub node_selector: Option<Value>,
    pub per_device_node_selection: Option<bool>,
    #[serde(default)]
    pub devices: Vec<Device>,
    #[serde(default)]
    pub shared_counters: Vec<CounterSet>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pool {
    pub name: String,
    pub generation: i64,
    pub resource_slice_count: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    pub name: String,
    #[serde(default)]
    pub attributes: BTreeMap<String, Attribute>,
    #[serde(default)]
    pub capacity: BTreeMap<String, Capacity>,
    #[serde(default)]
    pub consumes_counters: Vec<Consumption>,
    #[serde(default)]
    pub taints: Vec<Taint>,
    #[serde(default)]
    pub allow_multiple_allocations: bool,
}

/// The value of an attribute. Versions are equal if their texts are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Attribute {
    Int(i64),
    Bool(bool),
    String(String),
    Version(String),
    Ints(Vec<i64>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
    Versions(Vec<String>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Capacity {
    pub value: String,
    #[serde(default)]
    pub request_policy: Option<RequestPolicy>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct RequestPolicy {
    pub default: Option<String>,
    pub valid_values: Vec<String>,
    pub valid_range: Option<ValidRange>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ValidRange {
    pub min: Option<String>,
    pub max: Option<String>,
    pub step: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Amount {
    pub value: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct CounterSet {
    pub name: String,
    pub counters: BTreeMap<String, Amount>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Consumption {
    pub counter_set: String,
    pub counters: BTreeMap<String, Amount>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Taint {
    pub key: String,
    #[serde(default)]
    pub value: String,
    pub effect: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DeviceClass {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: ClassSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ClassSpec {
    pub selectors: Vec<Selector>,
    pub config: Vec<Value>,
    #[serde(rename = "extendedResourceName")]
    pub extended_resource: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Selector {
    pub cel: Cel,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Cel {
    pub expression: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Claim {
    pub metadata: Metadata,
    pub spec: ClaimSpec,
    #[serde(default)]
    pub status: ClaimStatus,
}

impl Claim {
    /// Namespace and name.
    pub fn name(&self) -> String {
        match self.metadata.namespace.as_str() {
            "" => self.metadata.name.clone(),
            namespace => format!("{namespace}/{}", self.metadata.name),
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ClaimStatus {
    pub allocation: Option<Value>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ClaimSpec {
    #[serde(default)]
    pub devices: Devices,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Devices {
    pub requests: Vec<Request>,
    pub constraints: Vec<Constraint>,
    pub config: Vec<Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Request {
    pub name: String,
    pub exactly: Option<Exactly>,
    #[serde(default)]
    pub first_available: Vec<Exactly>,
}

/// The content of a request: a whole request, or an alternative of one, which then has a name.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Exactly {
    #[serde(default)]
    pub name: String,
    pub device_class_name: String,
    #[serde(default)]
    pub selectors: Vec<Selector>,
    #[serde(default)]
    pub allocation_mode: Mode,
    #[serde(default = "one")]
    pub count: usize,
    #[serde(default)]
    pub admin_access: Option<bool>,
    #[serde(default)]
    pub tolerations: Vec<Toleration>,
    #[serde(default)]
    pub capacity: Option<CapacityRequirements>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CapacityRequirements {
    pub requests: BTreeMap<String, String>,
}

fn one() -> usize {
    1
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum Mode {
    #[default]
    ExactCount,
    All,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Toleration {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operator: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub effect: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toleration_seconds: Option<i64>,
}

impl Toleration {
    /// Follows the rules of nodes' taints: an empty key with Exists tolerates all keys, an empty effect all effects.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        let effect = self.effect.is_empty() || self.effect == taint.effect;
        let key = self.key.is_empty() || self.key == taint.key;
        let value = match self.operator.as_str() {
            "Exists" => true,
            "Equal" | "" => self.value == taint.value,
            _ => false,
        };
        effect && key && value
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Constraint {
    #[serde(default)]
    pub requests: Vec<String>,
    pub match_attribute: Option<String>,
    pub distinct_attribute: Option<String>,
}

/// One entry of an allocation's results.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AllocationResult {
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_access: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    #[serde(rename = "shareID", default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed_capacity: BTreeMap<String, String>,
}
