//! Tests of refused clusters, and of settings: a change that the running program follows replaces no pod.

use crate::chart::helm::{Helm, object};

const PLUGIN: &str = "nvdp-nvidia-device-plugin";

/// Kubelets before 1.26 cannot call the plugin.
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
    let checksum = |text: &str| {
        let map = format!("config.map.default={}", text.replace(',', "\\,"));
        let objects = Helm::found().objects(&[&map]);
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
