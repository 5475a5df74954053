//! The parts of pods that admission policies see: defaults of resources, quantities in the server's form, and the rules
//! for extended resources (`pkg/apis/core/v1/defaults.go`, `pkg/apis/core/validation`). The rest of a pod is not
//! checked; of its defaults only the scheduler's name is filled in.

use serde_json::{Value, json};

use super::checks::Checks;
use crate::refusal::Refusal;
use crate::store::Key;
use linkwise_scheduler_box::Quantity;

/// Lists of containers that may have resources.
const LISTS: [&str; 2] = ["initContainers", "containers"];

/// Reads quantities, and fills in requests from limits.
///
/// # Errors
///
/// A quantity is malformed.
pub(crate) fn complete(pod: &mut Value) -> Result<(), Refusal> {
    let spec = &mut pod["spec"];
    if spec["schedulerName"].is_null() {
        spec["schedulerName"] = json!("default-scheduler");
    }
    for list in LISTS {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if container["resources"].is_null() {
                container["resources"] = json!({});
            }
            let resources = &mut container["resources"];
            for kind in ["limits", "requests"] {
                for quantity in
                    resources.get_mut(kind).and_then(Value::as_object_mut).into_iter().flat_map(|map| map.values_mut())
                {
                    *quantity = Value::from(printed(quantity)?);
                }
            }
            if let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() {
                for (name, quantity) in limits {
                    if resources["requests"][&name].is_null() {
                        resources["requests"][&name] = quantity;
                    }
                }
            }
            // Empty lists are not printed.
            if let Some(resources) = resources.as_object_mut() {
                resources.retain(|_, part| part.as_object().is_none_or(|part| !part.is_empty()) && *part != json!([]));
            }
        }
    }
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|_, part| *part != json!([]));
    }
    Ok(())
}

/// A quantity in the server's form: as it was written if that is short, otherwise in the canonical form
/// (`ParseQuantity` keeps such texts).
fn printed(quantity: &Value) -> Result<String, Refusal> {
    let text = quantity.as_str().map_or_else(|| quantity.to_string(), str::to_owned);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(&text);
    let number = digits.trim_end_matches("e0");
    let is_short = !number.is_empty()
        && number.bytes().all(|byte| byte.is_ascii_digit())
        && !number.starts_with('0')
        && !number.ends_with("000");
    if is_short {
        return Ok(text);
    }
    Quantity::canonical(&text).ok_or_else(|| {
        Refusal::bad_request(
            "Pod in version \"v1\" cannot be handled as a Pod: quantities must match the regular expression",
        )
    })
}

/// Checks the extended resources of a pod: whole numbers, limits, and requests that are equal to them.
pub(super) fn check(key: &Key, pod: &Value) -> Result<(), Refusal> {
    let mut checks = Checks::default();
    for list in LISTS {
        for (place, container) in pod["spec"][list].as_array().into_iter().flatten().enumerate() {
            let field = format!("spec.{list}[{place}].resources");
            let resources = &container["resources"];
            let extended = |kind: &str| {
                let all = resources[kind].as_object().into_iter().flatten();
                all.filter(|(name, _)| name.contains('/')).map(|(name, text)| (name.clone(), text.clone()))
            };
            for kind in ["limits", "requests"] {
                for (name, quantity) in extended(kind) {
                    let (field, text) = (format!("{field}.{kind}[{name}]"), quantity.as_str().unwrap_or_default());
                    if text.starts_with('-') {
                        checks.invalid(&field, text, "must be greater than or equal to 0");
                    } else if text.ends_with(['m', 'u', 'n']) {
                        checks.invalid(&field, text, "must be an integer");
                    }
                }
            }
            for (name, request) in extended("requests") {
                let limit = &resources["limits"][&name];
                if limit.is_null() {
                    checks.required(format!("{field}.limits"), "Limit must be set for non overcommitable resources");
                } else if *limit != request {
                    let (request, limit) = (request.as_str().unwrap_or_default(), limit.as_str().unwrap_or_default());
                    checks.invalid(
                        format!("{field}.requests"),
                        request,
                        &format!("must be equal to {name} limit of {limit}"),
                    );
                }
            }
        }
    }
    checks.end(key)
}
