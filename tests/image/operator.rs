//! Tests of the DaemonSets that NVIDIA's GPU Operator makes of a ClusterPolicy or a GPUCluster that names our image.
//! `gpu-operator.json` has them and names their source.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use linkwise_kubelet_box::Pod as Workload;
use serde_json::{Value, json};

use crate::helm::{POD, list, object, repository};
use crate::node::{GPU, Node, output_of};
use crate::pod::Pod;
use crate::rights::report_skipped;
use crate::rootfs::below;

/// A rewrite of the operator's entrypoint script: it waits for the driver, takes the variables of the validator's file,
/// turns on the features whose kernel modules are loaded, and runs the plugin.
const ENTRYPOINT: &str = r#"#!/bin/sh
until [ -f /run/nvidia/validations/driver-ready ]; do sleep 1; done
set -o allexport
. /run/nvidia/validations/driver-ready
> feature-flags.env
if lsmod | grep -q "^gdrdrv "; then echo GDRCOPY_ENABLED=true >> feature-flags.env; fi
if lsmod | grep -q "^nvidia_fs "; then echo GDS_ENABLED=true >> feature-flags.env; fi
. ./feature-flags.env
exec nvidia-device-plugin
"#;

fn facts() -> Value {
    serde_json::from_str(&fs::read_to_string(repository("tests/image/gpu-operator.json")).unwrap()).unwrap()
}

/// Replaces or adds a variable of the pod's first container.
fn set_variable(spec: &mut Value, variable: &Value) {
    let env = spec["containers"][0]["env"].as_array_mut().unwrap();
    env.retain(|it| it["name"] != variable["name"]);
    env.push(variable.clone());
}

/// The DaemonSet of a part of the operator, and its ConfigMap.
fn objects(part: &str, cdi: bool) -> Vec<Value> {
    let facts = facts();
    let mut spec = facts[part].clone();
    if cdi {
        for variable in facts["cdi"].as_array().unwrap() {
            set_variable(&mut spec, variable);
        }
    }
    vec![
        json!({"kind": "DaemonSet", "metadata": {"name": part}, "spec": {"template": {"spec": spec}}}),
        json!({"kind": "ConfigMap", "metadata": {"name": "nvidia-device-plugin-entrypoint"},
               "data": {"entrypoint.sh": ENTRYPOINT}}),
    ]
}

/// Starts the pod of a DaemonSet with the ServiceAccount's token, which the API server adds to each pod.
async fn start(node: &Node, objects: &[Value], set: &Value) -> Pod {
    let mut set = set.clone();
    let spec = set.pointer_mut(POD).unwrap();
    // Pods of the tests share the host's network and need ports of their own. `devicePlugin.env` can set this too.
    let address = format!("[::]:{}", node.port);
    set_variable(spec, &json!({"name": "LINKWISE_METRICS_ADDRESS", "value": address}));
    let facts = facts();
    spec["volumes"].as_array_mut().unwrap().push(facts["token"]["volume"].clone());
    for kind in ["initContainers", "containers"] {
        for container in spec[kind].as_array_mut().into_iter().flatten() {
            let mut mounts: Vec<Value> = list(container, "/volumeMounts").into_iter().cloned().collect();
            mounts.push(facts["token"]["mount"].clone());
            container["volumeMounts"] = json!(mounts);
        }
    }
    Pod::start(node, objects, &set).await
}

/// Adds config-manager to the pod, as `devicePlugin.config` of a ClusterPolicy does.
fn add_configs(set: &mut Value) {
    let spec = &mut set["spec"]["template"]["spec"];
    let facts = facts();
    let configs = &facts["configs"];
    let extend = |list: &mut Value, more: &Value| {
        list.as_array_mut().unwrap().extend(more.as_array().unwrap().iter().cloned());
    };
    for name in ["initContainers", "containers", "volumes"] {
        extend(&mut spec[name], &configs[name]);
    }
    extend(&mut spec["containers"][0]["volumeMounts"], &configs["volumeMounts"]);
    spec["shareProcessNamespace"] = json!(true);
    set_variable(spec, &configs["variable"]);
}

