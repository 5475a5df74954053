//! One control daemon: its start until its limits hold, its probes, its end.
//!
//! Called by `supervise`. nvidia-cuda-mps-control runs in the foreground (`-f`, since driver 470), as a child and in a
//! process group of its own, so that its death shows at once and its servers can be ended with it.
//!
//! The GPUs of a daemon have the compute mode EXCLUSIVE_PROCESS while they are shared, as NVIDIA's daemon sets it: a
//! client that does not go through MPS would otherwise take memory that no limit covers. Nothing else in linkwise
//! changes a compute mode. Before a GPU's mode is set, a record of the GPU is written to the MPS root; it is removed
//! once the mode is DEFAULT again. So even if this process is killed, the next one sets back the modes that this one
//! set, and the mode of no other GPU.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::control::{self, Control, ControlError, ProgramError, is_memory, is_percentage};
use super::layout::Layout;
use super::limits::Limits;
use super::orders::exclusive_gpus;
use linkwise_core::errors::chain;
use linkwise_core::topology::GpuUuid;

/// The command of a probe: every driver that supports MPS limits answers it, and it changes nothing.
const PROBE: &str = "get_default_active_thread_percentage";
/// The command that ends the daemon; its servers have a second to end by themselves.
const QUIT: &str = "quit -t 1";
/// The time between two probes of a daemon that starts or ends.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// The programs of the driver.
#[derive(Clone, Debug)]
pub struct Programs {
    /// nvidia-cuda-mps-control.
    pub control: PathBuf,
    /// nvidia-smi, which sets the compute mode.
    pub smi: PathBuf,
}

/// The time limits and intervals of a control daemon.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The limit for one command to the control daemon, or one call of nvidia-smi.
    pub answer: Duration,
    /// The limit from the daemon's start until it answers.
    pub start: Duration,
    /// The limit from the command to quit until the daemon has ended; our own daemon is then killed.
    pub quit: Duration,
    /// The time between two probes of a daemon that serves.
    pub probe: Duration,
    /// The pause before a daemon that failed is started again; it doubles with each failure.
    pub first_pause: Duration,
    /// The longest such pause.
    pub longest_pause: Duration,
}

/// The settings of a control daemon, except its resource.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The MPS root in this container.
    pub layout: Layout,
    /// The driver's programs.
    pub programs: Programs,
    /// The folder in which the kernel shows SELinux, `/sys/fs/selinux`; it is missing if SELinux is disabled.
    pub selinuxfs: PathBuf,
    /// The time limits and intervals.
    pub pace: Pace,
}

