//! `linkwise mps-control-daemon`: starts and ends a supervised control daemon for each resource that MPS shares and for
//! GPUs of claims that ask for it. A process of its own, in a container with the privileges that MPS needs; the plugin
//! has none of them.
//!
//! The process follows the file in which the plugin orders daemons, reads no configuration file and never calls NVML.
//! `daemons` runs the ordered daemons; `orders` is the plugin's side, a task of `linkwise run`.

mod daemons;
mod orders;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::future::pending;
use std::path::Path;
use std::pin::pin;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::FutureExt;
use prometheus_client::registry::Registry;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
use tokio::signal::unix::SignalKind;

use super::driver::gate;
use crate::config::settings::load_text;
use crate::config::{Environment, INIT_FLAG, MpsCommand, MpsControlDaemonArgs, command_line};
use daemons::Daemons;
use linkwise_core::errors::chain;
use linkwise_core::reported::Reported;
use linkwise_core::state::ResourceName;
use linkwise_host::mps::{Layout, Limits, Orders, Pace, Programs, Settings, Shm, mount_shm, prepare_orders};
use linkwise_nvml::supervisor::{DriverMetrics, Release};
use linkwise_system::files;
use linkwise_system::signals::{LastSignals, listen};

pub(super) use orders::spawn_in;

/// The longest times for the daemon's work, and its pauses. Within `quit` the servers have a second, and the daemon the
/// rest.
const PACE: Pace = Pace {
    answer: Duration::from_secs(5),
    start: Duration::from_secs(10),
    quit: Duration::from_millis(1500),
    probe: Duration::from_secs(5),
    first_pause: Duration::from_secs(1),
    longest_pause: Duration::from_secs(60),
};

/// The time from one reading of the orders to the next.
const ORDERS_POLL: Duration = Duration::from_millis(500);

