//! Claims for sets of GPUs: each is one device to the kubelet, and its GPUs to everything else.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use linkwise::dra::{Occurrence, parse_checkpoint};
use linkwise::state::{Event, HealthPoll, NodeState, Reach};
use linkwise::topology::GpuUuid;

use super::node::{Answer, DRIVER, Node, POOL, end, name, refusal, start};

#[tokio::test]
async fn set_is_one_device_with_all_its_gpus() {
    let node = Node::running();
    let kubelet = node.kubelet().await;
    let claim = node.claim("a", &[("gpus", "gpus-4-0-1-2-3")]);
    let gpus = [0, 1, 2, 3].map(|minor| node.gpu(minor));
    assert_eq!(start(&kubelet, &claim).await.unwrap(), gpus);
    let is_one = |seen: &Occurrence| match seen {
        Occurrence::Prepared { result: Ok(names), .. } => *names == ["gpus-4-0-1-2-3"],
        _ => false,
    };
    node.wait(is_one).await;
    node.wait(|seen| matches!(seen, Occurrence::Held { claims: 1, devices: 1 })).await;
    end(&kubelet, &claim).await;
    assert_eq!(node.checkpoints(), [""; 0]);
}

#[tokio::test]
async fn sets_and_gpus_exclude_each_other() {
    let node = Node::running();
    let kubelet = node.kubelet().await;
    let (first, second) = (node.claim("a", &[("gpus", "gpus-2-0-3")]), node.claim("b", &[("gpus", "gpu-5")]));
    start(&kubelet, &first).await.unwrap();
    start(&kubelet, &second).await.unwrap();
    for (device, holder) in [("gpu-3", "a"), ("gpus-2-3-4", "a"), ("gpus-4-4-5-6-7", "b"), ("gpus-2-0-3", "a")] {
        let why = refusal(&kubelet, &node.claim("c", &[("gpus", device)])).await;
        assert!(
            why.contains(&format!("device {device} (")) && why.contains(&format!("claim ml/claim-{holder} ")),
            "{why}"
        );
    }
    for devices in [["gpus-2-1-2", "gpu-2"], ["gpus-2-1-2", "gpus-2-2-4"]] {
        let why = refusal(&kubelet, &node.claim("c", &devices.map(|device| ("gpus", device)))).await;
        assert!(why.contains("shares hardware with another device of the same claim, gpus-2-1-2"), "{why}");
    }
    start(&kubelet, &node.claim("c", &[("gpus", "gpus-2-1-2"), ("gpus", "gpus-2-4-6")])).await.unwrap();
}

#[tokio::test]
async fn set_without_one_of_its_gpus_is_refused_by_name() {
    let node = Node::running();
    let kubelet = node.kubelet().await;
    for (device, expected) in [
        ("gpus-2-0-9", "device gpus-2-0-9 is a set of GPUs, and there is no gpu-9 on this node"),
        ("gpus-3-0-1", "there is no device 'gpus-3-0-1' on this node"),
    ] {
        let why = refusal(&kubelet, &node.claim("a", &[("gpus", device)])).await;
        assert!(why.contains(expected), "{why}");
    }
    let current = NodeState::clone(&node.state.borrow());
    let lost = current.topology().gpus().iter().find(|gpu| gpu.minor == Some(3)).unwrap().uuid.clone();
    let reach = |uuid: &GpuUuid| match *uuid == lost {
        true => Reach::Lost { call: "nvmlDeviceGetUUID".to_owned() },
        false => Reach::default(),
    };
    let gpus = current.topology().gpus().iter().map(|gpu| &gpu.uuid);
    let polls = gpus.map(|uuid| (uuid.clone(), HealthPoll { reach: reach(uuid), ..HealthPoll::default() })).collect();
    let sick = current.apply(Event::Polled(polls), Duration::from_secs(1)).0;
    node.state.send_replace(Arc::new(sick));
    let why = refusal(&kubelet, &node.claim("a", &[("gpus", "gpus-2-0-3")])).await;
    assert!(why.contains(&format!("device gpus-2-0-3 ({lost}) is lost")), "{why}");
    assert_eq!(node.checkpoints(), [""; 0]);
}

#[tokio::test]
async fn killed_plugin_knows_its_sets() {
    for progress in ["Started", "Completed"] {
        let mut node = Node::running();
        let kubelet = node.kubelet().await;
        let claim = node.claim("a", &[("gpus", "gpus-2-0-3"), ("one", "gpu-5")]);
        let devices = start(&kubelet, &claim).await.unwrap();
        kubelet.stop().await;
        node.kill().await;
        let text = fs::read_to_string(node.checkpoint("a")).unwrap().replace("Completed", progress);
        let record = parse_checkpoint(text.as_bytes(), "a").unwrap();
        assert_eq!((record.prepared.devices.len(), record.prepared.names().len()), (3, 2));
        assert_eq!(record.for_ledger().gpus.len(), 3);
        fs::write(node.checkpoint("a"), text).unwrap();
        if progress == "Completed" {
            // Nothing is asked: the checkpoint answers.
            node.set("a", Answer::Failed);
        }
        node.start();
        let kubelet = node.kubelet().await;
        let why = refusal(&kubelet, &node.claim("b", &[("gpus", "gpus-2-3-4")])).await;
        assert!(why.contains("is prepared for the claim ml/claim-a"), "{why}");
        assert_eq!(start(&kubelet, &name("a")).await.unwrap(), devices, "{progress}");
        end(&kubelet, &name("a")).await;
        start(&kubelet, &node.claim("c", &[("gpus", "gpus-2-3-4")])).await.unwrap();
    }
}

#[tokio::test]
async fn health_of_a_held_set_is_that_of_its_worst_gpu() {
    let node = Node::running();
    let kubelet = node.kubelet().await;
    start(&kubelet, &node.claim("a", &[("gpus", "gpus-2-0-3")])).await.unwrap();
    let is = |health: i32, why: &'static str| {
        move |state: &linkwise_kubelet_box::dra::DraState| {
            let set = (POOL.to_owned(), "gpus-2-0-3".to_owned());
            let found = state.drivers.get(DRIVER).and_then(|driver| driver.health.get(&set));
            found.is_some_and(|found| (found.health, found.message.as_str()) == (health, why))
        }
    };
    kubelet.wait(is(1, "")).await.unwrap();
    let current = node.state.borrow().clone();
    let gpu = current.topology().gpus().iter().find(|gpu| gpu.minor == Some(3)).unwrap().uuid.clone();
    let sick = NodeState::clone(&current);
    let sick = sick.apply(Event::Xid { gpu, code: 79, instance: None }, Duration::from_secs(1)).0;
    node.state.send_replace(Arc::new(sick));
    kubelet.wait(is(2, "gpu-3: XID 79")).await.unwrap();
    node.state.send_replace(current);
    kubelet.wait(is(1, "")).await.unwrap();
}
