//! Events of `events.k8s.io/v1`: the rules for an event that a client creates (`ValidateEventCreate` in
//! `pkg/apis/core/validation/events.go` of Kubernetes 1.36).

use serde_json::Value;

use super::checks::Checks;
use crate::refusal::Refusal;
use crate::store::Key;

/// `ReportingInstanceLengthLimit`, `ActionLengthLimit` and `ReasonLengthLimit`; then `NoteLengthLimit`; in bytes.
const MAX_NAME: usize = 128;
const MAX_NOTE: usize = 1024;

/// The fields that `events.k8s.io/v1` keeps for the old API.
const DEPRECATED: [&str; 4] =
    ["deprecatedFirstTimestamp", "deprecatedLastTimestamp", "deprecatedCount", "deprecatedSource"];

/// Checks an event that a client creates.
pub(super) fn check(key: &Key, event: &Value) -> Result<(), Refusal> {
    let mut checks = Checks::default();
    let text = |field: &str| event[field].as_str().unwrap_or_default();
    let time = text("eventTime");
    if time.is_empty() {
        checks.required("eventTime", "");
    } else if !is_micro_time(time) {
        // The decoder of a MicroTime requires exactly six decimals.
        let why = format!("Event in version \"v1\" cannot be handled as a Event: parsing time \"{time}\"");
        return Err(Refusal::bad_request(why));
    }
    checks.label_key("reportingController", text("reportingController"));
    for field in ["reportingInstance", "action", "reason"] {
        if text(field).is_empty() {
            checks.required(field, "");
        } else if text(field).len() > MAX_NAME {
            checks.invalid(field, "", &format!("can have at most {MAX_NAME} characters"));
        }
    }
    if text("note").len() > MAX_NOTE {
        checks.invalid("message", "", &format!("can have at most {MAX_NOTE} characters"));
    }
    if !["Normal", "Warning"].contains(&text("type")) {
        checks.invalid("type", "", &format!("has invalid value: {}", text("type")));
    }
    for field in DEPRECATED {
        if !event[field].is_null() {
            checks.invalid(field, "", "needs to be unset");
        }
    }
    let about = event["regarding"]["namespace"].as_str().unwrap_or_default();
    let namespace = key.namespace.as_deref().unwrap_or_default();
    if about.is_empty() && !["default", "kube-system"].contains(&namespace) {
        checks.invalid("involvedObject.namespace", about, "does not match event.namespace");
    }
    checks.end(key)
}

/// Returns true for a time such as `2006-01-02T15:04:05.000000Z`.
fn is_micro_time(text: &str) -> bool {
    let pattern = "dddd-dd-ddTdd:dd:dd.ddddddZ";
    let fits = |(byte, form): (u8, u8)| if form == b'd' { byte.is_ascii_digit() } else { byte == form };
    text.len() == pattern.len() && text.bytes().zip(pattern.bytes()).all(fits)
}
