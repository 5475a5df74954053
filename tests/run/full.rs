//! A full disk: a file that cannot be written costs no admission, and a failed write or bind is tried again.
//!
//! For files, a test lowers the process's limit on file sizes (RLIMIT_FSIZE of setrlimit(2)) while it runs: a write
//! then fails with EFBIG, as it fails with ENOSPC on a full disk. A socket has no size, so that the test of our socket
//! fills a file system in namespaces of its own.

use std::io::ErrorKind;
use std::path::PathBuf;

use linkwise_kubelet_box::{Pod, Restart};

use crate::run::health::{record_file, wait_kept};
use crate::run::list_strategies::{cdi_setup, spec_file};
use crate::run::node::{
    GPU, Setup, allocation, kubelet_in, limit, machine, until, uuid, wait_registered, wait_unhealthy,
};

/// A machine whose linkwise survives the limit's signal, SIGXFSZ: a script ignores it, and exec keeps it ignored.
fn ignoring_sigxfsz(setup: Setup) -> Setup {
    started_by_script(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/full.sh"), setup)
}

/// A machine whose linkwise is started by a script.
fn started_by_script(script: &str, mut setup: Setup) -> Setup {
    let linkwise = std::mem::replace(&mut setup.program, script.into());
    setup.env("LINKWISE_UNDER_TEST", linkwise.to_str().unwrap())
}

#[tokio::test]
async fn full_disk_delays_only_the_health_record() {
    let (node, kubelet) = ignoring_sigxfsz(Setup::on("dgx1-v100")).serve(8).await;
    limit(node.process.id(), "fsize=0:unlimited");
    node.setup.tell("xid 2 79");
    node.process.said("cannot write the health record").await;
    wait_unhealthy(&kubelet, &[2]).await;
    // After a kubelet restart linkwise creates its socket again, on the full disk.
    kubelet.restart(Restart::Kubelet).await.unwrap();
    wait_registered(&kubelet, 2, 7).await;
    kubelet.admit(&Pod::single("meanwhile", GPU, 4), None).await.unwrap();
    let text = std::fs::read_to_string(record_file(&node.setup)).unwrap_or_default();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(record["gpus"][uuid(1, 2)]["reasons"], serde_json::json!([]), "the last record is lost");
    limit(node.process.id(), "fsize=unlimited:unlimited");
    // Without a new event the write is repeated every 10 s.
    wait_kept(&node.setup, &uuid(1, 2)).await;
    node.process.said("health record written again").await;
}

#[tokio::test]
async fn full_disk_leaves_last_cdi_spec_whole() {
    let machine = Setup::with(&machine(&[("GPU-a", "0000:01:00.0", ""), ("GPU-b", "0000:41:00.0", "")]));
    let machine = cdi_setup(machine).arg("--device-list-strategy=cdi-cri");
    let (node, kubelet) = ignoring_sigxfsz(machine).serve(2).await;
    let spec = spec_file(&node.setup);
    let whole = std::fs::read_to_string(&spec).unwrap();
    limit(node.process.id(), "fsize=0:unlimited");
    // Someone empties the folder: the next check, within 10 s, finds no room for the spec.
    std::fs::remove_file(&spec).unwrap();
    node.process.said("keeping the previous ones").await;
    // The write is repeated every 10 s, each time with another temporary file, and its failure is logged once.
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"failed\"}", 2).await;
    assert_eq!(node.process.count("keeping the previous ones"), 1);
    let left: Vec<_> = std::fs::read_dir(node.setup.at("cdi")).unwrap().collect();
    assert!(left.is_empty(), "a half-written spec is left: {left:?}");
    assert_eq!(allocation(&kubelet, "meanwhile", GPU, 1).await.cdi_names.len(), 1);
    limit(node.process.id(), "fsize=unlimited:unlimited");
    until(async || std::fs::read_to_string(&spec).map(|text| assert_eq!(text, whole))).await;
}

#[tokio::test]
#[cfg_attr(not(may_mount_as_user), ignore = "no mounts in a user namespace here")]
async fn full_disk_delays_our_socket_and_is_named() {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/small.sh");
    let setup = started_by_script(SCRIPT, Setup::on("dgx1-v100"));
    let (inside, state) = (setup.at("k"), setup.at("state"));
    std::fs::create_dir(&inside).unwrap();
    let setup = setup.env("SMALL_FOLDER", inside.to_str().unwrap()).arg("--state-dir").arg(state);
    let node = setup.start().await;
    // The folder as the process sees it: through its own root.
    let seen = PathBuf::from(format!("/proc/{}/root", node.process.id())).join(inside.strip_prefix("/").unwrap());
    node.ready(503, "there is no").await;
    let fill = |name: u32| std::fs::write(seen.join(name.to_string()), "");
    let (room, full) = (0..).find_map(|name| Some((name, fill(name).err()?))).unwrap();
    assert_eq!((room, full.kind()), (7, ErrorKind::StorageFull), "twelve inodes: the folder one, linkwise four");
    // Room for the kubelet's socket, and not for ours.
    std::fs::remove_file(seen.join("0")).unwrap();
    let kubelet = kubelet_in(&seen, |_| {});
    let line = node.process.said("cannot bind a socket in").await;
    let why = line["why"].as_str().unwrap();
    assert!(why.contains(inside.to_str().unwrap()) && why.contains("No space left on device"), "{line}");
    node.ready(503, "No space left on device").await;
    assert_eq!((node.get("/livez").await.status, kubelet.state().resources.len()), (200, 0));
    std::fs::remove_file(seen.join("1")).unwrap();
    wait_registered(&kubelet, 1, 8).await;
    node.ready(200, "ready").await;
    kubelet.admit(&Pod::single("after", GPU, 8), None).await.unwrap();
}
