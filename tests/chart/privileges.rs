//! Tests of each program's rights: least privileges by default, more only if a value needs them. The golden files have
//! the rules of the roles and the tokens.

use std::collections::BTreeSet;

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use serde_json::{Value, json};

use crate::chart::helm::{Helm, containers, daemon_sets};

/// The privileged containers: the MPS daemon mounts, sets compute modes and runs servers for other users.
const PRIVILEGED: [&str; 2] = ["mps-control-daemon-mounts", "mps-control-daemon-ctr"];

fn names(containers: &[&Value], holds: impl Fn(&Value) -> bool) -> BTreeSet<String> {
    containers.iter().filter(|c| holds(c)).map(|c| c["name"].as_str().unwrap().to_owned()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Checks that exactly `admins` add SYS_ADMIN, and that each unprivileged container drops all capabilities.
fn check(objects: &[Value], values: &[&str], admins: &[&str]) {
    let all: Vec<&Value> = daemon_sets(objects).flat_map(containers).collect();
    let security = |container: &Value| container["securityContext"].clone();
    let privileged = names(&all, |container| security(container)["privileged"] == true);
    assert!(privileged.is_subset(&set(&PRIVILEGED)), "{values:?}: {privileged:?}");
    let admin = names(&all, |container| security(container)["capabilities"]["add"] == json!(["SYS_ADMIN"]));
    assert_eq!(admin, set(admins), "{values:?}");
    for container in all {
        let (name, security) = (container["name"].as_str().unwrap(), security(container));
        assert_eq!(security["readOnlyRootFilesystem"], true, "{values:?}: {name}");
        if privileged.contains(name) {
            continue;
        }
        assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{values:?}: {name}");
        // The API server refuses SYS_ADMIN without the right to gain privileges.
        assert_eq!(security["allowPrivilegeEscalation"], admin.contains(name), "{values:?}: {name}");
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn only_mps_is_privileged_and_sys_admin_needs_a_value() {
    let (plugin, both) = ("nvidia-device-plugin-ctr", ["nvidia-device-plugin-ctr", "gpu-feature-discovery-ctr"]);
    let two = ["config.map.a=flags: {migStrategy: mixed}", "config.map.default=flags: {migStrategy: none}"];
    for (values, admins) in [
        (&[][..], &[][..]),
        (&["gfd.enabled=true"], &[]),
        (&["compatWithCPUManager=true"], &[]),
        (&["migStrategy=none"], &[]),
        (&["deviceListStrategy=envvar\\,cdi-cri"], &[]),
        (&["migStrategy=mixed"], &[plugin]),
        (&["migStrategy=single", "gfd.enabled=true"], &both),
        (&["deviceListStrategy=volume-mounts"], &[plugin]),
        (&["deviceListStrategy=envvar\\,volume-mounts", "gfd.enabled=true"], &both),
        (&["config.map.default=version: v1", "gfd.enabled=true"], &[]),
        (&["config.map.default=flags: {plugin: {deviceListStrategy: [volume-mounts]}}"], &[plugin]),
        (&["config.map.default=flags: {plugin: {deviceListStrategy: volume-mounts}}"], &[plugin]),
        // A file for some nodes changes the pods of all nodes. A value of the chart overrides each file.
        (&two, &[plugin]),
        (&[two[0], two[1], "migStrategy=none"], &[]),
        (&["config.name=external", "gfd.enabled=true"], &both),
        (&["config.name=external", "migStrategy=none"], &[plugin]),
        (&["config.name=external", "migStrategy=none", "deviceListStrategy=envvar"], &[]),
        (&["dra.enabled=true", "gfd.enabled=true"], &[]),
        (&["dra.enabled=true", "dra.dynamicMig=true", "dra.migRights=true", "gfd.enabled=true"], &[plugin]),
    ] {
        check(&Helm::found().objects(values), values, admins);
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn given_security_context_replaces_ours() {
    let values =
        ["securityContext.privileged=true", "gfd.enabled=true", "gfd.securityContext.runAsUser=0", "config.name=x"];
    let objects = Helm::found().objects(&values);
    let all: Vec<&Value> = daemon_sets(&objects).flat_map(containers).collect();
    let of = |name: &str| all.iter().find(|container| container["name"] == name).unwrap()["securityContext"].clone();
    for container in ["nvidia-device-plugin-ctr", "nvidia-device-plugin-sidecar"] {
        assert_eq!(of(container), json!({"privileged": true}), "{container}");
    }
    for container in ["gpu-feature-discovery-ctr", "gpu-feature-discovery-sidecar"] {
        assert_eq!(of(container), json!({"runAsUser": 0}), "{container}");
    }
    for container in ["nvidia-device-plugin-init", "gpu-feature-discovery-init"] {
        assert_eq!(of(container)["capabilities"], json!({"drop": ["ALL"]}), "{container}");
    }
}

/// A server with the chart's policies. Its tokens: `ours` and `old` of the chart's ServiceAccount, `other` of another
/// user; all but `old` name the node `n`.
async fn server(values: &[&str], other: &str) -> ApiServerBox {
    let server = ApiServerBox::start(&ResourceType::ALL).await;
    let objects = Helm::found().objects(values);
    for resource in [ResourceType::VALIDATING_ADMISSION_POLICIES, ResourceType::VALIDATING_ADMISSION_POLICY_BINDINGS] {
        for object in objects.iter().filter(|object| object["kind"] == resource.kind) {
            let key = resource.key(None, object["metadata"]["name"].as_str().unwrap());
            server.create("helm", &key, object.clone()).unwrap();
        }
    }
    let account = objects.iter().find(|object| object["kind"] == "ServiceAccount").unwrap();
    let name = |of: &str| account["metadata"][of].as_str().unwrap();
    let username = format!("system:serviceaccount:{}:{}", name("namespace"), name("name"));
    let extra = json!({"authentication.kubernetes.io/node-name": ["n"]});
    server.name_user("ours", json!({"username": username, "extra": extra}));
    server.name_user("old", json!({"username": username, "extra": {}}));
    server.name_user("other", json!({"username": other, "extra": extra}));
    server
}

/// Asserts that a request was refused with `why` in the message; without `why`, that it was not refused.
fn assert_answer(answer: Result<Value, Value>, why: Option<&str>, request: &str) {
    let refusal = answer.err().map(|status| status["message"].as_str().unwrap().to_owned());
    let is_expected = match (&refusal, why) {
        (Some(refusal), Some(why)) => refusal.contains(why),
        _ => refusal.is_none() && why.is_none(),
    };
    assert!(is_expected, "{request}: {refusal:?}");
}

/// A policy limits the writes, because RBAC does not know the node of a token.
#[tokio::test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
async fn gpu_feature_discovery_labels_its_own_node_only() {
    let server = server(&["gfd.enabled=true"], "nfd").await;
    for (token, object, node, why) in [
        ("ours", "nvidia-features-for-n", "n", None),
        ("ours", "nvidia-features-for-m", "m", Some("may not write the NodeFeature 'nvidia-features-for-m'")),
        ("ours", "nvidia-features-for-n", "m", Some("may not label node 'm'")),
        ("old", "nvidia-features-for-n", "n", Some("the token names no node")),
        ("other", "nvidia-features-for-m", "m", None),
    ] {
        let key = ResourceType::NODE_FEATURES.key(Some("gpu"), object);
        let labels = json!({"nfd.node.kubernetes.io/node-name": node});
        let feature = json!({"metadata": {"name": object, "labels": labels}, "spec": {"labels": {}}});
        let made = server.create_as(token, &key, feature);
        server.remove(&key);
        assert_answer(made, why, &format!("{token} {object} {node}"));
    }
}

/// The policies for nodes let some patches through, and refuse the others with these messages.
#[tokio::test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
async fn plugin_may_patch_only_its_part_of_its_node() {
    let values = ["nodeCondition.enabled=true", "nodeCondition.startupTaints={a.b/c}"];
    let server = server(&values, "kubelet").await;
    let ready = json!({"type": "Ready", "status": "True"});
    let (ours, other) =
        (json!({"key": "a.b/c", "effect": "NoSchedule"}), json!({"key": "other", "effect": "NoExecute"}));
    let node = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"taints": [ours, other], "podCIDR": "10.0.0.0/24"},
                      "status": {"conditions": [ready], "capacity": {"cpu": "8"}}});
    let own = json!({"type": "linkwise.dev/GPUsReady", "status": "True"});
    let (sick, not_ours) = (json!({"type": "Ready", "status": "False"}), "no condition but linkwise.dev/GPUsReady");
    let new = json!({"key": "x", "effect": "NoExecute"});
    for (token, name, path, change, why) in [
        ("ours", "n", "/status", json!({"status": {"conditions": [ready, own]}}), None),
        ("ours", "n", "/status", json!({"status": {"conditions": [sick, own]}}), Some(not_ours)),
        ("ours", "n", "/status", json!({"status": {"conditions": [own]}}), Some("no condition but")),
        ("ours", "n", "/status", json!({"status": {"capacity": {"cpu": "9"}}}), Some("status.capacity")),
        ("ours", "n", "/status", json!({"status": {"allocatable": {"cpu": "9"}}}), Some("status.allocatable")),
        ("ours", "n", "/status", json!({"metadata": {"labels": {"a": "c"}}}), Some("the labels")),
        ("ours", "m", "/status", json!({"status": {"conditions": [ready, own]}}), Some("may not write node 'm'")),
        ("other", "m", "/status", json!({"status": {"conditions": [sick]}}), None),
        ("ours", "n", "", json!({"spec": {"taints": [other]}}), None),
        ("ours", "n", "", json!({"spec": {"taints": [ours]}}), Some("may only remove the taints a.b/c")),
        ("ours", "n", "", json!({"spec": {"taints": [other, ours, new]}}), Some("may only remove")),
        ("ours", "n", "", json!({"spec": {"unschedulable": true}}), Some("spec.unschedulable")),
        ("ours", "n", "", json!({"metadata": {"annotations": {"a": "b"}}}), Some("the annotations")),
        ("ours", "m", "", json!({"spec": {"taints": [other]}}), Some("may not write node 'm'")),
    ] {
        let key = ResourceType::NODES.key(None, name);
        server.put("kubelet", &key, node.clone());
        let patched = server.patch_as(token, &key, path == "/status", &change);
        assert_answer(patched, why, &format!("{token} {name} {path} {change}"));
    }
}
