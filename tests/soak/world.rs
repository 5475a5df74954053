//! The node, the state that load and faults share, the means to disturb the node, and the checks that it is whole.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use linkwise_kubelet_box::dra::DraOptions;
use linkwise_kubelet_box::{Connections, Restart};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::RECOVERY_TIMEOUT;
use super::ledger::{CLAIM_SETTLE_TIMEOUT, Holdings, Journal, SHARES};
use super::random::Random;
use crate::dra::cluster::mps::{self, Daemons};
use crate::dra::cluster::node::{DRIVER, Node};
use crate::dra::cluster::{mig, takeover};
use crate::run::node::{GPU, LIMIT, Process, children, kib, put_on_bus, replace, signal, sockets_in, try_get, until};

pub const GPUS: u32 = 8;
/// The GPU in MIG mode, whose devices are made for claims.
pub const MIG: u32 = 0;
/// The GPU that is offered in shares to claims and to pods of the plugin.
pub const SHARED: u32 = 3;
/// The interval of polls of a state without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The most files that a process may have open at the end beyond those at the start.
const MAX_MORE_FILES: usize = 16;
/// The most memory in KiB that a process may hold at the end beyond its memory at the start.
const MAX_MORE_MEMORY: u64 = 16 * 1024;

/// Counts of the events after which claims are prepared again or their hardware may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disruptions {
    pub kubelet_restarts: u64,
    pub reboots: u64,
    /// Losses of the GPU in MIG mode, with its MIG devices.
    pub mig_losses: u64,
}

/// The calls of the kubelet that may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailingCalls {
    Nothing,
    Claims,
    All,
}

/// The node, as the load sees it.
pub struct World {
    pub node: Node,
    control: fake_nvml::Control,
    /// The pieces of allocated claims, and those that containers have.
    pub scheduled: Mutex<Holdings>,
    pub running: Mutex<Holdings>,
    is_server_away: AtomicBool,
    /// The node's door is DRA; otherwise it is the device plugin.
    is_dra: AtomicBool,
    /// The sharing of `SHARED` is off for a while. Pods keep the ids that they hold, with or without a slot.
    is_sharing_off: AtomicBool,
    disruptions: watch::Sender<Disruptions>,
    pub journal: Journal,
}

/// The GPU of a device plugin's id, with or without a slot.
pub fn gpu_of(id: &str) -> u32 {
    let gpu = id.split("::").next().unwrap();
    gpu.rsplit('-').next().unwrap().parse().unwrap()
}

impl World {
    pub fn is_server_away(&self) -> bool {
        self.is_server_away.load(Ordering::SeqCst)
    }

    /// Notes that the API server goes away or comes back. The scheduler writes no claim at the same moment.
    pub fn set_server_away(&self, is_server_away: bool) {
        let _nobody_schedules = self.scheduled.lock().unwrap();
        self.is_server_away.store(is_server_away, Ordering::SeqCst);
    }

    pub fn is_dra(&self) -> bool {
        self.is_dra.load(Ordering::SeqCst)
    }

    pub fn is_sharing_off(&self) -> bool {
        self.is_sharing_off.load(Ordering::SeqCst)
    }

    pub fn disruptions(&self) -> Disruptions {
        *self.disruptions.borrow()
    }

    pub fn disrupt(&self, change: impl FnOnce(&mut Disruptions)) {
        self.disruptions.send_modify(change);
    }

    pub fn subscribe(&self) -> watch::Receiver<Disruptions> {
        self.disruptions.subscribe()
    }

    pub fn has_failed(&self) -> bool {
        !self.journal.errors().is_empty()
    }

    pub fn uuid(&self, gpu: u32) -> String {
        crate::run::node::uuid(5, gpu)
    }

    /// Writes the configuration: the node's door, and the sharing of a GPU.
    fn configure(&self) {
        // The file names the UUID, because while a GPU is gone the indices after it shift.
        let shared = format!("{{name: {GPU}, devices: [{}], replicas: {SHARES}}}", self.uuid(SHARED));
        let sharing = format!("sharing: {{timeSlicing: {{resources: [{shared}]}}}}\n");
        let sharing = if self.is_sharing_off() { "" } else { &sharing };
        let gpus = if self.is_dra() { "all" } else { "none" };
        let text = format!("version: v1\n{sharing}linkwise: {{naming: true, dra: {{gpus: {gpus}}}}}\n");
        replace(&self.node.at("config.yaml"), &text);
    }

