//! GPUs shared by MPS, with two real processes: `linkwise run` between a kubelet and the fake NVML, and
//! `linkwise mps-control-daemon` with the fake nvidia-cuda-mps-control of tests/mps.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use linkwise_kubelet_box::{KubeletBox, Pod};
use tokio::process::Command;

use crate::mps::node::{kill_groups, link_programs, pid_in};
use crate::run::list_strategies::{cdi_setup, lines};
use crate::run::node::{GPU, Node, Process, Setup, allocation, machine, replace, seen, signal, uuid, wait_registered};

/// The example of the NVIDIA plugin's README, which promises 80 of `nvidia.com/gpu` on a node with 8 GPUs.
const README: &str = "version: v1\nsharing:\n  mps:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 10\n";

const GPUS: [(&str, &str, &str); 3] = [
    ("GPU-a", "0000:01:00.0", ", memory_mib: 40960"),
    ("GPU-b", "0000:41:00.0", ", memory_mib: 40960"),
    ("GPU-c", "0000:81:00.0", ", memory_mib: 40960"),
];

/// The example with another number of replicas.
fn replicas(count: u32) -> String {
    README.replace("10", &count.to_string())
}

/// The files that both processes use.
struct Shared {
    folder: PathBuf,
    machine: PathBuf,
    kubelet_socket: PathBuf,
}

impl Shared {
    /// Prepares a machine whose folder has the configuration, the MPS root, and the driver's programs.
    fn prepare(setup: Setup, machine: PathBuf, config: &str) -> (Self, Setup) {
        let shared = Self { folder: setup.at("mps"), machine, kubelet_socket: setup.kubelet_socket.clone() };
        fs::create_dir_all(shared.root()).unwrap();
        link_programs(&shared.bin());
        replace(&shared.config(), config);
        let setup = setup.arg("--mps-container-root").arg(shared.root()).arg("--config-file").arg(shared.config());
        (shared, setup)
    }

    /// 8 GPUs of 80 GiB.
    fn dgx(config: &str) -> (Self, Setup) {
        let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
        Self::prepare(Setup::on("dgx-h100"), machine, config)
    }

    /// Two GPUs of 40 GiB.
    fn two(config: &str) -> (Self, Setup) {
        let setup = Setup::with(&machine(&GPUS[..2]));
        let machine = setup.at("machine.yaml");
        Self::prepare(setup, machine, config)
    }

    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    fn bin(&self) -> PathBuf {
        self.folder.join("bin")
    }

    fn config(&self) -> PathBuf {
        self.folder.join("config.yaml")
    }

    /// Starts the daemons' process under the name of the NVIDIA plugin's.
    fn daemons(&self) -> Process {
        let link = self.folder.join("mps-control-daemon");
        if !link.exists() {
            symlink(env!("CARGO_BIN_EXE_linkwise"), &link).unwrap();
        }
        let mut command = Command::new(link);
        command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", self.bin().display()));
        command.args(["--log-format", "json", "--mps-container-root"]).arg(self.root());
        command.arg("--config-file").arg(self.config()).arg("--kubelet-socket").arg(&self.kubelet_socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        Process::of(command)
    }

    /// The control daemon's process id.
    fn control(&self) -> u32 {
        pid_in(&self.root().join(GPU).join("pipe/nvidia-cuda-mps-control.pid"))
    }

    /// Replaces the machine's GPUs, and crashes the agent so that the next one sees them.
    fn replace_gpus(&self, node: &Node, gpus: &[(&str, &str, &str)]) {
        replace(&self.machine, &machine(gpus));
        node.setup.tell("crash");
    }

    fn refuse_start(&self, refuse: bool) {
        let file = self.bin().join("refuse-start");
        if refuse { fs::write(file, "").unwrap() } else { fs::remove_file(file).unwrap() }
    }
}

impl Drop for Shared {
    /// Kills the control daemons that outlive the daemons' process.
    fn drop(&mut self) {
        kill_groups(&self.root());
    }
}

/// Starts both processes, and waits until all `slots` are offered.
async fn serve((shared, setup): (Shared, Setup), slots: usize) -> (Shared, Process, Node, KubeletBox) {
    let daemons = shared.daemons();
    let (node, kubelet) = setup.serve(slots).await;
    (shared, daemons, node, kubelet)
}

/// Waits for these numbers of healthy and unhealthy slots.
async fn wait_slots(kubelet: &KubeletBox, healthy: usize, unhealthy: usize) {
    let counts = |resource: &linkwise_kubelet_box::ResourceState| (resource.healthy.len(), resource.unhealthy.len());
    kubelet.wait(|state| counts(&state.resources[GPU]) == (healthy, unhealthy)).await.unwrap();
}

#[tokio::test]
async fn nvidia_example_is_offered_once_limits_hold() {
    let (shared, setup) = Shared::dgx(README);
    let (node, kubelet) = setup.start_beside_kubelet().await;
    node.ready(503, "nvidia.com/gpu: its MPS control daemon is not ready: the MPS daemon does not serve").await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 0);
    let daemons = shared.daemons();
    wait_registered(&kubelet, 1, 80).await;
    let line = daemons.said("limits confirmed").await;
    assert_eq!((line["resource"].as_str(), line["threads"].as_u64()), (Some(GPU), Some(10)));
    node.ready(200, "ready").await;

