//! Calls that fail during a scan: the value of the scan before stays, and the scan is repeated until the call works.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use linkwise_kubelet_box::{KubeletBox, Pod};

use crate::run::mig;
use crate::run::node::{GPU, Setup, registered, until, uuid};

/// A machine whose driver has a word for what to do, looked at often, with a hold that is over at once.
fn quick(setup: Setup) -> Setup {
    setup.tell("recovery * 0");
    ["--nvml-poll-ms=20", "--health-hold-ms=1", "--pass-device-specs"]
        .into_iter()
        .fold(setup, |setup, option| setup.arg(option))
}

/// Waits until exactly these GPUs are unhealthy.
async fn unhealthy(kubelet: &KubeletBox, gpus: &[u32]) {
    let wanted: BTreeSet<String> = gpus.iter().map(|index| uuid(1, *index)).collect();
    kubelet.wait(|state| state.resources[GPU].unhealthy == wanted).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 8 - gpus.len());
}

/// What the kubelet knows of each resource: ids and NUMA nodes.
fn listed(kubelet: &KubeletBox) -> BTreeMap<String, BTreeMap<String, BTreeSet<i64>>> {
    kubelet.state().resources.iter().map(|(name, resource)| (name.clone(), resource.numa.clone())).collect()
}

#[tokio::test]
async fn gpu_lost_during_a_scan_is_offered_whole_when_back() {
    let (node, kubelet) = quick(Setup::on("dgx1-v100")).serve(8).await;
    node.setup.tell("hang 4 nvmlDeviceGetName");
    node.setup.tell("link 0 0 down");
    node.setup.tell("blocked nvmlDeviceGetName");
    node.setup.tell("lost 6");
    // What it says of itself fails for longer than it is lost, and each look is as incomplete.
    node.setup.tell("fail 6 nvmlDeviceGetMinorNumber 999");
    node.setup.tell("fail 6 nvmlDeviceGetNvLinkState 999");
    node.setup.tell("unhang 4 nvmlDeviceGetName");
    unhealthy(&kubelet, &[0, 6]).await;
    node.setup.tell("back 6");
    node.setup.tell("link 0 0 up");
    registered(&kubelet, 1, 8).await;
    let admitted = kubelet.admit(&Pod::single("all", GPU, 8), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.devices.len(), 8);
}

#[tokio::test]
async fn a_fact_that_was_never_said_is_asked_for_until_it_is() {
    let setup = quick(Setup::on("dgx1-v100"));
    setup.tell("fail 3 nvmlDeviceGetMinorNumber 999");
    let (node, kubelet) = setup.serve(8).await;
    let pod = |name: &str| Pod::single(name, GPU, 8);
    assert!(kubelet.admit(&pod("early"), None).await.is_err(), "nobody knows which node GPU 3 has");
    node.setup.tell("unfail 3 nvmlDeviceGetMinorNumber");
    let tries = std::sync::atomic::AtomicU32::new(0);
    let admitted = async || {
        let number = tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        kubelet.admit(&pod(&format!("pod-{number}")), None).await.map(drop)
    };
    until(admitted).await;
}

#[tokio::test]
async fn unanswered_mig_mode_offers_no_whole_gpu() {
    const HALF: &str = "nvidia.com/mig-2c.4g.40gb";
    let setup = quick(Setup::with(&std::fs::read_to_string(mig::MIXED).unwrap())).arg("--mig-strategy=mixed");
    let (node, kubelet) = setup.serve(1).await;
    kubelet.wait(|state| state.resources.get(HALF).is_some_and(|half| half.healthy.len() == 2)).await.unwrap();
    for call in ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetAttributes_v2"] {
        node.setup.tell(&format!("fail 2 {call} 999"));
    }
    // Something else changes, and everything is looked at.
    node.setup.tell(
        "mig 3 {enabled: true, devices: [{index: 0, uuid: MIG-00000099-0000-0000-0000-000000000000, gpu_instance: 1, \
         compute_instance: 0, gpu_slices: 7, compute_slices: 7, memory_mib: 80384, extension: none}]}",
    );
    kubelet.wait(|state| state.resources.get("nvidia.com/mig-7g.80gb").is_some()).await.unwrap();
    let state = kubelet.state();
    assert_eq!(state.resources[GPU].healthy, BTreeSet::from([mig::gpu(0)]), "GPU 2 is divided up");
    assert_eq!(state.resources[HALF].healthy.len(), 2);
}

