//! `linkwise run`: builds everything, owns every task, turns effects into calls.
//!
//! A composition root. `node` has the one loop that writes the state, and the plugins; `driver` keeps the NVML agent
//! alive; `cdi_sync` keeps CDI specs and device nodes up to date; `config` reloads the configuration; `mps` is a
//! process of its own, `linkwise mps-control-daemon`; this file starts and ends them. A task that ends unexpectedly
//! ends the process, with its cause.

mod cdi_sync;
mod clock;
mod cluster_program;
mod config;
mod dra;
mod driver;
mod duty;
mod events;
mod keeper;
mod labels;
mod labels_program;
mod log;
#[cfg(test)]
mod metrics_tests;
mod mps;
mod node;
mod observe;
mod operator;
mod page;
mod readiness;
mod simulated;
mod takeover;
mod traces;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::BoxFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::admin::{Admin, Answers, Local, LocalError, Orders};
use crate::cdi::CdiMetrics;
use crate::commands::{self, ClusterFacts, ClusterQuestions};
use crate::config::settings::{OnNvmlLoss, load, load_text};
use crate::config::{ConfigMetrics, DoctorArgs, Environment, Flags, HostArgs, NvmlArgs, RunArgs, Settings};
use crate::hwloc;
use crate::kubelet;
use crate::metrics::{self, Metrics};
use crate::mps::Layout;
use crate::nvml::child::AgentCommand;
use crate::nvml::{self, Limits};
use crate::state::{DraGpus, Event, XidPolicy};
use crate::uds::Callers;

use dra::start::Served;
use driver::metrics::DriverMetrics;
use readiness::Idle;

pub use crate::dra::Client as DraClient;
pub use cluster_program::become_cluster_program;
pub use driver::scan;
pub use events::{EventsClient, EventsSide};
pub use keeper::{HealthSettings, Kept, kept};
pub use labels::{LabelsWatch, NodeLabels};
pub use labels_program::{Publisher, labels};
pub use log::log_to_stderr;
pub use mps::mps_control_daemon;
pub use node::{Node, NodeSettings};
pub use simulated::{SimulatedFolders, start_with_dra};
pub use traces::{Span, TracesClient, TracesSide};

/// Runs a future on a runtime of our own: of one thread, which nothing holds up. Files are read and written on threads of
/// their own, and log lines by the queue's.
pub fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let result = runtime.block_on(future);
    // Dropping it would wait for threads that hang in the kernel.
    runtime.shutdown_background();
    result
}

/// Reads what the API server has about a node.
pub type NodeReader = dyn Fn(ClusterQuestions) -> BoxFuture<'static, ClusterFacts> + Send + Sync;

/// What `linkwise-cluster` adds to commands: clients of the API server, and of a collector of traces.
#[derive(Clone, Copy, Default)]
pub struct ApiClients<'a> {
    /// The writer of NodeFeature objects, for `linkwise labels`.
    pub labels: Option<&'a Publisher>,
    /// The reader of a node's objects, for `linkwise doctor`.
    pub doctor: Option<&'a NodeReader>,
    /// DRA, for `linkwise run`.
    pub dra: Option<DraSide<'a>>,
    /// The writer of events about pods, for `linkwise run`.
    pub events: Option<&'a EventsClient>,
    /// The exporter of spans, for `linkwise run`.
    pub traces: Option<&'a TracesClient>,
}

/// DRA, with a client of the API server where there is one. `linkwise` never makes one, so that its executable has no
/// code of DRA.
#[derive(Clone, Copy)]
pub struct DraSide<'a> {
    client: Option<&'a DraClient>,
    start: fn(&mut Node, dra::Given<'_>, Option<&DraClient>),
}

impl<'a> DraSide<'a> {
    /// With the writer of ResourceSlices and reader of claims; without, only what is left of DRA can be finished.
    pub fn new(client: Option<&'a DraClient>) -> Self {
        Self { client, start: dra::spawn_in }
    }
}

