//! Golden files of the objects that the chart renders for its default values, and of the lines that each value
//! changes, so that a change of the chart shows as a change of the cluster's objects.

use insta::assert_snapshot;
use serde_json::Value;

use crate::chart::flat::{Lines, difference, lines};
use crate::chart::helm::{Helm, set};
use crate::unchanged_pods::resources;

/// Renders the lines that each entry, a list of values for `--set`, changes in the objects for `base`.
fn changes(base: &[&str], entries: &[&[&str]]) -> String {
    let helm = Helm::found();
    let before = lines(&helm.objects(base));
    entries.iter().map(|values| section(values, &before, &lines(&helm.objects(&[base, values].concat())))).collect()
}

fn section(values: &[&str], before: &Lines, after: &Lines) -> String {
    format!("## {}\n{}\n", values.join(" ").replace('\n', "\\n"), difference(before, after))
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn helm_lint_finds_nothing() {
    let others = ["gfd.enabled=true", "config.name=other", "podMonitor.enabled=true"];
    let all = [&others[..], &["dra.enabled=true", "dra.unchangedPods.enabled=true"]].concat();
    for values in [&[][..], &all[..]] {
        let output = Helm::found().run(&["lint", "--strict", "--quiet"], &set(values));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn defaults_give_these_objects() {
    assert_snapshot!(difference(&Lines::default(), &lines(&Helm::found().objects(&[]))));
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn settings_become_variables() {
    let entries = [
        &["migStrategy=none"][..],
        &["migStrategy=mixed"],
        &["failOnInitError=false"],
        &["compatWithCPUManager=true"],
        &["deviceListStrategy=envvar"],
        &["deviceListStrategy=volume-mounts"],
        &["deviceListStrategy=cdi-annotations\\,cdi-cri"],
        &["deviceListStrategy=cdi-cri", "nvidiaDriverRoot=/run/nvidia/driver"],
        &["deviceIDStrategy=index"],
        &["nvidiaDriverRoot=/run/nvidia/driver"],
        &["nvidiaDevRoot=/dev-root"],
        &["gdrcopyEnabled=true", "gdsEnabled=true", "mofedEnabled=false"],
        &["deviceDiscoveryStrategy=nvml"],
        &["cdi.nvidiaHookPath=/usr/local/nvidia-cdi-hook", "cdi.featureFlags=disable-nvsandboxutils"],
        &["mps.root=/var/mps"],
    ];
    // GPU Feature Discovery is on, so that the file shows which program gets which variable.
    assert_snapshot!(changes(&["gfd.enabled=true"], &entries));
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn configurations_bring_config_manager() {
    let helm = Helm::found();
    let shared =
        "config.map.shared=version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu\\, replicas: 4}]}}";
    let one = "config.map.only=version: v1";
    assert_snapshot!("one_file", changes(&[], &[&[one]]));
    let entries = [
        &["config.map.default=version: v1", shared, "config.fallbackStrategies={empty}"][..],
        &["config.map.a=flags: {migStrategy: single}", "config.map.b=", "config.default=b"],
        &["config.map.only=flags: {plugin: {deviceListStrategy: [envvar\\, volume-mounts]}}"],
        &["config.map.only=flags: {plugin: {deviceListStrategy: cdi-cri}}"],
        &["podAnnotations.checksum/config=mine"],
    ];
    assert_snapshot!("more_files", changes(&[one], &entries));
    // A ConfigMap outside the chart may set anything, so pods get all rights that the values do not rule out.
    let before = lines(&helm.objects(&[one]));
    let entries =
        [&["config.name=external"][..], &["config.name=external", "migStrategy=none", "deviceListStrategy=envvar"]];
    let sections = entries.map(|values| section(values, &before, &lines(&helm.objects(values))));
    assert_snapshot!("files_of_others", sections.concat());
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn values_switch_and_adapt_programs() {
    let of_dra = "dra.enabled=true dra.gpus=none dra.evictLost=true dra.dynamicMig=true dra.migRights=true \
                  dra.admissionPolicy=false dra.deviceClasses=false";
    let of_dra: Vec<&str> = of_dra.split(' ').collect();
    let entries = [
        &["gfd.enabled=true"][..],
        &["devicePlugin.enabled=false"],
        &["devicePlugin.writeLabelsFile=true"],
        &["mps.enableHostPID=false"],
        &["mps.updateStrategy.type=RollingUpdate"],
        &["mps.enableHostNetwork=true"],
        &["devicePlugin.enableHostNetwork=true", "metrics.port=9410"],
        &["metrics.hidePodNames=true"],
        &["podMonitor.enabled=true", "podMonitor.labels.release=prometheus"],
        &["dra.enabled=true"],
        &of_dra[..],
        &["dra.enabled=true", "kubeletRootDir=/var/lib/k0s/kubelet"],
        &["events.enabled=true"],
        &["nodeCondition.enabled=true", "nodeCondition.type=a.b/C", "nodeCondition.startupTaints={a.b/c}"],
        &["events.enabled=true", "events.below=50", "dra.enabled=true"],
        &["dra.enabled=true", "dra.claimTemplates.namespaces={a,b}", "dra.unchangedPods.enabled=true"],
        &["dra.enabled=true", "dra.claimTemplates.namespaces={a}", "dra.claimTemplates.exact=groups"],
        &["dra.enabled=true", "dra.claimTemplates.namespaces={a}", "dra.claimTemplates.exact=nvlinkDomain"],
    ];
    assert_snapshot!("programs", changes(&[], &entries));
    let entries = [
        &["resourceQuota.enabled=true"][..],
        &["openshift.enabled=true", "gfd.enabled=true"],
        &["kubeletRootDir=/var/snap/microk8s/common/var/lib/kubelet"],
        &["runtimeClassName=nvidia", "securityContext.seLinuxOptions.type=spc_t", "nodeSelector.gpu=yes"],
    ];
    assert_snapshot!("clusters", changes(&[], &entries));
    let entries = [&["dra.mps=true"][..], &["dra.mps=true", "mps.root=/var/mps", "nodeSelector.gpu=yes"]];
    assert_snapshot!("mps_for_claims", changes(&["dra.enabled=true"], &entries));
    let base = ["dra.enabled=true", "dra.unchangedPods.enabled=true"];
    let entries = [&["dra.unchangedPods.schedulers={default-scheduler,packing}"][..]];
    assert_snapshot!("unchanged_pods", changes(&base, &entries));
    let entries = [
        &["config.name=external", "migStrategy=none", "deviceListStrategy=envvar"][..],
        &["gfd.noTimestamp=true", "gfd.sleepInterval=infinite"],
        &["noTimestamp=false", "sleepInterval=30s"],
        &["gfd.securityContext.privileged=true"],
        &["gfd.enableHostNetwork=true"],
        &["nvidiaDriverRoot=/run/nvidia/driver", "failOnInitError=false", "migStrategy=single"],
    ];
    let base = ["gfd.enabled=true", "devicePlugin.enabled=false"];
    assert_snapshot!("gpu_feature_discovery", changes(&base, &entries));
}

/// Unchanged pods bring the policy for several claims. Templates with alternatives bring it if the API server knows it.
/// `dra.severalClaims` overrides both.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn claim_templates_bring_policy_from_kubernetes_1_36() {
    let shipped: Vec<Value> =
        resources("manifests/dra/several-claims").into_iter().map(|one| one["spec"].clone()).collect();
    let (templates, unchanged) = ("dra.claimTemplates.namespaces={a}", "dra.unchangedPods.enabled=true");
    for (values, version, is_there) in [
        (&[templates][..], "1.36.0", true),
        (&[templates], "1.36.2-gke.1", true),
        (&[templates], "1.35.4", false),
        (&[templates, "dra.claimTemplates.exact=groups"], "1.36.0", false),
        (&[unchanged], "1.36.0", true),
        (&["dra.severalClaims.enabled=true"], "1.35.4", true),
        (&[templates, unchanged, "dra.severalClaims.enabled=false"], "1.36.0", false),
        (&[], "1.36.0", false),
    ] {
        let args = [set(values), set(&["dra.enabled=true"]), vec!["--kube-version", version]].concat();
        let objects = Helm::found().template(&args).unwrap();
        let all: Vec<&Value> = objects.iter().map(|object| &object["spec"]).collect();
        assert!(shipped.iter().all(|spec| all.contains(&spec) == is_there), "{values:?} {version}");
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn pods_take_the_usual_values_of_charts() {
    let digest = format!("image.digest=sha256:{}", "ab".repeat(32));
    let entries = [
        &["image.repository=registry.example/linkwise", "image.tag=v1.2.3", "image.pullPolicy=Always"][..],
        &["image.repository=registry.example/linkwise", &digest],
        &["imagePullSecrets[0].name=pull"],
        &["updateStrategy.type=OnDelete"],
        &["updateStrategy=null"],
        &["updateStrategy.rollingUpdate.maxUnavailable=2"],
        &["podAnnotations.note=text"],
        &["podSecurityContext.runAsGroup=0"],
        &["securityContext.privileged=true"],
        &["resources.requests.cpu=100m", "resources.limits.memory=512Mi"],
        &["priorityClassName="],
        &["runtimeClassName=nvidia"],
        &["nodeSelector.gpu-plugin=linkwise"],
        &["affinity=null", "tolerations=null"],
        &["devicePlugin.extraEnv[0].name=LINKWISE_NUMA_HINTS", "devicePlugin.extraEnv[0].value=package"],
        &["kubeletRootDir=/var/snap/kubelet/"],
    ];
    assert_snapshot!(changes(&[], &entries));
}

/// Renders the examples in NVIDIA's README for 0.20 with their `--set`.
#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn examples_of_nvidias_readme_are_taken() {
    let helm = Helm::found();
    let file = |name: &str, strategy: &str| {
        let plugin = "plugin: {passDeviceSpecs: false\\, deviceListStrategy: envvar\\, deviceIDStrategy: uuid}";
        let flags = format!("migStrategy: {strategy}\\, failOnInitError: true\\, nvidiaDriverRoot: \"/\"\\, {plugin}");
        format!("config.map.{name}=version: v1\nflags: {{{flags}}}")
    };
    let (only, first, second) = (file("config", "none"), file("config0", "none"), file("config1", "mixed"));
    let with_file = [
        &["config.name=nvidia-plugin-configs"][..],
        &["config.default=config0", &first, &second],
        &["config.default=config0", "config.name=nvidia-plugin-configs"],
    ];
    let without = [
        &["compatWithCPUManager=true", "resources.requests.cpu=100m", "resources.limits.memory=512Mi"][..],
        &["compatWithCPUManager=true", "migStrategy=mixed"],
        &["devicePlugin.enabled=false"],
        &["allowDefaultNamespace=true", "nfd.enabled=false", "migStrategy=mixed", "devicePlugin.enabled=false"],
    ];
    // Examples with files are compared with `only`, whose file sets the defaults.
    let file = lines(&helm.objects(&[&only]));
    let mut text = changes(&[], &without);
    text.extend(with_file.map(|values| section(values, &file, &lines(&helm.objects(values)))));
    assert_snapshot!(text);
    let changed = changes(&["config.map.config=version: v1"], &[&[&only]]);
    assert!(!changed.contains("SYS_ADMIN"), "{changed}");
}
