//! Facts that survive failed calls, and GPUs that cannot be identified for a while.

use serde_json::{Value, json};

use super::*;
use linkwise_core::topology::{MigEngines, MigPlacement};

/// GPU `number` at `index`, which shares a host bridge with each of `others`.
pub(crate) fn gpu(index: u32, number: u32, others: &[u32]) -> GpuScan {
    let link = |kind, pci: &str| Ok(Some(NvLinkScan { active: true, kind: Ok(Some(kind)), pci: Ok(pci.parse().ok()) }));
    let device = "{index: 0, uuid: MIG-0, gpu_instance: 1, compute_instance: 0, gpu_slices: 1, compute_slices: 1, \
                  memory_mib: 1}";
    let device = MigDeviceScan {
        device: serde_saphyr::from_str(device).unwrap(),
        instance: Ok(Some(MigSlot { profile_id: 19, placement: MigPlacement { start: 0, size: 1 } })),
        extension: Ok(Some(MigExtension::Media)),
        capabilities: Ok(Some(MigCapabilities { gpu_instance: 1, compute_instance: 2 })),
    };
    let level = |other: &u32| (uuid(*other), Ok(Some(TopologyLevel::HostBridge)));
    GpuScan {
        model: Ok(Some("H100".to_owned())),
        serial: Ok(Some("1650922000001".to_owned())),
        minor: Ok(Some(index)),
        compute_capability: Ok(Some(ComputeCapability { major: 9, minor: 0 })),
        brand: Ok(Some("Nvidia".to_owned())),
        architecture: Ok(Some("Hopper".to_owned())),
        addressing_mode: Ok(Some(AddressingMode::Hmm)),
        memory_mib: Ok(Some(81559)),
        numa: Ok(Some(NumaNodeId(1))),
        pcie: Ok(Some(PcieLink { mts: 32000, width: 16 })),
        pcie_width_now: Ok(Some(16)),
        c2c: Ok(Some(false)),
        fabric: Ok(Some(FabricObservation { cluster: "c".to_owned(), clique: 1 })),
        // The links go to a switch, another node's GPU, the switch and a processor (nvmlIntNvLinkDeviceType_t).
        nvlinks: vec![link(2, "0000:09:00.0"), link(0, "0000:08:00.0"), link(2, "0000:09:00.0"), link(1, "")],
        mig: Ok(Some(MigScan {
            enabled: true,
            devices: Ok(Some([(0, Ok(Some(device)))].into())),
            profiles: Ok(Some(vec![profile()])),
        })),
        ancestors: others.iter().map(level).collect(),
        ..GpuScan::bare(index, uuid(number), format!("0000:0{number}:00.0").parse().unwrap())
    }
}

fn uuid(number: u32) -> GpuUuid {
    format!("GPU-{number}").parse().unwrap()
}

pub(crate) fn node(gpus: Vec<GpuScan>) -> NodeScan {
    NodeScan {
        driver: Ok(Some("580.95.05".to_owned())),
        library: Ok(Some("13.580.95.05".to_owned())),
        path: "libnvidia-ml.so.1".to_owned(),
        cuda: Ok(Some(CudaVersion { major: 13, minor: 0 })),
        ..NodeScan::bare(gpus)
    }
}

fn profile() -> MigProfileObservation {
    let (engines, placements) = (MigEngines::default(), vec![MigPlacement { start: 0, size: 1 }]);
    MigProfileObservation { id: 19, number: 0, gpu_slices: 1, memory_mib: 9_728, instances: 7, engines, placements }
}

/// Finds the JSON pointers of the successful answers in a message.
fn answers(value: &Value, path: &str, found: &mut Vec<String>) {
    let parts: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect(),
        _ => return,
    };
    if parts.len() == 1 && parts[0].0 == "Ok" {
        found.push(path.to_owned());
    }
    for (key, value) in parts {
        answers(value, &format!("{path}/{key}"), found);
    }
}

/// The parts to compare: the node, and the library's version, which is only logged.
fn observed(scan: &NodeScan) -> (NodeObservation, Answer<String>) {
    let node = scan.node(HostObservation::default(), Vec::new());
    (NodeObservation { failures: Vec::new(), ..node }, scan.library.clone())
}

