//! A library that hangs or crashes, an agent that is stopped or killed, a GPU that ends every agent that queries it:
//! each costs an agent, the log names the cause, and admissions go on.

use linkwise_kubelet_box::KubeletBox;

use crate::run::node::{
    GPU, LIMIT, Node, Setup, allocation, kib, machine, signal, until, uuid, wait_registered, wait_unhealthy,
};

const STARTS: &str = "linkwise_nvml_agent_starts_total";
const UP: &str = "linkwise_nvml_agent_up";

/// Makes linkwise's timeouts, pauses and intervals short.
fn quick(setup: Setup) -> Setup {
    setup.nvml_ms(&[("poll", 50), ("call", 1_000), ("start", 5_000), ("pause", 2), ("grace", 100), ("trial", 50)])
}

fn ends(cause: &str) -> String {
    format!("linkwise_nvml_agent_ends_total{{cause=\"{cause}\"}}")
}

/// Waits until the GPU of this index is quarantined, and returns the cause.
async fn wait_quarantined(node: &Node, index: u32) -> String {
    let line = node.process.said("GPU quarantined").await;
    assert_eq!((line["gpu"].as_str(), line["index"].as_u64()), (Some(&*uuid(1, index)), Some(index.into())), "{line}");
    line["cause"].as_str().unwrap().to_owned()
}

/// Asserts that the node works as before: pods are admitted, and events of this GPU arrive.
async fn assert_works(node: &Node, kubelet: &KubeletBox, gpu: u32) {
    node.metric(UP, 1).await;
    let series = format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"79\"}}", uuid(1, gpu));
    // The agent may be replaced at this moment: the XID is sent until an agent receives it.
    let heard = async || {
        node.setup.try_tell(&format!("xid {gpu} 79")).map_err(|error| error.to_string())?;
        if node.get("/metrics").await.body.contains(&series) { Ok(()) } else { Err("not heard".to_owned()) }
    };
    until(heard).await;
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, gpu))).await.unwrap();
    allocation(kubelet, &format!("pod-{gpu}"), GPU, 1).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "linkwise registered again");
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn hung_call_costs_its_agent_with_and_without_lock() {
    for fault in ["hang", "hold"] {
        let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
        let first = node.agent(&[]).await;
        node.setup.tell(&format!("{fault} 3 nvmlDeviceGetTemperature"));
        let line = node.process.logged(|line| line["message"] == "NVML unavailable").await;
        let named = format!("nvmlDeviceGetTemperature of {} did not return within 1s", uuid(1, 3));
        assert!(line["cause"].as_str().unwrap().starts_with(&named), "{line}");
        node.setup.tell(&format!("un{fault} 3 nvmlDeviceGetTemperature"));
        node.agent(&[first]).await;
        node.metric(&ends("hung"), 1).await;
        assert_works(&node, &kubelet, 3).await;
    }
}

#[tokio::test]
async fn admissions_are_answered_while_a_call_hangs() {
    // The call hangs for longer than the test may take.
    let limit = LIMIT.as_millis() * 2;
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=50").arg(format!("--nvml-call-ms={limit}"));
    let (node, kubelet) = setup.serve(8).await;
    // The pods come once the call hangs and every other call waits for it.
    node.setup.tell_all(&["hold 0 nvmlDeviceGetTemperature", "blocked nvmlDeviceGetTemperature"]);
    for pod in ["a", "b", "c", "d"] {
        allocation(&kubelet, pod, GPU, 2).await;
    }
    node.metric(STARTS, 1).await;
    node.metric(UP, 1).await;
}

#[tokio::test]
async fn gpu_that_crashes_agents_is_quarantined_for_a_time() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).arg("--health-hold-ms=1").serve(8).await;
    node.setup.tell("crash 5 nvmlDeviceGetTemperature");
    let cause = wait_quarantined(&node, 5).await;
    assert!(cause.contains("SIGABRT") && cause.contains("nvmlDeviceGetTemperature"), "{cause}");
    wait_unhealthy(&kubelet, &[5]).await;
    // Trials crash too, and no other GPU is blamed.
    let trials = || node.process.count("trial of the quarantined GPU 5");
    until(async || if trials() >= 2 { Ok(()) } else { Err(trials()) }).await;
    node.metric("linkwise_gpus", 8).await;
    assert_works(&node, &kubelet, 6).await;
    node.setup.tell("uncrash 5 nvmlDeviceGetTemperature");
    let line = node.process.logged(|line| line["message"].to_string().contains("released from quarantine")).await;
    assert_eq!(line["gpu"].as_str(), Some(uuid(1, 5).as_str()));
    kubelet.wait(|state| state.resources[GPU].healthy.contains(&uuid(1, 5))).await.unwrap();
    assert_works(&node, &kubelet, 5).await;
    assert_eq!(node.process.count("GPU quarantined"), 1);
}

