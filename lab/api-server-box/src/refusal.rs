//! Refusals of requests, which clients see as a `Status` of the API.

use serde_json::{Value, json};

use crate::store::{Key, ResourceType};

/// A refusal of a request.
#[derive(Debug)]
pub(super) struct Refusal {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    /// The `details` of the Status: a missing or invalid object, and its invalid fields. Null in other refusals.
    details: Value,
}

impl Refusal {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    pub fn not_found(key: &Key) -> Self {
        let (group, plural) = (group(key), key.resource.plural);
        let resource = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let message = format!("{resource} \"{}\" not found", key.name);
        let details = json!({"name": key.name, "group": group, "kind": plural});
        Self { code: 404, reason: "NotFound", message, details }
    }

    pub fn exists(key: &Key) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{}\" already exists", key.resource.plural, key.name))
    }

    pub fn conflict(key: &Key, why: &str) -> Self {
        let object = format!("{} \"{}\"", key.resource.plural, key.name);
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {object}: {why}"))
    }

    pub fn forbidden(resource: &ResourceType, verb: &str) -> Self {
        let plural = resource.plural;
        let message = format!("{plural} is forbidden: User \"client\" cannot {verb} resource \"{plural}\"");
        Self::new(403, "Forbidden", message)
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// A 422 that names each invalid field.
    pub fn invalid(key: &Key, causes: &[Cause]) -> Self {
        let group = group(key);
        let kind = match group {
            "" => key.resource.kind.to_owned(),
            group => format!("{}.{group}", key.resource.kind),
        };
        let texts: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        let list = if let [one] = texts.as_slice() { one.clone() } else { format!("[{}]", texts.join(", ")) };
        let cause =
            |cause: &Cause| json!({"reason": cause.reason, "message": cause.message, "field": cause.field.clone()});
        let details = json!({
            "name": key.name, "group": group, "kind": key.resource.kind,
            "causes": causes.iter().map(cause).collect::<Vec<_>>(),
        });
        let message = format!("{kind} \"{}\" is invalid: {list}", key.name);
        Self { code: 422, reason: "Invalid", message, details }
    }

    pub fn status(&self) -> Value {
        let mut status = json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {}, "code": self.code,
            "reason": self.reason, "message": self.message,
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

/// The API group of an object; the core group has an empty name.
fn group(key: &Key) -> &'static str {
    key.resource.api.split_once('/').map_or("", |(group, _)| group)
}

/// An invalid field, and the rule that it breaks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cause {
    pub reason: &'static str,
    pub field: String,
    pub message: String,
}
