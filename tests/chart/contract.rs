//! Tests of all that an operator of NVIDIA's chart relies on: its values file, its names, its selectors (which no
//! upgrade can change), the variables of each program, and the texts of the configuration files.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::chart::flat::{difference, lines};
use crate::chart::helm::{Helm, POD, containers, daemon_sets, list, object, repository, set};
use crate::chart::swap::{help, reads};

const PLUGIN: &str = "nvdp-nvidia-device-plugin";

/// Values that turn on all programs and the PodMonitor, and set the driver root.
const ALL: [&str; 4] =
    ["gfd.enabled=true", "config.name=external", "podMonitor.enabled=true", "nvidiaDriverRoot=/driver"];

fn with_nvidias_file(helm: &Helm, values: &[&str]) -> Vec<Value> {
    let file = repository("tests/chart/nvidia-values.yaml");
    let args = [vec!["--values", file.to_str().unwrap()], set(values)].concat();
    helm.template(&args).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn nvidias_values_file_gives_our_objects() {
    let helm = Helm::found();
    let ours = lines(&helm.objects(&[]));
    // The difference is the file's own affinity and image.
    insta::assert_snapshot!(difference(&ours, &lines(&with_nvidias_file(&helm, &[]))));
}

/// `helm upgrade --reuse-values` takes the values of the installed chart, which lacks values of ours.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn reused_values_lack_only_values_with_a_default() {
    let helm = Helm::found();
    let missing = "configManager metrics podMonitor prometheusRule grafanaDashboards kubeletRootDir \
        devicePlugin.resources devicePlugin.writeLabelsFile devicePlugin.extraEnv devicePlugin.extraVolumes \
        devicePlugin.extraVolumeMounts gfd.resources gfd.extraEnv mps.updateStrategy mps.resources \
        mps.extraEnv image.digest resourceQuota openshift";
    let missing: Vec<String> = missing.split_whitespace().map(|value| format!("{value}=null")).collect();
    let missing: Vec<&str> = missing.iter().map(String::as_str).collect();
    for more in [&[][..], &["gfd.enabled=true", "config.map.default=version: v1"]] {
        let whole = lines(&with_nvidias_file(&helm, more));
        let reused = difference(&whole, &lines(&with_nvidias_file(&helm, &[&missing[..], more].concat())));
        // Without a value containers have no resources, which is allowed.
        let changes = reused.lines().filter(|line| line.starts_with("  "));
        let other: Vec<&str> = changes.filter(|line| !line.contains("].resources.")).collect();
        assert!(other.is_empty(), "{other:?}");
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn names_are_nvidias_and_follow_the_overrides() {
    for (values, prefix, namespace) in [
        (&[][..], "nvdp-nvidia-device-plugin", "gpu"),
        (&["nameOverride=nvdp-plugin"], "nvdp-nvdp-plugin", "gpu"),
        (&["nameOverride=dp"], "nvdp", "gpu"),
        (&["fullnameOverride=gpus", "namespaceOverride=elsewhere"], "gpus", "elsewhere"),
    ] {
        let objects = Helm::found().objects(&[&ALL[..], values].concat());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let name = |object: &Value| (text(&object["kind"]), text(&object["metadata"]["name"]));
        let names: BTreeSet<(String, String)> = objects.iter().map(name).collect();
        let expected = "ClusterRole=-role ClusterRoleBinding=-role-binding DaemonSet= \
                        DaemonSet=-gpu-feature-discovery DaemonSet=-mps-control-daemon Pod=-test PodMonitor= \
                        Role=-gpu-feature-discovery RoleBinding=-gpu-feature-discovery \
                        ServiceAccount=-service-account ValidatingAdmissionPolicy=-gpu-feature-discovery \
                        ValidatingAdmissionPolicyBinding=-gpu-feature-discovery";
        let expected = expected.split_whitespace().map(|object| object.split_once('=').unwrap());
        let expected = expected.map(|(kind, suffix)| (kind.to_owned(), format!("{prefix}{suffix}")));
        assert_eq!(names, expected.collect(), "{values:?}");
        for object in &objects {
            let kind = object["kind"].as_str().unwrap();
            let cluster = kind.starts_with("Cluster") || kind.starts_with("Validating");
            let expected = if cluster { Value::Null } else { namespace.into() };
            assert_eq!(object["metadata"]["namespace"], expected, "{values:?}: {}", object["kind"]);
        }
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn selectors_are_nvidias_and_match_their_pods() {
    let usual =
        serde_json::json!({"app.kubernetes.io/instance": "nvdp", "app.kubernetes.io/name": "nvidia-device-plugin"});
    let own = serde_json::json!({"app": "gpus"});
    for (values, selector) in [(&[][..], &usual), (&["selectorLabelsOverride.app=gpus"], &own)] {
        let objects = Helm::found().objects(&[&ALL[..], values].concat());
        for set in daemon_sets(&objects) {
            assert_eq!(set.pointer("/spec/selector/matchLabels").unwrap(), selector);
            let labels = set.pointer("/spec/template/metadata/labels").unwrap();
            for (key, value) in selector.as_object().unwrap() {
                assert_eq!(labels[key], *value);
            }
        }
        // The monitor selects the pods of one DaemonSet only.
        let monitor = object(&objects, "PodMonitor", PLUGIN).pointer("/spec/selector/matchLabels").unwrap().as_object();
        let monitored = daemon_sets(&objects).filter(|set| {
            let labels = set.pointer("/spec/template/metadata/labels").unwrap();
            monitor.unwrap().iter().all(|(key, value)| labels[key] == *value)
        });
        assert_eq!(monitored.map(|set| &set["metadata"]["name"]).collect::<Vec<_>>(), [PLUGIN]);
    }
}

/// The variables of a container; the value is empty if it is not a text.
fn variables(container: &Value) -> BTreeMap<&str, &str> {
    let env = list(container, "/env").into_iter();
    env.map(|env| (env["name"].as_str().unwrap(), env["value"].as_str().unwrap_or(""))).collect()
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn each_program_reads_its_variables() {
    // Only the NVIDIA container runtime reads these.
    const RUNTIMES: [&str; 3] = ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES"];
    let helm = Helm::found();
    let values = ["failOnInitError=true", "migStrategy=mixed", "gfd.noTimestamp=true", "gfd.sleepInterval=60s"];
    let settings =
        ["compatWithCPUManager=true", "deviceListStrategy=cdi-cri", "deviceIDStrategy=uuid", "nvidiaDevRoot=/"];
    let more = ["gdrcopyEnabled=true", "gdsEnabled=true", "mofedEnabled=true", "deviceDiscoveryStrategy=nvml"];
    let cdi = ["cdi.nvidiaHookPath=/hook", "cdi.featureFlags=x"];
    let mut objects = helm.objects(&[&ALL[..], &values, &settings, &more, &cdi].concat());
    objects.extend(helm.objects(&["devicePlugin.writeLabelsFile=true"]));
    let mut helps: BTreeMap<&str, String> = BTreeMap::new();
    for container in daemon_sets(&objects).flat_map(containers) {
        let command = container["command"][0].as_str().unwrap();
        let help = helps.entry(command).or_insert_with(|| help(command));
        for name in variables(container).keys().filter(|name| !RUNTIMES.contains(name)) {
            assert!(reads(help, name), "{command} reads no {name}");
        }
    }
    assert_eq!(helps.len(), 4, "{:?}", helps.keys());
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn configuration_files_keep_their_text() {
    let folder = tempfile::tempdir().unwrap();
    let texts = [
        "version: v1\n",
        "# first\nversion: v1\n\n\nflags:\n  migStrategy: \"mixed\" # why\n",
        "  # indented\n  version: v1\n  sharing:\n    timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}",
        "version: v1\n# tab\there, trailing blanks   \n",
        "",
    ];
    for (number, text) in texts.iter().enumerate() {
        let file = folder.path().join(format!("{number}.yaml"));
        std::fs::write(&file, text).unwrap();
        let map = format!("config.map.default={}", file.display());
        let objects = Helm::found().template(&["--set-file", &map]).unwrap();
        let data = &object(&objects, "ConfigMap", "nvdp-nvidia-device-plugin-configs")["data"];
        assert_eq!(data["default"], **text, "{text:?}");
    }
}

/// Every mount has a volume, every volume a mount, and every probe a named port of its container.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn mounts_volumes_and_ports_belong_together() {
    let hosts = ["devicePlugin.enableHostNetwork=true", "deviceListStrategy=cdi-cri\\,volume-mounts"];
    for values in [&[][..], &ALL, &["config.map.default=", "gfd.enabled=true"], &hosts, &["nvidiaDriverRoot=/x"]] {
        let objects = Helm::found().objects(values);
        for set in daemon_sets(&objects) {
            let names =
                |pointer: &str| list(set, pointer).iter().map(|item| item["name"].clone().to_string()).collect();
            let volumes: BTreeSet<String> = names(&format!("{POD}/volumes"));
            let mounts = containers(set).into_iter().flat_map(|container| list(container, "/volumeMounts"));
            let mounts: BTreeSet<String> = mounts.map(|mount| mount["name"].to_string()).collect();
            assert_eq!(mounts, volumes, "{values:?}: {}", set["metadata"]["name"]);
            for container in containers(set) {
                let ports: Vec<&Value> = list(container, "/ports").into_iter().map(|port| &port["name"]).collect();
                for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                    if let Some(port) = container.pointer(&format!("/{probe}/httpGet/port")) {
                        assert!(ports.contains(&port), "{values:?}: {probe}: {port}");
                    }
                }
            }
        }
    }
}
