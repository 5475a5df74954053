//! ResourceClaims, ResourceClaimTemplates and DeviceClasses: defaults, limits, immutable fields. Not modelled:
//! `allocationMode: All` and `distinctAttribute`, which are refused.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::Gates;
use super::checks::Checks;
use crate::refusal::Refusal;
use crate::store::Key;
use linkwise_scheduler_box::Quantity;

/// Limits of Kubernetes 1.36 (`types.go`): `DeviceRequestsMaxSize`, `…ConstraintsMaxSize`, `…ConfigMaxSize`,
/// `AllocationResultsMaxSize` and `DeviceSelectorsMaxSize`.
const MAX_ITEMS: usize = 32;
/// `FirstAvailableDeviceRequestMaxSize`.
const MAX_ALTERNATIVES: usize = 8;
/// `CELSelectorExpressionMaxLength`, `OpaqueParametersMaxLength`.
const MAX_TEXT: usize = 10 * 1024;
/// `ResourceClaimReservedForMaxSize`.
const MAX_CONSUMERS: usize = 256;

pub(super) fn admit(gates: Gates, key: &Key, live: Option<&Value>, object: &mut Value) -> Result<(), Refusal> {
    let before = live.map(|live| &live["spec"]["devices"]["requests"]);
    drop_capacity(gates, object.pointer_mut("/spec/devices/requests"), before);
    fill_in(object.pointer_mut("/spec/devices/requests"));
    let mut checks = Checks::default();
    check_spec(&mut checks, "spec", &object["spec"]);
    match live {
        Some(live) => {
            if object["spec"] != live["spec"] {
                checks.invalid("spec", "{…}", "field is immutable");
            }
            object["status"] = live["status"].clone();
        }
        None => object["status"] = json!({}),
    }
    checks.end(key)
}

pub(super) fn admit_template(gates: Gates, key: &Key, live: Option<&Value>, object: &mut Value) -> Result<(), Refusal> {
    let before = live.map(|live| &live["spec"]["spec"]["devices"]["requests"]);
    drop_capacity(gates, object.pointer_mut("/spec/spec/devices/requests"), before);
    fill_in(object.pointer_mut("/spec/spec/devices/requests"));
    let mut checks = Checks::default();
    check_spec(&mut checks, "spec.spec", &object["spec"]["spec"]);
    if live.is_some_and(|live| live["spec"] != object["spec"]) {
        checks.invalid("spec", "{…}", "field is immutable");
    }
    checks.end(key)
}

pub(super) fn admit_class(key: &Key, object: &mut Value) -> Result<(), Refusal> {
    let mut checks = Checks::default();
    check_selectors(&mut checks, "spec.selectors", &object["spec"]["selectors"]);
    check_config(&mut checks, "spec.config", &object["spec"]["config"], None);
    if let Some(name) = object["spec"]["extendedResourceName"].as_str() {
        checks.label_key("spec.extendedResourceName", name);
        if !name.contains('/') {
            checks.invalid("spec.extendedResourceName", name, "must be a qualified extended resource name");
        }
    }
    checks.end(key)
}

pub(super) fn admit_status(key: &Key, live: &Value, object: &mut Value) -> Result<(), Refusal> {
    let mut checks = Checks::default();
    let (before, status) = (&live["status"], &object["status"]);
    let allocation = &status["allocation"];
    if !before["allocation"].is_null() && !allocation.is_null() && *allocation != before["allocation"] {
        checks.invalid("status.allocation", "{…}", "field is immutable");
    }
    let reserved = list(&status["reservedFor"]);
    checks.at_most("status.reservedFor", reserved.len(), MAX_CONSUMERS);
    if allocation.is_null() && !reserved.is_empty() {
        checks.forbidden("status.reservedFor", "may not be specified when `allocated` is not set");
    }
    if !allocation.is_null() {
        let (requests, results) = (names(&live["spec"]), list(&allocation["devices"]["results"]));
        checks.at_most("status.allocation.devices.results", results.len(), MAX_ITEMS);
        for (index, result) in results.iter().enumerate() {
            let field = format!("status.allocation.devices.results[{index}]");
            check_request(&mut checks, &format!("{field}.request"), text(&result["request"]), &requests);
            checks.subdomain(&format!("{field}.driver"), text(&result["driver"]), 63);
            checks.label(&format!("{field}.device"), text(&result["device"]));
            if let Some(share) = result["shareID"].as_str().filter(|share| !is_uuid(share)) {
                checks.invalid(format!("{field}.shareID"), share, "must be a lowercase UUID");
            }
            if text(&result["pool"]).is_empty() {
                checks.required(format!("{field}.pool"), "");
            }
        }
    }
    checks.end(key)
}

