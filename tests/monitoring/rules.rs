//! Tests of the PrometheusRule's rules by promtool, with the cases in tests/monitoring/rules.yaml.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::chart::helm::repository;
use crate::monitoring::{assert_passes, list, read, text};

const RULES: &str = "manifests/monitoring/rules.yaml";
const CASES: &str = "tests/monitoring/rules.yaml";

/// The rules of one kind: `alert` or `record`.
fn rules<'a>(file: &'a Value, kind: &'a str) -> impl Iterator<Item = (&'a str, &'a Value)> {
    let rules = list(&file["spec"], "groups").flat_map(|group| list(group, "rules"));
    rules.filter_map(move |rule| Some((rule[kind].as_str()?, rule)))
}

#[test]
#[cfg_attr(not(has_promtool), ignore = "no promtool here: make tools brings it")]
fn promtool_passes_every_case_of_the_rules() {
    let folder = tempfile::tempdir().unwrap();
    let (rules, cases) = (folder.path().join("rules.yaml"), folder.path().join("cases.yaml"));
    // promtool reads JSON too, because JSON is YAML.
    std::fs::write(&rules, read(RULES)["spec"].to_string()).unwrap();
    std::fs::copy(repository(CASES), &cases).unwrap();
    assert_passes("check", &rules);
    assert_passes("test", &cases);
}

/// The names that a query of the cases expects: alerts that fire, or recorded series.
fn expected(query: &Value) -> BTreeSet<String> {
    let labels = list(query, "exp_samples").filter_map(|sample| sample["labels"].as_str());
    let name = |labels: &str| {
        let alert = labels.split_once("alertname=\"").map(|(_, rest)| rest.split_once('"').unwrap().0);
        alert.or(labels.split_once('{').map(|(name, _)| name)).unwrap().to_owned()
    };
    labels.map(name).collect()
}

#[test]
fn each_alert_fires_and_is_silent_in_its_case() {
    let (rules_file, cases) = (read(RULES), read(CASES));
    let of_alerts = |query: &&Value| query["expr"] == "ALERTS{alertstate=\"firing\"}";
    for (alert, _) in rules(&rules_file, "alert") {
        let fires = |query: &Value| expected(query).contains(alert);
        let case = list(&cases, "tests").find(|case| list(case, "promql_expr_test").filter(of_alerts).any(fires));
        let case = case.unwrap_or_else(|| panic!("{alert} fires in no case of {CASES}"));
        let silent = list(case, "promql_expr_test").filter(of_alerts).any(|query| !fires(query));
        assert!(silent, "{alert} is silent at no time of its case");
    }
    let queried: BTreeSet<String> =
        list(&cases, "tests").flat_map(|case| list(case, "promql_expr_test")).flat_map(expected).collect();
    for (record, _) in rules(&rules_file, "record") {
        // The series `narrowed` is tested through its alert.
        assert!(queried.contains(record) || record.contains("narrowed"), "no case of {CASES} queries {record}");
    }
}

#[test]
fn each_alert_leads_to_its_runbook() {
    let (rules_file, runbooks) = (read(RULES), text("docs/runbooks.md"));
    let mut sections: BTreeSet<&str> = runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    for (alert, rule) in rules(&rules_file, "alert") {
        let url = format!("docs/runbooks.md#{}", alert.to_lowercase());
        assert_eq!(rule["annotations"]["runbook_url"], url.as_str());
        assert!(sections.remove(alert), "docs/runbooks.md has no section {alert}");
        let section = runbooks.split_once(&format!("## {alert}\n")).unwrap().1.split("\n## ").next().unwrap();
        for part in ["**Means.**", "**Look at.**", "**Do.**"] {
            assert!(section.contains(part), "{alert} lacks {part} in docs/runbooks.md");
        }
    }
    assert!(sections.iter().all(|section| !section.starts_with("Linkwise")), "no alert: {sections:?}");
}

/// The labels that a template names.
fn named(template: &str) -> impl Iterator<Item = &str> {
    let after = template.split("$labels.").skip(1);
    after.map(|rest| rest.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').next().unwrap())
}

/// A template renders a missing label as an empty text.
#[test]
fn annotations_name_only_labels_of_their_alert() {
    let (rules_file, cases) = (read(RULES), read(CASES));
    for (alert, rule) in rules(&rules_file, "alert") {
        let samples = list(&cases, "tests").flat_map(|case| list(case, "promql_expr_test"));
        let mut samples =
            samples.flat_map(|query| list(query, "exp_samples")).filter_map(|sample| sample["labels"].as_str());
        let firing = samples.find(|labels| labels.contains(&format!("alertname=\"{alert}\""))).unwrap();
        for annotation in ["summary", "description"] {
            let template = rule["annotations"][annotation].as_str().unwrap();
            for label in named(template) {
                assert!(firing.contains(&format!(" {label}=\"")), "{alert}: {annotation} names the label {label}");
            }
        }
        assert!(
            ["critical", "warning", "info"].iter().any(|severity| rule["labels"]["severity"] == *severity),
            "{alert}"
        );
    }
}
