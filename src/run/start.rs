//! Builds the node of `linkwise run` and starts its tasks, each as soon as its inputs exist.

use std::future::ready;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use futures_util::FutureExt;
use linkwise_cluster::{ApiMetrics, ApiServer, Pace};
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::cdi_sync::{self, CdiSync, PreparedInjection};
use super::config::{self, Reloader, valid_metric};
use super::dra;
use super::dra::start::{MissingRequirement, RequirementsReader};
use super::driver::{driver_of, gate};
use super::operators::{answer_probes, bind_admin, serve_operators};
use super::{condition, events, labels, mps};
use crate::config::settings::{Loaded, load};
use crate::config::{RunArgs, Settings, unknown_variables};
use linkwise_core::state::{Door, Event, XidPolicy};
use linkwise_host::cdi::CdiMetrics;
use linkwise_host::hwloc;
use linkwise_host::mps::Layout;
use linkwise_kubelet::device_plugin as kubelet;
use linkwise_kubelet::dra::CdiLink;
use linkwise_node::admin::health;
use linkwise_node::keeper::{self, HealthSettings};
use linkwise_node::node::{Node, NodeSettings};
use linkwise_node::operator;
use linkwise_node::takeover::Position;
use linkwise_nvml::supervisor::{self, DriverMetrics, MigRequest, Release};
use linkwise_system::signals::{LastSignals, listen};

/// Serves the node. Returns true if it is to be served again, through the other door.
pub(super) async fn serve(args: &RunArgs, last_signals: &mut LastSignals) -> Result<bool> {
    let (own_signals, hangup) = (LastSignals::listen()?, listen(SignalKind::hangup(), "SIGHUP")?);
    let release_order = listen(SignalKind::user_defined1(), "SIGUSR1")?;
    let resume_order = listen(SignalKind::user_defined2(), "SIGUSR2")?;
    let Loaded { mut settings, findings } = load(&args.flags)?;
    config::log(&findings);
    refuse_wsl(args, &settings)?;
    let state_dir = args.state_dir.clone().or_else(|| keeper::default_folder(&settings.kubelet_socket.value));
    let requirements = RequirementsReader::new(&settings, args.node_name.as_deref(), &args.api);
    let dra = dra::start::start(settings.dra_gpus.value, state_dir.as_deref(), &requirements).await;
    if !dra.serves {
        settings.dra_gpus.value = Door::Plugin;
    }
    warn_of_ignored(args);
    let api = args.api.access().ok().map(|access| ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default()));
    let position = Position::at(state_dir.as_deref(), &args.pod_uid).await;
    let admin_path = settings.admin_socket.value.clone();
    let admin = admin_path.as_deref().map(bind_admin).transpose()?.flatten();
    let injection = cdi_sync::prepare(&settings, &args.host.sysfs, dra.has_cdi)?;

    let mut node = start_node(args, &settings, state_dir.clone(), &injection).await?;
    let handed_over = position.spawn_in(&mut node);
    let (driver, release, mig) = make_driver(&node, args, &settings);
    let cdi = spawn_cdi_sync(&mut node, injection.sync);
    labels::spawn_in(&mut node, &settings, args);
    let mps = mps::spawn_in(&mut node, Layout::new(&args.mps.container_root), state_dir.is_some());
    let mut alive: health::Alive = Arc::new(|| ready(true).boxed());
    condition::spawn_in(&mut node, &settings, (args.node_name.as_deref(), state_dir.as_deref()), api.as_ref());
    // Without a folder for checkpoints there are no claims.
    if let Some(state_dir) = state_dir {
        let name = args.node_name.clone().unwrap_or_default();
        let seen = (injection.options, injection.host_devices);
        let mut inputs = dra::Inputs::new(&settings, name, &state_dir, seen, cdi, node.handover());
        let plugin = &mut inputs.plugin;
        (plugin.mig, plugin.mps, plugin.serves) = (Some(mig), Some(mps), dra.serves);
        plugin.listed_within = args.nvml.claims_listed_ms.map_or(plugin.listed_within, Duration::from_millis);
        // A node that neither serves DRA nor has claims has no series of DRA.
        inputs.has_metrics = dra.serves || dra.has_claims;
        let plugin = dra::spawn_in(&mut node, inputs, api.as_ref().filter(|_| dra.has_api_server));
        alive = Arc::new(move || plugin.answers().boxed());
    }
    events::spawn_in(&mut node, &settings, args.node_name.as_deref(), api.as_ref());
    // The plan has the node's door and resources, so it has to come before the first GPU is discovered, and before a
    // takeover makes the state again.
    node.apply(Event::Planned(Box::new(settings.plan())));
    let away = driver.away.subscribe();
    node.spawn("NVML driver", driver.run());
    node.spawn("release", operator::show_driver(release.follow(), away, node.readiness.clone()));
    let serve_again = follow_configuration(&mut node, args, settings, (requirements, dra.lacks), hangup);
    if let Some(path) = admin_path {
        let orders = operator::orders(&node, &release);
        node.spawn("admin socket", serve_operators(path, admin, orders));
    }
    node.spawn("signals", follow_signals(own_signals, (release_order, resume_order), release, node.shutdown()));
    if let Some(port) = args.healthcheck_port {
        node.spawn("gRPC health", health::serve(health::address(port), alive));
    }

    let (metrics, address, hosts) = (node.metrics().clone(), node.metrics_address(), node.hosts.clone());
    node.serve().await?;
    if handed_over.is_cancelled() {
        answer_probes(&metrics, (address, hosts), args.healthcheck_port, last_signals).await;
        return Ok(false);
    }
    Ok(serve_again.is_cancelled())
}

