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

/// The time that a child has to end after it was killed or has closed its socket.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// The least number of bytes to read at once.
const READ: usize = 8 << 10;

/// The longest time for reading the file with a process's state.
const FILES: Duration = Duration::from_millis(500);

/// Signals that the library did not cause: an operator or the kernel sends them, the kernel when memory runs out.
/// SIGHUP, SIGINT, SIGKILL, SIGTERM (signal(7)).
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// The settings for starting an agent. A part of them becomes the agent's one argument, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCommand {
    /// The program that has the subcommand `nvml-agent`: ours.
    #[serde(skip)]
    pub program: PathBuf,
    /// The path of the driver's library, or of a driver's root, chosen by the operator.
    pub library: Option<PathBuf>,
    /// The driver's root that is searched first, before the dynamic linker's path, if the operator chose none.
    pub driver_root: Option<PathBuf>,
    /// The path of the kernel's /proc.
    pub procfs: PathBuf,
    /// The time from one poll of the child to the next.
    pub poll: Duration,
    /// The longest times for its calls.
    #[serde(skip)]
    pub limits: Limits,
    /// The most unreclaimable memory that the agent may have, in MiB; an agent with more is killed.
    #[serde(skip)]
    pub memory_mib: u64,
    /// The path of /proc with the processes of this PID namespace.
    #[serde(skip)]
    pub processes: PathBuf,
    /// The node's gate, through which it comes to the driver.
    pub gate: Option<Gate>,
    /// The GPUs that it must not touch.
    pub skip: Vec<Place>,
    /// The file that gets a line for each of its calls.
    pub calls: Option<PathBuf>,
    /// Variables added to the inherited environment.
    #[serde(skip)]
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// The usual settings for a child of this program, whose memory has no limit.
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
    #[error("the NVML agent stopped talking and was killed")]
    Silent,
    #[error("the NVML agent said nothing within {0:?} and was killed")]
    Late(Duration),
    #[error("{0} did not return within {1:?}, and the NVML agent was killed")]
    Hung(Called, Duration),
    #[error("nvmlEventSetWait_v2 has not returned for {0:?}, and the NVML agent was killed")]
    Deaf(Duration),
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
    #[error("cannot hear the NVML agent")]
    Io(#[source] io::Error),
}

impl AgentEnded {
    /// Returns true if the library crashed: a signal ended the process that comes only from a crash.
    pub fn is_crash(&self) -> bool {
        let Self::Exited(status) = self else { return false };
        status.signal().is_some_and(|signal| !FROM_OUTSIDE.contains(&signal))
    }
}

/// A running child; dropping it kills it.
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
    /// Set once the child's end of the socket is closed.
    closed: bool,
}

