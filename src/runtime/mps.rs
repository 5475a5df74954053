//! `linkwise mps-control-daemon`: a supervised control daemon for each resource that is shared by MPS, and the end of them
//! all. A process of its own, in a container with the privileges that MPS takes; the plugin has none.
//!
//! It reads the plugin's configuration and sees the GPUs as the plugin does, and makes the same of them: an snapshot that
//! offers nothing. `daemons` carries out what that wants; `plugin` is the other side, in `linkwise run`.

mod daemons;
mod plugin;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::clock::Clock;
use super::config;
use super::driver::metrics::DriverMetrics;
use super::idle::Idle;
use super::operator::Release;
use crate::config::settings::load;
use crate::config::{ConfigMetrics, Environment, MpsCommand, MpsControlDaemonArgs};
use crate::mps::{Layout, LayoutError, Limits, Pace, Programs, Settings, Shm, mount_shm};
use crate::state::{Effect, Event, NodeState, ResourceName};
use daemons::Daemons;

pub(super) use plugin::Watch;

/// How long things may take. `quit` gives the servers a second; the next half is the daemon's own.
const PACE: Pace = Pace {
    answer: Duration::from_secs(5),
    start: Duration::from_secs(10),
    quit: Duration::from_millis(1500),
    probe: Duration::from_secs(5),
    pauses: (Duration::from_secs(1), Duration::from_secs(60)),
};

/// Events that may wait.
const EVENTS: usize = 256;

/// Runs the control daemons until told to end.
pub fn mps_control_daemon(args: &MpsControlDaemonArgs) -> Result<()> {
    let _log = super::log_to_stderr(&args.log.log, args.log.log_format)?;
    super::block_on(async {
        match args.command {
            None => serve(args).await,
            Some(MpsCommand::MountShm) => {
                let layout = Layout::new(&args.root.container_root);
                let path = layout.shm();
                match mount_shm(&layout).await? {
                    Shm::Mounted => tracing::info!(path = %path.display(), "shared memory mounted"),
                    Shm::Kept => tracing::info!(path = %path.display(), "shared memory is mounted already, and stays"),
                }
                Ok(())
            }
        }
    })
}

/// What the resources of this node that are shared by MPS call for: the same for the plugin and for the daemons.
fn wanted(layout: &Layout, snapshot: &NodeState) -> BTreeMap<ResourceName, Result<Limits, LayoutError>> {
    let limits = |(name, share)| layout.check(name).map(|()| Limits::of(share));
    snapshot.mps_shares().iter().map(|(name, share)| (name.clone(), limits((name, share)))).collect()
}

async fn serve(args: &MpsControlDaemonArgs) -> Result<()> {
    // First of all: a container's first process does not even die of a signal that it does not listen for.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let environment = Environment::read();
    let loaded = load(&args.flags, &environment)?;
    config::log(&loaded.findings);
    let layout = Layout::new(&args.root.container_root);
    let _lock = lock(&layout)?;
    let (events, mut happened) = mpsc::channel(EVENTS);
    // Nobody reads these here: what is counted goes with the process.
    // Counted, and served nowhere.
    let metrics = Arc::new(DriverMetrics::default());
    let config_metrics = ConfigMetrics::default();
    let shutdown = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let idle = watch::Sender::new(Idle::Waiting(String::new()));
    let release = Release::new(Arc::clone(&metrics));
    let driver = super::driver_of(&args.nvml, &args.host, &loaded.settings, events.clone(), (&metrics, idle, release));
    let planned = Event::Planned(Box::new(loaded.settings.plan()));
    events.send(planned).await.context("nobody takes events")?;
    tasks.spawn(named("NVML driver", driver.run(shutdown.clone())));
    let (flags, settings) = (args.flags.clone(), loaded.settings);
    let reloader = config::Reloader { flags, environment, settings, metrics: config_metrics, events };
    tasks.spawn(named("configuration", reloader.run(hangup, shutdown.clone())));

    let programs = Programs { control: "nvidia-cuda-mps-control".into(), smi: "nvidia-smi".into() };
    let mut daemons = Daemons::new(Settings { layout: layout.clone(), programs, pace: PACE });
    let mut sight =
        Sight { state: NodeState::default(), clock: Clock::start(), refused: BTreeSet::new(), told_idle: false };
    let ended = loop {
        tokio::select! {
            Some(event) = happened.recv() => daemons.want(sight.apply(event, &layout)),
            ended = daemons.next() => if let Err(error) = ended { break Err(error) },
            Some(task) = tasks.join_next() => match task {
                Ok((name, Ok(()))) => break Err(anyhow!("the task '{name}' ended")),
                Ok((name, Err(error))) => break Err(error.context(format!("the task '{name}' failed"))),
                Err(error) => break Err(error).context("a task broke off"),
            },
            _ = terminate.recv() => { tracing::info!(signal = "SIGTERM", "ending"); break Ok(()) }
            _ = interrupt.recv() => { tracing::info!(signal = "SIGINT", "ending"); break Ok(()) }
        }
    };
    daemons.end().await?;
    shutdown.cancel();
    while tasks.join_next().await.is_some() {}
    ended
}

async fn named(name: &'static str, task: impl Future<Output = Result<()>>) -> (&'static str, Result<()>) {
    (name, task.await)
}

/// What is seen of the node, and what people were told of it.
struct Sight {
    state: NodeState,
    clock: Clock,
    refused: BTreeSet<String>,
    told_idle: bool,
}

impl Sight {
    /// What happened, and what is to be served now.
    fn apply(&mut self, event: Event, layout: &Layout) -> BTreeMap<ResourceName, Limits> {
        let looked = matches!(event, Event::Observed(_));
        let (state, effects) = std::mem::take(&mut self.state).apply(event, self.clock.now());
        self.state = state;
        for effect in effects {
            if let Effect::PlanProblem(problem) = effect {
                tracing::warn!("{problem}");
            }
        }
        let mut servable = BTreeMap::new();
        for (resource, limits) in wanted(layout, &self.state) {
            match limits {
                Ok(limits) => drop(servable.insert(resource, limits)),
                Err(error) if self.refused.insert(error.to_string()) => tracing::error!("{error}"),
                Err(_) => {}
            }
        }
        if looked && servable.is_empty() && !self.told_idle {
            tracing::info!("no resource of this node is shared by MPS: nothing to do but to wait");
        }
        self.told_idle = servable.is_empty() && (looked || self.told_idle);
        servable
    }
}

/// Keeps other daemon processes from the root, as long as this one lives.
fn lock(layout: &Layout) -> Result<File> {
    let root = layout.root();
    ensure!(
        root.is_dir(),
        "no folder {}: mount the host's MPS root there, or name it by --mps-container-root",
        root.display()
    );
    let path: PathBuf = layout.lock();
    let open = fs::OpenOptions::new().create(true).append(true).open(&path);
    let file = open.with_context(|| format!("cannot write to the MPS root: {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("another linkwise mps-control-daemon serves {}", root.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}
