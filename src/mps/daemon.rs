//! One control daemon: its start until its limits hold, its probes, its end.
//!
//! Called by `supervise`. It runs nvidia-cuda-mps-control in the foreground (`-f`, since driver 470), as a child and in a
//! process group of its own, so that its death is known at once and its servers can be ended with it. This is the one
//! place of ours that changes a GPU: its compute mode, as the NVIDIA daemon does, for clients that do not go through MPS
//! would take memory that nobody limits.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::control::{Control, ControlError, is_memory, is_percentage};
use super::layout::Layout;
use super::limits::Limits;
use crate::quote::one_line;
use crate::state::ResourceName;
use crate::topology::GpuUuid;

/// Answered by every driver that knows MPS limits, and changes nothing.
const PROBE: &str = "get_default_active_thread_percentage";
/// Ends the daemon; its servers have a second to end by themselves.
const QUIT: &str = "quit -t 1";
/// How often a daemon that has just been started is asked whether it answers.
const ASK_AGAIN: Duration = Duration::from_millis(50);

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
    /// From the order to quit until it has ended; then it is killed.
    pub quit: Duration,
    /// Between two probes of a daemon that serves.
    pub probe: Duration,
    /// Pauses before it is started again: doubling from the first to the second.
    pub pauses: (Duration, Duration),
}

/// All that a control daemon needs beside its resource.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The MPS root, as this process sees it.
    pub layout: Layout,
    /// The driver's programs.
    pub programs: Programs,
    /// How long things may take.
    pub pace: Pace,
}

