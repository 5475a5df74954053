//! Devices that pods hold while linkwise is down, and that are not there any more when it is back.

use std::collections::BTreeSet;

use linkwise_kubelet_box::Pod;

use crate::node::{GPU, Node, Setup, until, uuid};

fn quick() -> Setup {
    Setup::on("dgx1-v100").arg("--nvml-poll-ms=20").arg("--nvml-pause-ms=10")
}

/// Ends the process; the machine stays.
async fn end(mut node: Node) -> Setup {
    node.process.signal("TERM");
    assert!(node.process.ended().await.0.success());
    node.setup
}

#[tokio::test]
async fn a_gpu_that_went_while_linkwise_was_down_stays_on_the_list_as_long_as_its_pod_and_comes_back() {
    let (node, kubelet) = quick().serve(8).await;
    for pod in ["first", "second"] {
        kubelet.admit(&Pod::single(pod, GPU, 4), None).await.unwrap();
    }
    let setup = end(node).await;
    // One does not answer any more, the other has been taken out; each is one pod's.
    setup.tell("lost 7");
    setup.tell("remove 0");
    let (lost, removed) = (uuid(1, 7), uuid(1, 0));
    let node = setup.start().await;
    let both = BTreeSet::from([removed.clone(), lost.clone()]);
    kubelet.wait(|state| state.resources[GPU].connected && state.resources[GPU].unhealthy == both).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 6);
    // No list, not the first either, lacked what the kubelet looks up.
    assert_eq!(kubelet.violations(), []);
    node.ready(200, "").await;
    let line = node.process.said("pods hold devices that are not offered here").await;
    assert_eq!(line["devices"], format!("{removed}, {lost}"));
    node.metric("linkwise_devices{resource=\"nvidia.com/gpu\",health=\"unhealthy\"}", 2).await;
    node.metric("linkwise_gpus", 6).await;

    // One is back, and well.
    node.setup.tell("add 0");
    kubelet.wait(|state| state.resources[GPU].unhealthy == BTreeSet::from([lost.clone()])).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 7);
    // The pods of the other have ended: it leaves the list.
    for pod in ["first", "second"] {
        assert!(kubelet.remove_pod(pod));
    }
    kubelet.wait(|state| state.resources[GPU].unhealthy.is_empty()).await.unwrap();
    until(async || if kubelet.state().resources[GPU].healthy.len() == 7 { Ok(()) } else { Err("not yet") }).await;
    assert_eq!(kubelet.violations(), []);
}
