//! The manifests parse, the files that they name exist, and linkwise accepts their settings. kubectl or kustomize, if
//! installed, renders overlays, base and monitoring, which are checked as the cluster would get them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::commands::kustomize::rendered;
use crate::dra::published::golden::{linkwise, run};
use node_settings::{SETTINGS, rights};

use crate::node_settings;

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn base() -> Value {
    read(&manifests().join("base/daemonset.yaml"))
}

fn patch(overlay: &str) -> Value {
    read(&manifests().join("overlays").join(overlay).join("daemonset.yaml"))
}

fn overlays() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(manifests().join("overlays")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

fn list<'a>(value: &'a Value, pointer: &str) -> Vec<&'a Value> {
    value.pointer(pointer).and_then(Value::as_array).map(|list| list.iter().collect()).unwrap_or_default()
}

fn names(value: &Value, pointer: &str) -> BTreeSet<String> {
    list(value, pointer).into_iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
}

const POD: &str = "/spec/template/spec";

#[test]
fn kustomizations_name_files_that_are_there() {
    let dra = ["dra/templates", "dra/templates-exact", "dra/unchanged-pods", "dra/several-claims"];
    let others = ["base", "monitoring", "monitoring/grafana", "mps-control-daemon"].into_iter().chain(dra);
    for folder in overlays().into_iter().chain(others.map(|folder| manifests().join(folder))) {
        let kustomization = read(&folder.join("kustomization.yaml"));
        assert_eq!(kustomization["kind"], "Kustomization");
        for resource in list(&kustomization, "/resources") {
            let path = folder.join(resource.as_str().unwrap());
            assert!(path.exists(), "{}", path.display());
        }
        for patch in list(&kustomization, "/patches") {
            assert!(folder.join(patch["path"].as_str().unwrap()).is_file(), "{patch}");
        }
    }
}

#[test]
fn overlays_change_what_the_base_has() {
    let base = base();
    for folder in overlays() {
        let kustomization = read(&folder.join("kustomization.yaml"));
        for patch in list(&kustomization, "/patches") {
            let text = read(&folder.join(patch["path"].as_str().unwrap()));
            // kustomize would refuse or lose a patch without a target, or one whose target has another kind or name.
            let (kind, name) = (&base["kind"], &base["metadata"]["name"]);
            assert_eq!((&patch["target"]["kind"], &patch["target"]["name"]), (kind, name), "{}", folder.display());
            assert_eq!((&text["kind"], &text["metadata"]["name"]), (kind, name), "{}", folder.display());
            // A container with another name would be added as a second one.
            let containers = format!("{POD}/containers");
            assert!(names(&text, &containers).is_subset(&names(&base, &containers)), "{}", folder.display());
            check_references(&folder, &[&base, &text]);
        }
    }
    check_references(&manifests().join("base"), &[&base]);
}

