//! DRA in `linkwise run`: what is published, the plugin that prepares claims, the ledger of prepared claims, and which
//! of that is ready.
//!
//! `start` decides how much of this a process serves; `leftovers` says what is left when DRA is off.
//!
//! The pool is made from each snapshot and handed to the client of the API server (`dra::Client`, which only
//! `linkwise-cluster` has); the claims that the plugin has prepared go into the node's state as events. An API server
//! that is away changes nothing for claims that are prepared.

pub(super) mod leftovers;
pub(super) mod start;

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::clock;
use super::driver::identity;
use super::node::Node;
use super::readiness::{Part, Readiness};
use crate::cdi;
use crate::config::Settings;
use crate::dra::{
    self, ApiSide, ClaimQuery, MigRequest, MpsLink, Occurrence, Phase, PluginMetrics, SpecsLink, StoredPool,
};
use crate::errors::chain;
use crate::metrics::new;
use crate::once::Once;
use crate::publish::dra::slice::Pool;
use crate::publish::dra::{
    DraFacts, DraProblem, DraSets, DraSettings, GroupSizes, HeldDevices, LayoutCache, ServerVersion, SetsNote,
    SetsSwitch, SliceDevice, StoredSets, SwitchFacts, counters, devices, mig_counters, offered_now, room_for_sets,
};
use crate::publish::injection::{CdiOptions, HostDevices, InjectionOptions};
use crate::state::{Event, NodeState, PreparedClaim};
use crate::topology::set_members;
use crate::uds::Callers;

/// The folder of checkpoints in the state folder.
const CLAIMS: &str = "claims";

/// The lock of the DRA plugin that prepares claims, in the state folder.
const CLAIMS_LOCK: &str = "claims.lock";

/// How often that lock is tried while the last process's plugin ends.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// How often the folder of checkpoints is tried again that cannot be used.
const STORE_PAUSE: Duration = Duration::from_secs(5);

/// Queries for claims that may wait. The plugin waits with each of them.
const QUERIES: usize = 16;

/// How long slices may differ from what is wanted before the node is not ready: an API server that restarts, or asks
/// for a pause, is no fault of this node.
const GRACE: Duration = Duration::from_secs(60);

/// Lines about sockets and callers that are remembered; beyond so many none is logged.
const MOST_LINES: usize = 64;

/// What the rest of the program gives to DRA.
pub(super) struct Given<'a> {
    pub settings: &'a Settings,
    /// The node's name; it names the node's pool of devices.
    pub name: Option<String>,
    /// The host's /sys.
    pub sysfs: &'a Path,
    /// The state folder.
    pub state_dir: PathBuf,
    pub injection: InjectionOptions,
    pub host_devices: watch::Receiver<Arc<HostDevices>>,
    /// The task that writes the CDI specs.
    pub specs: SpecsLink,
    /// Where MIG devices are ordered; `None` where there is no driver to make any.
    pub mig: Option<mpsc::Sender<MigRequest>>,
    /// Where MPS control daemons are ordered; `None` where nothing could run any.
    pub mps: Option<MpsLink>,
    /// Whether no other process serves this node.
    pub owns: watch::Receiver<bool>,
    /// How long claims of the last process count as held though the kubelet does not list them; the plugin's default
    /// without it.
    pub listed_within: Option<Duration>,
}

/// Starts DRA in a node. Without a client of the API server no slices are written, and no new claim is prepared.
pub(super) fn spawn_in(node: &mut Node, given: Given<'_>, client: Option<&dra::Client>) {
    let Given { settings, name, sysfs, state_dir, injection, host_devices, specs, mig, mps, owns, .. } = given;
    let name = name.unwrap_or_default();
    let driver = settings.dra_driver_name.value.clone();
    let empty = Pool::new(driver.clone(), name.clone(), Vec::new());
    // Claims name CDI devices, whatever the device plugin does.
    let names = CdiOptions { kind: cdi::kind(cdi::GPU_CLASS), annotation_prefix: None, cri: true };
    let injection = InjectionOptions { cdi: Some(names), ..injection };
    let defaults = dra::Settings::new(driver.clone(), empty.name.clone(), state_dir.join(CLAIMS));
    let plugin = dra::Settings {
        registry: settings.dra_registry_dir.value.clone(),
        plugins: settings.dra_plugins_dir.value.clone(),
        cdi_folder: settings.cdi_dir.value.clone(),
        boot: identity(sysfs).boot,
        injection,
        host_devices,
        specs,
        mig,
        mps,
        makes_mig: settings.dra_dynamic_mig.value,
        callers: Callers::and(settings.allowed_uids.value.iter().copied()),
        has_ledger: true,
        has_api_server: client.is_some(),
        listed_within: given.listed_within.unwrap_or(defaults.listed_within),
        ..defaults
    };
    let (asks, claims) = mpsc::channel(QUERIES);
    let (observer, occurrences) = observer(node);
    let plugin = dra::Plugin::new(Arc::new(plugin), Arc::clone(&observer));
    node.readiness.add(Part::DraPlugin, Phase::WaitingForGpus.words());
    let (events, snapshot, prepared) = (node.events(), node.snapshot(), plugin.prepared_claims());
    node.spawn("DRA ledger", keep_ledger(prepared, events));
    node.spawn("DRA log", log(occurrences));
    let turn = Turn { owns, state_dir, shutdown: node.shutdown() };
    if let Some(client) = client {
        publish(node, settings, empty, (name, driver, claims), client, turn.clone());
    }
    node.spawn_until_done("DRA plugin", run_plugin(plugin, turn, snapshot, asks, observer));
}

