//! The driver is unloaded, replaced or loaded again while linkwise runs; its library is replaced on disk; NVML is
//! unavailable for long.

use std::os::unix::net::UnixStream;
use std::path::Path;

use linkwise_kubelet_box::Pod;
use serde_json::Value;

use crate::run::node::{
    GPU, Node, Setup, allocation, replace, seen, signal, until, uuid, wait_registered, wait_unhealthy,
};

const STARTS: &str = "linkwise_nvml_agent_starts_total";
const UP: &str = "linkwise_nvml_agent_up";

fn quick() -> Setup {
    let setup = Setup::on("dgx1-v100").nvml_ms(&[("poll", 50), ("pause", 10), ("grace", 100)]);
    std::fs::create_dir_all(setup.at("sys/module/nvidia")).unwrap();
    set_version(&setup, "580.95.05");
    setup
}

fn set_version(setup: &Setup, version: &str) {
    // In one step, as the kernel's file changes.
    replace(&setup.at("sys/module/nvidia/version"), &format!("{version}\n"));
}

#[tokio::test]
async fn loaded_driver_gets_a_new_agent_at_once() {
    for is_other in [true, false] {
        let (node, kubelet) = quick().serve(8).await;
        let first = node.agent(&[]).await;
        node.setup.tell("xid 2 79");
        wait_unhealthy(&kubelet, &[2]).await;
        if is_other {
            node.setup.tell("driver 590.44.01");
            set_version(&node.setup, "590.44.01");
        } else {
            let (module, again) = (node.setup.at("sys/module/nvidia"), node.setup.at("again"));
            std::fs::create_dir(&again).unwrap();
            std::fs::copy(module.join("version"), again.join("version")).unwrap();
            std::fs::rename(&module, node.setup.at("old")).unwrap();
            std::fs::rename(&again, &module).unwrap();
        }
        let line = node.process.said("the driver was 580.95.05").await;
        assert!(!is_other || line["cause"].as_str().unwrap().contains("and is 590.44.01"), "{line}");
        node.agent(&[first]).await;
        let driver = if is_other { "590.44.01" } else { "580.95.05" };
        node.process.logged(|line| line["message"] == "NVML available" && line["driver"] == driver).await;
        node.metric(UP, 1).await;
        // Loading a driver resets the GPUs.
        wait_unhealthy(&kubelet, &[]).await;
        assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    }
}

