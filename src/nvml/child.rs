//! The parent's end of the NVML child: starting it, hearing it, asking it, ending it.
//!
//! Called by the runtime, which owns the restart policy. Nothing is spawned here but the process:
//! whoever holds an [`Agent`] drives it by awaiting [`Agent::next`].

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::agent::POLL_INTERVAL;
use super::protocol::{FromAgent, Incoming, ProtocolError, ToAgent, encode};

/// How long a child whose socket is closed has to end by itself.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// How much is read at once, in bytes, at least.
const READ: usize = 8 << 10;

/// How to start a child.
#[derive(Clone, Debug)]
pub struct AgentCommand {
    /// The program that has the subcommand `nvml-agent`: ours.
    pub program: PathBuf,
    /// The path of the driver's library, or of a driver's root; the usual names are tried without one.
    pub library: Option<PathBuf>,
    /// How often the child asks each GPU whether it is still there.
    pub poll: Duration,
    /// Variables added to the inherited environment.
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// The usual way to start a child of this program.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), library: None, poll: POLL_INTERVAL, environment: Vec::new() }
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

/// Why nothing more comes from a child, which by then no longer runs.
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
    /// It said what is no message, and was killed.
    #[error("the NVML agent said what is no message")]
    Protocol(#[source] ProtocolError),
    /// It cannot be read from, or its end cannot be learnt.
    #[error("cannot hear the NVML agent")]
    Io(#[source] io::Error),
}

/// Why a child could not be asked. [`Agent::next`] tells what has become of it.
#[derive(Debug, thiserror::Error)]
#[error("cannot ask the NVML agent")]
pub struct RequestError(#[source] io::Error);

/// A running child; dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    stream: UnixStream,
    incoming: Incoming<FromAgent>,
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
        let mut process = Command::new(&command.program);
        process.arg("nvml-agent");
        if let Some(library) = &command.library {
            process.args([OsStr::new("--library"), library.as_os_str()]);
        }
        process.arg("--poll-ms").arg(command.poll.as_millis().to_string());
        process.envs(command.environment.iter().map(|(name, value)| (name, value)));
        process.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).kill_on_drop(true);
        let process = process.spawn();
        let process = process.map_err(|source| SpawnError::Program { program: command.program.clone(), source })?;
        Ok(Self { process, stream, incoming: Incoming::default(), closed: false })
    }

    /// The child's process id; `None` once it has ended and has been seen to.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// What the child says next. Cancel safe: nothing is lost when the future is dropped.
    ///
    /// # Errors
    ///
    /// The child is gone, or is being killed for what it said; see [`AgentEnded`].
    pub async fn next(&mut self) -> Result<FromAgent, AgentEnded> {
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

    /// [`Self::next`], but a child that says nothing for so long is killed. For its first words: later it may have
    /// nothing to say for days.
    ///
    /// # Errors
    ///
    /// As [`Self::next`], and [`AgentEnded::Late`].
    pub async fn next_within(&mut self, limit: Duration) -> Result<FromAgent, AgentEnded> {
        match timeout(limit, self.next()).await {
            Ok(said) => said,
            Err(_) => Err(self.give_up(AgentEnded::Late(limit))),
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
    /// The child is not there to be asked.
    pub async fn request(&mut self, request: ToAgent) -> Result<(), RequestError> {
        let line = encode(&request).map_err(|error| RequestError(io::Error::other(error)))?;
        self.stream.write_all(&line).await.map_err(RequestError)
    }

    /// Ends the child: asks it to by closing the socket, and kills it where that does not help.
    ///
    /// # Errors
    ///
    /// Its end cannot be learnt.
    pub async fn end(mut self) -> io::Result<ExitStatus> {
        self.stream.shutdown().await.or_else(|error| match error.kind() {
            io::ErrorKind::NotConnected => Ok(()),
            _ => Err(error),
        })?;
        match timeout(LAST_MOMENTS, self.process.wait()).await {
            Ok(status) => status,
            Err(_) => {
                self.process.start_kill()?;
                self.process.wait().await
            }
        }
    }
}
