//! Tests that values.yaml has NVIDIA's values, and that the schema and docs/chart.md have ours. They need no helm.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::chart::helm::repository;

/// Collects the paths of all values in a values file.
fn collect_paths(values: &Value, prefix: &str, paths: &mut BTreeSet<String>) {
    for (key, value) in values.as_object().unwrap() {
        let path = format!("{prefix}{key}");
        // The fields below these are Kubernetes' and not the chart's.
        let theirs = ["affinity", "podSecurityContext", "resources", "updateStrategy"].contains(&key.as_str());
        match value {
            Value::Object(fields) if !fields.is_empty() && !theirs => collect_paths(value, &format!("{path}."), paths),
            _ => {
                paths.insert(path);
            }
        }
    }
}

fn values() -> BTreeSet<String> {
    let text = fs::read_to_string(repository("charts/linkwise/values.yaml")).unwrap();
    let mut found = BTreeSet::new();
    collect_paths(&serde_saphyr::from_str(&text).unwrap(), "", &mut found);
    found
}

fn schema() -> Value {
    let text = fs::read_to_string(repository("charts/linkwise/values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Values that values.yaml does not list: helm's `global`, and those that NVIDIA's chart reads without listing them.
const UNLISTED: [&str; 4] = ["global", "nfd.enabled", "noTimestamp", "sleepInterval"];

/// Removed values. The chart's refusal of one names its replacement.
const REMOVED: &[&str] = &["devicePlugin.standby", "dra.groups", "dra.sets"];

#[test]
fn schema_has_exactly_the_values() {
    fn in_schema(schema: &Value, prefix: &str, found: &mut BTreeSet<String>) {
        for (key, entry) in schema["properties"].as_object().unwrap() {
            let path = format!("{prefix}{key}");
            match entry.get("properties") {
                Some(_) => in_schema(entry, &format!("{path}."), found),
                None => {
                    found.insert(path);
                }
            }
        }
    }
    let mut found = BTreeSet::new();
    in_schema(&schema(), "", &mut found);
    let mut listed = values();
    // The schema allows any values for NFD's chart.
    listed.remove("nfd");
    listed.extend(UNLISTED.map(str::to_owned));
    listed.extend(REMOVED.iter().map(|value| (*value).to_owned()));
    assert_eq!(found, listed);
}

#[test]
fn nvidias_values_are_all_in_values_yaml() {
    let text = fs::read_to_string(repository("tests/chart/nvidia-values.yaml")).unwrap();
    let mut theirs = BTreeSet::new();
    collect_paths(&serde_saphyr::from_str(&text).unwrap(), "", &mut theirs);
    let ours = values();
    let known = |path: &&String| {
        path.starts_with("nfd.") || ours.iter().any(|own| path == &own || path.starts_with(&format!("{own}.")))
    };
    let missing: Vec<&String> = theirs.iter().filter(|path| !known(path)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn documentation_has_every_value() {
    let text = fs::read_to_string(repository("docs/chart.md")).unwrap();
    let is_missing = |path: &&String| !text.contains(&format!("`{path}`"));
    let all: BTreeSet<String> = values().into_iter().chain(UNLISTED[1..].iter().map(|&name| name.to_owned())).collect();
    let missing: Vec<&String> = all.iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "docs/chart.md lacks {missing:?}");
}

/// The refusal of `nfd.enabled` and the notes after an installation show this command.
#[test]
fn documentation_has_the_command_that_installs_nfd() {
    let helpers = fs::read_to_string(repository("charts/linkwise/templates/_helpers.tpl")).unwrap();
    let lines = helpers.lines().skip_while(|line| !line.starts_with("helm install nfd"));
    let command: Vec<&str> = lines.take_while(|line| !line.starts_with("{{")).collect();
    assert_eq!(command.len(), 4, "{command:?}");
    let text = fs::read_to_string(repository("docs/chart.md")).unwrap();
    let documented = text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let command = command.into_iter().map(str::trim).collect::<Vec<_>>().join("\n");
    assert!(documented.contains(&command), "docs/chart.md lacks\n{command}");
}
