//! Switches a node from every setting of `node_settings` to every other, in the containers of the chart: no pod ends
//! by itself, each becomes ready and serves, and soon no GPU is offered through two doors. The previous setting's
//! slices may outlast the change for a moment, in which claims for their devices are refused.
//!
//! `tests/cluster/way_back.rs` tests each GPU, claim and pod during a change with processes, for which it can shorten a
//! grace period of 60 s.

use std::collections::BTreeSet;

use linkwise_kubelet_box::Pod as Workload;

use crate::node::{GPU, Node, PLUGIN, until};
use crate::node_settings::{DRA, PLUGIN as PLUGIN_SETTING, SETTINGS, Setting};
use crate::pod::Pod;

/// The GPU of an id or a name: `GPU-...0003::1`, `gpu-3`.
fn gpu_of(name: &str) -> u32 {
    name.split("::").next().unwrap().rsplit('-').next().unwrap().parse().unwrap()
}

/// The GPUs that the kubelet gives through the device plugin, and those that the scheduler gives through DRA.
fn offered(node: &Node) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let state = node.kubelet.state();
    let plugin = state.resources.get(GPU).map(|it| it.healthy.iter().map(|id| gpu_of(id)).collect());
    (plugin.unwrap_or_default(), node.published().iter().map(|name| gpu_of(name)).collect())
}

/// Ends a pod, and deletes the slices if DRA is off next, as the kubelet does 30 s after the driver is gone.
async fn end(node: &Node, pod: Pod, next: &Setting) {
    pod.stop().await;
    if !next.dra {
        node.server.wipe_slices(crate::node::NODE, None);
    }
}

/// A sequence of settings that has every ordered pair of settings as neighbours.
fn way() -> Vec<Setting> {
    let mut way = vec![SETTINGS[0]];
    for (at, from) in SETTINGS.into_iter().enumerate() {
        for to in SETTINGS.into_iter().skip(at + 1) {
            way.extend([to, from]);
        }
        way.extend(SETTINGS.get(at + 1));
    }
    way
}

#[test]
fn way_has_every_ordered_pair() {
    let steps: BTreeSet<_> = way().windows(2).map(|pair| (pair[0].name, pair[1].name)).collect();
    assert_eq!(steps.len(), SETTINGS.len() * (SETTINGS.len() - 1));
}

#[tokio::test]
async fn every_setting_follows_every_other() {
    let node = Node::start("dgx1-v100").await;
    let mut running: Option<Pod> = None;
    for setting in way() {
        if let Some(pod) = running.take() {
            end(&node, pod, &setting).await;
        }
        let mut pod = node.deploy(PLUGIN, setting.values).await;
        until(&mut pod, &format!("the GPUs that '{}' offers", setting.name), || {
            let (plugin, dra) = offered(&node);
            let (door, other) = if setting.dra { (dra, plugin) } else { (plugin, dra) };
            door.len() == 8 && other.is_empty()
        })
        .await;
        running = Some(pod);
    }
    running.unwrap().stop().await;
}

#[tokio::test]
async fn dra_on_and_off_and_on_under_a_claim() {
    let node = Node::start("dgx1-v100").await;
    let mut pod = node.deploy(PLUGIN, DRA.values).await;
    node.wait_published(&mut pod, 8).await;
    node.wait_driver(&pod).await;
    let claim = node.claim("one", "gpu-5", &[]);
    let cdi = node.start_claim(&pod, "p", &claim).await;
    end(&node, pod, &PLUGIN_SETTING).await;
    // The claim keeps its GPU, and the other GPUs change doors.
    let pod = node.deploy(PLUGIN, PLUGIN_SETTING.values).await;
    node.wait_offered(&pod, GPU, 7).await;
    assert!(!offered(&node).0.contains(&5), "the claim's pod has GPU 5");
    let seven = node.kubelet.admit(&Workload::single("default/seven", GPU, 7), None).await.unwrap();
    assert_eq!(seven.grant("main", GPU).unwrap().allocation.devices.len(), 7);
    assert!(node.kubelet.remove_pod("default/seven"));
    end(&node, pod, &DRA).await;
    let mut pod = node.deploy(PLUGIN, DRA.values).await;
    node.wait_published(&mut pod, 8).await;
    node.wait_driver(&pod).await;
    assert_eq!(node.start_claim(&pod, "p", &claim).await, cdi, "the claim must keep its devices");
    node.dra.stop_pod("p").await.unwrap();
    pod.stop().await;
}
