//! The fixture of the plugin's tests: a machine, its plugin, a kubelet, and the claims of a cluster.

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

/// The longest wait for a state. As a setting it is a deadline that no test reaches.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The API server's answer when the plugin reads a claim.
#[derive(Clone)]
pub enum Answer {
    Claim(Claim),
    /// The API server cannot be reached.
    Failed,
    /// The API server takes the call and never answers.
    Silent,
}

/// The answers for claims by namespace and name, and the number of reads by the claim's name.
#[derive(Default)]
pub struct Cluster {
    pub claims: BTreeMap<(String, String), Answer>,
    pub reads: BTreeMap<String, u64>,
}

/// A node before and while its plugin runs.
pub struct Node {
    _folder: TempDir,
    pub settings: Settings,
    pub state: StateCell,
    pub host: watch::Sender<Arc<HostDevices>>,
    /// The node's CDI devices.
    pub cdi: watch::Sender<Option<Arc<CdiDevices>>>,
    pub cluster: Arc<Mutex<Cluster>>,
    pub log: Log,
    metrics: PluginMetrics,
    registry: Registry,
    pub running: Option<(JoinHandle<()>, CancellationToken)>,
}

/// The node's state: [`Self::enter_claims`] enters claims, and the tests change the rest. While the lock is held,
/// no claim is entered.
#[derive(Clone)]
pub struct StateCell {
    state: watch::Sender<Arc<NodeState>>,
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl Deref for StateCell {
    type Target = watch::Sender<Arc<NodeState>>;

    fn deref(&self) -> &Self::Target {
        &self.state
    }
}

impl StateCell {
    /// Replaces the state, keeps the claims of the previous state, and returns the previous state.
    pub fn send_replace(&self, state: Arc<NodeState>) -> Arc<NodeState> {
        let mut swapped = state;
        self.state.send_modify(|now| {
            let claims = Event::Prepared(now.ledger().claims_with("", None));
            let next = NodeState::clone(&swapped).apply(claims, Duration::ZERO).0;
            swapped = std::mem::replace(now, Arc::new(next));
        });
        swapped
    }

    /// Keeps claims from being entered until the guard is dropped.
    pub async fn pause_entries(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.lock).lock_owned().await
    }

    /// Enters claims in the ledger, as the loop of `linkwise run` does.
    async fn enter_claims(self, mut entries: mpsc::Receiver<LedgerEntry>) {
        while let Some(LedgerEntry { plan, answer, .. }) = entries.recv().await {
            let _guard = self.pause_entries().await;
            let planned = plan(&self.borrow());
            let planned = planned.map(|(event, prepared)| {
                self.state.send_modify(|now| *now = Arc::new(NodeState::clone(now).apply(event, Duration::ZERO).0));
                prepared
            });
            let _ = answer.send(planned);
        }
    }
}

/// The state of a built-in machine whose GPUs go through DRA.
pub fn state(machine: &str) -> NodeState {
    observed_state(machine, ResourcePlan::default(), |_| {})
}

