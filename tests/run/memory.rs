//! The memory of the process that calls NVML: a library that maps much and uses little is no trouble, one that leaks
//! costs its process, and one that needs more than it may have is named with the setting.

use linkwise_kubelet_box::{KubeletBox, Pod};
use serde_json::Value;
use tokio::time::timeout;

use crate::run::node::{GPU, LIMIT, Node, Setup, registered, until, uuid};

const UP: &str = "linkwise_nvml_agent_up";
const OVER_MEMORY: &str = "linkwise_nvml_agent_ends_total{cause=\"memory\"}";

/// A machine on which agents may have little, and follow each other soon.
fn tight() -> Setup {
    Setup::on("dgx1-v100").arg("--nvml-poll-ms=20").arg("--nvml-pause-ms=10").arg("--nvml-memory-mib=24")
}

async fn admit(kubelet: &KubeletBox, pod: impl Into<String>, size: u32) -> Vec<String> {
    let admitted = kubelet.admit(&Pod::single(pod, GPU, size), None).await.unwrap();
    admitted.grant("main", GPU).unwrap().allocation.devices.clone()
}

/// An agent works again; no GPU was blamed, and the kubelet noticed nothing.
async fn heals(node: &Node, kubelet: &KubeletBox) {
    node.metric(UP, 1).await;
    until(async || node.setup.try_tell("xid 7 79")).await;
    kubelet.wait(|state| state.resources[GPU].unhealthy == [uuid(1, 7)].into()).await.unwrap();
    assert!(!node.process.lines().iter().any(|line| line.contains("GPU quarantined")));
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "the kubelet noticed nothing");
    assert_eq!(kubelet.violations(), []);
}

fn is_over_memory(line: &Value) -> bool {
    let cause = line["cause"].as_str().unwrap_or_default();
    line["message"] == "NVML unavailable" && cause.contains("more than 24 MiB (--nvml-memory-mib, LINKWISE_NVML_MEM")
}

#[tokio::test]
async fn leaking_library_costs_its_process_only() {
    let (node, kubelet) = tight().serve(8).await;
    node.setup.tell("leak 40");
    // The library leaks in each process that loads it.
    for times in 1..=3 {
        node.metric(OVER_MEMORY, times).await;
        assert_eq!(admit(&kubelet, format!("pod-{times}"), 1).await.len(), 1);
    }
    node.process.logged(is_over_memory).await;
    node.setup.tell("leak 0");
    heals(&node, &kubelet).await;
}

#[tokio::test]
async fn leak_in_a_hanging_call_blames_no_gpu() {
    // The calls may hang for 30 s: the memory ends the agents long before.
    let (node, kubelet) = tight().serve(8).await;
    node.setup.tell("hang 3 nvmlDeviceGetTemperature");
    node.setup.tell("leak 40");
    node.metric(OVER_MEMORY, 3).await;
    assert_eq!(admit(&kubelet, "meanwhile", 4).await.len(), 4);
    node.setup.tell("unhang 3 nvmlDeviceGetTemperature");
    node.setup.tell("leak 0");
    heals(&node, &kubelet).await;
}

#[tokio::test]
async fn leak_during_initialisation_keeps_node_waiting() {
    let setup = tight();
    setup.all_on_bus();
    setup.tell("leak 40");
    setup.tell("hang nvmlInit_v2");
    let kubelet = setup.kubelet();
    let node = setup.start().await;
    node.ready(503, "more than 24 MiB (--nvml-memory-mib, LINKWISE_NVML_MEMORY_MIB)").await;
    // Each time a line: no loop in silence.
    node.metric(OVER_MEMORY, 3).await;
    node.process.logged(is_over_memory).await;
    node.setup.tell("unhang nvmlInit_v2");
    node.setup.tell("leak 0");
    registered(&kubelet, 1, 8).await;
    heals(&node, &kubelet).await;
}

/// The commands that start an agent and end.
pub const TOOLS: [&[&str]; 5] = [
    &["topology"],
    &["allocate", "--size=2"],
    &["snapshot"],
    &["labels", "--oneshot", "--no-timestamp", "--use-node-feature-api=false", "--output-file="],
    &["doctor", "--timeout=20"],
];

/// Its exit code, and all that it said.
pub async fn ran(mut command: tokio::process::Command) -> (Option<i32>, String) {
    let output = timeout(LIMIT, command.output()).await.expect("it ends in time").unwrap();
    let words = [output.stdout, output.stderr].map(|words| String::from_utf8(words).unwrap());
    (output.status.code(), words.concat())
}

#[tokio::test]
async fn library_with_a_runtime_works_with_every_command() {
    let setup = Setup::on("dgx1-v100");
    setup.all_on_bus();
    setup.tell("runtime");
    for (words, says) in TOOLS.into_iter().zip(["GPU7", "GPU-00000001", "uuid: GPU-", "gpu.count=8", "8 GPUs"]) {
        let (code, said) = ran(setup.tool(words)).await;
        // The doctor misses a kubelet.
        assert!(said.contains(says) && (code == Some(0) || words[0] == "doctor"), "{words:?}: {said}");
    }
    let (node, kubelet) = setup.serve(8).await;
    assert_eq!(admit(&kubelet, "pod", 4).await.len(), 4);
    let agent = node.agent(&[]).await;
    let status = std::fs::read_to_string(format!("/proc/{agent}/status")).unwrap();
    let mapped = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap().trim();
    assert!(mapped.trim_end_matches(" kB").parse::<u64>().unwrap() > 1 << 20, "{status}");
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
}

#[tokio::test]
async fn every_command_bounds_its_agent() {
    let setup = Setup::on("dgx1-v100").env("LINKWISE_NVML_MEMORY_MIB", "24");
    setup.all_on_bus();
    setup.tell("leak 40");
    setup.tell("hang nvmlInit_v2");
    for words in TOOLS {
        let (code, said) = ran(setup.tool(words)).await;
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(said.contains("more than 24 MiB (--nvml-memory-mib"), "{words:?}: {said}");
    }
    let node = setup.start().await;
    node.ready(503, "more than 24 MiB").await;
}

#[tokio::test]
async fn bound_that_is_no_number_is_refused_by_name() {
    let setup = Setup::on("dgx1-v100");
    for wrong in ["0", "-1", "much", "48Mi", "1048577"] {
        for words in TOOLS.into_iter().chain([&["run"][..]]) {
            let (code, said) = ran(setup.tool(&[words, &[&format!("--nvml-memory-mib={wrong}")]].concat())).await;
            assert_eq!(code, Some(2), "{words:?}: {said}");
            assert!(said.contains("--nvml-memory-mib") && said.contains(wrong), "{words:?}: {said}");
        }
        let mut by_variable = setup.tool(&["topology"]);
        by_variable.env("LINKWISE_NVML_MEMORY_MIB", wrong);
        let (code, said) = ran(by_variable).await;
        assert!(code == Some(2) && said.contains("--nvml-memory-mib"), "{said}");
    }
}