    let allocation = allocation(&kubelet, "one", GPU, 1).await;
    let gpu = allocation.devices[0].split_once("::").unwrap().0;
    assert!((0..8).any(|index| gpu == uuid(2, index)), "{gpu}");
    let expected = [
        "env CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe".to_owned(),
        format!("env NVIDIA_VISIBLE_DEVICES={gpu}"),
        "mount /run/nvidia/mps/nvidia.com/gpu/pipe at /mps/nvidia.com/gpu/pipe".to_owned(),
        "mount /run/nvidia/mps/shm at /dev/shm".to_owned(),
    ];
    assert_eq!(lines(&allocation), expected);
    // Slots of one GPU are not isolated from each other: two are refused unless the configuration allows them.
    let refused = kubelet.admit(&Pod::single("two", GPU, 2), None).await.unwrap_err();
    let words = "cannot allocate 2 devices of nvidia.com/gpu: it is shared, and a container may have 1; request 1";
    assert!(format!("{refused:?}").contains(words), "{refused:?}");
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn every_strategy_mounts_mps_pipe_and_shared_memory() {
    let mps = [
        "env CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu.shared/pipe",
        "mount /srv/mps/nvidia.com/gpu.shared/pipe at /mps/nvidia.com/gpu.shared/pipe",
        "mount /srv/mps/shm at /dev/shm",
    ];
    for way in ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "cdi-cri,envvar"] {
        let config = README.replace("    resources:", "    renameByDefault: true\n    resources:");
        let (shared, setup) = Shared::two(&config);
        let setup = cdi_setup(setup).arg("--mps-root=/srv/mps").arg("--device-list-strategy").arg(way);
        let _daemons = shared.daemons();
        let (_node, kubelet) = setup.start_beside_kubelet().await;
        let name = "nvidia.com/gpu.shared";
        kubelet.wait(|state| state.resources[name].healthy.len() == 20).await.unwrap();
        let got = lines(&allocation(&kubelet, "pod", name, 1).await);
        for given in mps {
            assert!(got.iter().any(|line| line == given), "{way}: {got:?}");
        }
        assert_eq!(got.iter().any(|line| line.contains("k8s.device-plugin.nvidia.com/gpu=GPU-")), way.contains("cdi"));
    }
}

#[tokio::test]
async fn slots_of_dead_control_daemon_are_unhealthy() {
    let (shared, daemons, node, kubelet) = serve(Shared::two(&replicas(3)), 6).await;
    kubelet.admit(&Pod::single("before", GPU, 1), None).await.unwrap();
    let held = kubelet.state().resources[GPU].in_use();
    shared.refuse_start(true);
    signal("KILL", shared.control());
    // Each slot stays on the list, because a pod may hold it.
    wait_slots(&kubelet, 0, 6).await;
    let line = daemons.said("nvidia-cuda-mps-control ended: signal: 9 (SIGKILL)").await;
    assert_eq!(line["level"], "WARN");
    let line = node.process.said("MPS daemon not ready").await;
    assert!(line["why"].as_str().unwrap().starts_with("the MPS daemon does not serve"), "{line}");
    shared.refuse_start(false);
    wait_slots(&kubelet, 6, 0).await;
    kubelet.admit(&Pod::single("after", GPU, 1), None).await.unwrap();
    let state = &kubelet.state().resources[GPU];
    assert!(state.in_use().is_superset(&held));
    assert_eq!((state.registrations, kubelet.violations().len()), (1, 0));
}

#[tokio::test]
async fn slots_of_killed_daemon_process_are_unhealthy() {
    let (shared, daemons, node, kubelet) = serve(Shared::two(&replicas(3)), 6).await;
    let left_behind = shared.control();
    daemons.signal("KILL");
    wait_slots(&kubelet, 0, 6).await;
    node.process.said("the MPS daemon is gone and left").await;
    let daemons = shared.daemons();
    wait_slots(&kubelet, 6, 0).await;
    assert_ne!(shared.control(), left_behind);
    // A daemon that ends in order leaves nothing behind; its slots are unhealthy too.
    daemons.signal("TERM");
    wait_slots(&kubelet, 0, 6).await;
    assert_eq!((kubelet.state().resources[GPU].registrations, kubelet.violations().len()), (1, 0));
}

