//! The keys that a file may have. Every other key is unknown; values are checked where they are read.

use super::finding::Finding;
use super::tree::{Node, Value};
use crate::config::removed;
use crate::config::settings::keys;
use linkwise_core::quote::excerpt;

/// Keys whose values are read as a whole, and the old name of a setting, as paths; `[]` stands for the items of a list.
/// The keys of single settings come from the settings' table.
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

/// The number of letters in one of which a suggestion may differ from the unknown key.
const SLIP: usize = 3;

/// Checks the shape of a whole file and reports unknown keys. Keys in another case are renamed to the known spelling.
pub(super) fn check(root: &mut Node, findings: &mut Vec<Finding>) {
    let known: Vec<&str> = keys().chain(COMPOUND).collect();
    walk(root, "", "", &known, findings);
}

/// The keys that may stand below a path, each once; none below a leaf.
fn below<'k>(path: &str, known: &[&'k str]) -> Vec<&'k str> {
    let prefix = if path.is_empty() { String::new() } else { format!("{path}.") };
    let rests = known.iter().filter_map(|pattern| pattern.strip_prefix(prefix.as_str()));
    let mut next: Vec<&str> = rests.map(|rest| rest.split(['.', '[']).next().unwrap_or(rest)).collect();
    next.sort_unstable();
    next.dedup();
    next
}

fn is_list(path: &str, known: &[&str]) -> bool {
    let prefix = format!("{path}[]");
    known.iter().any(|pattern| pattern.starts_with(&prefix))
}

/// `path` is the pattern of this node's path, `shown` the same with the numbers of list items, for messages.
fn walk(node: &mut Node, path: &str, shown: &str, known: &[&str], findings: &mut Vec<Finding>) {
    let list = is_list(path, known);
    let keys = below(path, known);
    if node.value == Value::Null || (!list && keys.is_empty()) {
        return;
    }
    let line = node.line;
    match &mut node.value {
        Value::List(items) if list => {
            let path = format!("{path}[]");
            for (number, item) in items.iter_mut().enumerate() {
                let shown = format!("{shown}[{number}]");
                match item.value {
                    Value::Null => findings.push(mismatch(item.line, &shown, "a mapping", &item.value)),
                    _ => walk(item, &path, &shown, known, findings),
                }
            }
        }
        Value::Map(entries) if !list => {
            let join = |key: &str, path: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            for entry in entries {
                if !keys.contains(&entry.key.as_str()) {
                    let strict = CASE_SENSITIVE.iter().any(|own| path.starts_with(own));
                    let same = keys.iter().find(|key| !strict && key.eq_ignore_ascii_case(&entry.key));
                    let Some(same) = same else {
                        let whole = join(&excerpt(&entry.key), shown);
                        if let Some(refusal) = removed::refusal(&whole) {
                            findings.push(Finding::error(entry.line, whole, refusal));
                            continue;
                        }
                        let hint =
                            nearest(&entry.key, &keys, path, known).map(|key| format!("; did you mean '{key}'?"));
                        let problem = format!("unknown key{}", hint.unwrap_or_default());
                        findings.push(Finding::warning(entry.line, whole, problem));
                        continue;
                    };
                    findings.push(Finding::note(entry.line, join(&entry.key, shown), format!("read as {same}")));
                    entry.key = (*same).to_owned();
                }
                let whole = join(&entry.key, shown);
                walk(&mut entry.node, &join(&entry.key, path), &whole, known, findings);
            }
        }
        other => {
            let expected = if list { "a list" } else { "a mapping" };
            findings.push(mismatch(line, shown, expected, other));
        }
    }
}

fn mismatch(line: u64, key: &str, expected: &str, found: &Value) -> Finding {
    Finding::error(line, key, format!("expected {expected}, found {}", found.describe()))
}

/// The key that was probably meant: a similar key of the same mapping, or else the same key elsewhere, by its whole
/// path.
fn nearest(key: &str, siblings: &[&str], path: &str, known: &[&str]) -> Option<String> {
    let close = |candidate: &&str| {
        let (ours, theirs) = (excerpt(key).to_lowercase(), candidate.to_lowercase());
        let distance = strsim::damerau_levenshtein(&ours, &theirs);
        (distance <= candidate.chars().count().div_ceil(SLIP)).then_some(distance)
    };
    let sibling = siblings.iter().filter_map(|sibling| Some((close(sibling)?, *sibling))).min();
    let elsewhere = || {
        let last = |pattern: &&&str| pattern.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case(key));
        known.iter().find(last).filter(|pattern| !pattern.starts_with(&format!("{path}[]"))).map(|p| (*p).to_owned())
    };
    sibling.map(|(_, sibling)| sibling.to_owned()).or_else(elsewhere)
}
