//! The configuration file: the NVIDIA plugin's format, version v1, with linkwise's own keys under `linkwise:`.
//!
//! Reads YAML (and JSON, which is YAML) into values with their lines, and checks the keys. `value` and `lists` read the
//! values. Touches no file system.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::keys;
use super::value::Value;
use crate::config::removed;
use linkwise_core::quote::excerpt;
use linkwise_host::yaml::fault;

const VERSION: &str = "v1";

/// The keys that are not in the settings' table, as paths. `[]` stands for the items of a list.
const COMPOUND: [&str; 19] = [
    "version",
    "resources.gpus[].pattern",
    "resources.gpus[].name",
    "resources.mig[].pattern",
    "resources.mig[].name",
    "sharing.timeSlicing.renameByDefault",
    "sharing.timeSlicing.failRequestsGreaterThanOne",
    "sharing.timeSlicing.resources[].name",
    "sharing.timeSlicing.resources[].rename",
    "sharing.timeSlicing.resources[].devices",
    "sharing.timeSlicing.resources[].replicas",
    "sharing.mps.renameByDefault",
    "sharing.mps.failRequestsGreaterThanOne",
    "sharing.mps.resources[].name",
    "sharing.mps.resources[].rename",
    "sharing.mps.resources[].devices",
    "sharing.mps.resources[].replicas",
    "linkwise.filter.exclude",
    "linkwise.health.xids",
];

/// The mappings with case-sensitive keys: the NVIDIA plugin reads these itself, and the rest by Go's JSON reader, which
/// ignores case. linkwise's own keys are case-sensitive too.
const CASE_SENSITIVE: [&str; 5] = ["resources.gpus", "resources.mig", "sharing.timeSlicing", "sharing.mps", "linkwise"];

/// The letters per edit: a suggested key of up to 3 letters may differ by one edit, of up to 6 by two.
const LETTERS_PER_EDIT: usize = 3;

/// A fault of a configuration, or a note about it, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The line of the file, from 1; `None` for a flag, a variable, or the file as a whole.
    pub line: Option<u64>,
    /// The key as a path (`sharing.mps.resources[0].replicas`), or the flag or variable. Text of the file in it is
    /// escaped.
    pub key: String,
    /// The severity.
    pub severity: Severity,
    /// The fault, in words. Text of the file in it is quoted and escaped.
    pub problem: String,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth a log line; the file is valid.
    Note,
    /// `config check` rejects the file; `run` logs a warning and works with it, as the NVIDIA plugin does.
    Warning,
    /// The configuration is rejected.
    Error,
}

impl Finding {
    /// A finding at a line of the file; without one, about the file as a whole, a flag or a variable.
    pub(super) fn at(
        line: impl Into<Option<u64>>,
        key: impl Into<String>,
        severity: Severity,
        problem: impl Into<String>,
    ) -> Self {
        Self { line: line.into(), key: key.into(), severity, problem: problem.into() }
    }

    /// An error at a place, which is given as for [`Self::at`].
    pub(super) fn error(line: impl Into<Option<u64>>, key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::at(line, key, Severity::Error, problem)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.problem)
    }
}

/// A value of the file and its line, from 1. The root is the value of the whole file.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub(super) line: u64,
    pub(super) value: Value,
}

/// A key of a mapping, its line, and its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub key: String,
    pub line: u64,
    pub node: Node,
}

