//! The parent's end of the NVML agent: starts it, reads its messages, sends requests, ends it.
//!
//! Called by `supervisor`, which owns the restart policy, and by commands. The process is the only thing started here:
//! the caller drives an [`Agent`] by awaiting [`Agent::next`].

use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::agent::POLL_INTERVAL;
use super::gate::Gate;
use super::memory::MemoryWatch;
use super::protocol::{Called, FromAgent, Incoming, Place, ProtocolError, ToAgent, encode};
use super::watchdog::{Limits, Watchdog};

/// The time that an agent has to end after it was killed or has closed its socket.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The least room for one read, in bytes.
const MIN_READ: usize = 8 << 10;

/// The longest time for reading the file with a process's state.
const STAT_TIMEOUT: Duration = Duration::from_millis(500);

/// Signals that the library does not cause: an operator sends them, or the kernel when memory runs out. SIGHUP, SIGINT,
/// SIGKILL, SIGTERM (signal(7)).
const OUTSIDE_SIGNALS: [i32; 4] = [1, 2, 9, 15];

/// The settings for starting an agent. Those without `serde(skip)` become the agent's one argument, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCommand {
    /// The program that has the subcommand `nvml-agent`: ours.
    #[serde(skip)]
    pub program: PathBuf,
    /// The path of the driver's library, or of a driver's root, chosen by the operator.
    pub library: Option<PathBuf>,
    /// The driver's root that is searched first, before the dynamic linker's path, if the operator chose no
    /// library.
    pub driver_root: Option<PathBuf>,
    /// The path of the kernel's /proc.
    pub procfs: PathBuf,
    /// The time from one poll of the agent to the next.
    pub poll: Duration,
    /// The longest times for the agent's calls.
    #[serde(skip)]
    pub limits: Limits,
    /// The most unreclaimable memory that the agent may have, in MiB; an agent with more is killed.
    #[serde(skip)]
    pub memory_mib: u64,
    /// The path of /proc with the processes of this PID namespace.
    #[serde(skip)]
    pub processes: PathBuf,
    /// The node's gate, which the agent enters before it uses the driver.
    pub gate: Option<Gate>,
    /// The GPUs about which the agent must make no call.
    pub skip: Vec<Place>,
    /// The file to which the agent appends a line for each call.
    pub calls: Option<PathBuf>,
    /// Variables added to the inherited environment.
    #[serde(skip)]
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// The usual settings for an agent, whose memory has no limit.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            procfs: PathBuf::from("/proc"),
            poll: POLL_INTERVAL,
            memory_mib: u64::MAX,
            processes: PathBuf::from("/proc"),
            ..Self::default()
        }
    }
}

