//! What the tests stand on: a machine, its plugin, a kubelet, and the claims of a cluster. Knows no test.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_core::claims::{
    AllocatedConfig, AllocatedDevice, Allocation, Claim, ClaimName, ClaimStatus, DeviceAllocation, OpaqueConfig,
    ReadClaimError,
};
use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::{CdiOptions, ChosenDevice, HostDevices, InjectionOptions};
use linkwise_core::state::{ClaimedDevice, Door, Event, Holdings, NodeState, NumaHints, ResourcePlan};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_kubelet::dra::{
    CdiDevices, Handover, LedgerEntry, LedgerLink, Phase, Plugin, PluginMetrics, ReadClaim, Settings,
};
use linkwise_kubelet::readiness::Readiness;
use linkwise_kubelet_box::dra::{ClaimRef, DraError, DraKubelet, DraOptions, PodClaims};
use linkwise_kubelet_box::runtime::{self, ContainerEdits};
use linkwise_nvml::supervisor::Idle;
use prometheus_client::registry::Registry;
use tempfile::TempDir;
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::run::log::Log;

pub const DRIVER: &str = "gpu.nvidia.com";
pub const POOL: &str = "node/gpu";
pub const KIND: &str = "k8s.device-plugin.nvidia.com/gpu";

/// After this long, what should have happened will not.
pub const LIMIT: Duration = Duration::from_secs(60);

/// How the cluster answers for a claim.
#[derive(Clone)]
pub enum Answer {
    Claim(Claim),
    /// The API server cannot be reached.
    Failed,
    /// It does not answer.
    Silent,
}

/// The claims of the cluster by namespace and name, and how often each was read.
#[derive(Default)]
pub struct Cluster {
    pub claims: BTreeMap<(String, String), Answer>,
    pub reads: BTreeMap<String, u64>,
}

/// A node before and while its plugin runs.
pub struct Node {
    _folder: TempDir,
    pub settings: Settings,
    pub state: States,
    pub host: watch::Sender<Arc<HostDevices>>,
    /// The node's CDI devices.
    pub cdi: watch::Sender<Option<Arc<CdiDevices>>>,
    pub cluster: Arc<Mutex<Cluster>>,
    pub log: Log,
    metrics: PluginMetrics,
    registry: Registry,
    pub running: Option<(JoinHandle<()>, CancellationToken)>,
}

/// The node's state. Its one writer enters claims; the tests change the rest.
#[derive(Clone)]
pub struct States(watch::Sender<Arc<NodeState>>, Arc<tokio::sync::Mutex<()>>);

impl Deref for States {
    type Target = watch::Sender<Arc<NodeState>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl States {
    /// Another state, with the claims of the last one, which is returned.
    pub fn send_replace(&self, state: Arc<NodeState>) -> Arc<NodeState> {
        let mut last = state;
        self.0.send_modify(|now| {
            let claims = Event::Prepared(now.ledger().claims_with("", None));
            let next = NodeState::clone(&last).apply(claims, Duration::ZERO).0;
            last = std::mem::replace(now, Arc::new(next));
        });
        last
    }

    /// Keeps the node's loop from entering claims, until it is dropped.
    pub async fn busy(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.1).lock_owned().await
    }

    /// The node's loop, as far as claims need it.
    async fn write(self, mut entries: mpsc::Receiver<LedgerEntry>) {
        while let Some(LedgerEntry { plan, answer, .. }) = entries.recv().await {
            let _idle = self.busy().await;
            let planned = plan(&self.borrow());
            let planned = planned.map(|(event, prepared)| {
                self.0.send_modify(|now| *now = Arc::new(NodeState::clone(now).apply(event, Duration::ZERO).0));
                prepared
            });
            let _ = answer.send(planned);
        }
    }
}

/// A state of a built-in machine whose GPUs go through DRA.
pub fn state(machine: &str) -> NodeState {
    observed_state(machine, ResourcePlan::default(), |_| {})
}

/// The same, with other parts of the plan, and a change to what is observed.
pub fn observed_state(machine: &str, plan: ResourcePlan, change: impl FnOnce(&mut NodeObservation)) -> NodeState {
    let mut observed = linkwise_host::machines::load(machine).unwrap().observed;
    change(&mut observed);
    let plan = ResourcePlan { door: Door::Dra, ..plan };
    // No pod holds any GPU: then they go to DRA.
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), Event::Observed(Box::new(observed)), unheld(), unheld()];
    events.into_iter().fold(NodeState::new(NumaHints::default()), |state, event| state.apply(event, Duration::ZERO).0)
}