impl Node {
    /// Reads a text, within serde-saphyr's limits on depth, size and aliases. Returns also the findings about its YAML,
    /// its keys and its version. Broken YAML counts as an empty text. An empty text is null, and valid as for the
    /// NVIDIA plugin.
    pub fn parse(text: &str) -> (Self, Vec<Finding>) {
        let mut findings = Vec::new();
        let mut root = Self { line: 1, value: Value::Null };
        let has_content =
            text.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#') && line != "---");
        if has_content {
            match serde_saphyr::from_str(text) {
                Ok(read) => root = read,
                Err(error) => {
                    let line = error.location().map(|location| location.line());
                    findings.push(Finding::error(line, "", fault(&error)));
                }
            }
        }
        let known: Vec<&str> = keys().chain(COMPOUND).collect();
        Keys { known: &known, findings: &mut findings }.check(&mut root, "", "");
        if let Value::Map(entries) = &root.value
            && !entries.is_empty()
            && entries.iter().all(|entry| !known.iter().any(|key| key.split('.').next() == Some(&entry.key)))
        {
            let problem = "this file has no key of a configuration; if it is a ConfigMap, pass the text below one of \
                           its data keys";
            findings.push(Finding::error(None, "", problem));
        }
        if let Some(node) = root.get("version")
            && !matches!(&node.value, Value::Text(version) if version == VERSION || version.is_empty())
        {
            let problem = format!("this build reads version {VERSION}, found {}", node.value.describe());
            findings.push(Finding::error(node.line, "version", problem));
        }
        (root, findings)
    }

    /// The value at a path of keys such as `flags.plugin.passDeviceSpecs`; null counts as missing.
    pub(super) fn at(&self, path: &str) -> Option<&Self> {
        path.split('.').try_fold(self, Self::get)
    }

    /// The value of a key of this mapping; null counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Value::Map(entries) = &self.value else { return None };
        // If a key is there in two spellings, the last one counts, as in Go.
        let entry = entries.iter().rev().find(|entry| entry.key == key)?;
        (entry.node.value != Value::Null).then_some(&entry.node)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self { line: spanned.referenced.line(), value: spanned.value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Any)
    }
}

/// Takes any value by YAML's rules. Booleans are those of YAML 1.1, as for the NVIDIA plugin: `yes` is true.
struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Whole(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Whole(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Fraction(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        std::iter::from_fn(|| items.next_element().transpose()).collect::<Result<_, _>>().map(Value::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let entry = |(key, node): (Spanned<String>, Node)| Entry { line: key.referenced.line(), key: key.value, node };
        let entries = std::iter::from_fn(|| items.next_entry().transpose()).map(|next| next.map(entry));
        entries.collect::<Result<_, _>>().map(Value::Map)
    }
}

/// The check of a file's keys.
struct Keys<'a> {
    known: &'a [&'a str],
    findings: &'a mut Vec<Finding>,
}

impl<'a> Keys<'a> {
    /// Reports unknown keys and wrong shapes, and renames keys in another case to the known spelling. `path` is the
    /// path of this node with `[]` for list items; `shown` has their numbers instead, for messages.
    fn check(&mut self, node: &mut Node, path: &str, shown: &str) {
        let is_list = self.known.iter().any(|known| known.starts_with(&format!("{path}[]")));
        let keys = self.below(path);
        if node.value == Value::Null || (!is_list && keys.is_empty()) {
            return;
        }
        match &mut node.value {
            Value::List(items) if is_list => {
                for (number, item) in items.iter_mut().enumerate() {
                    let shown = format!("{shown}[{number}]");
                    match item.value {
                        Value::Null => {
                            self.findings.push(Finding::error(item.line, shown, item.value.refused("a mapping")));
                        }
                        _ => self.check(item, &format!("{path}[]"), &shown),
                    }
                }
            }
            Value::Map(entries) if !is_list => {
                for entry in entries {
                    let whole = join(shown, &excerpt(&entry.key));
                    if let Some(key) = self.key(entry, path, &keys, &whole) {
                        entry.key = key;
                        self.check(&mut entry.node, &join(path, &entry.key), &whole);
                    }
                }
            }
            other => {
                let problem = other.refused(if is_list { "a list" } else { "a mapping" });
                self.findings.push(Finding::error(node.line, shown, problem));
            }
        }
    }

