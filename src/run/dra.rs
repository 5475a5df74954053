//! DRA in `linkwise run`: the published devices, the plugin that prepares claims, and the readiness of these parts.
//!
//! `start` decides what a process does for DRA.
//!
//! The pool is made from each snapshot and handed to the writer of slices; the plugin enters claims into the node's
//! ledger. While the API server is unavailable, prepared claims stay as they are.

pub(super) mod start;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::FutureExt;
use linkwise_cluster::{ApiServer, ClaimReader, SliceWriter, StoredPool};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{
    DraFacts, DraProblem, DraSettings, LayoutCache, ServerVersion, devices, mig_counters, offered_now,
};
use linkwise_core::publish::injection::{CdiOptions, HostDevices, InjectionOptions};
use linkwise_core::reported::Reported;
use linkwise_core::state::{DRA_DRIVER, NodeState};
use linkwise_host::cdi;
use linkwise_kubelet::dra::{self, CdiLink, Handover, Phase, PluginMetrics, ReadClaim};
use linkwise_node::node::Node;
use linkwise_node::readiness::{Part, Readiness};
use linkwise_nvml::supervisor::boot;
use linkwise_system::clock::at;
use linkwise_system::metrics::{new, number};
use linkwise_system::{or_never, send_if_new};

/// The folder of checkpoints in the state folder.
const CLAIMS: &str = "claims";

/// The time for which slices may differ from the wanted ones before the node is not ready: an API server that restarts,
/// or asks for a pause, is not a fault of this node.
const GRACE: Duration = Duration::from_secs(60);

/// The inputs of DRA from the rest of the program, made once for each start.
pub(super) struct Inputs<'a> {
    pub settings: &'a Settings,
    /// The node's pool of devices, empty.
    pub pool: Pool,
    pub plugin: dra::Settings,
    /// The duties of this process's plugin among several linkwise of the node.
    pub handover: Handover,
    /// True if the plugin's metrics are shown.
    pub has_metrics: bool,
}

impl<'a> Inputs<'a> {
    /// Inputs for a plugin that serves claims, cannot order MIG devices or MPS, and has its metrics shown.
    pub fn new(
        settings: &'a Settings,
        name: String,
        state_dir: &Path,
        (injection, host_devices): (InjectionOptions, watch::Receiver<Arc<HostDevices>>),
        cdi: CdiLink,
        handover: Handover,
    ) -> Self {
        let pool = Pool::new(name, Vec::new());
        // Claims get copies of CDI devices, also if the device plugin does without CDI.
        let names = CdiOptions { kind: cdi::kind(cdi::GPU_CLASS), annotation_prefix: None, cri: true };
        let plugin = dra::Settings {
            registry: settings.dra_registry_dir.value.clone(),
            plugins: settings.dra_plugins_dir.value.clone(),
            cdi_folder: settings.cdi_dir.value.clone(),
            boot: boot(),
            injection: InjectionOptions { cdi: Some(names), ..injection },
            host_devices,
            cdi,
            makes_mig: settings.dra_dynamic_mig.value,
            ..dra::Settings::new(DRA_DRIVER, &pool.name, state_dir.join(CLAIMS))
        };
        Self { settings, pool, plugin, handover, has_metrics: true }
    }
}

/// Starts DRA in a node. Without a client of the API server no slices are written, and no new claim is prepared. If
/// GPUs go through the device plugin, the parts of DRA do not count for readiness, and the node's slices are emptied
/// while the kubelet has the plugin registered; without the registration the kubelet deletes them. Returns the plugin.
pub(super) fn spawn_in(node: &mut Node, inputs: Inputs<'_>, api: Option<&ApiServer>) -> dra::Plugin {
    let Inputs { settings, pool: empty, plugin, handover, has_metrics } = inputs;
    let serves = plugin.serves;
    let (pool, published) = watch::channel(None);
    let plugin = dra::Settings { read_claim: api.map(read_claim), published, ..plugin };
    let metrics = match has_metrics {
        true => node.metrics().register(PluginMetrics::register),
        false => PluginMetrics::register(&mut Registry::default()),
    };
    let plugin = dra::Plugin::new(Arc::new(plugin), metrics, node.readiness.clone());
    if serves {
        node.readiness.add(Part::DraPlugin, Phase::WaitingForGpus.words());
    }
    if let Some(api) = api {
        node.metrics().register(|registry| api.metrics().register_in(registry));
        if serves {
            publish(node, settings, (empty, pool), api, &plugin);
        } else {
            let name = empty.node.clone();
            // The writer would end early if its sender were dropped before it.
            let channels = (pool.subscribe(), watch::Sender::default());
            pool.send_replace(Some(Arc::new(empty)));
            let writing = write_slices(api.another(), name, channels, &plugin, node.shutdown());
            node.spawn_until_done("writer of slices", async move {
                writing.await;
                drop(pool);
                Ok(())
            });
        }
    }
    let running = plugin.clone().run(node.snapshot(), node.ledger(), handover, node.shutdown());
    node.spawn_until_done("DRA plugin", running.map(Ok));
    plugin
}

