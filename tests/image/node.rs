//! A node for pods of the image: a folder as the host's root, the boxes of kubelet, DRA manager and API server, and the
//! mounts that NVIDIA's container runtime would add.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::helm::{Helm, object, repository};
use crate::pod::Pod;
use crate::rights::report_skipped;
use crate::rootfs::{below, run};
use crate::runc::Printed;

pub const NODE: &str = "n";
pub const DRIVER: &str = "gpu.nvidia.com";
pub const GPU: &str = "nvidia.com/gpu";
/// The plugin's DaemonSet and its container.
pub const PLUGIN: &str = "nvdp-nvidia-device-plugin";
pub const PLUGIN_CONTAINER: &str = "nvidia-device-plugin-ctr";
const TOKEN: &str = "of-the-service-account";
/// The paths in a container at which our libnvidia-ml finds its machine and its control socket's folder.
const MACHINE: &str = "/run/machine.yaml";
const CONTROL: &str = "/run/control";

/// The longest wait of a test. GPUs change between the device plugin and DRA after 60 s.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A node. Its containers have to be dropped before it.
pub struct Node {
    pub server: ApiServerBox,
    pub kubelet: KubeletBox,
    pub dra: DraKubelet,
    /// The port of /metrics, /livez and /readyz.
    pub port: u16,
    /// The machine's file, which our libnvidia-ml reads.
    pub machine: PathBuf,
    library: PathBuf,
    shares_mounts: bool,
    pods: AtomicU32,
    folder: TempDir,
}

impl Node {
    /// A node with a built-in machine's GPUs.
    pub async fn start(machine: &str) -> Self {
        // A short path, because a socket's path has at most 107 bytes.
        let folder = tempfile::Builder::new().prefix("lw").tempdir_in("/tmp").unwrap();
        let host = folder.path().join("h");
        for path in ["device-plugins", "plugins_registry", "plugins", "pod-resources"] {
            fs::create_dir_all(host.join("var/lib/kubelet").join(path)).unwrap();
        }
        fs::create_dir_all(host.join("run")).unwrap();
        fs::create_dir(folder.path().join("nvml")).unwrap();
        fs::create_dir_all(host.join("dev")).unwrap();
        symlink("../run", host.join("var/run")).unwrap();
        let shares_mounts = share(&host);
        let library = fake_nvml::library_path();
        let driver = host.join("usr/lib/x86_64-linux-gnu");
        fs::create_dir_all(&driver).unwrap();
        for name in ["libnvidia-ml.so.1", "libcuda.so.1"] {
            fs::copy(&library, driver.join(name)).unwrap();
        }
        for (name, minor) in device_nodes() {
            let node = host.join("dev").join(name);
            run("mknod", [node.as_os_str(), "c".as_ref(), "195".as_ref(), minor.to_string().as_ref()]);
        }
        let server = ApiServerBox::start(&ResourceType::ALL).await;
        server.accept_tokens(&[TOKEN]);
        let kubelet_root = host.join("var/lib/kubelet");
        let mut options = Options::new(kubelet_root.join("device-plugins"));
        options.pod_resources = Some(kubelet_root.join("pod-resources/kubelet.sock"));
        options.wait_timeout = LIMIT;
        let mut dra = DraOptions::new(kubelet_root.join("plugins_registry"));
        dra.host_root = host.clone();
        dra.wait_timeout = LIMIT;
        let port = TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port();
        let node = Self {
            server,
            kubelet: KubeletBox::start(options).unwrap(),
            dra: DraKubelet::start(dra).unwrap(),
            port,
            machine: repository(&format!("crates/host/src/machines/{machine}.yaml")),
            library,
            shares_mounts,
            pods: AtomicU32::new(0),
            folder,
        };
        node.kubelet.list_claims_of(&node.dra);
        node.label(json!({}));
        node
    }

    /// Sends a command to our libnvidia-ml in every process that has loaded it or will load it.
    pub fn tell(&self, command: &str) {
        fake_nvml::Control::new(self.folder.path().join("nvml/socket")).send(command).unwrap();
    }

    pub fn host(&self) -> PathBuf {
        self.folder.path().join("h")
    }

    pub fn folder_for(&self, pod: &str) -> PathBuf {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        self.folder.path().join(format!("{pod}-{number}"))
    }