/// Drops the field of the gate `DRAConsumableCapacity` while the gate is off, unless the stored object has it.
fn drop_capacity(gates: Gates, requests: Option<&mut Value>, before: Option<&Value>) {
    let has_capacity = |requests: &Value| all_requests(requests).any(|request| !request["capacity"].is_null());
    if gates.consumable_capacity || before.is_some_and(has_capacity) {
        return;
    }
    each_request(requests, |request| drop(request.remove("capacity")));
}

/// Changes each request, and each alternative of a request.
fn each_request(requests: Option<&mut Value>, change: impl Fn(&mut Map<String, Value>)) {
    for request in requests.and_then(Value::as_array_mut).into_iter().flatten() {
        request.get_mut("exactly").and_then(Value::as_object_mut).map(&change);
        let alternatives = request.get_mut("firstAvailable").and_then(Value::as_array_mut);
        alternatives.into_iter().flatten().filter_map(Value::as_object_mut).for_each(&change);
    }
}

/// The requests without alternatives, and the alternatives of the others.
fn all_requests(requests: &Value) -> impl Iterator<Item = &Value> {
    let requests = list(requests).iter();
    requests.flat_map(|request| list(&request["firstAvailable"]).iter().chain([&request["exactly"]]))
}

/// Fills in the defaults of requests (an exact count of 1), and writes quantities in the canonical form.
fn fill_in(requests: Option<&mut Value>) {
    each_request(requests, |request| {
        request.entry("allocationMode").or_insert_with(|| json!("ExactCount"));
        request.entry("count").or_insert_with(|| json!(1));
        let amounts = request.get_mut("capacity").and_then(|capacity| capacity.get_mut("requests"));
        for amount in amounts.and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
            // A JSON number is a quantity too.
            let text = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
            if let Some(canonical) = Quantity::canonical(&text) {
                *amount = json!(canonical);
            }
        }
    });
}

fn check_spec(checks: &mut Checks, field: &str, spec: &Value) {
    let (devices, requests) = (&spec["devices"], names(spec));
    let field = format!("{field}.devices");
    checks.at_most(format!("{field}.requests"), list(&devices["requests"]).len(), MAX_ITEMS);
    let mut seen = BTreeSet::new();
    for (index, request) in list(&devices["requests"]).iter().enumerate() {
        let field = format!("{field}.requests[{index}]");
        checks.unique_label(&format!("{field}.name"), text(&request["name"]), &mut seen);
        let alternatives = list(&request["firstAvailable"]);
        match (request["exactly"].is_object(), !alternatives.is_empty()) {
            (true, false) => check_exactly(checks, &format!("{field}.exactly"), &request["exactly"]),
            (false, true) => {
                let field = format!("{field}.firstAvailable");
                checks.at_most(&field, alternatives.len(), MAX_ALTERNATIVES);
                let mut seen = BTreeSet::new();
                for (index, alternative) in alternatives.iter().enumerate() {
                    let field = format!("{field}[{index}]");
                    checks.unique_label(&format!("{field}.name"), text(&alternative["name"]), &mut seen);
                    check_exactly(checks, &field, alternative);
                }
            }
            (false, false) => checks.required(field, "exactly one of `exactly` or `firstAvailable` is required"),
            (true, true) => {
                checks.invalid(field, "{…}", "exactly one of `exactly` or `firstAvailable` is required");
            }
        }
    }
    let constraints = list(&devices["constraints"]);
    checks.at_most(format!("{field}.constraints"), constraints.len(), MAX_ITEMS);
    for (index, constraint) in constraints.iter().enumerate() {
        let field = format!("{field}.constraints[{index}]");
        for (index, name) in list(&constraint["requests"]).iter().enumerate() {
            check_request(checks, &format!("{field}.requests[{index}]"), text(name), &requests);
        }
        match constraint["matchAttribute"].as_str() {
            Some(name) => checks.qualified(&format!("{field}.matchAttribute"), name, true),
            None => checks.required(field, "exactly one of `matchAttribute`, `distinctAttribute` is required"),
        }
    }
    check_config(checks, &format!("{field}.config"), &devices["config"], Some(&requests));
}