fn read_claim(api: &ApiServer) -> ReadClaim {
    let reader = Arc::new(ClaimReader::new(api.another()));
    Arc::new(move |claim| {
        let reader = Arc::clone(&reader);
        async move { reader.read(&claim).await }.boxed()
    })
}

fn publish(
    node: &mut Node,
    settings: &Settings,
    (empty, pool): (Pool, watch::Sender<Option<Arc<Pool>>>),
    api: &ApiServer,
    plugin: &dra::Plugin,
) {
    let metrics = node.metrics().register(SliceMetrics::register);
    let wanted = pool.subscribe();
    let (report, stored) = watch::channel(StoredPool::default());
    let name = empty.node.clone();
    let writing = write_slices(api.another(), name, (wanted.clone(), report), plugin, node.shutdown());
    let maker = PoolMaker {
        empty,
        evict_from_lost: settings.dra_evict_lost.value,
        dynamic_mig: settings.dra_dynamic_mig.value,
        layouts: LayoutCache::default(),
        reported: Reported::new(),
        last: None,
    };
    node.readiness.add(Part::DraSlices, "waiting for GPUs");
    node.spawn("DRA slices", maker.run(node.snapshot(), stored.clone(), pool));
    node.spawn("DRA slices' report", follow_report(wanted, stored, node.readiness.clone(), metrics));
    node.spawn_until_done("writer of slices", writing.map(Ok));
}

/// Writes slices whenever this process has the right to touch claims: two processes would undo each other's slices.
/// Ends at `shutdown`. Sends no request before the plugin first binds its sockets.
fn write_slices(
    api: ApiServer,
    node: String,
    (wanted, report): (watch::Receiver<Option<Arc<Pool>>>, watch::Sender<StoredPool>),
    plugin: &dra::Plugin,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + use<> {
    let (mut right, mut phase) = (plugin.claims_right(), plugin.phase());
    async move {
        if shutdown.run_until_cancelled(phase.wait_for(|phase| *phase >= Phase::Binding)).await.is_none() {
            return;
        }
        loop {
            // An error means that the node is ending.
            let held = shutdown.run_until_cancelled(right.wait_for(Option::is_some)).await;
            let Some(Ok(held)) = held.map(|held| held.map(|held| held.clone())) else { return };
            let registered = watch::Sender::new(false);
            let writer = SliceWriter::new(api.another(), node.clone(), registered.subscribe(), report.clone());
            let follows = async {
                loop {
                    send_if_new(&registered, *phase.borrow_and_update() == Phase::Registered);
                    or_never(phase.changed()).await;
                }
            };
            tokio::select! {
                () = follows => {}
                () = writer.run(api.another(), wanted.clone(), shutdown.clone()) => return,
                _ = right.wait_for(Option::is_none) => {}
            }
            drop(held);
        }
    }
}

/// Makes the node's pool from the latest snapshot.
struct PoolMaker {
    empty: Pool,
    evict_from_lost: bool,
    /// Set if MIG devices are made for claims.
    dynamic_mig: bool,
    layouts: LayoutCache,
    reported: Reported<DraProblem>,
    last: Option<Arc<Pool>>,
}

impl PoolMaker {
    async fn run(
        mut self,
        mut snapshot: watch::Receiver<Arc<NodeState>>,
        mut stored: watch::Receiver<StoredPool>,
        pool: watch::Sender<Option<Arc<Pool>>>,
    ) -> Result<()> {
        loop {
            let state = Arc::clone(&snapshot.borrow_and_update());
            let server = stored.borrow_and_update().clone();
            // The first layout of a topology takes some hundred choices, too long for a thread of the runtime.
            let made = spawn_blocking(move || {
                let problems = self.make(&state, &server);
                (self, problems)
            });
            let problems;
            (self, problems) = made.await.context("making the pool of DRA devices panicked")?;
            for problem in self.reported.replace(problems) {
                tracing::warn!("{problem}");
            }
            send_if_new(&pool, self.last.clone());
            tokio::select! {
                changed = snapshot.changed() => changed.context("the node's state is gone")?,
                changed = stored.changed() => changed.context("the API server's client is gone")?,
            }
        }
    }

    /// Makes the pool again. There is no pool
    ///
    /// - before the first GPU is seen, and while the kubelet's next lists may let the first GPUs go to DRA: an empty
    ///   pool would be written, and one with GPUs a moment later
    /// - before the server's slices and version are read: MIG devices that could be made for claims would go and
    ///   come back
    /// - while the ledger lacks the claims of the checkpoints: their devices would be published as free
    fn make(&mut self, state: &NodeState, server: &StoredPool) -> Vec<DraProblem> {
        if !state.ledger().has_all_claims() {
            self.last = None;
            return Vec::new();
        }
        let through_dra = state.offers().through_dra();
        let may_change_soon = state.topology().gpus().is_empty() || state.may_soon_offer_through_dra();
        if !server.is_read || self.last.is_none() && through_dra.is_empty() && may_change_soon {
            return Vec::new();
        }
        let layout = self.layouts.layout(state.tables(), offered_now(state));
        let settings = DraSettings {
            taints_survive: !server.drops_taints,
            evict_from_lost: self.evict_from_lost,
            // Without counters the scheduler would give out one memory slice several times.
            dynamic_mig: self.dynamic_mig
                && !server.drops_counters
                && server.version.is_none_or(ServerVersion::has_taints_and_counters),
        };
        let facts = DraFacts::of_state(state, &layout, settings);
        let (devices, problems) = devices(&facts);
        self.last = Some(Arc::new(Pool { counters: mig_counters(&facts), devices, ..self.empty.clone() }));
        problems
    }
}

/// The metrics about the slices at the API server. docs/metrics.md documents them.
#[derive(Clone, Debug)]
pub(super) struct SliceMetrics {
    slices: Family<[(&'static str, &'static str); 1], Gauge>,
    generation: Gauge,
    current: Gauge,
    drops_taints: Gauge,
    drops_counters: Gauge,
    drops_sharing: Gauge,
    troubles: Counter,
}

impl SliceMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let taints = "1 if the API server drops taints (feature gate DRADeviceTaints): sick GPUs are left out instead";
        let counters = "1 once the API server dropped counters (feature gate DRAPartitionableDevices): MIG devices \
                        that claims could have made are not published";
        let sharing = "1 once the API server dropped allowMultipleAllocations (feature gate DRAConsumableCapacity): \
                       one claim has all of a shared GPU";
        Self {
            slices: new(registry, "dra_slices", "ResourceSlices of this node: wanted, and stored by the API server"),
            generation: new(registry, "dra_pool_generation", "The generation of this node's pool as it is stored"),
            current: new(registry, "dra_slices_current", "1 while the API server stores the ResourceSlices as wanted"),
            drops_taints: new(registry, "dra_taints_dropped", taints),
            drops_counters: new(registry, "dra_counters_dropped", counters),
            drops_sharing: new(registry, "dra_sharing_dropped", sharing),
            troubles: new(registry, "dra_slices_troubles", "Times that writing the ResourceSlices began to fail"),
        }
    }

    /// Shows the wanted and the stored slices.
    pub fn set(&self, wanted: Option<&Pool>, stored: &StoredPool) {
        let wanted = wanted.map_or(0, |pool| number(pool.slices(0).len()));
        for (state, count) in [("wanted", wanted), ("stored", number(stored.slices))] {
            self.slices.get_or_create(&[("state", state)]).set(count);
        }
        self.generation.set(i64::try_from(stored.generation).unwrap_or(i64::MAX));
        self.current.set(stored.is_current.into());
        self.drops_taints.set(stored.drops_taints.into());
        self.drops_counters.set(stored.drops_counters.into());
        self.drops_sharing.set(stored.drops_sharing.into());
    }
}