    /// Configures the node to give its GPUs through the other door.
    pub fn change_door(&self) {
        self.is_dra.store(!self.is_dra(), Ordering::SeqCst);
        self.configure();
    }

    /// Turns the sharing of `SHARED` on or off.
    pub fn share(&self, is_shared: bool) {
        self.is_sharing_off.store(!is_shared, Ordering::SeqCst);
        self.configure();
    }

    /// Sends a command to the simulated driver, and repeats it until it is taken.
    pub async fn tell(&self, command: &str) {
        until(async || {
            // A stopped agent blocks this call until it is killed.
            let (control, command) = (self.control.clone(), command.to_owned());
            tokio::task::spawn_blocking(move || control.send(&command)).await.unwrap()
        })
        .await;
    }

    /// Runs `linkwise admin` until it succeeds.
    pub async fn admin(&self, order: &[&str]) {
        until(async || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
            command.env_clear().args(["admin", "--socket"]).arg(self.node.at("admin.sock")).args(order);
            let output = command.output().await.unwrap();
            if output.status.success() { Ok(()) } else { Err(output) }
        })
        .await;
    }

    fn offered(&self, by_dra: bool) -> BTreeSet<u32> {
        if by_dra {
            let gpu = |name: &String| name.split('-').nth(1).and_then(|gpu| gpu.parse().ok());
            return self.node.untainted().iter().filter_map(gpu).collect();
        }
        self.node.healthy(GPU).iter().map(|id| gpu_of(id)).collect()
    }

    /// Waits until the node's door offers a GPU, or (`wanted` false) does not.
    pub async fn wait_offered(&self, gpu: u32, wanted: bool) {
        until(async || {
            let offered = self.offered(self.is_dra());
            if offered.contains(&gpu) == wanted { Ok(()) } else { Err((gpu, offered)) }
        })
        .await;
    }
}

/// The resident memory in KiB and the number of open files of a process.
type Footprint = (u64, usize);

/// `None` if the process is gone.
fn footprint(process: u32) -> Option<Footprint> {
    Some((kib(process, "VmRSS")?, fs::read_dir(format!("/proc/{process}/fd")).ok()?.count()))
}

/// Drives the faults.
pub struct Soak {
    pub world: Arc<World>,
    pub random: Random,
    pub process: Process,
    pub daemons: Option<Daemons>,
    pods: u32,
    /// The simulated driver's description of GPU 0 without MIG devices.
    pub layout: String,
    /// The GPU of the last round, and true if that round had two faults.
    pub last_gpu: Option<u32>,
    pub had_two_faults: bool,
}

/// Writes the machine's file: a DGX A100 with GPU 0 in MIG mode. Returns `Soak::layout`.
fn machine(node: &Node) -> String {
    let read = |name: &str| -> Value {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap()
    };
    let mut machine = read("crates/host/src/machines/dgx-a100.yaml");
    let mig = read("lab/fake-nvml/machines/mig-on-demand.yaml")["observed"]["gpus"][0].clone();
    let gpus = machine["observed"]["gpus"].as_array_mut().unwrap();
    for field in ["mig", "memory_mib", "model", "nvlinks"] {
        gpus[0][field] = mig[field].clone();
    }
    gpus.iter().for_each(|gpu| put_on_bus(&node.at("sys/bus"), gpu["pci"].as_str().unwrap()));
    fs::write(node.at("machine.json"), machine.to_string()).unwrap();
    mig["mig"].to_string()
}

fn spawn(node: &Node, pod: u32) -> Process {
    let mut command = mig::program(node);
    command.env("FAKE_NVML_MACHINE", node.at("machine.json")).env("MPS_ROOT", "/host/mps");
    command.arg("--mps-container-root").arg(node.at("mps")).arg("--fail-on-init-error=false");
    // Polls are a hundred times as frequent as on a node, and waits are shorter.
    let times = "--nvml-poll-ms=100 --nvml-call-ms=1000 --nvml-start-ms=10000 --nvml-pause-ms=50 --nvml-grace-ms=500 \
                 --nvml-trial-ms=100 --health-hold-ms=100 --claims-listed-ms=300";
    command.args(times.split(' '));
    command.env("LINKWISE_POD_UID", format!("pod-{pod}")).env("LINKWISE_LOG_FORMAT", "json");
    Process::of(command)
}

