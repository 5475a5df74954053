//! A disk without room: what cannot be written costs neither an admission nor the life with the kubelet, and is written once there
//! is room.
//!
//! The room is the process's own limit on the size of files (RLIMIT_FSIZE of setrlimit(2)), taken and given while it runs: a
//! write then fails with EFBIG, as it does with ENOSPC on a disk that is full.

use linkwise::kubelet_box::{Pod, Restart};

use crate::node::{GPU, Setup, machine, registered, until, uuid};
use crate::root::Root;

fn room(process: u32, bytes: &str) {
    // The hard limit stays as it is: only root may raise it again.
    let limit = format!("--fsize={bytes}:unlimited");
    let set = std::process::Command::new("prlimit").args([limit, format!("--pid={process}")]).status();
    assert!(set.unwrap().success());
}

/// A machine whose linkwise does not die of the limit's signal: what ignores it hands that on to the program it becomes.
fn setup(mut setup: Setup) -> Setup {
    let linkwise =
        std::mem::replace(&mut setup.program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/full.sh").into());
    setup.env("LINKWISE_UNDER_TEST", linkwise.to_str().unwrap())
}

#[tokio::test]
async fn a_full_disk_costs_no_admission_and_what_could_not_be_kept_is_kept_in_the_end() {
    let (node, kubelet) = setup(Setup::on("dgx1-v100")).serve(8).await;
    room(node.process.id(), "0");
    node.setup.tell("xid 2 79");
    node.process.said("cannot write the health record").await;
    kubelet.wait(|state| state.resources[GPU].unhealthy.contains(&uuid(1, 2))).await.unwrap();
    // A new kubelet: our socket is made anew meanwhile.
    kubelet.restart(Restart::Kubelet).await.unwrap();
    registered(&kubelet, 2, 7).await;
    kubelet.admit(&Pod::single("meanwhile", GPU, 4), None).await.unwrap();
    let record = node.setup.at("k/linkwise/linkwise_health.json");
    let kept = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        let record: serde_json::Value = serde_json::from_str(&text).unwrap();
        record["gpus"][uuid(1, 2)]["reasons"].clone()
    };
    assert_eq!(kept(), serde_json::json!([]), "the last record that was written, whole");
    room(node.process.id(), "unlimited");
    // Nothing new happens: it is tried again every 10 s.
    until(async || if kept() == serde_json::json!([]) { Err("not kept") } else { Ok(()) }).await;
    node.process.said("the health record is written again").await;
}

#[tokio::test]
async fn a_full_disk_leaves_the_last_cdi_spec_whole() {
    let machine = Setup::with(&machine(&[("GPU-a", "0000:01:00.0", ""), ("GPU-b", "0000:41:00.0", "")]));
    let (root, specs) = (machine.at("driver"), machine.at("cdi"));
    Root::full(&root);
    let machine = machine.arg("--driver-root-ctr-path").arg(root).arg("--cdi-dir").arg(specs);
    let machine = machine.arg("--nvidia-driver-root=/run/driver").arg("--device-list-strategy=cdi-cri");
    let (node, kubelet) = setup(machine).serve(2).await;
    let spec = node.setup.at("cdi").join("k8s.device-plugin.nvidia.com-gpu.json");
    let whole = std::fs::read_to_string(&spec).unwrap();
    room(node.process.id(), "0");
    // Somebody empties the folder: the next look, within 10 s, finds no room for the spec.
    std::fs::remove_file(&spec).unwrap();
    node.process.said("what was written last stays").await;
    // It is tried again every 10 s, each time through another temporary file, and said once.
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"failed\"}", 2).await;
    let said = node.process.lines().iter().filter(|line| line.contains("what was written last stays")).count();
    assert_eq!(said, 1);
    let left: Vec<_> = std::fs::read_dir(node.setup.at("cdi")).unwrap().collect();
    assert!(left.is_empty(), "half a spec is none: {left:?}");
    let admitted = kubelet.admit(&Pod::single("meanwhile", GPU, 1), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.cdi_names.len(), 1);
    room(node.process.id(), "unlimited");
    until(async || std::fs::read_to_string(&spec).map(|text| assert_eq!(text, whole))).await;
}
