//! LimitRanger: gives containers the defaults of their namespace's LimitRanges, and refuses pods beyond the limits.
//!
//! The rules are those of Kubernetes 1.36 (`plugin/pkg/admission/limitranger/admission.go`, and
//! `SetDefaults_LimitRangeItem` in `pkg/apis/core/v1/defaults.go`): a maximum is also the default if there is no other.
//! The defaults are filled in again after each mutating policy. Only whole numbers are compared; ratios and init
//! containers are not checked.

use serde_json::{Map, Value};

use crate::refusal::Refusal;
use crate::store::{Key, ResourceType, Store};

/// The items of the LimitRanges in the pod's namespace.
fn items<'a>(store: &'a Store, key: &Key) -> impl Iterator<Item = &'a Value> {
    let ranges = store.list(&ResourceType::LIMIT_RANGES, key.namespace.as_deref());
    ranges.into_iter().flat_map(|range| range["spec"]["limits"].as_array().into_iter().flatten())
}

/// Fills in the defaults of limits and requests that the containers of a pod lack.
pub(crate) fn complete(store: &Store, key: &Key, pod: &mut Value) {
    for item in items(store, key).filter(|item| item["type"] == "Container") {
        let list = |name: &str| item[name].as_object().cloned().unwrap_or_default();
        let with = |mut first: Map<String, Value>, others: &[&Map<String, Value>]| {
            for (resource, value) in others.iter().copied().flatten() {
                first.entry(resource.clone()).or_insert_with(|| value.clone());
            }
            first
        };
        let limits = with(list("default"), &[&list("max")]);
        let requests = with(list("defaultRequest"), &[&limits, &list("min")]);
        for containers in ["containers", "initContainers"] {
            let containers = pod["spec"].get_mut(containers).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten() {
                for (kind, defaults) in [("limits", &limits), ("requests", &requests)] {
                    let own = container["resources"][kind].as_object().cloned().unwrap_or_default();
                    let all = with(own, &[defaults]);
                    if !all.is_empty() {
                        container["resources"][kind] = Value::Object(all);
                    }
                }
            }
        }
    }
}

/// Refuses a pod if a limit with a maximum exceeds it or is absent, or a request with a minimum is below it or absent.
pub(crate) fn check(store: &Store, key: &Key, pod: &Value) -> Result<(), Refusal> {
    for item in items(store, key) {
        let kind = item["type"].as_str().unwrap_or_default();
        let containers = || pod["spec"]["containers"].as_array().into_iter().flatten();
        let amount = |container: &Value, list: &str, resource: &str| number(&container["resources"][list][resource]);
        let asked = |list: &str, resource: &str| -> Vec<Option<i64>> {
            match kind {
                "Container" => containers().map(|container| amount(container, list, resource)).collect(),
                "Pod" => vec![containers().map(|container| amount(container, list, resource)).sum()],
                _ => Vec::new(),
            }
        };
        for (bound, list, word) in [("max", "limits", "limit"), ("min", "requests", "request")] {
            for (resource, value) in item[bound].as_object().into_iter().flatten() {
                let Some(limit) = number(value) else { continue };
                for asked in asked(list, resource) {
                    let why = match asked {
                        None => format!("No {word} is specified"),
                        Some(asked) if (bound == "max" && asked > limit) || (bound == "min" && asked < limit) => {
                            format!("{word} is {asked}")
                        }
                        Some(_) => continue,
                    };
                    let cause = format!("{bound}imum {resource} usage per {kind} is {limit}, but {why}");
                    let message = format!("pods \"{}\" is forbidden: {cause}", key.name);
                    return Err(Refusal::new(403, "Forbidden", message));
                }
            }
        }
    }
    Ok(())
}

fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}