/// Runs the plugin when its turn has come. While the folder of checkpoints cannot be used no claim is prepared, and the
/// device plugin serves all the same.
async fn run_plugin(
    plugin: dra::Plugin,
    turn: Turn,
    snapshot: watch::Receiver<Arc<NodeState>>,
    asks: mpsc::Sender<ClaimQuery>,
    observer: dra::Observer,
) -> Result<()> {
    let shutdown = turn.shutdown.clone();
    let Some(_lock) = turn.lock().await else { return Ok(()) };
    while let Err(error) = plugin.clone().run(snapshot.clone(), asks.clone(), shutdown.clone()).await {
        observer(Occurrence::Ended(chain(&error)));
        if shutdown.run_until_cancelled(tokio::time::sleep(STORE_PAUSE)).await.is_none() {
            break;
        }
    }
    Ok(())
}

/// Publishes the node's pool, and reads claims for the plugin. `named`: the node, the driver, and the plugin's queries.
fn publish(
    node: &mut Node,
    settings: &Settings,
    empty: Pool,
    named: (String, String, mpsc::Receiver<ClaimQuery>),
    client: &dra::Client,
    turn: Turn,
) {
    let (name, driver, claims) = named;
    let metrics = node.metrics().register(SliceMetrics::register);
    let (pool, wanted) = watch::channel(None);
    let (report, stored) = watch::channel(StoredPool::default());
    let sets = settings.dra_sets.value;
    let asks_version = sets != DraSets::Off || settings.dra_dynamic_mig.value;
    let side = ApiSide { node: name, driver, asks_version, pool: wanted.clone(), stored: report, claims };
    let shutdown = node.shutdown();
    let client = node.metrics().register(|registry| client(side, registry, shutdown));
    let maker = PoolMaker {
        empty,
        evict_from_lost: settings.dra_evict_lost.value,
        dynamic_mig: settings.dra_dynamic_mig.value,
        sizes: settings.dra_groups.value.clone(),
        sets,
        switch: SetsSwitch::default(),
        started: Instant::now(),
        layouts: LayoutCache::default(),
        reported: Once::new(),
        last: None,
    };
    let (note, notes) = watch::channel(None);
    node.readiness.add(Part::DraSlices, "waiting for GPUs");
    node.spawn("DRA slices", maker.run(node.snapshot(), stored.clone(), pool, note));
    node.spawn("DRA slices' report", follow_report(wanted, stored, notes, node.readiness.clone(), metrics));
    node.spawn_until_done("API server", async move {
        match turn.comes().await {
            Some(_turn) => client.await,
            None => Ok(()),
        }
    });
}

/// When this process may touch claims and slices: once no other one serves the node, and its plugin has ended.
#[derive(Clone)]
struct Turn {
    owns: watch::Receiver<bool>,
    state_dir: PathBuf,
    shutdown: CancellationToken,
}

impl Turn {
    /// Waits until this process is the owner; `None`: it is ending.
    async fn comes(mut self) -> Option<()> {
        // An error means that it is the owner for good.
        let owns = async { self.owns.wait_for(|owns| *owns).await.map(drop) };
        self.shutdown.run_until_cancelled(owns).await.map(drop)
    }

