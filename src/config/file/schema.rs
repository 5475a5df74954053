//! Which keys there are. A key that is not here is unknown; what its value may be is checked where it is read.

use super::finding::{Finding, Problem};
use super::tree::{Node, Value};
use crate::config::settings::keys;

/// Keys whose values are read as a whole: patterns of paths, `[]` standing for the items of a list and `*` for any key.
/// The single settings are added from their own table.
const COMPOUND: [&str; 20] = [
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
    "linkwise.policies",
];

/// Where keys count only in their own letters: the NVIDIA plugin reads these mappings itself, and the rest by Go's JSON
/// reader, which takes any case. Ours are strict.
const OWN_LETTERS: [&str; 5] = ["resources.gpus", "resources.mig", "sharing.timeSlicing", "sharing.mps", "linkwise"];

/// The share of a key's letters that a slip may change, for a guess at what was meant: one in three.
const SLIP: usize = 3;

/// Checks the shape of a whole file and names what is unknown; keys in other letters get their own.
pub(super) fn check(root: &mut Node, findings: &mut Vec<Finding>) {
    let known: Vec<&str> = keys().into_iter().chain(COMPOUND).collect();
    walk(root, "", "", &known, findings);
}

/// The keys that may stand below a path, each once. Below a leaf there is none.
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

/// `path` is the pattern of where we are, `shown` the same with the numbers of items.
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
                let whole = join(&entry.key, shown);
                let mut tell = |problem| findings.push(Finding { line: Some(entry.line), key: whole.clone(), problem });
                if !keys.contains(&entry.key.as_str()) {
                    let strict = OWN_LETTERS.iter().any(|own| path.starts_with(own));
                    let same = keys.iter().find(|key| !strict && key.eq_ignore_ascii_case(&entry.key));
                    let Some(same) = same else {
                        tell(Problem::UnknownKey(nearest(&entry.key, &keys, path, known)));
                        continue;
                    };
                    tell(Problem::OtherCase((*same).to_owned()));
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
    let (expected, found) = (expected.to_owned(), found.describe());
    Finding { line: Some(line), key: key.to_owned(), problem: Problem::Value { expected, found } }
}

/// What was probably meant: a key of the same place that differs by a slip, else the same key at another place, by its
/// whole path.
fn nearest(key: &str, siblings: &[&str], path: &str, known: &[&str]) -> Option<String> {
    let close = |candidate: &&str| {
        let (ours, theirs) = (key.to_lowercase(), candidate.to_lowercase());
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
