//! Renders objects as lines, one for each value, so that a golden file shows the effect of a value of the chart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::Value;

/// The lines `PATH = VALUE` of each object, by `KIND NAME`.
pub type Lines = BTreeMap<String, BTreeSet<String>>;

pub fn lines(objects: &[Value]) -> Lines {
    let of = |object: &Value| {
        let name = format!("{} {}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let mut lines = BTreeSet::new();
        flatten(object, String::new(), &mut |place, value| {
            let place = place.replace("spec.template.spec.", "pod.").replace("spec.template.", "pod.");
            lines.insert(format!("{place} = {value}"));
        });
        (name, lines)
    };
    objects.iter().map(of).collect()
}

/// The name that stands for a list's item in the item's path.
fn name(item: &Value) -> Option<&str> {
    item.get("name").and_then(Value::as_str)
}

fn flatten(value: &Value, place: String, each: &mut impl FnMut(&str, String)) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, field) in fields {
                let dot = if place.is_empty() { "" } else { "." };
                flatten(field, format!("{place}{dot}{key}"), each);
            }
        }
        Value::Array(items) if items.iter().all(|item| !item.is_object() && !item.is_array()) => {
            each(&place, Value::to_string(value));
        }
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                let index = name(item).map_or_else(|| number.to_string(), str::to_owned);
                flatten_item(item, format!("{place}[{index}]"), each);
            }
        }
        Value::String(text) if place.ends_with("checksum/config") => each(&place, format!("{} digits", text.len())),
        Value::String(text) => each(&place, text.replace('\n', "\\n")),
        other => each(&place, other.to_string()),
    }
}

/// Renders a variable and a mount on one line each; any other item has its name in its path.
fn flatten_item(item: &Value, place: String, each: &mut impl FnMut(&str, String)) {
    let text = |key: &str| item.get(key).and_then(Value::as_str);
    if let (Some(volume), Some(path)) = (name(item), text("mountPath")) {
        let mut mount = format!("{volume}, read and write");
        if item["readOnly"] == true {
            mount = format!("{volume}, read only");
        }
        if let Some(propagation) = text("mountPropagation") {
            write!(mount, ", {propagation}").unwrap();
        }
        let list = place.rsplit_once('[').unwrap().0.to_owned();
        return each(&format!("{list}[{path}]"), mount);
    }
    match (name(item), item) {
        (Some(_), Value::Object(fields)) if fields.len() > 1 => {
            let rest: serde_json::Map<_, _> = fields.clone().into_iter().filter(|(key, _)| key != "name").collect();
            match rest.get("value") {
                Some(Value::String(value)) if rest.len() == 1 => each(&place, value.clone()),
                _ => flatten(&Value::Object(rest), place, each),
            }
        }
        _ => flatten(item, place, each),
    }
}

/// Renders the difference below the names of the objects: `- ` lines are in `before` only, `+ ` lines in `after` only.
/// A removed object has one line.
pub fn difference(before: &Lines, after: &Lines) -> String {
    let mut text = String::new();
    let none = BTreeSet::new();
    for object in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        let Some(new) = after.get(object) else {
            writeln!(text, "{object}\n  - all of it").unwrap();
            continue;
        };
        let old = before.get(object).unwrap_or(&none);
        let removed = old.difference(new).map(|line| (line, '-'));
        let mut changes: Vec<_> = removed.chain(new.difference(old).map(|line| (line, '+'))).collect();
        let place = |line: &str| line.split(" = ").next().unwrap_or_default().to_owned();
        changes.sort_by_key(|(line, sign)| (place(line), *sign == '+'));
        if !changes.is_empty() {
            writeln!(text, "{object}").unwrap();
        }
        for (line, sign) in changes {
            writeln!(text, "  {sign} {line}").unwrap();
        }
    }
    text
}