/// Runs the control daemons until a signal ends it; with `mount-shm`, only mounts shared memory. The first process of a
/// container runs the daemons in a child process.
pub fn mps_control_daemon(args: &MpsControlDaemonArgs) -> Result<ExitCode> {
    if args.command.is_none() && (args.init || getpid().is_init()) {
        return linkwise_system::block_on(as_first_process());
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

async fn serve(args: &MpsControlDaemonArgs) -> Result<()> {
    // The config-manager of NVIDIA's chart and of the GPU Operator sends SIGHUP after a change of the configuration.
    // The signal's default action would end the daemons, and their clients' work.
    let (mut last_signals, mut hangup) = (LastSignals::listen()?, listen(SignalKind::hangup(), "SIGHUP")?);
    let layout = Layout::new(&args.root.container_root);
    let _lock = lock(&layout)?;
    // This process reads no configuration file.
    let settings = load_text(&args.flags, &Environment::read(), "")?.settings;
    let gate = gate(&settings, "mps-control-daemon");
    let daemons_gate = gate.as_ref().map(|gate| gate.for_user("mps-daemons"));
    // These metrics are not served on any port.
    let release = Release::new(DriverMetrics::register(&mut Registry::default()), gate);
    let programs = Programs { control: "nvidia-cuda-mps-control".into(), smi: "nvidia-smi".into() };
    let settings = Settings { layout: layout.clone(), programs, selinuxfs: "/sys/fs/selinux".into(), pace: PACE };
    if let Err(error) = prepare_orders(&settings) {
        tracing::warn!(error = chain(&error), "cannot prepare the folder of MPS orders, MPS may not work");
    }
    let mut daemons = Daemons::new(settings, daemons_gate);
    let mut released = release.follow();
    let mut followed = pin!(release.follow_node().then(|()| pending::<()>()));
    let mut demand = Demand::default();
    let mut poll = tokio::time::interval(ORDERS_POLL);
    let ended = loop {
        tokio::select! {
            Ok(()) = released.changed() => {}
            _ = poll.tick() => if !demand.follow(&layout).await { continue },
            _ = hangup.recv() => if !demand.follow(&layout).await { continue },
            ended = daemons.next() => if let Err(error) = ended { break Err(error) },
            () = &mut followed => {}
            signal = last_signals.recv() => { tracing::info!(signal, "ending"); break Ok(()) }
        }
        if *released.borrow_and_update() {
            daemons.release();
        } else if let Some(wanted) = demand.wanted() {
            daemons.want(wanted).await;
        }
    };
    daemons.end().await?;
    ended
}

/// The orders of the plugin, as they were read last.
#[derive(Default)]
struct Demand {
    /// `None` before the first attempt to read them.
    orders: Option<Orders>,
    refused: Reported<String>,
    unreadable: Reported<String>,
    idle: Reported<()>,
}

impl Demand {
    /// Reads the orders; returns true if they changed. While they cannot be read, the previous ones stay; at the
    /// start there are none.
    async fn follow(&mut self, layout: &Layout) -> bool {
        let layout = layout.clone();
        let read = files::blocking(move || Orders::read(&layout)).await;
        let unreadable = read.as_ref().err().map(|error| chain(error));
        for error in self.unreadable.replace(unreadable) {
            tracing::error!(error, "MPS orders unreadable, keeping the previous ones");
        }
        let orders = read.ok().or_else(|| self.orders.is_none().then(Orders::default));
        let has_changed = orders.is_some() && orders != self.orders;
        self.orders = orders.or_else(|| self.orders.take());
        has_changed
    }

    /// The daemons to serve now, with their limits: resources, and the GPUs of claims. `None` before the first
    /// attempt to read the orders.
    fn wanted(&mut self) -> Option<BTreeMap<ResourceName, Limits>> {
        let orders = self.orders.as_ref()?;
        let (mut served, mut refused) = (orders.resources.clone(), Vec::new());
        for (daemon, limits) in orders.of_claims() {
            let sharing = served.iter().find(|(_, of)| of.gpus().any(|gpu| limits.gpus().any(|own| own == gpu)));
            match sharing {
                Some((resource, _)) => refused.push(format!("cannot start {daemon}: {resource} shares its GPU by MPS")),
                None => drop(served.insert(daemon, limits)),
            }
        }
        for error in self.refused.replace(refused) {
            tracing::error!("{error}");
        }
        if !self.idle.replace(served.is_empty().then_some(())).is_empty() {
            tracing::info!("linkwise orders no MPS daemon on this node, waiting");
        }
        Some(served)
    }
}

/// Locks the root against another `mps-control-daemon`, as long as this one runs.
fn lock(layout: &Layout) -> Result<File> {
    let root = layout.root();
    ensure!(
        root.is_dir(),
        "no folder {}; mount the host's MPS root there, or set --mps-container-root",
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

/// Runs this program again as a child, passes signals on to it, and ends with its exit code. Reaps every process that
/// lost its parent: servers that outlive their control daemon. The daemons run in the child, because here the wait for
/// any child would take the exit statuses for which their tasks wait.
async fn as_first_process() -> Result<ExitCode> {
    let mut child_ended = listen(SignalKind::child(), "SIGCHLD")?;
    let mut terminate = listen(SignalKind::terminate(), "SIGTERM")?;
    let mut interrupt = listen(SignalKind::interrupt(), "SIGINT")?;
    let mut quit = listen(SignalKind::quit(), "SIGQUIT")?;
    let mut hangup = listen(SignalKind::hangup(), "SIGHUP")?;
    // The first process gets the orphans anyway; any other process has to ask for them.
    set_child_subreaper(Some(getpid())).context("cannot become the parent of orphans")?;
    let words = command_line().skip(1).filter(|word| word != INIT_FLAG);
    let child = Command::new("/proc/self/exe").args(words).spawn().context("cannot start linkwise as a child")?;
    let child = Pid::from_child(&child);
    loop {
        let signal = tokio::select! {
            _ = child_ended.recv() => match reap(child)? {
                Some(code) => return Ok(code),
                None => continue,
            },
            _ = terminate.recv() => Signal::TERM,
            _ = interrupt.recv() => Signal::INT,
            _ = quit.recv() => Signal::QUIT,
            _ = hangup.recv() => Signal::HUP,
        };
        kill_process(child, signal).context("cannot pass a signal on")?;
    }
}

/// Reaps all processes that have ended; returns the exit code of `child` if it is among them.
fn reap(child: Pid) -> Result<Option<ExitCode>> {
    while let Some((process, status)) = wait(WaitOptions::NOHANG).context("cannot wait for child processes")? {
        if process == child {
            // Shells use this code for a child that a signal ended.
            let code = status.exit_status().or_else(|| Some(128 + status.terminating_signal()?));
            let code = code.and_then(|code| u8::try_from(code).ok());
            return Ok(Some(code.map_or(ExitCode::FAILURE, ExitCode::from)));
        }
    }
    Ok(None)
}
