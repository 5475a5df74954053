//! `linkwise labels`, which replaces gpu-feature-discovery: a process of its own that publishes the node's labels. It
//! needs the driver and the host's /sys, and no kubelet.
//!
//! At SIGHUP, and when the settings in the configuration file change, the process starts its tasks again; rejected
//! settings change nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use futures_util::FutureExt;
use linkwise_cluster::{Access, ApiMetrics, ApiServer, NodeFeatureSettings, NodeFeatureWriter, Pace};
use prometheus_client::registry::Registry;
use tokio::signal::unix::SignalKind;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::config;
use super::driver::{agent_of, driver_of, gate, limits_of};
use super::labels::{FileWriter, LabelSource, LabelsWatch, labels_of, report, settings_of};
use crate::config::settings::{Loaded, load, load_text};
use crate::config::{Environment, FileWatch, Interval, LabelsArgs, Settings};
use linkwise_core::reported::Reported;
use linkwise_core::state::{Event, NodeState};
use linkwise_core::topology::NodeObservation;
use linkwise_host::hwloc;
use linkwise_host::labels::{LabelMetrics, LabelsFile, host};
use linkwise_node::node::task_end;
use linkwise_node::state_loop::{StateWriter, keep_state};
use linkwise_nvml::CallError;
use linkwise_nvml::child::AgentCommand;
use linkwise_nvml::supervisor::{DriverMetrics, Idle, Release, has_no_gpu, scan};
use linkwise_system::right::Right;
use linkwise_system::signals::{LastSignals, listen};

/// The program's name at the node's gate to the driver.
const PROGRAM: &str = "gpu-feature-discovery";

/// The most events that may wait.
const MAX_EVENTS: usize = 256;

/// The longest time for the PCI bus to answer before labels are written once.
const BUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The shortest time between two checks of the NodeFeature object: shorter intervals are valid, and would keep the API
/// server busy.
const MIN_INTERVAL: Duration = Duration::from_secs(10);

/// Publishes labels until a signal ends it; with `--oneshot` publishes them once. Without an API server, or if the
/// settings choose the file, they go to the file that NFD reads.
pub fn labels(args: &LabelsArgs) -> Result<()> {
    let _log = super::start_log(&args.log)?;
    linkwise_system::block_on(program(args, Publisher::new(args).as_ref()))
}

async fn program(args: &LabelsArgs, publisher: Option<&Publisher>) -> Result<()> {
    let (mut last_signals, mut hangup) = (LastSignals::listen()?, listen(SignalKind::hangup(), "SIGHUP")?);
    let Loaded { mut settings, findings } = load(&args.flags)?;
    config::log(&findings);
    if settings.gfd_oneshot.value {
        return tokio::select! {
            written = once(args, &settings, publisher) => written,
            signal = last_signals.recv() => Err(anyhow!("{signal} before the labels were written")),
        };
    }
    // The file may have changed since it was loaded; changes from now on are followed.
    let mut file = FileWatch::of(settings.config_file.value.as_deref());
    let latest = file.read().await.and_then(|text| load_text(&args.flags, &Environment::read(), &text));
    settings = latest.map_or(settings, |loaded| loaded.settings);
    loop {
        let mut running = LabelTasks::start(args, &settings, publisher)?;
        let next = loop {
            let (reason, text) = tokio::select! {
                ended = running.ended() => return Err(ended),
                _ = last_signals.recv() => break None,
                text = file.changed() => ("the file changed", text),
                _ = hangup.recv() => ("SIGHUP", file.read().await),
            };
            let Some(Loaded { settings: next, findings }) = config::reloaded(&args.flags, text, reason) else {
                continue;
            };
            tracing::info!(why = reason, "configuration reloaded");
            config::log(&findings);
            if reason == "SIGHUP" || !next.changed(&settings).is_empty() {
                break Some(next);
            }
        };
        running.shutdown.cancel();
        running.tasks.shutdown().await;
        let Some(next) = next else {
            tracing::info!("ending; the labels stay");
            return Ok(());
        };
        settings = next;
    }
}

/// Publishes labels at the API server, as a NodeFeature object.
#[derive(Clone)]
struct Publisher {
    access: Access,
    /// The field `replaced` is shared by all starts of a process, so that the process replaces GPU Feature Discovery's
    /// object once.
    settings: NodeFeatureSettings,
}

impl Publisher {
    /// The publisher of a process; `None` without an API server.
    fn new(args: &LabelsArgs) -> Option<Self> {
        let access = args.api.access().ok()?;
        let (node, namespace) = (args.node_name.clone().unwrap_or_default(), args.namespace.clone());
        let pod = args.pod_name.clone().filter(|pod| !pod.is_empty());
        Some(Self { access, settings: NodeFeatureSettings { node, namespace, pod, replaced: Arc::default() } })
    }

    /// Publishes labels, and compares them at each interval with the published ones, until the token is cancelled or
    /// the channel is closed.
    async fn publish(self, labels: LabelsWatch, interval: Interval, shutdown: CancellationToken) -> Result<()> {
        let has_name = !self.settings.node.is_empty();
        ensure!(has_name, "--node-name (NODE_NAME) must not be empty: it names the NodeFeature object");
        let pace = Pace { reassert: interval.at_least(MIN_INTERVAL), ..Pace::DEFAULT };
        // These metrics are not served on any port.
        let server = ApiServer::new(self.access, pace, ApiMetrics::default());
        NodeFeatureWriter::new(server, self.settings).run(labels, shutdown).await;
        Ok(())
    }
}

