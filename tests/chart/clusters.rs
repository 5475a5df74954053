//! Tests of the chart's values for OpenShift, quotas and network policies, of `kubectl exec` and of `helm test`.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::chart::helm::{Helm, POD, daemon_sets, list, object, repository};

const NAME: &str = "nvdp-nvidia-device-plugin";

fn test_pod(objects: &[Value]) -> &Value {
    object(objects, "Pod", &format!("{NAME}-test"))
}

/// The chart's SCC is that of the overlay `openshift`, except for its metadata and a volume type that tokens need.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn openshift_constraints_are_those_of_the_overlay() {
    let text = fs::read_to_string(repository("manifests/overlays/openshift/scc.yaml")).unwrap();
    let mut expected: Value = serde_saphyr::from_str(&text).unwrap();
    for (values, volumes) in [
        (&["openshift.enabled=true"][..], &["configMap", "emptyDir", "hostPath"][..]),
        (&["openshift.enabled=true", "gfd.enabled=true"], &["configMap", "emptyDir", "hostPath", "projected"]),
        (
            &["openshift.enabled=true", "nodeCondition.enabled=true"],
            &["configMap", "emptyDir", "hostPath", "projected"],
        ),
        (&["openshift.enabled=true", "dra.enabled=true"], &["configMap", "emptyDir", "hostPath", "projected"]),
        (&["openshift.enabled=true", "config.map.a=version: v1"], &["configMap", "emptyDir", "hostPath", "projected"]),
    ] {
        let objects = Helm::found().objects(values);
        let mut scc = object(&objects, "SecurityContextConstraints", NAME).clone();
        expected["volumes"] = json!(volumes);
        expected["metadata"] = scc["metadata"].take();
        scc["metadata"] = expected["metadata"].clone();
        assert_eq!(scc, expected, "{values:?}");
        // The pods' ServiceAccount may use the SCC.
        let role = object(&objects, "Role", &format!("{NAME}-scc"));
        assert_eq!(role["rules"][0]["resourceNames"], json!([NAME]));
        let binding = object(&objects, "RoleBinding", &format!("{NAME}-scc"));
        assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
        let account = &binding["subjects"][0]["name"];
        let options = &scc["seLinuxContext"]["seLinuxOptions"];
        let pods = daemon_sets(&objects).map(|set| (&set["metadata"]["name"], &set["spec"]["template"]));
        let pods = pods.chain([(&Value::Null, test_pod(&objects))]);
        for (name, pod) in pods.filter(|(name, _)| !name.as_str().unwrap_or("").ends_with("mps-control-daemon")) {
            assert_eq!(pod["metadata"]["annotations"]["openshift.io/required-scc"], NAME, "{name}");
            assert_eq!(&pod["spec"]["securityContext"]["seLinuxOptions"], options, "{name}");
            assert_eq!(&pod["spec"]["serviceAccountName"], account, "{name}");
            let kinds = list(pod, "/spec/volumes").into_iter().flat_map(|volume| volume.as_object().unwrap().keys());
            for kind in kinds.filter(|kind| *kind != "name") {
                assert!(volumes.contains(&kind.as_str()), "{values:?}: {name}: {kind}");
            }
        }
        // The privileged MPS daemon gets no SELinux options.
        let daemon = object(&objects, "DaemonSet", &format!("{NAME}-mps-control-daemon"));
        assert_eq!(daemon.pointer(&format!("{POD}/securityContext/seLinuxOptions")), None);
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn quota_admits_the_priority_of_the_pods() {
    let objects = Helm::found().objects(&["resourceQuota.enabled=true", "priorityClassName=system-cluster-critical"]);
    let quota = object(&objects, "ResourceQuota", &format!("{NAME}-priority"));
    let scope = &quota["spec"]["scopeSelector"]["matchExpressions"][0];
    for set in daemon_sets(&objects) {
        assert_eq!(set["metadata"]["namespace"], quota["metadata"]["namespace"]);
        assert_eq!(json!([set.pointer(&format!("{POD}/priorityClassName"))]), scope["values"]);
    }
}

/// The policy is off by default. It opens the ports of the plugin's pods to the listed peers only.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn network_policy_opens_the_metrics_port_to_its_peers() {
    let helm = Helm::found();
    let has_policy = |objects: &[Value]| objects.iter().any(|one| one["kind"] == "NetworkPolicy");
    assert!(!has_policy(&helm.objects(&[])));
    let on = "metrics.networkPolicy.enabled=true";
    let objects = helm.objects(&[on]);
    let policy = object(&objects, "NetworkPolicy", NAME);
    assert_eq!((&policy["spec"]["policyTypes"], &policy["spec"]["ingress"]), (&json!(["Ingress"]), &json!([])));
    let peer = "metrics.networkPolicy.from[0].namespaceSelector.matchLabels.team=monitoring";
    let objects = helm.objects(&[on, peer, "metrics.port=9500"]);
    let policy = object(&objects, "NetworkPolicy", NAME);
    let [rule] = list(policy, "/spec/ingress")[..] else { panic!("{policy}") };
    assert_eq!(rule["from"], json!([{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]));
    let plugin = object(&objects, "DaemonSet", NAME);
    let containers = list(plugin, &format!("{POD}/containers"));
    let ports = containers.iter().flat_map(|container| list(container, "/ports"));
    let mut ports: Vec<u64> = ports.map(|port| port["containerPort"].as_u64().unwrap()).collect();
    ports.sort_unstable();
    let opened: Vec<u64> = list(rule, "/ports").iter().map(|port| port["port"].as_u64().unwrap()).collect();
    assert_eq!(opened, ports);
    let labels = &plugin["spec"]["template"]["metadata"]["labels"];
    for (key, value) in policy["spec"]["podSelector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(&labels[key], value, "{key}");
    }
}

/// `kubectl exec POD -- linkwise doctor` goes to the program, not to a sidecar of the pod.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn kubectl_exec_goes_to_the_program() {
    for values in [&["gfd.enabled=true"][..], &["config.name=x", "gfd.enabled=true"]] {
        for set in daemon_sets(&Helm::found().objects(values)) {
            let annotation = "/spec/template/metadata/annotations/kubectl.kubernetes.io~1default-container";
            let name = set.pointer(annotation).and_then(Value::as_str).unwrap();
            let all = list(set, &format!("{POD}/containers"));
            assert!(name.ends_with("-ctr") && all.iter().any(|container| container["name"] == name), "{name}");
        }
    }
}