    pub fn token(&self) -> &'static str {
        TOKEN
    }

    pub fn ca(&self) -> &str {
        self.server.ca()
    }

    pub fn shares_mounts(&self) -> bool {
        self.shares_mounts
    }

    pub fn label(&self, labels: Value) {
        self.server.put("kubelet", &ResourceType::NODES.key(None, NODE), json!({"metadata": {"labels": labels}}));
    }

    /// The value of a pod's field for the downward API.
    pub fn field(&self, path: &str) -> String {
        let value = match path {
            "spec.nodeName" => NODE,
            "metadata.namespace" => "gpu",
            "metadata.name" => "nvdp-xyz12",
            "metadata.uid" => "6d4f7a9c-0f5e-4f0e-9a34-7d2d1f6d0001",
            other => panic!("tests/image does not know the field {other}"),
        };
        value.to_owned()
    }

    /// The variables that the kubelet gives each container, and those that our libnvidia-ml reads.
    pub fn variables(&self) -> Vec<String> {
        let address = self.server.address();
        vec![
            format!("KUBERNETES_SERVICE_HOST={}", address.ip()),
            format!("KUBERNETES_SERVICE_PORT={}", address.port()),
            format!("FAKE_NVML_MACHINE={MACHINE}"),
            format!("FAKE_NVML_CONTROL={CONTROL}/socket"),
        ]
    }

    /// The mounts that NVIDIA's container runtime adds for NVIDIA_VISIBLE_DEVICES: the driver's library, programs and
    /// device nodes. The device nodes are /dev/null, because without a driver the kernel opens no others. Our library
    /// also needs the machine's file and the control socket's folder, the only writable mount.
    pub fn nvidia_mounts(&self) -> Vec<(PathBuf, String, &'static str)> {
        let programs = ["nvidia-cuda-mps-control", "nvidia-smi"];
        let programs = programs.map(|name| (repository("tests/mps").join(name), format!("/usr/bin/{name}")));
        let library = (self.library.clone(), "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1".to_owned());
        let nodes = device_nodes().into_iter().map(|(name, _)| (PathBuf::from("/dev/null"), format!("/dev/{name}")));
        let files = [(self.machine.clone(), MACHINE.to_owned()), library].into_iter().chain(programs).chain(nodes);
        let control = (self.folder.path().join("nvml"), CONTROL.to_owned(), "rw");
        files.map(|(source, destination)| (source, destination, "ro")).chain([control]).collect()
    }

    /// The objects of the chart with these values (lists and objects as JSON) and the node's own metrics port.
    pub fn render(&self, values: &[&str]) -> Vec<Value> {
        let port = format!("metrics.port={}", self.port);
        let is_json = |value: &str| {
            value.split_once('=').is_some_and(|(_, json)| {
                serde_json::from_str::<Value>(json).is_ok_and(|it| it.is_object() || it.is_array())
            })
        };
        let flag = |value| [if is_json(value) { "--set-json" } else { "--set" }, value];
        let args: Vec<&str> = values.iter().copied().chain([port.as_str()]).flat_map(flag).collect();
        let helm = Helm::found();
        helm.template(&args).unwrap_or_else(|error| panic!("{values:?}: {error}"))
    }

    /// Starts a pod by [`Self::begin`], and waits until it is ready.
    pub async fn deploy(&self, set: &str, values: &[&str]) -> Pod {
        let mut pod = self.begin(set, values).await;
        pod.wait_ready().await;
        pod
    }

    /// Starts the pod of a DaemonSet of the chart with these values.
    pub async fn begin(&self, set: &str, values: &[&str]) -> Pod {
        let objects = self.render(values);
        Pod::start(self, &objects, object(&objects, "DaemonSet", set)).await
    }

    /// Waits until the kubelet has exactly this number of healthy devices of a resource.
    pub async fn wait_offered(&self, pod: &Pod, resource: &str, count: usize) {
        let has = |state: &linkwise_kubelet_box::State| {
            state.resources.get(resource).map_or(count == 0, |it| it.healthy.len() == count)
        };
        let found = self.kubelet.wait(has).await;
        found.unwrap_or_else(|error| panic!("{count} of {resource}: {error}\n{}", pod.logs()));
    }

    /// The names of the published devices without taints, sorted.
    pub fn published(&self) -> Vec<String> {
        let slices = self.server.objects(&ResourceType::RESOURCE_SLICES);
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
        let untainted = devices.filter(|device| device["taints"].as_array().is_none_or(Vec::is_empty));
        let mut names: Vec<String> = untainted.map(|device| device["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    /// Waits until exactly this number of devices is published without taints.
    pub async fn wait_published(&self, pod: &mut Pod, count: usize) {
        until(pod, &format!("{count} devices in slices"), || self.published().len() == count).await;
    }

    /// Waits until gpu-feature-discovery has written its NodeFeature.
    pub async fn wait_node_feature(&self, pod: &mut Pod) {
        let key = ResourceType::NODE_FEATURES.key(Some("gpu"), &format!("nvidia-features-for-{NODE}"));
        let has = || self.server.object(&key).is_some_and(|it| it["spec"]["labels"]["nvidia.com/gpu.count"] == "8");
        until(pod, "NodeFeature with 8 GPUs", has).await;
    }

    /// Runs the chart's gpu-feature-discovery until it has written its NodeFeature.
    pub async fn run_discovery(&self) {
        let values = ["gfd.enabled=true", "devicePlugin.enabled=false"];
        let mut pod = self.deploy("nvdp-nvidia-device-plugin-gpu-feature-discovery", &values).await;
        self.wait_node_feature(&mut pod).await;
        pod.stop().await;
    }

    /// Waits until the DRA driver is connected to the kubelet.
    pub async fn wait_driver(&self, pod: &Pod) {
        let has = |state: &linkwise_kubelet_box::dra::DraState| {
            state.drivers.get(DRIVER).is_some_and(|driver| driver.connected >= 1)
        };
        self.dra.wait(has).await.unwrap_or_else(|error| panic!("{error}\n{}", pod.logs()));
    }

    /// Stores a claim to which the scheduler has allocated a device.
    pub fn claim(&self, name: &str, device: &str, config: &[Value]) -> ClaimRef {
        let result = json!({"request": "gpus", "driver": DRIVER, "pool": format!("{NODE}/gpu"), "device": device});
        let uid = self.server.put_allocated_claim(name, &[result], config);
        ClaimRef { namespace: "default".into(), name: name.into(), uid }
    }

    /// Starts a pod with a claim, with the kubelet's retries; returns its CDI devices.
    pub async fn start_claim(&self, plugin: &Pod, pod: &str, claim: &ClaimRef) -> Vec<String> {
        let claims = PodClaims::single(pod, claim.clone(), DRIVER);
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            match self.dra.start_pod(&claims).await {
                Ok(containers) => {
                    // The kubelet appends the devices of each answer, so a device may occur twice.
                    let names: BTreeSet<String> = containers["main"].iter().cloned().collect();
                    return names.into_iter().collect();
                }
                Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}\n{}", plugin.logs()),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A sample of the plugin's metrics, or 0 if there is none.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, page) = get(self.port, "/metrics").await.unwrap_or_default();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_default()
    }

    /// The texts of all CDI specs on the host.
    pub fn cdi_specs(&self) -> String {
        let files = fs::read_dir(below(&self.host(), "/var/run/cdi")).into_iter().flatten().flatten();
        files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.shares_mounts {
            let _ = Command::new("umount").args(["--lazy", "--recursive"]).arg(self.host()).output();
        }
    }
}

/// The driver's device nodes for eight GPUs, with their minor numbers.
fn device_nodes() -> Vec<(String, u32)> {
    let gpus = (0..8).map(|minor| (format!("nvidia{minor}"), minor));
    gpus.chain([("nvidiactl".to_owned(), 255)]).collect()
}

/// Makes the host's root a shared mount, as systemd does; returns true if that succeeded.
fn share(host: &Path) -> bool {
    let mount = |args: &[&str]| Command::new("mount").args(args).arg(host).output().is_ok_and(|it| it.status.success());
    let shared = mount(&["--bind", host.to_str().unwrap()]) && mount(&["--make-rshared"]);
    if !shared {
        report_skipped("propagation of mounts: this machine allows no mounts");
    }
    shared
}

/// Polls a condition until it holds; the pod's containers have to run meanwhile.
pub async fn until(pod: &mut Pod, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + LIMIT;
    while !holds() {
        pod.assert_running();
        assert!(tokio::time::Instant::now() < deadline, "waited in vain for {what}\n{}", pod.logs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The status and body of `GET` from a port of this machine.
pub async fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let status = answer.split_whitespace().nth(1)?.parse().ok()?;
    let text = answer.split_once("\r\n\r\n").map(|(_, text)| text.to_owned()).unwrap_or_default();
    Some((status, text))
}

/// The output of a command, which has to have succeeded.
pub fn output_of(printed: &Printed) -> &str {
    assert!(printed.status.success(), "{}\n{}\n{}", printed.status, printed.out, printed.error);
    &printed.out
}
