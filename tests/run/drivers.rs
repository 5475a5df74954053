//! The driver is unloaded, replaced or loaded again while linkwise runs; its library is replaced on disk; NVML is
//! unavailable for long.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use linkwise_kubelet_box::Pod;
use serde_json::Value;

use crate::run::node::{GPU, Node, Setup, machine, registered, signal, until, uuid};

const STARTS: &str = "linkwise_nvml_agent_starts_total";
const UP: &str = "linkwise_nvml_agent_up";

fn quick() -> Setup {
    let mut setup = Setup::on("dgx1-v100");
    for (option, milliseconds) in [("poll", 20), ("pause", 10), ("grace", 100)] {
        setup = setup.arg(format!("--nvml-{option}-ms={milliseconds}"));
    }
    std::fs::create_dir_all(setup.at("sys/module/nvidia")).unwrap();
    version(&setup, "580.95.05");
    setup
}

fn version(setup: &Setup, version: &str) {
    // Whole or not at all, as the kernel's is.
    let new = setup.at("version");
    std::fs::write(&new, format!("{version}\n")).unwrap();
    std::fs::rename(new, setup.at("sys/module/nvidia/version")).unwrap();
}

#[tokio::test]
async fn a_driver_that_is_replaced_gets_a_new_process_at_once() {
    let (node, kubelet) = quick().serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("xid 2 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 2))).await.unwrap();
    node.setup.tell("driver 590.44.01");
    version(&node.setup, "590.44.01");
    let line = node.process.said("the driver was 580.95.05").await;
    assert!(line["cause"].as_str().unwrap().contains("and is 590.44.01"), "{line}");
    node.agent(&[first]).await;
    node.process.logged(|line| line["message"] == "NVML available" && line["driver"] == "590.44.01").await;
    node.metric(UP, 1).await;
    // What needed a reset has had one.
    kubelet.wait(|state| state.resources[GPU].healthy.len() == 8).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
}

#[tokio::test]
async fn reloaded_driver_is_awaited_and_pods_are_admitted() {
    let (node, kubelet) = quick().serve(8).await;
    node.setup.tell("init 9");
    node.setup.tell("fail * nvmlDeviceGetCount_v2 9");
    std::fs::remove_file(node.setup.at("sys/module/nvidia/version")).unwrap();
    node.process.said("NVML unavailable for longer than the grace period").await;
    node.metric("linkwise_nvml_away", 1).await;
    // Ready is whether the kubelet is served, and it is.
    node.ready(200, "ready").await;
    let admitted = kubelet.admit(&Pod::single("meanwhile", GPU, 4), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.devices.len(), 4);
    version(&node.setup, "580.95.05");
    node.setup.tell("unfail * nvmlDeviceGetCount_v2");
    node.setup.tell("init 0");
    node.metric("linkwise_nvml_away", 0).await;
    node.metric(UP, 1).await;
    // A process that has heard of it may be the one that the driver's return ends.
    until(async || {
        node.setup.try_tell("xid 3 79").map_err(|error| error.to_string())?;
        let unhealthy = kubelet.state().resources[GPU].unhealthy.clone();
        if unhealthy.contains(&uuid(1, 3)) { Ok(()) } else { Err(format!("unhealthy: {unhealthy:?}")) }
    })
    .await;
}

/// Nothing is on the PCI bus here: a linkwise that forgot its GPUs would take this for a node without GPUs, and wait
/// for the bus.
#[tokio::test]
async fn gone_driver_is_awaited_however_the_agent_ended() {
    for released in [false, true] {
        let (node, kubelet) = quick().serve(8).await;
        node.setup.tell("init 9");
        if released {
            node.process.signal("USR1");
            node.metric(UP, 0).await;
            node.process.signal("USR2");
        } else {
            std::fs::remove_file(node.setup.at("sys/module/nvidia/version")).unwrap();
        }
        node.process.said("NVML unavailable").await;
        version(&node.setup, "580.95.05");
        node.setup.tell("init 0");
        node.metric(UP, 1).await;
        node.metric("linkwise_idle", 0).await;
        assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    }
}

#[tokio::test]
async fn unloaded_driver_with_gpus_on_bus_ends_no_node() {
    let setup = quick();
    setup.all_on_bus();
    let (node, kubelet) = setup.serve(8).await;
    // The first agent ends in order: the parent dismisses it because its driver has gone.
    node.setup.tell("init 9");
    std::fs::remove_file(node.setup.at("sys/module/nvidia/version")).unwrap();
    node.process.said("NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
    node.metric("linkwise_nvml_away", 1).await;
    kubelet.admit(&Pod::single("meanwhile", GPU, 4), None).await.unwrap();
    version(&node.setup, "590.44.01");
    node.setup.tell("init 0");
    node.metric("linkwise_nvml_away", 0).await;
    node.metric(UP, 1).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
}

#[tokio::test]
async fn the_same_driver_loaded_anew_gets_a_new_process_too() {
    let (node, kubelet) = quick().serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("xid 2 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 2))).await.unwrap();
    let module = node.setup.at("sys/module/nvidia");
    let anew = node.setup.at("anew");
    std::fs::create_dir(&anew).unwrap();
    std::fs::copy(module.join("version"), anew.join("version")).unwrap();
    std::fs::rename(&module, node.setup.at("old")).unwrap();
    std::fs::rename(&anew, &module).unwrap();
    node.process.said("the driver was 580.95.05").await;
    node.agent(&[first]).await;
    node.metric(UP, 1).await;
    kubelet.wait(|state| state.resources[GPU].healthy.len() == 8).await.unwrap();
}

/// The pauses that the log has said of such lines.
fn pauses(node: &Node, message: &str) -> Vec<String> {
    let lines = node.process.lines().into_iter().filter_map(|line| serde_json::from_str::<Value>(&line).ok());
    let told = lines.filter(|line| line["message"].as_str().is_some_and(|text| text.starts_with(message)));
    told.map(|line| line["again_in"].as_str().unwrap().to_owned()).collect()
}

/// The same, once there are so many; those after the first `known`.
async fn next_pauses(node: &Node, message: &str, known: usize, wanted: usize) -> Vec<String> {
    let ask = async || {
        let pauses = pauses(node, message).split_off(known);
        if pauses.len() >= wanted { Ok(pauses) } else { Err(pauses) }
    };
    let mut pauses = until(ask).await;
    pauses.truncate(wanted);
    pauses
}

#[tokio::test]
async fn pauses_double_without_nvml_until_another_cause() {
    const NOT: &str = "NVML unavailable";
    let setup = Setup::on("dgx1-v100").arg("--fail-on-init-error=false").arg("--log=debug");
    let setup = setup.arg("--nvml-pause-ms=100").arg("--nvml-poll-ms=20");
    setup.all_on_bus();
    std::fs::create_dir_all(setup.at("sys/module/nvidia")).unwrap();
    version(&setup, "580.95.05");
    setup.tell("init 9");
    let kubelet = setup.kubelet();
    let node = setup.start().await;
    assert_eq!(next_pauses(&node, NOT, 0, 3).await, ["100ms", "200ms", "400ms"]);
    // One cause is logged once.
    let told = |line: &&String| line.contains(NOT) && line.contains("WARN");
    assert_eq!(node.process.lines().iter().filter(told).count(), 1);
    // An operator's order ends the pause.
    node.process.signal("USR1");
    node.metric("linkwise_driver_released", 1).await;
    let known = pauses(&node, NOT).len();
    node.process.signal("USR2");
    assert_eq!(next_pauses(&node, NOT, known, 2).await, ["100ms", "200ms"]);
    // Another driver, after a process that has worked.
    node.setup.tell("init 0");
    registered(&kubelet, 1, 8).await;
    node.setup.tell("init 9");
    let known = pauses(&node, NOT).len();
    version(&node.setup, "590.44.01");
    assert_eq!(next_pauses(&node, NOT, known, 2).await, ["100ms", "200ms"]);
}

#[tokio::test]
async fn a_pause_is_waited_for_and_an_order_ends_it() {
    let (node, kubelet) = Setup::on("dgx1-v100").arg("--nvml-pause-ms=3600000").serve(8).await;
    signal("KILL", node.agent(&[]).await);
    node.process.said("SIGKILL").await;
    kubelet.admit(&Pod::single("meanwhile", GPU, 4), None).await.unwrap();
    node.metric(STARTS, 1).await;
    node.process.signal("USR1");
    node.metric("linkwise_driver_released", 1).await;
    node.process.signal("USR2");
    node.metric(UP, 1).await;
    node.metric(STARTS, 2).await;
}

#[tokio::test]
async fn on_nvml_loss_unhealthy_withholds_every_gpu() {
    let (node, kubelet) = quick().arg("--on-nvml-loss=unhealthy").serve(8).await;
    node.setup.tell("init 9");
    node.setup.tell("fail * nvmlDeviceGetCount_v2 9");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 8).await.unwrap();
    assert!(kubelet.admit(&Pod::single("none", GPU, 1), None).await.is_err());
    node.setup.tell("unfail * nvmlDeviceGetCount_v2");
    node.setup.tell("init 0");
    kubelet.wait(|state| state.resources[GPU].healthy.len() == 8).await.unwrap();
    kubelet.admit(&Pod::single("all", GPU, 8), None).await.unwrap();
}

#[tokio::test]
async fn replaced_library_is_loaded_without_a_gap() {
    let mut setup = quick();
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    let (node, kubelet) = setup.serve(8).await;
    let replace = |with: &dyn Fn(&std::path::Path)| {
        let new = node.setup.at("new.so");
        with(&new);
        std::fs::rename(&new, &library).unwrap();
    };
    let first = node.agent(&[]).await;
    // Half a library: the process that has the old one works on.
    replace(&|new| std::fs::write(new, b"\x7fELF").unwrap());
    let line = node.process.said("standby NVML agent failed").await;
    assert!(line["cause"].as_str().unwrap().starts_with("dlopen: cannot load "), "{line}");
    // Tried again, ever more rarely.
    let pauses = next_pauses(&node, "standby NVML agent failed", 0, 3).await;
    assert_eq!(pauses, ["10ms", "20ms", "40ms"]);
    assert!(node.agent_ids().contains(&first));
    node.setup.tell("xid 1 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 1))).await.unwrap();
    // The whole one.
    replace(&|new| assert!(std::fs::copy(&real, new).unwrap() > 0));
    until(async || if node.agent_ids().contains(&first) { Err("the first one lives") } else { Ok(()) }).await;
    node.metric(UP, 1).await;
    until(async || node.setup.try_tell("xid 2 79")).await;
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 2))).await.unwrap();
}