/// Checks this node. The program that can ask the API server takes over, where there are credentials for it.
pub fn doctor(args: &DoctorArgs, reader: Option<&NodeReader>) -> Result<ExitCode> {
    let node = args.node_name.clone().filter(|node| !node.is_empty());
    if reader.is_none() && node.is_some() && args.api.has_credentials() {
        // Where that fails, the other checks are worth as much.
        drop(become_cluster_program());
    }
    let settings = load(&Flags::default(), &Environment::read()).ok().map(|loaded| loaded.settings);
    let events = settings.as_ref().is_some_and(|settings| settings.events.value);
    let driver = settings.filter(|settings| settings.dra_gpus.value != DraGpus::None);
    let driver = driver.map(|settings| settings.dra_driver_name.value);
    let facts = reader.zip(node).map(|(reader, node)| reader(ClusterQuestions { node, driver, events }));
    block_on(commands::doctor(args, facts))
}

/// How serving ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// For good.
    Ended,
    /// To go on as `linkwise-cluster`, which has clients of the API server and of a collector of traces.
    ForClusterProgram,
    /// Another process has taken over: to idle until a signal.
    HandedOver,
}

/// Serves this node until a signal ends it, with the clients of the API server that this program has.
pub fn run(args: &RunArgs, clients: ApiClients<'_>) -> Result<()> {
    let log = log_to_stderr(&args.log.log, args.log.log_format)?;
    match block_on(serve(args, clients))? {
        End::Ended | End::HandedOver => Ok(()),
        End::ForClusterProgram => {
            // What is still to be logged would be lost.
            drop(log);
            Err(become_cluster_program())
        }
    }
}

/// When a start is over: GPUs are discovered, plugins registered, and CDI specs and labels written.
const START: Duration = Duration::from_secs(10);

/// How often an admin socket is tried that another process has.
const ADMIN_PAUSE: Duration = Duration::from_millis(100);

/// How long code that ran stays mapped at most.
const CODE: Duration = Duration::from_secs(3600);

