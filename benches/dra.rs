//! `linkwise run` with DRA as on a node: the time from start to stored slices, the time to prepare claims over the
//! socket, the resident memory of linkwise and its agent, and the writes to the API server on an idle node and in a
//! storm of health changes.
//!
//! The release program runs with the fake NVML library (8 GPUs, then 16 with MIG devices), the API server in the box
//! and the kubelet in the box. Run it with `cargo bench --bench dra`; it takes two minutes. LINKWISE_BENCH_PROGRAM
//! names another program, such as the image's; LINKWISE_BENCH_IDLE is the seconds for which the idle node is observed.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a benchmark prints, reads its environment, and ends at its first error"
)]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use linkwise_core::topology::{MigDeviceObservation, MigObservation};
use linkwise_host::machines;
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options};
use serde_json::{Value, json};

use support::{child_of, memory, program, spread};

const DRIVER: &str = "gpu.nvidia.com";
/// The measured starts of the program.
const STARTS: usize = 5;
/// Claims after the first.
const CLAIMS: usize = 100;
/// The MIG devices of each GPU in [`many_devices`].
const MIG_DEVICES: u32 = 7;
/// The claims that pods use at once in [`many_devices`].
const CONCURRENT_CLAIMS: usize = 32;
const CHANGES: u32 = 1000;
/// The time after which the threads of the start have ended.
const SETTLE_DELAY: Duration = Duration::from_secs(12);
/// The default of LINKWISE_BENCH_IDLE.
const IDLE: Duration = Duration::from_secs(30);
/// The longest wait for the devices to be published.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut stored = Vec::new();
    for _ in 0..STARTS {
        let node = Node::start().await;
        node.wait_for_devices(8).await;
        stored.push(node.begin.elapsed());
    }
    println!("first start to slices stored: {}", spread(&mut stored));

    let node = Node::start().await;
    node.wait_for_devices(8).await;
    node.wait_for_registration().await;
    let (mut prepared, mut unprepared) = (Vec::new(), Vec::new());
    for number in 0..=CLAIMS {
        let pod = PodClaims::single("pod", node.claim(&format!("c{number}")), DRIVER);
        let begin = Instant::now();
        node.dra.start_pod(&pod).await.unwrap();
        prepared.push(begin.elapsed());
        let begin = Instant::now();
        node.dra.stop_pod("pod").await.unwrap();
        unprepared.push(begin.elapsed());
    }
    let first = prepared.remove(0);
    println!(
        "a claim of 4 GPUs prepared, its GET over HTTPS included: first {first:.1?}, then {}",
        spread(&mut prepared)
    );
    println!("unprepared: {}", spread(&mut unprepared));

    tokio::time::sleep(SETTLE_DELAY).await;
    let pids = [node.process.id(), child_of(node.process.id())];
    let rss = pids.map(|pid| memory(pid, "Rss:") as f64 / 1024.0);
    let pss: f64 = pids.map(|pid| memory(pid, "Pss:") as f64 / 1024.0).iter().sum();
    println!(
        "8 GPUs resident {:.1} MiB ({:.1} + {:.1}), proportional share {pss:.1} MiB",
        rss[0] + rss[1],
        rss[0],
        rss[1]
    );
    let before = node.writes();
    let idle =
        std::env::var("LINKWISE_BENCH_IDLE").map_or(IDLE, |seconds| Duration::from_secs(seconds.parse().unwrap()));
    tokio::time::sleep(idle).await;
    println!("idle for {idle:?}: {} writes to the API server", node.writes() - before);

    let (before, begin) = (node.writes(), Instant::now());
    for change in 0..CHANGES {
        let word = if change % 2 == 0 { "lost" } else { "back" };
        node.control.send(&format!("{word} {}", change / 2 % 8)).unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (writes, took) = (node.writes() - before, begin.elapsed());
    println!(
        "{CHANGES} changes of GPUs in {took:.1?}: {writes} writes, {:.2} a second",
        writes as f64 / took.as_secs_f64()
    );
    drop(node);
    many_devices().await;
}

async fn many_devices() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = machines::load("dgx2-v100").unwrap();
    // The NVIDIA driver's list of device nodes (/proc/driver/nvidia-caps/mig-minors).
    let mut minors = String::new();
    for (gpu, place) in machine.observed.gpus.iter_mut().zip(0..) {
        let device = |index: u32| -> MigDeviceObservation {
            let uuid = format!("MIG-{:08}-0000-4000-8000-000000000000", place * MIG_DEVICES + index);
            let device = json!({"index": index, "uuid": uuid, "gpu_instance": 7 + index, "compute_instance": 0,
                "gpu_slices": 1, "compute_slices": 1, "memory_mib": 4_864, "profile_id": 19,
                "placement": {"start": index, "size": 1}});
            serde_json::from_value(device).unwrap()
        };
        let devices = (0..MIG_DEVICES).map(device);
        gpu.mig = Some(MigObservation { enabled: true, devices: devices.collect(), profiles: Vec::new() });
        gpu.minor = Some(place);
        for instance in (0..MIG_DEVICES).map(|index| format!("gpu{place}/gi{}", 7 + index)) {
            let number = 3 + 2 * minors.lines().count();
            minors += &format!("{instance}/access {number}\n{instance}/ci0/access {}\n", number + 1);
        }
    }
    let path = folder.path().join("machine.yaml");
    fs::write(&path, machine.to_yaml().unwrap()).unwrap();
    let node = Node::on(&path, &minors).await;
    let count = machine.observed.gpus.len() * usize::try_from(MIG_DEVICES).unwrap();
    node.wait_for_devices(count).await;
    node.wait_for_registration().await;
    let names = node.devices();
    for (number, device) in names.iter().take(CONCURRENT_CLAIMS).enumerate() {
        let name = format!("c{number}");
        let claim = node.claim_of(&name, std::slice::from_ref(device));
        node.dra.start_pod(&PodClaims::single(&name, claim, DRIVER)).await.unwrap();
    }
    tokio::time::sleep(SETTLE_DELAY).await;
    let rss = [node.process.id(), child_of(node.process.id())].map(|pid| memory(pid, "Rss:") as f64 / 1024.0);
    println!(
        "{count} MIG devices of {} GPUs, {CONCURRENT_CLAIMS} claims: resident {:.1} MiB ({:.1} + {:.1})",
        machine.observed.gpus.len(),
        rss[0] + rss[1],
        rss[0],
        rss[1]
    );
}