fn check_exactly(checks: &mut Checks, field: &str, request: &Value) {
    checks.subdomain(&format!("{field}.deviceClassName"), text(&request["deviceClassName"]), 253);
    check_selectors(checks, &format!("{field}.selectors"), &request["selectors"]);
    checks.one_of(format!("{field}.allocationMode"), text(&request["allocationMode"]), &["ExactCount"]);
    let count = request["count"].as_i64().unwrap_or_default();
    if count <= 0 {
        checks.invalid(format!("{field}.count"), count, "must be greater than zero");
    }
    for (name, amount) in request["capacity"]["requests"].as_object().into_iter().flatten() {
        let field = format!("{field}.capacity.requests[{name}]");
        checks.qualified(&field, name, false);
        if amount.as_str().and_then(Quantity::canonical).is_none() {
            checks.invalid(field, amount, "quantities must match the regular expression of quantities");
        }
    }
}

fn check_selectors(checks: &mut Checks, field: &str, selectors: &Value) {
    checks.at_most(field, list(selectors).len(), MAX_ITEMS);
    for (index, selector) in list(selectors).iter().enumerate() {
        let field = format!("{field}[{index}].cel");
        match selector["cel"]["expression"].as_str() {
            None | Some("") => checks.required(format!("{field}.expression"), ""),
            Some(expression) => checks.not_longer(format!("{field}.expression"), expression, MAX_TEXT),
        }
    }
}

fn check_config(checks: &mut Checks, field: &str, config: &Value, requests: Option<&BTreeSet<String>>) {
    checks.at_most(field, list(config).len(), MAX_ITEMS);
    for (index, config) in list(config).iter().enumerate() {
        let field = format!("{field}[{index}]");
        for (index, name) in list(&config["requests"]).iter().enumerate() {
            if let Some(requests) = requests {
                check_request(checks, &format!("{field}.requests[{index}]"), text(name), requests);
            }
        }
        let (field, opaque) = (format!("{field}.opaque"), &config["opaque"]);
        if !opaque.is_object() {
            checks.required(field, "");
            continue;
        }
        checks.subdomain(&format!("{field}.driver"), text(&opaque["driver"]), 63);
        match &opaque["parameters"] {
            Value::Null => checks.required(format!("{field}.parameters"), ""),
            Value::Object(_) => {
                let text = opaque["parameters"].to_string();
                checks.not_longer(format!("{field}.parameters"), &text, MAX_TEXT);
            }
            other => checks.invalid(format!("{field}.parameters"), other, "must be a valid JSON object"),
        }
    }
}

fn check_request(checks: &mut Checks, field: &str, name: &str, requests: &BTreeSet<String>) {
    if !requests.contains(name) {
        let why =
            "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
        checks.invalid(field, name, why);
    }
}

/// The names of a claim's requests, and its alternatives as `request/alternative`.
fn names(spec: &Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for request in list(&spec["devices"]["requests"]) {
        let name = text(&request["name"]);
        names.insert(name.to_owned());
        let alternatives = list(&request["firstAvailable"]).iter();
        names.extend(alternatives.map(|alternative| format!("{name}/{}", text(&alternative["name"]))));
    }
    names
}

/// Returns true for 32 lowercase hexadecimal digits in groups of 8, 4, 4, 4 and 12.
fn is_uuid(text: &str) -> bool {
    let digits = |group: &str| group.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    text.split('-').map(str::len).eq([8, 4, 4, 4, 12]) && text.split('-').all(digits)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
