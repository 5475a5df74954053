//! Machines that are odd: a warning, and a node that keeps working.

use linkwise_kubelet_box::Pod;

use crate::run::node::{GPU, Setup, machine, registered, uuid};

#[tokio::test]
async fn gpu_lost_at_start_is_not_offered() {
    let setup = Setup::on("dgx1-v100");
    setup.tell("lost 6");
    let (node, kubelet) = setup.serve(7).await;
    assert!(!kubelet.state().resources[GPU].numa.contains_key(&uuid(1, 6)));
    node.process.said("NVML_ERROR_GPU_IS_LOST (15)").await;
}

#[tokio::test]
async fn gpus_with_one_pci_address_are_both_offered() {
    let gpus = [("GPU-a", "0000:01:00.0", ""), ("GPU-b", "0000:01:00.0", ""), ("GPU-c", "0000:02:00.0", "")];
    let (node, kubelet) = Setup::with(&machine(&gpus)).serve(3).await;
    let line = node.process.said("both claim PCI address 0000:01:00.0").await;
    let message = line["message"].as_str().unwrap();
    assert!(message.contains("GPU-a") && message.contains("GPU-b"), "{message}");
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 2), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.devices.len(), 2);
}

#[tokio::test]
async fn one_way_nvlinks_are_warned_of() {
    let link = |to: &str| format!(", nvlinks: [{{links: [0, 1], remote: {{gpu: \"{to}\"}}}}]");
    let gpus = [
        ("GPU-a", "0000:01:00.0", link("0000:02:00.0")),
        ("GPU-b", "0000:02:00.0", ", nvlinks: []".to_owned()),
        ("GPU-c", "0000:03:00.0", link("0000:77:00.0")),
        ("GPU-d", "0000:04:00.0", link("0000:04:00.0")),
    ];
    let gpus = gpus.each_ref().map(|(uuid, pci, more)| (*uuid, *pci, more.as_str()));
    let (node, kubelet) = Setup::with(&machine(&gpus)).serve(4).await;
    for text in [
        "GPUs 0000:01:00.0 and 0000:02:00.0: 2 NVLink(s) seen from one end, 0 from the other",
        "GPU 0000:03:00.0: 2 NVLink(s) lead to 0000:77:00.0",
        "GPU 0000:04:00.0: 2 NVLink(s) lead to itself",
    ] {
        assert_eq!(node.process.said(text).await["level"], "WARN");
    }
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 3), None).await.unwrap();
    assert_eq!(admitted.grant("main", GPU).unwrap().allocation.devices.len(), 3);
}

#[tokio::test]
async fn gpus_with_one_uuid_are_one_device() {
    let gpus = [("GPU-a", "0000:01:00.0", ""), ("GPU-a", "0000:02:00.0", ""), ("GPU-b", "0000:03:00.0", "")];
    let setup = Setup::with(&machine(&gpus));
    let kubelet = setup.kubelet();
    let node = setup.start().await;
    registered(&kubelet, 1, 2).await;
    node.process.said("its UUID GPU-a is also that of GPU 0000:01:00.0").await;
    assert_eq!(kubelet.violations(), []);
}