/// A linkwise that forgot its GPUs would idle if the PCI bus shows none, and would end if the bus shows some.
#[tokio::test]
async fn gone_driver_is_awaited_however_the_agent_ended() {
    for (is_released, is_on_bus) in [(false, false), (true, false), (false, true), (true, true)] {
        let setup = quick();
        if is_on_bus {
            setup.all_on_bus();
        }
        let (node, kubelet) = setup.serve(8).await;
        if is_released {
            node.process.signal("USR1");
            node.metric(UP, 0).await;
            node.metric("linkwise_driver_released", 1).await;
        }
        node.setup.tell("init 9");
        if is_released {
            node.process.signal("USR2");
        } else {
            // linkwise kills the agent, because its driver has gone.
            std::fs::remove_file(node.setup.at("sys/module/nvidia/version")).unwrap();
        }
        node.process.said("NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
        node.metric("linkwise_nvml_away", 1).await;
        node.process.said("NVML unavailable for longer than the grace period").await;
        // linkwise is ready, because it serves the kubelet.
        node.ready(200, "ready").await;
        node.metric("linkwise_driver_released", 0).await;
        allocation(&kubelet, "meanwhile", GPU, 4).await;
        set_version(&node.setup, "590.44.01");
        node.setup.tell("init 0");
        node.metric("linkwise_nvml_away", 0).await;
        node.metric(UP, 1).await;
        node.metric("linkwise_idle", 0).await;
        let gpus = &kubelet.state().resources[GPU];
        assert_eq!((gpus.registrations, gpus.healthy.len()), (1, 8));
        // The return of the driver may end the agent that receives the XID: send it again.
        until(async || {
            node.setup.try_tell("xid 3 79").map_err(|error| error.to_string())?;
            let unhealthy = kubelet.state().resources[GPU].unhealthy.clone();
            if unhealthy.contains(&uuid(1, 3)) { Ok(()) } else { Err(format!("unhealthy: {unhealthy:?}")) }
        })
        .await;
    }
}

/// The pauses in the log lines with this message.
fn pauses(node: &Node, message: &str) -> Vec<String> {
    let lines = node.process.lines().into_iter().filter_map(|line| serde_json::from_str::<Value>(&line).ok());
    let lines_of_message = lines.filter(|line| line["message"] == message);
    lines_of_message.map(|line| line["again_in"].as_str().unwrap().to_owned()).collect()
}

/// Waits for `wanted` pauses after the first `known` ones, and returns them.
async fn next_pauses(node: &Node, message: &str, known: usize, wanted: usize) -> Vec<String> {
    let new = async || pauses(node, message).split_off(known);
    let mut pauses = seen(new, |pauses| pauses.len() >= wanted).await;
    pauses.truncate(wanted);
    pauses
}

#[tokio::test]
async fn nvml_pauses_double_until_order_or_new_driver() {
    const UNAVAILABLE: &str = "NVML unavailable";
    let setup = Setup::on("dgx1-v100").args(["--fail-on-init-error=false", "--log=debug"]);
    let setup = setup.args(["--nvml-pause-ms=100", "--nvml-poll-ms=50"]);
    setup.all_on_bus();
    std::fs::create_dir_all(setup.at("sys/module/nvidia")).unwrap();
    set_version(&setup, "580.95.05");
    setup.tell("init 9");
    let (node, kubelet) = setup.start_beside_kubelet().await;
    assert_eq!(next_pauses(&node, UNAVAILABLE, 0, 3).await, ["100ms", "200ms", "400ms"]);
    // Only the first line of a cause is a warning.
    let is_warning = |line: &&String| line.contains(UNAVAILABLE) && line.contains("WARN");
    assert_eq!(node.process.lines().iter().filter(is_warning).count(), 1);
    // An operator's order ends the pause.
    node.process.signal("USR1");
    node.metric("linkwise_driver_released", 1).await;
    let known = pauses(&node, UNAVAILABLE).len();
    node.process.signal("USR2");
    assert_eq!(next_pauses(&node, UNAVAILABLE, known, 2).await, ["100ms", "200ms"]);
    // Another driver, after an agent that has worked.
    node.setup.tell("init 0");
    wait_registered(&kubelet, 1, 8).await;
    node.setup.tell("init 9");
    let known = pauses(&node, UNAVAILABLE).len();
    set_version(&node.setup, "590.44.01");
    assert_eq!(next_pauses(&node, UNAVAILABLE, known, 2).await, ["100ms", "200ms"]);
}

#[tokio::test]
async fn on_nvml_loss_unhealthy_withholds_every_gpu() {
    let (node, kubelet) = quick().arg("--on-nvml-loss=unhealthy").serve(8).await;
    node.setup.tell_all(&["init 9", "fail * nvmlDeviceGetCount_v2 9"]);
    wait_unhealthy(&kubelet, &[0, 1, 2, 3, 4, 5, 6, 7]).await;
    assert!(kubelet.admit(&Pod::single("none", GPU, 1), None).await.is_err());
    node.setup.tell_all(&["unfail * nvmlDeviceGetCount_v2", "init 0"]);
    wait_unhealthy(&kubelet, &[]).await;
    allocation(&kubelet, "all", GPU, 8).await;
}

#[tokio::test]
async fn replaced_library_is_loaded_by_the_next_agent() {
    let mut setup = quick();
    let library = setup.at("libnvidia-ml.so.1");
    let real = std::mem::replace(&mut setup.library, library.clone());
    std::fs::copy(&real, &library).unwrap();
    let (node, kubelet) = setup.serve(8).await;
    let replace = |with: &dyn Fn(&Path)| {
        let new = node.setup.at("new.so");
        with(&new);
        std::fs::rename(&new, &library).unwrap();
    };
    // A truncated library: the agent goes on with the one that it has loaded.
    replace(&|new| std::fs::write(new, b"\x7fELF").unwrap());
    node.setup.tell_all(&["calls nvmlDeviceGetTemperature 16", "xid 1 79"]);
    wait_unhealthy(&kubelet, &[1]).await;
    node.metric(STARTS, 1).await;
    // The next agents cannot load it, and pods are admitted.
    signal("KILL", node.agent(&[]).await);
    node.process.said("dlopen: cannot load ").await;
    let known = pauses(&node, "NVML unavailable").len();
    node.metric("linkwise_nvml_away", 1).await;
    allocation(&kubelet, "meanwhile", GPU, 4).await;
    assert!(known > 0);
    replace(&|new| assert!(std::fs::copy(&real, new).unwrap() > 0));
    node.metric(UP, 1).await;
    until(async || node.setup.try_tell("xid 2 79")).await;
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 2))).await.unwrap();
}

#[tokio::test]
async fn first_poll_finds_what_happened_between_two_agents() {
    let setup = quick();
    setup.tell("recovery * 0");
    let (node, kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("hang nvmlInit_v2");
    signal("KILL", first);
    let second = node.agent(&[first]).await;
    let control = node.setup.at(&format!("control.{second}"));
    until(async || UnixStream::connect(&control).map(drop)).await;
    node.setup.tell_all(&["recovery 4 1", "rows 5 false true", "lost 6"]);
    allocation(&kubelet, "meanwhile", GPU, 8).await;
    node.setup.tell("unhang nvmlInit_v2");
    wait_unhealthy(&kubelet, &[4, 5, 6]).await;
}
