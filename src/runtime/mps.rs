//! `linkwise mps-control-daemon`: a supervised control daemon for each resource that is shared by MPS and for GPUs of
//! claims that ask for it, and the end of them all. A process of its own, in a container with the privileges that MPS
//! takes; the plugin has none.
//!
//! It reads the plugin's configuration and observes the GPUs as the plugin does, and makes the same state of them,
//! which it offers to no kubelet. `daemons` serves what follows from that; `init` is the container's first process;
//! `plugin` is the other side, in `linkwise run`.

mod daemons;
mod init;
mod orders;
mod plugin;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures_util::FutureExt;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::clock::Clock;
use super::config;
use super::driver::metrics::DriverMetrics;
use super::node::task_end;
use super::operator::Release;
use super::readiness::Idle;
use crate::config::settings::load;
use crate::config::{ConfigMetrics, Environment, MpsCommand, MpsControlDaemonArgs};
use crate::errors::chain;
use crate::mps::{Layout, LayoutError, Limits, Orders, Pace, Programs, Settings, Shm, mount_shm, prepare_orders};
use crate::once::Once;
use crate::state::{Effect, Event, MpsShare, NodeState, ResourceName};
use daemons::Daemons;

pub(super) use orders::{follow_orders, withdraw_orders};
pub(super) use plugin::follow_daemons;

/// How long things may take. `quit` gives the servers a second; the next half is the daemon's own.
const PACE: Pace = Pace {
    answer: Duration::from_secs(5),
    start: Duration::from_secs(10),
    quit: Duration::from_millis(1500),
    probe: Duration::from_secs(5),
    pauses: (Duration::from_secs(1), Duration::from_secs(60)),
};

/// How often the orders for claims are read: a small file.
const ORDERS_POLL: Duration = Duration::from_millis(500);

/// Events that may wait.
const EVENTS: usize = 256;