impl Agent {
    /// Starts a child. It must be called within a tokio runtime. Errors after the start come from [`Agent::next`].
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
        Ok(Self { wire: Wire { process, stream, incoming: Incoming::default(), closed: false }, watchdog, memory })
    }

    /// The process id; `None` once the process has been reaped.
    pub fn id(&self) -> Option<u32> {
        self.wire.process.id()
    }

    /// The call that the agent reported last and that has not returned. A crash is blamed on this call.
    pub fn open(&self) -> Option<&Called> {
        self.watchdog.open.as_ref()
    }

    /// Returns true if NVML was initialised at the agent's last message.
    pub fn has_initialised(&self) -> bool {
        self.watchdog.has_initialised()
    }

    /// Describes the agent's end for people: for a crash, with the call in which the library crashed.
    pub fn account(&self, ended: &AgentEnded) -> String {
        let source = std::error::Error::source(ended).map(|source| format!(": {source}")).unwrap_or_default();
        match self.open().filter(|_| ended.is_crash()) {
            Some(called) => format!("the NVML library crashed in {called}: {ended}{source}"),
            None => format!("{ended}{source}"),
        }
    }

    /// Returns the agent's next message. Reports of calls are not returned: they are for the watchdog. An agent that is
    /// late, or has too much memory, is killed. Cancel safe: nothing is lost when the future is dropped. An error means
    /// that the child has ended, or is being killed for its messages or its silence.
    pub async fn next(&mut self) -> Result<FromAgent, AgentEnded> {
        loop {
            let (process, until, closed) = (self.id(), self.watchdog.until, self.wire.closed);
            // An agent that closed its socket has a separate limit for its end.
            let deadline = async { if closed { pending().await } else { sleep_until(until).await } };
            let received = tokio::select! {
                // The agent's messages are read before the agent is killed.
                biased;
                received = self.wire.receive() => Some(received),
                has_mib = self.memory.exceeded(process) => {
                    return Err(self.wire.give_up(AgentEnded::Memory(has_mib, self.memory.bound_mib)));
                }
                () = deadline => None,
            };
            let Some(received) = received else {
                if self.wire.closed || !self.watchdog.is_expired(Instant::now()) {
                    continue;
                }
                let cause = self.silence().await;
                return Err(self.wire.give_up(cause));
            };
            let message = received?;
            if let Some(waiting) = self.watchdog.heard(&message, Instant::now()) {
                return Err(self.wire.give_up(AgentEnded::Deaf(waiting)));
            }
            if !matches!(message, FromAgent::Calling(_)) {
                return Ok(message);
            }
        }
    }

    /// Finds the reason for the silence. If the process was stopped, no call and no GPU is to blame.
    async fn silence(&mut self) -> AgentEnded {
        let limit = self.watchdog.limit;
        let stat = match self.id() {
            Some(id) => timeout(FILES, tokio::fs::read_to_string(format!("/proc/{id}/stat"))).await.ok(),
            None => None,
        };
        let stat = stat.and_then(Result::ok).unwrap_or_default();
        // The name in brackets may hold anything; the state follows it (proc_pid_stat(5)): stopped, or traced.
        let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
        match (state, self.open()) {
            (Some("T" | "t"), _) => AgentEnded::Stopped(limit),
            (_, Some(called)) => AgentEnded::Hung(called.clone(), limit),
            (_, None) => AgentEnded::Late(limit),
        }
    }

    /// Sends a request to the child; the answer comes from [`Agent::next`]. Fails if the agent has ended:
    /// [`Agent::next`] returns the reason.
    pub async fn request(&mut self, request: ToAgent) -> io::Result<()> {
        let line = encode(&request).map_err(io::Error::other)?;
        self.wire.stream.write_all(&line).await
    }

    /// Kills the process and waits for its end, but not for a process that hangs in the kernel.
    pub async fn end(self) {
        let _ = timeout(LAST_MOMENTS, self.gone()).await;
    }

    /// Kills the process and waits until it has ended, however long that takes.
    pub fn gone(self) -> impl Future<Output = ()> + Send + use<> {
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
        while !self.closed {
            match self.incoming.take() {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(error) => return Err(self.give_up(AgentEnded::Protocol(error))),
            }
            let buffer = self.incoming.buffer();
            buffer.reserve(READ);
            match self.stream.read_buf(buffer).await {
                // A close before the child read all requests counts as a reset.
                Ok(0) => self.closed = true,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.closed = true,
                Ok(_) => {}
                Err(error) => return Err(self.give_up(AgentEnded::Io(error))),
            }
        }
        match timeout(LAST_MOMENTS, self.process.wait()).await {
            Ok(Ok(status)) => Err(AgentEnded::Exited(status)),
            Ok(Err(error)) => Err(AgentEnded::Io(error)),
            // The end is not awaited: a child that hangs in the kernel does not even die.
            Err(_) => Err(self.give_up(AgentEnded::Silent)),
        }
    }

    fn give_up(&mut self, cause: AgentEnded) -> AgentEnded {
        self.closed = true;
        // This fails only if the child has ended already.
        let _ = self.process.start_kill();
        cause
    }
}
