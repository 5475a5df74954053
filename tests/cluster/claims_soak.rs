//! A ledger for claims: pods of the device plugin and pods with claims of GPUs, MIG devices, shares and MPS come and go
//! while linkwise is rolled out and killed, the kubelet and the node restart, GPUs are lost and heal, the node changes its
//! door, and the API server goes away. No hardware is with two pods, no claim waits for longer than there is a cause, without a
//! cause no call of the kubelet fails, and nothing is left behind. The books are the soak's own.
//! `make soak-claims`; SOAK_SEED takes another seed. With 0 seconds there is one pass with each fault.

mod books;
mod pods;

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use linkwise_kubelet_box::Restart;
use linkwise_kubelet_box::dra::DraOptions;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::dra_mps::{self, Daemons};
use super::dra_node::Node;
use super::dra_soak::number;
use super::{dra_mig, takeover};
use crate::random::Random;
use crate::run::node::{Process, children, until};
use books::{Books, Calm, Ledger, SETTLED, SHARES};

const GPU: &str = "nvidia.com/gpu";
const GPUS: u32 = 8;
/// In MIG mode, its devices made for claims.
const MIG: u32 = 0;
/// Offered in shares: to claims, and to pods of the plugin.
const SHARED: u32 = 3;
/// Workers that start pods with claims, and pods of the plugin.
const CLAIMS: u32 = 4;
const PODS: u32 = 2;
/// So long a fault's end may take to show.
const HEAL: Duration = Duration::from_secs(60);

/// How often containers' hardware may have changed under them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Turns {
    kubelets: u64,
    boots: u64,
    /// The GPU in MIG mode was lost, and what it had with it.
    mig_losses: u64,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Rollout,
    Kill,
    KubeletRestarts,
    NodeRestarts,
    GpuLost,
    ApiServerAway,
    DoorChanges,
    MpsKilled,
}

impl Fault {
    const ALL: [Self; 12] = [
        Self::Rollout,
        Self::Kill,
        Self::Rollout,
        Self::KubeletRestarts,
        Self::Rollout,
        Self::NodeRestarts,
        Self::GpuLost,
        Self::GpuLost,
        Self::ApiServerAway,
        Self::DoorChanges,
        Self::DoorChanges,
        Self::MpsKilled,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Rollout => "rollouts",
            Self::Kill => "kills",
            Self::KubeletRestarts => "kubelet restarts",
            Self::NodeRestarts => "reboots",
            Self::GpuLost => "GPUs lost and healed",
            Self::ApiServerAway => "outages of the API server",
            Self::DoorChanges => "changes of doors",
            Self::MpsKilled => "kills of the MPS process",
        }
    }
}

/// The node, and what everybody knows of it.
struct World {
    node: Node,
    /// What claims are allocated, and what containers have.
    scheduled: Mutex<Books>,
    running: Mutex<Books>,
    is_away: AtomicBool,
    /// The node's door is DRA; otherwise it is the device plugin.
    is_dra: AtomicBool,
    turns: watch::Sender<Turns>,
    ledger: Ledger,
}

/// The GPU of an id of the device plugin, of a slot too.
fn gpu_of(id: &str) -> u32 {
    let gpu = id.split("::").next().unwrap();
    gpu.rsplit('-').next().unwrap().parse().unwrap()
}

impl World {
    fn is_away(&self) -> bool {
        self.is_away.load(Ordering::SeqCst)
    }

    fn is_dra(&self) -> bool {
        self.is_dra.load(Ordering::SeqCst)
    }

    fn turns(&self) -> Turns {
        *self.turns.borrow()
    }

    /// A reboot: no container runs. What was started before it runs no more, whenever its starter hears of that.
    fn reboots(&self) {
        *self.running.lock().unwrap() = Books::default();
        self.turns.send_modify(|turns| turns.boots += 1);
    }

    fn has_failed(&self) -> bool {
        !self.ledger.errors().is_empty()
    }

