//! Nodes without GPUs: linkwise is up, ready and idle, and serves once a GPU appears.

use crate::run::node::{GPU, Setup, machine, wait_registered};

const BARE: &str = "version: 1\nname: bare\nobserved: {gpus: []}\n";
/// Makes linkwise check the PCI bus every 50 ms, instead of every 10 s.
const FREQUENT_BUS_CHECKS: &str = "--bus-look-ms=50";
const STARTS: &str = "linkwise_nvml_agent_starts_total";

#[tokio::test]
async fn node_without_gpus_is_up_and_ready() {
    // NVML that lists no GPU has not failed.
    let setup = Setup::with(BARE).arg("--fail-on-init-error=true");
    let (node, kubelet) = setup.start_beside_kubelet().await;
    let answer = node.ready(200, "no NVIDIA GPU on the PCI bus").await;
    assert!(answer.body.contains("NVML lists no GPU on this node"), "{answer:?}");
    assert_eq!(node.get("/livez").await.status, 200);
    node.metric("linkwise_idle", 1).await;
    node.metric("linkwise_nvml_agent_up", 0).await;
    assert!(kubelet.state().resources.is_empty(), "a resource is registered");
}

#[tokio::test]
async fn idle_tegra_node_is_named() {
    let setup = Setup::with(BARE);
    std::fs::create_dir_all(setup.at("sys/devices/soc0")).unwrap();
    std::fs::write(setup.at("sys/devices/soc0/family"), "Tegra\n").unwrap();
    let node = setup.start().await;
    node.ready(200, "this is a Tegra, whose integrated GPU needs the NVIDIA device plugin").await;
}

/// linkwise ends, because a new container may see the GPU. With `--fail-on-init-error=false` it waits.
#[tokio::test]
async fn gpu_on_the_bus_unlisted_by_nvml_ends_the_process() {
    for option in ["--nvml-grace-ms=300", "--fail-on-init-error=true"] {
        let setup = Setup::with(BARE).arg(option);
        setup.on_bus("0000:3b:00.0");
        let mut node = setup.start().await;
        let (status, lines) = node.process.ended().await;
        let last = lines.last().unwrap();
        assert_eq!(status.code(), Some(1), "{last}");
        assert!(last.contains("but the PCI bus has 0000:3b:00.0") && last.contains("recreate the container"), "{last}");
    }
    let setup = Setup::with(BARE).arg("--nvml-grace-ms=10").arg("--fail-on-init-error=false").arg(FREQUENT_BUS_CHECKS);
    setup.on_bus("0000:3b:00.0");
    let node = setup.start().await;
    node.ready(503, "NVML lists no GPU on this node, but the PCI bus has 0000:3b:00.0: the driver could not").await;
    node.metric("linkwise_idle", 0).await;
    node.process.said("NVML unavailable").await;
}