/// The last address at which the process has served probes.
fn address(process: &Process) -> Option<SocketAddr> {
    let parsed = |line: String| serde_json::from_str::<Value>(&line).ok();
    let up = |line: Value| (line["message"] == "linkwise is up").then(|| line["metrics"].as_str()?.parse().ok())?;
    process.lines().into_iter().rev().filter_map(parsed).find_map(up)
}

async fn wait_up(process: &Process) -> SocketAddr {
    until(async || address(process).ok_or("it is not up")).await
}

/// Replaces the boot id in every field `boot`.
fn change_boot(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if name == "boot" && value.is_string() {
                    *value = json!("00000000-0000-4000-8000-000000000000");
                }
                change_boot(value);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(change_boot),
        _ => {}
    }
}

impl Soak {
    pub async fn start(connections: Connections, seed: u64) -> Self {
        let node = Node::start_with(
            |options| {
                (options.seed, options.connections) = (seed, connections);
                (options.dial_retry, options.wait_timeout) = (POLL_INTERVAL, LIMIT);
            },
            DraOptions::new("").reconcile,
        )
        .await;
        let control = mig::prepare(&node);
        mps::prepare(&node);
        let layout = machine(&node);
        // Present drivers report a recovery action.
        control.send("recovery * 0").unwrap();
        let daemons = Some(mps::daemons(&node));
        let (scheduled, running, is_server_away, is_sharing_off, disruptions) = Default::default();
        let (is_dra, journal) = (AtomicBool::new(true), Journal::new());
        let world =
            World { node, control, scheduled, running, is_server_away, is_dra, is_sharing_off, disruptions, journal };
        world.configure();
        let process = spawn(&world.node, 0);
        let (world, random) = (Arc::new(world), Random::new(seed));
        let mut soak = Self { world, random, process, daemons, pods: 0, layout, last_gpu: None, had_two_faults: false };
        soak.wait_whole().await;
        soak
    }

    pub async fn rollout(&mut self) {
        self.pods += 1;
        let next = spawn(&self.world.node, self.pods);
        takeover::wait_ready(wait_up(&next).await).await;
        self.process.signal("TERM");
        let (status, last) = self.process.ended().await;
        if !status.success() {
            self.world.journal.error(format!("the previous process ended with {status}: {last:?}"));
        }
        self.process = next;
    }

    /// Kills the process and its agents at once, as the end of a container does.
    async fn end_container(&mut self) {
        let agents = children(self.process.id());
        self.process.signal("KILL");
        for agent in agents {
            // The agent may have ended already, because its parent is gone.
            let _ = std::process::Command::new("kill").args(["-KILL", &agent.to_string()]).output();
        }
        self.process.ended().await;
        let control = &self.world.control;
        until(async || if control.is_heard() { Err("an agent lives") } else { Ok(()) }).await;
    }

    /// Kills the MPS process, and waits for its end, because the next one would find the lock taken.
    pub async fn end_daemons(&mut self) {
        if let Some(mut daemons) = self.daemons.take() {
            daemons.process.kill().await.unwrap();
        }
    }

    /// Kills the process and restarts its container; sometimes it is killed again while it starts.
    pub async fn kill(&mut self) {
        loop {
            self.end_container().await;
            self.process = spawn(&self.world.node, self.pods);
            if self.random.one_in(2) {
                break;
            }
            tokio::time::sleep(self.random.milliseconds(0..300)).await;
        }
        wait_up(&self.process).await;
    }

    pub async fn stop_kubelet(&self) {
        self.world.node.kubelet.stop().await.unwrap();
        self.world.node.dra.stop().await;
    }

    pub fn start_kubelet(&self) {
        let node = &self.world.node;
        node.kubelet.start_again(Restart::Kubelet).unwrap();
        node.dra.start_again().unwrap();
        // A kubelet that starts deletes the slices of its node.
        node.cluster.server.wipe_slices("n", None);
        self.world.disrupt(|disruptions| disruptions.kubelet_restarts += 1);
    }