/// A new pod takes over from the old one while both run. So they cannot share a port of the host, and each must know
/// its own UID.
#[test]
fn pods_are_replaced_without_a_gap() {
    let base = base();
    let strategy = json!({"maxSurge": 1, "maxUnavailable": 0});
    assert_eq!(base["spec"]["updateStrategy"]["rollingUpdate"], strategy);
    assert_eq!(base.pointer(&format!("{POD}/hostNetwork")), None);
    let uid = json!({"name": "LINKWISE_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}});
    assert!(list(&base, &format!("{POD}/containers/0/env")).contains(&&uid));
    for folder in overlays() {
        let patch = read(&folder.join("daemonset.yaml"));
        assert_eq!(patch.pointer(&format!("{POD}/hostNetwork")), None, "{}: see updateStrategy", folder.display());
    }
}

/// Checks that every mount has a volume, every volume a mount, and every probe a named port, over all `parts`, which
/// kustomize merges into one DaemonSet.
fn check_references(folder: &Path, parts: &[&Value]) {
    let all = |pointer: &str| parts.iter().flat_map(|part| names(part, pointer)).collect::<BTreeSet<String>>();
    let containers = |kind: &str| {
        let count = parts.iter().map(|part| list(part, &format!("{POD}/{kind}")).len()).max().unwrap();
        (0..count).map(|number| format!("{POD}/{kind}/{number}")).collect::<Vec<_>>()
    };
    let containers: Vec<String> = [containers("initContainers"), containers("containers")].concat();
    let mounts = containers.iter().flat_map(|container| all(&format!("{container}/volumeMounts")));
    assert_eq!(mounts.collect::<BTreeSet<_>>(), all(&format!("{POD}/volumes")), "{}", folder.display());
    let ports = all(&format!("{POD}/containers/0/ports"));
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        for part in parts {
            if let Some(port) = part.pointer(&format!("{POD}/containers/0/{probe}/httpGet/port")) {
                assert!(ports.contains(port.as_str().unwrap()), "{}: {probe}: {port}", folder.display());
            }
        }
    }
}

/// Each pod gets SELinux categories of its own by default, and a file has those of the pod that made it.
#[test]
fn selinux_overlay_lets_next_pod_read_kept_files() {
    let patch = patch("selinux");
    let options = patch.pointer(&format!("{POD}/containers/0/securityContext/seLinuxOptions")).unwrap();
    assert_eq!(*options, json!({"type": "container_device_plugin_t", "level": "s0"}));
}

#[test]
fn openshift_constraints_are_what_the_daemonset_needs() {
    let folder = manifests().join("overlays/openshift");
    let (base, patch) = (base(), patch("openshift"));
    let [scc, role, binding] = ["scc", "role", "rolebinding"].map(|name| read(&folder.join(format!("{name}.yaml"))));
    let security = |of: &Value, pointer: &str| {
        of.pointer(&format!("{POD}/containers/0/securityContext{pointer}")).cloned().unwrap_or_default()
    };
    assert_eq!(scc["runAsUser"], json!({"type": "MustRunAs", "uid": security(&base, "/runAsUser")}));
    assert_eq!(scc["seLinuxContext"]["seLinuxOptions"], security(&patch, "/seLinuxOptions"));
    assert_eq!(scc["requiredDropCapabilities"], security(&base, "/capabilities/drop"));
    assert_eq!(scc["readOnlyRootFilesystem"], security(&base, "/readOnlyRootFilesystem"));
    assert_eq!(base.pointer(&format!("{POD}/securityContext/seccompProfile/type")).unwrap(), "RuntimeDefault");
    assert_eq!(scc["seccompProfiles"], json!(["runtime/default"]));
    let volumes = list(&base, &format!("{POD}/volumes"));
    let kinds = volumes.iter().flat_map(|volume| volume.as_object().unwrap().keys()).filter(|key| *key != "name");
    let needed: BTreeSet<&str> = kinds.map(String::as_str).chain(["configMap"]).collect();
    assert_eq!(list(&scc, "/volumes").into_iter().map(|kind| kind.as_str().unwrap()).collect::<BTreeSet<_>>(), needed);
    for (name, value) in scc.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("allow")) {
        let is_needed = name == "allowHostDirVolumePlugin";
        assert!(value.as_bool() == Some(is_needed) || *value == json!([]), "{name}: {value}");
    }
    // The pod gets these constraints through the annotation, the role and the binding.
    let name = &scc["metadata"]["name"];
    assert_eq!(patch["spec"]["template"]["metadata"]["annotations"]["openshift.io/required-scc"], *name);
    let rule = &role["rules"][0];
    assert_eq!((&rule["resourceNames"][0], &rule["verbs"]), (name, &json!(["use"])));
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["name"], base["spec"]["template"]["spec"]["serviceAccountName"]);
    assert_eq!(binding["subjects"][0]["namespace"], read(&folder.join("kustomization.yaml"))["namespace"]);
}

/// A runtime that is configured for volume mounts ignores NVIDIA_VISIBLE_DEVICES of unprivileged containers. Without
/// SYS_ADMIN linkwise itself would get no GPU from it.
#[test]
fn volume_mounts_come_with_the_right_to_see_gpus() {
    let patch = patch("volume-mounts");
    let container = patch.pointer(&format!("{POD}/containers/0")).unwrap();
    assert_eq!(container["env"][0], json!({"name": "DEVICE_LIST_STRATEGY", "value": "volume-mounts"}));
    let capabilities = json!({"add": ["SYS_ADMIN"], "drop": ["ALL"]});
    assert_eq!(container["securityContext"]["capabilities"], capabilities);
}

