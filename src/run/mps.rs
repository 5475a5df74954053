//! `linkwise mps-control-daemon`: starts and ends a supervised control daemon for each resource that MPS shares and for
//! GPUs of claims that ask for it. A process of its own, in a container with the privileges that MPS needs; the plugin
//! has none.
//!
//! The process reads the plugin's configuration and observes the GPUs as the plugin does, and makes the same state of
//! them, which it offers to no kubelet. `daemons` serves the daemons that follow from the state; `init` is the
//! container's first process; `plugin` is the other side, in `linkwise run`.

mod daemons;
mod init;
mod orders;
mod plugin;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures_util::FutureExt;
use tokio::signal::unix::SignalKind;
use tokio::task::JoinSet;

use super::config;
use super::driver::{SeenGpus, watch_gpus};
use crate::config::settings::load;
use crate::config::{ConfigMetrics, Environment, MpsCommand, MpsControlDaemonArgs};
use daemons::Daemons;
use linkwise_core::errors::chain;
use linkwise_core::once::Once;
use linkwise_core::state::{MpsShare, NodeState, ResourceName};
use linkwise_host::mps::{
    Layout, LayoutError, Limits, Orders, Pace, Programs, Settings, Shm, mount_shm, prepare_orders,
};
use linkwise_node::node::task_end;
use linkwise_system::signals::{LastSignals, listen};

pub(super) use orders::spawn_orders;
pub(super) use plugin::follow_daemons;

/// The longest times for the daemon's work. `quit` gives the servers a second; the next half is the daemon's own.
const PACE: Pace = Pace {
    answer: Duration::from_secs(5),
    start: Duration::from_secs(10),
    quit: Duration::from_millis(1500),
    probe: Duration::from_secs(5),
    pauses: (Duration::from_secs(1), Duration::from_secs(60)),
};

/// The time from one reading of the orders for claims to the next: a small file.
const ORDERS_POLL: Duration = Duration::from_millis(500);

/// Runs the control daemons until told to end; as the first process of a container, in a child process.
pub fn mps_control_daemon(args: &MpsControlDaemonArgs) -> Result<ExitCode> {
    if args.command.is_none() && (args.init || init::is_first_process()) {
        return linkwise_system::block_on(init::run());
    }
    let _log = super::start_log(&args.log)?;
    linkwise_system::block_on(async {
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

/// The limits that resources shared by MPS require: the same for the plugin and for the daemons.
fn wanted(
    layout: &Layout,
    shares: &BTreeMap<ResourceName, MpsShare>,
) -> BTreeMap<ResourceName, Result<Limits, LayoutError>> {
    let limits = |(name, share)| layout.check(name).map(|()| Limits::of(share));
    shares.iter().map(|(name, share)| (name.clone(), limits((name, share)))).collect()
}

async fn serve(args: &MpsControlDaemonArgs) -> Result<()> {
    let (mut last_signals, hangup) = (LastSignals::listen()?, listen(SignalKind::hangup(), "SIGHUP")?);
    let environment = Environment::read();
    let loaded = load(&args.flags, &environment)?;
    config::log(&loaded.findings);
    let layout = Layout::new(&args.root.container_root);
    let _lock = lock(&layout)?;
    let mut tasks = JoinSet::new();
    let seen = watch_gpus(&mut tasks, &args.nvml, &args.host, &loaded.settings, "mps-control-daemon")?;
    let SeenGpus { release, mut snapshots, events, .. } = seen;
    let config_metrics = ConfigMetrics::default();
    let (flags, settings) = (args.flags.clone(), loaded.settings);
    let reloader = config::Reloader { flags, environment, settings, metrics: config_metrics, events, door: None };
    tasks.spawn(reloader.run(hangup).map(|end| ("configuration", end)));

    let programs = Programs { control: "nvidia-cuda-mps-control".into(), smi: "nvidia-smi".into() };
    let settings = Settings { layout: layout.clone(), programs, selinuxfs: "/sys/fs/selinux".into(), pace: PACE };
    if let Err(error) = prepare_orders(&settings) {
        tracing::warn!(error = chain(&error), "claims may not get MPS: linkwise may not write its orders");
    }
    let mut daemons = Daemons::new(settings, release.gate().map(|gate| gate.of("mps-daemons")));
    let mut released = release.follow();
    let mut demand = Demand::default();
    let mut poll = tokio::time::interval(ORDERS_POLL);
    let ended = loop {
        tokio::select! {
            Ok(()) = released.changed() => {}
            Ok(()) = snapshots.changed() => demand.saw(Arc::clone(&snapshots.borrow_and_update())),
            _ = poll.tick() => if !demand.follow_orders(&layout).await? { continue },
            ended = daemons.next() => if let Err(error) = ended { break Err(error) },
            Some(task) = tasks.join_next() => {
                break task_end(task).and_then(|name| Err(anyhow!("the task '{name}' ended")));
            }
            signal = last_signals.come() => { tracing::info!(signal, "ending"); break Ok(()) }
        }
        if *released.borrow_and_update() {
            daemons.release();
        } else if let Some(wanted) = demand.wanted(&layout) {
            daemons.want(wanted).await;
        }
    };
    daemons.end().await?;
    tasks.shutdown().await;
    ended
}

/// The state of the node and the orders for claims, from which the daemons follow.
#[derive(Default)]
struct Demand {
    /// The node; `None` before its GPUs were seen.
    state: Option<Arc<NodeState>>,
    /// The orders; `None` before they were read.
    orders: Option<Orders>,
    refused: Once<String>,
    unreadable: Once<String>,
    idle: Once<()>,
}

impl Demand {
    fn saw(&mut self, state: Arc<NodeState>) {
        if self.state.is_some() || !state.topology().gpus().is_empty() {
            self.state = Some(state);
        }
    }

    /// Reads the orders for claims; returns true if they changed. While they cannot be read, the last ones stay.
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

    /// The daemons to serve now, with their limits: resources, and the GPUs of claims. `None` before the GPUs were seen
    /// and the orders read.
    fn wanted(&mut self, layout: &Layout) -> Option<BTreeMap<ResourceName, Limits>> {
        let (orders, state) = self.orders.as_ref().zip(self.state.as_ref())?;
        let (mut served, mut refused) = (BTreeMap::new(), Vec::new());
        // Only the plugin knows which GPUs have changed to DRA.
        let shares = state.mps_shares().iter();
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

/// Locks the root against other daemon processes, as long as this one runs.
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