    /// Reboots the node. Its processes, MIG devices and CDI specs are gone, and its files name another boot.
    pub async fn reboot(&mut self) {
        let world = Arc::clone(&self.world);
        let World { node, .. } = &*world;
        self.stop_kubelet().await;
        // All containers have ended. A worker sees by the number of reboots that its container is among them.
        *world.running.lock().unwrap() = Holdings::default();
        world.disrupt(|disruptions| disruptions.reboots += 1);
        self.end_container().await;
        self.end_daemons().await;
        world.tell(&format!("mig {MIG} {}", self.layout)).await;
        for file in fs::read_dir(node.at("cdi")).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
        let claims = fs::read_dir(node.at("k/linkwise/claims")).into_iter().flatten().map(|file| file.unwrap().path());
        for file in claims.chain([node.at("k/linkwise/linkwise_health.json")]) {
            let text = fs::read_to_string(&file).unwrap_or_default();
            if let Ok(mut value) = serde_json::from_str::<Value>(&text) {
                change_boot(&mut value);
                fs::write(&file, value.to_string()).unwrap();
            }
        }
        node.cluster.server.wipe_slices("n", None);
        node.kubelet.start_again(Restart::Node).unwrap();
        node.dra.start_again().unwrap();
        self.daemons = Some(mps::daemons(node));
        self.process = spawn(node, self.pods);
        wait_up(&self.process).await;
    }

    /// Rolls out three times without another fault, so that no call may fail.
    pub async fn roll_out_in_calm(&mut self) {
        tokio::time::sleep(CLAIM_SETTLE_TIMEOUT).await;
        for _ in 0..3 {
            self.world.journal.count("rollouts without another fault");
            self.rollout().await;
        }
    }

    pub fn sockets(&self) -> Vec<PathBuf> {
        sockets_in(&self.world.node.at("k"))
    }

    /// The process id of the agent, if there is one.
    pub fn agent(&self) -> Option<u32> {
        children(self.process.id()).first().copied()
    }

    /// Signals the agent, and waits for its end. Another fault may already have ended it.
    pub async fn signal_agent(&self, name: &str) {
        let agent = self.agent();
        let _ = std::panic::catch_unwind(|| agent.map(|agent| signal(name, agent)));
        self.wait_agent_gone(agent).await;
    }

    pub async fn wait_agent_gone(&self, agent: Option<u32>) {
        let lives = || agent.is_some_and(|agent| children(self.process.id()).contains(&agent));
        until(async || if lives() { Err(agent) } else { Ok(()) }).await;
    }

    /// The answer to `GET path`; `None` while the process does not answer.
    async fn get(&self, path: &str) -> Option<crate::run::node::Answer> {
        try_get(address(&self.process)?, path).await.ok()
    }

