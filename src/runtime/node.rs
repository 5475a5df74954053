//! One node: the loop that writes the snapshot, a plugin for each resource, the HTTP endpoints.
//!
//! `run` feeds it from the driver, `demo` from a script; everything in between is the same.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::clock::Clock;
use super::idle::Idle;
use super::keeper::{HealthSettings, Keeper};
use super::observe;
use crate::admin::{Admin, Answers};
use crate::allocation::AllocationReport;
use crate::kubelet::pod_resources::{self, Holders};
use crate::kubelet::{self, Occurrence, Phase, Plugin, Sources};
use crate::metrics::{self, Metrics};
use crate::state::{Effect, Event, Health, HealthRecord, NodeState, NumaHints, ResourceName};

/// Events that may wait: a storm of XIDs waits at the driver's end of the queue, not in memory.
const EVENTS: usize = 256;
/// Occurrences that may wait for the log; more are counted by the metrics and not logged.
const OCCURRENCES: usize = 1024;
/// How long the tasks may take to end; the whole process has a second, and the plugins half of one.
const LAST_MOMENTS: Duration = Duration::from_millis(750);

/// What a node needs to know.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The kubelet's side.
    pub kubelet: kubelet::Settings,
    /// Where the HTTP endpoints are served.
    pub metrics_address: SocketAddr,
    /// Which NUMA nodes devices claim.
    pub numa_hints: NumaHints,
    /// How health is judged and kept.
    pub health: HealthSettings,
}

/// Both ends of a bounded queue.
type Queue<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);

/// A plugin that runs, and what ends it alone.
struct Running {
    phase: watch::Receiver<Phase>,
    end: CancellationToken,
}

/// The plugins that run, those that are ending included.
type Plugins = Arc<Mutex<BTreeMap<ResourceName, Running>>>;

/// What keeps each plugin from serving, for /readyz; gone while it serves.
type Troubles = Arc<Mutex<BTreeMap<ResourceName, String>>>;

/// A node; it lives in [`Self::serve`].
pub struct Node {
    kubelet: Arc<kubelet::Settings>,
    state: NodeState,
    clock: Clock,
    records: watch::Sender<Option<HealthRecord>>,
    snapshots: watch::Sender<Arc<NodeState>>,
    events: Queue<Event>,
    occurrences: Queue<(ResourceName, Occurrence)>,
    plugins: Plugins,
    holders: watch::Sender<Holders>,
    follows_holders: bool,
    /// Whether an answer about holders is waited for.
    asks_often: watch::Sender<bool>,
    troubles: Troubles,
    idle: watch::Sender<Idle>,
    last_report: watch::Sender<Option<Arc<AllocationReport>>>,
    metrics: Arc<Metrics>,
    metrics_address: SocketAddr,
    /// Plugins begin when it is true; without it, at once.
    gate: Option<watch::Receiver<bool>>,
    tasks: JoinSet<(String, Result<()>)>,
    shutdown: CancellationToken,
}

/// The name of a plugin's task.
fn plugin_task(resource: &ResourceName) -> String {
    format!("plugin of {resource}")
}

