//! Tests of `publish::injection`: the variables, mounts, device nodes and CDI names of a container, by strategy.

use std::collections::BTreeMap;

use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::{
    CdiOptions, ChosenDevice, DeviceIds, Granted, HostDevices, HostPath, Injection, InjectionError, InjectionOptions,
};
use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_host::machines;

use super::snapshot;

/// Injects the snapshot's GPUs whose index `is_chosen` accepts.
fn inject(
    options: &InjectionOptions,
    host: &HostDevices,
    snapshot: &NodeState,
    is_chosen: impl Fn(u32) -> bool,
) -> Result<Injection, InjectionError> {
    let devices = snapshot.offers().of(&ResourceName::gpu()).map(|(_, device)| ChosenDevice::from(device));
    let devices = devices.filter(|device| is_chosen(device.gpu.index)).collect();
    options.inject(&Granted { topology: snapshot.topology(), devices, mps: None }, host)
}

fn one_gpu(minor: Option<u32>) -> NodeState {
    snapshot(&[(4, "GPU-a", "0000:01:00.0", minor)])
}

fn by_envvar() -> InjectionOptions {
    InjectionOptions { envvar: true, ..InjectionOptions::default() }
}

fn cdi() -> CdiOptions {
    CdiOptions { kind: "vendor/gpu".to_owned(), annotation_prefix: Some("prefix/".to_owned()), cri: true }
}

fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn imex_channels_follow_the_strategy_of_the_gpus() {
    let host = HostDevices {
        imex_channels: vec![0, 3],
        cdi_devices: vec!["vendor/imex-channel=0".to_owned(), "vendor/gds=all".to_owned()],
        ..HostDevices::default()
    };
    let options = InjectionOptions { env: texts(&[("NVIDIA_GDS", "enabled")]), ..by_envvar() };
    let injection = inject(&options, &host, &one_gpu(None), |_| true).unwrap();
    let env = texts(&[("NVIDIA_GDS", "enabled"), ("NVIDIA_IMEX_CHANNELS", "0,3"), ("NVIDIA_VISIBLE_DEVICES", "GPU-a")]);
    assert_eq!(injection, Injection { env, ..Injection::default() });

    let mounts = InjectionOptions { envvar: false, volume_mounts: true, ids: DeviceIds::Index, ..options.clone() };
    let injection = inject(&mounts, &host, &one_gpu(None), |_| true).unwrap();
    let folder = "/var/run/nvidia-container-devices";
    assert_eq!(injection.env, texts(&[("NVIDIA_GDS", "enabled"), ("NVIDIA_VISIBLE_DEVICES", folder)]));
    let mount = |name| HostPath { host: "/dev/null".to_owned(), container: format!("{folder}/{name}") };
    assert_eq!(injection.mounts, ["4", "imex/0", "imex/3"].map(mount));

    let by_cdi = InjectionOptions { envvar: false, cdi: Some(cdi()), ..options };
    let injection = inject(&by_cdi, &host, &one_gpu(Some(0)), |_| true).unwrap();
    let cdi_devices = ["vendor/gpu=GPU-a", "vendor/imex-channel=0", "vendor/gds=all"].map(str::to_owned).to_vec();
    let env = texts(&[("NVIDIA_GDS", "enabled")]);
    assert_eq!(injection, Injection { cdi_devices, env, ..Injection::default() });
}

#[test]
fn imex_channels_are_among_the_device_nodes() {
    let host = HostDevices {
        dev_root: "/run/driver".to_owned(),
        control_nodes: vec!["/dev/nvidiactl".to_owned()],
        imex_channels: vec![0],
        ..HostDevices::default()
    };
    let options = InjectionOptions { device_nodes: true, ..by_envvar() };
    let injection = inject(&options, &host, &one_gpu(Some(3)), |_| true).unwrap();
    let nodes: Vec<_> = injection.device_nodes.iter().map(|node| (&*node.host, &*node.container)).collect();
    let channel = "/dev/nvidia-caps-imex-channels/channel0";
    let expected = [
        ("/run/driver/dev/nvidia3", "/dev/nvidia3"),
        ("/run/driver/dev/nvidiactl", "/dev/nvidiactl"),
        ("/run/driver/dev/nvidia-caps-imex-channels/channel0", channel),
    ];
    assert_eq!(nodes, expected);
}