#[tokio::test]
async fn pauses_begin_again_when_a_gpu_appears() {
    let setup = Setup::on("dgx1-v100").arg("--fail-on-init-error=false").arg(FREQUENT_BUS_CHECKS);
    setup.tell("init 9");
    let node = setup.start().await;
    node.ready(200, "NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
    node.setup.all_on_bus();
    // Failures before the GPU appeared no longer count.
    let line = node.process.said("NVML unavailable").await;
    assert_eq!(line["again_in"], "1s");
    node.ready(503, "NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
}

#[tokio::test]
async fn late_gpu_is_served_without_a_restart() {
    for options in [&["--fail-on-init-error=false"][..], &[]] {
        let setup = Setup::on("dgx1-v100").args(options).arg(FREQUENT_BUS_CHECKS);
        setup.tell("init 9");
        // All GPUs appear at once: one that came after the agent's first scan would need a third agent.
        setup.all_on_bus();
        let (bus, later) = (setup.at("sys/bus"), setup.at("bus"));
        std::fs::rename(&bus, &later).unwrap();
        let (node, kubelet) = setup.start_beside_kubelet().await;
        node.ready(200, "NVML_ERROR_DRIVER_NOT_LOADED (9)").await;
        node.process.said("no NVIDIA GPU on this node").await;
        node.metric(STARTS, 1).await;
        node.setup.tell("init 0");
        std::fs::rename(&later, &bus).unwrap();
        wait_registered(&kubelet, 1, 8).await;
        node.ready(200, "ready").await;
        node.metric("linkwise_idle", 0).await;
        node.metric(STARTS, 2).await;
    }
}

#[tokio::test]
async fn new_gpu_is_unready_until_scanned() {
    let setup = Setup::on("dgx1-v100").arg(FREQUENT_BUS_CHECKS);
    setup.tell("init 9");
    let node = setup.start().await;
    node.ready(200, "no NVIDIA GPU on the PCI bus").await;
    node.setup.tell_all(&["init 0", "hang nvmlInit_v2"]);
    node.setup.on_bus("0000:06:00.0");
    node.ready(503, "GPU 0000:06:00.0 appeared on the PCI bus, and has not been scanned yet").await;
    node.metric("linkwise_idle", 0).await;
}

#[tokio::test]
async fn late_gpu_without_library_ends_the_process() {
    let mut setup = Setup::on("dgx1-v100").arg(FREQUENT_BUS_CHECKS);
    setup.library = "/no/such/libnvidia-ml.so.1".into();
    let mut node = setup.start().await;
    node.ready(200, "no NVIDIA GPU on the PCI bus").await;
    node.setup.on_bus("0000:06:00.0");
    let (status, lines) = node.process.ended().await;
    assert_eq!(status.code(), Some(1));
    let text = lines.join("\n");
    assert!(text.contains("1 NVIDIA GPU(s) on the PCI bus (0000:06:00.0 ...)"), "{text}");
    assert!(text.contains("cannot load /no/such/libnvidia-ml.so.1"), "{text}");
}

#[tokio::test]
async fn late_driver_below_a_mounted_root_is_used_in_place() {
    let mut setup = Setup::on("dgx1-v100").arg("--fail-on-init-error=false").arg("--nvml-poll-ms=50");
    setup.all_on_bus();
    let root = setup.at("driver-root");
    let library = std::mem::replace(&mut setup.library, root);
    let folder = setup.at("driver-root/usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(setup.at("driver-root")).unwrap();
    let (node, kubelet) = setup.start_beside_kubelet().await;
    node.ready(503, "driver-root/usr/lib64/libnvidia-ml.so.1").await;
    std::fs::create_dir_all(&folder).unwrap();
    // Drivers install such a link to the file that has the version in its name.
    std::fs::copy(&library, folder.join("libnvidia-ml.so.580.95.05")).unwrap();
    std::os::unix::fs::symlink("libnvidia-ml.so.580.95.05", folder.join("libnvidia-ml.so.1")).unwrap();
    wait_registered(&kubelet, 1, 8).await;
    node.ready(200, "ready").await;
}

/// Binds a GPU on the bus to another kernel driver.
fn bind(setup: &Setup, pci: &str, driver: &str) -> std::path::PathBuf {
    let link = setup.at(&format!("sys/bus/pci/devices/{pci}/driver"));
    std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), &link).unwrap();
    link
}

#[tokio::test]
async fn foreign_driver_idles_node_until_gpus_are_back() {
    for options in [&["--fail-on-init-error=false"][..], &[]] {
        let pci = "0000:3b:00.0";
        let setup = Setup::with(&machine(&[("GPU-a", pci, "")])).arg(FREQUENT_BUS_CHECKS).args(options);
        setup.tell("init 9");
        setup.on_bus(pci);
        let link = bind(&setup, pci, "vfio-pci");
        let (node, kubelet) = setup.start_beside_kubelet().await;
        node.ready(200, "0000:3b:00.0 is bound to vfio-pci").await;
        node.metric("linkwise_idle", 1).await;
        node.metric(STARTS, 1).await;
        assert_eq!(node.process.count("GPU is bound to another kernel driver"), 1);
        node.setup.tell("init 0");
        std::fs::remove_file(link).unwrap();
        wait_registered(&kubelet, 1, 1).await;
        node.metric("linkwise_idle", 0).await;
    }
}

#[tokio::test]
async fn gpu_of_another_driver_does_not_disturb_the_others() {
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=50");
    setup.all_on_bus();
    setup.on_bus("0000:77:00.0");
    bind(&setup, "0000:77:00.0", "nouveau");
    let (node, kubelet) = setup.serve(8).await;
    let line = node.process.logged(|line| line["message"].to_string().contains("another kernel driver")).await;
    assert_eq!((&line["gpu"], &line["driver"]), (&"0000:77:00.0".into(), &"nouveau".into()));
    node.setup.tell("calls nvmlDeviceGetTemperature 24"); // Waits for some polls.
    assert_eq!(node.process.count("another kernel driver"), 1);
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 8);
    node.metric(STARTS, 1).await;
}