/// The reason why no more messages come from an agent, which has ended or was killed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AgentEnded {
    #[error("the NVML agent ended: {0}")]
    Exited(ExitStatus),
    #[error("the NVML agent closed its socket, did not end, and was killed")]
    Silent,
    #[error("the NVML agent sent no message within {0:?} and was killed")]
    Late(Duration),
    #[error("{0} did not return within {1:?}, and the NVML agent was killed")]
    Hung(Called, Duration),
    #[error("nvmlEventSetWait_v2 has not returned for {0:?}, and the NVML agent was killed")]
    EventWaitHung(Duration),
    /// The agent had more memory than its limit, both in MiB, and was killed.
    #[error(
        "the NVML agent had {0} MiB of memory that the kernel cannot take back, more than {1} MiB \
         (--nvml-memory-mib, LINKWISE_NVML_MEMORY_MIB), and was killed"
    )]
    Memory(u64, u64),
    #[error("the NVML agent has been stopped (a signal, a debugger) for {0:?} and was killed")]
    Stopped(Duration),
    #[error("the NVML agent sent an invalid message")]
    Protocol(#[source] ProtocolError),
    #[error("cannot read from the NVML agent")]
    Io(#[source] io::Error),
}

impl AgentEnded {
    /// Returns true if the library crashed: a signal that only a crash sends ended the process.
    pub fn is_crash(&self) -> bool {
        let Self::Exited(status) = self else { return false };
        status.signal().is_some_and(|signal| !OUTSIDE_SIGNALS.contains(&signal))
    }
}

/// A running agent; dropping it kills the process.
#[derive(Debug)]
pub struct Agent {
    wire: Wire,
    watchdog: Watchdog,
    memory: MemoryWatch,
}

/// The process and our end of its socket.
#[derive(Debug)]
struct Wire {
    process: Child,
    stream: UnixStream,
    incoming: Incoming,
    /// Set once the agent's end of the socket is closed.
    is_closed: bool,
}

impl Agent {
    /// Starts an agent. It must be called within a tokio runtime. Errors after the start come from [`Agent::next`].
    pub fn spawn(command: &AgentCommand) -> anyhow::Result<Self> {
        let sockets = StdUnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            Ok((UnixStream::from_std(ours)?, theirs))
        });
        let (stream, theirs) = sockets.context("cannot make the socket for the NVML agent")?;
        let failed = || format!("cannot start the NVML agent {}", command.program.display());
        let text = serde_json::to_string(command).with_context(failed)?;
        let mut process = Command::new(&command.program);
        process.args(["nvml-agent", &text]).envs(command.environment.iter().cloned());
        process.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).kill_on_drop(true);
        let process = process.spawn().with_context(failed)?;
        let now = Instant::now();
        let watchdog = Watchdog::new(command.limits, command.poll, now);
        let memory = MemoryWatch::new(&command.processes, command.memory_mib, now);
        Ok(Self { wire: Wire { process, stream, incoming: Incoming::default(), is_closed: false }, watchdog, memory })
    }

    /// The process id; `None` once the process has been reaped.
    pub fn id(&self) -> Option<u32> {
        self.wire.process.id()
    }

    /// The call that the agent reported last and that has not returned. A crash is blamed on this call.
    pub fn open_call(&self) -> Option<&Called> {
        self.watchdog.open_call.as_ref()
    }

    /// Returns true if NVML was initialised at the agent's last message.
    pub fn has_initialised(&self) -> bool {
        self.watchdog.has_initialised()
    }

    /// Describes the agent's end for people; a crash with the call in which the library crashed.
    pub fn describe(&self, ended: &AgentEnded) -> String {
        let source = std::error::Error::source(ended).map(|source| format!(": {source}")).unwrap_or_default();
        match self.open_call().filter(|_| ended.is_crash()) {
            Some(called) => format!("the NVML library crashed in {called}: {ended}{source}"),
            None => format!("{ended}{source}"),
        }
    }

    /// Returns the agent's next message. Reports of calls are not returned: they are for the watchdog. An agent that is
    /// late, or has too much memory, is killed. Cancel safe: nothing is lost when the future is dropped. An error means
    /// that the agent has ended or is being killed.
    pub async fn next(&mut self) -> Result<FromAgent, AgentEnded> {
        loop {
            let (process, until, is_closed) = (self.id(), self.watchdog.deadline, self.wire.is_closed);
            // An agent that closed its socket has a separate limit for its end.
            let deadline = async { if is_closed { pending().await } else { sleep_until(until).await } };
            let received = tokio::select! {
                // The agent's messages are read before the agent is killed.
                biased;
                received = self.wire.receive() => Some(received),
                has_mib = self.memory.exceeded(process) => {
                    return Err(self.wire.give_up(AgentEnded::Memory(has_mib, self.memory.limit_mib)));
                }
                () = deadline => None,
            };
            let Some(received) = received else {
                if self.wire.is_closed || !self.watchdog.confirm_expiry(Instant::now()) {
                    continue;
                }
                let cause = self.silence_cause().await;
                return Err(self.wire.give_up(cause));
            };
            let message = received?;
            if let Some(waiting) = self.watchdog.received(&message, Instant::now()) {
                return Err(self.wire.give_up(AgentEnded::EventWaitHung(waiting)));
            }
            if !matches!(message, FromAgent::Calling(_)) {
                return Ok(message);
            }
        }
    }

    /// Finds the reason for the silence. If the process was stopped, no call and no GPU is to blame.
    async fn silence_cause(&mut self) -> AgentEnded {
        let limit = self.watchdog.limit;
        let stat = match self.id() {
            Some(id) => timeout(STAT_TIMEOUT, tokio::fs::read_to_string(format!("/proc/{id}/stat"))).await.ok(),
            None => None,
        };
        let stat = stat.and_then(Result::ok).unwrap_or_default();
        // The state follows the name in brackets, which may hold anything (proc_pid_stat(5)): T is stopped, t traced.
        let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
        match (state, self.open_call()) {
            (Some("T" | "t"), _) => AgentEnded::Stopped(limit),
            (_, Some(called)) => AgentEnded::Hung(called.clone(), limit),
            (_, None) => AgentEnded::Late(limit),
        }
    }

    /// Sends a request to the agent; the answer comes from [`Agent::next`]. Fails if the agent has ended:
    /// [`Agent::next`] returns the reason.
    pub async fn request(&mut self, request: ToAgent) -> io::Result<()> {
        let line = encode(&request).map_err(io::Error::other)?;
        self.wire.stream.write_all(&line).await
    }

    /// Kills the process and waits for its end, but not for a process that hangs in the kernel.
    pub async fn end(self) {
        let _ = timeout(END_TIMEOUT, self.kill()).await;
    }

    /// Kills the process and waits until it has ended, however long that takes.
    pub fn kill(self) -> impl Future<Output = ()> + Send + use<> {
        let mut process = self.wire.process;
        async move {
            // Each of these fails only if the process has ended already.
            let _ = process.start_kill();
            let _ = process.wait().await;
        }
    }
}

impl Wire {
    async fn receive(&mut self) -> Result<FromAgent, AgentEnded> {
        while !self.is_closed {
            match self.incoming.take() {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(error) => return Err(self.give_up(AgentEnded::Protocol(error))),
            }
            let buffer = self.incoming.buffer();
            buffer.reserve(MIN_READ);
            match self.stream.read_buf(buffer).await {
                // If the agent closes before it has read all requests, the kernel reports a reset.
                Ok(0) => self.is_closed = true,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.is_closed = true,
                Ok(_) => {}
                Err(error) => return Err(self.give_up(AgentEnded::Io(error))),
            }
        }
        match timeout(END_TIMEOUT, self.process.wait()).await {
            Ok(Ok(status)) => Err(AgentEnded::Exited(status)),
            Ok(Err(error)) => Err(AgentEnded::Io(error)),
            // The killed process is not awaited: if it hangs in the kernel, it survives SIGKILL.
            Err(_) => Err(self.give_up(AgentEnded::Silent)),
        }
    }

    fn give_up(&mut self, cause: AgentEnded) -> AgentEnded {
        self.is_closed = true;
        // This fails only if the agent has ended already.
        let _ = self.process.start_kill();
        cause
    }
}
