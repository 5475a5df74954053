//! Published schemas in a short form: each file of `schemas/` has a kind's source, version, licence and fields.
//!
//! A field's line has its path, where `[]` is an element of a list, and its type: string, integer, boolean, array,
//! object, map (of strings), amount (a string or an integer), amounts (a map of them). Rules may follow: `required`;
//! `in=` the values; `min=` and `max=` of a number or a list's length; `longest=` of a text; `form=` for a pattern.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schema {
    #[serde(default)]
    pub source: String,
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub licence: String,
    pub api_version: String,
    pub kind: String,
    fields: BTreeMap<String, String>,
}

impl Schema {
    /// The faults of an object, by path.
    pub fn faults(&self, object: &Value) -> Vec<String> {
        let mut faults = Vec::new();
        for (name, value) in object.as_object().unwrap() {
            if !["apiVersion", "kind", "metadata"].contains(&name.as_str()) {
                self.check(name, value, &mut faults);
            }
        }
        self.require("", object, &mut faults);
        faults
    }

    fn check(&self, path: &str, value: &Value, faults: &mut Vec<String>) {
        let Some(line) = self.fields.get(path) else { return faults.push(format!("{path}: unknown")) };
        let (kind, rules) = line.split_once(' ').unwrap_or((line, ""));
        let is_kind = match kind {
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            "amount" => is_amount(value),
            "amounts" => value.as_object().is_some_and(|map| map.values().all(is_amount)),
            "map" => value.as_object().is_some_and(|map| map.values().all(Value::is_string)),
            other => panic!("{path}: unknown type {other}"),
        };
        if !is_kind {
            return faults.push(format!("{path}: {value} is not of type {kind}"));
        }
        let broken = rules.split(' ').filter(|rule| !rule.is_empty() && *rule != "required" && !is_met(rule, value));
        faults.extend(broken.map(|rule| format!("{path}: {value}: {rule}")));
        for element in value.as_array().into_iter().flatten() {
            let path = format!("{path}[]");
            match element.is_object() {
                true => self.check_all(&path, element, faults),
                false => self.check(&path, element, faults),
            }
        }
        // An object without fields in the schema may have any.
        let is_open = !self.fields.keys().any(|field| field.starts_with(&format!("{path}.")));
        if kind == "object" && !is_open {
            self.check_all(path, value, faults);
        }
    }

    fn check_all(&self, path: &str, object: &Value, faults: &mut Vec<String>) {
        for (name, value) in object.as_object().unwrap() {
            self.check(&format!("{path}.{name}"), value, faults);
        }
        self.require(&format!("{path}."), object, faults);
    }

    fn require(&self, prefix: &str, object: &Value, faults: &mut Vec<String>) {
        for (field, line) in &self.fields {
            let own = field.strip_prefix(prefix).filter(|name| !name.contains(['.', '[']));
            let is_required = line.split(' ').any(|word| word == "required");
            if is_required && own.is_some_and(|name| object.get(name).is_none()) {
                faults.push(format!("{field}: missing"));
            }
        }
    }
}

fn is_amount(value: &Value) -> bool {
    value.is_string() || value.is_u64()
}

fn is_met(rule: &str, value: &Value) -> bool {
    let (name, limit) = rule.split_once('=').unwrap();
    let text = value.as_str().unwrap_or_default();
    let size = value.as_array().map_or_else(|| value.as_u64().unwrap_or(0), |list| list.len() as u64);
    match name {
        "in" => limit.split('|').any(|one| one == text),
        "min" => size >= limit.parse().unwrap(),
        "max" => size <= limit.parse().unwrap(),
        "longest" => text.len() <= limit.parse::<usize>().unwrap(),
        "form" => has_form(limit, text),
        other => panic!("unknown rule {other}"),
    }
}

fn has_form(form: &str, text: &str) -> bool {
    let is_made_of = |text: &str, also: &[char], is: fn(char) -> bool| {
        let inner = text.chars().all(|one| is(one) || also.contains(&one));
        inner && text.starts_with(is) && text.ends_with(is)
    };
    let lower = |one: char| one.is_ascii_lowercase() || one.is_ascii_digit();
    let is_label = |text: &str| is_made_of(text, &['-'], lower);
    match form {
        "dns-label" => is_label(text),
        "dns-subdomain" => text.split('.').all(is_label),
        "label-key" => {
            let (prefix, name) = text.split_once('/').unwrap_or(("none", text));
            prefix.split('.').all(is_label) && is_made_of(name, &['-', '_', '.'], |one| one.is_ascii_alphanumeric())
        }
        other => panic!("unknown form {other}"),
    }
}

/// Reads all schemas; each has to name its source, version and licence.
pub fn schemas() -> Vec<Schema> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/examples/schemas");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| -> Schema {
        let text = std::fs::read_to_string(&path).unwrap();
        serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let schemas: Vec<Schema> = files.map(read).collect();
    for schema in &schemas {
        assert!(schema.source.starts_with("https://github.com/"), "{}", schema.kind);
        assert!(!schema.version.is_empty() && schema.licence == "Apache-2.0", "{}", schema.kind);
    }
    let kinds: BTreeSet<(&str, &str)> = schemas.iter().map(|it| (it.api_version.as_str(), it.kind.as_str())).collect();
    assert_eq!(kinds.len(), schemas.len(), "a kind has two schemas");
    schemas
}

/// Reads schemas from a text in which `=NAME` stands for an object with the fields of the part `NAME`.
pub fn of_parts(text: &str) -> Vec<Schema> {
    #[derive(Deserialize)]
    struct Written {
        parts: BTreeMap<String, BTreeMap<String, String>>,
        kinds: Vec<Schema>,
    }
    let Written { parts, mut kinds } = serde_saphyr::from_str(text).unwrap();
    let named = |(path, line): (&String, &String)| Some((path.clone(), line.strip_prefix('=')?.to_owned()));
    for Schema { fields, .. } in &mut kinds {
        while let Some((path, line)) = fields.iter().find_map(named) {
            let (part, rules) = line.split_once(' ').unwrap_or((&line, ""));
            fields.extend(parts[part].iter().map(|(field, line)| (format!("{path}.{field}"), line.clone())));
            fields.insert(path, format!("object {rules}"));
        }
    }
    kinds
}
