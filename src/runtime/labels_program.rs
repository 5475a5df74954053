//! `linkwise labels`, which stands for gpu-feature-discovery: a process of its own that publishes the node's labels. It
//! needs the driver and the host's /sys, and no kubelet.
//!
//! SIGHUP, and a change of the configuration file, begin anew with the new settings; settings that are rejected change
//! nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::clock::Clock;
use super::config;
use super::driver::has_no_gpu;
use super::driver::metrics::DriverMetrics;
use super::labels::{FileWriter, LabelSource, LabelsWatch, report, settings_of};
use super::node::task_end;
use super::operator::Release;
use super::readiness::Idle;
use crate::config::settings::{ConfigError, load, load_text};
use crate::config::{Environment, FileWatch, Interval, Labels as Options, LabelsArgs, Settings};
use crate::errors::chain;
use crate::hwloc;
use crate::labels::{LabelMetrics, LabelsFile, host};
use crate::nvml::CallError;
use crate::nvml::child::AgentCommand;
use crate::once::Once;
use crate::publish::labels::{LabelFacts, labels as labels_of};
use crate::state::{DriverVersions, Effect, Event, NodeState};
use crate::topology::{NodeObservation, NodeTopology};

/// Another way out than the file: publishes labels, and compares them with what was published at each interval, until
/// the token is cancelled.
pub type Publisher = dyn Fn(LabelsWatch, Interval, CancellationToken) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// How long the host's files may take before one-off labels.
const FILES: Duration = Duration::from_secs(5);

/// Events that may wait.
const EVENTS: usize = 256;

/// Publishes labels until a signal ends it; with `--oneshot` writes them once. `publisher` is the one of NodeFeature
/// objects, where this program has one.
pub fn labels(args: &LabelsArgs, publisher: Option<&Publisher>) -> Result<()> {
    let _log = super::log_to_stderr(&args.log.log, args.log.log_format)?;
    super::block_on(program(args, publisher))
}

async fn program(args: &LabelsArgs, publisher: Option<&Publisher>) -> Result<()> {
    let mut end = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut quit = signal(SignalKind::quit()).context("cannot listen for SIGQUIT")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let environment = Environment::read();
    let loaded = load(&args.flags, &environment)?;
    config::log(&loaded.findings);
    let mut settings = loaded.settings;
    if publisher.is_none() && Options::of(&settings).node_feature_api && args.api.server.is_given() {
        let error = super::become_cluster_program();
        tracing::warn!(error = format!("{error:#}"), "no program to write the NodeFeature object");
    }
    if Options::of(&settings).oneshot {
        let signal = tokio::select! {
            written = once(args, &settings, publisher) => return written,
            _ = end.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            _ = quit.recv() => "SIGQUIT",
        };
        anyhow::bail!("{signal} before the labels were written");
    }
    let mut file = settings.config_file.value.as_deref().map(FileWatch::of);
    if let Some(file) = &mut file {
        // The file may have changed since it was loaded; changes from now on are followed.
        let latest = file.read().await.and_then(|text| load_text(&args.flags, &environment, &text));
        settings = latest.map_or(settings, |loaded| loaded.settings);
    }
    loop {
        let mut life = Life::start(args, &settings, publisher)?;
        let next = loop {
            let changed = async {
                match &mut file {
                    Some(file) => file.changed().await,
                    None => std::future::pending().await,
                }
            };
            let (reason, text) = tokio::select! {
                ended = life.ended() => return Err(ended),
                _ = end.recv() => break None,
                _ = interrupt.recv() => break None,
                _ = quit.recv() => break None,
                text = changed => ("the file changed", text),
                _ = hangup.recv() => ("SIGHUP", match &mut file {
                    Some(file) => file.read().await,
                    None => Ok(String::new()),
                }),
            };
            match reload(args, &environment, text, reason) {
                Some(next) if reason == "SIGHUP" || !next.changed(&settings).is_empty() => break Some(next),
                _ => {}
            }
        };
        life.end().await;
        match next {
            Some(next) => settings = next,
            None => {
                tracing::info!("ending; the labels stay");
                return Ok(());
            }
        }
    }
}

/// The settings of a text, where it is valid.
fn reload(
    args: &LabelsArgs,
    environment: &Environment,
    text: Result<String, ConfigError>,
    why: &str,
) -> Option<Settings> {
    match text.and_then(|text| load_text(&args.flags, environment, &text)) {
        Ok(loaded) => {
            tracing::info!(why, "configuration reloaded");
            config::log(&loaded.findings);
            Some(loaded.settings)
        }
        Err(error) => {
            if let ConfigError::Rejected { findings, .. } = &error {
                config::log(findings);
            }
            tracing::error!(why, error = chain(&error), "configuration rejected, keeping the previous one");
            None
        }
    }
}

