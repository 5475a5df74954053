//! An agent that dies, and a library in the driver root: admissions go on, and the log names the cause.

use std::path::PathBuf;

use crate::run::node::{GPU, Setup, allocation, signal, wait_unhealthy};

const STARTS: &str = "linkwise_nvml_agent_starts_total";
const UP: &str = "linkwise_nvml_agent_up";

#[tokio::test]
async fn agent_restarts_after_its_binary_was_deleted() {
    let mut setup = Setup::on("dgx1-v100");
    let binary = setup.program.clone();
    setup.program = binary.with_file_name(format!("linkwise-replaced-{}", std::process::id()));
    // A hard link, because a copy that was just written may still be busy (ETXTBSY).
    std::fs::hard_link(&binary, &setup.program).unwrap();
    let (node, kubelet) = setup.serve(8).await;
    std::fs::remove_file(&node.setup.program).unwrap();
    node.setup.tell("ecc 1");
    wait_unhealthy(&kubelet, &[1]).await;
    let first = node.agent(&[]).await;
    signal("KILL", first);
    // Admissions go on, a new agent starts, and GPU 1 stays unhealthy.
    allocation(&kubelet, "meanwhile", GPU, 2).await;
    node.agent(&[first]).await;
    node.metric(STARTS, 2).await;
    node.metric(UP, 1).await;
    node.setup.tell("xid 7 79");
    wait_unhealthy(&kubelet, &[1, 7]).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "linkwise registered again");
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn killed_agent_is_not_blamed_on_an_old_failure() {
    let (node, _kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.setup.tell("fail * nvmlEventSetWait_v2 999");
    node.process.logged(|line| line["message"] == "NVML call failed").await;
    signal("KILL", node.agent(&[]).await);
    let line = node.process.logged(|line| line["message"] == "NVML unavailable").await;
    assert!(line["cause"].as_str().unwrap().contains("SIGKILL"), "{line}");
}

/// A machine whose linkwise is given no library, and the path of the library in the driver root.
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
    // The next agent loads the same library, which is not logged again.
    signal("KILL", node.agent(&[]).await);
    node.metric(STARTS, 2).await;
    node.metric(UP, 1).await;
    node.setup.tell("xid 2 79");
    wait_unhealthy(&kubelet, &[2]).await;
    assert_eq!(node.process.count("NVML library loaded"), 1);
}

#[tokio::test]
async fn broken_library_in_the_driver_root_is_named() {
    let (setup, library) = with_driver_root();
    std::fs::write(&library, "no library").unwrap();
    let (status, lines) = setup.arg("--fail-on-init-error=true").spawn().ended().await;
    assert!(!status.success() && lines.concat().contains(library.to_str().unwrap()), "{lines:?}");
    let (mut setup, library) = with_driver_root();
    std::fs::write(&library, "no library").unwrap();
    setup.library = fake_nvml::library_path(); // The operator's library wins.
    let (node, _kubelet) = setup.serve(8).await;
    let line = node.process.said("NVML library loaded").await;
    assert_eq!(line["path"], fake_nvml::library_path().to_str().unwrap());
}