    /// Waits for the turn, and for the lock that every DRA plugin of this node holds while it lives: claims that the
    /// last one prepares are in their checkpoints then. Where there can be no lock, there is nobody to wait for.
    async fn lock(self) -> Option<Option<File>> {
        let (path, shutdown) = (self.state_dir.join(CLAIMS_LOCK), self.shutdown.clone());
        self.comes().await?;
        let Ok(file) = File::options().append(true).create(true).open(&path) else { return Some(None) };
        let free = async {
            while matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
                tokio::time::sleep(LOCK_PAUSE).await;
            }
        };
        shutdown.run_until_cancelled(free).await?;
        Some(Some(file))
    }
}

/// Enters the claims that the plugin has prepared into the node's ledger.
async fn keep_ledger(mut claims: watch::Receiver<Vec<PreparedClaim>>, events: mpsc::Sender<Event>) -> Result<()> {
    loop {
        let prepared = claims.borrow_and_update().clone();
        events.send(Event::Prepared(prepared)).await.context("the node takes no events")?;
        claims.changed().await.context("the DRA plugin is gone")?;
    }
}

/// Makes the pool of each snapshot.
struct PoolMaker {
    /// The pool without devices.
    empty: Pool,
    evict_from_lost: bool,
    /// Whether MIG devices are made for claims.
    dynamic_mig: bool,
    sizes: GroupSizes,
    sets: DraSets,
    switch: SetsSwitch,
    /// Since when the switch counts time.
    started: Instant,
    layouts: LayoutCache,
    reported: Once<DraProblem>,
    last: Option<Arc<Pool>>,
}

/// What the pool depends on beside the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Server {
    drops_taints: bool,
    drops_counters: bool,
    found: Option<StoredSets>,
    version: Option<ServerVersion>,
}

impl Server {
    fn of(stored: &StoredPool) -> Self {
        let StoredPool { drops_taints, drops_counters, found, version, .. } = *stored;
        Self { drops_taints, drops_counters, found, version }
    }
}

impl PoolMaker {
    async fn run(
        mut self,
        mut snapshot: watch::Receiver<Arc<NodeState>>,
        mut stored: watch::Receiver<StoredPool>,
        pool: watch::Sender<Option<Arc<Pool>>>,
        notes: watch::Sender<Option<SetsNote>>,
    ) -> Result<()> {
        loop {
            let state = Arc::clone(&snapshot.borrow_and_update());
            let server = Server::of(&stored.borrow_and_update());
            // The first layout of a topology costs some hundred choices.
            let made = spawn_blocking(move || {
                let problems = self.make(&state, server);
                (self, problems)
            });
            let (problems, note);
            (self, (problems, note)) = made.await.context("making the pool of DRA devices panicked")?;
            for problem in self.reported.replace(problems) {
                tracing::warn!("{problem}");
            }
            let is_news = notes.send_if_modified(|before| std::mem::replace(before, note) != note);
            if let Some(note) = note.filter(|_| is_news) {
                tracing::warn!("{note}");
            }
            let last = self.last.clone();
            pool.send_if_modified(|before| {
                let changed = *before != last;
                *before = last;
                changed
            });
            let deadline = self.switch.deadline(self.started.elapsed());
            let deadline = deadline.and_then(|deadline| self.started.checked_add(deadline));
            tokio::select! {
                changed = snapshot.changed() => changed.context("the node's state is gone")?,
                changed = stored.wait_for(|stored| Server::of(stored) != server) => {
                    drop(changed.context("the API server's client is gone")?);
                }
                () = clock::at(deadline) => {}
            }
        }
    }

    /// Makes the pool anew. There is none before the first GPU is seen, nor before the lists of holders that may let
    /// the first GPUs go to DRA: an empty pool would be written, and again with GPUs a moment later. Nor is there one
    /// before the stored slices are read: sets among them may have claims.
    fn make(&mut self, state: &NodeState, server: Server) -> (Vec<DraProblem>, Option<SetsNote>) {
        let through_dra = state.offers().through_dra();
        let may_come = state.topology().gpus().is_empty() || state.may_soon_offer_through_dra();
        if self.last.is_none() && through_dra.is_empty() && may_come {
            return (Vec::new(), None);
        }
        let facts = SwitchFacts {
            setting: self.sets,
            version: server.version,
            drops_counters: server.drops_counters,
            stored: server.found,
            held: HeldDevices::of(state, &self.empty.driver),
        };
        let (sets, note) = self.switch.next(&facts, self.started.elapsed());
        let Some(sets) = sets else { return (Vec::new(), note) };
        let room = if sets.has_counters() { room_for_sets(state.topology()) } else { 0 };
        let layout = self.layouts.layout(state.tables(), offered_now(state), &self.sizes, room);
        let settings = DraSettings {
            taints_survive: !server.drops_taints,
            evict_from_lost: self.evict_from_lost,
            sets,
            // Without counters the scheduler would give out one memory slice several times.
            dynamic_mig: self.dynamic_mig
                && !server.drops_counters
                && server.version.is_none_or(ServerVersion::has_counters),
        };
        let facts = DraFacts::of_state(state, &self.empty.driver, &layout, settings);
        let (devices, problems) = devices(&facts);
        let counters = [counters(&devices), mig_counters(&facts)].concat();
        self.last = Some(Arc::new(Pool { counters, devices, ..self.empty.clone() }));
        (problems, note)
    }
}