/// Only whole entries are ever written: a panic elsewhere leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Binds the endpoints and starts to serve them; nothing is offered before the first event.
    pub async fn start(settings: NodeSettings) -> Result<Self> {
        let mut state = NodeState::new(settings.numa_hints).with_xids(settings.health.xids.clone());
        if let Some(hold) = settings.health.hold {
            state = state.with_hold(hold);
        }
        if settings.health.await_first_poll {
            state = state.awaiting_the_first_poll();
            if settings.kubelet.pod_resources_socket.is_some() {
                state = state.awaiting_the_holders();
            }
        }
        let (snapshots, snapshot) = watch::channel(Arc::new(state.clone()));
        let keeper = Keeper::new(&settings.health);
        let kept = keeper.read().await;
        let metrics = Arc::new(Metrics::new(env!("CARGO_PKG_VERSION"), snapshot));
        let admin = Admin::bind(settings.metrics_address)?;
        let metrics_address = admin.address();
        let idle = watch::Sender::new(Idle::Waiting("the GPUs have not been looked at yet".to_owned()));
        let mut node = Self {
            kubelet: Arc::new(settings.kubelet),
            state,
            clock: Clock::start(),
            records: watch::Sender::new(None),
            snapshots,
            events: mpsc::channel(EVENTS),
            occurrences: mpsc::channel(OCCURRENCES),
            plugins: Plugins::default(),
            holders: watch::Sender::default(),
            follows_holders: false,
            asks_often: watch::Sender::default(),
            troubles: Troubles::default(),
            idle,
            last_report: watch::Sender::default(),
            metrics,
            metrics_address,
            gate: None,
            tasks: JoinSet::new(),
            shutdown: CancellationToken::new(),
        };
        let (answers, shutdown) = (node.answers(), node.shutdown());
        node.spawn("metrics and probes", async move {
            admin.serve(answers, shutdown).await;
            Ok(())
        });
        let (records, shutdown) = (node.records.subscribe(), node.shutdown());
        node.spawn("health record", async move {
            keeper.follow(records, shutdown).await;
            Ok(())
        });
        if let Some(record) = kept {
            node.apply(Event::Restored(Box::new(record)));
        }
        Ok(node)
    }

    /// Where events go.
    pub fn events(&self) -> mpsc::Sender<Event> {
        self.events.0.clone()
    }

    /// The metrics.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Where the HTTP endpoints are in fact.
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics_address
    }

    /// Follows what the node offers.
    pub fn snapshot(&self) -> watch::Receiver<Arc<NodeState>> {
        self.snapshots.subscribe()
    }

    /// Follows the report of the latest choice.
    pub fn last_report(&self) -> watch::Receiver<Option<Arc<AllocationReport>>> {
        self.last_report.subscribe()
    }

    /// Follows which devices the kubelet says that containers hold. It begins with the first GPU that is seen.
    pub fn holders(&self) -> watch::Receiver<Holders> {
        self.holders.subscribe()
    }

    /// Ends the node when cancelled.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Why there is nothing to offer, where there is not: for /readyz.
    pub(super) fn idle_reason(&self) -> watch::Sender<Idle> {
        self.idle.clone()
    }

    /// Holds plugins back until this is true: a pod may be admitted as soon as one is registered.
    pub(super) fn hold_plugins_until(&mut self, ready: watch::Receiver<bool>) {
        self.gate = Some(ready);
    }

    /// Starts a task of this node. One that ends before the shutdown ends the node.
    pub fn spawn(&mut self, name: impl Into<String>, task: impl Future<Output = Result<()>> + Send + 'static) {
        let name = name.into();
        self.tasks.spawn(async move { (name, task.await) });
    }

    /// Lives until the shutdown, or until something ends that should not.
    pub async fn serve(mut self) -> Result<()> {
        let mut told = observe::Told::default();
        let mut holders = self.holders.subscribe();
        let ended = loop {
            let deadline = self.state.next_deadline().map(|moment| self.clock.instant(moment));
            let tick = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.shutdown.cancelled() => break Ok(()),
                Some(event) = self.events.1.recv() => self.apply(event),
                () = tick => self.apply(Event::Tick),
                Ok(()) = holders.changed() => {
                    let now = holders.borrow_and_update().clone();
                    self.apply(Event::Holders(now));
                }
                Some((resource, occurrence)) = self.occurrences.1.recv() => observe::log(&resource, &occurrence, &mut told),
                Some(task) = self.tasks.join_next() => match task {
                    Ok((_, Ok(()))) if self.shutdown.is_cancelled() => break Ok(()),
                    Ok((name, Ok(()))) if self.withdrawn(&name) => {}
                    Ok((name, Ok(()))) => break Err(anyhow!("the task '{name}' ended")),
                    Ok((name, Err(error))) => break Err(error.context(format!("the task '{name}' failed"))),
                    Err(error) => break Err(error).context("a task broke off"),
                },
            }
        };
        self.shutdown.cancel();
        // What hangs in the kernel (a file of a device in trouble) is left to the end of the process.
        let _ = timeout(LAST_MOMENTS, async { while self.tasks.join_next().await.is_some() {} }).await;
        ended
    }

    pub(super) fn apply(&mut self, event: Event) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, self.clock.now());
        self.state = state;
        let awaits = self.state.awaits_holders();
        self.asks_often.send_if_modified(|often| std::mem::replace(often, awaits) != awaits);
        if !self.state.topology().gpus().is_empty() {
            self.follow_holders();
        }
        for effect in effects {
            match effect {
                Effect::Publish => self.publish(),
                Effect::HealthChanged { gpu, health: Health::Healthy } => tracing::info!(%gpu, "the GPU is healthy"),
                Effect::HealthChanged { gpu, health: Health::Unhealthy { reason, since } } => {
                    self.metrics.gpu_failed(&gpu, reason.label());
                    let (since, ends_with) = (since.as_secs(), reason.ends_with());
                    tracing::warn!(%gpu, %reason, since, ends_with, "the GPU is unhealthy");
                }
                Effect::XidIgnored { gpu, code, times } => {
                    tracing::info!(%gpu, xid = code, times, "an XID that is no fault of the GPU; it stays as it is");
                }
                Effect::Keep => drop(self.records.send_replace(Some(self.state.record()))),
                Effect::RecordIgnored { version } => {
                    tracing::warn!(version, "health record not used: another version of linkwise wrote it");
                }
                Effect::HeldElsewhere { gpu, resource, reason } => {
                    tracing::info!(%gpu, %resource, %reason, "not given out so until the pod has ended");
                }
                Effect::HeldUnoffered { resource, ids } => {
                    let devices = observe::some(&ids);
                    tracing::warn!(
                        %resource,
                        devices,
                        "pods hold devices that are not offered here, or not any more: listed as unhealthy until they have ended"
                    );
                }
                Effect::Warn(warning) => tracing::warn!("{warning}"),
                Effect::PlanProblem(problem) => tracing::warn!("{problem}"),
            }
        }
    }

    /// Hands the state to everybody who follows it; a resource that is new gets its plugin, one that is gone loses it.
    fn publish(&mut self) {
        self.snapshots.send_replace(Arc::new(self.state.clone()));
        self.match_plugins();
    }

    /// A plugin for each resource. One that comes back while its plugin is ending gets the next when that has ended:
    /// two of one name would take the kubelet's one endpoint from each other.
    fn match_plugins(&mut self) {
        let resources: Vec<ResourceName> = self.state.resources().keys().cloned().collect();
        for (resource, plugin) in lock(&self.plugins).iter() {
            if !resources.contains(resource) {
                plugin.end.cancel();
            }
        }
        for resource in resources {
            if !lock(&self.plugins).contains_key(&resource) {
                self.start_plugin(resource);
            }
        }
    }

    fn start_plugin(&mut self, resource: ResourceName) {
        self.metrics.resource(&resource);
        let sources = Sources { snapshot: self.snapshots.subscribe(), observer: self.observer() };
        let plugin = Plugin::new(resource.clone(), Arc::clone(&self.kubelet), sources);
        let end = self.shutdown.child_token();
        lock(&self.plugins).insert(resource.clone(), Running { phase: plugin.phase(), end: end.clone() });
        let gate = self.gate.clone();
        self.spawn(plugin_task(&resource), async move {
            if let Some(mut gate) = gate {
                // Who opens it ends with the node only.
                let _ = end.run_until_cancelled(gate.wait_for(|ready| *ready)).await;
            }
            Ok(plugin.run(end).await?)
        });
    }

    /// Starts to ask who holds which devices, once: before the first list, which has to have them.
    fn follow_holders(&mut self) {
        let Some(socket) = self.kubelet.pod_resources_socket.clone() else { return };
        if !self.follows_holders {
            self.follows_holders = true;
            let (holders, often, shutdown) = (self.holders.clone(), self.asks_often.subscribe(), self.shutdown());
            self.spawn("holders of devices", async move {
                pod_resources::follow_holders(&socket, holders, often, shutdown).await;
                Ok(())
            });
        }
    }

    /// Whether the task that ended was a plugin whose resource was withdrawn; then it is forgotten.
    fn withdrawn(&mut self, task: &str) -> bool {
        let ended = |(resource, plugin): (&ResourceName, &Running)| {
            (plugin.end.is_cancelled() && plugin_task(resource) == task).then(|| resource.clone())
        };
        let Some(resource) = lock(&self.plugins).iter().find_map(ended) else { return false };
        lock(&self.plugins).remove(&resource);
        lock(&self.troubles).remove(&resource);
        self.metrics.withdrawn(&resource);
        tracing::info!(%resource, "withdrawn: nothing of it is left on this node");
        self.match_plugins();
        true
    }

    /// Counts at once, for that never waits; the log may, and gets a copy through a queue.
    fn observer(&self) -> kubelet::Observer {
        let (metrics, log) = (Arc::clone(&self.metrics), self.occurrences.0.clone());
        let (last_report, troubles) = (self.last_report.clone(), Arc::clone(&self.troubles));
        Arc::new(move |resource, occurrence| {
            observe::count(&metrics, resource, &occurrence);
            if let Occurrence::Chosen { report, .. } = &occurrence {
                last_report.send_replace(Some(Arc::clone(report)));
            }
            // None of these is on the path of an admission.
            match &occurrence {
                Occurrence::Waiting(why) | Occurrence::Ended(why) => {
                    lock(&troubles).insert(resource.clone(), why.clone());
                }
                Occurrence::Phase(Phase::Serving) => drop(lock(&troubles).remove(resource)),
                _ => {}
            }
            // Full: somebody asks faster than the log is written.
            let _ = log.try_send((resource.clone(), occurrence));
        })
    }

    /// Where each plugin is that offers something, and what keeps it from serving. One that is ending is nothing to wait for.
    pub(super) fn plugins(&self) -> impl Fn() -> Vec<(String, Phase, Option<String>)> + Send + Sync + use<> {
        let (plugins, troubles) = (Arc::clone(&self.plugins), Arc::clone(&self.troubles));
        move || {
            let (plugins, troubles) = (lock(&plugins), lock(&troubles));
            let offered = plugins.iter().filter(|(_, plugin)| !plugin.end.is_cancelled());
            let offered = offered.map(|(resource, plugin)| (resource, *plugin.phase.borrow()));
            offered.map(|(resource, phase)| (resource.to_string(), phase, troubles.get(resource).cloned())).collect()
        }
    }

    fn answers(&self) -> Answers {
        let (metrics, plugins, idle) = (Arc::clone(&self.metrics), self.plugins(), self.idle.subscribe());
        let ready = move || {
            let plugins = plugins();
            if plugins.is_empty() {
                return match &*idle.borrow() {
                    Idle::NoGpu(reason) => Ok(reason.clone()),
                    Idle::Waiting(reason) => Err(vec![reason.clone()]),
                };
            }
            let waiting: Vec<String> = plugins
                .into_iter()
                .filter(|(_, phase, _)| *phase != Phase::Serving)
                .map(|(resource, phase, trouble)| match trouble {
                    Some(why) => format!("{resource}: {}; {why}", phase.words()),
                    None => format!("{resource}: {}", phase.words()),
                })
                .collect();
            if waiting.is_empty() { Ok("ready".to_owned()) } else { Err(waiting) }
        };
        Answers {
            metrics: Arc::new(move || metrics.encode().ok()),
            metrics_type: metrics::CONTENT_TYPE,
            ready: Arc::new(ready),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn phase(node: &Node, wanted: impl Fn(Phase) -> bool) {
        let mut phase = lock(&node.plugins)[&ResourceName::gpu()].phase.clone();
        timeout(Duration::from_secs(20), phase.wait_for(|phase| wanted(*phase))).await.unwrap().unwrap();
    }

    fn settings(folder: &std::path::Path) -> NodeSettings {
        NodeSettings {
            kubelet: kubelet::Settings::new(folder.join("kubelet.sock")),
            metrics_address: "127.0.0.1:0".parse().unwrap(),
            numa_hints: NumaHints::default(),
            health: HealthSettings::default(),
        }
    }

    /// Waits for the task that ends next, and says whether that was the withdrawal of a resource.
    async fn withdraws(node: &mut Node) -> bool {
        let ended = timeout(Duration::from_secs(20), node.tasks.join_next()).await.unwrap();
        let (name, result) = ended.unwrap().unwrap();
        result.unwrap();
        node.withdrawn(&name)
    }

    #[tokio::test]
    async fn a_task_that_ends_unexpectedly_ends_the_node_with_its_cause() {
        let folder = tempfile::tempdir().unwrap();
        type Task = std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>>;
        let tasks: [(Task, &str); 3] = [
            (Box::pin(async { Ok(()) }), "the task 'somebody' ended"),
            (Box::pin(async { Err(anyhow!("no room")) }), "the task 'somebody' failed: no room"),
            (Box::pin(async { panic!("at the disco") }), "a task broke off"),
        ];
        for (task, cause) in tasks {
            let mut node = Node::start(settings(folder.path())).await.unwrap();
            let shutdown = node.shutdown();
            node.spawn("somebody", task);
            let ended = timeout(Duration::from_secs(20), node.serve()).await.unwrap();
            let words = format!("{:#}", ended.unwrap_err());
            assert!(words.starts_with(cause), "{words}");
            assert!(shutdown.is_cancelled(), "the others are told to end");
        }
        let node = Node::start(settings(folder.path())).await.unwrap();
        node.shutdown().cancel();
        node.serve().await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_registered_before_the_kubelet_was_asked_what_pods_hold() {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(folder.path());
        settings.kubelet.pod_resources_socket = Some(folder.path().join("pod-resources.sock"));
        settings.health.await_first_poll = true;
        let mut node = Node::start(settings).await.unwrap();
        let observed = crate::machines::load("dgx1-v100").unwrap().observed;
        let first = observed.gpus[0].uuid.clone();
        node.apply(Event::Observed(Box::new(observed)));
        assert!(node.follows_holders, "who waits for an answer asks");
        node.apply(Event::Polled([(first, Default::default())].into()));
        assert!(lock(&node.plugins).is_empty());
        node.apply(Event::Holders(None));
        assert_eq!(lock(&node.plugins).len(), 1);
    }

    #[tokio::test]
    async fn where_polls_come_nothing_is_offered_before_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let health = HealthSettings { await_first_poll: true, ..HealthSettings::default() };
        let mut node = Node::start(NodeSettings { health, ..settings(folder.path()) }).await.unwrap();
        let observed = crate::machines::load("dgx1-v100").unwrap().observed;
        let gpu = observed.gpus[0].uuid.clone();
        node.apply(Event::Observed(Box::new(observed)));
        assert!(lock(&node.plugins).is_empty());
        node.apply(Event::Polled([(gpu, crate::state::HealthPoll::default())].into()));
        assert!(lock(&node.plugins).contains_key(&ResourceName::gpu()));
    }

    #[tokio::test]
    async fn what_kept_a_plugin_from_serving_is_forgotten_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut node = Node::start(settings(folder.path())).await.unwrap();
        let ready = node.answers().ready;
        let observed = crate::machines::load("dgx1-v100").unwrap().observed;
        node.apply(Event::Observed(Box::new(observed)));
        let waits = async {
            while !ready().unwrap_err()[0].contains("there is no") {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), waits).await.unwrap();
        node.state = NodeState::default();
        node.publish();
        assert!(withdraws(&mut node).await && lock(&node.troubles).is_empty());
    }

    #[tokio::test]
    async fn a_resource_that_is_gone_loses_its_plugin_and_gets_one_when_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let kubelet =
            linkwise_kubelet_box::KubeletBox::start(linkwise_kubelet_box::Options::new(folder.path())).unwrap();
        let mut node = Node::start(settings(folder.path())).await.unwrap();
        let ready = node.answers().ready;
        let observed = crate::machines::load("dgx1-v100").unwrap().observed;
        node.apply(Event::Observed(Box::new(observed)));
        let offering = node.state.clone();
        phase(&node, |phase| phase == Phase::Serving).await;
        assert_eq!(ready(), Ok("ready".to_owned()));
        let connected = |node: &Node| node.metrics.encode().unwrap().contains("linkwise_kubelet_connected{");
        assert!(connected(&node));
        // Nothing of it is left: the session closes and nothing else ends.
        node.state = NodeState::default();
        node.publish();
        assert!(ready().unwrap_err()[0].contains("not been looked at"));
        // Back before its plugin has ended: the next one waits for that.
        node.state = offering.clone();
        node.publish();
        assert_eq!(lock(&node.plugins).len(), 1);
        assert!(withdraws(&mut node).await);
        phase(&node, |phase| phase == Phase::Serving).await;
        kubelet.wait(|state| state.resources["nvidia.com/gpu"].registrations == 2).await.unwrap();
        node.state = NodeState::default();
        node.publish();
        assert!(withdraws(&mut node).await && lock(&node.plugins).is_empty() && !connected(&node));
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["kubelet.sock"]);
        kubelet.wait(|state| state.resources["nvidia.com/gpu"].open_streams == 0).await.unwrap();
        // The endpoints are still served: their end is none that was wished for.
        node.tasks.spawn(async { ("somebody".to_owned(), Ok(())) });
        assert!(!withdraws(&mut node).await);
    }
}
