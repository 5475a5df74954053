//! GPUs that fail and recover: only the failed GPU is unhealthy, and polls make it healthy again without an operator.

use crate::run::node::{Node, Setup, signal, until, uuid, wait_registered, wait_unhealthy};

const UP: &str = "linkwise_nvml_agent_up";
const UNHEARD: &str = "linkwise_nvml_unheard_gpus";

/// A machine with frequent polls, short hold times and early trials of GPUs by new agents; its driver reports recovery
/// actions.
fn quick() -> Setup {
    without_trials().arg("--nvml-trial-ms=50")
}

/// The same machine, with trials so late that a test sees none.
fn without_trials() -> Setup {
    let setup = Setup::on("dgx1-v100");
    setup.tell("recovery * 0");
    setup.args(["--nvml-poll-ms=50", "--nvml-pause-ms=10", "--health-hold-ms=50"])
}

/// Waits until a GPU is unhealthy for this reason.
async fn wait_reason(node: &Node, gpu: u32, reason: &str) {
    let wanted = |line: &serde_json::Value| {
        let why = line["reason"].as_str().unwrap_or_default();
        line["message"] == "the GPU is unhealthy" && line["gpu"] == uuid(1, gpu).as_str() && why.contains(reason)
    };
    node.process.logged(wanted).await;
}

#[tokio::test]
async fn gpu_lost_to_one_agent_returns_with_a_new_one() {
    let (node, kubelet) = quick().serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("fall 3");
    wait_unhealthy(&kubelet, &[3]).await;
    wait_reason(&node, 3, "says that the GPU is lost").await;
    // New agents do not find GPU 3 either; the other GPUs are served, and their events arrive.
    until(async || if node.agent_ids().contains(&first) { Err("the first agent lives") } else { Ok(()) }).await;
    node.process.said("GPU GPU-00000001-0000-4000-8000-000000000003 is out of reach").await;
    until(async || node.setup.try_tell("xid 5 63")).await;
    wait_unhealthy(&kubelet, &[3]).await;
    node.setup.tell("revive 3");
    wait_registered(&kubelet, 1, 8).await;
    until(async || node.setup.try_tell("xid 3 79")).await;
    wait_reason(&node, 3, "XID 79").await;
    assert_eq!(kubelet.violations(), []);
}

/// The running agent goes on with the handles that it has; the next agent does not find the GPUs.
#[tokio::test]
async fn gpus_an_agent_misses_are_unhealthy_until_found() {
    let all: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7];
    for (which, call, code, gpus, why) in [
        ("3", "nvmlDeviceGetHandleByIndex_v2", 15, &[3][..], "says that the GPU is lost"),
        ("*", "nvmlDeviceGetCount_v2", 999, all, "failed: NVML_ERROR_UNKNOWN (999)"),
    ] {
        let (node, kubelet) = quick().serve(8).await;
        node.setup.tell(&format!("fail {which} {call} {code}"));
        signal("KILL", node.agent(&[]).await);
        wait_unhealthy(&kubelet, gpus).await;
        wait_reason(&node, 3, &format!("{call} {why}")).await;
        node.metric("linkwise_gpus", 8).await;
        node.setup.tell(&format!("unfail {which} {call}"));
        wait_registered(&kubelet, 1, 8).await;
    }
}

#[tokio::test]
async fn unidentified_gpu_is_unhealthy_until_identified() {
    for (call, code, why) in [
        ("nvmlDeviceGetHandleByIndex_v2", 999, "nvmlDeviceGetHandleByIndex_v2 failed: NVML_ERROR_UNKNOWN (999)"),
        ("nvmlDeviceGetUUID", 16, "nvmlDeviceGetUUID says that the GPU has to be reset"),
        ("nvmlDeviceGetPciInfo_v3", 15, "nvmlDeviceGetPciInfo_v3 says that the GPU is lost"),
    ] {
        let (node, kubelet) = quick().serve(8).await;
        node.setup.tell_all(&[&format!("fail 3 {call} {code}"), "link 0 0 down"]);
        wait_unhealthy(&kubelet, &[0, 3]).await;
        wait_reason(&node, 3, why).await;
        node.setup.tell("link 0 0 up");
        wait_unhealthy(&kubelet, &[3]).await;
        node.setup.tell(&format!("unfail 3 {call}"));
        wait_registered(&kubelet, 1, 8).await;
    }
}

/// One lost GPU ends the wait for all events: the next agent registers the other GPUs, and the one after it all GPUs.
#[tokio::test]
async fn lost_gpu_costs_no_event_of_others() {
    let setup = without_trials();
    setup.tell("loss-ends-waits");
    let (node, kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("lost 2");
    node.process.said("NVML agent replaced").await;
    let second = node.agent(&[first]).await;
    node.metric(UP, 1).await;
    node.setup.tell_all(&["recovery 4 1", "xid 4 79"]);
    node.metric(&format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"79\"}}", uuid(1, 4)), 1).await;
    wait_unhealthy(&kubelet, &[2, 4]).await;
    node.metric("linkwise_nvml_event_failures_total", 1).await;
    node.setup.tell_all(&["recovery 4 0", "back 2"]);
    node.agent(&[first, second]).await;
    wait_registered(&kubelet, 1, 8).await;
    node.metric(UNHEARD, 0).await;
    node.setup.tell("xid 2 79");
    wait_reason(&node, 2, "XID 79").await;
}

#[tokio::test]
async fn later_agent_registers_the_events_of_all_gpus() {
    for (call, which, unheard) in
        [("nvmlDeviceRegisterEvents", "1", 1), ("nvmlDeviceRegisterEvents", "*", 8), ("nvmlEventSetCreate", "*", 8)]
    {
        let setup = quick();
        setup.tell(&format!("fail {which} {call} 999"));
        let (node, kubelet) = setup.serve(8).await;
        node.process.said(&format!("the events of {unheard} GPU(s) do not arrive")).await;
        until(async || node.setup.try_tell(&format!("unfail {which} {call}"))).await;
        node.metric(UNHEARD, 0).await;
        until(async || node.setup.try_tell("xid 1 79")).await;
        wait_reason(&node, 1, "XID 79").await;
        assert_eq!(kubelet.violations(), []);
    }
}

#[tokio::test]
async fn gpu_in_mig_mode_has_no_missing_links() {
    let setup = quick();
    setup.tell("mig 6 {enabled: false}");
    let (node, kubelet) = setup.serve(8).await;
    node.setup.tell("link 6 1 down");
    wait_unhealthy(&kubelet, &[6]).await;
    node.setup.tell("mig 6 {enabled: true}");
    wait_registered(&kubelet, 1, 8).await;
    // Out of MIG mode, polls cover the whole GPU again.
    node.setup.tell_all(&["rows 6 false true", "mig 6 {enabled: false}"]);
    wait_unhealthy(&kubelet, &[6]).await;
    wait_reason(&node, 6, "a row remapping failed").await;
    node.setup.tell_all(&["link 6 1 up", "rows 6 false false"]);
    wait_registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn gpu_in_mig_mode_makes_no_peer_unhealthy() {
    let setup = quick();
    setup.tell("mig 6 {enabled: false}");
    let (node, kubelet) = setup.serve(8).await;
    // The driver shuts down both ends of GPU 6's links: its own, which polls skip, and its peers'.
    node.setup.tell_all(&["mig 6 {enabled: true}", "links 6 down", "calls nvmlDeviceGetTemperature 80"]);
    // GPU 0 fails last, so that failures of GPU 6's peers would be known by then.
    node.setup.tell("recovery 0 1");
    wait_unhealthy(&kubelet, &[0]).await;
}