#[test]
fn gpu_without_minor_is_refused_if_its_node_is_needed() {
    let (host, by_envvar) = (HostDevices::default(), by_envvar());
    assert!(inject(&by_envvar, &host, &one_gpu(None), |_| true).is_ok());
    for options in [
        InjectionOptions { device_nodes: true, ..by_envvar.clone() },
        InjectionOptions { envvar: false, cdi: Some(cdi()), ..by_envvar },
    ] {
        assert!(inject(&options, &host, &one_gpu(Some(0)), |_| true).is_ok());
        let error = inject(&options, &host, &one_gpu(None), |_| true).unwrap_err().to_string();
        assert_eq!(error, "cannot pass the device node of GPU-a: its minor number is unknown");
    }
}

#[test]
fn slots_of_one_gpu_inject_it_once() {
    let snapshot = one_gpu(Some(0));
    let gpu = ChosenDevice::from(snapshot.offers().of(&ResourceName::gpu()).next().unwrap().1);
    let granted = Granted { topology: snapshot.topology(), devices: vec![gpu, gpu], mps: None };
    let injection = by_envvar().inject(&granted, &HostDevices::default()).unwrap();
    assert_eq!(injection.env, texts(&[("NVIDIA_VISIBLE_DEVICES", "GPU-a")]));
}

/// The key and value of the annotation for a resource.
fn annotation(resource: &str) -> (String, String) {
    let mut injection = Injection { cdi_devices: vec!["a".to_owned(), "b".to_owned()], ..Injection::default() };
    CdiOptions { cri: false, ..cdi() }.place(&resource.parse().unwrap(), &mut injection);
    assert_eq!(injection.cdi_devices, [""; 0], "devices are passed over CRI too");
    injection.annotations.pop_first().unwrap()
}

#[test]
fn cdi_annotation_is_named_after_the_resource() {
    let expected = ("prefix/nvidia-device-plugin_nvidia.com_gpu".to_owned(), "a,b".to_owned());
    assert_eq!(annotation("nvidia.com/gpu"), expected);
    // The name is cut to 63 bytes. Its hash is part of the contract: each version of linkwise has to make this name.
    let long = "x".repeat(60);
    let a = annotation(&format!("nvidia.com/{long}a")).0;
    assert_eq!(a, "prefix/nvidia-device-plugin_nvidia.com_xxxxxxxxxxxxxx-48c95046e97ae522");
    assert_ne!(a, annotation(&format!("nvidia.com/{long}b")).0);
}

/// Injects GPUs of a built-in machine, by index; returns `LINKWISE_NICS` and the InfiniBand device nodes.
fn nics(machine: &str, gpus: &[u32]) -> (String, Vec<String>) {
    let observed = machines::load(machine).unwrap().observed;
    let snapshot = NodeState::default().apply(Event::Observed(Box::new(observed)), std::time::Duration::ZERO).0;
    let node = |n: usize| (format!("mlx5_{n}"), format!("/dev/infiniband/uverbs{n}"));
    let rdma = RdmaNodes { devices: (0..12).map(node).collect(), common: vec!["/dev/infiniband/rdma_cm".to_owned()] };
    let host = HostDevices { rdma: Some(rdma), ..HostDevices::default() };
    let injection = inject(&by_envvar(), &host, &snapshot, |index| gpus.contains(&index)).unwrap();
    assert!(injection.device_nodes.iter().all(|node| node.host == node.container));
    let nodes = injection.device_nodes.into_iter().map(|node| node.host.replace("/dev/infiniband/", ""));
    (injection.env["LINKWISE_NICS"].clone(), nodes.collect())
}

#[test]
fn nearest_nics_come_with_their_gpus() {
    let expected =
        |names: &str, nodes: &[&str]| (names.to_owned(), nodes.iter().map(|&node| node.to_owned()).collect());
    assert_eq!(nics("dgx1-v100", &[0]), expected("mlx5_0", &["uverbs0", "rdma_cm"]));
    // GPUs 0 and 1 share a PCIe switch with a NIC.
    assert_eq!(nics("dgx1-v100", &[0, 1]), expected("mlx5_0", &["uverbs0", "rdma_cm"]));
    assert_eq!(nics("dgx1-v100", &[1, 7]), expected("mlx5_0,mlx5_3", &["uverbs0", "uverbs3", "rdma_cm"]));
    assert_eq!(nics("workstation-a6000", &[0]), expected("", &[]), "a distant NIC is injected");
}