#[tokio::test]
async fn failed_host_scan_keeps_the_host_and_is_repeated() {
    let setup = quick(Setup::on("dgx1-v100"));
    let (file, broken) = (setup.at("host.xml"), "<topology");
    let valid = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/hwloc_xml/testdata/v2.xml");
    let host = |text: &str| crate::run::config::write(&file, text);
    host(broken);
    let setup = setup.env("HWLOC_COMPONENTS", "xml,stop").host(file.to_str().unwrap());
    let (node, kubelet) = setup.serve(8).await;
    node.process.said("hwloc_topology_load").await;
    let claims = |claim: bool| {
        async move |kubelet: &KubeletBox| {
            kubelet
                .wait(|state| state.resources[GPU].numa.values().all(|nodes| nodes.is_empty() != claim))
                .await
                .unwrap();
        }
    };
    claims(false)(&kubelet).await;
    host(&std::fs::read_to_string(valid).unwrap());
    claims(true)(&kubelet).await;
    let before = listed(&kubelet);
    host(broken);
    node.setup.tell("link 0 0 down");
    unhealthy(&kubelet, &[0]).await;
    until(async || {
        let lines = node.process.lines();
        let failures = lines.iter().filter(|line| line.contains("hwloc_topology_load")).count();
        // It was looked at once more, in vain.
        if failures == 2 { Ok(()) } else { Err(lines) }
    })
    .await;
    assert_eq!(listed(&kubelet), before);
}

/// Calls whose failure costs nothing that is known; those without which a GPU cannot be reached; those without which it
/// cannot be identified by a full look.
const HARMLESS: [&str; 19] = [
    "nvmlDeviceGetName",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
];
const NEEDED: [&str; 4] =
    ["nvmlDeviceGetTemperature", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetUUID"];

#[tokio::test]
async fn failed_call_costs_its_gpu_and_no_known_fact() {
    let setup = quick(Setup::on("dgx1-v100"));
    let file = setup.at("config.yaml");
    let gpus = "  gpus:\n  - {pattern: \"*V100*\", name: gpu}\n  - {pattern: \"*\", name: other}\n";
    crate::run::config::write(&file, &format!("version: v1\nlinkwise: {{naming: true}}\nresources:\n{gpus}"));
    let (node, kubelet) = setup.arg("--config-file").arg(&file).serve(8).await;
    let before = listed(&kubelet);
    let calls = HARMLESS.map(|call| (call, false)).into_iter().chain(NEEDED.map(|call| (call, true)));
    for (call, needed) in calls.flat_map(|(call, needed)| [15, 999].map(|code| ((call, code), needed))) {
        let (call, code) = call;
        node.setup.tell(&format!("fail 2 {call} {code}"));
        // Something else changes, and everything is looked at.
        node.setup.tell("link 0 0 down");
        unhealthy(&kubelet, if needed { &[0, 2] } else { &[0] }).await;
        node.setup.tell("link 0 0 up");
        unhealthy(&kubelet, if needed { &[2] } else { &[] }).await;
        assert_eq!(listed(&kubelet), before, "{call} {code}");
        node.setup.tell(&format!("unfail 2 {call}"));
        registered(&kubelet, 1, 8).await;
    }
    let admitted = kubelet.admit(&Pod::single("all", GPU, 8), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.devices.len(), 8);
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
}