/// Makes the files of the operator's other pods: the validator's file, the driver container's root, the toolkit.
fn prepare(node: &Node, driver: &str) {
    let host = node.host();
    let at = |path: &str| below(&host, path);
    for path in ["/run/nvidia/validations", "/run/nvidia/driver/dev", "/usr/local/nvidia/toolkit", "/sys"] {
        fs::create_dir_all(at(path)).unwrap();
    }
    let libraries = "/usr/lib/x86_64-linux-gnu";
    let of_host = at(libraries);
    let of_container = at(&format!("/run/nvidia/driver{libraries}"));
    fs::create_dir_all(&of_container).unwrap();
    fs::copy(of_host.join("libnvidia-ml.so.1"), of_container.join("libnvidia-ml.so.1")).unwrap();
    // A driver installs a library with its version in the name, and a link to it.
    fs::remove_file(of_host.join("libcuda.so.1")).unwrap();
    for folder in [of_host, of_container] {
        fs::write(folder.join("libcuda.so.580.65.06"), "").unwrap();
        symlink("libcuda.so.580.65.06", folder.join("libcuda.so.1")).unwrap();
    }
    let hook = at("/usr/local/nvidia/toolkit/nvidia-cdi-hook");
    fs::write(&hook, "#!/bin/sh\n# disable-device-node-modification\n").unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    let ready = facts()["driverReady"][driver].as_str().unwrap().to_owned();
    fs::write(at("/run/nvidia/validations/driver-ready"), ready).unwrap();
    fs::write(at("/run/nvidia/validations/toolkit-ready"), "").unwrap();
}

/// Returns true if the DaemonSet's first container has this variable.
fn has(set: &Value, variable: &str) -> bool {
    list(set, "/spec/template/spec/containers/0/env").iter().any(|it| it["name"] == variable)
}

/// Admits a pod with two GPUs, and checks the allocation by the plugin of this DaemonSet.
async fn admit(node: &Node, pod: &Pod, set: &Value) {
    let cdi = has(set, "CDI_ENABLED");
    node.wait_offered(pod, GPU, 8).await;
    let admitted = node.kubelet.admit(&Workload::single("default/p", GPU, 2), None).await;
    let admitted = admitted.unwrap_or_else(|error| panic!("CDI {cdi}: {error}\n{}", pod.logs()));
    let allocation = &admitted.grant("main", GPU).unwrap().allocation;
    assert_eq!(allocation.devices.len(), 2, "{allocation:?}");
    if cdi {
        assert_eq!(allocation.cdi_names.len(), 2, "{allocation:?}");
        assert!(allocation.annotations.keys().any(|key| key.starts_with("cdi.k8s.io/")), "{allocation:?}");
        let specs = node.cdi_specs();
        let hooks = has(set, "NVIDIA_CDI_HOOK_PATH");
        assert_eq!(specs.contains("/usr/local/nvidia/toolkit/nvidia-cdi-hook"), hooks, "{specs}");
        // linkwise names this hook only if the host's program has it.
        assert_eq!(specs.contains("disable-device-node-modification"), hooks, "{specs}");
    } else {
        assert!(allocation.envs["NVIDIA_VISIBLE_DEVICES"].starts_with("GPU-"), "{allocation:?}");
        assert!(allocation.cdi_names.is_empty(), "{allocation:?}");
    }
    let plugin = pod.container("nvidia-device-plugin");
    assert!(!plugin.log().contains(": not found"), "the script lacks a program: {}", pod.logs());
    let name = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
    let loaded = fs::read_to_string("/proc/modules").unwrap_or_default();
    let listed = plugin.exec(&["lsmod"]).await;
    assert_eq!(output_of(&listed).lines().map(name).collect::<Vec<_>>(), loaded.lines().map(name).collect::<Vec<_>>());
}

/// A ConfigMap for `devicePlugin.config`.
fn configs() -> Value {
    let shared = |by: &str, slots: u32| {
        format!("version: v1\nsharing: {{{by}: {{resources: [{{name: nvidia.com/gpu, replicas: {slots}}}]}}}}\n")
    };
    json!({"kind": "ConfigMap", "metadata": {"name": "plugin-configs"},
           "data": {"any": "version: v1\n", "shared": shared("timeSlicing", 4), "mps": shared("mps", 3)}})
}

/// The places of a driver: on the host, or in a container.
const DRIVERS: [&str; 2] = ["host", "container"];

#[tokio::test]
async fn plugin_serves_each_driver_place_and_cdi_setting() {
    for (driver, cdi) in DRIVERS.into_iter().flat_map(|driver| [(driver, true), (driver, false)]) {
        let node = Node::start("dgx1-v100").await;
        prepare(&node, driver);
        let objects = objects("plugin", cdi);
        let pod = start(&node, &objects, &objects[0]).await;
        admit(&node, &pod, &objects[0]).await;
        pod.stop().await;
    }
}

#[tokio::test]
async fn operators_gfd_writes_its_node_feature() {
    let node = Node::start("dgx1-v100").await;
    prepare(&node, "host");
    let objects = objects("gfd", false);
    let mut pod = start(&node, &objects, &objects[0]).await;
    node.wait_node_feature(&mut pod).await;
    pod.stop().await;
}

