//! ResourceSlices: gates, defaults, limits. The fields that linkwise never sends are unknown here, and are dropped: all
//! selections of nodes but `nodeName`, attributes with lists of values, and `validValues` of policies.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checks::Checks;
use super::{Gates, decoded, kept};
use crate::refusal::Refusal;
use crate::store::Key;
use linkwise_scheduler_box::Quantity;

/// Limits of Kubernetes 1.36 (`types.go`): `ResourceSliceMaxDevices`,
/// `…MaxDevicesWithTaintsOrConsumesCounters`, `…MaxCounterSets`, `…MaxCountersPerCounterSet`,
/// `…MaxDeviceCounterConsumptionsPerDevice`, `…MaxAttributesAndCapacitiesPerDevice`, `DeviceTaintsMaxLength`,
/// `DeviceAttributeMaxValueLength`.
const MAX_DEVICES: usize = 128;
const MAX_DEVICES_WITH_TAINTS: usize = 64;
const MAX_COUNTER_SETS: usize = 8;
const MAX_COUNTERS: usize = 32;
const MAX_COUNTER_SETS_OF_A_DEVICE: usize = 2;
const MAX_ATTRIBUTES: usize = 32;
const MAX_TAINTS: usize = 16;
const MAX_VALUE: usize = 64;

