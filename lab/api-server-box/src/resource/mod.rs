//! Admission of DRA's objects (`resource.k8s.io/v1`), of pods and of events: the checks before the server stores them.
//!
//! Unknown fields of slices are dropped, and so are the fields of gates that are off. Defaults are filled in. An object
//! that breaks a rule of the API (limits, names, immutable fields) is refused with a Status that names the field. The
//! rules are those of Kubernetes 1.36 (`staging/src/k8s.io/api/resource/v1/types.go`, `pkg/apis/resource/validation`,
//! `pkg/registry/resource`). Selectors are not compiled.

mod checks;
mod claim;
mod event;
pub(super) mod pod;
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
/// While a gate is off, updates of an object keep the fields that the object already has; a new object loses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gates {
    /// `DRADeviceTaints`: `taints` of devices.
    pub device_taints: bool,
    /// `DRAPartitionableDevices`: `sharedCounters`, `consumesCounters`.
    pub partitionable_devices: bool,
    /// `DRAConsumableCapacity`: `allowMultipleAllocations`, `requestPolicy`; `capacity` of requests.
    pub consumable_capacity: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self { device_taints: true, partitionable_devices: true, consumable_capacity: true }
    }
}

impl Gates {
    /// The defaults of Kubernetes 1.34 and 1.35: every gate is off.
    pub const OFF: Self = Self { device_taints: false, partitionable_devices: false, consumable_capacity: false };
}

/// Drops and fills in fields of an object that a client sent, and checks the object before the server stores it. `now`
/// is the server's time.
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
    if key.resource == ResourceType::RESOURCE_CLAIMS { claim::admit_status(key, live, object) } else { Ok(()) }
}

/// Returns true if the server counts changes of the specification in `metadata.generation`.
pub(super) fn has_generation(resource: &ResourceType) -> bool {
    [ResourceType::RESOURCE_SLICES, ResourceType::DEVICE_CLASSES].contains(resource)
}

/// Decodes a part of an object. Refuses a value of another type, as the decoder of the real server does.
fn decoded<T: DeserializeOwned>(key: &Key, value: &Value) -> Result<T, Refusal> {
    let mut value = if value.is_null() { json!({}) } else { value.clone() };
    // The server's decoder treats a null as an absent field.
    remove(&mut value, &Value::is_null);
    serde_json::from_value(value).map_err(|error| {
        let kind = key.resource.kind;
        Refusal::bad_request(format!("{kind} in version \"v1\" cannot be handled as a {kind}: json: {error}"))
    })
}

/// Removes the fields whose values meet a condition, the inner ones first.
fn remove(value: &mut Value, condition: &impl Fn(&Value) -> bool) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(|value| remove(value, condition));
            map.retain(|_, value| !condition(value));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| remove(value, condition)),
        _ => {}
    }
}

/// The stored form of a part: only the fields that the API has, without the empty ones.
fn kept<T: Serialize>(part: &T) -> Value {
    let mut value = serde_json::to_value(part).unwrap_or_else(|_| json!({}));
    remove(&mut value, &|value| value.is_null() || *value == json!([]) || *value == json!({}));
    value
}
