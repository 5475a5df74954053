//! One node: the loop that applies events to the state and publishes it, a plugin for each resource, the HTTP
//! endpoints.
//!
//! `run` feeds it from the driver, `demo` from a script. It owns every task of the node; a task that ends unexpectedly
//! ends the node.

pub(crate) mod standby;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use futures_util::FutureExt;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::standby::{Order, PluginStatus, ReplayLog};
use super::keeper::{HealthSettings, Keeper};
use super::observe::{self, GpuFailures};
use super::readiness::{Part, Readiness};
use super::state_loop::StateWriter;
use super::views::Views;
use crate::admin::{Admin, Answers, Hosts, PORT_PAUSES};
use crate::metrics::Metrics;
use linkwise_core::allocation::AllocationReport;
use linkwise_core::publish::view::ChoiceView;
use linkwise_core::reported::Reported;
use linkwise_core::state::{Effect, Event, HealthRecord, Holdings, NodeState, NumaHints, ResourceName};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_kubelet::device_plugin::pod_resources::{self, Holders};
use linkwise_kubelet::device_plugin::{self as kubelet, Phase, Plugin, PluginMetrics, Sources};
use linkwise_kubelet::dra::{LedgerEntry, LedgerLink};
use linkwise_nvml::supervisor::{Idle, NOT_SEEN, Others};
use linkwise_system::right::Right;

/// The most events that may be queued: a storm of XIDs waits at its sender, not in memory.
const MAX_EVENTS: usize = 256;
/// The most orders that may be queued; the takeover waits for room.
const MAX_ORDERS: usize = 8;
/// The longest time that the shutdown waits for the tasks. The whole process has a second to end, and the plugins half
/// a second.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(750);

/// A node's settings.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The settings of the device plugins and of the lists of holders.
    pub kubelet: kubelet::Settings,
    /// The address of the HTTP endpoints.
    pub metrics_address: SocketAddr,
    /// The NUMA nodes that devices report to the kubelet.
    pub numa_hints: NumaHints,
    /// The settings for deciding about health and recording it.
    pub health: HealthSettings,
}

impl NodeSettings {
    /// The usual settings, with HTTP endpoints on a free port of this machine.
    pub fn new(kubelet: kubelet::Settings) -> Self {
        let (numa_hints, health) = (NumaHints::default(), HealthSettings::default());
        Self { kubelet, metrics_address: ([127, 0, 0, 1], 0).into(), numa_hints, health }
    }
}