const EFFECTS: [&str; 3] = ["NoSchedule", "NoExecute", "None"];

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    driver: String,
    pool: Pool,
    node_name: Option<String>,
    devices: Vec<Device>,
    /// Set if the client sent a list of devices, even an empty list.
    #[serde(skip)]
    has_devices: bool,
    shared_counters: Vec<CounterSet>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Pool {
    name: String,
    generation: i64,
    resource_slice_count: i64,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Device {
    name: String,
    attributes: BTreeMap<String, Attribute>,
    capacity: BTreeMap<String, Capacity>,
    consumes_counters: Vec<Consumption>,
    taints: Vec<Taint>,
    allow_multiple_allocations: Option<bool>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Attribute {
    int: Option<i64>,
    bool: Option<bool>,
    string: Option<String>,
    version: Option<String>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Capacity {
    value: String,
    request_policy: Option<RequestPolicy>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestPolicy {
    default: Option<String>,
    valid_range: Option<ValidRange>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct ValidRange {
    min: Option<String>,
    max: Option<String>,
    step: Option<String>,
}

impl RequestPolicy {
    /// The default, and the bounds and the step of the range.
    fn quantities(&mut self) -> impl Iterator<Item = &mut String> {
        let range = self.valid_range.iter_mut().flat_map(|range| [&mut range.min, &mut range.max, &mut range.step]);
        self.default.iter_mut().chain(range.flatten())
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct CounterSet {
    name: String,
    counters: BTreeMap<String, Counter>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Consumption {
    counter_set: String,
    counters: BTreeMap<String, Counter>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Counter {
    value: String,
}

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Taint {
    key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    value: String,
    effect: String,
    time_added: Option<String>,
}

impl Attribute {
    /// The number of values; a valid attribute has exactly one.
    fn values(&self) -> usize {
        let values = [self.int.is_some(), self.bool.is_some(), self.string.is_some(), self.version.is_some()];
        values.into_iter().filter(|is_set| *is_set).count()
    }
}

pub(super) fn admit(
    gates: Gates,
    key: &Key,
    live: Option<&Value>,
    object: &mut Value,
    now: &str,
) -> Result<(), Refusal> {
    let before: Option<Spec> = live.map(|live| decoded(key, &live["spec"])).transpose()?;
    let mut spec: Spec = decoded(key, &object["spec"])?;
    spec.has_devices = object["spec"]["devices"].is_array();
    drop_fields(gates, &mut spec, before.as_ref());
    fill_in(&mut spec, now);
    let mut checks = Checks::default();
    check(&mut checks, &spec);
    if let Some(before) = &before {
        checks.unchanged("spec.driver", &before.driver, &spec.driver);
        checks.unchanged("spec.pool.name", &before.pool.name, &spec.pool.name);
        let node = |spec: &Spec| spec.node_name.clone().unwrap_or_default();
        checks.unchanged("spec.nodeName", node(before), node(&spec));
    }
    object["spec"] = kept(&spec);
    checks.end(key)
}

/// Drops the fields of gates that are off, unless the stored slice has them (`dropDisabledFields`).
fn drop_fields(gates: Gates, spec: &mut Spec, before: Option<&Spec>) {
    let in_use = |has: fn(&Device) -> bool| before.is_some_and(|before| before.devices.iter().any(has));
    if !gates.device_taints && !in_use(|device| !device.taints.is_empty()) {
        spec.devices.iter_mut().for_each(|device| device.taints.clear());
    }
    let counters_in_use = in_use(|device| !device.consumes_counters.is_empty())
        || before.is_some_and(|before| !before.shared_counters.is_empty());
    if !gates.partitionable_devices && !counters_in_use {
        spec.shared_counters.clear();
        spec.devices.iter_mut().for_each(|device| device.consumes_counters.clear());
    }
    let capacity_in_use = in_use(|device| {
        let has_policy = device.capacity.values().any(|capacity| capacity.request_policy.is_some());
        device.allow_multiple_allocations.is_some() || has_policy
    });
    if !gates.consumable_capacity && !capacity_in_use {
        for device in &mut spec.devices {
            device.allow_multiple_allocations = None;
            device.capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
        }
    }
}

/// Fills in the times of taints, and writes quantities in the canonical form.
fn fill_in(spec: &mut Spec, now: &str) {
    let canonicalise = |value: &mut String| {
        if let Some(canonical) = Quantity::canonical(value) {
            *value = canonical;
        }
    };
    for device in &mut spec.devices {
        for taint in &mut device.taints {
            taint.time_added.get_or_insert_with(|| now.to_owned());
        }
        for capacity in device.capacity.values_mut() {
            canonicalise(&mut capacity.value);
            capacity.request_policy.iter_mut().flat_map(RequestPolicy::quantities).for_each(canonicalise);
        }
        for consumption in &mut device.consumes_counters {
            consumption.counters.values_mut().for_each(|counter| canonicalise(&mut counter.value));
        }
    }
    for set in &mut spec.shared_counters {
        set.counters.values_mut().for_each(|counter| canonicalise(&mut counter.value));
    }
}

fn check(checks: &mut Checks, spec: &Spec) {
    checks.subdomain("spec.driver", &spec.driver, 63);
    if spec.pool.name.is_empty() {
        checks.required("spec.pool.name", "");
    }
    checks.not_longer("spec.pool.name", &spec.pool.name, 253);
    for part in spec.pool.name.split('/').filter(|_| !spec.pool.name.is_empty()) {
        if part.is_empty() {
            checks.invalid("spec.pool.name", &spec.pool.name, "must be DNS subdomains separated by slashes");
        } else {
            checks.subdomain("spec.pool.name", part, 253);
        }
    }
    if spec.pool.resource_slice_count <= 0 {
        let why = "must be greater than zero";
        checks.invalid("spec.pool.resourceSliceCount", spec.pool.resource_slice_count, why);
    }
    if spec.pool.generation < 0 {
        checks.invalid("spec.pool.generation", spec.pool.generation, "must be greater than or equal to zero");
    }
    match &spec.node_name {
        None => checks.required(
            "spec",
            "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required",
        ),
        Some(node) => checks.subdomain("spec.nodeName", node, 253),
    }
    if spec.has_devices && !spec.shared_counters.is_empty() {
        checks.invalid("spec", "{…}", "only one of `sharedCounters` or `devices` is allowed");
    }
    let has_either = |device: &Device| !device.taints.is_empty() || !device.consumes_counters.is_empty();
    let max = if spec.devices.iter().any(has_either) { MAX_DEVICES_WITH_TAINTS } else { MAX_DEVICES };
    checks.at_most("spec.devices", spec.devices.len(), max);
    let mut names = BTreeSet::new();
    for (index, device) in spec.devices.iter().enumerate() {
        let field = format!("spec.devices[{index}]");
        checks.unique_label(&format!("{field}.name"), &device.name, &mut names);
        check_device(checks, &field, device);
    }
    checks.at_most("spec.sharedCounters", spec.shared_counters.len(), MAX_COUNTER_SETS);
    let mut names = BTreeSet::new();
    for (index, set) in spec.shared_counters.iter().enumerate() {
        let field = format!("spec.sharedCounters[{index}]");
        checks.unique_label(&format!("{field}.name"), &set.name, &mut names);
        check_counters(checks, &field, &set.counters);
    }
}

fn check_device(checks: &mut Checks, field: &str, device: &Device) {
    checks.at_most(field, device.attributes.len() + device.capacity.len(), MAX_ATTRIBUTES);
    for (name, attribute) in &device.attributes {
        let field = format!("{field}.attributes[{name}]");
        checks.qualified(&field, name, false);
        match attribute.values() {
            0 => checks.required(&field, "exactly one value must be specified"),
            1 => {}
            _ => checks.invalid(&field, "{…}", "exactly one value must be specified"),
        }
        if let Some(text) = &attribute.string {
            checks.not_longer(format!("{field}.string"), text, MAX_VALUE);
        }
        if let Some(text) = &attribute.version {
            checks.not_longer(format!("{field}.version"), text, MAX_VALUE);
            if semver::Version::parse(text).is_err() {
                let why = "must be a string compatible with semver.org spec 2.0.0";
                checks.invalid(format!("{field}.version"), text, why);
            }
        }
    }
    for (name, capacity) in &device.capacity {
        let field = format!("{field}.capacity[{name}]");
        checks.qualified(&field, name, false);
        check_quantity(checks, &format!("{field}.value"), &capacity.value);
        if let Some(policy) = &capacity.request_policy {
            let field = format!("{field}.requestPolicy");
            if device.allow_multiple_allocations == Some(true) {
                check_policy(checks, &field, &capacity.value, policy);
            } else {
                checks.forbidden(field, "allowMultipleAllocations must be true");
            }
        }
    }
    checks.at_most(format!("{field}.consumesCounters"), device.consumes_counters.len(), MAX_COUNTER_SETS_OF_A_DEVICE);
    let mut names = BTreeSet::new();
    for (index, consumption) in device.consumes_counters.iter().enumerate() {
        let field = format!("{field}.consumesCounters[{index}]");
        checks.unique_label(&format!("{field}.counterSet"), &consumption.counter_set, &mut names);
        check_counters(checks, &field, &consumption.counters);
    }
    checks.at_most(format!("{field}.taints"), device.taints.len(), MAX_TAINTS);
    let mut seen = BTreeSet::new();
    for (index, taint) in device.taints.iter().enumerate() {
        let field = format!("{field}.taints[{index}]");
        checks.label_key(&format!("{field}.key"), &taint.key);
        checks.label_value(&format!("{field}.value"), &taint.value);
        match taint.effect.as_str() {
            "" => checks.required(format!("{field}.effect"), ""),
            effect => checks.one_of(format!("{field}.effect"), effect, &EFFECTS),
        }
        if !seen.insert((&taint.key, &taint.effect)) {
            checks.duplicate(field, &taint.key);
        }
    }
}

/// The rules of `validateRequestPolicy`.
fn check_policy(checks: &mut Checks, field: &str, capacity: &str, policy: &RequestPolicy) {
    let texts = [Some(capacity), policy.default.as_deref()].into_iter().flatten();
    let range = policy.valid_range.iter().flat_map(|range| [&range.min, &range.max, &range.step]).flatten();
    for text in texts.chain(range.map(String::as_str)) {
        if Quantity::canonical(text).is_none() {
            return check_quantity(checks, field, text);
        }
    }
    let Some(range) = &policy.valid_range else { return };
    let Some(default) = policy.default.as_deref() else {
        return checks.required(format!("{field}.default"), "required when validRange is defined");
    };
    check_range(checks, &format!("{field}.validRange"), capacity, default, range);
}

/// The rules of `validateRequestPolicyRange`.
fn check_range(checks: &mut Checks, field: &str, capacity: &str, default: &str, range: &ValidRange) {
    let amount = |text: &str| Quantity::parse(text).unwrap_or_default();
    let whole = amount(capacity);
    let ceil = |text: &str| amount(text).ceil();
    let Some(min) = &range.min else {
        return checks.required(format!("{field}.min"), "required when validRange is defined");
    };
    if amount(min) > whole {
        checks.invalid(format!("{field}.min"), min, "min is larger than capacity value");
    }
    if amount(default) < amount(min) {
        checks.invalid(format!("{field}.min"), default, "default is less than min");
    }
    if let Some(max) = &range.max {
        for (is_wrong, value, why) in [
            (amount(min) > amount(max), min.as_str(), "min is larger than max"),
            (amount(max) > whole, max, "max is larger than capacity value"),
            (amount(default) > amount(max), default, "default is more than max"),
        ] {
            if is_wrong {
                checks.invalid(format!("{field}.max"), value, why);
            }
        }
    }
    if let Some(step) = &range.step {
        let field = format!("{field}.step");
        // The real server divides by the step, so zero is refused here.
        if ceil(step) == 0 {
            return checks.invalid(field, step, "must be greater than zero");
        }
        if amount(min).0 + amount(step).0 > whole.0 {
            checks.invalid(&field, step, "one step is larger than capacity value");
        }
        for value in [Some(default), range.max.as_deref()].into_iter().flatten() {
            if (ceil(value) - ceil(min)) % ceil(step) != 0 {
                checks.invalid(&field, value, "value is not a multiple of a given step");
            }
        }
    }
}

fn check_counters(checks: &mut Checks, field: &str, counters: &BTreeMap<String, Counter>) {
    if counters.is_empty() {
        checks.required(format!("{field}.counters"), "");
    }
    checks.at_most(format!("{field}.counters"), counters.len(), MAX_COUNTERS);
    for (name, counter) in counters {
        checks.label(&format!("{field}.counters[{name}]"), name);
        check_quantity(checks, &format!("{field}.counters[{name}].value"), &counter.value);
    }
}

fn check_quantity(checks: &mut Checks, field: &str, value: &str) {
    if Quantity::canonical(value).is_none() {
        checks.invalid(field, value, "quantities must match the regular expression of quantities");
    }
}