/// Why a control daemon does not serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A folder under the MPS root cannot be made, or a file in it.
    #[error("cannot write {path}")]
    Write {
        /// What cannot be written.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another control daemon has the pipe directory and does not give it up.
    #[error("another control daemon serves {pipe} and does not quit")]
    Predecessor {
        /// The pipe directory.
        pipe: PathBuf,
        /// Why it could not be told to, where that failed.
        source: Option<ControlError>,
    },
    /// The compute mode of a GPU cannot be set.
    #[error("cannot set the compute mode of {gpu} to {mode}: {why}")]
    ComputeMode {
        /// The GPU.
        gpu: GpuUuid,
        /// The mode, in nvidia-smi's words.
        mode: &'static str,
        /// What happened.
        why: String,
    },
    /// The program could not be started.
    #[error("cannot start {program}")]
    Spawn {
        /// Its path.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// It ended.
    #[error("nvidia-cuda-mps-control ended: {0}")]
    Ended(ExitStatus),
    /// It did not answer in time.
    #[error("nvidia-cuda-mps-control does not answer {0:?} after its start")]
    Silent(Duration, #[source] ControlError),
    /// A limit could not be set, or does not hold; or it stopped answering.
    #[error("the control daemon is not to be relied on")]
    Control(#[from] ControlError),
}

/// A control daemon that runs; dropping it kills it and the servers in its group.
#[derive(Debug)]
pub struct Daemon {
    process: Group,
    control: Control,
    gpus: Vec<GpuUuid>,
    smi: PathBuf,
    pace: Pace,
}

/// nvidia-smi's words for a mode.
#[derive(Clone, Copy, Debug)]
enum ComputeMode {
    ExclusiveProcess,
    Default,
}

impl ComputeMode {
    fn word(self) -> &'static str {
        match self {
            Self::ExclusiveProcess => "EXCLUSIVE_PROCESS",
            Self::Default => "DEFAULT",
        }
    }
}

impl Daemon {
    /// Starts one and waits until the limits hold.
    ///
    /// # Errors
    ///
    /// See [`StartError`]; nothing runs any more then.
    pub async fn start(settings: &Settings, resource: &ResourceName, limits: &Limits) -> Result<Self, StartError> {
        let Settings { layout, programs, pace } = settings;
        let (pipe, log) = (layout.pipe(resource), layout.log(resource));
        for path in [&pipe, &log] {
            // Kept over restarts: running containers have the folder itself mounted.
            fs::create_dir_all(path).map_err(|source| StartError::Write { path: path.clone(), source })?;
        }
        let gpus: Vec<GpuUuid> = limits.memory.iter().map(|one| one.gpu.clone()).collect();
        let mut environment: Vec<(&str, OsString)> = vec![
            ("CUDA_MPS_PIPE_DIRECTORY", pipe.clone().into()),
            ("CUDA_MPS_LOG_DIRECTORY", log.into()),
            // So that the numbers are NVML's; CUDA's own order is the fastest GPU first.
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into()),
        ];
        if limits.shown_only {
            let shown: Vec<&str> = gpus.iter().map(GpuUuid::as_str).collect();
            environment.push(("CUDA_VISIBLE_DEVICES", shown.join(",").into()));
        }
        let control = Control { program: programs.control.clone(), environment, deadline: pace.answer };
        end_predecessor(&control, pipe, pace.quit).await?;
        set_compute_mode(&programs.smi, &gpus, ComputeMode::ExclusiveProcess, pace.answer).await?;
        let process = Group::spawn(&control)?;
        let mut daemon = Self { process, control, gpus, smi: programs.smi.clone(), pace: *pace };
        tokio::select! {
            ended = daemon.process.wait() => return Err(ended),
            held = configure(&daemon.control, limits, pace.start) => held?,
        }
        Ok(daemon)
    }

    /// Waits until it is no longer to be relied on, and says why. Cancel safe.
    pub async fn watch(&mut self) -> StartError {
        let probes = async {
            loop {
                sleep(self.pace.probe).await;
                if let Err(error) = self.control.ask(PROBE).await {
                    return error.into();
                }
            }
        };
        tokio::select! {
            ended = self.process.wait() => ended,
            failed = probes => failed,
        }
    }

    /// Ends it in order; after its time it is killed. The GPUs get back the compute mode that they come with.
    ///
    /// # Errors
    ///
    /// The compute mode cannot be set back; the daemon has ended all the same.
    pub async fn end(mut self) -> Result<(), StartError> {
        let orderly = async {
            // Whether it took the order shows in whether it ends.
            let _ = self.control.ask(QUIT).await;
            self.process.wait().await
        };
        let _ = timeout(self.pace.quit, orderly).await;
        drop(self.process);
        set_compute_mode(&self.smi, &self.gpus, ComputeMode::Default, self.pace.answer).await
    }
}

/// Sets the limits of a daemon that has just been started, and reads them back.
async fn configure(control: &Control, limits: &Limits, start: Duration) -> Result<(), StartError> {
    let began = Instant::now();
    while let Err(error) = control.ask(PROBE).await {
        // What cannot be started will not be startable in a moment.
        if began.elapsed() >= start || matches!(error, ControlError::Start { .. }) {
            return Err(StartError::Silent(began.elapsed(), error));
        }
        sleep(ASK_AGAIN).await;
    }
    for one in &limits.memory {
        let Some(mib) = one.mib else { continue };
        control.ask(&format!("set_default_device_pinned_mem_limit {} {mib}M", one.device)).await?;
        let back = format!("get_default_device_pinned_mem_limit {}", one.device);
        control.expect_that(&back, format!("{mib}M"), |answer| is_memory(answer, mib)).await?;
    }
    let percent = limits.thread_percentage;
    control.ask(&format!("set_default_active_thread_percentage {percent}")).await?;
    control.expect_that(PROBE, format!("{percent}.0"), |answer| is_percentage(answer, percent)).await?;
    Ok(())
}

/// Ends a daemon that outlived the process which started it, so that ours takes its place.
async fn end_predecessor(control: &Control, pipe: PathBuf, within: Duration) -> Result<(), StartError> {
    let began = Instant::now();
    let mut source = None;
    loop {
        match control.ask(PROBE).await {
            // Nobody is there.
            Err(ControlError::Failed { .. }) => return Ok(()),
            Err(error @ ControlError::Start { .. }) => return Err(error.into()),
            Err(error) => source = Some(error),
            Ok(_) => {
                let _ = control.ask(QUIT).await;
            }
        }
        if began.elapsed() >= within {
            return Err(StartError::Predecessor { pipe, source });
        }
        sleep(ASK_AGAIN).await;
    }
}

/// Sets the compute mode of each GPU; all are tried, also where one fails.
async fn set_compute_mode(
    smi: &PathBuf,
    gpus: &[GpuUuid],
    mode: ComputeMode,
    deadline: Duration,
) -> Result<(), StartError> {
    let set = |gpu: &GpuUuid| {
        let mut command = Command::new(smi);
        command.args(["-i", gpu.as_str(), "-c", mode.word()]).stdin(Stdio::null()).kill_on_drop(true);
        let gpu = gpu.clone();
        async move {
            let why = match timeout(deadline, command.output()).await {
                Ok(Ok(output)) if output.status.success() => return Ok(()),
                Ok(Ok(output)) => {
                    let said = [output.stdout, output.stderr].concat();
                    format!("nvidia-smi failed ({}): {}", output.status, one_line(&String::from_utf8_lossy(&said)))
                }
                Ok(Err(error)) => format!("cannot start nvidia-smi: {error}"),
                Err(_) => format!("no answer from nvidia-smi within {deadline:?}"),
            };
            Err(StartError::ComputeMode { gpu, mode: mode.word(), why })
        }
    };
    match mode {
        ComputeMode::ExclusiveProcess => try_join_all(gpus.iter().map(set)).await.map(drop),
        ComputeMode::Default => join_all(gpus.iter().map(set)).await.into_iter().collect(),
    }
}

/// A child that leads a process group of its own; the whole group is killed when it goes.
#[derive(Debug)]
struct Group {
    child: Child,
    id: Option<Pid>,
}

impl Group {
    fn spawn(control: &Control) -> Result<Self, StartError> {
        let child = Command::new(&control.program)
            .arg("-f")
            .envs(control.environment.iter().map(|(name, value)| (name, value)))
            // What it logs is our log: standard output and error are inherited.
            .stdin(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| StartError::Spawn { program: control.program.clone(), source })?;
        let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        Ok(Self { child, id })
    }

    /// Waits for its end. Cancel safe.
    async fn wait(&mut self) -> StartError {
        match self.child.wait().await {
            Ok(status) => StartError::Ended(status),
            Err(source) => StartError::Spawn { program: "nvidia-cuda-mps-control".into(), source },
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A server that outlives its control daemon keeps the GPU from the next. Where all have ended there is no
        // such group any more.
        if let Some(id) = self.id {
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}