/// linkwise needs only these variables and SYS_ADMIN to make MIG devices.
#[test]
fn mig_overlay_adds_exactly_the_rights_it_needs() {
    let patch = patch("dra-mig");
    let container = patch.pointer(&format!("{POD}/containers/0")).unwrap();
    let env = list(container, "/env").into_iter().map(|env| (env["name"].as_str().unwrap(), env["value"].as_str()));
    let expected = ["LINKWISE_DRA_DYNAMIC_MIG", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"].into_iter();
    assert!(env.eq(expected.zip([Some("true"), Some("all"), Some("all")])));
    let security = json!({"capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]}, "allowPrivilegeEscalation": true});
    assert_eq!(container["securityContext"], security);
    assert_eq!((&container["volumeMounts"], patch.pointer(&format!("{POD}/volumes"))), (&Value::Null, None));
}

#[test]
fn mps_control_daemon_has_the_hosts_process_ids() {
    let daemon = read(&manifests().join("mps-control-daemon/daemonset.yaml"));
    assert_eq!(daemon.pointer(&format!("{POD}/hostPID")), Some(&Value::Bool(true)));
}

/// Under the MPS root linkwise writes only its orders, which the privileged mps-control-daemon reads.
#[test]
fn mps_for_claims_lets_linkwise_write_its_orders_only() {
    let patch = patch("dra-mps");
    let daemon = read(&manifests().join("mps-control-daemon/daemonset.yaml"));
    let host = |of: &Value, mount: &Value| {
        let volumes = list(of, &format!("{POD}/volumes")).into_iter().cloned().collect::<Vec<_>>();
        volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap()["hostPath"]["path"].clone()
    };
    let mounts = |of: &Value| -> Vec<(Value, Value, bool)> {
        let mounts = list(of, &format!("{POD}/containers/0/volumeMounts")).into_iter();
        let below = mounts.filter(|mount| mount["mountPath"].as_str().unwrap().starts_with("/mps"));
        below.map(|mount| (mount["mountPath"].clone(), host(of, mount), mount["readOnly"] == true)).collect()
    };
    let (root, orders) = ("/run/nvidia/mps", "/run/nvidia/mps/.dra");
    assert_eq!(mounts(&patch), [("/mps".into(), root.into(), true), ("/mps/.dra".into(), orders.into(), false)]);
    assert_eq!(mounts(&daemon), [("/mps".into(), root.into(), false)]);
    assert_eq!(linkwise_host::mps::Layout::new("/mps").orders_folder(), Path::new("/mps/.dra"));
}

/// Checks that this binding gives the role to the base's ServiceAccount; returns the account's name.
fn check_bound(binding: &Value, role: &Value) -> String {
    let account = &read(&manifests().join("base/serviceaccount.yaml"))["metadata"]["name"];
    let (subject, of_binding) = (&binding["subjects"][0]["name"], &binding["roleRef"]["name"]);
    assert_eq!((subject, of_binding), (account, &role["metadata"]["name"]));
    account.as_str().unwrap().to_owned()
}

/// linkwise reads claims and its Node, and writes the slices of its own node.
#[test]
fn dra_has_the_least_rights_for_its_own_node() {
    let of = |name: &str| read(&manifests().join(format!("overlays/dra/{name}.yaml")));
    let role = of("clusterrole");
    let rules = list(&role, "/rules").into_iter().map(|rule| (rule["resources"][0].clone(), rule["verbs"].clone()));
    let expected = json!([
        ["resourceclaims", ["get"]],
        ["resourceslices", ["get", "list", "watch", "create", "update", "delete"]],
        ["nodes", ["get"]],
    ]);
    let rules: Vec<Value> = rules.map(|(resource, verbs)| json!([resource, verbs])).collect();
    assert_eq!(Value::from(rules), expected);
    let account = check_bound(&of("clusterrolebinding"), &role);
    let policy = of("admissionpolicy");
    // The expression accepts any namespace, because kustomize changes the account's namespace, but not this text.
    let user = format!("request.userInfo.username.matches('^system:serviceaccount:[^:]+:{account}$')");
    assert_eq!(policy["spec"]["matchConditions"][0]["expression"], user);
    let rule = &policy["spec"]["matchConstraints"]["resourceRules"][0];
    assert_eq!(rule["resources"][0], "resourceslices");
    assert_eq!(rule["operations"], json!(["CREATE", "UPDATE", "DELETE"]));
    // The chart has another account and the same rules.
    let rules = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        let rules = text.split_once("\n  variables:\n").expect("variables of a policy").1.to_owned();
        rules.split("\n---\n").next().unwrap().trim_end().to_owned()
    };
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/linkwise/templates/dra.yaml");
    assert_eq!(rules(&manifests().join("overlays/dra/admissionpolicy.yaml")), rules(&chart));
    assert_eq!(of("admissionpolicybinding")["spec"]["policyName"], policy["metadata"]["name"]);
    let patch = of("daemonset");
    assert_eq!(patch.pointer(&format!("{POD}/automountServiceAccountToken")), Some(&Value::Bool(true)));
    assert_eq!(of("deviceclass-gpu")["spec"]["extendedResourceName"], "nvidia.com/gpu");
}

#[test]
fn events_have_the_least_rights() {
    let of = |name: &str| read(&manifests().join(format!("overlays/events/{name}.yaml")));
    let (role, binding) = (of("clusterrole"), of("clusterrolebinding"));
    let events = json!({"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]});
    assert_eq!(list(&role, "/rules"), [&events]);
    check_bound(&binding, &role);
    assert_eq!(of("daemonset").pointer(&format!("{POD}/automountServiceAccountToken")), Some(&Value::Bool(true)));
}

/// The tests that switch between overlays start linkwise as the base and the overlays would.
#[test]
fn overlays_give_the_settings_that_tests_assume() {
    for setting in SETTINGS {
        let Some(folder) = setting.overlay else { continue };
        let overlay = folder.strip_prefix("overlays/").map(patch);
        let parts: Vec<Value> = [base()].into_iter().chain(overlay).collect();
        // A strategic merge joins these lists, whose items have names.
        let all = |pointer: &str| parts.iter().flat_map(|part| list(part, pointer)).cloned().collect::<Vec<Value>>();
        let of = |key: &str| Value::from(all(&format!("{POD}/containers/0/{key}")));
        let container = json!({"volumeMounts": of("volumeMounts"), "env": of("env")});
        let volumes = all(&format!("{POD}/volumes"));
        let mut tokens = parts.iter().filter_map(|part| part.pointer(&format!("{POD}/automountServiceAccountToken")));
        let token = tokens.next_back();
        let volumes: Vec<&Value> = volumes.iter().collect();
        assert_eq!(rights(&container, &volumes, token == Some(&Value::Bool(true))), setting.rights(), "{folder}");
        for (name, value) in setting.env {
            let env = container["env"].as_array().unwrap();
            assert!(env.iter().any(|env| env["name"] == *name && env["value"] == *value), "{folder}: {name}");
        }
    }
}

#[test]
#[cfg_attr(not(has_kubectl), ignore = "no kubectl or kustomize here: make tools brings it")]
fn monitoring_finds_the_pods_and_brings_dashboards() {
    let objects = rendered(&manifests().join("monitoring"));
    let kinds: BTreeSet<&str> = objects.iter().filter_map(|object| object["kind"].as_str()).collect();
    assert_eq!(kinds, BTreeSet::from(["PodMonitor", "PrometheusRule"]));
    let monitor = objects.iter().find(|object| object["kind"] == "PodMonitor").unwrap();
    let daemonset = base();
    assert_eq!(monitor["spec"]["selector"]["matchLabels"], daemonset["spec"]["template"]["metadata"]["labels"]);
    let port = &monitor["spec"]["podMetricsEndpoints"][0]["port"];
    let ports = list(&daemonset, &format!("{POD}/containers/0/ports"));
    assert!(ports.iter().any(|offered| offered["name"] == *port), "{port}");
    for dashboard in rendered(&manifests().join("monitoring/grafana")) {
        assert_eq!(dashboard["metadata"]["labels"]["grafana_dashboard"], "1");
        let (_, text) = dashboard["data"].as_object().unwrap().iter().next().unwrap();
        assert!(serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap()["panels"].is_array());
    }
}

#[test]
#[cfg_attr(not(has_kubectl), ignore = "no kubectl or kustomize here: make tools brings it")]
fn rendered_manifests_are_complete() {
    let base = rendered(&manifests().join("base"));
    for folder in overlays().into_iter().chain([manifests().join("base")]) {
        let objects = rendered(&folder);
        assert!(folder.ends_with("base") || objects != base, "{} changes nothing", folder.display());
        let of_kind = |kind: &'static str| objects.iter().filter(move |object| object["kind"] == kind);
        assert_eq!(of_kind("ServiceAccount").count(), 1, "{}", folder.display());
        let maps: BTreeSet<&str> = of_kind("ConfigMap").map(|map| map["metadata"]["name"].as_str().unwrap()).collect();
        // OpenShift's constraints do not apply in kube-system.
        let namespace = if folder.ends_with("openshift") { "linkwise" } else { "kube-system" };
        let of_the_cluster = |object: &&Value| {
            let kind = object["kind"].as_str().unwrap();
            ["Namespace", "DeviceClass"].contains(&kind)
                || kind.starts_with("Cluster")
                || kind.starts_with("Validating")
        };
        for object in objects.iter().filter(|object| !of_the_cluster(object)) {
            assert_eq!(object["metadata"]["namespace"], namespace, "{}: {}", folder.display(), object["kind"]);
        }
        let linkwise = of_kind("DaemonSet").find(|object| object["metadata"]["name"] == "linkwise").unwrap();
        assert_eq!(list(linkwise, &format!("{POD}/containers")).len(), 1, "{}", folder.display());
        for set in of_kind("DaemonSet") {
            check_references(&folder, &[set]);
            for container in ["initContainers", "containers"].iter().flat_map(|of| list(set, &format!("{POD}/{of}"))) {
                assert_eq!(container["image"], "linkwise:dev", "{}: {container}", folder.display());
                // The API server refuses a container that is privileged, or has SYS_ADMIN, but must not escalate.
                let security = &container["securityContext"];
                let privileged = security["privileged"] == true || format!("{security}").contains("SYS_ADMIN");
                let refused = privileged && security["allowPrivilegeEscalation"] == false;
                assert!(!refused, "{}: {container}", folder.display());
            }
            let volumes = list(set, &format!("{POD}/volumes"));
            for map in volumes.iter().filter_map(|volume| volume["configMap"]["name"].as_str()) {
                assert!(maps.contains(map), "{}: no ConfigMap {map}", folder.display());
            }
        }
    }
}

/// The files in the ConfigMaps of a folder: name and text.
fn configurations(folder: &Path) -> Vec<(String, String)> {
    let resources = read(&folder.join("kustomization.yaml"));
    let files = list(&resources, "/resources").into_iter().map(|file| folder.join(file.as_str().unwrap()));
    let objects = files.filter(|file| file.is_file()).map(|file| read(&file));
    let maps: Vec<Value> = objects.filter(|object| object["kind"] == "ConfigMap").collect();
    let texts = maps.iter().flat_map(|map| map["data"].as_object().unwrap());
    texts.map(|(name, text)| (name.clone(), text.as_str().unwrap().to_owned())).collect()
}

#[test]
fn linkwise_accepts_settings_of_manifests() {
    let mut files = 0;
    for folder in overlays().into_iter().chain([manifests().join("base")]) {
        let temporary = tempfile::tempdir().unwrap();
        for (name, text) in configurations(&folder) {
            let file = temporary.path().join(&name);
            std::fs::write(&file, text).unwrap();
            let checked = run(&["config", "check", file.to_str().unwrap()]);
            assert!(checked.is_ok(), "{}: {name}: {checked:?}", folder.display());
            files += 1;
        }
        // linkwise makes settings of the flags and variables of `run` and of the file that they name.
        let daemonset = read(&folder.join("daemonset.yaml"));
        let container = daemonset.pointer(&format!("{POD}/containers/0")).unwrap();
        // /config is where the ConfigMap is mounted.
        let here =
            |value: &Value| value.as_str().unwrap().replace("/config/", &format!("{}/", temporary.path().display()));
        let args = list(container, "/args").into_iter().filter(|arg| **arg != "run").map(here);
        // A variable that is a field of the pod has no value here.
        let env = list(container, "/env").into_iter().filter(|env| env["value"].is_string());
        let env = env.map(|env| (env["name"].as_str().unwrap(), here(&env["value"])));
        let show = Command::new(env!("CARGO_BIN_EXE_linkwise")).args(["config", "show"]).args(args).envs(env).output();
        let show = show.unwrap();
        assert!(show.status.success(), "{}: {}", folder.display(), String::from_utf8_lossy(&show.stderr));
    }
    assert!(files > 0);
}

#[test]
fn variables_are_those_that_linkwise_reads() {
    // The NVIDIA container runtime, not linkwise, reads these variables; `NVIDIA_` precedes each.
    const RUNTIMES: [&str; 4] = ["VISIBLE_DEVICES", "DRIVER_CAPABILITIES", "MIG_CONFIG_DEVICES", "MIG_MONITOR_DEVICES"];
    // The help breaks lines at the width of a terminal.
    let help = linkwise(&["run", "--help"]).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut seen = 0;
    for folder in overlays().into_iter().chain([manifests().join("base")]) {
        let daemonset = read(&folder.join("daemonset.yaml"));
        let all = [0, 1].map(|container| names(&daemonset, &format!("{POD}/containers/{container}/env")));
        for name in all.into_iter().flatten() {
            let in_help = |end: char| help.contains(&format!("[env: {name}{end}"));
            let of_runtime = name.strip_prefix("NVIDIA_").is_some_and(|name| RUNTIMES.contains(&name));
            let known = of_runtime || in_help('=') || in_help(']');
            assert!(known, "{}: linkwise run reads no {name}", folder.display());
            seen += 1;
        }
    }
    assert!(seen > 0);
}