#[tokio::test]
async fn library_replaced_during_a_start_is_loaded() {
    let mut setup = quick();
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    setup.tell("hang nvmlInit_v2");
    let node = setup.start().await;
    let first = node.agent(&[]).await;
    let control = node.setup.at(&format!("control.{first}"));
    until(async || UnixStream::connect(&control).map(drop)).await;
    // It has loaded the old one, and has not seen the GPUs yet.
    let new = node.setup.at("new.so");
    std::fs::copy(&real, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    node.setup.tell("unhang nvmlInit_v2");
    node.process.said("the file of NVML's library changed").await;
    until(async || if node.agent_ids().contains(&first) { Err("the first one lives") } else { Ok(()) }).await;
    node.metric(UP, 1).await;
}

#[tokio::test]
async fn library_below_a_root_is_known_from_the_last_agent() {
    let mut setup = quick();
    let root = setup.at("root");
    let real = std::mem::replace(&mut setup.library, root);
    let library = setup.at("root/usr/lib64/libnvidia-ml.so.1");
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::copy(&real, &library).unwrap();
    let (node, _kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("hang nvmlInit_v2");
    signal("KILL", first);
    let second = node.agent(&[first]).await;
    let control = node.setup.at(&format!("control.{second}"));
    until(async || UnixStream::connect(&control).map(drop)).await;
    let new = node.setup.at("new.so");
    std::fs::copy(&real, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    node.setup.tell("unhang nvmlInit_v2");
    node.process.said("the file of NVML's library changed").await;
    until(async || if node.agent_ids().contains(&second) { Err("the second one lives") } else { Ok(()) }).await;
    node.metric(UP, 1).await;
}

#[tokio::test]
async fn a_gpu_that_waits_for_its_trial_holds_up_no_new_library() {
    let mut setup = quick().arg("--nvml-trial-ms=3600000");
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    let (node, _kubelet) = setup.serve(8).await;
    node.setup.tell("crash 5 nvmlDeviceGetTemperature");
    node.process.logged(|line| line["message"].to_string().contains("GPU quarantined")).await;
    let first = node.agent(&[]).await;
    let new = node.setup.at("new.so");
    std::fs::copy(&real, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    until(async || if node.agent_ids().contains(&first) { Err("the first one lives") } else { Ok(()) }).await;
    node.metric(UP, 1).await;
}

/// So many events do not fit into a socket that is not read (Linux counts a few hundred bytes for each message, against
/// 208 KiB): most of them still wait in the library, and one in the thread that sends them.
const TOO_MANY: u32 = 1000;

#[tokio::test]
async fn events_before_a_standby_listens_are_not_lost() {
    heard_from_the_first(0).await;
}

#[tokio::test]
async fn events_of_a_blocked_agent_arrive_at_its_dismissal() {
    heard_from_the_first(TOO_MANY).await;
}

/// Which of two agents with messages is read first is chance, at each read. `before`: so many other events come first.
async fn heard_from_the_first(before: u32) {
    // Few calls: the messages of the second agent have to fit into its socket while the parent is stopped.
    let mut setup = Setup::with(&machine(&[("GPU-a", "0000:01:00.0", ""), ("GPU-b", "0000:41:00.0", "")]));
    setup = setup.arg("--nvml-poll-ms=200").arg("--nvml-pause-ms=10");
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    let (node, _kubelet) = setup.serve(2).await;
    for xid in [46, 48, 62, 64, 79, 95] {
        let first = node.agent(&[]).await;
        node.setup.tell("hang nvmlInit_v2");
        let new = node.setup.at("new.so");
        std::fs::copy(&real, &new).unwrap();
        std::fs::rename(&new, &library).unwrap();
        let second = node.agent(&[first]).await;
        let control = node.setup.at(&format!("control.{second}"));
        until(async || UnixStream::connect(&control).map(drop)).await;
        node.process.signal("STOP");
        // The second agent waits for no events yet, and the first one is not read.
        if before > 0 {
            node.setup.tell(&format!("storm 0 31 {before}"));
        }
        node.setup.tell(&format!("xid 0 {xid}"));
        node.setup.tell("unhang nvmlInit_v2");
        // More rounds than the second one goes before it says that it has seen the GPUs; the first one may be going
        // none.
        let mut second_one = UnixStream::connect(&control).unwrap();
        writeln!(second_one, "calls nvmlDeviceGetTemperature 5").unwrap();
        let mut done = String::new();
        BufReader::new(second_one).read_line(&mut done).unwrap();
        assert_eq!(done, "ok\n");
        node.process.signal("CONT");
        let series = format!("linkwise_xid_errors_total{{uuid=\"GPU-a\",xid=\"{xid}\"}}");
        until(async || if node.get("/metrics").await.body.contains(&series) { Ok(()) } else { Err(xid) }).await;
        until(async || if node.agent_ids() == [second] { Ok(()) } else { Err(node.agent_ids()) }).await;
        node.metric(UP, 1).await;
    }
}

#[tokio::test]
async fn standby_that_cannot_count_gpus_stays_standby() {
    let mut setup = quick();
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    let (node, kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.tell("fail * nvmlDeviceGetCount_v2 999");
    let new = node.setup.at("new.so");
    std::fs::copy(&real, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    node.process.said("it cannot count the GPUs").await;
    assert!(node.agent_ids().contains(&first));
    node.setup.tell("xid 1 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 1))).await.unwrap();
    node.setup.tell("unfail * nvmlDeviceGetCount_v2");
    until(async || if node.agent_ids().contains(&first) { Err("the first one lives") } else { Ok(()) }).await;
}

#[tokio::test]
async fn library_without_its_driver_gets_a_new_agent() {
    for code in [9, 18] {
        let (node, kubelet) = quick().serve(8).await;
        let first = node.agent(&[]).await;
        node.setup.tell(&format!("fail * nvmlDeviceGetCount_v2 {code}"));
        node.process
            .said(&format!("nvmlDeviceGetCount_v2: NVML_ERROR_{}", if code == 9 { "DRIVER" } else { "LIB" }))
            .await;
        node.setup.tell("unfail * nvmlDeviceGetCount_v2");
        node.agent(&[first]).await;
        node.metric(UP, 1).await;
        registered(&kubelet, 1, 8).await;
    }
}

#[tokio::test]
async fn xid_of_a_new_agent_does_not_wait_for_a_stuck_old_one() {
    let mut setup = quick();
    let (real, library) = (setup.library.clone(), setup.at("libnvidia-ml.so.1"));
    std::fs::copy(&real, &library).unwrap();
    setup.library.clone_from(&library);
    let (node, _kubelet) = setup.serve(8).await;
    // The next agents wait in nvmlInit until the test lets each go on.
    node.setup.tell("hang nvmlInit_v2");
    let mut known = Vec::new();
    // The stuck one is killed after a while: on a slow machine that may come first, and a second try shows it.
    for xid in 100..105 {
        let old = node.agent(&known).await;
        known.push(old);
        let new = node.setup.at("new.so");
        std::fs::copy(&real, &new).unwrap();
        std::fs::rename(&new, &library).unwrap();
        let next = node.agent(&known).await;
        let control = node.setup.at(&format!("control.{next}"));
        until(async || UnixStream::connect(&control).map(drop)).await;
        signal("STOP", old);
        let series = format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"{xid}\"}}", uuid(1, 0));
        for command in ["unhang nvmlInit_v2", "calls nvmlDeviceGetTemperature 16", &format!("xid 0 {xid}")] {
            let mut control = UnixStream::connect(&control).unwrap();
            writeln!(control, "{command}").unwrap();
            let mut done = String::new();
            BufReader::new(control).read_line(&mut done).unwrap();
            assert_eq!(done, "ok\n", "{command}");
        }
        until(async || if node.get("/metrics").await.body.contains(&series) { Ok(()) } else { Err(xid) }).await;
        if node.agent_ids().contains(&old) {
            return;
        }
    }
    panic!("each XID came after the end of the old agent");
}