async fn serve(args: &RunArgs, clients: ApiClients<'_>) -> Result<End> {
    // First of all: PID 1 of a container ignores every signal that it has no handler for.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let mut let_go = signal(SignalKind::user_defined1()).context("cannot listen for SIGUSR1")?;
    let mut take_up = signal(SignalKind::user_defined2()).context("cannot listen for SIGUSR2")?;
    let environment = Environment::read();
    let loaded = load(&args.flags, &environment)?;
    config::log(&loaded.findings);
    let mut settings = loaded.settings;
    let roots = [Path::new("/"), &settings.driver_root_ctr_path.value];
    if let Some(sign) = hwloc::wsl(roots.into_iter().chain(args.host.nvml_library.as_deref())) {
        let why = "they are on no PCI bus and have no device nodes of their own; use the NVIDIA device plugin there";
        anyhow::bail!("this is WSL2 ({}), whose GPUs linkwise does not serve: {why}", sign.display());
    }
    let state_dir = args.state_dir.clone().or_else(|| keeper::beside(&settings.kubelet_socket.value));
    let rights = dra::start::RightsReader::new(&settings, args.node_name.as_deref(), &args.api);
    let mut start = dra::start::start(&settings, state_dir.as_deref(), &rights).await;
    if matches!(start.served, Served::Left { .. }) && clients.dra.is_none() && !cluster_program::is_there() {
        tracing::warn!("claims are left of DRA, and linkwise-cluster, which could unprepare them, is not installed");
        start.served = Served::Nothing;
    }
    let uses_dra = start.has_plugin();
    if !start.lacks.is_empty() {
        settings.dra_gpus.value = DraGpus::None;
    }
    let uses_events = settings.events.value && args.api.is_given();
    if settings.events.value && !uses_events {
        let why = "KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig is given";
        tracing::warn!(why, "events need the API server: none are written");
    }
    let collector = settings.traces_endpoint.value.clone();
    let lacks_exporter = !collector.is_empty() && clients.traces.is_none();
    if uses_dra && clients.dra.is_none() || uses_events && clients.events.is_none() || lacks_exporter {
        return Ok(End::ForClusterProgram);
    }
    let position = takeover::Position::at(state_dir.as_deref(), &args.takeover).await;
    let admin = settings.admin_socket.value.as_deref().map(bind_admin).transpose()?.flatten();
    let admin_path = settings.admin_socket.value.clone();
    let seen = watch::Sender::default();
    let injection = cdi_sync::prepare(&settings, &args.host.sysfs, seen.subscribe(), start.has_cdi())?;
    let kubelet = kubelet::Settings {
        injection: injection.options.clone(),
        host_devices: injection.host_devices.clone(),
        pod_resources_socket: Some(settings.pod_resources_socket.value.clone()),
        callers: Callers::and(settings.allowed_uids.value.iter().copied()),
        ..kubelet::Settings::new(settings.kubelet_socket.value.clone())
    };
    let health = HealthSettings {
        xids: XidPolicy { overrides: settings.xids.value.clone(), ..args.xids.policy() },
        hold: args.nvml.health_hold_ms.map(Duration::from_millis),
        dra_grace: args.nvml.dra_grace_ms.map(Duration::from_millis),
        await_first_poll: true,
        state_dir: state_dir.clone(),
    };
    for (variable, passed_over) in args.xids.passed_over() {
        tracing::warn!(variable, passed_over, "no XID; passed over");
    }
    let mut node = Node::start(NodeSettings {
        kubelet,
        metrics_address: settings.metrics_address.value,
        numa_hints: settings.numa_hints.value,
        health,
    })
    .await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), metrics = %node.metrics_address(), "linkwise is up");
    if settings.hide_pod_names.value {
        node.metrics().placements().hide_pods();
    }
    let (owns, handed_over) = position.spawn_in(&mut node);
    if let Some(client) = clients.traces.filter(|_| !collector.is_empty()) {
        traces::spawn_in(&mut node, collector, args.node_name.clone(), client);
    }
    let metrics = node.metrics().register(DriverMetrics::register);
    let release = operator::Release::new(metrics.clone());
    node.pages.follow_release(release.follow());
    if let Some(name) = &args.node_name {
        node.pages.named(name.clone());
    }
    let beside = (metrics, node.readiness.idle().clone(), release.clone());
    let (mig, orders) = mpsc::channel(driver::MIG_REQUESTS);
    let driver = driver_of(&args.nvml, &args.host, &settings, node.events(), beside);
    let driver = driver::Driver { seen, mig: Some(orders), ..driver };
    // The series are there, on every node.
    let cdi_metrics = node.metrics().register(CdiMetrics::register);
    let specs = injection.sync.as_ref().map(cdi_sync::CdiSync::link);
    if let Some(sync) = injection.sync {
        node.hold_plugins_until(sync.ready.subscribe(), sync.awaited);
        node.spawn("CDI sync", sync.run(node.snapshot(), node.files(), cdi_metrics, node.readiness.clone()));
    }
    labels::spawn_in(&mut node, &settings, args);
    let layout = Layout::new(&args.mps.container_root);
    if let Some(side) = clients.dra.filter(|_| uses_dra) {
        let ((orders, ordered), (served, serving)) = (watch::channel(None), watch::channel(None));
        node.spawn("MPS orders", mps::follow_orders(layout.clone(), node.snapshot(), ordered, served));
        let given = dra::Given {
            settings: &settings,
            name: args.node_name.clone(),
            sysfs: &args.host.sysfs,
            state_dir: state_dir.unwrap_or_default(),
            injection: injection.options,
            host_devices: injection.host_devices,
            // Without the right to write any there are none to wait for.
            specs: specs.unwrap_or_default(),
            mig: Some(mig),
            mps: Some(crate::dra::MpsLink { orders, served: serving }),
            owns: owns.clone(),
            listed_within: args.nvml.dra_grace_ms.map(Duration::from_millis),
        };
        (side.start)(&mut node, given, side.client.filter(|_| start.has_api_server()));
    } else {
        node.spawn("MPS orders", mps::withdraw_orders(layout.clone(), node.files()));
    }
    node.readiness.dra_is_off(settings.dra_gpus.value == DraGpus::None);
    let leftovers = dra::leftovers::follow(node.snapshot(), node.readiness.clone(), start.has_sockets());
    node.spawn("leftovers of DRA", leftovers);
    if let Some(client) = clients.events.filter(|_| uses_events) {
        events::spawn_in(&mut node, &settings, args.node_name.as_deref(), client);
    }
    // Before the first GPU is discovered: the plan decides which resources it belongs to.
    let planned = Event::Planned(Box::new(settings.plan()));
    node.events().send(planned).await.context("the node takes no events")?;
    node.spawn("NVML driver", driver.run());
    let idle = node.readiness.idle().clone();
    node.spawn("MPS daemons' watch", mps::follow_daemons(layout, node.snapshot(), node.events(), idle));
    let (metrics, events) = (node.metrics().register(ConfigMetrics::register), node.events());
    let restart = CancellationToken::new();
    let dra = if start.can_serve() {
        None
    } else {
        let mut wish = config::DraWish::new(rights, node.readiness.clone(), restart.clone(), node.shutdown());
        if !start.lacks.is_empty() {
            wish.cannot(start.lacks);
        }
        Some(wish)
    };
    let reloader = config::Reloader { flags: args.flags.clone(), environment, settings, metrics, events, dra };
    node.spawn("configuration", reloader.run(hangup));
    if let Some(path) = admin_path {
        let orders = operator::orders(&node, &release);
        node.spawn("admin socket", serve_operators(path, admin, orders));
    }
    node.spawn("code of the start", give_back_code());
    let shutdown = node.shutdown();
    node.spawn("signals", async move {
        let name = loop {
            tokio::select! {
                _ = terminate.recv() => break "SIGTERM",
                _ = interrupt.recv() => break "SIGINT",
                _ = let_go.recv() => release.wish(true),
                _ = take_up.recv() => release.wish(false),
            }
        };
        tracing::info!(signal = name, "ending");
        shutdown.cancel();
        Ok(())
    });
    // Before the node's own end: a signal between the two must not be lost.
    let mut signals = [signal(SignalKind::terminate()), signal(SignalKind::interrupt())];
    let (metrics, address) = (node.metrics().clone(), node.metrics_address());
    node.serve().await?;
    // A spare starts again as one: its container does.
    if handed_over.is_cancelled() && !args.takeover.standby {
        answer_probes(&metrics, address, &mut signals).await;
        return Ok(End::HandedOver);
    }
    Ok(if restart.is_cancelled() { End::ForClusterProgram } else { End::Ended })
}