    /// The keys that are known below a path, each once; none below a single setting.
    fn below(&self, path: &str) -> BTreeSet<&'a str> {
        let below = |known: &'a str| match path {
            "" => Some(known),
            _ => known.strip_prefix(path)?.strip_prefix('.'),
        };
        let rests = self.known.iter().filter_map(|known| below(known));
        rests.filter_map(|rest| rest.split(['.', '[']).next()).collect()
    }

    /// Returns the known spelling of a key, or reports the key as unknown. `whole` is its path, for messages.
    fn key(&mut self, entry: &Entry, path: &str, keys: &BTreeSet<&str>, whole: &str) -> Option<String> {
        if keys.contains(entry.key.as_str()) {
            return Some(entry.key.clone());
        }
        let is_strict = CASE_SENSITIVE.iter().any(|own| path.starts_with(own));
        let same = keys.iter().find(|key| !is_strict && key.eq_ignore_ascii_case(&entry.key));
        let (severity, problem) = match (same, removed::refusal(whole)) {
            (Some(same), _) => (Severity::Note, format!("read as {same}")),
            (None, Some(refusal)) => (Severity::Error, refusal),
            (None, None) => {
                let hint = self.nearest(&entry.key, keys, path).map(|key| format!("; did you mean '{key}'?"));
                (Severity::Warning, format!("unknown key{}", hint.unwrap_or_default()))
            }
        };
        self.findings.push(Finding::at(entry.line, whole, severity, problem));
        same.map(|same| (*same).to_owned())
    }

    /// The key that was probably meant: a similar key of the same mapping, or else the same key elsewhere, by its whole
    /// path.
    fn nearest(&self, key: &str, siblings: &BTreeSet<&str>, path: &str) -> Option<String> {
        let close = |candidate: &str| {
            let (ours, theirs) = (excerpt(key).to_lowercase(), candidate.to_lowercase());
            let distance = strsim::damerau_levenshtein(&ours, &theirs);
            (distance <= candidate.chars().count().div_ceil(LETTERS_PER_EDIT)).then_some(distance)
        };
        let sibling = siblings.iter().filter_map(|sibling| Some((close(sibling)?, *sibling))).min();
        let elsewhere = || {
            let last = |known: &&&str| known.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case(key));
            self.known.iter().find(last).filter(|known| !known.starts_with(&format!("{path}[]"))).copied()
        };
        sibling.map(|(_, sibling)| sibling).or_else(elsewhere).map(str::to_owned)
    }
}

/// The path of a key below another.
fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_have_their_lines() {
        let tree: Node = serde_saphyr::from_str("a:\n  b: 1\n\n  c:\n    - x\n    - true\nd: ~\n5: 'no'\n").unwrap();
        let Value::Map(entries) = &tree.value else { panic!("{tree:?}") };
        let shape: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.line)).collect();
        assert_eq!(shape, [("a", 1), ("d", 7), ("5", 8)]);
        let c = tree.at("a.c").unwrap();
        let Value::List(items) = &c.value else { panic!("{c:?}") };
        assert_eq!((items[0].line, items[1].line), (5, 6));
        assert_eq!(items[1].value, Value::Bool(true));
        assert_eq!(tree.get("d"), None);
        assert_eq!(tree.get("5").unwrap().value, Value::Text("no".to_owned()));
    }

    #[test]
    fn empty_text_is_null_and_broken_text_has_a_line() {
        for text in ["", "\n# nothing\n", "---\n"] {
            assert_eq!(Node::parse(text), (Node { line: 1, value: Value::Null }, Vec::new()), "{text:?}");
        }
        for (text, line) in [("a: [1\n", 0), ("a: 1\na: 2\n", 2), ("a: 1\n b: 2\n", 2), ("{\"a\": \"\n", 1)] {
            let (_, findings) = Node::parse(text);
            let [finding] = findings.as_slice() else { panic!("{findings:?}") };
            assert!(finding.line.unwrap() >= line && !finding.to_string().contains('\n'), "{finding}");
        }
    }
}