/// The reason why a control daemon does not serve, or why a compute mode is wrong.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MpsError {
    #[error("cannot write {0}")]
    Write(PathBuf, #[source] io::Error),
    /// Another control daemon has the pipe directory and does not release it.
    #[error("another control daemon does not quit")]
    Predecessor(#[source] Option<ControlError>),
    #[error("cannot set the compute mode of {0} to {1}")]
    ComputeMode(GpuUuid, &'static str, #[source] ProgramError),
    #[error("cannot label {0} for SELinux, and containers may be denied the control daemon's sockets")]
    Label(PathBuf, #[source] io::Error),
    #[error("cannot mount a tmpfs at {0} (only a privileged container can)")]
    Mount(PathBuf, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// The host would not see a mount.
    #[error(
        "cannot mount the shared memory of claims below {0}: the host would not see the mount; set mountPropagation: \
         Bidirectional on the container's mount of that path"
    )]
    NotShared(PathBuf),
    #[error("cannot start nvidia-cuda-mps-control")]
    Spawn(#[source] io::Error),
    #[error("nvidia-cuda-mps-control ended: {0}")]
    Ended(ExitStatus),
    #[error("nvidia-cuda-mps-control does not answer {0:?} after its start")]
    Silent(Duration, #[source] ControlError),
    /// A limit could not be set, or did not last; or the daemon stopped answering.
    #[error("the control daemon does not work")]
    Control(#[from] ControlError),
}

/// A running control daemon: a child that leads a process group of its own. Dropping it kills the whole group.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    group: Option<Pid>,
    control: Control,
    limits: Vec<Limit>,
    pace: Pace,
}

impl Daemon {
    /// Starts a daemon and waits until its limits hold. After an error no process is left.
    pub async fn start(control: Control, limits: &Limits, pace: Pace) -> Result<Self, MpsError> {
        // The daemon's log is linkwise's log: standard output and error are inherited.
        let mut command = control.foreground();
        command.stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        let child = command.spawn().map_err(MpsError::Spawn)?;
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let mut daemon = Self { child, group, control, limits: limit_list(limits), pace };
        tokio::select! {
            status = daemon.child.wait() => return Err(status.map_or_else(MpsError::Spawn, MpsError::Ended)),
            confirmed = configure(&daemon.control, &daemon.limits, pace.start) => confirmed?,
        }
        Ok(daemon)
    }

    /// Waits until the daemon fails, and returns the reason. Each probe enforces the thread limit; the probes take
    /// turns at the GPUs' memory limits. Cancel safe.
    pub async fn watch(&mut self) -> MpsError {
        let probes = async {
            for limit in self.limits.iter().cycle() {
                sleep(self.pace.probe).await;
                let threads = self.limits.last().filter(|_| matches!(limit, Limit::Memory(..)));
                for limit in threads.into_iter().chain([limit]) {
                    if let Err(error) = enforce(&self.control, *limit).await {
                        return error.into();
                    }
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            status = self.child.wait() => status.map_or_else(MpsError::Spawn, MpsError::Ended),
            failed = probes => failed,
        }
    }

    /// Tells the daemon to quit; kills it after [`Pace::quit`].
    pub async fn end(mut self) {
        let orderly = async {
            // A daemon that did not take the command does not end: dropping `self` kills it after the timeout.
            let _ = self.control.send(QUIT).await;
            self.child.wait().await
        };
        let _ = timeout(self.pace.quit, orderly).await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A server that outlives its control daemon keeps the GPU from the next one. If all processes have ended, the
        // group no longer exists.
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Waits until a daemon that was just started answers, sets its limits, and reads them back.
async fn configure(control: &Control, limits: &[Limit], start: Duration) -> Result<(), MpsError> {
    let began = Instant::now();
    while let Err(error) = control.send(PROBE).await {
        if began.elapsed() >= start {
            return Err(MpsError::Silent(began.elapsed(), error));
        }
        sleep(PROBE_INTERVAL).await;
    }
    for limit in limits {
        set_limit(control, *limit).await?;
    }
    Ok(())
}

/// One limit of a daemon.
#[derive(Clone, Copy, Debug)]
enum Limit {
    /// The limit of the threads, in percent.
    Threads(u32),
    /// The limit of the memory of the GPU with this number, in MiB.
    Memory(u32, u64),
}

/// The limits of a daemon, one by one; the limit of the threads comes last.
fn limit_list(limits: &Limits) -> Vec<Limit> {
    let memory = limits.memory.iter().filter_map(|limit| Some(Limit::Memory(limit.device, limit.mib?)));
    memory.chain([Limit::Threads(limits.thread_percentage)]).collect()
}

async fn set_limit(control: &Control, limit: Limit) -> Result<(), ControlError> {
    let set = match limit {
        Limit::Threads(percent) => format!("set_default_active_thread_percentage {percent}"),
        Limit::Memory(device, mib) => format!("set_default_device_pinned_mem_limit {device} {mib}M"),
    };
    control.send(&set).await?;
    confirm(control, limit).await
}

async fn confirm(control: &Control, limit: Limit) -> Result<(), ControlError> {
    let (get, wanted) = match limit {
        Limit::Threads(percent) => (PROBE.to_owned(), format!("{percent}.0")),
        Limit::Memory(device, mib) => (format!("get_default_device_pinned_mem_limit {device}"), format!("{mib}M")),
    };
    let answer = control.send(&get).await?;
    let holds = match limit {
        Limit::Threads(percent) => is_percentage(&answer, percent),
        Limit::Memory(_, mib) => is_memory(&answer, mib),
    };
    if holds { Ok(()) } else { Err(ControlError::NotHeld(get, answer, wanted)) }
}

/// Confirms a limit. Sets it again if a client has changed it, which every client that runs as root can do. Fails if
/// the limit does not hold after that.
async fn enforce(control: &Control, limit: Limit) -> Result<(), ControlError> {
    match confirm(control, limit).await {
        Err(error @ ControlError::NotHeld(..)) => {
            let why = chain(&error);
            tracing::warn!(why, "MPS limit changed by a client, set again; clients started meanwhile keep the change");
            set_limit(control, limit).await
        }
        confirmed => confirmed,
    }
}

/// Ends a daemon that outlived the process which started it, so that ours can take its place.
pub(super) async fn end_predecessor(control: &Control, within: Duration) -> Result<(), MpsError> {
    let began = Instant::now();
    loop {
        let source = match control.send(PROBE).await {
            // No daemon answers.
            Err(ControlError::NoAnswer(_, ProgramError::Failed(..))) => return Ok(()),
            Err(error @ ControlError::NoAnswer(_, ProgramError::Run(..))) => return Err(error.into()),
            Err(error) => Some(error),
            Ok(_) => control.send(QUIT).await.err(),
        };
        if began.elapsed() >= within {
            return Err(MpsError::Predecessor(source));
        }
        sleep(PROBE_INTERVAL).await;
    }
}

const EXCLUSIVE_PROCESS: &str = "EXCLUSIVE_PROCESS";
const DEFAULT: &str = "DEFAULT";

/// Sets GPUs to EXCLUSIVE_PROCESS, each with a record. If one GPU fails, others may be set all the same; [`set_back`]
/// covers them all.
pub async fn set_exclusive(settings: &Settings, gpus: &[&GpuUuid]) -> Result<(), MpsError> {
    let folder = settings.layout.exclusive();
    let record = |path: &PathBuf| fs::create_dir_all(&folder).and_then(|()| File::create(path).map(drop));
    for path in gpus.iter().map(|gpu| folder.join(gpu.as_str())) {
        record(&path).map_err(|source| MpsError::Write(path, source))?;
    }
    try_join_all(gpus.iter().map(|gpu| set_mode(settings, gpu, EXCLUSIVE_PROCESS))).await.map(drop)
}

/// Sets recorded GPUs for which `is_due` is true back to DEFAULT. All are tried; the records of GPUs that failed stay,
/// and the first error is returned.
pub async fn set_back(settings: &Settings, is_due: impl Fn(&GpuUuid) -> bool) -> Result<(), MpsError> {
    let folder = settings.layout.exclusive();
    let recorded = exclusive_gpus(&settings.layout);
    let recorded = recorded.map_err(|source| MpsError::Write(folder.clone(), source))?;
    let gpus: Vec<GpuUuid> = recorded.into_iter().filter(is_due).collect();
    let set_back = async |gpu: &GpuUuid| {
        set_mode(settings, gpu, DEFAULT).await?;
        let path = folder.join(gpu.as_str());
        fs::remove_file(&path).map_err(|source| MpsError::Write(path, source))
    };
    join_all(gpus.iter().map(set_back)).await.into_iter().collect()
}

async fn set_mode(settings: &Settings, gpu: &GpuUuid, mode: &'static str) -> Result<(), MpsError> {
    let mut command = Command::new(&settings.programs.smi);
    command.args(["-i", gpu.as_str(), "-c", mode]);
    let set = control::run(&mut command, "", settings.pace.answer).await;
    set.map(drop).map_err(|source| MpsError::ComputeMode(gpu.clone(), mode, source))
}