/// Shows the stored slices: in the metrics, and as a part of the node's readiness.
async fn follow_report(
    mut wanted: watch::Receiver<Option<Arc<Pool>>>,
    mut stored: watch::Receiver<StoredPool>,
    readiness: Readiness,
    metrics: SliceMetrics,
) -> Result<()> {
    let part = Part::DraSlices;
    let (mut grace, mut had_trouble) = (Grace::default(), false);
    loop {
        let pool = wanted.borrow_and_update().clone();
        let now = stored.borrow_and_update().clone();
        metrics.set(pool.as_deref(), &now);
        if now.trouble.is_some() && !had_trouble {
            metrics.troubles.inc();
        }
        had_trouble = now.trouble.is_some();
        let ends = grace.ends(now.is_current, Instant::now());
        match &pool {
            None if !now.is_read => readiness.enter(&part, "waiting for GPUs and the API server", false),
            None => readiness.enter(&part, "waiting for GPUs", false),
            Some(_) if now.is_current => readiness.enter(&part, "stored", true),
            Some(_) => {
                let words =
                    if now.awaits_kubelet { "waiting for the kubelet to register the plugin" } else { "being written" };
                readiness.enter(&part, words, ends.is_some());
                if let Some(trouble) = now.trouble {
                    readiness.trouble(&part, trouble);
                }
            }
        }
        tokio::select! {
            changed = wanted.changed() => changed.context("the pool is gone")?,
            changed = stored.changed() => changed.context("the API server's client is gone")?,
            () = at(ends) => {}
        }
    }
}

/// The time for which the node stays ready although its stored slices differ from the wanted ones.
#[derive(Clone, Copy, Debug, Default)]
struct Grace {
    was_current: bool,
    until: Option<Instant>,
}

impl Grace {
    /// The end of the time for which the node is ready although its slices are not current. `None` if they are current,
    /// before they were stored once, and after [`GRACE`].
    fn ends(&mut self, is_current: bool, now: Instant) -> Option<Instant> {
        if self.was_current != is_current {
            self.until = (!is_current).then(|| now + GRACE);
        }
        self.was_current = is_current;
        self.until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests;
