//! How pods of the plugin are replaced: a new one takes over beside the old one where two fit on a node, and a change of
//! the configuration that a program follows replaces none.

use serde_json::json;

use crate::chart::helm::{Helm, object};

const PLUGIN: &str = "nvdp-nvidia-device-plugin";

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn pods_surge_where_two_fit_on_a_node() {
    let helm = Helm::found();
    let surge = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    let rolling = json!({"type": "RollingUpdate"});
    let own = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2}});
    for (values, expected) in [
        (&[][..], &surge),
        (&["updateStrategy=null"], &surge),
        (&["devicePlugin.enableHostNetwork=true"], &rolling),
        (&["updateStrategy.type=OnDelete"], &json!({"type": "OnDelete"})),
        (&["updateStrategy.rollingUpdate.maxUnavailable=2"], &own),
    ] {
        let objects = helm.objects(values);
        assert_eq!(object(&objects, "DaemonSet", PLUGIN)["spec"]["updateStrategy"], *expected, "{values:?}");
    }
}

/// Older kubelets cannot call a plugin.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn cluster_before_1_26_is_refused() {
    let helm = Helm::found();
    assert!(helm.template(&["--kube-version", "1.26.0-gke.1"]).is_ok());
    let refusal = helm.template(&["--kube-version", "1.25.16"]).unwrap_err();
    assert!(refusal.contains("1.26.0"), "{refusal}");
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn followed_settings_replace_no_pod() {
    let helm = Helm::found();
    let checksum = |text: &str| {
        let map = format!("config.map.default={}", text.replace(',', "\\,"));
        let objects = helm.objects(&[&map]);
        let set = object(&objects, "DaemonSet", PLUGIN);
        set.pointer("/spec/template/metadata/annotations/checksum~1config").unwrap().clone()
    };
    let plain = checksum("version: v1");
    for followed in [
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
        "resources: {gpus: [{pattern: '*', name: nvidia.com/gpu}]}",
        "linkwise: {naming: true, numaHints: package, filter: {exclude: [0]}}",
    ] {
        assert_eq!(checksum(&format!("version: v1\n{followed}")), plain, "{followed}");
    }
    for at_start in ["flags: {plugin: {passDeviceSpecs: true}}", "linkwise: {onNvmlLoss: unhealthy}", "imex: {}"] {
        assert_ne!(checksum(&format!("version: v1\n{at_start}")), plain, "{at_start}");
    }
}
