//! How pods of the plugin are replaced: a new one takes over beside the old one where two fit on a node, a change of the
//! configuration that a program follows replaces none, and a spare is the same as what it stands by for.

use serde_json::{Value, json};

use crate::chart::helm::{Helm, POD, containers, list, object, set};

const PLUGIN: &str = "nvdp-nvidia-device-plugin";

#[test]
fn pods_surge_where_two_fit_on_a_node() {
    let Some(helm) = Helm::found() else { return };
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
fn followed_settings_replace_no_pod() {
    let Some(helm) = Helm::found() else { return };
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
        "linkwise: {naming: true, numaHints: package, policies: {}, filter: {exclude: [0]}}",
    ] {
        assert_eq!(checksum(&format!("version: v1\n{followed}")), plain, "{followed}");
    }
    for at_start in ["flags: {plugin: {passDeviceSpecs: true}}", "linkwise: {onNvmlLoss: unhealthy}", "imex: {}"] {
        assert_ne!(checksum(&format!("version: v1\n{at_start}")), plain, "{at_start}");
    }
}

/// The named container without what two containers of a pod must have of their own; and that, apart.
fn parted(objects: &[Value], name: &str) -> (Value, Value) {
    let mut container =
        containers(object(objects, "DaemonSet", PLUGIN)).into_iter().find(|it| it["name"] == name).unwrap().clone();
    let mut own = json!({});
    for key in ["name", "ports", "startupProbe", "livenessProbe", "readinessProbe"] {
        own[key] = container.as_object_mut().unwrap().remove(key).unwrap_or_default();
    }
    let env = container["env"].as_array_mut().unwrap();
    for name in ["LINKWISE_STANDBY", "LINKWISE_METRICS_ADDRESS", "LINKWISE_ADMIN_SOCKET"] {
        let found = env.iter().position(|env| env["name"] == name).map(|at| env.remove(at));
        own[name] = found.map(|env| env["value"].clone()).unwrap_or_default();
    }
    (container, own)
}

#[test]
fn spare_is_what_it_stands_by_for() {
    let Some(helm) = Helm::found() else { return };
    for values in [&[][..], &["dra.enabled=true", "migStrategy=mixed"], &["config.name=x", "metrics.port=7000"]] {
        let objects = helm.objects(&[values, &["devicePlugin.standby=true", "podMonitor.enabled=true"]].concat());
        let (first, own) = parted(&objects, "nvidia-device-plugin-ctr");
        let (spare, its) = parted(&objects, "nvidia-device-plugin-standby");
        assert_eq!(spare, first, "{values:?}");
        let port = own["ports"][0]["containerPort"].as_u64().unwrap();
        let address = |port: u64| json!(format!("[::]:{port}"));
        assert_eq!(own["LINKWISE_METRICS_ADDRESS"], address(port));
        assert_eq!(its["LINKWISE_METRICS_ADDRESS"], address(port + 1), "a pod has one address");
        assert_eq!(its["ports"], json!([{"name": "standby", "containerPort": port + 1, "protocol": "TCP"}]));
        for probe in ["startupProbe", "livenessProbe"] {
            assert_eq!(its[probe]["httpGet"], json!({"path": "/livez", "port": "standby"}));
        }
        // The pod is ready when the container that serves is.
        assert_eq!((&its["readinessProbe"], &its["LINKWISE_STANDBY"]), (&Value::Null, &json!("true")));
        assert_eq!((&own["LINKWISE_STANDBY"], &own["readinessProbe"]["failureThreshold"]), (&Value::Null, &json!(1)));
        assert_ne!(its["LINKWISE_ADMIN_SOCKET"], own["LINKWISE_ADMIN_SOCKET"]);
        let monitored = list(object(&objects, "PodMonitor", PLUGIN), "/spec/podMetricsEndpoints");
        let ports: Vec<&Value> = monitored.iter().map(|endpoint| &endpoint["port"]).collect();
        assert_eq!(ports, ["metrics", "standby"]);
    }
    let pods = helm.objects(&[]);
    assert_eq!(list(object(&pods, "DaemonSet", PLUGIN), &format!("{POD}/containers")).len(), 1, "off by default");
}
