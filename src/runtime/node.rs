//! One node: the loop that writes the inventory, a plugin for each resource, the HTTP endpoints.
//!
//! `run` feeds it from the driver, `demo` from a script; everything in between is the same.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::observe;
use crate::admin::{Admin, Answers};
use crate::allocation::AllocationReport;
use crate::inventory::{Effect, Event, Health, Inventory, NumaHints, ResourceName, Timestamp};
use crate::kubelet::{self, Occurrence, Phase, Plugin, Sources};
use crate::metrics::{self, Metrics};

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
}

/// Both ends of a bounded queue.
type Queue<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);

/// Where each plugin is.
type Phases = Arc<Mutex<BTreeMap<ResourceName, watch::Receiver<Phase>>>>;

/// What keeps each plugin from serving, for /readyz; gone while it serves.
type Troubles = Arc<Mutex<BTreeMap<ResourceName, String>>>;

/// A node; it lives in [`Self::serve`].
pub struct Node {
    kubelet: Arc<kubelet::Settings>,
    state: Inventory,
    snapshots: watch::Sender<Arc<Inventory>>,
    events: Queue<Event>,
    occurrences: Queue<(ResourceName, Occurrence)>,
    phases: Phases,
    troubles: Troubles,
    idle: watch::Sender<String>,
    last_report: watch::Sender<Option<Arc<AllocationReport>>>,
    metrics: Arc<Metrics>,
    metrics_address: SocketAddr,
    tasks: JoinSet<(String, Result<()>)>,
    shutdown: CancellationToken,
}

/// Only whole entries are ever written: a panic elsewhere leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Binds the endpoints and starts to serve them; nothing is offered before the first event.
    pub async fn start(settings: NodeSettings) -> Result<Self> {
        let (snapshots, inventory) = watch::channel(Arc::new(Inventory::new(settings.numa_hints)));
        let metrics = Arc::new(Metrics::new(env!("CARGO_PKG_VERSION"), inventory));
        let admin = Admin::bind(settings.metrics_address).await?;
        let metrics_address = admin.address();
        let phases = Phases::default();
        let idle = watch::Sender::new("the GPUs have not been looked at yet".to_owned());
        let mut node = Self {
            kubelet: Arc::new(settings.kubelet),
            state: Inventory::new(settings.numa_hints),
            snapshots,
            events: mpsc::channel(EVENTS),
            occurrences: mpsc::channel(OCCURRENCES),
            phases,
            troubles: Troubles::default(),
            idle,
            last_report: watch::Sender::default(),
            metrics,
            metrics_address,
            tasks: JoinSet::new(),
            shutdown: CancellationToken::new(),
        };
        let (answers, shutdown) = (node.answers(), node.shutdown());
        node.spawn("metrics and probes", async move {
            admin.serve(answers, shutdown).await;
            Ok(())
        });
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
    pub fn inventory(&self) -> watch::Receiver<Arc<Inventory>> {
        self.snapshots.subscribe()
    }

    /// Follows the report of the latest choice.
    pub fn last_report(&self) -> watch::Receiver<Option<Arc<AllocationReport>>> {
        self.last_report.subscribe()
    }

    /// Ends the node when cancelled.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Why there is nothing to offer, where there is not: for /readyz.
    pub(super) fn idle_reason(&self) -> watch::Sender<String> {
        self.idle.clone()
    }

    /// Starts a task of this node. One that ends before the shutdown ends the node.
    pub fn spawn(&mut self, name: impl Into<String>, task: impl Future<Output = Result<()>> + Send + 'static) {
        let name = name.into();
        self.tasks.spawn(async move { (name, task.await) });
    }

    /// Lives until the shutdown, or until something ends that should not.
    pub async fn serve(mut self) -> Result<()> {
        let mut told = BTreeSet::new();
        let ended = loop {
            tokio::select! {
                () = self.shutdown.cancelled() => break Ok(()),
                Some(event) = self.events.1.recv() => self.apply(event),
                Some((resource, occurrence)) = self.occurrences.1.recv() => observe::log(&resource, &occurrence, &mut told),
                Some(task) = self.tasks.join_next() => match task {
                    Ok((_, Ok(()))) if self.shutdown.is_cancelled() => break Ok(()),
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

    fn apply(&mut self, event: Event) {
        // A clock before 1970 is no reason to end; then all moments are that one.
        let now: Timestamp = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (state, effects) = std::mem::take(&mut self.state).apply(event, now);
        self.state = state;
        for effect in effects {
            match effect {
                Effect::Publish => self.publish(),
                Effect::HealthChanged { gpu, health: Health::Healthy } => tracing::info!(%gpu, "the GPU is healthy"),
                Effect::HealthChanged { gpu, health: Health::Unhealthy { reason, .. } } => {
                    tracing::warn!(%gpu, %reason, "the GPU is unhealthy");
                }
                Effect::XidIgnored { gpu, code } => {
                    tracing::info!(%gpu, xid = code, "an XID of an application's making; the GPU stays healthy");
                }
                Effect::Warn(warning) => tracing::warn!("{warning}"),
                Effect::PlanProblem(problem) => tracing::warn!("{problem}"),
            }
        }
    }

    /// Hands the state to everybody who follows it; a resource that is new gets its plugin.
    fn publish(&mut self) {
        self.snapshots.send_replace(Arc::new(self.state.clone()));
        let resources: Vec<ResourceName> = self.state.resources().keys().cloned().collect();
        for resource in resources {
            if self.phases().contains_key(&resource) {
                continue;
            }
            self.metrics.resource(&resource);
            let sources = Sources { inventory: self.snapshots.subscribe(), observer: self.observer() };
            let plugin = Plugin::new(resource.clone(), Arc::clone(&self.kubelet), sources);
            self.phases().insert(resource.clone(), plugin.phase());
            let shutdown = self.shutdown();
            self.spawn(format!("plugin of {resource}"), async move { Ok(plugin.run(shutdown).await?) });
        }
    }

    fn phases(&self) -> MutexGuard<'_, BTreeMap<ResourceName, watch::Receiver<Phase>>> {
        lock(&self.phases)
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

    fn answers(&self) -> Answers {
        let (metrics, phases, idle) = (Arc::clone(&self.metrics), Arc::clone(&self.phases), self.idle.subscribe());
        let troubles = Arc::clone(&self.troubles);
        let ready = move || {
            let (phases, troubles) = (lock(&phases), lock(&troubles));
            if phases.is_empty() {
                return Err(vec![idle.borrow().clone()]);
            }
            let waiting: Vec<String> = phases
                .iter()
                .map(|(resource, phase)| (resource, *phase.borrow()))
                .filter(|(_, phase)| *phase != Phase::Serving)
                .map(|(resource, phase)| match troubles.get(resource) {
                    Some(why) => format!("{resource}: {}; {why}", phase.words()),
                    None => format!("{resource}: {}", phase.words()),
                })
                .collect();
            if waiting.is_empty() { Ok(()) } else { Err(waiting) }
        };
        Answers {
            metrics: Arc::new(move || metrics.encode().ok()),
            metrics_type: metrics::CONTENT_TYPE,
            ready: Arc::new(ready),
        }
    }
}
