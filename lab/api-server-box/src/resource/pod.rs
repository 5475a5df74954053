//! Resources of pods, as admission policies see them: defaults, quantities in the server's form, and the rules for
//! extended resources (`pkg/apis/core/v1/defaults.go`, `pkg/apis/core/validation`). Other fields are not checked; the
//! only other default is the scheduler's name.

use serde_json::{Value, json};

use super::checks::Checks;
use crate::refusal::Refusal;
use crate::store::Key;
use linkwise_scheduler_box::Quantity;

/// The lists of containers that have resources.
const CONTAINER_LISTS: [&str; 2] = ["initContainers", "containers"];

/// Fills in the scheduler's name, writes quantities in the server's form, and fills in requests from limits.
///
/// # Errors
///
/// A quantity is malformed.
pub(crate) fn complete(pod: &mut Value) -> Result<(), Refusal> {
    let spec = &mut pod["spec"];
    if spec["schedulerName"].is_null() {
        spec["schedulerName"] = json!("default-scheduler");
    }
    for list in CONTAINER_LISTS {
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
            // The server leaves empty maps and lists out.
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

/// A quantity in the server's form: a short whole number as the client wrote it (`ParseQuantity`), any other quantity
/// in the canonical form.
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

/// Checks the extended resources of a pod: amounts are whole numbers, and requests are equal to limits.
pub(super) fn check(key: &Key, pod: &Value) -> Result<(), Refusal> {
    let mut checks = Checks::default();
    for list in CONTAINER_LISTS {
        for (index, container) in pod["spec"][list].as_array().into_iter().flatten().enumerate() {
            let field = format!("spec.{list}[{index}].resources");
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