#[tokio::test]
async fn gpu_of_unknown_uuid_that_hangs_is_quarantined() {
    let setup = quick(Setup::on("dgx1-v100"));
    setup.all_on_bus();
    setup.tell("hang 2 nvmlDeviceGetHandleByIndex_v2");
    let (node, kubelet) = setup.start_beside_kubelet().await;
    let line = node.process.said("GPU quarantined").await;
    assert!(line["cause"].as_str().unwrap().contains("nvmlDeviceGetHandleByIndex_v2 of GPU 2 did not"), "{line}");
    wait_registered(&kubelet, 1, 7).await;
    node.setup.tell("unhang 2 nvmlDeviceGetHandleByIndex_v2");
    wait_registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn gpu_that_crashes_agents_at_start_costs_itself_only() {
    for option in ["--log=info", "--fail-on-init-error=true"] {
        let setup = quick(Setup::on("dgx1-v100")).arg(option);
        setup.all_on_bus();
        setup.tell("crash 5 nvmlDeviceGetTemperature");
        let (node, kubelet) = setup.start_beside_kubelet().await;
        wait_quarantined(&node, 5).await;
        let others = wait_registered(&kubelet, 1, 7).await;
        assert!(!others.healthy.contains(&uuid(1, 5)), "{others:?}");
        assert_works(&node, &kubelet, 6).await;
        node.setup.tell("uncrash 5 nvmlDeviceGetTemperature");
        kubelet.wait(|state| state.resources[GPU].healthy.contains(&uuid(1, 5))).await.unwrap();
    }
}

#[tokio::test]
async fn node_is_unready_while_every_gpu_ends_agents() {
    let one = machine(&[("GPU-a", "0000:06:00.0", "")]);
    let machines = [(quick(Setup::with(&one)), 1), (quick(Setup::on("dgx1-v100")).arg("--fail-on-init-error=true"), 8)];
    for (setup, gpus) in machines {
        if gpus == 8 {
            setup.all_on_bus();
        }
        setup.tell("crash nvmlDeviceGetTemperature");
        let (node, kubelet) = setup.start_beside_kubelet().await;
        node.process.said("agents would have to skip every GPU").await;
        node.ready(503, "NVML is initialised, but no agent has seen the GPUs").await;
        node.setup.tell("uncrash nvmlDeviceGetTemperature");
        wait_registered(&kubelet, 1, gpus).await;
    }
}

#[tokio::test]
async fn no_gpu_is_quarantined_if_each_crashes_agents() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
    node.setup.tell("crash nvmlDeviceGetTemperature");
    node.process.said("agents would have to skip every GPU").await;
    node.metric("linkwise_nvml_away", 1).await;
    assert_eq!(node.process.count("GPU quarantined"), 0);
    allocation(&kubelet, "meanwhile", GPU, 4).await;
    node.setup.tell("uncrash nvmlDeviceGetTemperature");
    node.metric("linkwise_nvml_away", 0).await;
    assert_works(&node, &kubelet, 0).await;
}

#[tokio::test]
async fn stopped_agent_is_replaced_and_no_gpu_is_blamed() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
    let mut known = Vec::new();
    for times in 1..=3 {
        let agent = node.agent(&known).await;
        known.push(agent);
        node.metric(UP, 1).await;
        signal("STOP", agent);
        node.metric(&ends("silent"), times).await;
    }
    node.process.said("has been stopped").await;
    assert_works(&node, &kubelet, 4).await;
    assert_eq!(node.process.count("GPU quarantined"), 0);
}

#[tokio::test]
async fn agent_killed_anywhere_is_replaced_without_blame() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
    let mut known = Vec::new();
    // A fixed sequence of points (a linear congruence), from the agent's start to well into its polls.
    let mut point = 1u32;
    for _ in 0..30 {
        let agent = node.agent(&known).await;
        known.push(agent);
        point = point.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        for _ in 0..point >> 18 {
            tokio::task::yield_now().await;
        }
        // A failing kill is ignored, because the agent may have ended by itself.
        let _ = std::process::Command::new("sh").args(["-c", &format!("kill -KILL {agent} 2>&1")]).status();
    }
    assert_works(&node, &kubelet, 1).await;
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 7);
    assert_eq!(node.process.count("GPU quarantined"), 0);
}

#[tokio::test]
async fn xid_storm_loses_no_event_in_bounded_memory() {
    // Under short timeouts linkwise could end an agent that a busy machine delays, and lose its queue.
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    let peak = || kib(node.process.id(), "VmHWM").unwrap();
    let before = peak();
    node.setup.tell_all(&["storm 0 31 25000", "xid 2 79", "storm 0 31 25000", "xid 3 79"]);
    wait_unhealthy(&kubelet, &[2, 3]).await;
    node.metric(&format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"31\"}}", uuid(1, 0)), 50_000).await;
    // An event takes about a hundred bytes: keeping them all would exceed this bound.
    assert!(peak() < before + 4 * 1024, "{before} KiB before, {} KiB after", peak());
    assert_works(&node, &kubelet, 4).await;
}
