//! The parent's end of the NVML agent: starts it, reads its messages, sends requests, ends it.
//!
//! Called by the runtime, which owns the restart policy. Nothing is spawned here but the process: the caller drives an
//! [`Agent`] by awaiting [`Agent::next`].

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout, timeout_at};

use super::agent::{MEMORY_MIB, POLL_INTERVAL};
use super::protocol::{Called, FromAgent, Incoming, Place, ProtocolError, ToAgent, encode};
use super::watchdog::{Limits, Watchdog};

/// How long a child whose socket is closed has to end by itself.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// How much is read at once, in bytes, at least.
const READ: usize = 8 << 10;

/// How to start an agent, and what it needs of this: its one argument, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCommand {
    /// The program that has the subcommand `nvml-agent`: ours.
    #[serde(skip)]
    pub program: PathBuf,
    /// The path of the driver's library, or of a driver's root; the usual names are tried without one.
    pub library: Option<PathBuf>,
    /// Where the kernel's /proc is.
    pub procfs: PathBuf,
    /// How long from one of the child's rounds to the next.
    pub poll: Duration,
    /// How long its calls may take.
    #[serde(skip)]
    pub limits: Limits,
    /// How much memory of its own it may have, in MiB.
    pub memory_mib: u64,
    /// The GPUs that it must not touch.
    pub skip: Vec<Place>,
    /// Variables added to the inherited environment.
    #[serde(skip)]
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// The usual way to start a child of this program.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            library: None,
            procfs: PathBuf::from("/proc"),
            poll: POLL_INTERVAL,
            limits: Limits::default(),
            memory_mib: MEMORY_MIB,
            skip: Vec::new(),
            environment: Vec::new(),
        }
    }
}

