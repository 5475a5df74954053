//! Tests of `linkwise doctor` with an API server: objects of other programs, old kubelets, and what DRA or events lack.

use std::process::Stdio;

use linkwise_api_server_box::{Answer, Fault, ResourceType};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::cluster::support::{Cluster, node_key, within};

/// A cluster, and an empty folder as the root of a host.
struct Host {
    cluster: Cluster,
    root: TempDir,
}

impl Host {
    async fn new() -> Self {
        Self { cluster: Cluster::start().await, root: tempfile::tempdir().unwrap() }
    }

    /// The doctor of a node whose `dra.gpus` is `gpus`.
    fn program(&self, gpus: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        let root = self.root.path();
        command.env_clear().env("NODE_NAME", "n").env("LINKWISE_DRA_GPUS", gpus).envs(self.cluster.variables());
        command.env("LINKWISE_SYSFS", root.join("sys")).env("HWLOC_SYNTHETIC", "pack:1 numa:1 pu:1");
        command.env("LINKWISE_NVML_LIBRARY", root.join("none.so"));
        command.args(["doctor", "--format", "json", "--root"]).arg(root);
        command.arg("--kubelet-socket").arg(root.join("kubelet.sock"));
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// A check's findings: status, and text with advice.
    async fn findings(&self, check: &str, gpus: &str) -> Vec<(String, String)> {
        of_check(&report(&mut self.program(gpus)).await, check)
    }

    /// Asserts that a check has a finding with this status and text part while all GPUs go through DRA.
    async fn assert_finding(&self, check: &str, status: &str, part: &str) {
        let found = self.findings(check, "all").await;
        assert!(found.iter().any(|(its, what)| its == status && what.contains(part)), "{part}: {found:#?}");
    }
}

/// The findings of a check in a report: status, and text with advice.
fn of_check(report: &Value, check: &str) -> Vec<(String, String)> {
    let findings = report["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == check);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    findings.map(|it| (text(&it["status"]), format!("{} -> {}", text(&it["what"]), text(&it["advice"])))).collect()
}

/// Runs the doctor; returns its whole report.
async fn report(program: &mut Command) -> Value {
    let output = within(program.output()).await.unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

fn put(cluster: &Cluster, manager: &str, namespace: &str, name: &str) {
    let key = ResourceType::NODE_FEATURES.key(Some(namespace), name);
    cluster.server.put(manager, &key, json!({"spec": {"labels": {"a": "1"}}}));
}

#[tokio::test]
async fn node_features_left_by_another_program_are_named() {
    let host = Host::new().await;
    assert_eq!(host.findings("labels", "none").await, []);
    put(&host.cluster, "linkwise", "gpu", "nvidia-features-for-n");
    put(&host.cluster, "gpu-feature-discovery", "gpu-operator", "nvidia-features-for-n");
    put(&host.cluster, "gpu-feature-discovery", "gpu-operator", "nvidia-features-for-m");
    let found = host.findings("labels", "none").await;
    let [(ok, ours), (warning, left)] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((ok.as_str(), ours.as_str()), ("ok", "NodeFeature gpu/nvidia-features-for-n is linkwise's -> "));
    assert_eq!(warning, "warning");
    for part in ["gpu-operator/nvidia-features-for-n was written by 'gpu-feature-discovery'", "kubectl -n gpu-operator"]
    {
        assert!(left.contains(part), "{left}");
    }
}

#[tokio::test]
async fn unlistable_node_features_are_no_failure() {
    let host = Host::new().await;
    let forbidden = Answer::Refusal(403, "nodefeatures is forbidden", None);
    host.cluster.server.fail(Fault::of("GET", "nodefeatures", usize::MAX, forbidden));
    let found = host.findings("labels", "none").await;
    let [(skipped, why)] = found.as_slice() else { panic!("{found:?}") };
    assert!(skipped == "skipped" && why.contains("forbidden") && why.contains("kubectl get nodefeatures"), "{why}");
    // Without a token the doctor reports the missing token, and sends no request.
    std::fs::remove_file(host.cluster.folder().join("token")).unwrap();
    let before = host.cluster.server.requests().len();
    let found = host.findings("labels", "none").await;
    assert!(found.iter().any(|(status, why)| status == "skipped" && why.contains("token")), "{found:?}");
    assert_eq!(host.cluster.server.requests().len(), before);
}

#[tokio::test]
async fn missing_class_and_foreign_slices_of_dra_are_named() {
    let host = Host::new().await;
    assert_eq!(host.findings("DRA", "none").await, []);
    let requests_before = host.cluster.server.requests().len();
    host.assert_finding("DRA", "warning", "no DeviceClass gpu.nvidia.com").await;
    host.assert_finding("DRA", "failed", "no ResourceSlice of gpu.nvidia.com").await;
    let expression = "device.driver == 'gpu.nvidia.com'";
    let class = json!({"spec": {"selectors": [{"cel": {"expression": expression}}]}});
    host.cluster.server.put("kubectl", &ResourceType::DEVICE_CLASSES.key(None, "gpu.nvidia.com"), class);
    for (name, manager, node) in [("ours", "linkwise", "n"), ("theirs", "gpu-kubelet-plugin", "n"), ("far", "x", "m")] {
        let pool = json!({"name": name, "generation": 1, "resourceSliceCount": 1});
        let spec = json!({"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": []});
        host.cluster.server.put(manager, &ResourceType::RESOURCE_SLICES.key(None, name), json!({ "spec": spec }));
    }
    host.assert_finding("DRA", "ok", "there is a DeviceClass gpu.nvidia.com").await;
    host.assert_finding("DRA", "ok", "ResourceSlice ours is linkwise's").await;
    host.assert_finding("DRA", "failed", "ResourceSlice theirs was written by 'gpu-kubelet-plugin'").await;
    let found = host.findings("DRA", "all").await;
    assert!(!found.iter().any(|(_, what)| what.contains("far")), "{found:?}");
    // The doctor gets the DeviceClass by name, and lists none.
    let lists_classes = |path: &str| path.split('?').next().unwrap().ends_with("/deviceclasses");
    assert!(!host.cluster.server.requests()[requests_before..].iter().any(|request| lists_classes(&request.uri)));
    let forbidden = Answer::Refusal(403, "deviceclasses is forbidden", None);
    host.cluster.server.fail(Fault::of("GET", "deviceclasses", 1, forbidden));
    host.assert_finding("DRA", "skipped", "deviceclasses is forbidden").await;
}

#[tokio::test]
async fn missing_policy_for_unchanged_pods_is_named() {
    let host = Host::new().await;
    let kind = "mutatingadmissionpolicies";
    for (code, message, part) in [
        (404, "the server could not find the requested resource", "has no MutatingAdmissionPolicies"),
        (403, "mutatingadmissionpolicies is forbidden", "cannot read"),
    ] {
        host.cluster.server.fail(Fault::of("GET", kind, 1, Answer::Refusal(code, message, None)));
        host.assert_finding("DRA", "skipped", part).await;
    }
    host.assert_finding("DRA", "skipped", "there is no MutatingAdmissionPolicy linkwise-unchanged-pods").await;
    let name = "linkwise-unchanged-pods";
    host.cluster.server.put("kubectl", &ResourceType::MUTATING_ADMISSION_POLICIES.key(None, name), json!({}));
    host.assert_finding("DRA", "warning", "linkwise-unchanged-pods has no binding").await;
    host.cluster.server.put("kubectl", &ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS.key(None, name), json!({}));
    host.assert_finding("DRA", "ok", "linkwise-unchanged-pods makes claims of nvidia.com/gpu: N").await;
    // The doctor reads only this policy, by name.
    let requests = host.cluster.server.requests();
    let others = requests.iter().filter(|it| it.uri.contains(kind) && !it.uri.contains(name));
    assert_eq!(others.count(), 0, "{requests:?}");
}

#[tokio::test]
async fn resource_of_both_doors_or_an_old_plugin_is_named() {
    let host = Host::new().await;
    let class = json!({"spec": {"extendedResourceName": "nvidia.com/gpu"}});
    host.cluster.server.put("kubectl", &ResourceType::DEVICE_CLASSES.key(None, "gpu.nvidia.com"), class);
    std::fs::create_dir_all(host.root.path().join("var/lib/kubelet")).unwrap();
    let settings = host.root.path().join("var/lib/kubelet/config.yaml");
    let policy = |name: &str| std::fs::write(&settings, format!("topologyManagerPolicy: {name}\n")).unwrap();
    policy("single-numa-node");
    let assert_for_node = async |allocatable: Value, capacity: Value, status: &str, part: &str| {
        let node = json!({"status": {"allocatable": allocatable, "capacity": capacity}});
        host.cluster.server.put("kubelet", &node_key("n"), node);
        host.assert_finding("DRA", status, part).await;
    };
    let gpus = |count: &str| json!({"nvidia.com/gpu": count});
    let both = "nvidia.com/gpu is a resource of the device plugin here and of the DeviceClass";
    assert_for_node(gpus("3"), gpus("8"), "warning", both).await;
    assert_for_node(gpus("0"), gpus("8"), "warning", "policy single-numa-node").await;
    policy("none");
    assert_for_node(gpus("0"), gpus("8"), "ok", "still remembers a device plugin").await;
    assert_for_node(gpus("0"), gpus("0"), "ok", "through the DeviceClass gpu.nvidia.com").await;
    assert_for_node(json!({}), json!({}), "ok", "through the DeviceClass gpu.nvidia.com").await;
    let forbidden = Answer::Refusal(403, "nodes is forbidden", None);
    host.cluster.server.fail(Fault::of("GET", "/nodes/n", 1, forbidden));
    assert_for_node(json!({}), json!({}), "skipped", "nodes is forbidden").await;
}

#[tokio::test]
async fn kubelet_before_1_26_is_named() {
    let host = Host::new().await;
    for (version, is_old) in [("v1.25.16-gke.1", true), ("v1.26.0", false), ("v1.36.2+k3s1", false), ("x", false)] {
        let node = json!({"status": {"nodeInfo": {"kubeletVersion": version}}});
        host.cluster.server.put("kubelet", &node_key("n"), node);
        let found = host.findings("kubelet", "none").await;
        let is_named = found.iter().any(|(status, what)| status == "failed" && what.contains("Kubernetes 1.26"));
        assert_eq!(is_named, is_old, "{version}: {found:#?}");
    }
}

#[tokio::test]
async fn each_check_is_documented() {
    let host = Host::new().await;
    let report = report(&mut host.program("all")).await;
    let documented = include_str!("../../docs/operations.md");
    let checks = report["findings"].as_array().unwrap().iter().map(|finding| finding["check"].as_str().unwrap());
    let checks: std::collections::BTreeSet<&str> = checks.collect();
    for check in &checks {
        assert!(documented.contains(&format!("\n| {check} | ")), "{check}");
    }
    assert!(checks.contains("DRA") && checks.len() > 5, "{checks:?}");
}

#[tokio::test]
async fn missing_right_to_write_events_is_named() {
    let host = Host::new().await;
    let found = async || {
        let mut program = host.program("none");
        of_check(&report(program.env("LINKWISE_EVENTS", "true")).await, "events")
    };
    // Without events in the configuration the doctor does not check this right.
    assert_eq!(host.findings("events", "none").await, []);
    assert_eq!(host.cluster.count("POST", "selfsubjectaccessreviews"), 0);
    assert_eq!(found().await, [("ok".to_owned(), "linkwise may write events about pods -> ".to_owned())]);
    host.cluster.server.forbid(&[("create", "events")]);
    let missing = found().await;
    let [(warning, what)] = missing.as_slice() else { panic!("{missing:?}") };
    let part = "no right to create events: no pod";
    assert!(warning == "warning" && what.contains(part) && what.contains("overlays/events"), "{what}");
    host.cluster.server.fail(Fault::of("POST", "selfsubjectaccessreviews", 1, Answer::Refusal(500, "broken", None)));
    let skipped = found().await;
    let (status, what) = &skipped[0];
    assert!(status == "skipped" && what.contains("kubectl auth can-i create events"), "{skipped:?}");
    std::fs::remove_file(host.cluster.folder().join("token")).unwrap();
    let without_token = found().await;
    let (status, what) = &without_token[0];
    assert!(status == "skipped" && what.contains("token"), "{without_token:?}");
}
