//! The parts of `resource.k8s.io/v1` that the model reads. Fields that would influence a choice but are not modelled,
//! because linkwise neither publishes nor requests them, are refused by name.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Failure;

/// Reads an object of the API.
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SliceSpec {
    pub driver: String,
    pub pool: Pool,
    pub node_name: String,
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
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Capacity {
    pub value: String,
    #[serde(default)]
    pub request_policy: Option<RequestPolicy>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct RequestPolicy {
    pub default: String,
    pub valid_range: ValidRange,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ValidRange {
    pub min: String,
    pub max: Option<String>,
    pub step: String,
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
    pub effect: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DeviceClass {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: ClassSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ClassSpec {
    pub selectors: Vec<Selector>,
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

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ClaimSpec {
    #[serde(default)]
    pub devices: Devices,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Devices {
    pub requests: Vec<Request>,
    pub constraints: Vec<Constraint>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Request {
    pub name: String,
    pub exactly: Option<Exactly>,
    #[serde(default)]
    pub first_available: Vec<Exactly>,
}

/// The content of a request without alternatives, or one alternative of a request. Only an alternative has a name.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Exactly {
    #[serde(default)]
    pub name: String,
    pub device_class_name: String,
    #[serde(default)]
    pub selectors: Vec<Selector>,
    #[serde(default, rename = "allocationMode")]
    _mode: Mode,
    #[serde(default = "one")]
    pub count: usize,
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

#[derive(Clone, Copy, Debug, Default, Deserialize)]
enum Mode {
    #[default]
    ExactCount,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Constraint {
    #[serde(default)]
    pub requests: Vec<String>,
    pub match_attribute: String,
}

/// A device in the results of an allocation.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AllocationResult {
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    #[serde(rename = "shareID", default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed_capacity: BTreeMap<String, String>,
}