/// Binds the admin socket; `None` while another process has it, which may be about to end.
fn bind_admin(path: &Path) -> Result<Option<Local>, LocalError> {
    match Local::bind(path, Callers::default()) {
        Err(LocalError::Taken { .. }) => Ok(None),
        bound => bound.map(Some),
    }
}

/// Serves operators, as soon as no other process does at this path.
async fn serve_operators(path: PathBuf, mut bound: Option<Local>, orders: Orders) -> Result<()> {
    if bound.is_none() {
        tracing::warn!(path = %path.display(), "admin socket taken by another process, trying again");
    }
    loop {
        if let Some(local) = bound {
            local.serve(orders).await;
            return Ok(());
        }
        tokio::time::sleep(ADMIN_PAUSE).await;
        bound = bind_admin(&path)?;
    }
}

/// Answers probes until a signal comes: another process serves this node.
async fn answer_probes(metrics: &Metrics, address: SocketAddr, signals: &mut [std::io::Result<Signal>; 2]) {
    let metrics = metrics.clone();
    let answers = Answers {
        metrics: Arc::new(move || metrics.encode().ok()),
        metrics_type: metrics::CONTENT_TYPE,
        ready: Arc::new(|| Err(vec!["another linkwise has taken over this node".to_owned()])),
        page: None,
    };
    let probes = async {
        match Admin::bind(address) {
            Ok(admin) => admin.serve(answers).await,
            // The other one has the port, which is the host's.
            Err(_) => std::future::pending().await,
        }
    };
    let [terminate, interrupt] = signals;
    let ended = async |signal: &mut std::io::Result<Signal>| match signal {
        Ok(signal) => signal.recv().await,
        Err(_) => std::future::pending().await,
    };
    tokio::select! {
        () = probes => {}
        _ = ended(terminate) => {}
        _ = ended(interrupt) => {}
    }
    tracing::info!("ending, long after another linkwise has taken over");
}

