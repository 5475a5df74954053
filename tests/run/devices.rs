//! The usual course: GPUs are listed, chosen and allocated, and /metrics shows them.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_kubelet_box::Pod;
use serde_json::Value;

use crate::run::node::{GPU, Setup, allocation, machine, uuid};

/// The choice of `linkwise allocate` on a built-in machine.
fn chosen(machine: &str, size: u32, available: &str) -> Vec<String> {
    let size = size.to_string();
    let args = ["allocate", "--node", machine, "--size", &size, "--available", available, "--format", "json"];
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_linkwise")).args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["devices"].as_array().unwrap().iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_gpu_is_listed_healthy_with_its_numa_node() {
    for (name, number) in [("dgx1-v100", 1), ("dgx-h100", 2)] {
        let (_node, kubelet) = Setup::on(name).serve(8).await;
        let state = kubelet.state();
        let gpu = &state.resources[GPU];
        let all = (0..8).map(|index| uuid(number, index)).collect();
        assert_eq!((&gpu.healthy, gpu.unhealthy.len()), (&all, 0));
        let numa: BTreeMap<_, _> =
            (0..8).map(|index| (uuid(number, index), BTreeSet::from([i64::from(index / 4)]))).collect();
        assert_eq!(gpu.numa, numa);
        assert_eq!(state.resources.len(), 1);
        assert_eq!((gpu.registrations, gpu.open_streams, state.violations.len()), (1, 1, 0));
    }
}

#[tokio::test]
async fn numa_node_unknown_to_the_host_is_not_listed() {
    // This host has one NUMA node; NVML names two.
    let (_node, kubelet) = Setup::on("dgx1-v100").env("HWLOC_SYNTHETIC", "pack:1 numa:1 pu:2").serve(8).await;
    let gpu = &kubelet.state().resources[GPU];
    let nodes: Vec<Vec<i64>> = gpu.numa.values().map(|nodes| nodes.iter().copied().collect()).collect();
    assert_eq!(nodes, [vec![0], vec![0], vec![0], vec![0], vec![], vec![], vec![], vec![]]);
    // A GPU whose NUMA node is unknown has none: unknown is not node 0.
    let gpus = [("GPU-a", "0000:01:00.0", ", numa: 1"), ("GPU-b", "0000:02:00.0", "")];
    let (_node, kubelet) = Setup::with(&machine(&gpus)).serve(2).await;
    let gpu = &kubelet.state().resources[GPU];
    assert_eq!((gpu.numa["GPU-a"].len(), gpu.numa["GPU-b"].len()), (1, 0));
}

#[tokio::test]
async fn pods_get_the_choice_of_linkwise_allocate() {
    for (name, number) in [("dgx1-v100", 1), ("dgx-h100", 2)] {
        let (node, kubelet) = Setup::on(name).serve(8).await;
        let mut free: BTreeSet<u32> = (0..8).collect();
        for (pod, size) in [("four", 4), ("two", 2), ("one", 1)] {
            let list = free.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            let expected = chosen(name, size, &list);
            let admitted = kubelet.admit(&Pod::single(pod, GPU, size), None).await.unwrap();
            let grant = admitted.grant("main", GPU).unwrap();
            assert_eq!(grant.allocation.devices, expected, "{name}: {size} of {list}");
            assert_eq!(grant.asked.as_ref().unwrap().preferred, expected);
            let visible = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), expected.join(","))]);
            assert_eq!(grant.allocation.envs, visible);
            assert_eq!((grant.allocation.device_specs.len(), grant.allocation.mounts.len()), (0, 0));
            free.retain(|index| !expected.contains(&uuid(number, *index)));
        }
        node.metric("linkwise_allocations_total{resource=\"nvidia.com/gpu\",outcome=\"ok\"}", 3).await;
        node.metric("linkwise_preferred_allocations_total{resource=\"nvidia.com/gpu\",outcome=\"exact\"}", 3).await;
        assert_eq!(kubelet.violations(), []);
    }
}

#[tokio::test]
async fn container_sees_gpus_in_pci_order() {
    let gpus = [("GPU-c", "0000:01:00.0", ""), ("GPU-a", "0001:00:00.0", ""), ("GPU-b", "0000:f0:00.0", "")];
    let (_node, kubelet) = Setup::with(&machine(&gpus)).serve(3).await;
    let allocation = allocation(&kubelet, "pod", GPU, 3).await;
    assert_eq!(allocation.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-c,GPU-b,GPU-a");
}

#[tokio::test]
async fn metrics_are_openmetrics_and_current() {
    let (node, kubelet) = Setup::on("dgx-h100").serve(8).await;
    for unknown in ["/nothing", "/metrics/../../etc/passwd"] {
        assert_eq!(node.get(unknown).await.status, 404);
    }
    let answer = node.get("/metrics").await;
    assert_eq!(answer.status, 200);
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(answer.head.contains(kind), "{}", answer.head);
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    node.metric("linkwise_devices{resource=\"nvidia.com/gpu\",health=\"healthy\"}", 8).await;
    node.metric("linkwise_registrations_total{resource=\"nvidia.com/gpu\",outcome=\"ok\"}", 1).await;
    node.metric("linkwise_kubelet_connected{resource=\"nvidia.com/gpu\"}", 1).await;
    node.metric("linkwise_nvml_agent_up", 1).await;
    let build = format!("linkwise_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    node.metric(&build, 1).await;
    let gpu = "linkwise_gpu{uuid=\"GPU-00000002-0000-4000-8000-000000000004\",index=\"4\",pci=\"0000:9d:00.0\",\
               model=\"NVIDIA H100 80GB HBM3\",numa=\"1\"}";
    node.metric(gpu, 1).await;
    // The stream that ended with the kubelet counts as cancelled.
    kubelet.stop().await.unwrap();
    node.metric("linkwise_kubelet_connected{resource=\"nvidia.com/gpu\"}", 0).await;
    let gone = "linkwise_rpcs_total{resource=\"nvidia.com/gpu\",method=\"ListAndWatch\",code=\"CANCELLED\"}";
    node.metric(gone, 1).await;
}
