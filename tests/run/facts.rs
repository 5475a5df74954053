//! Calls that fail during a scan: the value of the previous scan stays, and the scan is repeated until the call works.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use linkwise_kubelet_box::{KubeletBox, Pod};

use crate::nvml::codes::{CALLS, IDENTITY};
use crate::run::config::wait_hinted;
use crate::run::mig;
use crate::run::node::{GPU, Setup, allocation, replace, seen, until, wait_registered, wait_unhealthy};

/// A machine with frequent polls and almost no hold time, whose driver reports recovery actions.
fn quick(setup: Setup) -> Setup {
    setup.tell("recovery * 0");
    setup.args(["--nvml-poll-ms=50", "--health-hold-ms=1", "--pass-device-specs"])
}

/// The ids and NUMA nodes of each resource, as the kubelet knows them.
fn listed(kubelet: &KubeletBox) -> BTreeMap<String, BTreeMap<String, BTreeSet<i64>>> {
    kubelet.state().resources.iter().map(|(name, resource)| (name.clone(), resource.numa.clone())).collect()
}

#[tokio::test]
async fn gpus_lost_during_a_scan_return_with_all_facts() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
    node.setup.tell_all(&["hang 4 nvmlDeviceGetName", "link 0 0 down"]);
    // The scan hangs at GPU 4: it has read the GPUs before it, and not those after it.
    node.setup.tell_all(&["blocked nvmlDeviceGetName", "lost 2", "lost 6"]);
    // These calls fail even after GPU 6 is back, so that each further scan is incomplete.
    node.setup.tell_all(&["fail 6 nvmlDeviceGetMinorNumber 999", "fail 6 nvmlDeviceGetNvLinkState 999"]);
    node.setup.tell("unhang 4 nvmlDeviceGetName");
    wait_unhealthy(&kubelet, &[0, 2, 6]).await;
    node.metric("linkwise_gpus", 8).await;
    node.setup.tell_all(&["back 2", "back 6", "link 0 0 up"]);
    wait_registered(&kubelet, 1, 8).await;
    allocation(&kubelet, "all", GPU, 8).await;
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
}

#[tokio::test]
async fn missing_fact_is_read_again_until_known() {
    let setup = quick(Setup::on("dgx1-v100"));
    setup.tell("fail 3 nvmlDeviceGetMinorNumber 999");
    let (node, kubelet) = setup.serve(8).await;
    let pod = Pod::single("pod", GPU, 8);
    assert!(kubelet.admit(&pod, None).await.is_err(), "GPU 3 was given without its device node");
    node.setup.tell("unfail 3 nvmlDeviceGetMinorNumber");
    until(async || kubelet.admit(&pod, None).await.map(drop)).await;
}

#[tokio::test]
async fn unanswered_mig_mode_offers_no_whole_gpu() {
    const HALF: &str = "nvidia.com/mig-2c.4g.40gb";
    let setup = quick(mig::four_gpus()).arg("--mig-strategy=mixed");
    let (node, kubelet) = setup.serve(1).await;
    kubelet.wait(|state| state.resources.get(HALF).is_some_and(|half| half.healthy.len() == 2)).await.unwrap();
    for call in ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetAttributes_v2"] {
        node.setup.tell(&format!("fail 2 {call} 999"));
    }
    // A change elsewhere causes a full scan.
    node.setup.tell(
        "mig 3 {enabled: true, devices: [{index: 0, uuid: MIG-00000099-0000-0000-0000-000000000000, gpu_instance: 1, \
         compute_instance: 0, gpu_slices: 7, compute_slices: 7, memory_mib: 80384, extension: none}]}",
    );
    kubelet.wait(|state| state.resources.get("nvidia.com/mig-7g.80gb").is_some()).await.unwrap();
    let state = kubelet.state();
    assert_eq!(state.resources[GPU].healthy, BTreeSet::from([mig::gpu(0)]), "GPU 2 is offered whole");
    assert_eq!(state.resources[HALF].healthy.len(), 2);
}

#[tokio::test]
async fn failed_host_scan_keeps_the_host_and_is_repeated() {
    let setup = quick(Setup::on("dgx1-v100"));
    let (file, broken) = (setup.at("host.xml"), "<topology");
    let valid = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/hwloc_xml/testdata/v2.xml");
    let host = |text: &str| replace(&file, text);
    host(broken);
    let setup = setup.env("HWLOC_COMPONENTS", "xml,stop").host(file.to_str().unwrap());
    let (node, kubelet) = setup.serve(8).await;
    node.process.said("hwloc_topology_load").await;
    wait_hinted(&kubelet, false).await;
    host(&std::fs::read_to_string(valid).unwrap());
    wait_hinted(&kubelet, true).await;
    let before = listed(&kubelet);
    host(broken);
    node.setup.tell("link 0 0 down");
    wait_unhealthy(&kubelet, &[0]).await;
    // The host was scanned again, in vain.
    seen(async || node.process.count("hwloc_topology_load"), |times| *times == 2).await;
    assert_eq!(listed(&kubelet), before);
}

#[tokio::test]
async fn failed_call_costs_at_most_its_gpu_and_no_fact() {
    let gpus = "  gpus:\n  - {pattern: \"*V100*\", name: gpu}\n  - {pattern: \"*\", name: other}\n";
    let config = format!("version: v1\nlinkwise: {{naming: true}}\nresources:\n{gpus}");
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).config(&config).serve(8).await;
    let before = listed(&kubelet);
    for (call, code) in CALLS.iter().map(|call| call.name).chain(IDENTITY).flat_map(|call| [(call, 15), (call, 999)]) {
        // Without these calls linkwise cannot reach or identify the GPU.
        let needed = IDENTITY.contains(&call) || call == "nvmlDeviceGetTemperature";
        node.setup.tell(&format!("fail 2 {call} {code}"));
        // A change elsewhere causes a full scan.
        node.setup.tell("link 0 0 down");
        wait_unhealthy(&kubelet, if needed { &[0, 2] } else { &[0] }).await;
        node.setup.tell("link 0 0 up");
        wait_unhealthy(&kubelet, if needed { &[2] } else { &[] }).await;
        assert_eq!(listed(&kubelet), before, "{call} {code}");
        node.setup.tell(&format!("unfail 2 {call}"));
        wait_registered(&kubelet, 1, 8).await;
    }
    allocation(&kubelet, "all", GPU, 8).await;
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
}