/// If a DaemonSet selected the pod, its controller would adopt the pod, and delete or count it.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn test_pod_belongs_to_no_daemonset() {
    let helm = Helm::found();
    for values in [&["gfd.enabled=true"][..], &["selectorLabelsOverride.app=gpu"]] {
        let objects = helm.objects(values);
        let labels = test_pod(&objects)["metadata"]["labels"].as_object().unwrap();
        for set in daemon_sets(&objects) {
            let selector = set["spec"]["selector"]["matchLabels"].as_object().unwrap();
            let selected = selector.iter().all(|(key, value)| labels.get(key) == Some(value));
            assert!(!selected, "{values:?}: {}", set["metadata"]["name"]);
        }
        assert_eq!(test_pod(&objects)["metadata"]["annotations"]["helm.sh/hook"], "test");
    }
    let none = helm.objects(&["devicePlugin.enabled=false", "gfd.enabled=true"]);
    assert!(none.iter().all(|object| object["kind"] != "Pod"));
}

/// The command ends before the pod, and the pod before helm (5 minutes). The pod mounts the command's default paths.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn test_pod_runs_a_command_that_ends() {
    let objects = Helm::found().objects(&["dra.enabled=true", "kubeletRootDir=/var/lib/k0s/kubelet"]);
    let pod = test_pod(&objects);
    let command: Vec<&str> =
        list(pod, "/spec/containers/0/command").into_iter().map(|word| word.as_str().unwrap()).collect();
    let [program, subcommand, "--timeout", seconds] = command[..] else { panic!("{command:?}") };
    assert_eq!((program, subcommand), ("linkwise", "wait"));
    let deadline = pod["spec"]["activeDeadlineSeconds"].as_u64().unwrap();
    assert!(seconds.parse::<u64>().unwrap() < deadline && deadline < 300);
    let help = Command::new(env!("CARGO_BIN_EXE_linkwise")).args([subcommand, "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let mounts = list(pod, "/spec/containers/0/volumeMounts");
    assert_eq!(mounts.len(), 3);
    for mount in mounts {
        let path = mount["mountPath"].as_str().unwrap();
        assert!(help.contains(&format!("[default: {path}")), "{path} is not a default in {help}");
        let host = list(pod, "/spec/volumes").into_iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        let host = host["hostPath"]["path"].as_str().unwrap();
        assert_eq!(host.replace("/var/lib/k0s/kubelet", "/var/lib/kubelet"), path);
    }
}
