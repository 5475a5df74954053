//! What the driver reports and how it dies: one GPU's trouble is that GPU's, and admissions go on.

use std::collections::BTreeSet;
use std::path::PathBuf;

use linkwise_kubelet_box::{AdmissionError, KubeletBox, Pod, ResourceState};

use crate::run::node::{GPU, Node, Setup, signal, uuid};

const STARTS: &str = "linkwise_nvml_agent_starts_total";
const UP: &str = "linkwise_nvml_agent_up";

/// Waits until exactly these GPUs are unhealthy on the stream.
async fn unhealthy(kubelet: &KubeletBox, gpus: &[u32]) -> ResourceState {
    let wanted: BTreeSet<String> = gpus.iter().map(|index| uuid(1, *index)).collect();
    let state = kubelet.wait(|state| state.resources[GPU].unhealthy == wanted).await.unwrap();
    let state = state.resources[GPU].clone();
    assert_eq!(state.healthy.len(), 8 - gpus.len(), "{state:?}");
    state
}

async fn admit(kubelet: &KubeletBox, pod: &str, size: u32) -> Result<Vec<String>, AdmissionError> {
    let admitted = kubelet.admit(&Pod::single(pod, GPU, size), None).await?;
    Ok(admitted.grant("main", GPU).unwrap().allocation.devices.clone())
}

#[tokio::test]
async fn an_xid_of_the_gpus_own_takes_that_gpu_and_no_other() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 2 79");
    unhealthy(&kubelet, &[2]).await;
    let line = node.process.logged(|line| line["message"] == "the GPU is unhealthy").await;
    assert_eq!((line["gpu"].as_str(), line["reason"].as_str()), (Some(uuid(1, 2).as_str()), Some("XID 79")));
    node.metric(&format!("linkwise_gpu_healthy{{uuid=\"{}\"}}", uuid(1, 2)), 0).await;
    node.metric("linkwise_devices{resource=\"nvidia.com/gpu\",health=\"unhealthy\"}", 1).await;
    // The rest of the node goes on; the failed one is in no answer.
    assert!(!admit(&kubelet, "seven", 7).await.unwrap().contains(&uuid(1, 2)));
    // A second GPU, by an ECC error this time; the first stays out.
    node.setup.tell("ecc 5");
    unhealthy(&kubelet, &[2, 5]).await;
    let gpu = &kubelet.state().resources[GPU];
    assert_eq!((gpu.registrations, gpu.calls.list_and_watch), (1, 1), "all on one stream");
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn an_xid_of_a_programs_making_is_counted_and_changes_nothing() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("xid 0 31");
    node.setup.tell("xid 0 31");
    let line = node.process.logged(|line| line["xid"] == 31).await;
    assert_eq!(line["gpu"], uuid(1, 0).as_str());
    node.metric(&format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"31\"}}", uuid(1, 0)), 2).await;
    // Events come in order: once this one is seen, the earlier ones have had their effect.
    node.setup.tell("xid 7 79");
    unhealthy(&kubelet, &[7]).await;
}

/// The child is gone; admissions go on, a new child comes, and what was known stays known.
async fn survives(node: &Node, kubelet: &KubeletBox, first: u32) {
    assert_eq!(admit(kubelet, "meanwhile", 2).await.unwrap().len(), 2);
    let second = node.agent(&[first]).await;
    node.metric(STARTS, 2).await;
    node.metric(UP, 1).await;
    assert!(second != first);
    node.setup.tell("xid 7 79");
    unhealthy(kubelet, &[1, 7]).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "the kubelet noticed nothing");
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn the_nvml_process_starts_again_after_the_binary_was_replaced() {
    let mut setup = Setup::on("dgx1-v100");
    let binary = setup.program.clone();
    setup.program = binary.with_file_name(format!("linkwise-replaced-{}", std::process::id()));
    // A link and no copy: what was just written may still be busy.
    std::fs::hard_link(&binary, &setup.program).unwrap();
    let (node, kubelet) = setup.serve(8).await;
    std::fs::remove_file(&node.setup.program).unwrap();
    node.setup.tell("xid 1 79");
    unhealthy(&kubelet, &[1]).await;
    let first = node.agent(&[]).await;
    signal("KILL", first);
    survives(&node, &kubelet, first).await;
}

#[tokio::test]
async fn a_driver_that_comes_late_is_picked_up_in_place() {
    let setup = Setup::on("dgx1-v100").arg("--fail-on-init-error=false");
    setup.tell("init 9");
    setup.all_on_bus();
    let kubelet = setup.kubelet();
    let node = setup.start().await;
    node.ready(503, "NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
    node.setup.tell("init 0");
    crate::run::node::registered(&kubelet, 1, 8).await;
    node.ready(200, "ready").await;
}

#[tokio::test]
async fn the_end_of_the_nvml_process_is_not_laid_to_an_old_failure() {
    let (node, _kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("fail * nvmlEventSetWait_v2 999");
    node.process.logged(|line| line["message"] == "NVML call failed").await;
    signal("KILL", node.agent(&[]).await);
    let line = node.process.logged(|line| line["message"] == "NVML unavailable").await;
    assert!(line["cause"].as_str().unwrap().contains("SIGKILL"), "{line}");
}

/// A machine whose linkwise is given no library, and the place of one in the driver's root.
fn with_driver_root() -> (Setup, PathBuf) {
    let mut setup = Setup::on("dgx1-v100");
    let folder = setup.at("driver/usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(&folder).unwrap();
    setup.library = PathBuf::new();
    let root = setup.at("driver");
    (setup.arg("--driver-root-ctr-path").arg(root), folder.join("libnvidia-ml.so.1"))
}

#[tokio::test]
async fn library_in_the_driver_root_is_loaded() {
    let (setup, library) = with_driver_root();
    std::os::unix::fs::symlink(fake_nvml::library_path(), &library).unwrap();
    let (node, kubelet) = setup.serve(8).await;
    let line = node.process.said("NVML library loaded").await;
    assert_eq!(line["path"], library.to_str().unwrap());
    // The next agent loads the same, which is no news.
    signal("KILL", node.agent(&[]).await);
    node.metric(STARTS, 2).await;
    node.metric(UP, 1).await;
    node.setup.tell("xid 2 79");
    unhealthy(&kubelet, &[2]).await;
    let lines = node.process.lines();
    assert_eq!(lines.iter().filter(|line| line.contains("NVML library loaded")).count(), 1);
}

#[tokio::test]
async fn named_library_wins_over_the_driver_root() {
    let (mut setup, library) = with_driver_root();
    std::fs::write(&library, "no library").unwrap();
    setup.library = fake_nvml::library_path();
    let (node, _kubelet) = setup.serve(8).await;
    let line = node.process.said("NVML library loaded").await;
    assert_eq!(line["path"], fake_nvml::library_path().to_str().unwrap());
}

#[tokio::test]
async fn broken_library_in_the_driver_root_is_named() {
    let (setup, library) = with_driver_root();
    std::fs::write(&library, "no library").unwrap();
    let (status, words) = setup.arg("--fail-on-init-error=true").spawn().ended().await;
    assert!(!status.success() && words.concat().contains(library.to_str().unwrap()), "{words:?}");
}