/// The tasks of one configuration.
struct Life {
    tasks: JoinSet<(&'static str, Result<()>)>,
    shutdown: CancellationToken,
}

impl Life {
    fn start(args: &LabelsArgs, settings: &Settings, publisher: Option<&Publisher>) -> Result<Self> {
        let options = Options::of(settings);
        let (mut tasks, shutdown) = (JoinSet::new(), CancellationToken::new());
        let (events, happened) = mpsc::channel(EVENTS);
        events.try_send(Event::Planned(Box::new(settings.plan()))).context("no task takes events")?;
        // No port serves these here.
        let (driver_metrics, metrics) = (DriverMetrics::register(&mut Registry::default()), LabelMetrics::default());
        let idle = watch::Sender::new(Idle::Waiting(String::new()));
        let release = Release::new(driver_metrics.clone());
        let snapshots = watch::Sender::new(Arc::new(NodeState::default()));
        let (sender, labels) = watch::channel(None);
        let source = LabelSource {
            snapshot: snapshots.subscribe(),
            idle: idle.subscribe(),
            settings: settings_of(settings, args.api.node_name.as_deref()),
            machine_type_file: options.machine_type_file.clone(),
            sysfs: args.node.host.sysfs.clone(),
            interval: options.interval,
            metrics: metrics.clone(),
        };
        let beside = (driver_metrics, idle, release);
        let driver = super::driver_of(&args.nvml, &args.node.host, settings, events, beside);
        tasks.spawn(driver.run().map(|end| ("NVML driver", end)));
        tasks.spawn(keep_state(happened, snapshots).map(|end| ("state", end)));
        tasks.spawn(source.run(sender).map(|end| ("labels", end)));
        let publisher = publisher.filter(|_| options.node_feature_api);
        if let Some(publisher) = publisher {
            tasks.spawn(publisher(labels, options.interval, shutdown.clone()).map(|end| ("NodeFeature", end)));
        } else {
            let file = LabelsFile::new(&options.output_file);
            if options.node_feature_api {
                tracing::warn!(%file, "no access to the API server: the labels go to the file that NFD reads");
            }
            let writer = FileWriter { file, interval: options.interval, metrics, files: watch::channel(true).1 };
            tasks.spawn(writer.run(labels).map(|end| ("labels' file", end)));
        }
        Ok(Self { tasks, shutdown })
    }

    /// Waits for a task to end, which none should.
    async fn ended(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await.map(task_end) {
            Some(Ok(name)) => anyhow!("the task '{name}' ended"),
            Some(Err(error)) => error,
            None => anyhow!("there are no tasks"),
        }
    }

    async fn end(mut self) {
        self.shutdown.cancel();
        self.tasks.shutdown().await;
    }
}

/// Applies events and publishes the state.
async fn keep_state(mut events: mpsc::Receiver<Event>, snapshots: watch::Sender<Arc<NodeState>>) -> Result<()> {
    let (mut state, clock) = (NodeState::default(), Clock::start());
    while let Some(event) = events.recv().await {
        let (next, effects) = state.apply(event, clock.now());
        state = next;
        for effect in effects {
            match effect {
                Effect::Publish => drop(snapshots.send_replace(Arc::new(state.clone()))),
                Effect::Warn(warning) => tracing::warn!("{warning}"),
                Effect::PlanProblem(problem) => tracing::warn!("{problem}"),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether the PCI bus has a GPU for NVIDIA's driver, or does not answer.
async fn may_have_gpus(sysfs: &Path) -> bool {
    let sysfs = sysfs.to_owned();
    let look = timeout(FILES, spawn_blocking(move || has_no_gpu(&sysfs))).await;
    !look.is_ok_and(|look| look.unwrap_or(false))
}

/// Scans the node once, and writes its labels; nothing is written where it is unknown which GPUs there are.
async fn once(args: &LabelsArgs, settings: &Settings, publisher: Option<&Publisher>) -> Result<()> {
    let sysfs = args.node.host.sysfs.clone();
    let root = settings.driver_root_ctr_path.value.clone();
    let command = AgentCommand { limits: super::limits_of(&args.nvml), ..super::agent_of(&args.node.host, Some(root)) };
    let is_tegra = hwloc::is_tegra(&sysfs);
    let observed = match super::scan(&command).await {
        Ok(scan) => {
            // What it does not list may still be there.
            let is_known =
                !scan.gpus.is_empty() || ((scan.count == Some(0) || is_tegra) && !may_have_gpus(&sysfs).await);
            ensure!(is_known, "NVML lists no GPU, and the PCI bus has one or does not answer: no labels written");
            let (seen, failures) = hwloc::observe(&sysfs);
            scan.node(seen, failures)
        }
        Err(error) => {
            let no_driver = error.downcast_ref().is_some_and(|error: &CallError| error.fault().is_no_driver());
            // As a process that stays does: `driver` has the cases.
            let no_driver = no_driver || is_tegra;
            if !no_driver || settings.fail_on_init_error.value == Some(true) || may_have_gpus(&sysfs).await {
                return Err(error.context("NVML unavailable: no labels written, those that are there stay"));
            }
            tracing::warn!(cause = format!("{error:#}"), "no NVIDIA GPU on this node: the labels say so");
            NodeObservation::default()
        }
    };
    let (topology, _) = NodeTopology::assemble(&observed);
    let options = Options::of(settings);
    let machine_type_file = options.machine_type_file.clone();
    let host = spawn_blocking(move || host(&machine_type_file, &sysfs)).await?;
    let (labels, problems) = labels_of(LabelFacts {
        topology: &topology,
        versions: &DriverVersions::of(&observed),
        plan: &settings.plan(),
        host: &host,
        settings: &settings_of(settings, args.api.node_name.as_deref()),
    });
    report(&mut Once::new(), problems);
    if let Some(publisher) = publisher.filter(|_| options.node_feature_api) {
        // A closed channel: it ends when these are published.
        let (_, labels) = watch::channel(Some(Arc::new(labels)));
        return publisher(labels, options.interval, CancellationToken::new()).await;
    }
    let file = LabelsFile::new(&options.output_file);
    let written = file.write(&labels).with_context(|| format!("cannot write the labels to {file}"))?;
    tracing::info!(%file, labels = labels.len(), changed = written, "labels written");
    Ok(())
}
