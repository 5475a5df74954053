//! Tests with a driver's library that maps much memory or leaks, in a container with the chart's memory limit.

use linkwise_kubelet_box::Pod as Workload;

use crate::node::{GPU, Node, PLUGIN, PLUGIN_CONTAINER, output_of};

const OVER_MEMORY: &str = "linkwise_nvml_agent_ends_total{cause=\"memory\"}";

#[tokio::test]
async fn commands_work_with_a_library_that_maps_a_gibibyte() {
    let node = Node::start("dgx1-v100").await;
    node.tell("runtime");
    let pod = node.deploy(PLUGIN, &[]).await;
    node.wait_offered(&pod, GPU, 8).await;
    for (command, part) in [
        (&["linkwise", "topology"][..], "NV2"),
        (&["linkwise", "snapshot"], "V100"),
        (&["linkwise", "allocate", "--size", "2"], "NV2"),
        (&["linkwise", "doctor"], "0 failed"),
    ] {
        let printed = pod.container(PLUGIN_CONTAINER).exec(command).await;
        assert!(output_of(&printed).contains(part), "{command:?}: {}", printed.out);
    }
    pod.stop().await;
    node.run_discovery().await;
}

#[tokio::test]
async fn leak_ends_agents_but_no_container_or_admission() {
    let node = Node::start("dgx1-v100").await;
    node.tell("leak 20");
    let mut pod = node.deploy(PLUGIN, &[]).await;
    node.wait_offered(&pod, GPU, 8).await;
    let (mut number, mut ends) = (0, 0.0);
    let deadline = tokio::time::Instant::now() + crate::node::LIMIT;
    while ends < 3.0 {
        assert!(tokio::time::Instant::now() < deadline, "{ends} agents ended for their memory\n{}", pod.logs());
        let name = format!("default/pod-{number}");
        let admitted = node.kubelet.admit(&Workload::single(&name, GPU, 2), None).await;
        admitted.unwrap_or_else(|error| panic!("{error}\n{}", pod.logs()));
        assert!(node.kubelet.remove_pod(&name));
        pod.assert_running();
        number += 1;
        ends = node.metric(OVER_MEMORY).await;
    }
    // Without cgroups there is no count.
    assert_eq!(pod.container(PLUGIN_CONTAINER).oom_kills().unwrap_or(0), 0);
    pod.stop().await;
}