impl Node {
    /// A DGX-1 whose GPUs all go through DRA, without a plugin yet.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("registry")).unwrap();
        fs::create_dir(at("cdi")).unwrap();
        let (host, host_devices) = watch::channel(Arc::default());
        let (cdi_devices, _) = watch::channel(None);
        let cdi = CdiOptions { kind: KIND.to_owned(), annotation_prefix: None, cri: true };
        let mut settings = Settings::new(DRIVER, POOL, at("claims"));
        settings.registry = at("registry");
        settings.plugins = at("plugins");
        settings.cdi_folder = at("cdi");
        settings.boot = Some("this boot".to_owned());
        settings.injection = InjectionOptions { cdi: Some(cdi), ..InjectionOptions::default() };
        (settings.host_devices, settings.cdi) = (host_devices, cdi_devices.subscribe());
        settings.listed_within = Duration::ZERO;
        let cluster = Arc::default();
        settings.read_claim = Some(read_claim(&cluster));
        settings.longest_pause = Duration::from_millis(64);
        let state = States(watch::Sender::new(Arc::new(state("dgx1-v100"))), Arc::default());
        let mut registry = Registry::default();
        let node = Self {
            _folder: folder,
            settings,
            state,
            host,
            cdi: cdi_devices,
            cluster,
            log: Log::start(),
            metrics: PluginMetrics::register(&mut registry),
            registry,
            running: None,
        };
        node.scan();
        node
    }

    /// The same, with its plugin running, and a kubelet.
    pub async fn serving() -> (Self, DraKubelet) {
        let mut node = Self::new();
        let kubelet = node.serve().await;
        (node, kubelet)
    }

    /// Every claim has an edit of its own: the variable of `--expose-nics`.
    pub fn with_nics(self) -> Self {
        self.host.send_replace(Arc::new(HostDevices { rdma: Some(RdmaNodes::default()), ..HostDevices::default() }));
        self
    }

    /// Starts the plugin, and returns it.
    pub fn start(&mut self) -> Plugin {
        let readiness = Readiness::new(Idle::Waiting(String::new()));
        let plugin = Plugin::new(Arc::new(self.settings.clone()), self.metrics.clone(), readiness);
        let end = CancellationToken::new();
        let (ledger, entries) = LedgerLink::new();
        tokio::spawn(self.state.clone().write(entries));
        let task = tokio::spawn(plugin.clone().run(self.state.subscribe(), ledger, Handover::alone(), end.clone()));
        self.running = Some((task, end));
        plugin
    }

    /// Ends the plugin as SIGTERM does.
    pub async fn stop(&mut self) {
        let (task, end) = self.running.take().unwrap();
        end.cancel();
        timeout(LIMIT, task).await.unwrap().unwrap();
    }

    /// Ends the plugin wherever it is.
    pub async fn kill(&mut self) {
        let (task, _) = self.running.take().unwrap();
        task.abort();
        assert!(timeout(LIMIT, task).await.unwrap().unwrap_err().is_cancelled());
    }

    /// [`Self::kill`], and another plugin.
    pub async fn kill_and_start(&mut self) {
        self.kill().await;
        self.start();
    }

    /// Ends a kubelet, and then the plugin as SIGTERM does.
    pub async fn halt(&mut self, kubelet: &DraKubelet) {
        kubelet.stop().await;
        self.stop().await;
    }

    /// Ends a kubelet, and then the plugin wherever it is.
    pub async fn crash(&mut self, kubelet: &DraKubelet) {
        kubelet.stop().await;
        self.kill().await;
    }

    /// Starts the plugin, and a new kubelet.
    pub async fn serve(&mut self) -> DraKubelet {
        self.start();
        self.kubelet().await
    }

    /// Starts the plugin, and a kubelet that was stopped.
    pub async fn serve_again(&mut self, kubelet: &DraKubelet) {
        self.start();
        kubelet.start_again().unwrap();
        connected(kubelet).await;
    }

    /// A kubelet, with the plugin registered.
    pub async fn kubelet(&self) -> DraKubelet {
        let kubelet = DraKubelet::start(self.kubelet_options()).unwrap();
        connected(&kubelet).await;
        kubelet
    }

    pub fn kubelet_options(&self) -> DraOptions {
        DraOptions { back_off: Duration::from_millis(10), ..DraOptions::new(&self.settings.registry) }
    }

    /// Waits until the plugin was in a phase.
    pub async fn was(&self, phase: Phase) {
        self.log.has(&[&format!("phase={:?}", phase.words())]).await;
    }

    /// Returns true if a metric of the plugin has this value.
    pub fn shows(&self, metric: &str, value: u64) -> bool {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text.contains(&format!("{metric} {value}\n"))
    }

    /// Waits until a metric of the plugin has this value.
    pub async fn counts(&self, metric: &str, value: u64) {
        until(|| self.shows(metric, value)).await;
    }

    /// Waits until so many claims are prepared, or are being prepared.
    pub async fn holds(&self, claims: u64) {
        self.counts("dra_prepared_claims", claims).await;
    }

    /// A claim of the cluster, allocated on this node: a request and a device each.
    pub fn claim(&self, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
        self.set(uid, Answer::Claim(claim(uid, devices)))
    }

    /// The same, with its pod started.
    pub async fn given(&self, kubelet: &DraKubelet, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
        let claim = self.claim(uid, devices);
        start(kubelet, &claim).await.unwrap();
        claim
    }

    /// Two claims of GPU 0, `a` and `b`; the first has it.
    pub async fn rivals(&self, kubelet: &DraKubelet) -> [ClaimName; 2] {
        let first = self.given(kubelet, "a", &[("gpus", "gpu-0")]).await;
        [first, self.claim("b", &[("gpus", "gpu-0")])]
    }

    /// How the cluster answers for a claim.
    pub fn set(&self, uid: &str, answer: Answer) -> ClaimName {
        let name = name(uid);
        self.cluster.lock().unwrap().claims.insert((name.namespace.clone(), name.name.clone()), answer);
        name
    }

    /// The claim is deleted.
    pub fn delete(&self, uid: &str) {
        let name = name(uid);
        self.cluster.lock().unwrap().claims.remove(&(name.namespace, name.name));
    }

    /// How often the claim was read.
    pub fn reads(&self, uid: &str) -> u64 {
        self.cluster.lock().unwrap().reads.get(&name(uid).name).copied().unwrap_or_default()
    }

    /// Tells the node's state what happens.
    pub fn apply(&self, event: Event) {
        let before = NodeState::clone(&self.state.borrow());
        self.state.send_replace(Arc::new(before.apply(event, Duration::from_secs(1)).0));
    }

    /// The kubelet lists these claims, each with GPU 0 and the CDI name of its request `gpus`.
    pub fn listed(&self, claims: &[&str]) {
        let claimed = |uid: &&str| ClaimedDevice {
            claim: format!("ml/claim-{uid}"),
            driver: DRIVER.to_owned(),
            pool: POOL.to_owned(),
            device: "gpu-0".to_owned(),
            cdi_names: vec![format!("{uid}-gpus")],
        };
        let holdings = Holdings { claims: claims.iter().map(claimed).collect(), ..Holdings::default() };
        self.apply(Event::Holders(Some(holdings)));
    }

    /// The kubelet lists no claim, twice: the first list may be older than a claim.
    pub fn nothing_listed(&self) {
        (0..2).for_each(|_| self.listed(&[]));
    }

    /// The kubelet cannot be asked.
    pub fn unlisted(&self) {
        self.apply(Event::Holders(None));
    }

    /// Scans the host, as the agent's other task does after each snapshot.
    pub fn scan(&self) {
        let devices = cdi_devices(&self.state.borrow());
        self.cdi.send_replace(Some(Arc::new(devices)));
    }

    /// The scan has found nothing.
    pub fn scan_nothing(&self) {
        self.cdi.send_replace(Some(Arc::default()));
    }

    /// The claims' specs.
    pub fn claim_specs(&self) -> Vec<String> {
        let own = |name: &String| name.starts_with("linkwise.dev-claim-");
        names(&self.settings.cdi_folder).into_iter().filter(own).collect()
    }

    pub fn checkpoints(&self) -> Vec<String> {
        names(&self.settings.checkpoints)
    }

    /// The numbers of checkpoints and of claims' specs.
    pub fn left(&self) -> (usize, usize) {
        (self.checkpoints().len(), self.claim_specs().len())
    }

    pub fn checkpoint(&self, uid: &str) -> PathBuf {
        self.settings.checkpoints.join(format!("{uid}.json"))
    }

    /// The text of a claim's checkpoint.
    pub fn kept(&self, uid: &str) -> String {
        fs::read_to_string(self.checkpoint(uid)).unwrap()
    }

    /// Writes another text into a claim's checkpoint.
    pub fn rewrite(&self, uid: &str, change: impl FnOnce(String) -> String) {
        fs::write(self.checkpoint(uid), change(self.kept(uid))).unwrap();
    }

    /// Takes the CDI spec of the claim `a` away.
    pub fn remove_spec(&self) {
        fs::remove_file(self.settings.cdi_folder.join("linkwise.dev-claim-a.json")).unwrap();
    }

    /// A GPU, by its minor number.
    pub fn uuid(&self, minor: u32) -> GpuUuid {
        let state = self.state.borrow().clone();
        state.topology().gpus().iter().find(|gpu| gpu.facts.minor == Some(minor)).unwrap().uuid.clone()
    }

    /// What a container has of a GPU, by its minor number: its CDI name.
    pub fn gpu(&self, minor: u32) -> String {
        format!("{KIND}={}", self.uuid(minor))
    }
}

