//! The health of devices, as the plugin streams it to the kubelet.

use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{Event, Filter, GpuSelector, ResourcePlan};
use linkwise_kubelet_box::dra::{DraKubelet, DraState};

use super::node::{DRIVER, Node, POOL, observed_state, wait_connected};

const HEALTHY: i32 = 1;
const UNHEALTHY: i32 = 2;

/// The health of a device, and the plugin's message about it.
fn health_of<'a>(state: &'a DraState, device: &str) -> Option<(i32, &'a str)> {
    let health = state.drivers.get(DRIVER)?.health.get(&(POOL.to_owned(), device.to_owned()))?;
    Some((health.health, health.message.as_str()))
}

#[tokio::test]
async fn health_of_every_device_follows_its_gpu() {
    let (node, kubelet) = Node::serving().await;
    kubelet.wait(|state| health_of(state, "gpu-7") == Some((HEALTHY, ""))).await.unwrap();
    assert_eq!(kubelet.state().drivers[DRIVER].health.len(), 8);
    node.wait_metric("dra_health_streams", 1).await;
    let current = node.state.borrow().clone();
    node.apply(Event::Xid { gpu: node.uuid(3), code: 79, instance: None });
    kubelet.wait(|state| health_of(state, "gpu-3") == Some((UNHEALTHY, "XID 79"))).await.unwrap();
    assert_eq!(health_of(&kubelet.state(), "gpu-2"), Some((HEALTHY, "")));
    node.state.send_replace(current);
    kubelet.wait(|state| health_of(state, "gpu-3") == Some((HEALTHY, ""))).await.unwrap();
    kubelet.stop().await;
    node.wait_metric("dra_health_streams", 0).await;
}

/// The kubelet tells a claim's devices apart by their first CDI names, so these must differ.
#[tokio::test]
async fn sick_gpu_of_a_claim_shows_in_the_pods_status() {
    let (node, kubelet) = Node::serving().await;
    let gpus = ["gpu-0", "gpu-1", "gpu-2", "gpu-3"];
    node.started_claim(&kubelet, "a", &gpus.map(|gpu| ("gpus", gpu))).await;
    node.apply(Event::Xid { gpu: node.uuid(2), code: 79, instance: None });
    kubelet.wait(|state| health_of(state, "gpu-2") == Some((UNHEALTHY, "XID 79"))).await.unwrap();
    let state = kubelet.state();
    let ids = state.claims["a"].resource_ids.iter();
    let statuses = ids.map(|(id, (_, device))| (id.clone(), health_of(&state, device).unwrap()));
    let health = |gpu: &str| if gpu == "gpu-2" { (UNHEALTHY, "XID 79") } else { (HEALTHY, "") };
    let expected = gpus.map(|gpu| (format!("linkwise.dev/device=a-gpus-{gpu}"), health(gpu)));
    assert_eq!(statuses.collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn kubelet_with_v1_health_stream_gets_the_same_health() {
    let mut node = Node::new();
    node.start();
    let mut options = node.kubelet_options();
    options.advertised_health = true;
    let kubelet = DraKubelet::start(options).unwrap();
    wait_connected(&kubelet).await;
    kubelet.wait(|state| health_of(state, "gpu-0") == Some((HEALTHY, ""))).await.unwrap();
}

#[tokio::test]
async fn health_is_sent_again_at_each_heartbeat() {
    let (_node, kubelet) = Node::serving_with(|settings| settings.heartbeat = Duration::from_millis(1)).await;
    kubelet.wait(|state| state.drivers[DRIVER].health_lists > 3).await.unwrap();
}

#[tokio::test]
async fn gone_gpus_are_listed_and_filtered_are_not() {
    let mut node = Node::new();
    let filter = Filter { exclude: (2..8).map(GpuSelector::Index).collect(), ..Filter::default() };
    let plan = ResourcePlan { filter, ..ResourcePlan::default() };
    node.state.send_replace(Arc::new(observed_state("dgx1-v100", plan, |_| {})));
    let kubelet = node.serve().await;
    kubelet.wait(|state| state.drivers[DRIVER].health.len() == 2).await.unwrap();
    let state = node.state.borrow().clone();
    let minor = state.topology().gpus().iter().find(|gpu| gpu.index == 0).unwrap().facts.minor.unwrap();
    let device = format!("gpu-{minor}");
    node.started_claim(&kubelet, "a", &[("gpus", &device)]).await;
    // The claim's GPU falls off the bus.
    let mut observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    observed.gpus.retain(|gpu| gpu.index != 0);
    node.apply(Event::Observed(Box::new(observed)));
    let gone = Some((UNHEALTHY, "the device is gone from the node"));
    kubelet.wait(|state| health_of(state, &device) == gone).await.unwrap();
}
