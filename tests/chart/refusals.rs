//! Tests of values that the chart refuses: helm's message names the value, and the remedy if that is not obvious.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::chart::helm::{Helm, RELEASE, object, repository, set};

/// Asserts that `helm template` refuses these values with all these texts in its message.
fn refused(helm: &Helm, values: &[&str], parts: &[&str]) {
    let message = helm.template(&set(values)).expect_err(&values.join(" "));
    for part in parts {
        assert!(message.contains(part), "{values:?}: {part:?} is not in\n{message}");
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn unknown_values_are_refused_by_name() {
    let helm = Helm::found();
    for (value, place, name) in [
        ("migStrategies=mixed", "(root)", "migStrategies"),
        ("namespace=gpu", "(root)", "namespace"),
        ("config.names=x", "config", "names"),
        ("devicePlugin.hostNetwork=true", "devicePlugin", "hostNetwork"),
        ("gfd.interval=60s", "gfd", "interval"),
        ("mps.enableHostPid=true", "mps", "enableHostPid"),
        ("cdi.enabled=true", "cdi", "enabled"),
        ("image.registry=x", "image", "registry"),
        ("resources.limit.memory=1Gi", "resources", "limit"),
        ("podMonitor.scrapeTimeout=3s", "podMonitor", "scrapeTimeout"),
        ("tolerations[0].name=x", "tolerations.0", "name"),
    ] {
        refused(&helm, &[value], &[place, name, "not allowed"]);
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn invalid_configuration_is_refused() {
    let helm = Helm::found();
    refused(&helm, &["config.default=mine"], &["config.default: mine", "config.map", "config.name"]);
    let whole = "config.map.any=apiVersion: v1\nkind: ConfigMap\ndata: {any: x}\n";
    refused(&helm, &[whole, "config.default=any"], &["config.map.any is a whole ConfigMap"]);
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn values_of_dra_without_what_they_need_are_refused() {
    let helm = Helm::found();
    refused(&helm, &["dra.enabled=true", "devicePlugin.enabled=false"], &["dra.enabled", "devicePlugin.enabled"]);
    refused(&helm, &["dra.enabled=true", "dra.gpus="], &["dra.gpus", "configuration file"]);
    assert!(helm.template(&set(&["dra.enabled=true", "dra.gpus=", "config.name=external"])).is_ok());
    for list in ["dra.gpus={0,1}", "dra.gpus=1", "dra.gpus=*H100*"] {
        refused(&helm, &["dra.enabled=true", list], &["dra.gpus: expected all, none", "linkwise.dra.gpus: all"]);
    }
    refused(&helm, &["dra.mps=true"], &["dra.mps", "set dra.enabled"]);
    for value in
        ["dra.unchangedPods.enabled=true", "dra.severalClaims.enabled=true", "dra.claimTemplates.namespaces={a}"]
    {
        refused(&helm, &[value], &["dra.unchangedPods, dra.severalClaims and dra.claimTemplates", "set dra.enabled"]);
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn changed_spec_of_live_claim_templates_is_refused() {
    let (helm, folder) = (Helm::found(), tempfile::tempdir().unwrap());
    let chart = folder.path().join("linkwise");
    assert!(Command::new("cp").arg("-R").arg(repository("charts/linkwise")).arg(&chart).status().unwrap().success());
    // `helm template` has no cluster: the chart reads the live object from a file instead.
    let refusals = chart.join("templates/_refusals.tpl");
    let lookup = r#"lookup "resource.k8s.io/v1" "ResourceClaimTemplate" $namespace "linkwise-gpus-2""#;
    let text = fs::read_to_string(&refusals).unwrap().replace(lookup, r#"$.Files.Get "live.yaml" | fromYaml"#);
    fs::write(refusals, text).unwrap();
    let values =
        |exact| format!("dra.enabled=true,dra.claimTemplates.namespaces={{a}},dra.claimTemplates.exact={exact}");
    let command = format!("kubectl delete resourceclaimtemplates -n a -l app.kubernetes.io/instance={RELEASE}");
    for (was, exact) in [("", "groups"), ("groups", "quad1a"), ("groups", ""), ("groups", "groups")] {
        let mut live = object(&helm.objects(&[&values(was)]), "ResourceClaimTemplate", "linkwise-gpus-2").clone();
        live["metadata"]["annotations"] = json!({"meta.helm.sh/release-name": RELEASE});
        fs::write(chart.join("live.yaml"), live.to_string()).unwrap();
        let flags = ["--namespace", "gpu", "--set", &values(exact)].map(str::to_owned);
        let refusal = helm.of_chart(&chart, RELEASE, &flags, &chart).err();
        assert_eq!(refusal.map(|why| why.contains(&command)), (was != exact).then_some(true), "{was:?}, {exact:?}");
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn mig_on_demand_without_its_rights_is_refused() {
    let helm = Helm::found();
    let (dra, on, rights) = ("dra.enabled=true", "dra.dynamicMig=true", "dra.migRights=true");
    let file = "config.map.a=linkwise: {dra: {dynamicMig: true}}";
    let parts = ["SYS_ADMIN", "mig/config", "Set dra.migRights=true", "docs/mig.md"];
    for (values, place) in
        [(&[dra, on][..], "dra.dynamicMig:"), (&[dra, file], "config.map.a: linkwise.dra.dynamicMig:")]
    {
        refused(&helm, values, &[&parts[..], &[place]].concat());
    }
    refused(&helm, &[rights], &["dra.migRights", "set dra.enabled"]);
    let own = "securityContext.runAsUser=0";
    refused(&helm, &[dra, on, rights, own], &["dra.migRights", "securityContext replaces", "capabilities.add"]);
    refused(&helm, &["config.map.a=linkwise: {dra: 3}"], &["config.map.a", "linkwise.dra is not a mapping"]);
    for taken in [
        &[dra, on, rights][..],
        &[dra, file, rights],
        &[dra, on, "securityContext.privileged=true"],
        &[dra, on, rights, "securityContext.capabilities.add={SYS_ADMIN}"],
        &["config.map.a=linkwise: {dra: {dynamicMig: true}}"],
    ] {
        assert!(!helm.objects(taken).is_empty());
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn removed_values_are_refused_with_what_to_use() {
    let helm = Helm::found();
    for (value, parts) in [
        ("devicePlugin.standby=true", ["devicePlugin.standby:", "leave it out", "restarts the container"]),
        ("dra.groups={2,6}", ["dra.groups:", "Leave it out", "linkwise claim --gpus N"]),
        (
            "config.map.a=linkwise: {dra: {groups: []}}",
            ["config.map.a: linkwise.dra.groups:", "Leave it out", "--gpus N"],
        ),
        (
            "config.map.a=linkwise: {dra: {driverName: x}}",
            ["linkwise.dra.driverName:", "Leave it out", "use gpu.nvidia.com"],
        ),
        ("config.map.a=linkwise: {traces: {}}", ["config.map.a: linkwise.traces:", "Leave it out", "log"]),
        ("config.map.a=linkwise: {allowedUids: [1]}", ["linkwise.allowedUids:", "root and", "Leave it out"]),
        (
            "config.map.a=linkwise: {expose: {ncclTopology: false}}",
            ["linkwise.expose.ncclTopology:", "NCCL reads the node", "Leave"],
        ),
    ] {
        refused(&helm, &[value], &parts);
    }
    for taken in ["dra.groups=null", "devicePlugin.standby=false"] {
        assert!(!helm.objects(&[taken]).is_empty());
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn sets_as_devices_are_refused_unless_off() {
    let helm = Helm::found();
    // The value published sets of GPUs as devices.
    for value in ["dra.sets=auto", "dra.sets=on", "dra.sets=true"] {
        refused(&helm, &[value], &["dra.sets", "nvidia.com/gpu", "docs/dra-pods.md", "linkwise claim --gpus 4"]);
    }
    // `helm upgrade --reuse-values` passes these old defaults.
    for taken in ["dra.sets=off", "dra.sets=false", "dra.sets=null"] {
        assert!(!helm.objects(&[taken]).is_empty());
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn values_against_the_schema_are_refused_by_name() {
    let helm = Helm::found();
    for (value, name) in [
        ("migStrategy=all", "migStrategy"),
        ("failOnInitError=perhaps", "failOnInitError"),
        ("compatWithCPUManager=1", "compatWithCPUManager"),
        ("deviceListStrategy=cdi", "deviceListStrategy"),
        ("deviceListStrategy={envvar,cdi-cri}", "deviceListStrategy"),
        ("deviceIDStrategy=name", "deviceIDStrategy"),
        ("deviceDiscoveryStrategy=tegra", "deviceDiscoveryStrategy"),
        ("nvidiaDriverRoot=driver", "nvidiaDriverRoot"),
        ("config.map.default.version=v1", "config.map.default"),
        ("config.map.a b=", "a b"),
        ("config.fallbackStrategies={first}", "config.fallbackStrategies"),
        ("devicePlugin.enabled=yes please", "devicePlugin.enabled"),
        ("devicePlugin.enableHostNetwork=1", "devicePlugin.enableHostNetwork"),
        ("devicePlugin.extraEnv[0].value=x", "devicePlugin.extraEnv"),
        ("gfd.sleepInterval=60", "gfd.sleepInterval"),
        ("gfd.sleepInterval=often", "gfd.sleepInterval"),
        ("mps.root=mps", "mps.root"),
        ("mps.updateStrategy.type=Recreate", "mps.updateStrategy.type"),
        ("image.tag=2", "image.tag"),
        ("image.digest=sha256:12", "image.digest"),
        ("nodeSelector.gpu=true", "nodeSelector.gpu"),
        ("metrics.port=0", "metrics.port"),
        ("podMonitor.interval=often", "podMonitor.interval"),
        ("kubeletRootDir=kubelet", "kubeletRootDir"),
        ("dra.claimTemplates.namespaces=training", "dra.claimTemplates.namespaces"),
        ("dra.unchangedPods.schedulers={a'b}", "dra.unchangedPods.schedulers"),
        ("dra.claimTemplates.namespaces={Training}", "dra.claimTemplates.namespaces"),
        ("dra.claimTemplates.exact=numaNode", "dra.claimTemplates.exact"),
        ("nfd.enabled=maybe", "nfd.enabled"),
        ("resourceQuota.enabled=1", "resourceQuota.enabled"),
        ("openshift.enabled=yes please", "openshift.enabled"),
        ("nameOverride=Has Spaces", "nameOverride"),
    ] {
        refused(&helm, &[value], &[name, "schema"]);
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn nfd_is_refused_with_the_command_that_installs_it() {
    let helm = Helm::found();
    let command = "helm install nfd oci://registry.k8s.io/nfd/charts/node-feature-discovery --version 0.19.0";
    refused(&helm, &["nfd.enabled=true"], &["nfd.enabled", command, "deviceLabelFields"]);
    for taken in
        ["nfd.enabled=false", "nfd.enabled=null", "nfd.worker.config.sources.pci.x=1", "nfd.master.enable=false"]
    {
        assert!(!helm.objects(&[taken]).is_empty());
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn values_that_contradict_are_refused_with_the_reason() {
    let helm = Helm::found();
    let (a, b) = ("config.map.a=version: v1", "config.map.b=version: v1");
    for (values, parts) in [
        (&["namespaceOverride=default"][..], &["--namespace", "allowDefaultNamespace"][..]),
        (&["config.name=external", a], &["config.name (external) and config.map"]),
        (
            &["devicePlugin.enableHostNetwork=true", "updateStrategy.rollingUpdate.maxSurge=1"],
            &["maxSurge", "devicePlugin.enableHostNetwork"],
        ),
        (&["gfd.enabled=true", "devicePlugin.writeLabelsFile=true"], &["gfd.enabled and devicePlugin.writeLabelsFile"]),
        (&[a, b], &["config.default", "config.fallbackStrategies (named, single)", "a, b"]),
        (&[a, "config.fallbackStrategies={named}"], &["config.fallbackStrategies (named)", "config.map: a."]),
        (&[a, b, "config.default=c"], &["config.default", "no file c", "a, b"]),
        (&["config.map.a=flags: {", "config.default=a"], &["config.map.a is not a YAML mapping"]),
        (&["config.map.a=[1]"], &["config.map.a is not a YAML mapping"]),
        (&["config.map.a=flags: none"], &["config.map.a", "flags is not a mapping"]),
        (&["config.map.a=flags: {plugin: 3}"], &["config.map.a", "flags.plugin is not a mapping"]),
        (&["image.repository=registry.example/mirror/k8s-device-plugin"], &["image.repository", "NVIDIA's image"]),
        (&["resourceQuota.enabled=true", "priorityClassName="], &["resourceQuota.enabled", "priorityClassName"]),
        (&["openshift.enabled=true", "migStrategy=mixed"], &["openshift.enabled", "SCC privileged"]),
        (&["openshift.enabled=true", "deviceListStrategy=volume-mounts"], &["openshift.enabled", "volume-mounts"]),
        (&["openshift.enabled=true", "securityContext.privileged=true"], &["openshift.enabled", "privileged"]),
        (&["openshift.enabled=true", "gfd.enabled=true", "gfd.enableHostNetwork=true"], &["enableHostNetwork"]),
        (&["openshift.enabled=true", "dra.enabled=true", "dra.mps=true"], &["openshift.enabled", "dra.mps"]),
        (
            &["openshift.enabled=true", "config.map.a=sharing: {mps: {resources: []}}"],
            &["config.map.a: sharing.mps", "openshift.enabled", "SCC privileged"],
        ),
    ] {
        refused(&helm, values, parts);
    }
    for taken in [
        &["namespaceOverride=default", "allowDefaultNamespace=true"][..],
        &[a, b, "config.default=a"],
        &[a, b, "config.fallbackStrategies={empty}"],
        &[a, "config.map.default=version: v1"],
        &["openshift.enabled=true", "config.map.a=sharing: {timeSlicing: {resources: []}}"],
        &["config.map.a=sharing: {mps: {resources: []}}"],
        &[a],
    ] {
        assert!(!helm.objects(taken).is_empty());
    }
}