#[tokio::test]
async fn released_driver_has_no_mps_daemons() {
    let (shared, daemons, node, kubelet) = serve(Shared::two(&replicas(3)), 6).await;
    let first = shared.control();
    node.process.signal("USR1");
    let line = daemons.said("ending the MPS daemon").await;
    assert_eq!(line["why"], "an operator released the driver");
    wait_slots(&kubelet, 0, 6).await;
    seen(async || Path::new(&format!("/proc/{first}")).exists(), |is_there| !*is_there).await;
    node.process.signal("USR2");
    wait_slots(&kubelet, 6, 0).await;
    assert_ne!(shared.control(), first);
    assert_eq!((kubelet.state().resources[GPU].registrations, kubelet.violations().len()), (1, 0));
}

#[tokio::test]
async fn plugin_restart_leaves_mps_daemons_alone() {
    let (shared, _daemons, node, kubelet) = serve(Shared::two(&replicas(3)), 6).await;
    let control = shared.control();
    let _again = node.end().await.start().await;
    wait_registered(&kubelet, 2, 6).await;
    assert_eq!(shared.control(), control);
}

#[tokio::test]
async fn new_replicas_are_offered_with_their_limits() {
    let (shared, daemons, _node, kubelet) = serve(Shared::two(&replicas(2)), 4).await;
    kubelet.admit(&Pod::single("before", GPU, 1), None).await.unwrap();
    let before = shared.control();
    shared.refuse_start(true);
    // config-manager's SIGHUP at a change must not end the process.
    daemons.signal("HUP");
    replace(&shared.config(), &replicas(5));
    daemons.said("its limits changed").await;
    wait_slots(&kubelet, 0, 4).await;
    shared.refuse_start(false);
    wait_slots(&kubelet, 10, 0).await;
    assert_ne!(shared.control(), before);
    daemons.logged(|line| line["message"] == "MPS daemon serving, limits confirmed" && line["threads"] == 20).await;
    // The GPUs are offered whole again once no pod can hold a slot.
    assert!(kubelet.remove_pod("before"));
    replace(&shared.config(), "version: v1\n");
    wait_registered(&kubelet, 1, 2).await;
    daemons.said("it is no longer shared by MPS").await;
    let got = lines(&allocation(&kubelet, "whole", GPU, 1).await);
    assert!(got.len() == 1 && got[0].starts_with("env NVIDIA_VISIBLE_DEVICES=GPU-"), "{got:?}");
    // Each of the two daemons resets the mode of both GPUs.
    let modes = async || fs::read_to_string(shared.bin().join("modes")).unwrap_or_default();
    seen(modes, |modes| modes.matches("-c DEFAULT").count() == 4).await;
    assert_eq!((kubelet.state().resources[GPU].registrations, kubelet.violations().len()), (1, 0));
}

#[tokio::test]
async fn lost_gpu_ends_no_mps_daemon_but_a_new_gpu_does() {
    let (shared, daemons, node, kubelet) = serve(Shared::two(&replicas(3)), 6).await;
    let (control, orders) = (shared.control(), shared.root().join(".dra/orders.json"));
    shared.replace_gpus(&node, &GPUS[..1]);
    wait_slots(&kubelet, 3, 3).await;
    seen(async || fs::read_to_string(&orders).unwrap(), |orders| !orders.contains("GPU-b")).await;
    assert_eq!(shared.control(), control, "clients on the remaining GPU lost their daemon");
    shared.replace_gpus(&node, &GPUS);
    wait_slots(&kubelet, 9, 0).await;
    assert_ne!(shared.control(), control);
    assert_eq!((daemons.count("limits confirmed"), kubelet.violations()), (2, vec![]), "the lost GPU ended a daemon");
}

#[tokio::test]
async fn resource_name_too_long_for_mps_is_named() {
    let (shared, setup) = Shared::two(&replicas(48));
    let _daemons = shared.daemons();
    let node = setup.start().await;
    let kubelet = node.setup.kubelet();
    wait_registered(&kubelet, 1, 96).await;
    let long = ["a".repeat(60), "b".repeat(40)].join(".");
    let naming = format!("linkwise: {{naming: true}}\nresources:\n  gpus: [{{pattern: '*', name: {long}/gpu}}]\n");
    replace(&shared.config(), &(naming + &replicas(2).replace(GPU, &format!("{long}/gpu"))));
    node.process.said("longer than a socket's path can be").await;
}