/// Unmaps what only the start ran, and later what a reload ran.
async fn give_back_code() -> Result<()> {
    let mut pause = START;
    loop {
        tokio::time::sleep(pause).await;
        if let Err(error) = nvml::unmap_code() {
            tracing::debug!(%error, "the code of the start stays mapped");
        }
        pause = CODE;
    }
}

/// What follows the driver, with the options' values. `beside`: its metrics, why the node is idle, and whether an
/// operator released the driver.
fn driver_of(
    nvml: &NvmlArgs,
    host: &HostArgs,
    settings: &Settings,
    events: mpsc::Sender<Event>,
    beside: (DriverMetrics, watch::Sender<Idle>, operator::Release),
) -> driver::Driver {
    let milliseconds = Duration::from_millis;
    let (metrics, idle, release) = beside;
    driver::Driver {
        command: AgentCommand {
            poll: milliseconds(nvml.nvml_poll_ms),
            limits: limits_of(nvml),
            ..agent_of(host, Some(settings.driver_root_ctr_path.value.clone()))
        },
        settings: driver::Settings {
            unhealthy_when_away: settings.on_nvml_loss.value == OnNvmlLoss::Unhealthy,
            pause: milliseconds(nvml.nvml_pause_ms),
            grace: milliseconds(nvml.nvml_grace_ms),
            trial: milliseconds(nvml.nvml_trial_ms),
            bus_look: milliseconds(nvml.bus_look_ms),
            fail_on_init_error: settings.fail_on_init_error.value,
            poll: milliseconds(nvml.nvml_poll_ms),
            call: milliseconds(nvml.nvml_call_ms),
        },
        release,
        sysfs: host.sysfs.clone(),
        events,
        seen: watch::Sender::default(),
        metrics,
        idle,
        mig: None,
    }
}

/// How long calls may take, by the options.
fn limits_of(nvml: &NvmlArgs) -> Limits {
    let [start, call] = [nvml.nvml_start_ms, nvml.nvml_call_ms].map(Duration::from_millis);
    Limits { start, call }
}

/// How to start the process that speaks to NVML, for a command that only looks: with the driver's root that `run` would
/// search in this container.
pub fn agent_command(host: &HostArgs) -> AgentCommand {
    // Not the configuration file: it may hang.
    let loaded = load_text(&Flags::default(), &Environment::read(), "");
    agent_of(host, loaded.ok().map(|loaded| loaded.settings.driver_root_ctr_path.value))
}

/// How to start the process that speaks to NVML: this binary, or the one that became it.
fn agent_of(host: &HostArgs, driver_root: Option<PathBuf>) -> AgentCommand {
    // The link leads to the running binary, also after its file was replaced; current_exe would name a file that no
    // longer exists.
    let program = host.agent_program.as_deref().unwrap_or(Path::new("/proc/self/exe"));
    AgentCommand {
        library: host.nvml_library.clone(),
        driver_root,
        procfs: host.procfs.clone(),
        memory_mib: host.nvml_memory_mib,
        ..AgentCommand::new(program)
    }
}