/// What the API server has of the slices. docs/metrics.md documents them.
#[derive(Clone, Debug)]
pub(super) struct SliceMetrics {
    slices: Family<[(&'static str, &'static str); 1], Gauge>,
    generation: Gauge,
    current: Gauge,
    drops_taints: Gauge,
    sets: Gauge,
    drops_counters: Gauge,
    drops_sharing: Gauge,
    troubles: Counter,
}

impl SliceMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        Self {
            slices: new(registry, "dra_slices", "ResourceSlices of this node: wanted, and stored by the API server"),
            generation: new(registry, "dra_pool_generation", "The generation of this node's pool as it is stored"),
            current: new(registry, "dra_slices_current", "1 while the API server stores the ResourceSlices as wanted"),
            drops_taints: new(
                registry,
                "dra_taints_dropped",
                "1 once the API server dropped a taint (feature gate DRADeviceTaints): sick GPUs are left out instead",
            ),
            sets: new(registry, "dra_set_devices", "Sets of GPUs among the devices that are wanted"),
            drops_counters: new(
                registry,
                "dra_counters_dropped",
                "1 once the API server dropped counters (feature gate DRAPartitionableDevices): neither sets nor MIG devices to be made are published",
            ),
            drops_sharing: new(
                registry,
                "dra_sharing_dropped",
                "1 once the API server dropped allowMultipleAllocations (feature gate DRAConsumableCapacity): one \
                 claim has all of a shared GPU",
            ),
            troubles: new(registry, "dra_slices_troubles", "Times that writing the ResourceSlices began to fail"),
        }
    }

    /// Shows what is wanted and stored.
    pub fn set(&self, wanted: Option<&Pool>, stored: &StoredPool) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let is_set = |device: &&SliceDevice| set_members(&device.name).is_some();
        self.sets.set(wanted.map_or(0, |pool| number(pool.devices.iter().filter(is_set).count())));
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

/// Shows what is stored: in the metrics, and as a part of the node's readiness.
async fn follow_report(
    mut wanted: watch::Receiver<Option<Arc<Pool>>>,
    mut stored: watch::Receiver<StoredPool>,
    mut notes: watch::Receiver<Option<SetsNote>>,
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
        let note = *notes.borrow_and_update();
        match &pool {
            None if now.found.is_none() => readiness.enter(&part, "waiting for GPUs and the API server", false),
            None => readiness.enter(&part, "waiting for GPUs", false),
            Some(_) if now.is_current => {
                readiness.enter(&part, "stored", true);
                if let Some(note) = note {
                    readiness.trouble(&part, note.to_string());
                }
            }
            Some(_) => {
                readiness.enter(&part, "being written", ends.is_some());
                if let Some(trouble) = now.trouble {
                    readiness.trouble(&part, trouble);
                }
            }
        }
        let far = Instant::now() + Duration::from_secs(3600);
        let changed = async {
            tokio::select! {
                changed = wanted.changed() => changed.context("the pool is gone"),
                changed = stored.changed() => changed.context("the API server's client is gone"),
                changed = notes.changed() => changed.context("the pool is gone"),
            }
        };
        if let Ok(changed) = timeout_at(ends.unwrap_or(far), changed).await {
            changed?;
        }
    }
}

/// Since when the slices that are stored are not those that are wanted.
#[derive(Clone, Copy, Debug, Default)]
struct Grace {
    was_current: bool,
    until: Option<Instant>,
}

impl Grace {
    /// Until when the node is ready though its slices are not current; `None` where they are, before they were stored
    /// once, and when [`GRACE`] is over.
    fn ends(&mut self, is_current: bool, now: Instant) -> Option<Instant> {
        if self.was_current != is_current {
            self.until = (!is_current).then(|| now + GRACE);
        }
        self.was_current = is_current;
        self.until.filter(|until| now < *until)
    }
}

