//! Tests of manifests/monitoring: the rules by promtool, the dashboards by Grafana's own types (`make tools` installs
//! both), and the names that they use. tests/cluster/prometheus.rs runs them on a real Prometheus.

mod dashboards;
mod dcgm;
mod rules;

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::chart::helm::{repository, tool};

fn text(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A file of YAML or JSON.
fn read(path: &str) -> Value {
    serde_saphyr::from_str(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

/// Asserts that promtool's `check` or `test` of a file succeeds.
fn assert_passes(command: &str, file: &Path) {
    let output = Command::new(tool("promtool")).args([command, "rules"]).arg(file).output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "promtool {command} rules:\n{stdout}{stderr}");
}

#[test]
fn chart_has_the_same_rules_and_dashboards() {
    for (ours, charts) in
        [("rules.yaml", "rules.yaml"), ("grafana/fleet.json", "fleet.json"), ("grafana/node.json", "node.json")]
    {
        let (ours, charts) =
            (format!("manifests/monitoring/{ours}"), format!("charts/linkwise/files/monitoring/{charts}"));
        assert_eq!(text(&ours), text(&charts), "copy {ours} to {charts}");
    }
}
