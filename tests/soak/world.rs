//! The node, the kubelet and the machine; what is done to them, and when they are whole.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use linkwise_kubelet_box::{KubeletBox, Options, State};
use tokio::process::Command;
use tokio::time::timeout;

use crate::ledger::Ledger;
use crate::node::{GPU, LIMIT, Node, Setup, until};
use crate::process::Footprint;

/// GPUs of the machine.
pub const GPUS: u32 = 8;
/// How often something is looked at that cannot tell by itself.
const LOOK: Duration = Duration::from_millis(10);
/// What the configuration file says while GPUs are not shared.
const WHOLE: &str = "version: v1\nflags: {migStrategy: mixed}\n";
/// And while they are.
const SHARED: &str = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";

/// Whether kubelet and plugin are being kept from each other, and how often that has changed. Clones share it.
#[derive(Clone, Default)]
pub struct Disturbance(Arc<AtomicU64>);

impl Disturbance {
    /// Even numbers are calm.
    pub fn calm(&self) -> Option<u64> {
        let changes = self.0.load(Ordering::SeqCst);
        changes.is_multiple_of(2).then_some(changes)
    }

    pub fn set(&self, disturbed: bool) {
        if self.calm().is_some() == disturbed {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Both processes at one moment.
#[derive(Debug)]
pub struct Measured {
    pub plugin: Footprint,
    pub child: Footprint,
    /// How long the plugin runs.
    pub age: Duration,
}

impl Measured {
    pub fn files(&self) -> usize {
        self.plugin.files + self.child.files
    }
}

/// Everything.
pub struct World {
    pub node: Node,
    pub kubelet: Arc<KubeletBox>,
    pub disturbance: Disturbance,
    /// Whether sharing is being changed: what pods hold under the other name has to be let go of before a device is healthy.
    pub sharing: Disturbance,
    pub ledger: Ledger,
    /// The GPU of the last round.
    last: Option<u32>,
    /// The round before had two faults at once.
    pub two_before: bool,
    began: Instant,
}

/// The id of a GPU.
pub fn uuid(gpu: u32) -> String {
    crate::node::uuid(5, gpu)
}

impl World {
    pub async fn start(seed: u64) -> Self {
        let mut setup = Setup::on("dgx-a100");
        // Everything happens about a hundred times as fast as on a node.
        for (option, milliseconds) in [
            ("nvml-poll", 100),
            ("nvml-call", 1_000),
            ("nvml-start", 10_000),
            ("nvml-pause", 50),
            ("nvml-grace", 500),
            ("nvml-trial", 100),
            ("health-hold", 100),
        ] {
            setup = setup.arg(format!("--{option}-ms={milliseconds}"));
        }
        let (admin, config) = (setup.at("admin/admin.sock"), setup.at("config.yaml"));
        std::fs::write(&config, WHOLE).unwrap();
        // Where the plugin is started while NVML cannot be: a node whose driver comes late.
        let setup = setup.arg("--fail-on-init-error=false");
        let setup = setup.arg("--admin-socket").arg(admin).arg("--config-file").arg(config);
        for bus in ["07", "0f", "47", "4e", "87", "90", "b7", "bd"] {
            setup.on_bus(&format!("0000:{bus}:00.0"));
        }
        // Drivers of today have a recovery action.
        setup.tell("recovery * 0");
        // And these GPUs have MIG.
        setup.tell("mig * {enabled: false}");
        let mut options = Options::new(setup.kubelet_socket.parent().unwrap());
        options.seed = seed;
        options.dial_retry = LOOK;
        options.wait_timeout = LIMIT;
        options.pod_resources = Some(setup.pod_resources());
        let kubelet = Arc::new(KubeletBox::start(options).unwrap());
        let node = setup.start().await;
        let ledger = Ledger::default();
        ledger.started();
        Self {
            node,
            kubelet,
            disturbance: Disturbance::default(),
            sharing: Disturbance::default(),
            ledger,
            last: None,
            two_before: false,
            began: Instant::now(),
        }
    }

    pub fn state(&self) -> Arc<State> {
        self.kubelet.state()
    }

    /// Tells the library what happens; one that cannot be heard now is told again.
    pub async fn tell(&self, command: &str) {
        let control = fake_nvml::Control::new(self.node.setup.at("control"));
        let begin = Instant::now();
        loop {
            // A child that is stopped answers when it is killed.
            let (control, command) = (control.clone(), command.to_owned());
            let told = tokio::task::spawn_blocking(move || control.send(&command)).await.unwrap();
            match told {
                Ok(()) => return,
                Err(error) => assert!(begin.elapsed() < LIMIT, "{error}"),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// `linkwise admin`, until it succeeds.
    pub async fn admin(&self, order: &[&str]) {
        let begin = Instant::now();
        loop {
            let mut command = Command::new(&self.node.setup.program);
            command.arg("admin").arg("--socket").arg(self.node.setup.at("admin/admin.sock")).args(order);
            let output = command.output().await.unwrap();
            if output.status.success() {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "{output:?}");
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Another configuration, whole or not at all.
    pub fn share(&self, shared: bool) {
        let file: PathBuf = self.node.setup.at("config.yaml");
        let new = file.with_extension("new");
        std::fs::write(&new, format!("{WHOLE}{}", if shared { SHARED } else { "" })).unwrap();
        std::fs::rename(new, file).unwrap();
    }

    /// The process that speaks to NVML, where there is one.
    pub fn child(&self) -> Option<u32> {
        self.node.agent_ids().first().copied()
    }

    /// Kills the plugin and starts it again, as a kubelet does with its container: nothing in a container outlives its first
    /// process, a child that hangs in the library neither.
    pub async fn replace(&mut self) {
        let children = self.node.agent_ids();
        self.node.process.signal("KILL");
        for child in children.into_iter().filter(|child| Footprint::of(*child).is_some()) {
            // It may see the end of its parent first.
            let _ = std::process::Command::new("kill").args(["-KILL", &child.to_string()]).output();
        }
        self.node.process.ended().await;
        self.ledger.logged(self.node.process.lines().len());
        self.node.process = self.node.setup.spawn();
        self.ledger.started();
        self.began = Instant::now();
        let up = self.node.process.logged(|line| line["message"] == "linkwise is up").await;
        self.node.address = up["metrics"].as_str().unwrap().parse().unwrap();
    }

    /// A series' value; `None` where there is no such series.
    pub async fn metric(&self, series: &str) -> Option<u64> {
        let text = self.node.get("/metrics").await.body;
        text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    /// Waits until a reason stands against this GPU.
    pub async fn stands(&self, gpu: u32, reason: &str) {
        let series = format!("linkwise_gpu_unhealthy_since_seconds{{uuid=\"{}\",reason=\"{reason}\"}}", uuid(gpu));
        until(async || self.metric(&series).await.ok_or_else(|| format!("{reason} does not stand"))).await;
    }

    /// Waits until this GPU is not given out.
    pub async fn ill(&self, gpu: u32) {
        let id = uuid(gpu);
        let ill = self.kubelet.wait(|state| !state.resources[GPU].healthy.contains(&id)).await;
        ill.expect("the kubelet is told of the GPU's failure");
    }

    /// Waits until this GPU is given out.
    pub async fn well(&self, gpu: u32) {
        let id = uuid(gpu);
        let well = self.kubelet.wait(|state| state.resources[GPU].healthy.contains(&id)).await;
        well.expect("the kubelet is told that the GPU is well");
    }

    /// Ends with what is wrong as soon as the kubelet is told that a GPU is ill that nothing has happened to. What happened in the
    /// round before may be told late.
    pub fn others(&mut self, gpu: u32) -> impl Future<Output = String> + use<> {
        let kubelet = Arc::clone(&self.kubelet);
        let last = self.last.replace(gpu);
        async move {
            let hurt = |other: &u32| *other == gpu || Some(*other) == last;
            let unhurt: Vec<String> = (0..GPUS).filter(|other| !hurt(other)).map(uuid).collect();
            let ill = |state: &State| unhurt.iter().find(|id| state.resources[GPU].unhealthy.contains(*id)).cloned();
            loop {
                // A wait that ends for its time begins again.
                if let Ok(state) = kubelet.wait(|state| ill(state).is_some()).await {
                    return format!("{:?} is ill, and something happened to {} only", ill(&state), uuid(gpu));
                }
            }
        }
    }

    /// Waits until the node is as it was: how long that was after `since`, or what was missing in the end.
    pub async fn whole(&mut self, since: Instant, limit: Duration) -> Result<Duration, String> {
        let mut missing = String::new();
        let waiting = async {
            loop {
                match self.missing().await {
                    None => return,
                    Some(what) => missing = what,
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let result = timeout(limit, waiting).await;
        result.map(|()| since.elapsed()).map_err(|_| missing)
    }

    /// What is not as it was.
    async fn missing(&mut self) -> Option<String> {
        if let Some(status) = self.node.process.child.try_wait().unwrap() {
            return Some(format!("the process has ended: {status}"));
        }
        let state = self.state();
        let all: BTreeSet<String> = (0..GPUS).map(uuid).collect();
        let gpu = &state.resources[GPU];
        if !(gpu.connected && gpu.open_streams == 1) {
            return Some(format!("{GPU} is not connected, with {} streams", gpu.open_streams));
        }
        if gpu.healthy != all {
            return Some(format!("healthy are {:?}", gpu.healthy));
        }
        let ready = self.node.get("/readyz").await;
        if ready.status != 200 {
            return Some(format!("not ready: {}", ready.body.trim()));
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

    pub fn measure(&self) -> Measured {
        let child = self.child().and_then(Footprint::of).expect("a child runs");
        Measured { plugin: Footprint::of(self.node.process.id()).unwrap(), child, age: self.began.elapsed() }
    }

    /// Ends the plugin, and looks at what it leaves.
    pub async fn end(mut self) {
        for violation in self.kubelet.violations() {
            self.ledger.error(format!("{violation:?}"));
        }
        let children = self.node.agent_ids();
        self.node.process.signal("TERM");
        let (status, words) = self.node.process.ended().await;
        if !status.success() {
            self.ledger.error(format!("SIGTERM ended it with {status}: {words:?}"));
        }
        for socket in self.node.setup.sockets() {
            self.ledger.error(format!("{} was left behind", socket.display()));
        }
        for child in children.into_iter().filter(|child| Footprint::of(*child).is_some()) {
            self.ledger.error(format!("the NVML child {child} was left behind"));
        }
        self.kubelet.stop().await.unwrap();
    }
}