    /// The value of a series; `None` without such a series or an answer.
    pub async fn metric(&self, series: &str) -> Option<u64> {
        let text = self.get("/metrics").await?.body;
        text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    pub async fn wait_metric(&self, series: &str, is: impl Fn(Option<u64>) -> bool) {
        until(async || match self.metric(series).await {
            value if is(value) => Ok(()),
            value => Err((series.to_owned(), value)),
        })
        .await;
    }

    /// Waits until the GPU is unhealthy for this reason.
    pub async fn wait_reason(&self, gpu: u32, reason: &str) {
        let uuid = self.world.uuid(gpu);
        let series = format!("linkwise_gpu_unhealthy_since_seconds{{uuid=\"{uuid}\",reason=\"{reason}\"}}");
        self.wait_metric(&series, |value| value.is_some()).await;
    }

    /// Checks, until the returned task is dropped, that no GPU is withdrawn but those that had a fault.
    pub fn watch(&self, faulty: [Option<u32>; 2]) -> JoinSet<()> {
        let (world, mut task) = (Arc::clone(&self.world), JoinSet::new());
        task.spawn(async move {
            while !world.has_failed() {
                let offered = world.offered(world.is_dra());
                if let Some(other) = (0..GPUS).find(|gpu| !faulty.contains(&Some(*gpu)) && !offered.contains(gpu)) {
                    world.journal.error(format!("GPU {other} is withdrawn, but only {faulty:?} had faults"));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        });
        task
    }

    /// Waits until the node has recovered and offers each GPU through its door alone. Returns the time taken.
    pub async fn wait_whole(&mut self) -> Duration {
        let begin = Instant::now();
        while let Some(missing) = self.missing().await {
            if self.world.has_failed() {
                break;
            }
            if begin.elapsed() > RECOVERY_TIMEOUT {
                let lines = self.last_lines();
                self.world.journal.error(format!("not whole after {RECOVERY_TIMEOUT:?}: {missing}\n{lines}"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        begin.elapsed()
    }

    fn last_lines(&self) -> String {
        let lines = self.process.lines();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    async fn missing(&mut self) -> Option<String> {
        let (world, is_dra) = (&self.world, self.world.is_dra());
        if let Some(status) = self.process.child.try_wait().unwrap() {
            return Some(format!("the process has ended: {status}"));
        }
        let (kubelet, drivers) = (world.node.kubelet.state(), world.node.dra.state().drivers);
        let has_driver = drivers.get(DRIVER).is_some_and(|driver| driver.connected == 1);
        if !is_dra && !has_driver {
            // The kubelet deletes a driver's slices 30 s after the driver has gone.
            world.node.cluster.server.wipe_slices("n", None);
        }
        let (dra, plugin) = (world.offered(true), world.offered(false));
        let (all, none) = ((0..GPUS).collect(), BTreeSet::new());
        if (&dra, &plugin) != if is_dra { (&all, &none) } else { (&none, &all) } {
            return Some(format!("DRA offers {dra:?}, the device plugin {plugin:?}, the door is DRA: {is_dra}"));
        }
        // After a takeover there may be two streams.
        let streams = (kubelet.resources[GPU].connected, kubelet.resources[GPU].open_streams);
        if !is_dra && !matches!(streams, (true, 1 | 2)) {
            return Some(format!("{GPU}: (connected, open streams) is {streams:?}"));
        }
        if is_dra && !has_driver {
            return Some(format!("the driver is not connected: {drivers:?}"));
        }
        match self.get("/readyz").await {
            Some(answer) if answer.status == 200 => {}
            answer => return Some(format!("not ready: {answer:?}")),
        }
        for (series, wanted) in
            [("linkwise_nvml_agent_up", 1), ("linkwise_nvml_away", 0), ("linkwise_driver_released", 0)]
        {
            let value = self.metric(series).await;
            if value != Some(wanted) {
                return Some(format!("{series} is {value:?}"));
            }
        }
        None
    }

    pub fn measure(&self) -> Vec<Footprint> {
        [vec![self.process.id()], children(self.process.id())].concat().into_iter().filter_map(footprint).collect()
    }

    /// Checks, when all pods have ended, that they left nothing and the processes hold hardly more than at the start.
    pub async fn check_empty(&mut self, specs: &[String], before: &[Footprint]) {
        if !self.world.is_dra() {
            self.world.change_door();
        }
        self.wait_whole().await;
        let now = self.measure();
        println!("memory in KiB, and open files: {before:?}, then {now:?}");
        let World { node, scheduled, running, journal, .. } = &*self.world;
        assert!(scheduled.lock().unwrap().is_empty() && running.lock().unwrap().is_empty());
        let holds_more = |(&(memory, files), &(memory_now, files_now)): (&Footprint, &Footprint)| {
            memory_now > memory + MAX_MORE_MEMORY || files_now > files + MAX_MORE_FILES
        };
        if before.len() != now.len() || before.iter().zip(&now).any(holds_more) {
            journal.error(format!("the processes hold {now:?}, and held {before:?}"));
        }
        // The files of a killed daemon do not count.
        let lives = |folder: &PathBuf| {
            let pid = fs::read_to_string(folder.join("pipe/nvidia-cuda-mps-control.pid")).unwrap_or_default();
            !pid.is_empty() && Path::new("/proc").join(pid.trim()).exists()
        };
        until(async || {
            let started: Vec<PathBuf> = mps::folders(node).into_iter().filter(lives).collect();
            let left = (node.checkpoints(), mig::instances(node), started, node.specs());
            if left == (vec![], 0, vec![], specs.to_vec()) { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Ends the process, and checks that it leaves no sockets and no agents.
    pub async fn end(mut self) {
        let agents = children(self.process.id());
        self.process.signal("TERM");
        let (status, log) = self.process.ended().await;
        assert!(status.success(), "{status}: {log:?}");
        assert_eq!(self.sockets(), Vec::<PathBuf>::new());
        let left: Vec<Footprint> = agents.into_iter().filter_map(footprint).collect();
        assert!(left.is_empty(), "an agent is left behind");
    }
}
