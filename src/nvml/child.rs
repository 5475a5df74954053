//! The parent's end of the NVML agent: starts it, reads its messages, sends requests, ends it.
//!
//! Called by the runtime, which owns the restart policy. Nothing is spawned here but the process: the caller drives an
//! [`Agent`] by awaiting [`Agent::next`].

use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::agent::POLL_INTERVAL;
use super::memory::MemoryWatch;
use super::protocol::{Called, FromAgent, Incoming, Place, ProtocolError, ToAgent, encode};
use super::watchdog::{Limits, Watchdog};

/// How long a child whose socket is closed has to end by itself.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// How much is read at once, in bytes, at least.
const READ: usize = 8 << 10;

/// How long the file of a process's state may take.
const FILES: Duration = Duration::from_millis(500);

/// Signals that are not the library's doing: an operator's, or the kernel's for want of memory. SIGHUP, SIGINT,
/// SIGKILL, SIGTERM (signal(7)).
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// How to start an agent, and what it needs of this: its one argument, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCommand {
    /// The program that has the subcommand `nvml-agent`: ours.
    #[serde(skip)]
    pub program: PathBuf,
    /// The path of the driver's library, or of a driver's root, which the operator chose.
    pub library: Option<PathBuf>,
    /// Without one: the driver's root that is searched first, before the dynamic linker's path.
    pub driver_root: Option<PathBuf>,
    /// Where the kernel's /proc is.
    pub procfs: PathBuf,
    /// How long from one of the child's rounds to the next.
    pub poll: Duration,
    /// How long its calls may take.
    #[serde(skip)]
    pub limits: Limits,
    /// How much memory that the kernel cannot take back it may have, in MiB; with more it is killed.
    #[serde(skip)]
    pub memory_mib: u64,
    /// Where the kernel has the processes of this PID namespace.
    #[serde(skip)]
    pub processes: PathBuf,
    /// The GPUs that it must not touch.
    pub skip: Vec<Place>,
    /// Variables added to the inherited environment.
    #[serde(skip)]
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// The usual way to start a child of this program, whose memory has no bound.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            library: None,
            driver_root: None,
            procfs: PathBuf::from("/proc"),
            poll: POLL_INTERVAL,
            limits: Limits::default(),
            memory_mib: u64::MAX,
            processes: PathBuf::from("/proc"),
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
    /// It had more memory than it may have, and was killed.
    #[error(
        "the NVML agent had {has_mib} MiB of memory that the kernel cannot take back, more than {bound_mib} MiB \
         (--nvml-memory-mib, LINKWISE_NVML_MEMORY_MIB), and was killed"
    )]
    Memory {
        /// How much it had, in MiB.
        has_mib: u64,
        /// How much it may have.
        bound_mib: u64,
    },
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

impl AgentEnded {
    /// Whether the library crashed: a signal ended the process that nobody sends.
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
        let now = Instant::now();
        let watchdog = Watchdog::new(command.limits, command.poll, now);
        let memory = MemoryWatch::new(&command.processes, command.memory_mib, now);
        Ok(Self { wire: Wire { process, stream, incoming: Incoming::default(), closed: false }, watchdog, memory })
    }

    /// The process id; `None` once the process has been reaped.
    pub fn id(&self) -> Option<u32> {
        self.wire.process.id()
    }

    /// The call that the agent reported last and that has not returned: blamed for a crash.
    pub fn open(&self) -> Option<&Called> {
        self.watchdog.open()
    }

    /// Whether NVML was initialised at the agent's last message.
    pub fn has_initialised(&self) -> bool {
        self.watchdog.has_initialised()
    }

    /// How the agent ended, for people: of a crash with the call in which the library crashed.
    pub fn account(&self, ended: &AgentEnded) -> String {
        let source = std::error::Error::source(ended).map(|source| format!(": {source}")).unwrap_or_default();
        match self.open().filter(|_| ended.is_crash()) {
            Some(called) => format!("the NVML library crashed in {called}: {ended}{source}"),
            None => format!("{ended}{source}"),
        }
    }

    /// The agent's next message, but for reports of calls: those are the watchdog's. An agent that is late, or has too
    /// much memory, is killed. Cancel safe: nothing is lost when the future is dropped.
    ///
    /// # Errors
    ///
    /// The child is gone, or is being killed for what it said or did not say; see [`AgentEnded`].
    pub async fn next(&mut self) -> Result<FromAgent, AgentEnded> {
        loop {
            let (process, until, closed) = (self.id(), self.watchdog.until(), self.wire.closed);
            // One that closed its socket has its own time to end.
            let deadline = async { if closed { pending().await } else { sleep_until(until).await } };
            let received = tokio::select! {
                // What the agent has said is heard before it is killed.
                biased;
                received = self.wire.receive() => Some(received),
                has_mib = self.memory.exceeded(process) => {
                    let bound_mib = self.memory.bound_mib();
                    return Err(self.wire.give_up(AgentEnded::Memory { has_mib, bound_mib }));
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

    /// Why no message came. If somebody has stopped the process, no call and no GPU is to blame.
    async fn silence(&mut self) -> AgentEnded {
        let limit = self.watchdog.limit();
        let stat = match self.id() {
            Some(id) => timeout(FILES, tokio::fs::read_to_string(format!("/proc/{id}/stat"))).await.ok(),
            None => None,
        };
        let stat = stat.and_then(Result::ok).unwrap_or_default();
        // The name in brackets may hold anything; the state follows it (proc_pid_stat(5)): stopped, or traced.
        let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
        match (state, self.open()) {
            (Some("T" | "t"), _) => AgentEnded::Stopped(limit),
            (_, Some(called)) => AgentEnded::Hung { called: called.clone(), limit },
            (_, None) => AgentEnded::Late(limit),
        }
    }

    /// Asks the child for something; the answer comes from [`Agent::next`].
    ///
    /// # Errors
    ///
    /// The agent has ended: [`Agent::next`] returns what has become of it.
    pub async fn request(&mut self, request: ToAgent) -> io::Result<()> {
        let line = encode(&request).map_err(io::Error::other)?;
        self.wire.stream.write_all(&line).await
    }

    /// Asks the agent to end, by closing our half of the socket. [`Agent::next`] still returns the messages it had, and
    /// then its end.
    ///
    /// # Errors
    ///
    /// The socket cannot be closed.
    pub async fn dismiss(&mut self) -> io::Result<()> {
        self.wire.stream.shutdown().await
    }

    /// Ends the agent: asks it to by closing the socket, and kills it where that does not help. Returns its status
    /// unless it was killed.
    pub async fn end(mut self) -> Option<ExitStatus> {
        // It is killed when it is dropped, unless it has ended.
        let _ = self.dismiss().await;
        timeout(LAST_MOMENTS, self.wire.process.wait()).await.ok()?.ok()
    }

    /// Kills the process and waits until it has ended, however long that takes.
    pub fn gone(self) -> impl Future<Output = ()> + Send + use<> {
        let mut process = self.wire.process;
        async move {
            // Either fails only when it has ended already.
            let _ = process.start_kill();
            let _ = process.wait().await;
        }
    }
}

impl Wire {
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
}
