//! One control daemon: its start until its limits hold, its probes, its end.
//!
//! Called by `supervise`. It runs nvidia-cuda-mps-control in the foreground (`-f`, since driver 470), as a child and in
//! a process group of its own, so that its death shows at once and its servers can be ended with it.

use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

use super::control::{Control, ControlError, is_memory, is_percentage};
use super::layout::Layout;
use super::limits::Limits;
use super::program::ProgramError;
use crate::topology::GpuUuid;

/// Answered by every driver that supports MPS limits, and changes nothing.
const PROBE: &str = "get_default_active_thread_percentage";
/// Ends the daemon; its servers have a second to end by themselves.
const QUIT: &str = "quit -t 1";
/// How often a daemon that has just been started is probed until it answers.
const PROBE_AGAIN: Duration = Duration::from_millis(50);

/// The programs of the driver.
#[derive(Clone, Debug)]
pub struct Programs {
    /// nvidia-cuda-mps-control.
    pub control: PathBuf,
    /// nvidia-smi, which sets the compute mode.
    pub smi: PathBuf,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// One command to the control daemon, or one call of nvidia-smi.
    pub answer: Duration,
    /// From the daemon's start until it answers.
    pub start: Duration,
    /// From the command to quit until it has ended; then it is killed.
    pub quit: Duration,
    /// Between two probes of a daemon that serves.
    pub probe: Duration,
    /// Pauses before it is started again: doubling from the first to the second.
    pub pauses: (Duration, Duration),
}

/// All that a control daemon needs beside its resource.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The MPS root in this container.
    pub layout: Layout,
    /// The driver's programs.
    pub programs: Programs,
    /// Where the kernel shows SELinux, `/sys/fs/selinux`; it is not there where SELinux is disabled.
    pub selinuxfs: PathBuf,
    /// How long things may take.
    pub pace: Pace,
}

/// Why a control daemon does not serve, or a compute mode is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// A folder or file under the MPS root cannot be made, read or removed.
    #[error("cannot write {path}")]
    Write {
        /// The folder or file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another control daemon has the pipe directory and does not give it up.
    #[error("another control daemon does not quit")]
    Predecessor(#[source] Option<ControlError>),
    /// The compute mode of a GPU cannot be set.
    #[error("cannot set the compute mode of {gpu} to {mode}")]
    ComputeMode {
        /// The GPU.
        gpu: GpuUuid,
        /// The mode, in nvidia-smi's words.
        mode: &'static str,
        /// Why not.
        source: ProgramError,
    },
    /// SELinux would keep containers from the control daemon's sockets.
    #[error("cannot label {path} for SELinux: containers may not reach the control daemon")]
    Label {
        /// The pipe directory, or what is in it.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The shared memory cannot be mounted.
    #[error("cannot mount a tmpfs at {path} (it takes a privileged container)")]
    Mount {
        /// The folder.
        path: PathBuf,
        /// What happened.
        source: ProgramError,
    },
    /// The program could not be started, or its end cannot be waited for.
    #[error("cannot start nvidia-cuda-mps-control")]
    Spawn(#[source] io::Error),
    /// It ended.
    #[error("nvidia-cuda-mps-control ended: {0}")]
    Ended(ExitStatus),
    /// It did not answer in time.
    #[error("nvidia-cuda-mps-control does not answer {0:?} after its start")]
    Silent(Duration, #[source] ControlError),
    /// A limit could not be set, or does not hold; or it stopped answering.
    #[error("the control daemon does not work")]
    Control(#[from] ControlError),
}

/// A control daemon that runs, a child that leads a process group of its own; the whole group is killed when it goes.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    group: Option<Pid>,
    control: Control,
    pace: Pace,
}

impl Daemon {
    /// Starts one and waits until the limits hold.
    ///
    /// # Errors
    ///
    /// See [`MpsError`]; nothing runs any more then.
    pub async fn start(control: Control, limits: &Limits, pace: Pace) -> Result<Self, MpsError> {
        // What it logs is our log: standard output and error are inherited.
        let mut command = control.program();
        command.arg("-f").stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        let child = command.spawn().map_err(MpsError::Spawn)?;
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let mut daemon = Self { child, group, control, pace };
        tokio::select! {
            status = daemon.child.wait() => return Err(status.map_or_else(MpsError::Spawn, MpsError::Ended)),
            confirmed = configure(&daemon.control, limits, pace.start) => confirmed?,
        }
        Ok(daemon)
    }

    /// Waits until it fails, and returns why. Cancel safe.
    pub async fn watch(&mut self) -> MpsError {
        let probes = async {
            loop {
                sleep(self.pace.probe).await;
                if let Err(error) = self.control.ask(PROBE).await {
                    return error.into();
                }
            }
        };
        tokio::select! {
            status = self.child.wait() => status.map_or_else(MpsError::Spawn, MpsError::Ended),
            failed = probes => failed,
        }
    }

    /// Ends it in order; after its time it is killed.
    pub async fn end(mut self) {
        let orderly = async {
            // If it did not take the command, it does not end.
            let _ = self.control.ask(QUIT).await;
            self.child.wait().await
        };
        let _ = timeout(self.pace.quit, orderly).await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A server that outlives its control daemon keeps the GPU from the next. Where all have ended there is no
        // such group any more.
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Sets the limits of a daemon that has just been started, and reads them back.
async fn configure(control: &Control, limits: &Limits, start: Duration) -> Result<(), MpsError> {
    let began = Instant::now();
    while let Err(error) = control.ask(PROBE).await {
        if began.elapsed() >= start {
            return Err(MpsError::Silent(began.elapsed(), error));
        }
        sleep(PROBE_AGAIN).await;
    }
    for one in &limits.memory {
        let Some(mib) = one.mib else { continue };
        control.ask(&format!("set_default_device_pinned_mem_limit {} {mib}M", one.device)).await?;
        let back = format!("get_default_device_pinned_mem_limit {}", one.device);
        control.confirm(&back, format!("{mib}M"), |answer| is_memory(answer, mib)).await?;
    }
    let percent = limits.thread_percentage;
    control.ask(&format!("set_default_active_thread_percentage {percent}")).await?;
    control.confirm(PROBE, format!("{percent}.0"), |answer| is_percentage(answer, percent)).await?;
    Ok(())
}

/// Ends a daemon that outlived the process which started it, so that ours takes its place.
pub(super) async fn end_predecessor(control: &Control, within: Duration) -> Result<(), MpsError> {
    let began = Instant::now();
    loop {
        let source = match control.ask(PROBE).await {
            // No daemon answers.
            Err(ControlError::NoAnswer { source: ProgramError::Failed { .. }, .. }) => return Ok(()),
            Err(error @ ControlError::NoAnswer { source: ProgramError::Run { .. }, .. }) => return Err(error.into()),
            Err(error) => Some(error),
            Ok(_) => control.ask(QUIT).await.err(),
        };
        if began.elapsed() >= within {
            return Err(MpsError::Predecessor(source));
        }
        sleep(PROBE_AGAIN).await;
    }
}
