//! Tests of the dashboards: by Grafana's own types, and for places, titles and variables of their panels.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::chart::helm::repository;
use crate::monitoring::{list, read};

const DASHBOARDS: [&str; 2] = ["manifests/monitoring/grafana/fleet.json", "manifests/monitoring/grafana/node.json"];

#[test]
#[cfg_attr(not(has_grafana_types), ignore = "no Grafana types here: make tools brings them")]
fn dashboards_have_the_types_that_grafana_publishes() {
    let types = repository("target/tools/grafana");
    let mut python = Command::new("python3");
    python.arg(repository("tests/monitoring/grafana.py")).args(DASHBOARDS.map(repository));
    let output = python.env("PYTHONPATH", types).env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{stdout}{stderr}");
}

fn overlap(one: &Value, other: &Value) -> bool {
    let [one, other] = [one, other].map(|panel| {
        let of = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        (of("x")..of("x") + of("w"), of("y")..of("y") + of("h"))
    });
    let meet = |a: &std::ops::Range<u64>, b: &std::ops::Range<u64>| a.start < b.end && b.start < a.end;
    meet(&one.0, &other.0) && meet(&one.1, &other.1)
}

#[test]
fn panels_have_distinct_places_and_titles() {
    for file in DASHBOARDS {
        let dashboard = read(file);
        let panels: Vec<&Value> = list(&dashboard, "panels").collect();
        assert!(panels.len() > 10, "{file}");
        for (at, panel) in panels.iter().enumerate() {
            let title = panel["title"].as_str().unwrap();
            assert!(panel["gridPos"]["x"].as_u64().unwrap() + panel["gridPos"]["w"].as_u64().unwrap() <= 24, "{title}");
            assert!(!panel["description"].as_str().unwrap().is_empty(), "{title}");
            for other in &panels[..at] {
                assert!(other["id"] != panel["id"] && other["title"] != panel["title"], "{file}: {title}");
                assert!(!overlap(other, panel), "{file}: {title} lies on {}", other["title"]);
            }
            let references: BTreeSet<&str> =
                list(panel, "targets").map(|target| target["refId"].as_str().unwrap()).collect();
            assert_eq!(references.len(), list(panel, "targets").count(), "{file}: {title}");
        }
    }
}

#[test]
fn variables_of_queries_are_defined() {
    for file in DASHBOARDS {
        let dashboard = read(file);
        let known: BTreeSet<&str> =
            list(&dashboard["templating"], "list").map(|variable| variable["name"].as_str().unwrap()).collect();
        for panel in list(&dashboard, "panels") {
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{file}: {}", panel["title"]);
            for target in list(panel, "targets") {
                let expr = target["expr"].as_str().unwrap().replace("$__rate_interval", "").replace("\"$1\"", "");
                for rest in expr.split('$').skip(1) {
                    let name = rest.split(|letter: char| !letter.is_ascii_alphanumeric()).next().unwrap();
                    assert!(known.contains(name), "{file}: {} names ${name}", panel["title"]);
                }
            }
        }
    }
}
