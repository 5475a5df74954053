//! The agent's memory: a library that maps much and uses little works, one that leaks ends its agent, and one that
//! needs more than the bound is reported with the setting.

use linkwise_kubelet_box::KubeletBox;
use serde_json::Value;
use tokio::time::timeout;

use crate::run::node::{GPU, LIMIT, Node, Setup, allocation, kib, until, wait_unhealthy};

const UP: &str = "linkwise_nvml_agent_up";
const OVER_MEMORY: &str = "linkwise_nvml_agent_ends_total{cause=\"memory\"}";

/// A machine whose agents may use little memory, and follow each other soon.
fn tight() -> Setup {
    Setup::on("dgx1-v100").args(["--nvml-poll-ms=20", "--nvml-pause-ms=10", "--nvml-memory-mib=24"])
}

/// Asserts that an agent works again, that no GPU was blamed, and that the kubelet noticed nothing.
async fn assert_healed(node: &Node, kubelet: &KubeletBox) {
    node.metric(UP, 1).await;
    until(async || node.setup.try_tell("xid 7 79")).await;
    wait_unhealthy(kubelet, &[7]).await;
    assert_eq!(node.process.count("GPU quarantined"), 0);
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "linkwise registered again");
    assert_eq!(kubelet.violations(), []);
}

fn is_over_memory(line: &Value) -> bool {
    let cause = line["cause"].as_str().unwrap_or_default();
    line["message"] == "NVML unavailable" && cause.contains("more than 24 MiB (--nvml-memory-mib, LINKWISE_NVML_MEM")
}

/// The library leaks in each agent, also while a call hangs: memory ends the agents long before the call's 30 s limit.
#[tokio::test]
async fn leaking_library_costs_its_process_only() {
    for hung in [None, Some("3 nvmlDeviceGetTemperature")] {
        let (node, kubelet) = tight().serve(8).await;
        hung.iter().for_each(|call| node.setup.tell(&format!("hang {call}")));
        node.setup.tell("leak 40");
        for times in 1..=3 {
            node.metric(OVER_MEMORY, times).await;
            allocation(&kubelet, &format!("pod-{times}"), GPU, 1).await;
        }
        node.process.logged(is_over_memory).await;
        hung.iter().for_each(|call| node.setup.tell(&format!("unhang {call}")));
        node.setup.tell("leak 0");
        assert_healed(&node, &kubelet).await;
    }
}

/// Commands that start an agent and do not serve.
pub const TOOLS: [&[&str]; 5] = [
    &["topology"],
    &["allocate", "--size=2"],
    &["snapshot"],
    &["labels", "--oneshot", "--no-timestamp", "--use-node-feature-api=false", "--output-file="],
    &["doctor", "--timeout=20"],
];

/// Runs a command, and returns its exit code and output.
pub async fn ran(mut command: tokio::process::Command) -> (Option<i32>, String) {
    let output = timeout(LIMIT, command.output()).await.expect("the command did not end in time").unwrap();
    let words = [output.stdout, output.stderr].map(|words| String::from_utf8(words).unwrap());
    (output.status.code(), words.concat())
}

#[tokio::test]
async fn library_with_a_go_runtime_works_with_every_command() {
    let setup = Setup::on("dgx1-v100");
    setup.all_on_bus();
    setup.tell("runtime");
    for (words, says) in TOOLS.into_iter().zip(["GPU7", "GPU-00000001", "uuid: GPU-", "gpu.count=8", "8 GPUs"]) {
        let (code, output) = ran(setup.tool(words)).await;
        // The doctor fails, because there is no kubelet.
        assert!(output.contains(says) && (code == Some(0) || words[0] == "doctor"), "{words:?}: {output}");
    }
    let (node, kubelet) = setup.serve(8).await;
    allocation(&kubelet, "pod", GPU, 4).await;
    let agent = node.agent(&[]).await;
    assert!(kib(agent, "VmData").unwrap() > 1 << 20);
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
}

/// Asserts that each of [`TOOLS`] fails on this machine with this cause.
pub async fn assert_every_command_fails(setup: &Setup, cause: &str) {
    for words in TOOLS {
        let (code, output) = ran(setup.tool(words)).await;
        assert!(code == Some(1) && output.contains(cause), "{words:?}: {code:?} {output}");
        assert!(!output.contains("linkwise run idles here"), "{words:?}: {output}");
    }
}

#[tokio::test]
async fn every_command_bounds_its_agent() {
    let setup = Setup::on("dgx1-v100").env("LINKWISE_NVML_MEMORY_MIB", "24");
    setup.all_on_bus();
    setup.tell_all(&["leak 40", "hang nvmlInit_v2"]);
    assert_every_command_fails(&setup, "more than 24 MiB (--nvml-memory-mib").await;
    let node = setup.start().await;
    node.ready(503, "more than 24 MiB").await;
}

#[tokio::test]
async fn invalid_memory_bound_is_refused_by_name() {
    let setup = Setup::on("dgx1-v100");
    for wrong in ["0", "-1", "much", "48Mi", "1048577"] {
        for words in TOOLS.into_iter().chain([&["run"][..]]) {
            let (code, output) = ran(setup.tool(&[words, &[&format!("--nvml-memory-mib={wrong}")]].concat())).await;
            assert_eq!(code, Some(2), "{words:?}: {output}");
            assert!(output.contains("--nvml-memory-mib") && output.contains(wrong), "{words:?}: {output}");
        }
        let mut by_variable = setup.tool(&["topology"]);
        by_variable.env("LINKWISE_NVML_MEMORY_MIB", wrong);
        let (code, output) = ran(by_variable).await;
        assert!(code == Some(2) && output.contains("--nvml-memory-mib"), "{output}");
    }
}