/// Why no child was started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is no socket to be had.
    #[error("cannot make the socket for the NVML agent")]
    Socket(#[source] io::Error),
    /// The program could not be started.
    #[error("cannot start the NVML agent {program}")]
    Program {
        /// Its path.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Why no more messages come from an agent, which has ended or was killed.
#[derive(Debug, thiserror::Error)]
pub enum AgentEnded {
    /// It ended; the status names the exit code or the signal.
    #[error("the NVML agent ended: {0}")]
    Exited(ExitStatus),
    /// It closed its socket but went on, and was killed.
    #[error("the NVML agent stopped talking and was killed")]
    Silent,
    /// It said nothing in time, and was killed.
    #[error("the NVML agent said nothing within {0:?} and was killed")]
    Late(Duration),
    /// A call of its did not return in time, and it was killed.
    #[error("{called} did not return within {limit:?}, and the NVML agent was killed")]
    Hung {
        /// The call.
        called: Called,
        /// How long it was given.
        limit: Duration,
    },
    /// Its wait for events did not end, and it was killed.
    #[error("nvmlEventSetWait_v2 has not returned for {0:?}, and the NVML agent was killed")]
    Deaf(Duration),
    /// Somebody has stopped it, and it was killed.
    #[error("the NVML agent has been stopped (a signal, a debugger) for {0:?} and was killed")]
    Stopped(Duration),
    /// It said what is no message, and was killed.
    #[error("the NVML agent said what is no message")]
    Protocol(#[source] ProtocolError),
    /// It cannot be read from, or its end cannot be learnt.
    #[error("cannot hear the NVML agent")]
    Io(#[source] io::Error),
}

/// A running child; dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    stream: UnixStream,
    incoming: Incoming,
    watchdog: Watchdog,
    /// Whether the child's end of the socket is closed.
    closed: bool,
}

impl Agent {
    /// Starts a child. It must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`SpawnError`]; what goes wrong after the start comes from [`Agent::next`].
    pub fn spawn(command: &AgentCommand) -> Result<Self, SpawnError> {
        let (ours, theirs) = StdUnixStream::pair().map_err(SpawnError::Socket)?;
        ours.set_nonblocking(true).map_err(SpawnError::Socket)?;
        let stream = UnixStream::from_std(ours).map_err(SpawnError::Socket)?;
        let failed = |source| SpawnError::Program { program: command.program.clone(), source };
        let text = serde_json::to_string(command).map_err(|error| failed(error.into()))?;
        let mut process = Command::new(&command.program);
        process.args(["nvml-agent", &text]).envs(command.environment.iter().cloned());
        process.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).kill_on_drop(true);
        let process = process.spawn().map_err(failed)?;
        let watchdog = Watchdog::new(command.limits, command.poll, Instant::now());
        Ok(Self { process, stream, incoming: Incoming::default(), watchdog, closed: false })
    }

    /// The process id; `None` once the process has been reaped.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// The call that the agent reported last and that has not returned: blamed for a crash.
    pub fn open(&self) -> Option<&Called> {
        self.watchdog.open()
    }

    /// Whether NVML was initialised at the agent's last message.
    pub fn has_initialised(&self) -> bool {
        self.watchdog.has_initialised()
    }

    /// The agent's next message, but for reports of calls: those are the watchdog's. An agent that is late is killed.
    /// Cancel safe: nothing is lost when the future is dropped.
    ///
    /// # Errors
    ///
    /// The child is gone, or is being killed for what it said or did not say; see [`AgentEnded`].
    pub async fn next(&mut self) -> Result<FromAgent, AgentEnded> {
        loop {
            if self.closed {
                return self.receive().await;
            }
            let Ok(received) = timeout_at(self.watchdog.until(), self.receive()).await else {
                if self.closed || !self.watchdog.is_expired(Instant::now()) {
                    continue;
                }
                let cause = self.silence().await;
                return Err(self.give_up(cause));
            };
            let message = received?;
            if let Some(waiting) = self.watchdog.heard(&message, Instant::now()) {
                return Err(self.give_up(AgentEnded::Deaf(waiting)));
            }
            if !matches!(message, FromAgent::Calling(_)) {
                return Ok(message);
            }
        }
    }

    /// Why no message came. If somebody has stopped the process, no call and no GPU is to blame.
    async fn silence(&self) -> AgentEnded {
        let limit = self.watchdog.limit();
        let stat = match self.id() {
            Some(id) => tokio::fs::read_to_string(format!("/proc/{id}/stat")).await.unwrap_or_default(),
            None => String::new(),
        };
        // The name in brackets may hold anything; the state follows it (proc_pid_stat(5)): stopped, or traced.
        let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
        match (state, self.open()) {
            (Some("T" | "t"), _) => AgentEnded::Stopped(limit),
            (_, Some(called)) => AgentEnded::Hung { called: called.clone(), limit },
            (_, None) => AgentEnded::Late(limit),
        }
    }

    /// The next message. Cancel safe.
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
                // Closed with requests unread by the child counts as a reset.
                Ok(0) => self.closed = true,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.closed = true,
                Ok(_) => {}
                Err(error) => return Err(self.give_up(AgentEnded::Io(error))),
            }
        }
        match timeout(LAST_MOMENTS, self.process.wait()).await {
            Ok(Ok(status)) => Err(AgentEnded::Exited(status)),
            Ok(Err(error)) => Err(AgentEnded::Io(error)),
            // Not waited for: a child that is stuck in the kernel does not even die.
            Err(_) => Err(self.give_up(AgentEnded::Silent)),
        }
    }

    fn give_up(&mut self, cause: AgentEnded) -> AgentEnded {
        self.closed = true;
        // Fails only when the child has ended already.
        let _ = self.process.start_kill();
        cause
    }

    /// Asks the child for something; the answer comes from [`Agent::next`].
    ///
    /// # Errors
    ///
    /// The agent has ended: [`Agent::next`] returns what has become of it.
    pub async fn request(&mut self, request: ToAgent) -> io::Result<()> {
        let line = encode(&request).map_err(io::Error::other)?;
        self.stream.write_all(&line).await
    }

    /// Asks the agent to end, by closing our half of the socket. [`Agent::next`] still returns the messages it had, and then
    /// its end.
    ///
    /// # Errors
    ///
    /// The socket cannot be closed.
    pub async fn dismiss(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// Ends the agent: asks it to by closing the socket, and kills it where that does not help. Returns its status unless it was
    /// killed.
    pub async fn end(mut self) -> Option<ExitStatus> {
        // It is killed when it is dropped, unless it has ended.
        let _ = self.dismiss().await;
        timeout(LAST_MOMENTS, self.process.wait()).await.ok()?.ok()
    }

    /// Kills the process and waits until it has ended, however long that takes.
    pub fn gone(self) -> impl Future<Output = ()> + Send + use<> {
        let mut process = self.process;
        async move {
            // Either fails only when it has ended already.
            let _ = process.start_kill();
            let _ = process.wait().await;
        }
    }
}
