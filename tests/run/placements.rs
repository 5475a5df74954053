//! Placements, from the kubelet's PodResources to the metrics: series that appear, change and disappear with pods.

use linkwise_kubelet_box::Pod;

use crate::run::node::{GPU, Setup, place, uuid};

/// The labels of a pod's container, as the metrics have them.
fn labels(pod: &str) -> String {
    format!("namespace=\"default\",pod=\"{pod}\",container=\"main\",resource=\"{GPU}\"")
}

fn at_admission(pod: &str) -> String {
    format!("linkwise_allocation_quality_at_admission{{{}}} ", labels(pod))
}

#[tokio::test]
async fn series_come_and_go_with_pods() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.metrics(|text| text.contains("linkwise_fragmentation 1.0")).await;
    let long = "p".repeat(253);
    kubelet.admit(&Pod::single("first", GPU, 2), None).await.unwrap();
    kubelet.admit(&Pod::single(&long, GPU, 4), None).await.unwrap();
    let best = |text: &str, pod: &str| text.contains(&format!("{}1.0", at_admission(pod)));
    let text = node.metrics(|text| best(text, "first") && best(text, &long)).await;
    let gpus = |text: &str, pod: &str| {
        let info = |line: &&str| line.starts_with("linkwise_allocation_info{") && line.contains(pod);
        text.lines().filter(info).count()
    };
    assert_eq!((gpus(&text, "pod=\"first\""), gpus(&text, &long)), (2, 4));
    assert!(text.contains(&format!("linkwise_allocation_quality{{{}}} 1.0", labels("first"))), "{text}");
    assert!(!text.contains("linkwise_free_collective_megabytes_per_second{size=\"4\"}"), "2 GPUs are free: {text}");
    assert!(kubelet.remove_pod("first"));
    // The next Allocate makes linkwise ask the kubelet.
    kubelet.admit(&Pod::single("last", GPU, 1), None).await.unwrap();
    let text = node.metrics(|text| gpus(text, "pod=\"last\"") == 1 && !text.contains("pod=\"first\"")).await;
    assert!(!text.contains(&at_admission("last")), "a quality of one GPU, which has no links: {text}");
    // The series of the other pods survive a restart, and so does the quality at admission.
    let node = node.end().await.start().await;
    node.metrics(|text| best(text, &long) && gpus(text, "pod=\"last\"") == 1).await;
    // The series stay while the kubelet is away.
    kubelet.stop().await.unwrap();
    node.ready(503, "").await;
    assert_eq!(gpus(&node.get("/metrics").await.body, &long), 4);
}

#[tokio::test]
async fn hostile_names_and_lies_break_no_series() {
    let setup = Setup::on("dgx1-v100");
    let kubelet = setup.kubelet();
    let hostile = "\"} 1\n<script>\\";
    let node = setup.start().await;
    kubelet.hold(place(hostile, GPU), [uuid(1, 0), uuid(1, 1)]);
    kubelet.hold(place("twin", GPU), [uuid(1, 0), uuid(1, 1)]);
    kubelet.hold(place("lost", GPU), [uuid(1, 2), uuid(1, 3), "GPU-gone".to_owned()]);
    kubelet.hold(place("vendor", "other.vendor/nic"), ["nic0".to_owned()]);
    kubelet.hold(place("none", "no name"), [uuid(1, 4)]);
    kubelet.admit(&Pod::single("honest", GPU, 1), None).await.ok();
    let text = node.metrics(|text| text.contains("pod=\"twin\"") && text.contains("pod=\"lost\"")).await;
    let escaped = "pod=\"\\\"} 1\\n<script>\\\\\"";
    assert!(text.contains(escaped), "{text}");
    assert!(!text.contains("vendor") && !text.contains("pod=\"none\""), "{text}");
    assert!(!text.contains(&format!("linkwise_allocation_quality{{{}}}", labels("lost"))), "{text}");
    let lacks_value = |line: &&str| !line.starts_with('#') && !line.contains("} ") && !line.contains("_seconds");
    let broken: Vec<&str> = text.lines().filter(lacks_value).filter(|line| line.contains('{')).collect();
    assert!(broken.is_empty(), "{broken:?}");
}

#[tokio::test]
async fn hidden_pod_names_are_in_no_series() {
    let (node, kubelet) = Setup::on("dgx1-v100").arg("--hide-pod-names").serve(8).await;
    kubelet.admit(&Pod::single("secret", GPU, 2), None).await.unwrap();
    let text = node.metrics(|text| text.contains("linkwise_allocation_quality{")).await;
    assert!(text.contains("pod=\"pod-") && !text.contains("secret"), "{text}");
}
