//! The API group `resource.k8s.io/v1`, resources of pods, and events: what the server does with objects beyond keeping
//! them.
//!
//! Fields that the API does not have are dropped, as are those of gates that are off; defaults are filled in; what
//! breaks a rule of the API (limits, names, immutable fields) is refused with a Status that names the field. The rules
//! are those of Kubernetes 1.36 (`staging/src/k8s.io/api/resource/v1/types.go`, `pkg/apis/resource/validation`,
//! `pkg/registry/resource`). Selectors are not compiled.

mod checks;
mod claim;
mod event;
pub(super) mod pod;
mod quantity;
mod slice;
#[cfg(test)]
mod tests;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::refusal::Refusal;
use crate::store::{Key, ResourceType};
use checks::Checks;

/// Feature gates of the API server that drop fields silently. The defaults are those of Kubernetes 1.36.
///
/// A slice that has such fields when the gate is switched off keeps them through updates; a new one loses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gates {
    /// `DRADeviceTaints`: `taints` of devices.
    pub device_taints: bool,
    /// `DRAPartitionableDevices`: `sharedCounters`, `consumesCounters`.
    pub partitionable_devices: bool,
    /// `DRAConsumableCapacity`: `allowMultipleAllocations`, `requestPolicy`; `capacity` of requests.
    pub consumable_capacity: bool,
    /// `DRAListTypeAttributes`: `ints`, `bools`, `strings`, `versions` of an attribute.
    pub list_attributes: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self { device_taints: true, partitionable_devices: true, consumable_capacity: true, list_attributes: false }
    }
}

impl Gates {
    /// The defaults of Kubernetes 1.34 and 1.35: each of them is off.
    pub const OFF: Self =
        Self { device_taints: false, partitionable_devices: false, consumable_capacity: false, list_attributes: false };
}

/// Checks an object that a client sent, and changes it as the server does before it is kept. `now` is the server's
/// time.
pub(super) fn admit(
    gates: Gates,
    key: &Key,
    live: Option<&Value>,
    object: &mut Value,
    now: &str,
) -> Result<(), Refusal> {
    match &key.resource {
        of if *of == ResourceType::RESOURCE_SLICES => slice::admit(gates, key, live, object, now)?,
        of if *of == ResourceType::RESOURCE_CLAIMS => claim::admit(gates, key, live, object)?,
        of if *of == ResourceType::RESOURCE_CLAIM_TEMPLATES => claim::admit_template(gates, key, live, object)?,
        of if *of == ResourceType::DEVICE_CLASSES => claim::admit_class(key, object)?,
        of if *of == ResourceType::PODS => pod::check(key, object)?,
        of if *of == ResourceType::EVENTS => event::check(key, object)?,
        _ => return Ok(()),
    }
    let mut checks = Checks::default();
    checks.subdomain("metadata.name", &key.name, 253);
    checks.end(key)
}

/// Checks a new status.
pub(super) fn admit_status(key: &Key, live: &Value, object: &mut Value) -> Result<(), Refusal> {
    match &key.resource {
        of if *of == ResourceType::RESOURCE_CLAIMS => claim::admit_status(key, live, object),
        _ => Ok(()),
    }
}

/// Whether the server counts changes of the specification in `metadata.generation`.
pub(super) fn has_generation(resource: &ResourceType) -> bool {
    [ResourceType::RESOURCE_SLICES, ResourceType::DEVICE_CLASSES].contains(resource)
}

/// A part of an object by its type; what is of another shape is refused as the server's decoder does.
fn decoded<T: DeserializeOwned>(key: &Key, value: &Value) -> Result<T, Refusal> {
    let mut value = if value.is_null() { json!({}) } else { value.clone() };
    remove_nulls(&mut value);
    serde_json::from_value(value).map_err(|error| {
        let kind = key.resource.kind;
        Refusal::bad_request(format!("{kind} in version \"v1\" cannot be handled as a {kind}: json: {error}"))
    })
}

/// To the server's decoder a null is an absent field.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// A typed part as it is kept: only the fields that the API has.
fn kept<T: Serialize>(part: &T) -> Value {
    serde_json::to_value(part).unwrap_or_else(|_| json!({}))
}
