//! GPUs in trouble that come back: each is taken out, the others are not, and all eight are healthy in the end, by
//! polls alone.

use crate::run::node::{Node, Setup, registered, signal, unhealthy, until, uuid};

const UP: &str = "linkwise_nvml_agent_up";
const UNHEARD: &str = "linkwise_nvml_unheard_gpus";

/// A machine whose driver has a word for what to do, looked at often, with a short hold.
fn quick() -> Setup {
    without_trials().arg("--nvml-trial-ms=50")
}

/// Such a machine, in which no process is started for a GPU in trouble.
fn without_trials() -> Setup {
    let setup = Setup::on("dgx1-v100");
    setup.tell("recovery * 0");
    setup.args(["--nvml-poll-ms=50", "--nvml-pause-ms=10", "--health-hold-ms=50"])
}

/// Waits until a GPU is unhealthy for this reason.
async fn reason(node: &Node, gpu: u32, reason: &str) {
    let wanted = |line: &serde_json::Value| {
        let why = line["reason"].as_str().unwrap_or_default();
        line["message"] == "the GPU is unhealthy" && line["gpu"] == uuid(1, gpu).as_str() && why.contains(reason)
    };
    node.process.logged(wanted).await;
}

#[tokio::test]
async fn gpu_lost_for_the_life_of_a_process_returns_with_a_new_one() {
    let (node, kubelet) = quick().serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("fall 3");
    unhealthy(&kubelet, &[3]).await;
    reason(&node, 3, "says that the GPU is lost").await;
    // New processes do not find it either, and the others are served and heard throughout.
    until(async || if node.agent_ids().contains(&first) { Err("the first one lives") } else { Ok(()) }).await;
    node.process.said("GPU GPU-00000001-0000-4000-8000-000000000003 is out of reach").await;
    until(async || node.setup.try_tell("xid 5 63")).await;
    unhealthy(&kubelet, &[3]).await;
    node.setup.tell("revive 3");
    registered(&kubelet, 1, 8).await;
    until(async || node.setup.try_tell("xid 3 79")).await;
    reason(&node, 3, "XID 79").await;
    assert_eq!(kubelet.violations(), []);
}

/// The process that works knows the handles and goes on with them; the next one does not find the GPUs.
#[tokio::test]
async fn gpus_that_an_agent_does_not_find_are_out_until_found() {
    for (which, call, code, gpus, why) in [
        ("3", "nvmlDeviceGetHandleByIndex_v2", 15, &[3][..], "nvmlDeviceGetHandleByIndex_v2 says that the GPU is lost"),
        (
            "*",
            "nvmlDeviceGetCount_v2",
            999,
            &[0, 1, 2, 3, 4, 5, 6, 7],
            "nvmlDeviceGetCount_v2 failed: NVML_ERROR_UNKNOWN (999)",
        ),
    ] {
        let (node, kubelet) = quick().serve(8).await;
        node.setup.tell(&format!("fail {which} {call} {code}"));
        signal("KILL", node.agent(&[]).await);
        unhealthy(&kubelet, gpus).await;
        reason(&node, 3, why).await;
        node.metric("linkwise_gpus", 8).await;
        node.setup.tell(&format!("unfail {which} {call}"));
        registered(&kubelet, 1, 8).await;
    }
}

#[tokio::test]
async fn gpu_unidentified_by_a_scan_is_out_until_identified() {
    for (call, code, why) in [
        ("nvmlDeviceGetHandleByIndex_v2", 999, "nvmlDeviceGetHandleByIndex_v2 failed: NVML_ERROR_UNKNOWN (999)"),
        ("nvmlDeviceGetUUID", 16, "nvmlDeviceGetUUID says that the GPU has to be reset"),
        ("nvmlDeviceGetPciInfo_v3", 15, "nvmlDeviceGetPciInfo_v3 says that the GPU is lost"),
    ] {
        let (node, kubelet) = quick().serve(8).await;
        node.setup.tell(&format!("fail 3 {call} {code}"));
        node.setup.tell("link 0 0 down");
        unhealthy(&kubelet, &[0, 3]).await;
        reason(&node, 3, why).await;
        node.setup.tell("link 0 0 up");
        unhealthy(&kubelet, &[3]).await;
        node.setup.tell(&format!("unfail 3 {call}"));
        registered(&kubelet, 1, 8).await;
    }
}

/// One lost GPU ends the wait for all: the next agent registers the others, and the one after it all.
#[tokio::test]
async fn lost_gpu_leaves_the_others_events() {
    let setup = without_trials();
    setup.tell("loss-ends-waits");
    let (node, kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("lost 2");
    node.process.said("NVML agent replaced").await;
    let second = node.agent(&[first]).await;
    node.metric(UP, 1).await;
    node.setup.tell("recovery 4 1");
    node.setup.tell("xid 4 79");
    node.metric(&format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"79\"}}", uuid(1, 4)), 1).await;
    unhealthy(&kubelet, &[2, 4]).await;
    node.metric("linkwise_nvml_event_failures_total", 1).await;
    node.setup.tell("recovery 4 0");
    node.setup.tell("back 2");
    node.agent(&[first, second]).await;
    registered(&kubelet, 1, 8).await;
    node.metric(UNHEARD, 0).await;
    node.setup.tell("xid 2 79");
    reason(&node, 2, "XID 79").await;
}

#[tokio::test]
async fn unregistered_gpus_are_heard_by_a_later_agent() {
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
        reason(&node, 1, "XID 79").await;
        assert_eq!(kubelet.violations(), []);
    }
}

#[tokio::test]
async fn a_gpu_that_is_divided_up_misses_no_links() {
    let setup = quick();
    setup.tell("mig 6 {enabled: false}");
    let (node, kubelet) = setup.serve(8).await;
    node.setup.tell("link 6 1 down");
    unhealthy(&kubelet, &[6]).await;
    node.setup.tell("mig 6 {enabled: true}");
    registered(&kubelet, 1, 8).await;
    // What it did not offer meanwhile is asked for again.
    node.setup.tell("rows 6 false true");
    node.setup.tell("mig 6 {enabled: false}");
    unhealthy(&kubelet, &[6]).await;
    reason(&node, 6, "a row remapping failed").await;
    node.setup.tell("link 6 1 up");
    node.setup.tell("rows 6 false false");
    registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn a_gpu_that_is_divided_up_takes_no_peer_with_it() {
    let setup = quick();
    setup.tell("mig 6 {enabled: false}");
    let (node, kubelet) = setup.serve(8).await;
    // The driver shuts both ends down: the GPU's, which is not asked, and those of its peers.
    node.setup.tell("mig 6 {enabled: true}");
    node.setup.tell("links 6 down");
    node.setup.tell("calls nvmlDeviceGetTemperature 80");
    // What shows later is published later.
    node.setup.tell("recovery 0 1");
    unhealthy(&kubelet, &[0]).await;
}