/// Counts what the plugin does, and hands it to the log.
fn observer(node: &Node) -> (dra::Observer, mpsc::Receiver<Occurrence>) {
    /// Occurrences that may wait for the log; more are counted and not logged.
    const OCCURRENCES: usize = 256;
    let (metrics, readiness) = (node.metrics().register(PluginMetrics::register), node.readiness.clone());
    let (log, occurrences) = mpsc::channel(OCCURRENCES);
    let traces = node.traces();
    let observer = move |occurrence: Occurrence| {
        metrics.count(&occurrence);
        if let Some(traces) = &traces {
            traces.dra(&occurrence);
        }
        match &occurrence {
            Occurrence::Phase(phase) => {
                // A kubelet that restarts registers the plugin again by itself.
                let ready = matches!(phase, Phase::Registered | Phase::Disconnected);
                readiness.enter(&Part::DraPlugin, phase.words(), ready);
            }
            Occurrence::Waiting(why) | Occurrence::Ended(why) | Occurrence::Registered(Err(why)) => {
                readiness.trouble(&Part::DraPlugin, why.clone());
            }
            _ => {}
        }
        // Full: the log is written more slowly.
        let _ = log.try_send(occurrence);
    };
    (Arc::new(observer), occurrences)
}

/// Logs what the plugin does: a trouble once as long as it is not registered again.
async fn log(mut occurrences: mpsc::Receiver<Occurrence>) -> Result<()> {
    let mut known = Once::with_bound(MOST_LINES);
    while let Some(occurrence) = occurrences.recv().await {
        log_one(&mut known, &occurrence);
    }
    Ok(())
}

fn log_one(known: &mut Once<String>, occurrence: &Occurrence) {
    match occurrence {
        Occurrence::Registered(Ok(())) => {
            known.clear();
            tracing::info!("DRA plugin registered");
        }
        Occurrence::Registered(Err(error)) if known.is_news(format!("refused: {error}")) => {
            tracing::warn!(error, "the kubelet refuses the DRA plugin");
        }
        Occurrence::Waiting(why) if known.is_news(format!("waiting: {why}")) => {
            tracing::warn!(why, "DRA: waiting for the kubelet");
        }
        Occurrence::Ended(why) if known.is_news(format!("ended: {why}")) => {
            tracing::warn!(why, "DRA: the session with the kubelet ended");
        }
        Occurrence::NotAccepted(error) if known.is_news(format!("not accepted: {error}")) => {
            tracing::warn!(error, "DRA: a connection could not be accepted");
        }
        Occurrence::Refused { uid, pid } if known.is_news(format!("refused: {uid}")) => {
            tracing::warn!(uid, pid, "DRA: refused a caller; --allowed-uids names who may call besides root");
        }
        Occurrence::Prepared { claim, result: Ok(devices), repeated, elapsed } => {
            let (uid, devices) = (&claim.uid, devices.join(","));
            tracing::info!(%claim, uid, devices, repeated, ?elapsed, "claim prepared");
        }
        Occurrence::Prepared { claim, result: Err(error), .. } => {
            tracing::warn!(%claim, uid = claim.uid, error, "claim not prepared");
        }
        Occurrence::Unprepared { claim, result: Ok(()), elapsed } => {
            tracing::info!(%claim, uid = claim.uid, ?elapsed, "claim unprepared");
        }
        Occurrence::Unprepared { claim, result: Err(error), .. } => {
            tracing::warn!(%claim, uid = claim.uid, error, "claim not unprepared");
        }
        Occurrence::Swept { claim, result: Ok(()) } => {
            tracing::info!(%claim, uid = claim.uid, "claim unprepared: it no longer exists");
        }
        Occurrence::Swept { claim, result: Err(error) } => {
            tracing::warn!(%claim, uid = claim.uid, error, "a claim that no longer exists cannot be unprepared");
        }
        Occurrence::HalfMade { claim, result: Ok(()) } => {
            tracing::info!(%claim, uid = claim.uid, "half made MIG devices of a claim destroyed");
        }
        Occurrence::HalfMade { claim, result: Err(error) } => {
            tracing::warn!(%claim, uid = claim.uid, error, "half made MIG devices of a claim cannot be destroyed");
        }
        Occurrence::LeftBehind { claim, what } => {
            tracing::warn!(%claim, uid = claim.uid, what, "DRA is off: a claim that is over leaves something behind");
        }
        Occurrence::CheckpointIgnored { path, why, set_aside } => {
            tracing::warn!(path = %path.display(), why, set_aside, "checkpoint of a claim ignored");
        }
        _ => tracing::debug!(?occurrence, "DRA"),
    }
}

#[cfg(test)]
mod tests;