    /// Waits until something holds; the error says what does not.
    async fn within(&self, limit: Duration, what: &str, mut missing: impl FnMut() -> Option<String>) {
        let begin = Instant::now();
        while let Some(why) = missing().filter(|_| !self.has_failed()) {
            if begin.elapsed() > limit {
                self.ledger.error(format!("{what}: after {limit:?} {why}"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The machine: GPU 0 makes MIG devices, the others are whole. Returns GPU 0's layout without instances.
fn machine(node: &Node) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/fake-nvml/machines/mig-on-demand.yaml");
    let mut machine: Value = serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let observed = &mut machine["observed"];
    for gpu in 2..GPUS {
        let (mut another, pci) = (observed["gpus"][1].clone(), format!("0000:{:02x}:00.0", 0x10 + 8 * gpu));
        another["index"] = json!(gpu);
        another["minor"] = json!(gpu);
        another["uuid"] = json!(format!("GPU-00000000-0000-0000-0000-{gpu:012}"));
        another["pci"] = json!(pci);
        observed["gpus"].as_array_mut().unwrap().push(another);
        let port = json!({"kind": "root-port", "devices": [{"pci": pci, "kind": "gpu"}]});
        observed["host"]["host_bridges"][0]["devices"].as_array_mut().unwrap().push(port);
    }
    fs::write(node.at("machine.json"), machine.to_string()).unwrap();
    machine["observed"]["gpus"][0]["mig"].to_string()
}

/// Who drives the faults.
struct Soak {
    world: Arc<World>,
    random: Random,
    process: Process,
    address: SocketAddr,
    daemons: Option<Daemons>,
    pods: u32,
    control: fake_nvml::Control,
    /// GPU 0 without instances.
    layout: String,
}

fn spawn(node: &Node, pod: u32) -> Process {
    let mut command = dra_mig::program(node);
    command.env("FAKE_NVML_MACHINE", node.at("machine.json")).env("MPS_ROOT", "/host/mps");
    command.arg("--mps-container-root").arg(node.at("mps"));
    for (option, milliseconds) in [("nvml-poll", 100), ("nvml-pause", 50), ("health-hold", 100), ("claims-listed", 300)]
    {
        command.arg(format!("--{option}-ms={milliseconds}"));
    }
    command.env("LINKWISE_POD_UID", format!("pod-{pod}")).env("LINKWISE_LOG_FORMAT", "json");
    command.env("LINKWISE_LOG", "linkwise=debug");
    Process::of(command)
}

/// Where the process has served probes, at each start.
fn ups(process: &Process) -> Vec<SocketAddr> {
    let parsed = |line: String| serde_json::from_str::<Value>(&line).ok();
    let up = |line: Value| (line["message"] == "linkwise is up").then(|| line["metrics"].as_str()?.parse().ok())?;
    process.lines().into_iter().filter_map(parsed).filter_map(up).collect()
}

async fn address(process: &Process) -> SocketAddr {
    let up = process.logged(|line| line["message"] == "linkwise is up").await;
    up["metrics"].as_str().unwrap().parse().unwrap()
}

/// The node's door, written whole.
fn configure(node: &Node, is_dra: bool) {
    let shared = format!("{{name: {GPU}, devices: [\"{SHARED}\"], replicas: {SHARES}}}");
    let gpus = if is_dra { "all" } else { "none" };
    let text = format!(
        "version: v1\nsharing: {{timeSlicing: {{resources: [{shared}]}}}}\n\
         linkwise: {{naming: true, dra: {{gpus: {gpus}}}}}\n"
    );
    let draft = node.at("config.draft");
    fs::write(&draft, text).unwrap();
    fs::rename(draft, node.at("config.yaml")).unwrap();
}

/// Everything that says in which boot it was written says another one.
fn of_another_boot(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if name == "boot" && value.is_string() {
                    *value = json!("00000000-0000-4000-8000-000000000000");
                }
                of_another_boot(value);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(of_another_boot),
        _ => {}
    }
}

impl Soak {
    async fn start(seed: u64) -> Self {
        let node = Node::start_with(
            |options| {
                (options.seed, options.dial_retry) = (seed, Duration::from_millis(10));
            },
            DraOptions::new("").reconcile,
        )
        .await;
        let control = dra_mig::prepare(&node);
        dra_mps::prepare(&node);
        let layout = machine(&node);
        // Drivers of today have a recovery action.
        control.send("recovery * 0").unwrap();
        configure(&node, true);
        let daemons = Some(dra_mps::daemons(&node));
        let process = spawn(&node, 0);
        let address = address(&process).await;
        let (scheduled, running, is_away, turns) = Default::default();
        let is_dra = AtomicBool::new(true);
        let world = Arc::new(World { node, scheduled, running, is_away, is_dra, turns, ledger: Ledger::new() });
        let random = Random::new(seed);
        let soak = Self { world, random, process, address, daemons, pods: 0, control, layout };
        takeover::ready(soak.address).await;
        soak.is_whole("the start").await;
        soak
    }

    /// Each GPU is offered through the node's door, as far as pods do not keep it from changing.
    async fn is_whole(&self, when: &str) {
        let (node, is_dra) = (&self.world.node, self.world.is_dra());
        self.world
            .within(HEAL, when, || {
                let offered = node.untainted();
                let device = |gpu: u32| if gpu == MIG { format!("gpu-{MIG}-mig-") } else { format!("gpu-{gpu}") };
                let is_offered = |gpu: u32| offered.iter().any(|name| name.starts_with(&device(gpu)));
                let healthy: BTreeSet<u32> = node.healthy(GPU).iter().map(|id| gpu_of(id)).collect();
                let wrong = |gpu: &u32| is_offered(*gpu) != is_dra || healthy.contains(gpu) == is_dra;
                let wrong: Vec<u32> = (0..GPUS).filter(wrong).collect();
                let why = || format!("GPUs {wrong:?} are not offered, DRA {is_dra}: {offered:?}, {healthy:?}");
                (!wrong.is_empty()).then(why)
            })
            .await;
    }

    async fn rollout(&mut self) {
        self.pods += 1;
        let next = spawn(&self.world.node, self.pods);
        let address = address(&next).await;
        takeover::ready(address).await;
        self.process.signal("TERM");
        let (status, last) = self.process.ended().await;
        if !status.success() {
            self.world.ledger.error(format!("the process before ended with {status}: {last:?}"));
        }
        (self.process, self.address) = (next, address);
    }

    /// Ends the process and its agents at once, as the end of a container does.
    async fn end_container(&mut self) {
        let agents = children(self.process.id());
        self.process.signal("KILL");
        for agent in agents {
            // It may see the end of its parent first.
            let _ = std::process::Command::new("kill").args(["-KILL", &agent.to_string()]).output();
        }
        self.process.ended().await;
        let control = &self.control;
        until(async || if control.is_heard() { Err("an agent lives") } else { Ok(()) }).await;
    }

    /// Kills the MPS process, and waits for its end: the next one would find the lock taken.
    async fn end_daemons(&mut self) {
        if let Some(mut daemons) = self.daemons.take() {
            daemons.process.kill().await.unwrap();
        }
    }

    /// Kills the process, and starts its container again.
    async fn kill(&mut self) {
        self.end_container().await;
        self.process = spawn(&self.world.node, self.pods);
        self.address = address(&self.process).await;
    }

    async fn restart_kubelet(&self) {
        let World { node, .. } = &*self.world;
        node.kubelet.restart(Restart::Kubelet).await.unwrap();
        node.dra.restart().await.unwrap();
        node.cluster.server.wipe_slices("n", None);
        self.world.turns.send_modify(|turns| turns.kubelets += 1);
    }

    /// No process is left, nor what is in memory: MIG devices, CDI specs. Files say that they are of another boot.
    async fn reboot(&mut self) {
        let world = Arc::clone(&self.world);
        let World { node, .. } = &*world;
        node.kubelet.stop().await.unwrap();
        node.dra.stop().await;
        world.reboots();
        self.end_container().await;
        self.end_daemons().await;
        self.control.send(&format!("mig {MIG} {}", self.layout)).unwrap();
        for file in fs::read_dir(node.at("cdi")).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        let claims = fs::read_dir(node.at("k/linkwise/claims")).into_iter().flatten().map(|file| file.unwrap().path());
        for file in claims.chain([node.at("k/linkwise/linkwise_health.json")]) {
            let text = fs::read_to_string(&file).unwrap_or_default();
            if let Ok(mut value) = serde_json::from_str::<Value>(&text) {
                of_another_boot(&mut value);
                fs::write(&file, value.to_string()).unwrap();
            }
        }
        node.cluster.server.wipe_slices("n", None);
        node.kubelet.start_again(Restart::Node).unwrap();
        node.dra.start_again().unwrap();
        self.daemons = Some(dra_mps::daemons(node));
        self.process = spawn(node, self.pods);
        self.address = address(&self.process).await;
    }

    async fn lose(&mut self) {
        let gpu = self.random.within(0..GPUS);
        self.tell(&format!("lost {gpu}")).await;
        self.world.ledger.tell(format!("GPU {gpu}"));
        tokio::time::sleep(self.random.milliseconds(100..1_500)).await;
        if self.random.one_in(3) {
            self.world.ledger.tell("a rollout meanwhile".to_owned());
            self.rollout().await;
        }
        if gpu == MIG {
            self.tell(&format!("mig {MIG} {}", self.layout)).await;
            self.world.turns.send_modify(|turns| turns.mig_losses += 1);
        }
        self.tell(&format!("back {gpu}")).await;
    }

    async fn tell(&self, command: &str) {
        let (control, command) = (self.control.clone(), command.to_owned());
        tokio::task::spawn_blocking(move || control.send(&command)).await.unwrap().unwrap();
    }

    async fn outage(&mut self) {
        let world = Arc::clone(&self.world);
        {
            let _nobody_schedules = world.scheduled.lock().unwrap();
            world.is_away.store(true, Ordering::SeqCst);
        }
        world.node.cluster.server.go_away().await;
        tokio::time::sleep(self.random.milliseconds(100..2_000)).await;
        let meanwhile = self.random.of(&[Some(Fault::Kill), Some(Fault::KubeletRestarts), None]);
        world.ledger.tell(format!("meanwhile {meanwhile:?}"));
        match meanwhile {
            Some(Fault::Kill) => self.kill().await,
            Some(_) => self.restart_kubelet().await,
            None => {}
        }
        world.node.cluster.server.come_back().await;
        world.is_away.store(false, Ordering::SeqCst);
    }

    /// The process serves the node anew, through the other door.
    async fn change_door(&mut self) {
        let is_dra = !self.world.is_dra();
        let before = ups(&self.process).len();
        self.world.is_dra.store(is_dra, Ordering::SeqCst);
        configure(&self.world.node, is_dra);
        let process = &self.process;
        let again = async || ups(process).split_off(before).pop().ok_or("it does not serve anew");
        self.address = until(again).await;
    }

    async fn round(&mut self, fault: Fault) {
        let world = Arc::clone(&self.world);
        world.ledger.count(fault.name());
        world.ledger.tell(format!("{fault:?}"));
        if matches!(fault, Fault::Rollout) {
            return self.rollout().await;
        }
        world.ledger.causes.begin(fault.name());
        match fault {
            Fault::Rollout => {}
            Fault::Kill => self.kill().await,
            Fault::KubeletRestarts => self.restart_kubelet().await,
            Fault::NodeRestarts => self.reboot().await,
            Fault::GpuLost => self.lose().await,
            Fault::ApiServerAway => self.outage().await,
            Fault::DoorChanges => self.change_door().await,
            Fault::MpsKilled => {
                self.end_daemons().await;
                self.daemons = Some(dra_mps::daemons(&world.node));
            }
        }
        takeover::ready(self.address).await;
        self.is_whole(fault.name()).await;
        world.ledger.causes.end();
    }

    /// Rollouts while nothing else happens: then no call fails.
    async fn calm(&mut self) {
        tokio::time::sleep(SETTLED).await;
        for _ in 0..3 {
            self.world.ledger.count("rollouts while nothing else happens");
            self.rollout().await;
        }
    }

    /// All pods have ended: nothing of them is left.
    async fn is_empty(&self, specs: &[String]) {
        let World { node, scheduled, running, .. } = &*self.world;
        assert!(scheduled.lock().unwrap().pods().is_empty() && running.lock().unwrap().pods().is_empty());
        self.is_whole("the end").await;
        // Files of a daemon that was killed do not count.
        let lives = |folder: &PathBuf| {
            let pid = fs::read_to_string(folder.join("pipe/nvidia-cuda-mps-control.pid")).unwrap_or_default();
            !pid.is_empty() && Path::new("/proc").join(pid.trim()).exists()
        };
        let started = || dra_mps::folders(node).into_iter().filter(lives).collect::<Vec<_>>();
        self.world
            .within(HEAL, "what is left of claims", || {
                let left = (node.checkpoints(), dra_mig::instances(node), started(), node.specs());
                let journal = fs::read_to_string(node.at("nvml.journal")).unwrap_or_default();
                let layout = journal.lines().rfind(|line| line.starts_with("mig 0 ")).unwrap_or_default();
                let why = || format!("{left:?}, and {specs:?} before; {layout}");
                (left != (vec![], 0, vec![], specs.to_vec())).then(why)
            })
            .await;
        for violation in node.kubelet.violations() {
            self.world.ledger.error(format!("{violation:?}"));
        }
    }
}

/// Each fault once, in any order, and again until the time is over. Returns the numbers.
async fn soak(seconds: u64) -> String {
    let seed = number("SOAK_SEED").unwrap_or(1);
    let (mut soak, begin) = (Soak::start(seed).await, Instant::now());
    let (world, specs) = (Arc::clone(&soak.world), soak.world.node.specs());
    let mut load = JoinSet::new();
    for worker in 0..CLAIMS + PODS {
        let (world, random) = (Arc::clone(&world), Random::new(seed ^ (u64::from(worker + 1) << 32)));
        load.spawn(async move {
            match worker {
                0..CLAIMS => pods::with_claims(&world, worker, random).await,
                _ => pods::of_the_plugin(&world, worker, random).await,
            }
        });
    }
    loop {
        let mut faults = Fault::ALL.to_vec();
        while !faults.is_empty() && !world.has_failed() {
            let at = soak.random.within(0..u32::try_from(faults.len()).unwrap());
            let fault = faults.swap_remove(usize::try_from(at).unwrap());
            soak.round(fault).await;
            tokio::time::sleep(soak.random.milliseconds(0..500)).await;
        }
        if begin.elapsed().as_secs() >= seconds || world.has_failed() {
            break;
        }
        soak.calm().await;
    }
    world.ledger.over.cancel();
    while let Some(ended) = load.join_next().await {
        ended.unwrap();
    }
    if !world.has_failed() {
        soak.is_empty(&specs).await;
    }
    let summary = format!("seed {seed}, {} s\n{}", begin.elapsed().as_secs(), world.ledger.summary());
    assert!(!world.has_failed(), "{summary}\n{}\n{:#?}", world.ledger.story(), world.ledger.errors());
    soak.process.signal("TERM");
    assert!(soak.process.ended().await.0.success());
    for what in ["claims of whole GPUs", "claims of MIG devices", "claims of shares", "claims by MPS"] {
        assert!(world.ledger.counted(what) > 0, "no {what}");
    }
    assert!(world.ledger.counted("pods of the device plugin") > 0);
    summary
}

/// It takes minutes, and so is no part of the other tests.
#[tokio::test]
#[ignore = "needs SOAK_CLAIMS_SECONDS: make soak-claims"]
async fn soak_of_claims_gives_nothing_twice_and_leaves_nothing() {
    let seconds = number("SOAK_CLAIMS_SECONDS").expect("SOAK_CLAIMS_SECONDS is set by make soak-claims");
    println!("{}", soak(seconds).await);
}