/// The tasks of `linkwise labels` with one configuration.
struct LabelTasks {
    tasks: JoinSet<(&'static str, Result<()>)>,
    shutdown: CancellationToken,
}

impl LabelTasks {
    fn start(args: &LabelsArgs, settings: &Settings, publisher: Option<&Publisher>) -> Result<Self> {
        let (mut tasks, shutdown, metrics) = (JoinSet::new(), CancellationToken::new(), LabelMetrics::default());
        let (events, happened) = mpsc::channel(MAX_EVENTS);
        events.try_send(Event::Planned(Box::new(settings.plan()))).context("no task takes events")?;
        // These metrics are not served on any port.
        let driver_metrics = DriverMetrics::register(&mut Registry::default());
        let (idle_now, idle) = watch::channel(Idle::Waiting(String::new()));
        let state = StateWriter::new(NodeState::default());
        let snapshots = state.snapshot();
        let release = Release::new(driver_metrics.clone(), gate(settings, PROGRAM));
        let driver = driver_of(&args.nvml, &args.node.host, settings, events, driver_metrics, (idle_now, release));
        tasks.spawn(driver.run().map(|end| ("NVML driver", end)));
        tasks.spawn(keep_state(state, happened).map(|end| ("state", end)));
        let (sender, labels) = watch::channel(None);
        let (node, sysfs) = (args.node_name.as_deref(), &args.node.host.sysfs);
        let source = LabelSource::of(settings, (node, sysfs), (snapshots, idle), metrics.clone());
        let interval = settings.gfd_sleep_interval.value;
        tasks.spawn(source.run(sender).map(|end| ("labels", end)));
        if let Some(publisher) = publisher.filter(|_| settings.use_node_feature_api.value) {
            let publishing = publisher.clone().publish(labels, interval, shutdown.clone());
            tasks.spawn(publishing.map(|end| ("NodeFeature", end)));
        } else {
            let file = LabelsFile::new(&settings.gfd_output_file.value);
            if settings.use_node_feature_api.value {
                tracing::warn!(%file, "no access to the API server: the labels go to the file that NFD reads");
            }
            let writer = FileWriter { file, interval, metrics, files: watch::channel(Some(Right::default())).1 };
            tasks.spawn(writer.run(labels).map(|end| ("labels' file", end)));
        }
        Ok(Self { tasks, shutdown })
    }

    /// Waits for a task to end; none of them should.
    async fn ended(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await.map(task_end) {
            Some(Ok(name)) => anyhow!("the task '{name}' ended"),
            Some(Err(error)) => error,
            None => anyhow!("there are no tasks"),
        }
    }
}

/// Returns false if the PCI bus is listed in time and has no GPU for NVIDIA's driver.
async fn may_have_gpus(sysfs: &Path) -> bool {
    let sysfs = sysfs.to_owned();
    let look = timeout(BUS_TIMEOUT, spawn_blocking(move || has_no_gpu(&sysfs))).await;
    !look.is_ok_and(|look| look.unwrap_or(false))
}

/// Scans the node once, and writes its labels; writes nothing if the GPUs are unknown.
async fn once(args: &LabelsArgs, settings: &Settings, publisher: Option<&Publisher>) -> Result<()> {
    let sysfs = args.node.host.sysfs.clone();
    let (limits, gate) = (limits_of(&args.nvml), gate(settings, PROGRAM));
    let command = AgentCommand { limits, gate, ..agent_of(&args.node.host, Some(settings)) };
    let is_tegra = hwloc::is_tegra(&sysfs);
    let observed = match scan(&command).await {
        Ok(scan) => {
            // A GPU that NVML does not list may still exist.
            let is_known =
                !scan.gpus.is_empty() || ((scan.count == Some(0) || is_tegra) && !may_have_gpus(&sysfs).await);
            ensure!(is_known, "cannot write labels: NVML lists no GPU, but the PCI bus has one or does not answer");
            let (seen, failures) = hwloc::observe(&sysfs);
            scan.node(seen, failures)
        }
        Err(error) => {
            let no_driver = error.downcast_ref().is_some_and(|error: &CallError| error.fault().is_no_driver());
            // A Tegra counts like a missing driver, as in the NVML supervisor.
            let no_driver = no_driver || is_tegra;
            if !no_driver || settings.fail_on_init_error.value == Some(true) || may_have_gpus(&sysfs).await {
                return Err(error.context("NVML unavailable, keeping the previous labels"));
            }
            tracing::warn!(cause = format!("{error:#}"), "no NVIDIA GPU on this node, writing labels without GPUs");
            NodeObservation::default()
        }
    };
    let machine_type_file = settings.gfd_machine_type_file.value.clone();
    let host = spawn_blocking(move || host(&machine_type_file, &sysfs)).await?;
    let of_labels = settings_of(settings, args.node_name.as_deref());
    let (labels, problems) = labels_of(&observed, settings, &host, &of_labels);
    report(&mut Reported::new(), problems);
    if let Some(publisher) = publisher.filter(|_| settings.use_node_feature_api.value) {
        // The channel is closed: the publisher ends when these labels are published.
        let (_, labels) = watch::channel(Some(Arc::new(labels)));
        return publisher.clone().publish(labels, settings.gfd_sleep_interval.value, CancellationToken::new()).await;
    }
    let file = LabelsFile::new(&settings.gfd_output_file.value);
    let written = file.write(&labels).with_context(|| format!("cannot write the labels to {file}"))?;
    tracing::info!(%file, labels = labels.len(), changed = written, "labels written");
    Ok(())
}