/// The DRA driver's DaemonSet of a GPUCluster prepares a claim, and knows it after the pod's restart.
#[tokio::test]
async fn gpu_cluster_prepares_claims_for_each_driver_place() {
    for driver in DRIVERS {
        gpu_cluster_prepares(driver).await;
    }
}

async fn gpu_cluster_prepares(driver: &str) {
    let node = Node::start("dgx1-v100").await;
    prepare(&node, driver);
    let mut objects = objects("draDriver", false);
    // The container gets no driver from the runtime, so our libnvidia-ml and its machine's file lie on the host.
    fs::copy(&node.machine, below(&node.host(), "/run/nvidia/driver/machine.yaml")).unwrap();
    let spec = objects[0].pointer_mut(POD).unwrap();
    set_variable(spec, &json!({"name": "FAKE_NVML_MACHINE", "value": "/driver-root/machine.yaml"}));
    set_variable(spec, &json!({"name": "FAKE_NVML_CONTROL", "value": "/run/nvml"}));
    let mut pod = start(&node, &objects, &objects[0]).await;
    node.wait_driver(&pod).await;
    node.wait_published(&mut pod, 8).await;
    let claim = node.claim("c", "gpu-3", &[]);
    let names = node.start_claim(&pod, "p", &claim).await;
    let name = names[0].split_once('=').unwrap().1;
    assert!(node.cdi_specs().contains(name), "{names:?}");
    pod.stop().await;
    let pod = start(&node, &objects, &objects[0]).await;
    node.wait_driver(&pod).await;
    let records = below(&node.host(), "/var/lib/kubelet/plugins/linkwise/claims");
    assert_eq!(fs::read_dir(&records).unwrap().count(), 1);
    node.dra.stop_pod("p").await.unwrap();
    assert_eq!(fs::read_dir(&records).unwrap().count(), 0);
    pod.stop().await;
}

#[tokio::test]
async fn operators_config_manager_follows_the_nodes_label() {
    let node = Node::start("dgx1-v100").await;
    prepare(&node, "host");
    let mut objects = objects("plugin", true);
    add_configs(&mut objects[0]);
    objects.push(configs());
    let pod = start(&node, &objects, &objects[0]).await;
    node.wait_offered(&pod, GPU, 8).await;
    node.label(json!({"nvidia.com/device-plugin.config": "shared"}));
    node.wait_offered(&pod, GPU, 32).await;
    pod.stop().await;
}

/// Runs objects that the operator itself has rendered: LINKWISE_OPERATOR_OBJECTS names a folder with a JSON list of
/// them for each ClusterPolicy.
#[tokio::test]
async fn objects_of_the_operator_itself_serve() {
    #[allow(clippy::disallowed_methods, reason = "the environment names the operator's objects")]
    let folder = std::env::var_os("LINKWISE_OPERATOR_OBJECTS");
    let Some(folder) = folder else {
        return report_skipped("the operator's own objects: LINKWISE_OPERATOR_OBJECTS names no folder");
    };
    for file in fs::read_dir(folder).unwrap() {
        let file = file.unwrap().path();
        for driver in DRIVERS {
            let _ = writeln!(std::io::stderr(), "{}, the driver of the {driver}", file.display());
            own_objects_serve(&file, driver).await;
        }
    }
}

async fn own_objects_serve(file: &Path, driver: &str) {
    let node = Node::start("dgx1-v100").await;
    prepare(&node, driver);
    // The hostPaths of a ClusterPolicy may lie behind these links.
    fs::create_dir(node.host().join("srv")).unwrap();
    symlink("..", node.host().join("srv/root")).unwrap();
    symlink("../run/nvidia/driver", node.host().join("srv/driver")).unwrap();
    let mut objects: Vec<Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    objects.push(configs());
    let set = |name: &str| object(&objects, "DaemonSet", name);
    let plugin = set("nvidia-device-plugin-daemonset");
    let pod = start(&node, &objects, plugin).await;
    admit(&node, &pod, plugin).await;
    if has(plugin, "CONFIG_FILE") {
        node.label(json!({"nvidia.com/device-plugin.config": "shared"}));
        node.wait_offered(&pod, GPU, 32).await;
        node.label(json!({"nvidia.com/device-plugin.config": "mps"}));
        let daemons = start(&node, &objects, set("nvidia-device-plugin-mps-control-daemon")).await;
        node.wait_offered(&pod, GPU, 24).await;
        daemons.stop().await;
    }
    pod.stop().await;
    let mut pod = start(&node, &objects, set("gpu-feature-discovery")).await;
    node.wait_node_feature(&mut pod).await;
    pod.stop().await;
}