#[test]
fn failed_call_keeps_last_answer_null_replaces_it() {
    let before = node(vec![gpu(0, 0, &[1]), gpu(1, 1, &[])]);
    let message = serde_json::to_value(&before).unwrap();
    let mut pointers = Vec::new();
    answers(&message, "", &mut pointers);
    // The node has 3 answers. Each GPU has 14 facts, 4 links (each with two facts), MIG with its profiles, and the
    // list of MIG devices with one device and its 3 facts. The two GPUs have one common ancestor.
    assert_eq!(pointers.len(), 3 + 2 * (14 + 4 * 3 + 2 + 5) + 1, "{pointers:#?}");
    let failed = json!({"Err": {"call": "nvmlTest", "reason": {"code": 999}}});
    for pointer in pointers {
        let scanned = |answer: &Value| {
            let mut message = message.clone();
            *message.pointer_mut(&pointer).unwrap() = answer.clone();
            serde_json::from_value::<NodeScan>(message).unwrap()
        };
        let kept = scanned(&failed).after(Some(&before));
        assert_eq!(observed(&kept), observed(&before), "{pointer}");
        assert_eq!(kept.failures.len(), 1, "{pointer}");
        assert_eq!(kept.clone().after(Some(&kept)).failures, kept.failures, "{pointer}");
        if message.pointer(&pointer) != Some(&json!({"Ok": null})) {
            let lost = scanned(&json!({"Ok": null})).after(Some(&before));
            assert_ne!(observed(&lost), observed(&before), "{pointer}");
            assert_eq!(lost.failures, [], "{pointer}");
        }
        // Another GPU at the same index inherits nothing.
        let mut other = scanned(&failed);
        other.gpus.iter_mut().for_each(|gpu| gpu.uuid = format!("{}-other", gpu.uuid).parse().unwrap());
        if pointer.starts_with("/gpus") && !pointer.contains("ancestors") {
            let alone = other.clone().after(None);
            assert_eq!(other.after(Some(&before)).gpus, alone.gpus, "{pointer}");
        }
    }
}

#[test]
fn answers_count_beside_failed_calls() {
    let before = node(vec![gpu(0, 0, &[])]);
    let failed = || CallError::returned("nvmlTest", 999);
    let mut now = gpu(0, 0, &[]);
    // Link 1 went down, and the call for link 2 failed. The MIG device moved to index 1, and the call for index 0
    // failed.
    now.nvlinks[1] = Ok(Some(NvLinkScan { active: false, kind: Ok(Some(0)), pci: Err(failed()) }));
    now.nvlinks[2] = Err(failed());
    let Ok(Some(MigScan { devices: Ok(Some(devices)), .. })) = &mut now.mig else { panic!() };
    let mut device = devices.remove(&0).unwrap().unwrap().unwrap();
    device.device.index = 1;
    devices.extend([(0, Err(failed())), (1, Ok(Some(device)))]);
    let seen = node(vec![now.clone()]).after(Some(&before)).observations().remove(0);
    let links: Vec<_> = seen.nvlinks.unwrap().into_iter().map(|group| (group.links, group.active)).collect();
    assert_eq!(links, [(vec![0, 2], true), (vec![1], false), (vec![3], true)]);
    let devices: Vec<u32> = seen.mig.unwrap().devices.iter().map(|device| device.index).collect();
    assert_eq!(devices, [1], "a device that moved is listed once");
    // A GPU with MIG off has no devices, although the call for its devices failed.
    now.mig = Ok(Some(MigScan { enabled: false, devices: Err(failed()), profiles: Ok(None) }));
    let off = node(vec![now]).after(Some(&before)).observations().remove(0);
    assert_eq!(off.mig, Some(MigObservation::default()));
}

#[test]
fn gpu_that_cannot_be_identified_stays_as_it_was() {
    let all = node(vec![gpu(0, 0, &[1, 2]), gpu(1, 1, &[2]), gpu(2, 2, &[])]);
    let count = |count, gpus| NodeScan { count, ..node(gpus) };
    let uuids = |scan: &NodeScan| scan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>();
    // The other GPUs have no answer about their common ancestor with the unlisted GPU.
    let now = count(Some(3), vec![gpu(0, 0, &[2]), gpu(2, 2, &[])]).after(Some(&all));
    assert_eq!(observed(&now), observed(&all));
    // The same holds if the GPUs cannot be counted.
    let now = count(None, vec![]).after(Some(&now));
    assert_eq!(observed(&now), observed(&all));
    assert_eq!(now.at(Place { index: 1, of: 3 }).map(|gpu| &gpu.uuid), Some(&uuid(1)));
    assert_eq!(now.at(Place { index: 1, of: 2 }), None);
    // GPU 7 takes the index of GPU 1, and then GPU 2 the index of GPU 0.
    let now = count(Some(3), vec![gpu(0, 0, &[]), gpu(1, 7, &[]), gpu(2, 2, &[])]).after(Some(&now));
    assert_eq!(uuids(&now), [0, 7, 2].map(uuid));
    let now = count(Some(3), vec![gpu(0, 2, &[]), gpu(1, 7, &[])]).after(Some(&now));
    assert_eq!(uuids(&now), [2, 7].map(uuid));
    // If the number of GPUs differs, an index may name another GPU.
    let now = count(Some(4), vec![gpu(0, 2, &[])]).after(Some(&now));
    assert_eq!(uuids(&now), [uuid(2)]);
}