struct Node {
    process: Child,
    server: ApiServerBox,
    dra: DraKubelet,
    control: fake_nvml::Control,
    begin: Instant,
    _kubelet: KubeletBox,
    _folder: tempfile::TempDir,
}

impl Node {
    async fn start() -> Self {
        Self::on(&Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml"), "").await
    }

    /// Starts a node with the GPUs of a node file, and with this text as the driver's `mig-minors`.
    async fn on(machine: &Path, minors: &str) -> Self {
        let (server, folder) = (ApiServerBox::start(&ResourceType::ALL).await, tempfile::tempdir().unwrap());
        server.accept_tokens(&["token"]);
        server.put("kubelet", &ResourceType::NODES.key(None, "n"), json!({"metadata": {"labels": {}}}));
        let at = |name: &str| folder.path().join(name);
        for name in ["sys", "k", "reg", "plugins", "cdi", "account"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("account/ca.crt"), server.ca()).unwrap();
        fs::write(at("account/token"), "token").unwrap();
        fs::create_dir_all(at("proc/driver/nvidia-caps")).unwrap();
        fs::write(at("proc/driver/nvidia-caps/mig-minors"), minors).unwrap();
        let mut options = Options::new(at("k"));
        options.pod_resources = Some(at("pod-resources.sock"));
        let kubelet = KubeletBox::start(options).unwrap();
        let dra = DraKubelet::start(DraOptions::new(at("reg"))).unwrap();
        let address = server.address();
        let begin = Instant::now();
        let mut command = Command::new(program());
        command.args(["run", "--dra-gpus", "all", "--log", "error"]).env_clear().env("NODE_NAME", "n");
        command
            .env("LINKWISE_SYSFS", at("sys"))
            .env("LINKWISE_PROCFS", at("proc"))
            .env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
        command.env("FAKE_NVML_MACHINE", machine).env("FAKE_NVML_CONTROL", at("control"));
        command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path());
        command.env("KUBERNETES_SERVICE_HOST", address.ip().to_string());
        command.env("KUBERNETES_SERVICE_PORT", address.port().to_string());
        command.env("LINKWISE_SERVICE_ACCOUNT_DIR", at("account"));
        command.env("KUBELET_SOCKET", at("k/kubelet.sock"));
        command.env("LINKWISE_POD_RESOURCES_SOCKET", at("pod-resources.sock"));
        command.env("LINKWISE_DRA_PLUGINS_DIR", at("plugins")).env("LINKWISE_DRA_REGISTRY_DIR", at("reg"));
        command.env("LINKWISE_CDI_DIR", at("cdi")).env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0");
        command.args(["--nvml-poll-ms", "1000"]);
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let control = fake_nvml::Control::new(at("control"));
        Self { process, server, dra, control, begin, _kubelet: kubelet, _folder: folder }
    }

    async fn wait_for_devices(&self, count: usize) {
        while self.devices().len() < count {
            assert!(
                self.begin.elapsed() < PUBLISH_TIMEOUT,
                "{} devices of {count} are published",
                self.devices().len()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn devices(&self) -> Vec<String> {
        let slices = self.server.objects(&ResourceType::RESOURCE_SLICES);
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
        devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    }

    async fn wait_for_registration(&self) {
        self.dra.wait(|state| state.drivers.get(DRIVER).is_some_and(|driver| driver.connected == 1)).await.unwrap();
    }

    /// A claim to which the scheduler has allocated four GPUs.
    fn claim(&self, name: &str) -> ClaimRef {
        self.claim_of(name, &[0, 1, 2, 3].map(|gpu| format!("gpu-{gpu}")))
    }

    /// A claim to which the scheduler has allocated these devices.
    fn claim_of(&self, name: &str, devices: &[String]) -> ClaimRef {
        let result = |device| json!({"request": "gpus", "driver": DRIVER, "pool": "n/gpu", "device": device});
        let results: Vec<Value> = devices.iter().map(result).collect();
        let uid = self.server.put_allocated_claim(name, &results, &[]);
        ClaimRef { namespace: "default".into(), name: name.into(), uid }
    }

    fn writes(&self) -> usize {
        self.server.requests().iter().filter(|request| request.method != "GET").count()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