/// The state of such a machine with a plan, whose door becomes DRA, and with a change to what the agent observed.
pub fn observed_state(machine: &str, plan: ResourcePlan, change: impl FnOnce(&mut NodeObservation)) -> NodeState {
    let mut observed = linkwise_host::machines::load(machine).unwrap().observed;
    change(&mut observed);
    let plan = ResourcePlan { door: Door::Dra, ..plan };
    // GPUs go to DRA once the kubelet's lists show that no pod holds them.
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
        let state = StateCell { state: watch::Sender::new(Arc::new(state("dgx1-v100"))), lock: Arc::default() };
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

    /// A DGX-1 with its plugin running, and a kubelet that has registered the plugin.
    pub async fn serving() -> (Self, DraKubelet) {
        Self::new().served().await
    }

    /// Such a node whose plugin has other settings.
    pub async fn serving_with(change: impl FnOnce(&mut Settings)) -> (Self, DraKubelet) {
        let mut node = Self::new();
        change(&mut node.settings);
        node.served().await
    }

    /// Starts the plugin, and a kubelet that registers it. Returns the node and the kubelet.
    pub async fn served(mut self) -> (Self, DraKubelet) {
        let kubelet = self.serve().await;
        (self, kubelet)
    }

    /// Gives every claim a CDI edit of its own: the variable that `--expose-nics` sets.
    pub fn with_nics(self) -> Self {
        self.host.send_replace(Arc::new(HostDevices { rdma: Some(RdmaNodes::default()), ..HostDevices::default() }));
        self
    }

    pub fn start(&mut self) -> Plugin {
        let readiness = Readiness::new(Idle::Waiting(String::new()));
        let plugin = Plugin::new(Arc::new(self.settings.clone()), self.metrics.clone(), readiness);
        let end = CancellationToken::new();
        let (ledger, entries) = LedgerLink::new();
        tokio::spawn(self.state.clone().enter_claims(entries));
        let task = tokio::spawn(plugin.clone().run(self.state.subscribe(), ledger, Handover::alone(), end.clone()));
        self.running = Some((task, end));
        plugin
    }

    /// Ends the plugin as SIGTERM does.
    pub async fn stop(&mut self) {
        let (task, end) = self.running.take().unwrap();
        end.cancel();
        timeout(TEST_TIMEOUT, task).await.unwrap().unwrap();
    }

    /// Ends the plugin at whatever step it is, as SIGKILL does.
    pub async fn kill(&mut self) {
        let (task, _) = self.running.take().unwrap();
        task.abort();
        assert!(timeout(TEST_TIMEOUT, task).await.unwrap().unwrap_err().is_cancelled());
    }

    /// Kills the plugin and starts another.
    pub async fn kill_and_start(&mut self) {
        self.kill().await;
        self.start();
    }

    /// Stops the kubelet, and then the plugin as SIGTERM does.
    pub async fn halt(&mut self, kubelet: &DraKubelet) {
        kubelet.stop().await;
        self.stop().await;
    }

    /// Stops the kubelet, and then kills the plugin.
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
        wait_connected(kubelet).await;
    }

    /// Starts a kubelet, and waits until it has registered the plugin.
    pub async fn kubelet(&self) -> DraKubelet {
        let kubelet = DraKubelet::start(self.kubelet_options()).unwrap();
        wait_connected(&kubelet).await;
        kubelet
    }

    pub fn kubelet_options(&self) -> DraOptions {
        DraOptions { back_off: Duration::from_millis(10), ..DraOptions::new(&self.settings.registry) }
    }

    /// Waits until the log says that the plugin reached this phase.
    pub async fn wait_phase(&self, phase: Phase) {
        self.log.wait(&[&format!("phase={:?}", phase.words())]).await;
    }

    pub fn has_metric(&self, metric: &str, value: u64) -> bool {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text.contains(&format!("{metric} {value}\n"))
    }

    pub async fn wait_metric(&self, metric: &str, value: u64) {
        until(|| self.has_metric(metric, value)).await;
    }

    /// Waits until this many claims are prepared or being prepared.
    pub async fn wait_prepared_claims(&self, claims: u64) {
        self.wait_metric("dra_prepared_claims", claims).await;
    }

    /// Creates a claim with these requests and the devices that are allocated to them.
    pub fn claim(&self, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
        self.set_answer(uid, Answer::Claim(claim(uid, devices)))
    }

    /// Creates such a claim and starts its pod.
    pub async fn started_claim(&self, kubelet: &DraKubelet, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
        let claim = self.claim(uid, devices);
        start(kubelet, &claim).await.unwrap();
        claim
    }

    /// Creates two claims to GPU 0 and starts the pod of the first.
    pub async fn rivals(&self, kubelet: &DraKubelet) -> [ClaimName; 2] {
        let first = self.started_claim(kubelet, "a", &[("gpus", "gpu-0")]).await;
        [first, self.claim("b", &[("gpus", "gpu-0")])]
    }

    /// Sets the API server's answer for a claim.
    pub fn set_answer(&self, uid: &str, answer: Answer) -> ClaimName {
        let name = name(uid);
        self.cluster.lock().unwrap().claims.insert((name.namespace.clone(), name.name.clone()), answer);
        name
    }

    /// Deletes a claim from the cluster.
    pub fn delete(&self, uid: &str) {
        let name = name(uid);
        self.cluster.lock().unwrap().claims.remove(&(name.namespace, name.name));
    }

    /// The number of times that the plugin read a claim.
    pub fn reads(&self, uid: &str) -> u64 {
        self.cluster.lock().unwrap().reads.get(&name(uid).name).copied().unwrap_or_default()
    }

    /// Applies an event to the node's state.
    pub fn apply(&self, event: Event) {
        let before = NodeState::clone(&self.state.borrow());
        self.state.send_replace(Arc::new(before.apply(event, Duration::from_secs(1)).0));
    }

    /// Lets PodResources list these claims, each with GPU 0 and the CDI name of its request `gpus`.
    pub fn kubelet_lists(&self, claims: &[&str]) {
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

    /// Lets two lists of PodResources have no claim, because the first may be older than a claim.
    pub fn kubelet_lists_nothing(&self) {
        (0..2).for_each(|_| self.kubelet_lists(&[]));
    }

    /// Lets PodResources fail, so that the holders are unknown.
    pub fn kubelet_list_fails(&self) {
        self.apply(Event::Holders(None));
    }

    /// Gives the plugin the CDI devices of the current state, as a scan of the host does.
    pub fn scan(&self) {
        let devices = cdi_devices(&self.state.borrow());
        self.cdi.send_replace(Some(Arc::new(devices)));
    }

    /// Gives the plugin the CDI devices of a scan that found no device.
    pub fn scan_nothing(&self) {
        self.cdi.send_replace(Some(Arc::default()));
    }

    /// The file names of the CDI specs that claims have for their requests.
    pub fn claim_specs(&self) -> Vec<String> {
        let own = |name: &String| name.starts_with("linkwise.dev-claim-");
        file_names(&self.settings.cdi_folder).into_iter().filter(own).collect()
    }

    pub fn checkpoints(&self) -> Vec<String> {
        file_names(&self.settings.checkpoints)
    }

    /// The number of checkpoints, and that of [`Self::claim_specs`].
    pub fn file_counts(&self) -> (usize, usize) {
        (self.checkpoints().len(), self.claim_specs().len())
    }

    pub fn checkpoint(&self, uid: &str) -> PathBuf {
        self.settings.checkpoints.join(format!("{uid}.json"))
    }

    pub fn checkpoint_text(&self, uid: &str) -> String {
        fs::read_to_string(self.checkpoint(uid)).unwrap()
    }

    /// Replaces the text of a claim's checkpoint by what `change` makes of it.
    pub fn edit_checkpoint(&self, uid: &str, change: impl FnOnce(String) -> String) {
        fs::write(self.checkpoint(uid), change(self.checkpoint_text(uid))).unwrap();
    }

    /// The UUID of the GPU with this minor number.
    pub fn uuid(&self, minor: u32) -> GpuUuid {
        let state = self.state.borrow().clone();
        state.topology().gpus().iter().find(|gpu| gpu.facts.minor == Some(minor)).unwrap().uuid.clone()
    }

    /// The CDI name of the GPU with this minor number, by which tests find the GPU in a container.
    pub fn gpu(&self, minor: u32) -> String {
        format!("{KIND}={}", self.uuid(minor))
    }
}

