//! Tests that each program of the image does its work in its container.

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::{Place, Pod as Workload};
use serde_json::json;

use crate::helm::object;
use crate::node::{GPU, Node, PLUGIN, PLUGIN_CONTAINER, output_of, until};
use crate::pod::Pod;

#[tokio::test]
async fn plugin_and_commands_work_and_leave_no_socket() {
    let node = Node::start("dgx1-v100").await;
    let pod = node.deploy(PLUGIN, &[]).await;
    node.wait_offered(&pod, GPU, 8).await;
    let admitted = node.kubelet.admit(&Workload::single("default/p", GPU, 2), None).await.unwrap();
    let grant = admitted.grant("main", GPU).unwrap();
    assert_eq!(grant.allocation.devices.len(), 2, "{grant:?}");
    for (command, part) in [
        (&["linkwise", "topology"][..], "NV2"),
        (&["linkwise", "snapshot"], "V100"),
        (&["linkwise", "allocate", "--size", "2", "--explain"], "collective"),
        (&["linkwise", "admin", "state"], "V100"),
        (&["linkwise", "doctor"], "0 failed"),
    ] {
        let printed = pod.container(PLUGIN_CONTAINER).exec(command).await;
        assert!(output_of(&printed).contains(part), "{command:?}: {}", printed.out);
    }
    let sockets = || std::fs::read_dir(node.host().join("var/lib/kubelet/device-plugins")).unwrap().flatten();
    pod.stop().await;
    let left: Vec<_> = sockets().filter(|file| file.file_name().to_string_lossy().starts_with("linkwise-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn dra_publishes_and_prepares() {
    let node = Node::start("dgx1-v100").await;
    let mut pod = node.deploy(PLUGIN, &["dra.enabled=true"]).await;
    node.wait_published(&mut pod, 8).await;
    node.wait_driver(&pod).await;
    let claim = node.claim("one", "gpu-5", &[]);
    let cdi = node.start_claim(&pod, "p", &claim).await;
    let name = cdi[0].split_once('=').unwrap().1;
    assert!(node.cdi_specs().contains(name), "{cdi:?}");
    node.dra.stop_pod("p").await.unwrap();
    pod.stop().await;
}

#[tokio::test]
async fn gpu_feature_discovery_writes_its_node_feature() {
    Node::start("dgx1-v100").await.run_discovery().await;
}

/// Configuration files for two kinds of nodes: one device a GPU, and four slots a GPU.
const FILES: &str = r#"config.map={"default": "version: v1\n", "shared":
    "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"}"#;

#[tokio::test]
async fn config_manager_follows_the_nodes_label() {
    let node = Node::start("dgx1-v100").await;
    let pod = node.deploy(PLUGIN, &[FILES]).await;
    node.wait_offered(&pod, GPU, 8).await;
    node.label(json!({"nvidia.com/device-plugin.config": "shared"}));
    node.wait_offered(&pod, GPU, 32).await;
    pod.stop().await;
}

#[tokio::test]
async fn mps_daemon_serves_what_the_plugin_then_offers() {
    let node = Node::start("dgx1-v100").await;
    let files = r#"config.map={"default":
        "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"}"#;
    let daemons = node.deploy("nvdp-nvidia-device-plugin-mps-control-daemon", &[files]).await;
    let pod = node.deploy(PLUGIN, &[files]).await;
    node.wait_offered(&pod, GPU, 32).await;
    let admitted = node.kubelet.admit(&Workload::single("default/p", GPU, 1), None).await.unwrap();
    let allocation = &admitted.grant("main", GPU).unwrap().allocation;
    assert!(allocation.envs.contains_key("CUDA_MPS_PIPE_DIRECTORY"), "{allocation:?}");
    // The host sees the shared memory that the init container has mounted.
    if node.shares_mounts() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let shm = node.host().join("run/nvidia/mps/shm");
        assert!(mounts.contains(&format!("{} tmpfs", shm.display())), "{}", daemons.logs());
    }
    pod.stop().await;
    daemons.stop().await;
}

#[tokio::test]
async fn event_tells_a_pod_of_its_slow_gpus() {
    let node = Node::start("dgx1-v100").await;
    let place = |pod: &str| Place { pod: pod.to_owned(), container: "main".to_owned(), resource: GPU.to_owned() };
    // These two GPUs have no NVLink between them.
    let poor = [1, 6].map(|gpu| format!("GPU-00000001-0000-4000-8000-00000000000{gpu}"));
    node.kubelet.hold(place("poor"), poor.clone());
    // The event needs the UID from the kubelet's checkpoint. The box wrote the pod's name in place of the UID.
    let entry = json!({"PodUID": "uid-of-poor", "ContainerName": "main", "ResourceName": GPU, "DeviceIDs": {"0": poor},
                       "AllocResp": ""});
    let text = json!({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}).to_string();
    let folder = node.host().join("var/lib/kubelet/device-plugins");
    std::fs::write(folder.join("kubelet_internal_checkpoint"), text).unwrap();
    let mut pod = node.deploy(PLUGIN, &["events.enabled=true"]).await;
    until(&mut pod, "event", || !node.server.objects(&ResourceType::EVENTS).is_empty()).await;
    let [event] = node.server.objects(&ResourceType::EVENTS).try_into().unwrap();
    assert_eq!(event["regarding"]["name"], "poor", "{event}");
    assert_eq!(event["regarding"]["uid"], "uid-of-poor", "{event}");
    pod.stop().await;
}

#[tokio::test]
async fn container_has_the_rights_of_the_chart_and_no_more() {
    let node = Node::start("dgx1-v100").await;
    let pod = node.deploy(PLUGIN, &[]).await;
    let plugin = pod.container(PLUGIN_CONTAINER);
    let printed = plugin.exec(&["grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/self/status"]).await;
    let fields: Vec<&str> = output_of(&printed).split_whitespace().collect();
    assert_eq!(fields, ["CapEff:", "0000000000000000", "CapBnd:", "0000000000000000", "NoNewPrivs:", "1"]);
    assert!(!plugin.exec(&["touch", "/written"]).await.status.success(), "the root must be read-only");
    if let Some(limit) = plugin.memory_limit() {
        assert_eq!(limit, 128 << 20);
    }
    pod.stop().await;
}

#[tokio::test]
async fn helm_test_succeeds_on_a_node_that_serves() {
    let node = Node::start("dgx1-v100").await;
    for values in [&[][..], &["dra.enabled=true"]] {
        let objects = node.render(values);
        let pod = node.deploy(PLUGIN, values).await;
        let mut test = Pod::start(&node, &objects, object(&objects, "Pod", "nvdp-nvidia-device-plugin-test")).await;
        let status = test.containers[0].wait_end().await;
        assert!(status.success(), "{}\n{}", test.logs(), pod.logs());
        pod.stop().await;
    }
}