/// Waits until the kubelet has the plugin and a connection to it.
pub async fn connected(kubelet: &DraKubelet) {
    let connected = |state: &linkwise_kubelet_box::dra::DraState| {
        state.drivers.get(DRIVER).is_some_and(|driver| driver.connected > 0)
    };
    kubelet.wait(connected).await.unwrap();
}

/// Restarts the kubelet, and waits until it has the plugin again.
pub async fn restarted(kubelet: &DraKubelet) {
    kubelet.restart().await.unwrap();
    connected(kubelet).await;
}

/// Starts the pod of a claim as often as it takes: the connection may still be that of a plugin that was killed.
pub async fn start_at_last(kubelet: &DraKubelet, claim: &ClaimName) -> Vec<String> {
    let starting = async {
        loop {
            if let Ok(devices) = start(kubelet, claim).await {
                return devices;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, starting).await.unwrap()
}

/// Starts the pod of a claim, which does not end well: the plugin is killed once something holds.
pub async fn killed_once(node: &Node, kubelet: &DraKubelet, claim: &ClaimName, holds: impl Fn() -> bool) {
    let killed = async {
        until(holds).await;
        node.running.as_ref().unwrap().0.abort();
    };
    let (started, ()) = tokio::join!(timeout(LIMIT, start(kubelet, claim)), killed);
    assert!(started.unwrap().is_err());
}

/// Lets the plugin's task have so many turns.
pub async fn turns(count: usize) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

/// Waits until something holds; nothing here is waited for but the plugin's own work.
pub async fn until(wanted: impl Fn() -> bool) {
    let waiting = async {
        while !wanted() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, waiting).await.unwrap();
}

/// The names in a folder, sorted; drafts that are being written are left out.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with(".linkwise-"));
    names.sort();
    names
}

pub fn name(uid: &str) -> ClaimName {
    ClaimName { namespace: "ml".to_owned(), name: format!("claim-{uid}"), uid: uid.to_owned() }
}

pub fn claim(uid: &str, devices: &[(&str, &str)]) -> Claim {
    let result = |(request, device): &(&str, &str)| AllocatedDevice {
        request: (*request).to_owned(),
        driver: DRIVER.to_owned(),
        pool: POOL.to_owned(),
        device: (*device).to_owned(),
        ..AllocatedDevice::default()
    };
    let results = devices.iter().map(result).collect();
    let allocation = Allocation { devices: DeviceAllocation { results, config: Vec::new() } };
    Claim { metadata: name(uid), pod_claim_name: None, status: ClaimStatus { allocation: Some(allocation) } }
}

/// The claim, with opaque parameters.
pub fn configured(mut claim: Claim, parameters: &str) -> Claim {
    let opaque = Some(OpaqueConfig { driver: DRIVER.to_owned(), parameters: parameters.to_owned() });
    let config = AllocatedConfig { source: "FromClaim".to_owned(), requests: Vec::new(), opaque };
    claim.status.allocation.as_mut().unwrap().devices.config.push(config);
    claim
}

pub fn reference(claim: &ClaimName) -> ClaimRef {
    ClaimRef { namespace: claim.namespace.clone(), name: claim.name.clone(), uid: claim.uid.clone() }
}

/// A pod with one container that uses all of one claim.
pub fn pod(claim: &ClaimName) -> PodClaims {
    PodClaims::single(&format!("pod-{}", claim.uid), reference(claim), DRIVER)
}

/// Starts the pod of a claim; the hardware of its container, by the CDI names of [`Node::gpu`].
pub async fn start(kubelet: &DraKubelet, claim: &ClaimName) -> Result<Vec<String>, DraError> {
    Ok(hardware(&start_container(kubelet, claim).await?))
}

/// Starts the pod of a claim; all that its container gets.
pub async fn start_container(kubelet: &DraKubelet, claim: &ClaimName) -> Result<ContainerEdits, DraError> {
    let names = kubelet.start_pod(&pod(claim)).await?.remove("main").unwrap();
    resolve(kubelet, &names)
}

/// What a runtime gives a container for these names.
pub fn resolve(kubelet: &DraKubelet, names: &[String]) -> Result<ContainerEdits, DraError> {
    let folder = kubelet.options().registry.with_file_name("cdi");
    runtime::container(&folder, names).map_err(DraError::Other)
}

/// The hardware of a container.
pub fn hardware(edits: &ContainerEdits) -> Vec<String> {
    edits.nodes.iter().filter(|node| node.starts_with(KIND)).cloned().collect()
}

/// The CDI devices of a node in this state. Each has a node with its own name, by which the tests know it.
pub fn cdi_devices(state: &NodeState) -> CdiDevices {
    let topology = state.topology();
    let gpus = topology.gpus().iter().map(|gpu| ChosenDevice { gpu, mig: None });
    let mig = topology.mig_devices().iter();
    let mig = mig.map(|mig| ChosenDevice { gpu: &topology.gpus()[mig.parent], mig: Some(mig) });
    let device = |chosen: ChosenDevice<'_>| {
        let name = format!("{KIND}={}", chosen.uuid());
        let nodes = chosen.nodes().ok()?.into_iter().chain([name.clone()]);
        let nodes: Vec<_> = nodes.map(|path| serde_json::json!({"path": path})).collect();
        let serde_json::Value::Object(edits) = serde_json::json!({"deviceNodes": nodes}) else { return None };
        Some((name, edits))
    };
    let common =
        serde_json::json!({"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": [{"path": "/dev/nvidiactl"}]});
    CdiDevices { common: common.to_string(), devices: gpus.chain(mig).filter_map(device).collect() }
}

