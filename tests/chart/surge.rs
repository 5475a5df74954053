//! How pods of the plugin are replaced: a new one takes over beside the old one where two fit on a node, and a change of
//! the configuration that a program follows replaces none.

use serde_json::json;

use crate::chart::helm::{Helm, object, set};

const PLUGIN: &str = "nvdp-nvidia-device-plugin";

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn pods_surge_where_two_fit_on_a_node() {
    let helm = Helm::found();
    let surge = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    let rolling = json!({"type": "RollingUpdate"});
    let own = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2}});
    for (values, version, expected) in [
        (&[][..], "1.36.0", &surge),
        (&[], "1.22.0-gke.1", &surge),
        // An older API server drops maxSurge, and refuses a maxUnavailable of 0 without it.
        (&[], "1.21.14", &rolling),
        (&["updateStrategy=null"], "1.36.0", &surge),
        (&["devicePlugin.enableHostNetwork=true"], "1.36.0", &rolling),
        (&["updateStrategy.type=OnDelete"], "1.36.0", &json!({"type": "OnDelete"})),
        (&["updateStrategy.rollingUpdate.maxUnavailable=2"], "1.36.0", &own),
    ] {
        let args = [set(values), vec!["--kube-version", version]].concat();
        let objects = helm.template(&args).unwrap();
        assert_eq!(object(&objects, "DaemonSet", PLUGIN)["spec"]["updateStrategy"], *expected, "{values:?} {version}");
    }
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
