//! GPUs that come and go, links that go down: the list, the choice and the events follow without a restart. Files that
//! hang delay no event.

use std::io::Write;

use linkwise_kubelet_box::KubeletBox;

use crate::run::node::{
    GPU, LIMIT, Setup, allocation, fifo, machine, replace, until, uuid, wait_registered, wait_unhealthy, writer,
};

/// A DGX-1 whose NVML is polled often, and whose next agent starts soon.
pub fn quick() -> Setup {
    Setup::on("dgx1-v100").args(["--nvml-poll-ms=50", "--nvml-pause-ms=10"])
}

#[tokio::test]
async fn new_gpu_is_offered_and_its_events_arrive() {
    let setup = quick();
    setup.tell("remove 7");
    let (node, kubelet) = setup.serve(7).await;
    let first = node.agent(&[]).await;
    node.setup.tell("add 7");
    wait_registered(&kubelet, 1, 8).await;
    // Only a new agent registers the events of GPU 7.
    node.agent(&[first]).await;
    until(async || node.setup.try_tell("xid 7 79")).await;
    wait_unhealthy(&kubelet, &[7]).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    node.setup.tell("remove 0");
    wait_unhealthy(&kubelet, &[0, 7]).await;
}

#[tokio::test]
async fn changed_pci_bus_gets_a_new_agent() {
    let setup = quick();
    setup.all_on_bus();
    let (node, kubelet) = setup.serve(8).await;
    let first = node.agent(&[]).await;
    node.setup.on_bus("0000:77:00.0");
    node.process.said("the PCI bus has other GPUs than before").await;
    until(async || if node.agent_ids().contains(&first) { Err("the first agent lives") } else { Ok(()) }).await;
    wait_registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn links_that_are_down_leave_the_topology() {
    let (node, kubelet) = quick().serve(8).await;
    for link in 0..6 {
        node.setup.tell(&format!("link 2 {link} down"));
    }
    // The other ends still report their links as up: the topology was built again, and the two ends differ.
    let line = node.process.said("seen from one end, 0 from the other").await;
    assert_eq!(line["level"], "WARN");
    wait_unhealthy(&kubelet, &[2]).await;
    allocation(&kubelet, "seven", GPU, 7).await;
}

#[tokio::test]
async fn gpu_gone_from_the_bus_is_unhealthy() {
    let setup = quick();
    setup.all_on_bus();
    let (node, kubelet) = setup.serve(8).await;
    std::fs::remove_dir_all(node.setup.at("sys/bus/pci/devices/0000:8a:00.0")).unwrap();
    wait_unhealthy(&kubelet, &[7]).await;
    let line = node.process.logged(|line| line["message"] == "the GPU is unhealthy").await;
    assert_eq!(line["gpu"], uuid(1, 7).as_str());
}

#[tokio::test]
async fn hung_files_delay_neither_polls_nor_events() {
    let setup = quick();
    setup.all_on_bus();
    let (node, kubelet) = setup.serve(8).await;
    let device = node.setup.at("sys/bus/pci/devices/0000:77:00.0");
    let new = node.setup.at("new");
    fifo(&new.join("vendor"));
    std::fs::rename(&new, &device).unwrap();
    let _silent = writer(&device.join("vendor")).await;
    node.setup.tell("lost 3");
    wait_unhealthy(&kubelet, &[3]).await;
    node.setup.tell("xid 4 79");
    wait_unhealthy(&kubelet, &[3, 4]).await;
}

/// A machine of two packages with a GPU each; hwloc reads its host from a file that the test writes.
fn seen_by_hwloc(call_ms: u128) -> Setup {
    let setup = Setup::with(&machine(&[("GPU-a", "0000:03:00.0", ""), ("GPU-b", "0000:81:00.0", "")]));
    let setup = setup.arg("--nvml-poll-ms=50").arg(format!("--nvml-call-ms={call_ms}"));
    let xml = setup.at("host.xml");
    setup.host(xml.to_str().unwrap())
}

const HOST: &[u8] = include_bytes!("../../crates/host/src/machines/hwloc_xml/testdata/v2.xml");

fn numa(kubelet: &KubeletBox) -> Vec<Vec<i64>> {
    kubelet.state().resources[GPU].numa.values().map(|nodes| nodes.iter().copied().collect()).collect()
}

#[tokio::test]
async fn hung_host_scan_costs_no_gpu_and_counts_at_its_end() {
    // linkwise waits for the host scan for a third of this time.
    let setup = seen_by_hwloc(1500);
    fifo(&setup.at("host.xml"));
    let (node, kubelet) = setup.serve(2).await;
    node.process.said("it has not returned").await;
    assert!(numa(&kubelet).iter().all(Vec::is_empty), "a NUMA node is known before the host was scanned");
    let mut host = writer(&node.setup.at("host.xml")).await;
    node.setup.tell("xid 0 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains("GPU-a")).await.unwrap();
    host.write_all(HOST).unwrap();
    drop(host);
    kubelet.wait(|state| state.resources[GPU].numa.values().all(|nodes| nodes.len() == 1)).await.unwrap();
    assert_eq!(numa(&kubelet), [[0], [1]]);
}

#[tokio::test]
async fn events_arrive_during_a_scan_of_the_host() {
    // linkwise waits for the host scan for longer than the test may take.
    let setup = seen_by_hwloc(LIMIT.as_millis() * 6);
    let xml = setup.at("host.xml");
    std::fs::write(&xml, HOST).unwrap();
    let (node, kubelet) = setup.serve(2).await;
    fifo(&node.setup.at("new"));
    std::fs::rename(node.setup.at("new"), &xml).unwrap();
    node.setup.tell("remove 1");
    let mut host = writer(&xml).await;
    node.setup.tell("xid 0 79");
    let state = kubelet.wait(|state| state.resources[GPU].unhealthy.contains("GPU-a")).await.unwrap();
    assert!(state.resources[GPU].healthy.contains("GPU-b"), "removed before the scan ended: {state:?}");
    // If the scan began before the GPU was removed, another follows.
    replace(&xml, str::from_utf8(HOST).unwrap());
    host.write_all(HOST).unwrap();
    drop(host);
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains("GPU-b")).await.unwrap();
}

#[tokio::test]
async fn hung_driver_version_delays_nothing() {
    let setup = quick();
    let module = setup.at("sys/module/nvidia");
    fifo(&module.join("version"));
    let (node, kubelet) = setup.serve(8).await;
    node.setup.tell("xid 4 79");
    wait_unhealthy(&kubelet, &[4]).await;
    let driver = async || {
        let text = std::fs::read_to_string(node.setup.at("k/linkwise/linkwise_health.json")).unwrap_or_default();
        let record: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        if record["gpus"][uuid(1, 4)].is_null() { Err(text) } else { Ok(record["identity"]["driver"].clone()) }
    };
    assert!(until(driver).await.is_null());
    let hung = node.setup.at("hung");
    std::fs::rename(module.join("version"), &hung).unwrap();
    replace(&module.join("version"), "580.95.05\n");
    // The read that waits gets an empty file.
    drop(writer(&hung).await);
    let load = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&module).unwrap());
    let known = async || match driver().await {
        Ok(name) if name == format!("580.95.05, load {load}") => Ok(()),
        other => Err(other),
    };
    until(known).await;
    let unhealthy = kubelet.state().resources[GPU].unhealthy.len();
    assert_eq!(unhealthy, 1, "learning the driver's version late was taken as a change of driver");
}

/// As under WSL, or in a container whose /sys is not the host's.
#[tokio::test]
async fn gpus_that_the_bus_never_had_stay_healthy() {
    let setup = quick();
    setup.on_bus("0000:77:00.0");
    let (node, kubelet) = setup.serve(8).await;
    // Two polls later all GPUs are still healthy.
    node.setup.tell("calls nvmlDeviceGetTemperature 16");
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 8);
    assert_eq!(node.process.count("not on the PCI bus"), 0);
}