/// Why the pod of a claim does not start: the plugin's own text.
pub async fn refusal(kubelet: &DraKubelet, claim: &ClaimName) -> String {
    match start(kubelet, claim).await {
        Err(DraError::Claim { error, .. }) => error,
        other => panic!("{other:?}"),
    }
}

/// Checks that the pod of a claim does not start, and that the plugin's text has each of these parts.
pub async fn is_refused(kubelet: &DraKubelet, claim: &ClaimName, parts: &[&str]) {
    let error = refusal(kubelet, claim).await;
    assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in {error}");
}

/// Ends the pod of a claim.
pub async fn end(kubelet: &DraKubelet, claim: &ClaimName) {
    kubelet.stop_pod(&pod(claim).pod).await.unwrap();
}

pub fn read_claim(cluster: &Arc<Mutex<Cluster>>) -> ReadClaim {
    let cluster = Arc::clone(cluster);
    Arc::new(move |claim: ClaimName| {
        let mut cluster = cluster.lock().unwrap();
        *cluster.reads.entry(claim.name.clone()).or_default() += 1;
        let answer = match cluster.claims.get(&(claim.namespace, claim.name)) {
            None => Err(ReadClaimError::NotFound),
            Some(Answer::Claim(claim)) => Ok(claim.clone()),
            Some(Answer::Failed) => Err(ReadClaimError::Failed("connection refused".to_owned())),
            Some(Answer::Silent) => return Box::pin(std::future::pending()),
        };
        Box::pin(std::future::ready(answer))
    })
}
