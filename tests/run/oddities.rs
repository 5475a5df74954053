//! Machines that are odd: a warning, and a node that keeps working.

use crate::run::node::{GPU, Setup, allocation, machine, uuid};

#[tokio::test]
async fn gpu_lost_at_start_is_not_offered() {
    let setup = Setup::on("dgx1-v100");
    setup.tell("lost 6");
    let (node, kubelet) = setup.serve(7).await;
    assert!(!kubelet.state().resources[GPU].numa.contains_key(&uuid(1, 6)));
    node.process.said("NVML_ERROR_GPU_IS_LOST (15)").await;
}

#[tokio::test]
async fn odd_gpus_are_offered_with_a_warning_each() {
    let link = |to: &str| format!(", nvlinks: [{{links: [0, 1], remote: {{gpu: \"{to}\"}}}}]");
    let gpus = [
        ("GPU-a", "0000:01:00.0", link("0000:02:00.0")),
        ("GPU-b", "0000:02:00.0", ", nvlinks: []".to_owned()),
        ("GPU-c", "0000:03:00.0", link("0000:77:00.0")),
        ("GPU-d", "0000:04:00.0", link("0000:04:00.0")),
        ("GPU-e", "0000:05:00.0", String::new()),
        ("GPU-f", "0000:05:00.0", String::new()),
        ("GPU-g", "0000:06:00.0", String::new()),
        ("GPU-g", "0000:07:00.0", String::new()),
    ];
    let gpus = gpus.each_ref().map(|(uuid, pci, more)| (*uuid, *pci, more.as_str()));
    // Two of one UUID are one device, two of one address are two.
    let (node, kubelet) = Setup::with(&machine(&gpus)).serve(7).await;
    for text in [
        "GPUs 0000:01:00.0 and 0000:02:00.0: 2 NVLink(s) seen from one end, 0 from the other",
        "GPU 0000:03:00.0: 2 NVLink(s) lead to 0000:77:00.0",
        "GPU 0000:04:00.0: 2 NVLink(s) lead to itself",
        "GPUs GPU-e and GPU-f both claim PCI address 0000:05:00.0",
        "its UUID GPU-g is also that of GPU 0000:06:00.0",
    ] {
        assert_eq!(node.process.said(text).await["level"], "WARN");
    }
    for count in 1..7 {
        allocation(&kubelet, "pod", GPU, count).await;
        assert!(kubelet.remove_pod("pod"));
    }
    assert_eq!(kubelet.violations(), []);
}
