//! Tests that the chart renders the rules and dashboards of manifests/monitoring, and links to runbooks.

use std::fs;

use serde_json::Value;

use crate::chart::helm::{Helm, object, repository};

fn text(file: &str) -> String {
    fs::read_to_string(repository("manifests/monitoring").join(file)).unwrap()
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn rules_are_those_of_the_manifests() {
    let objects = Helm::found().objects(&["prometheusRule.enabled=true", "prometheusRule.labels.release=prometheus"]);
    let rule = object(&objects, "PrometheusRule", "nvdp-nvidia-device-plugin");
    let ours: Value = serde_saphyr::from_str(&text("rules.yaml")).unwrap();
    assert_eq!((&rule["apiVersion"], &rule["spec"]), (&ours["apiVersion"], &ours["spec"]));
    assert_eq!(rule["metadata"]["labels"]["release"], "prometheus");
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn runbook_links_follow_the_value() {
    let url = "https://git.example.com/linkwise/";
    let objects = Helm::found().objects(&["prometheusRule.enabled=true", &format!("prometheusRule.runbookUrl={url}")]);
    let rule = object(&objects, "PrometheusRule", "nvdp-nvidia-device-plugin").to_string();
    let alerts = rule.matches("\"alert\"").count();
    assert!(alerts > 10, "{rule}");
    assert_eq!(rule.matches(&format!("\"runbook_url\":\"{url}docs/runbooks.md#linkwise")).count(), alerts);
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn dashboards_are_those_of_the_manifests() {
    let objects = Helm::found().objects(&["grafanaDashboards.enabled=true"]);
    for name in ["fleet", "node"] {
        let map = object(&objects, "ConfigMap", &format!("nvdp-nvidia-device-plugin-dashboard-{name}"));
        assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
        let shown: Value =
            serde_json::from_str(map["data"][format!("linkwise-{name}.json")].as_str().unwrap()).unwrap();
        assert_eq!(shown, serde_json::from_str::<Value>(&text(&format!("grafana/{name}.json"))).unwrap());
    }
}