/// Waits until the kubelet is connected to the plugin.
pub async fn wait_connected(kubelet: &DraKubelet) {
    kubelet.wait(|state| state.drivers.get(DRIVER).is_some_and(|driver| driver.connected > 0)).await.unwrap();
}

/// Restarts the kubelet, and waits until it has registered the plugin again.
pub async fn restart(kubelet: &DraKubelet) {
    kubelet.restart().await.unwrap();
    wait_connected(kubelet).await;
}

/// Starts the pod of a claim, with retries: the kubelet's connection or the plugin's MPS report may be out of date.
pub async fn start_at_last(kubelet: &DraKubelet, claim: &ClaimName) -> Vec<String> {
    let starting = async {
        loop {
            if let Ok(devices) = start(kubelet, claim).await {
                return devices;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_TIMEOUT, starting).await.unwrap()
}

/// Starts the pod of a claim and kills the plugin once the condition is met, so that the start fails.
pub async fn kill_during_start(node: &Node, kubelet: &DraKubelet, claim: &ClaimName, condition: impl Fn() -> bool) {
    let killed = async {
        until(condition).await;
        node.running.as_ref().unwrap().0.abort();
    };
    let (started, ()) = tokio::join!(timeout(TEST_TIMEOUT, start(kubelet, claim)), killed);
    assert!(started.unwrap().is_err());
}

/// Yields this many times, so that the plugin's task runs.
pub async fn yield_times(count: usize) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

pub async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_TIMEOUT, waiting).await.unwrap();
}

/// The names in a folder, sorted, without the drafts that the plugin is writing.
pub fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with(".linkwise-"));
    names.sort();
    names
}

/// The name of the claim that the tests know by this UID.
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

/// Adds opaque parameters for the driver to a claim.
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

/// Starts the pod of a claim, and returns the hardware of its container by the CDI names of [`Node::gpu`].
pub async fn start(kubelet: &DraKubelet, claim: &ClaimName) -> Result<Vec<String>, DraError> {
    Ok(hardware(&start_container(kubelet, claim).await?))
}

/// Starts the pod of a claim, and returns all CDI edits of its container.
pub async fn start_container(kubelet: &DraKubelet, claim: &ClaimName) -> Result<ContainerEdits, DraError> {
    let names = kubelet.start_pod(&pod(claim)).await?.remove("main").unwrap();
    resolve(kubelet, &names)
}

/// The edits that a container runtime makes for these CDI names.
pub fn resolve(kubelet: &DraKubelet, names: &[String]) -> Result<ContainerEdits, DraError> {
    let folder = kubelet.options().registry.with_file_name("cdi");
    runtime::container(&folder, names).map_err(DraError::Other)
}

/// The CDI names among a container's device nodes (see [`cdi_devices`]).
pub fn hardware(edits: &ContainerEdits) -> Vec<String> {
    edits.nodes.iter().filter(|node| node.starts_with(KIND)).cloned().collect()
}

/// The CDI devices of a node in this state. Each has an extra device node that is called like its CDI name, so that
/// tests find the device in a container.
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

/// Starts the pod of a claim, and returns the plugin's error.
pub async fn refusal(kubelet: &DraKubelet, claim: &ClaimName) -> String {
    match start(kubelet, claim).await {
        Err(DraError::Claim { error, .. }) => error,
        other => panic!("{other:?}"),
    }
}

/// Checks that the pod of a claim does not start, and that the plugin's error contains each of these parts.
pub async fn assert_refused(kubelet: &DraKubelet, claim: &ClaimName, parts: &[&str]) {
    let error = refusal(kubelet, claim).await;
    assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in {error}");
}

pub async fn end(kubelet: &DraKubelet, claim: &ClaimName) {
    kubelet.stop_pod(&pod(claim).pod).await.unwrap();
}

/// The plugin's reader of claims, which answers from a table.
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