/// Passes on an operator's orders to release the driver and to resume, until a signal ends linkwise.
async fn follow_signals(
    mut last_signals: LastSignals,
    (mut release_order, mut resume_order): (Signal, Signal),
    release: Release,
    shutdown: CancellationToken,
) -> Result<()> {
    let signal = loop {
        tokio::select! {
            signal = last_signals.recv() => break signal,
            // `order` logs an order that does not reach the node's other processes.
            _ = release_order.recv() => drop(release.order(true).await),
            _ = resume_order.recv() => drop(release.order(false).await),
        }
    };
    tracing::info!(signal, "ending");
    shutdown.cancel();
    Ok(())
}

/// Warns of variables that nothing reads, and of items of the XID variables that are not XIDs.
fn warn_of_ignored(args: &RunArgs) {
    for variable in unknown_variables() {
        tracing::warn!(variable, "variable ignored: linkwise does not read it; see linkwise run --help");
    }
    for (variable, passed_over) in args.xid_policy().1 {
        tracing::warn!(variable, passed_over, "not an XID number: ignored");
    }
}

/// Fails on WSL2, whose GPUs are on no PCI bus.
fn refuse_wsl(args: &RunArgs, settings: &Settings) -> Result<()> {
    let roots = [Path::new("/"), &settings.driver_root_ctr_path.value];
    if let Some(sign) = hwloc::wsl(roots.into_iter().chain(args.host.nvml_library.as_deref())) {
        let why = "they are on no PCI bus and have no device nodes of their own; use the NVIDIA device plugin there";
        bail!("this is WSL2 ({}), whose GPUs linkwise does not serve: {why}", sign.display());
    }
    Ok(())
}

/// Starts the node, which serves /metrics and HTTP probes from now on.
async fn start_node(
    args: &RunArgs,
    settings: &Settings,
    state_dir: Option<PathBuf>,
    injection: &PreparedInjection,
) -> Result<Node> {
    let kubelet = kubelet::Settings {
        injection: injection.options.clone(),
        host_devices: injection.host_devices.clone(),
        // A pod into which the socket's folder is not mounted never gets it.
        pod_resources_socket: Some(settings.pod_resources_socket.value.clone())
            .filter(|socket| socket.parent().is_some_and(Path::is_dir)),
        ..kubelet::Settings::new(settings.kubelet_socket.value.clone())
    };
    let health = HealthSettings {
        xids: XidPolicy { overrides: settings.xids.value.clone(), ..args.xid_policy().0 },
        hold: args.nvml.health_hold_ms.map(Duration::from_millis),
        expected: settings.expected(),
        await_first_poll: true,
        await_claims: state_dir.is_some(),
        state_dir,
    };
    let node = Node::start(NodeSettings {
        kubelet,
        metrics_address: settings.metrics_address.value,
        numa_hints: settings.numa_hints.value,
        health,
    })
    .await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), metrics = %node.metrics_address(), "linkwise is up");
    if settings.hide_pod_names.value {
        node.views.hide_pods();
    }
    settings.metrics_hosts.value.iter().chain(&args.node_name).for_each(|name| node.hosts.add(name));
    if let Some(name) = &args.node_name {
        node.views.named(name.clone());
    }
    Ok(node)
}

/// Makes the supervisor of the NVML agent, with an operator's order to release the driver and the channel for requests
/// of MIG devices.
fn make_driver(
    node: &Node,
    args: &RunArgs,
    settings: &Settings,
) -> (supervisor::Driver, Release, mpsc::Sender<MigRequest>) {
    let metrics = node.metrics().register(DriverMetrics::register);
    let release = Release::new(metrics.clone(), gate(settings, "linkwise-run"));
    node.views.follow_release(release.follow());
    let (mig, requests) = mpsc::channel(supervisor::MAX_MIG_REQUESTS);
    let idle = node.readiness.idle().clone();
    let driver = driver_of(&args.nvml, &args.host, settings, node.events(), metrics, (idle, release.clone()));
    let others = node.others.subscribe();
    (supervisor::Driver { mig: Some(requests), others, ..driver }, release, mig)
}

/// Starts the task that keeps CDI specs up to date; returns its CDI devices.
pub(super) fn spawn_cdi_sync(node: &mut Node, sync: Option<CdiSync>) -> CdiLink {
    // The series exist on every node.
    let metrics = node.metrics().register(CdiMetrics::register);
    // Without the task, there are no specs to wait for.
    let Some(sync) = sync else { return watch::channel(Some(Arc::default())).1 };
    let cdi = sync.cdi();
    node.hold_plugins_until(sync.ready.subscribe(), "waiting for CDI specs");
    node.spawn("CDI sync", sync.run(node.snapshot(), node.files(), metrics, node.readiness.clone()));
    cdi
}

/// Follows the configuration. Cancels the returned token if the node is to be served again, through the other door.
fn follow_configuration(
    node: &mut Node,
    args: &RunArgs,
    settings: Settings,
    (requirements, lacks): (RequirementsReader, Vec<MissingRequirement>),
    hangup: Signal,
) -> CancellationToken {
    let serve_again = CancellationToken::new();
    let mut reloader = Reloader {
        flags: args.flags.clone(),
        settings,
        valid: node.metrics().register(valid_metric),
        events: node.events(),
        requirements,
        lacks: Vec::new(),
        readiness: node.readiness.clone(),
        serve_again: serve_again.clone(),
        shutdown: node.shutdown(),
    };
    if !lacks.is_empty() {
        reloader.record_lacks(lacks);
    }
    node.spawn("configuration", reloader.run(hangup));
    serve_again
}