/// A node; it runs in [`Self::serve`].
pub struct Node {
    pub(crate) kubelet: Arc<kubelet::Settings>,
    state: StateWriter,
    /// The state before the first event; the state of a new owner begins with it.
    initial_state: NodeState,
    /// The events from which this process makes its state again when it becomes the owner. `None` if it was the owner
    /// from its start.
    replay_log: Option<ReplayLog>,
    /// True once the current state has been published; a state that is made again has not.
    is_published: bool,
    orders: mpsc::Receiver<Order>,
    pub(crate) order_sender: mpsc::Sender<Order>,
    /// The right to write the node's files, while this process has it.
    pub(crate) files: watch::Sender<Option<Right>>,
    /// The right to touch the node's claims, while this process has it.
    pub(crate) claims: watch::Sender<Option<Right>>,
    /// True while the DRA plugin of this process has its sockets.
    pub(crate) offers_dra: watch::Sender<bool>,
    /// The last scan of the node.
    pub(crate) observed: watch::Sender<Option<Arc<NodeObservation>>>,
    /// The role of the node's other linkwise processes, which the takeover tells this process's NVML supervisor.
    pub others: watch::Sender<Others>,
    /// The number of times that the plugins had to register again.
    renew: watch::Sender<u64>,
    pub(crate) plugin_status: watch::Sender<PluginStatus>,
    pub(crate) records: watch::Sender<Option<HealthRecord>>,
    events: mpsc::Receiver<Event>,
    event_sender: mpsc::Sender<Event>,
    ledger: LedgerLink,
    /// The entries of claims into the state's ledger, as the DRA plugin sends them.
    ledger_entries: mpsc::Receiver<LedgerEntry>,
    /// The received entries that wait until the state is open.
    waiting_entries: Vec<LedgerEntry>,
    /// The tokens that end the plugins, also of plugins that are ending.
    plugins: BTreeMap<ResourceName, CancellationToken>,
    holders: watch::Sender<Holders>,
    follows_holders: bool,
    checkpoint_trouble: Reported<String>,
    /// The holders through the other door that were logged.
    held_reported: Reported<String>,
    /// True while the state waits for a list of holders: the kubelet is asked often then. Each message, also a repeated
    /// one, makes the pauses short again.
    asks_often: watch::Sender<bool>,
    /// Makes the node ask the kubelet for the holders at once.
    ask_now: Arc<Notify>,
    /// The readiness of the node's parts.
    pub readiness: Readiness,
    last_report: watch::Sender<Option<Arc<AllocationReport>>>,
    /// The node's views.
    pub views: Views,
    /// The names by which the HTTP endpoints may be called.
    pub hosts: Hosts,
    metrics: Metrics,
    plugin_metrics: PluginMetrics,
    gpu_failures: GpuFailures,
    metrics_address: SocketAddr,
    /// The condition for starting plugins, and their phase until then; without one, they start at once.
    start_condition: Option<(watch::Receiver<bool>, &'static str)>,
    tasks: JoinSet<(String, Result<()>)>,
    shutdown: CancellationToken,
}

/// Waits until the port for metrics and probes is free, and binds it. The plugins serve pods meanwhile.
async fn free_port(address: SocketAddr, readiness: &Readiness) -> Admin {
    tracing::error!(%address, "metrics port taken, trying again: no metrics and no probes until it is free");
    readiness.add(Part::Endpoints, "waiting for the metrics port");
    let mut backoff = PORT_PAUSES;
    loop {
        sleep(backoff.failed()).await;
        match Admin::bind(address) {
            Ok(admin) => {
                tracing::info!(%address, "metrics port free, serving metrics and probes");
                readiness.remove(&Part::Endpoints);
                return admin;
            }
            Err(error) => readiness.trouble(&Part::Endpoints, format!("cannot listen on {address}: {error}")),
        }
    }
}

/// The name of a task that ended, or the reason why it failed.
pub fn task_end<N: fmt::Display>(ended: Result<(N, Result<()>), JoinError>) -> Result<N> {
    let (name, result) = ended.context("a task panicked")?;
    result.with_context(|| format!("the task '{name}' failed"))?;
    Ok(name)
}

fn plugin_task(resource: &ResourceName) -> String {
    format!("plugin of {resource}")
}

/// The state before the first event, as the settings define it.
fn first_state(settings: &NodeSettings) -> NodeState {
    let (health, has_lists) = (&settings.health, settings.kubelet.pod_resources_socket.is_some());
    let mut state =
        NodeState::new(settings.numa_hints).with_xids(health.xids.clone()).expecting(health.expected.clone());
    if let Some(hold) = health.hold {
        state = state.with_hold(hold);
    }
    if !has_lists {
        state = state.without_lists();
    }
    state.awaiting(|first| {
        (first.poll, first.claims) = (health.await_first_poll, health.await_claims);
        first.holders = first.poll && has_lists;
        first.scan = first.poll || first.claims;
    })
}

impl Node {
    /// Binds the endpoints and starts to serve them; no GPU is offered before the first event.
    pub async fn start(settings: NodeSettings) -> Result<Self> {
        let state = StateWriter::new(first_state(&settings));
        let readiness = Readiness::new(Idle::Waiting(NOT_SEEN.to_owned()));
        let keeper = Keeper::of(settings.health.state_dir.clone());
        let kept = keeper.read().await;
        let views = Views::new(state.snapshot(), readiness.clone());
        let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), views.clone());
        let address = settings.metrics_address;
        let admin = match Admin::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
            bound => Some(bound.with_context(|| format!("cannot listen on {address} for metrics and probes"))?),
        };
        let metrics_address = admin.as_ref().map_or(address, Admin::address);
        let (order_sender, orders) = mpsc::channel(MAX_ORDERS);
        let (event_sender, events) = mpsc::channel(MAX_EVENTS);
        let (ledger, ledger_entries) = LedgerLink::new();
        let mut node = Self {
            kubelet: Arc::new(settings.kubelet),
            initial_state: state.current.clone(),
            state,
            replay_log: None,
            is_published: false,
            orders,
            order_sender,
            files: watch::Sender::new(Some(Right::default())),
            claims: watch::Sender::new(Some(Right::default())),
            offers_dra: watch::Sender::new(true),
            observed: watch::Sender::default(),
            others: watch::Sender::default(),
            renew: watch::Sender::default(),
            plugin_status: watch::Sender::new(PluginStatus { is_wanted: true, running: 0 }),
            records: watch::Sender::new(None),
            events,
            event_sender,
            ledger,
            ledger_entries,
            waiting_entries: Vec::new(),
            plugins: BTreeMap::new(),
            holders: watch::Sender::default(),
            follows_holders: false,
            checkpoint_trouble: Reported::new(),
            held_reported: Reported::new(),
            asks_often: watch::Sender::default(),
            ask_now: Arc::default(),
            readiness,
            last_report: watch::Sender::default(),
            views,
            hosts: Hosts::of_this_pod(),
            plugin_metrics: metrics.register(PluginMetrics::register),
            gpu_failures: metrics.register(GpuFailures::register),
            metrics,
            metrics_address,
            start_condition: None,
            tasks: JoinSet::new(),
            shutdown: CancellationToken::new(),
        };
        let (answers, readiness) = (node.answers(), node.readiness.clone());
        node.spawn("metrics and probes", async move {
            let admin = match admin {
                Some(admin) => admin,
                None => free_port(address, &readiness).await,
            };
            admin.serve(answers).await;
            Ok(())
        });
        let (records, files, shutdown) = (node.records.subscribe(), node.files(), node.shutdown());
        node.spawn_until_done("health record", keeper.follow(records, files, shutdown).map(Ok));
        if let Some(record) = kept {
            node.apply(Event::Restored(Box::new(record)));
        }
        Ok(node)
    }

    /// The queue of events.
    pub fn events(&self) -> mpsc::Sender<Event> {
        self.event_sender.clone()
    }

    /// The channel through which the DRA plugin enters claims into the ledger.
    pub fn ledger(&self) -> LedgerLink {
        self.ledger.clone()
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The address of the HTTP endpoints.
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics_address
    }

    /// Follows the node's state.
    pub fn snapshot(&self) -> watch::Receiver<Arc<NodeState>> {
        self.state.snapshot()
    }

    /// Follows the report of the latest choice.
    pub fn last_report(&self) -> watch::Receiver<Option<Arc<AllocationReport>>> {
        self.last_report.subscribe()
    }

    /// Ends the node when cancelled.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Starts no plugin until `ready` is true, and shows `phase` until then: the kubelet may admit a pod as soon as a
    /// plugin has registered.
    pub fn hold_plugins_until(&mut self, ready: watch::Receiver<bool>, phase: &'static str) {
        self.start_condition = Some((ready, phase));
    }

    /// Starts a task of this node, which the shutdown aborts. A task that ends before the shutdown ends the node.
    pub fn spawn(&mut self, name: &str, task: impl Future<Output = Result<()>> + Send + 'static) {
        let shutdown = self.shutdown();
        self.spawn_until_done(name, async move { shutdown.run_until_cancelled(task).await.unwrap_or(Ok(())) });
    }

    /// Starts a task that watches the shutdown token itself, and is not aborted.
    pub fn spawn_until_done(&mut self, name: &str, task: impl Future<Output = Result<()>> + Send + 'static) {
        let name = name.to_owned();
        self.tasks.spawn(async move { (name, task.await) });
    }

    /// Serves until the shutdown, or until a task ends unexpectedly.
    pub async fn serve(mut self) -> Result<()> {
        let mut holders = self.holders.subscribe();
        let ended = loop {
            self.enter_claims();
            tokio::select! {
                () = self.shutdown.cancelled() => break Ok(()),
                Some(event) = self.state.next(&mut self.events) => {
                    // Queued orders come first: an `Adopt` that came before this event replaces the state, and would
                    // lose the event if it were carried out later.
                    while let Ok(order) = self.orders.try_recv() {
                        self.perform(order);
                    }
                    self.apply(event);
                }
                Some(entry) = self.ledger_entries.recv() => self.waiting_entries.push(entry),
                Some(order) = self.orders.recv() => self.perform(order),
                Ok(()) = holders.changed() => {
                    let now = holders.borrow_and_update().clone();
                    self.holders_changed(now);
                }
                Some(task) = self.tasks.join_next() => match task_end(task) {
                    Ok(_) if self.shutdown.is_cancelled() => break Ok(()),
                    Ok(name) if self.forget_withdrawn(&name) => {}
                    Ok(name) => break Err(anyhow!("the task '{name}' ended")),
                    Err(error) => break Err(error),
                },
            }
        };
        self.shutdown.cancel();
        // The end of the process ends a task that hangs in the kernel.
        let _ = timeout(SHUTDOWN_TIMEOUT, async { while self.tasks.join_next().await.is_some() {} }).await;
        ended
    }

    /// Applies an event to the state and carries out its effects.
    pub fn apply(&mut self, event: Event) {
        if let Event::Observed(observed) = &event {
            self.views.observed(observed);
            self.observed.send_replace(Some(Arc::new((**observed).clone())));
        }
        let changes_holders = matches!(event, Event::Allocated { .. } | Event::Prepared(_));
        if let Some(log) = &mut self.replay_log {
            log.record(&event, Instant::now());
        }
        let effects = self.state.apply(event);
        let awaits = self.state.current.ledger().awaits_listing() || self.state.current.offers().awaits_holders();
        // The kubelet's list changes soon after this event, so the pauses become short again.
        let asks_again = changes_holders && awaits;
        self.asks_often.send_if_modified(|often| std::mem::replace(often, awaits) != awaits || asks_again);
        if !self.state.current.topology().gpus().is_empty() {
            self.follow_holders();
        }
        let mut doors: BTreeMap<bool, Vec<GpuUuid>> = BTreeMap::new();
        for effect in effects {
            match effect {
                Effect::Publish => self.follow_published(),
                // `StateWriter` has logged these.
                Effect::Warn(_) | Effect::PlanProblem(_) | Effect::Shortfall(..) => {}
                Effect::HealthChanged { gpu, mig, health } => {
                    if let Some(reason) = health.reason() {
                        self.gpu_failures.count(&gpu, reason.label());
                    }
                    observe::health(&gpu, mig.as_ref(), &health);
                }
                Effect::UnknownRecoveryAction(gpu, action) => {
                    tracing::warn!(%gpu, %action, "unknown recovery action ignored");
                }
                Effect::NotCounted(gpu, reason) => {
                    tracing::warn!(%gpu, %reason, "health checks are disabled: the GPU stays healthy");
                }
                Effect::XidIgnored { gpu, code } => {
                    tracing::info!(%gpu, xid = code, "the XID is not a fault of the GPU, ignoring it");
                }
                Effect::Keep => drop(self.records.send_replace(Some(self.state.current.record()))),
                Effect::RecordIgnored(version) => {
                    tracing::warn!(version, "health record not used: another version of linkwise wrote it");
                }
                Effect::HeldElsewhere { gpu, resource, reason } => {
                    tracing::info!(%gpu, %resource, %reason, "GPU not offered under this resource until its pod ends");
                }
                Effect::HeldUnoffered(resource, ids) => {
                    let what = "pods hold devices that this node does not offer: unhealthy until the pods end";
                    tracing::warn!(%resource, devices = observe::ids_for_log(&ids), "{what}");
                }
                Effect::DoorChanged(gpu, is_with_dra) => doors.entry(is_with_dra).or_default().push(gpu),
            }
        }
        observe::plan(&self.state.current, &self.readiness);
        for (is_with_dra, gpus) in doors {
            let what = if is_with_dra { "GPUs are with DRA" } else { "GPUs are no longer with DRA" };
            tracing::info!(gpus = observe::ids_for_log(&gpus), "{what}");
        }
    }

    /// Enters claims into the ledger: plans each entry by the current state, applies the plan's event, and answers. An
    /// entry that gives hardware waits until the state is open.
    fn enter_claims(&mut self) {
        for entry in std::mem::take(&mut self.waiting_entries) {
            if entry.answer.is_closed() {
                // Its caller no longer waits.
            } else if entry.gives_hardware && !self.state.current.is_open() {
                self.waiting_entries.push(entry);
            } else {
                let planned = (entry.plan)(&self.state.current).map(|(event, prepared)| {
                    self.apply(event);
                    prepared
                });
                // If the caller has just gone away, the kubelet asks again, or a sweep ends the claim.
                let _ = entry.answer.send(planned);
            }
        }
    }

    /// Follows the published state.
    fn follow_published(&mut self) {
        self.is_published = true;
        self.match_plugins();
        observe::held(&self.state.current, &self.readiness, &mut self.held_reported);
    }

    /// Starts and ends plugins, so that each resource has one while plugins are wanted. A resource that comes back
    /// while its plugin is ending gets the next plugin once that one has ended: two plugins of one name would take the
    /// kubelet's one endpoint from each other.
    fn match_plugins(&mut self) {
        let are_wanted = self.plugin_status.borrow().is_wanted && self.is_published;
        let offered = self.state.current.offers().resources().keys().filter(|_| are_wanted);
        let resources: Vec<ResourceName> = offered.cloned().collect();
        for (resource, end) in self.plugins.iter().filter(|(resource, _)| !resources.contains(resource)) {
            end.cancel();
            self.readiness.remove(&Part::Plugin(resource.clone()));
        }
        for resource in resources {
            if !self.plugins.contains_key(&resource) {
                self.start_plugin(resource);
            }
        }
        if are_wanted {
            self.readiness.remove(&Part::Owner);
        }
        let plugins = self.plugins.len();
        self.plugin_status.send_if_modified(|status| std::mem::replace(&mut status.running, plugins) != plugins);
    }

    fn start_plugin(&mut self, resource: ResourceName) {
        self.plugin_metrics.offered(&resource);
        let sources = Sources {
            snapshot: self.state.snapshot(),
            metrics: self.plugin_metrics.clone(),
            readiness: self.readiness.clone(),
            events: self.events(),
            chosen: self.choice_recorder(),
            renew: self.renew.subscribe(),
        };
        let plugin = Plugin::new(resource.clone(), Arc::clone(&self.kubelet), sources);
        let (end, condition) = (self.shutdown.child_token(), self.start_condition.clone());
        let waits = condition.as_ref().filter(|(ready, _)| !*ready.borrow());
        let phase = waits.map_or(Phase::WaitingForKubelet.words(), |(_, phase)| phase);
        self.readiness.add(Part::Plugin(resource.clone()), phase);
        self.plugins.insert(resource.clone(), end.clone());
        self.spawn_until_done(&plugin_task(&resource), async move {
            if let Some((mut ready, _)) = condition {
                // An error means that the node is ending.
                let _ = end.run_until_cancelled(ready.wait_for(|ready| *ready)).await;
            }
            Ok(plugin.run(end).await?)
        });
    }

    /// Starts the task that asks the kubelet for the devices of containers, unless it runs. The first device list waits
    /// for the answer.
    fn follow_holders(&mut self) {
        let Some(sources) = self.kubelet.holder_sources() else { return };
        if !self.follows_holders {
            self.follows_holders = true;
            let (holders, often, shutdown) = (self.holders.clone(), self.asks_often.subscribe(), self.shutdown());
            let ask_now = Arc::clone(&self.ask_now);
            self.spawn_until_done("holders of devices", async move {
                pod_resources::follow_holders(&sources, holders, often, ask_now, shutdown).await;
                Ok(())
            });
        }
    }

    fn holders_changed(&mut self, holders: Holders) {
        for cause in self.checkpoint_trouble.replace(holders.without_init_containers) {
            tracing::warn!(cause, "cannot read the kubelet's checkpoint: devices of init containers are unknown");
        }
        // While the previous linkwise still serves, it may give a GPU to a pod that this list lacks.
        let is_early = self.readiness.all().contains_key(&Part::Predecessor);
        self.apply(Event::Holders(holders.held.map(|held| Holdings { is_early, ..held })));
    }

    /// Forgets a plugin that was told to end. Returns true if the ended task ran such a plugin.
    fn forget_withdrawn(&mut self, task: &str) -> bool {
        let ended = |(resource, end): (&ResourceName, &CancellationToken)| {
            (end.is_cancelled() && plugin_task(resource) == task).then(|| resource.clone())
        };
        let Some(resource) = self.plugins.iter().find_map(ended) else { return false };
        self.plugins.remove(&resource);
        self.plugin_metrics.withdrawn(&resource);
        if self.plugin_status.borrow().is_wanted {
            tracing::info!(%resource, "resource withdrawn: this node has no device of it any more");
        }
        self.match_plugins();
        true
    }

    /// The function that publishes the report of each choice, and records it in the views.
    fn choice_recorder(&self) -> kubelet::Chosen {
        let (last_report, views, clock) = (self.last_report.clone(), self.views.clone(), self.state.clock);
        Arc::new(move |resource, report, narrowed| {
            last_report.send_replace(Some(Arc::clone(report)));
            views.chosen(ChoiceView::of(clock.now().as_secs(), resource, report, narrowed));
        })
    }

    fn answers(&self) -> Answers {
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        Answers {
            metrics: Arc::new(move || metrics.encode().ok()),
            ready: Arc::new(move || readiness.summary()),
            hosts: self.hosts.clone(),
            page: Some(self.views.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