/// Runs the control daemons until told to end; as the first process of a container, in a child process.
pub fn mps_control_daemon(args: &MpsControlDaemonArgs) -> Result<ExitCode> {
    if args.command.is_none() && (args.init || init::is_first_process()) {
        return super::block_on(init::run());
    }
    let _log = super::log_to_stderr(&args.log.log, args.log.log_format)?;
    super::block_on(async {
        match args.command {
            None => serve(args).await,
            Some(MpsCommand::MountShm) => {
                let layout = Layout::new(&args.root.container_root);
                let what = match mount_shm(&layout, Path::new("/proc/meminfo"), Path::new("mount")).await? {
                    Shm::Mounted => "shared memory mounted",
                    Shm::Grown => "shared memory was mounted already, and has grown",
                    Shm::Kept => "shared memory is mounted already, and stays",
                };
                tracing::info!(path = %layout.shm().display(), "{what}");
                Ok(())
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What resources that are shared by MPS call for: the same for the plugin and for the daemons.
fn wanted(
    layout: &Layout,
    shares: &BTreeMap<ResourceName, MpsShare>,
) -> BTreeMap<ResourceName, Result<Limits, LayoutError>> {
    let limits = |(name, share)| layout.check(name).map(|()| Limits::of(share));
    shares.iter().map(|(name, share)| (name.clone(), limits((name, share)))).collect()
}

async fn serve(args: &MpsControlDaemonArgs) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let environment = Environment::read();
    let loaded = load(&args.flags, &environment)?;
    config::log(&loaded.findings);
    let layout = Layout::new(&args.root.container_root);
    let _lock = lock(&layout)?;
    let (events, mut happened) = mpsc::channel(EVENTS);
    // No port serves these here.
    let metrics = DriverMetrics::register(&mut Registry::default());
    let config_metrics = ConfigMetrics::default();
    let mut tasks = JoinSet::new();
    let idle = watch::Sender::new(Idle::Waiting(String::new()));
    let release = Release::new(metrics.clone());
    let driver = super::driver_of(&args.nvml, &args.host, &loaded.settings, events.clone(), (metrics, idle, release));
    let planned = Event::Planned(Box::new(loaded.settings.plan()));
    events.send(planned).await.context("no task takes events")?;
    tasks.spawn(driver.run().map(|end| ("NVML driver", end)));
    let (flags, settings) = (args.flags.clone(), loaded.settings);
    let reloader = config::Reloader { flags, environment, settings, metrics: config_metrics, events, dra: None };
    tasks.spawn(reloader.run(hangup).map(|end| ("configuration", end)));

    let programs = Programs { control: "nvidia-cuda-mps-control".into(), smi: "nvidia-smi".into() };
    let settings = Settings { layout: layout.clone(), programs, selinuxfs: "/sys/fs/selinux".into(), pace: PACE };
    if let Err(error) = prepare_orders(&settings) {
        tracing::warn!(error = chain(&error), "claims may not get MPS: linkwise may not write its orders");
    }
    let mut daemons = Daemons::new(settings);
    let mut demand = Demand::new();
    let mut poll = tokio::time::interval(ORDERS_POLL);
    let ended = loop {
        tokio::select! {
            Some(event) = happened.recv() => demand.apply(event),
            _ = poll.tick() => if !demand.follow_orders(&layout).await? { continue },
            ended = daemons.next() => if let Err(error) = ended { break Err(error) },
            Some(task) = tasks.join_next() => {
                break task_end(task).and_then(|name| Err(anyhow!("the task '{name}' ended")));
            }
            _ = terminate.recv() => { tracing::info!(signal = "SIGTERM", "ending"); break Ok(()) }
            _ = interrupt.recv() => { tracing::info!(signal = "SIGINT", "ending"); break Ok(()) }
        }
        if let Some(wanted) = demand.wanted(&layout) {
            daemons.want(wanted).await;
        }
    };
    daemons.end().await?;
    tasks.shutdown().await;
    ended
}

/// The state of the node and the orders for claims, and what follows from them for the daemons.
struct Demand {
    state: NodeState,
    clock: Clock,
    observed: bool,
    /// `None` before they were read.
    orders: Option<Orders>,
    refused: Once<String>,
    unreadable: Once<String>,
    idle: Once<()>,
}

impl Demand {
    fn new() -> Self {
        let (state, clock) = (NodeState::default(), Clock::start());
        let (refused, unreadable, idle) = (Once::new(), Once::new(), Once::new());
        Self { state, clock, observed: false, orders: None, refused, unreadable, idle }
    }

    /// Applies an event.
    fn apply(&mut self, event: Event) {
        self.observed |= matches!(event, Event::Observed(_));
        let (state, effects) = std::mem::take(&mut self.state).apply(event, self.clock.now());
        self.state = state;
        for effect in effects {
            if let Effect::PlanProblem(problem) = effect {
                tracing::warn!("{problem}");
            }
        }
    }

    /// Reads the orders for claims; whether they changed. While they cannot be read, the last ones stay.
    async fn follow_orders(&mut self, layout: &Layout) -> Result<bool> {
        let layout = layout.clone();
        let read = tokio::task::spawn_blocking(move || Orders::read(&layout)).await;
        let read = read.context("reading the MPS orders panicked")?;
        let unreadable = read.as_ref().err().map(|error| chain(error));
        for error in self.unreadable.replace(unreadable) {
            tracing::error!(error, "MPS orders of claims unreadable, keeping the last ones");
        }
        let orders = read.ok().or_else(|| self.orders.is_none().then(Orders::default));
        let changes = orders.is_some() && orders != self.orders;
        self.orders = orders.or_else(|| self.orders.take());
        Ok(changes)
    }

    /// What is to be served now, with its limits: resources, and the GPUs of claims. `None` before the GPUs were seen
    /// and the orders read.
    fn wanted(&mut self, layout: &Layout) -> Option<BTreeMap<ResourceName, Limits>> {
        let orders = self.orders.as_ref().filter(|_| self.observed)?;
        let (mut served, mut refused) = (BTreeMap::new(), Vec::new());
        // Only the plugin knows which GPUs have changed to DRA.
        let shares = self.state.mps_shares().iter();
        let shares = shares.filter_map(|(name, share)| Some((name.clone(), share.without(&orders.gpus)?))).collect();
        for (resource, limits) in wanted(layout, &shares) {
            match limits {
                Ok(limits) => drop(served.insert(resource, limits)),
                Err(error) => refused.push(error.to_string()),
            }
        }
        for (daemon, limits) in orders.limits() {
            let sharing = served.iter().find(|(_, of)| of.gpus().any(|gpu| limits.gpus().any(|own| own == gpu)));
            match sharing {
                Some((resource, _)) => refused.push(format!("{daemon}: {resource} shares its GPU by MPS")),
                None => drop(served.insert(daemon, limits)),
            }
        }
        for error in self.refused.replace(refused) {
            tracing::error!("{error}");
        }
        if !self.idle.replace(served.is_empty().then_some(())).is_empty() {
            tracing::info!("no resource of this node is shared by MPS, waiting");
        }
        Some(served)
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
    let path = layout.lock();
    let open = fs::OpenOptions::new().create(true).append(true).open(&path);
    let file = open.with_context(|| format!("cannot write to the MPS root: {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("another linkwise mps-control-daemon serves {}", root.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}
