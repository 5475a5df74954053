//! The device plugin as on a node: the time from a start, and from a restart of the kubelet, to the registration; the
//! time from an event to the kubelet's stream; memory with whole and with shared GPUs; CPU and wake-ups while idle; and
//! memory, CPU and wake-ups on a node without GPUs.
//!
//! The release program runs with the fake NVML library (8 GPUs) and the kubelet in the box. Memory is that of the
//! plugin and its agent, without NVIDIA's library. Run it with `cargo bench --bench footprint`; it takes two minutes.
//! LINKWISE_BENCH_PROGRAM names another program, such as the image's.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends at its first error")]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_nvml::Control;
use linkwise_kubelet_box::{KubeletBox, Options, Restart};

use support::{child_of, memory, program, spread};

const RESOURCE: &str = "nvidia.com/gpu";
/// The measured starts of the plugin.
const STARTS: usize = 11;
const EVENTS: usize = 7;
const RESTARTS: usize = 11;
/// Slots of each shared GPU.
const REPLICAS: usize = 16;
/// The time after which the threads of the start have ended.
const SETTLE_DELAY: Duration = Duration::from_secs(12);
/// The time for which the idle plugin is observed.
const IDLE: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut registered = Vec::new();
    for _ in 0..STARTS {
        let node = Node::start("");
        node.wait_listed(8).await;
        registered.push(node.begin.elapsed());
    }
    println!("start to registered, 8 GPUs listed: {} of {STARTS} starts", spread(&mut registered));

    let node = Node::start("");
    node.wait_listed(8).await;
    let mut registered = Vec::new();
    for _ in 0..RESTARTS {
        node.kubelet.stop().await.unwrap();
        // A real kubelet takes seconds to come back, in which the plugin notices the end of the old one.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let begin = Instant::now();
        node.kubelet.start_again(Restart::Kubelet).unwrap();
        node.wait_listed(8).await;
        registered.push(begin.elapsed());
    }
    println!("kubelet.sock new to registered, 8 GPUs listed: {} of {RESTARTS} restarts", spread(&mut registered));
    let mut delays = Vec::new();
    for gpu in 0..EVENTS {
        let begin = Instant::now();
        node.control.send(&format!("xid {gpu} 79")).unwrap();
        node.kubelet.wait(|state| state.resources[RESOURCE].unhealthy.len() == gpu + 1).await.unwrap();
        delays.push(begin.elapsed());
    }
    println!("XID in the library to the kubelet's stream: {} of {EVENTS} events", spread(&mut delays));
    drop(node);

    // A new node, on which nothing was restarted and nothing has failed.
    let node = Node::start("");
    node.wait_listed(8).await;
    tokio::time::sleep(SETTLE_DELAY).await;
    node.print_memory("8 GPUs");
    let pids = [node.process.id(), child_of(node.process.id())];
    let both = |of: fn(u32) -> u64| pids.map(of).iter().sum::<u64>();
    let (ticks, wakes) = (both(cpu), pids.map(wake_ups));
    tokio::time::sleep(IDLE).await;
    let (ticks, after) = (both(cpu) - ticks, pids.map(wake_ups));
    let wakes = [after[0] - wakes[0], after[1] - wakes[1]];
    // USER_HZ is 100 on every Linux that Rust runs on.
    println!(
        "8 GPUs, idle for {IDLE:?}: {} + {} voluntary context switches, {ticks} ticks of 10 ms, {:.3} % of a core",
        wakes[0],
        wakes[1],
        ticks as f64 / IDLE.as_secs_f64()
    );
    drop(node);

    let sharing = format!("resources: [{{name: nvidia.com/gpu, replicas: {REPLICAS}}}]");
    let node = Node::start(&format!("version: v1\nsharing:\n  timeSlicing:\n    {sharing}\n"));
    node.wait_listed(8 * REPLICAS).await;
    tokio::time::sleep(SETTLE_DELAY).await;
    node.print_memory(&format!("8 GPUs in {} slots", 8 * REPLICAS));
    drop(node);
    without_gpus().await;
}

/// Measures a node with no NVIDIA device on its PCI bus and no NVML library.
async fn without_gpus() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/bus/pci/devices")).unwrap();
    let mut process = Command::new(program())
        .arg("run")
        .arg("--kubelet-socket")
        .arg(folder.path().join(Options::SOCKET))
        .args(["--nvml-library", "/no/such/libnvidia-ml.so.1", "--metrics-address", "127.0.0.1:0", "--log", "error"])
        .arg("--sysfs")
        .arg(folder.path().join("sys"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    tokio::time::sleep(SETTLE_DELAY).await;
    let pid = process.id();
    let (rss, pss) = (memory(pid, "Rss:"), memory(pid, "Pss:"));
    println!("no GPU      resident {:.1} MiB, proportional share {:.1} MiB", mib(rss), mib(pss));
    let (ticks, wakes) = (cpu(pid), wake_ups(pid));
    tokio::time::sleep(IDLE).await;
    let (ticks, wakes) = (cpu(pid) - ticks, wake_ups(pid) - wakes);
    println!("no GPU, idle for {IDLE:?}: {wakes} voluntary context switches, {ticks} ticks of 10 ms");
    let _ = process.kill();
    let _ = process.wait();
}

/// The voluntary context switches of a process: the times that its threads waited for something.
fn wake_ups(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let counts = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.unwrap().path().join("status")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    });
    counts.sum()
}

struct Node {
    process: Child,
    kubelet: KubeletBox,
    control: Control,
    begin: Instant,
    _folder: tempfile::TempDir,
}

impl Node {
    /// Starts with a configuration file of this text.
    fn start(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubelet = KubeletBox::start(Options::new(folder.path())).unwrap();
        // The control socket has a folder of its own, because a starting kubelet removes every socket in its folder.
        let library = folder.path().join("nvml");
        fs::create_dir(&library).unwrap();
        let control = library.join("control");
        let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
        let file = folder.path().join("config.yaml");
        fs::write(&file, config).unwrap();
        let begin = Instant::now();
        let process = Command::new(program())
            .arg("run")
            .arg("--kubelet-socket")
            .arg(folder.path().join(Options::SOCKET))
            .arg("--nvml-library")
            .arg(fake_nvml::library_path())
            .arg("--config-file")
            .arg(file)
            .args(["--metrics-address", "127.0.0.1:0", "--log", "error"])
            .env("FAKE_NVML_MACHINE", machine)
            .env("FAKE_NVML_CONTROL", &control)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { process, kubelet, control: Control::new(control), begin, _folder: folder }
    }

    /// Waits until the kubelet lists this number of healthy devices.
    async fn wait_listed(&self, devices: usize) {
        self.kubelet.wait(|state| state.resources[RESOURCE].healthy.len() == devices).await.unwrap();
    }

    fn print_memory(&self, what: &str) {
        let pids = [self.process.id(), child_of(self.process.id())];
        let ([rss, child], pss) = (pids.map(|pid| memory(pid, "Rss:")), pids.map(|pid| memory(pid, "Pss:")));
        let (total, share) = (mib(rss + child), mib(pss[0] + pss[1]));
        let (rss, child) = (mib(rss), mib(child));
        println!(
            "{what}: resident {total:.1} MiB (plugin {rss:.1}, agent {child:.1}), proportional share {share:.1} MiB"
        );
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

/// User and system time of a process in ticks (proc(5), stat, fields 14 and 15).
fn cpu(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    after_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}
