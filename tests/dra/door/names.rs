//! CDI names of claims over restarts, reboots and upgrades. The kubelet keeps every name that a plugin returned for a
//! claim and gives the runtime old and new names together. Old names must not add hardware to a container.

use std::fs;
use std::sync::Arc;

use linkwise_core::publish::injection::HostDevices;
use linkwise_core::state::{NodeState, ResourcePlan};
use linkwise_kubelet_box::dra::DraKubelet;
use serde_json::{Value, json};

use super::node::{
    KIND, Node, assert_refused, end, name, observed_state, restart, start, start_container, state, until,
};

/// The machine after a reboot: GPUs 0 and 1 have exchanged their minor numbers.
fn with_moved_minors() -> NodeState {
    observed_state("dgx1-v100", ResourcePlan::default(), |observed| {
        let [first, second, ..] = &mut observed.gpus[..] else { panic!("a DGX-1 has eight GPUs") };
        std::mem::swap(&mut first.minor, &mut second.minor);
    })
}

/// Reboots the node: the CDI specs, which are in memory, are gone, and the kubelet reads its checkpoint.
async fn reboot(node: &mut Node, kubelet: &DraKubelet, after: NodeState, boot: &str) {
    node.halt(kubelet).await;
    // The folder is moved, so that a file that the plugin is writing does not reach the new one.
    fs::rename(&node.settings.cdi_folder, node.settings.cdi_folder.with_extension(boot)).unwrap();
    fs::create_dir(&node.settings.cdi_folder).unwrap();
    node.settings.boot = Some(boot.to_owned());
    node.state.send_replace(Arc::new(after));
    node.scan();
    write_gpu_spec(node);
    node.serve_again(kubelet).await;
}

/// Writes the CDI spec of all GPUs, which has the names that the previous version gave to claims.
fn write_gpu_spec(node: &Node) {
    let devices = node.cdi.borrow().clone().unwrap();
    let devices = devices.devices.iter().map(|(name, edits)| {
        let (_, name) = name.split_once('=').unwrap();
        json!({"name": name, "containerEdits": edits})
    });
    let spec = json!({"cdiVersion": "0.5.0", "kind": KIND, "devices": devices.collect::<Vec<_>>()});
    fs::write(node.settings.cdi_folder.join(format!("{}.json", KIND.replace('/', "-"))), spec.to_string()).unwrap();
}

#[tokio::test]
async fn moved_minor_numbers_give_a_claim_no_second_gpu() {
    let (mut node, kubelet) = Node::serving().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let before = node.gpu(0);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), std::slice::from_ref(&before));
    reboot(&mut node, &kubelet, with_moved_minors(), "the next boot").await;
    // The allocation's device name is that of another GPU now.
    let got = start_container(&kubelet, &claim).await.unwrap();
    assert_ne!(node.gpu(0), before);
    assert_eq!((super::node::hardware(&got), got.gpus()), (vec![node.gpu(0)], vec!["/dev/nvidia0".to_owned()]));
    assert_eq!(kubelet.state().claims["a"].cdi.len(), 4, "the kubelet lacks names of an answer");
}

#[tokio::test]
async fn changed_options_and_driver_reach_prepared_claims() {
    let (mut node, kubelet) = Node::new().with_nics().served().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    assert!(start_container(&kubelet, &claim).await.unwrap().env.contains_key("LINKWISE_NICS"));
    node.stop().await;
    node.host.send_replace(Arc::new(HostDevices::default()));
    let mut devices = super::node::cdi_devices(&node.state.borrow());
    devices.common = json!({"env": ["DRIVER=next"]}).to_string();
    node.cdi.send_replace(Some(Arc::new(devices)));
    node.start();
    // The changes apply without a Prepare, because the container may restart.
    let names = kubelet.state().claims["a"].cdi.clone();
    let got = || super::node::resolve(&kubelet, &names).unwrap();
    until(|| got().env.get("DRIVER").is_some_and(|version| version == "next")).await;
    let got = got();
    assert_eq!((got.env.len(), super::node::hardware(&got)), (2, vec![node.gpu(0)]), "{got:?}");
    // After a Prepare too, nothing of the old options is left.
    restart(&kubelet).await;
    assert_eq!(start_container(&kubelet, &claim).await.unwrap(), got);
}

