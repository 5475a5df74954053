//! Rules for the fields of an object, and the list of the rules that an object breaks.

use std::collections::BTreeSet;
use std::fmt::Display;

use crate::refusal::{Cause, Refusal};
use crate::store::Key;

/// The rules that an object breaks, as far as it has been checked.
#[derive(Default)]
pub(super) struct Checks(Vec<Cause>);

impl Checks {
    fn add(&mut self, reason: &'static str, field: impl Into<String>, message: String) {
        self.0.push(Cause { reason, field: field.into(), message });
    }

    pub fn required(&mut self, field: impl Into<String>, why: &str) {
        let message = if why.is_empty() { "Required value".to_owned() } else { format!("Required value: {why}") };
        self.add("FieldValueRequired", field, message);
    }

    pub fn invalid(&mut self, field: impl Into<String>, value: impl Display, why: &str) {
        self.add("FieldValueInvalid", field, format!("Invalid value: \"{value}\": {why}"));
    }

    pub fn forbidden(&mut self, field: impl Into<String>, why: &str) {
        self.add("FieldValueForbidden", field, format!("Forbidden: {why}"));
    }

    pub fn at_most(&mut self, field: impl Into<String>, items: usize, max: usize) {
        if items > max {
            self.add("FieldValueTooMany", field, format!("Too many: {items}: must have at most {max} items"));
        }
    }

    pub fn not_longer(&mut self, field: impl Into<String>, text: &str, max: usize) {
        if text.len() > max {
            self.add("FieldValueTooLong", field, format!("Too long: may not be more than {max} bytes"));
        }
    }

    pub fn duplicate(&mut self, field: impl Into<String>, value: &str) {
        self.add("FieldValueDuplicate", field, format!("Duplicate value: \"{value}\""));
    }

    pub fn one_of(&mut self, field: impl Into<String>, value: &str, known: &[&str]) {
        if !known.contains(&value) {
            let list: Vec<String> = known.iter().map(|one| format!("\"{one}\"")).collect();
            let message = format!("Unsupported value: \"{value}\": supported values: {}", list.join(", "));
            self.add("FieldValueNotSupported", field, message);
        }
    }

    pub fn unchanged(&mut self, field: impl Into<String>, before: impl Display, now: impl Display) {
        if before.to_string() != now.to_string() {
            self.invalid(field, now, "field is immutable");
        }
    }

    /// Checks a name in a list: a DNS label that is not among the earlier names.
    pub fn unique_label<'a>(&mut self, field: &str, name: &'a str, seen: &mut BTreeSet<&'a str>) {
        self.label(field, name);
        if !seen.insert(name) {
            self.duplicate(field, name);
        }
    }

    /// Checks a DNS label (RFC 1123).
    pub fn label(&mut self, field: &str, name: &str) {
        if name.is_empty() {
            self.required(field, "");
        } else if !is_label(name) || name.len() > 63 {
            self.invalid(field, name, "must be a lowercase RFC 1123 label of at most 63 characters");
        }
    }

    /// Checks a DNS subdomain (RFC 1123).
    pub fn subdomain(&mut self, field: &str, name: &str, max: usize) {
        if name.is_empty() {
            return self.required(field, "");
        }
        self.not_longer(field, name, max);
        if !name.split('.').all(is_label) {
            self.invalid(field, name, "must be a lowercase RFC 1123 subdomain");
        }
    }

    /// Checks `[domain/]identifier`, the form of the names of attributes and capacities.
    pub fn qualified(&mut self, field: &str, name: &str, domain_required: bool) {
        let (domain, id) = match name.split_once('/') {
            Some((domain, id)) => (Some(domain), id),
            None => (None, name),
        };
        match domain {
            Some(domain) => self.subdomain(field, domain, 63),
            None if domain_required => self.invalid(field, name, "must include a domain"),
            None => {}
        }
        self.not_longer(field, id, 32);
        let mut characters = id.chars();
        let is_start = characters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_');
        if !is_start || !characters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
            self.invalid(field, id, "a valid C identifier must start with a letter or underscore");
        }
    }

    /// Checks the key of a taint or a label: `[prefix/]name`.
    pub fn label_key(&mut self, field: &str, key: &str) {
        if key.is_empty() {
            return self.required(field, "name part must be non-empty");
        }
        let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
        if let Some(prefix) = prefix {
            self.subdomain(field, prefix, 253);
        }
        if name.is_empty() || !is_label_text(name) {
            self.invalid(field, key, "name part must consist of alphanumeric characters, '-', '_' or '.'");
        }
    }

    /// Checks the value of a taint or a label.
    pub fn label_value(&mut self, field: &str, value: &str) {
        if !value.is_empty() && !is_label_text(value) {
            self.invalid(field, value, "a valid label must consist of alphanumeric characters, '-', '_' or '.'");
        }
    }

    /// Refuses the object if it breaks a rule.
    pub fn end(self, key: &Key) -> Result<(), Refusal> {
        if self.0.is_empty() { Ok(()) } else { Err(Refusal::invalid(key, &self.0)) }
    }
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

fn is_label_text(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.len() <= 63 && edge(text.chars().next()) && edge(text.chars().last()) && text.chars().all(inner)
}
