//! `linkwise mps-control-daemon`: looks at the GPUs, runs a supervised control daemon for each resource that is shared by
//! MPS, and ends them all. A process of its own, in a container with the privileges that MPS takes; the plugin has none.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{MpsCommand, MpsControlDaemonArgs, SharedResource};
use crate::inventory::ResourceName;
use crate::mps::{
    Layout, Limits, MpsGpu, MpsResource, Occurrence, Pace, Programs, Settings, Shm, mount_shm, supervise,
};
use crate::topology::GpuObservation;

/// How long things may take. `quit` gives the servers a second; the next half is the daemon's own.
const PACE: Pace = Pace {
    answer: Duration::from_secs(5),
    start: Duration::from_secs(10),
    quit: Duration::from_millis(1500),
    probe: Duration::from_secs(5),
    pauses: (Duration::from_secs(1), Duration::from_secs(60)),
};

/// What ends a round.
enum Order {
    End(&'static str),
    Reload,
}

/// The signals that are listened for.
struct Orders {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Orders {
    fn listen() -> Result<Self> {
        let listen = |kind, name| signal(kind).with_context(|| format!("cannot listen for {name}"));
        Ok(Self {
            terminate: listen(SignalKind::terminate(), "SIGTERM")?,
            interrupt: listen(SignalKind::interrupt(), "SIGINT")?,
            hangup: listen(SignalKind::hangup(), "SIGHUP")?,
        })
    }

    async fn next(&mut self) -> Order {
        tokio::select! {
            _ = self.terminate.recv() => Order::End("SIGTERM"),
            _ = self.interrupt.recv() => Order::End("SIGINT"),
            _ = self.hangup.recv() => Order::Reload,
        }
    }
}

/// Runs the control daemons until told to end.
pub fn mps_control_daemon(args: &MpsControlDaemonArgs) -> Result<()> {
    let _log = super::log_to_stderr(&args.log.log, args.log.log_format)?;
    super::block_on(async {
        match args.command {
            None => serve(args).await,
            Some(MpsCommand::MountShm) => {
                let layout = Layout::new(&args.container_root);
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

async fn serve(args: &MpsControlDaemonArgs) -> Result<()> {
    // First of all: a container's first process does not even die of a signal that it does not listen for.
    let mut orders = Orders::listen()?;
    let layout = Layout::new(&args.container_root);
    let _lock = lock(&layout)?;
    loop {
        let shutdown = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let started = tokio::select! {
            started = start(args, &layout, &mut tasks, &shutdown) => started,
            order = orders.next() => match order {
                Order::End(signal) => { tracing::info!(signal, "ending"); return Ok(()) }
                Order::Reload => continue,
            },
        };
        started?;
        let order = tokio::select! {
            order = orders.next() => order,
            Some(ended) = tasks.join_next() => {
                ended.context("the supervisor of an MPS daemon broke off")?;
                bail!("the supervisor of an MPS daemon ended by itself");
            }
        };
        match order {
            Order::End(signal) => tracing::info!(signal, "ending"),
            Order::Reload => tracing::info!("SIGHUP: looking at the GPUs and starting the MPS daemons anew"),
        }
        shutdown.cancel();
        while let Some(ended) = tasks.join_next().await {
            ended.context("the supervisor of an MPS daemon broke off")?;
        }
        if let Order::End(_) = order {
            return Ok(());
        }
    }
}

/// Starts the supervisors of one round.
async fn start(
    args: &MpsControlDaemonArgs,
    layout: &Layout,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> Result<()> {
    if args.resource.is_none() {
        tracing::info!("no resource is shared by MPS: nothing to do but to wait");
        return Ok(());
    }
    let (gpus, failures) = super::look(&super::agent_command(&args.host)).await.context("cannot see the GPUs")?;
    for failure in failures {
        tracing::warn!(subject = failure.subject, call = failure.call, error = failure.error, "not answered");
    }
    let programs = Programs { control: "nvidia-cuda-mps-control".into(), smi: "nvidia-smi".into() };
    let settings = Settings { layout: layout.clone(), programs, pace: PACE };
    for (resource, limits) in plan(layout, &resources(args.resource.as_slice(), &gpus))? {
        let (settings, shutdown) = (settings.clone(), shutdown.clone());
        tasks.spawn(async move {
            supervise(&settings, &resource, &limits, &shutdown, |what| log(&resource.name, &limits, &what)).await;
        });
    }
    Ok(())
}

/// The resources that are shared by MPS. Here the configuration file's `sharing.mps` and the plan of resources belong:
/// until they are read, each resource has all GPUs.
fn resources(shared: &[SharedResource], gpus: &[GpuObservation]) -> Vec<MpsResource> {
    let gpu = |gpu: &GpuObservation| MpsGpu {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        memory_mib: gpu.memory_mib,
        compute_capability: gpu.compute_capability,
        // What is seen of a GPU does not say yet whether it is in MIG mode.
        mig: false,
    };
    let resource = |one: &SharedResource| MpsResource {
        name: one.name.clone(),
        gpus: gpus.iter().map(gpu).collect(),
        replicas: one.replicas,
        whole_node: true,
    };
    shared.iter().map(resource).collect()
}

/// The limits of each resource; refuses what MPS cannot do, by name.
fn plan(layout: &Layout, resources: &[MpsResource]) -> Result<Vec<(MpsResource, Limits)>> {
    let mut of = BTreeMap::new();
    let mut planned = Vec::new();
    for resource in resources {
        layout.check(&resource.name)?;
        for gpu in &resource.gpus {
            if let Some(other) = of.insert(&gpu.uuid, &resource.name) {
                bail!("{} is shared by MPS as {other} and as {}: a GPU has one MPS daemon", gpu.uuid, resource.name);
            }
        }
        planned.push((resource.clone(), resource.limits()?));
    }
    Ok(planned)
}

/// Keeps other daemon processes from the root, as long as this one lives.
fn lock(layout: &Layout) -> Result<File> {
    let root = layout.root();
    ensure!(
        root.is_dir(),
        "no folder {}: mount the host's MPS root there, or name it by --container-root",
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

fn log(resource: &ResourceName, limits: &Limits, what: &Occurrence) {
    match what {
        Occurrence::Serving => {
            let memory: Vec<String> = limits.memory.iter().map(|one| memory(&one.gpu, one.mib)).collect();
            let memory = memory.join(",");
            tracing::info!(%resource, threads = limits.thread_percentage, memory, "the MPS daemon serves, its limits hold");
        }
        Occurrence::Failed { why, again_in } => {
            let cause = format!("{:#}", anyhow::Error::from(why.clone()));
            tracing::warn!(%resource, cause, ?again_in, "the MPS daemon does not serve");
        }
        Occurrence::Ended(None) => tracing::info!(%resource, "the MPS daemon ended"),
        Occurrence::Ended(Some(why)) => {
            let cause = format!("{:#}", anyhow::Error::from(why.clone()));
            tracing::warn!(%resource, cause, "the MPS daemon ended, and left something behind");
        }
    }
}

fn memory(gpu: &crate::topology::GpuUuid, mib: Option<u64>) -> String {
    mib.map_or_else(|| format!("{gpu}=unlimited"), |mib| format!("{gpu}={mib}M"))
}