/// A checkpoint of the claim `a`, which has GPU 0 by these CDI names, as the previous version reads it.
fn checkpoint(node: &Node, cdi: &[&str]) -> Value {
    let device = json!({"request": "gpus", "pool": "node/gpu", "device": "gpu-0", "admin": false,
        "gpu": node.uuid(0), "cdi": cdi});
    json!({"version": 1, "progress": "Completed", "boot": "this boot",
        "claim": {"namespace": "ml", "name": "claim-a", "uid": "a"}, "prepared": {"devices": [device]}})
}

/// A node whose claim `a` was prepared by the previous version, with GPU 0.
async fn upgraded() -> (Node, DraKubelet) {
    let mut node = Node::new();
    write_gpu_spec(&node);
    let mut checkpoint = checkpoint(&node, &[&node.gpu(0), "linkwise.dev/claim=a-gpus"]);
    checkpoint["prepared"]["edits"] = json!({"gpus": {"env": {"LINKWISE_NICS": "mlx5_0"}}});
    fs::create_dir(&node.settings.checkpoints).unwrap();
    fs::write(node.checkpoint("a"), checkpoint.to_string()).unwrap();
    let own = json!({"cdiVersion": "0.5.0", "kind": "linkwise.dev/claim", "devices": [
        {"name": "a-gpus", "containerEdits": {"env": ["LINKWISE_NICS=mlx5_0"]}}]});
    fs::write(node.settings.cdi_folder.join("linkwise.dev-claim-a.json"), own.to_string()).unwrap();
    node.claim("a", &[("gpus", "gpu-0")]);
    let kubelet = node.serve().await;
    assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
    assert!(kubelet.state().claims["a"].cdi.contains(&node.gpu(0)), "the previous version's name is gone");
    (node, kubelet)
}

#[tokio::test]
async fn claim_of_the_previous_version_continues() {
    let (mut node, kubelet) = upgraded().await;
    restart(&kubelet).await;
    let got = start_container(&kubelet, &name("a")).await.unwrap();
    assert_eq!((got.gpus(), got.env.get("LINKWISE_NICS")), (vec!["/dev/nvidia0".to_owned()], None));
    // The GPU keeps its minor number in this reboot.
    reboot(&mut node, &kubelet, state("dgx1-v100"), "the next boot").await;
    assert_eq!(start_container(&kubelet, &name("a")).await.unwrap().gpus(), ["/dev/nvidia0"]);
    end(&kubelet, &name("a")).await;
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
}

#[tokio::test]
async fn name_of_the_previous_version_gives_no_second_gpu() {
    let (mut node, kubelet) = upgraded().await;
    for boot in ["the next boot", "the one after"] {
        reboot(&mut node, &kubelet, with_moved_minors(), boot).await;
        assert_refused(&kubelet, &name("a"), &[&node.gpu(1), "delete the claim's pods"]).await;
        assert_eq!(node.checkpoints(), ["a.json"]);
        reboot(&mut node, &kubelet, state("dgx1-v100"), &format!("{boot} but one")).await;
        assert_eq!(start_container(&kubelet, &name("a")).await.unwrap().gpus(), ["/dev/nvidia0"]);
    }
    end(&kubelet, &name("a")).await;
    assert_eq!(node.checkpoints(), [""; 0]);
}

/// The previous version refuses unknown fields, and overwrites the claim's spec if the checkpoint has edits.
#[tokio::test]
async fn previous_version_reads_checkpoints_of_this_one() {
    let (node, kubelet) = Node::new().with_nics().served().await;
    node.started_claim(&kubelet, "a", &[("gpus", "gpu-0")]).await;
    let written: Value = serde_json::from_str(&node.checkpoint_text("a")).unwrap();
    assert_eq!(written, checkpoint(&node, &["linkwise.dev/device=a-gpus-gpu-0", "linkwise.dev/claim=a-gpus"]));
}
