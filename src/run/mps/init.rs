//! The first process of the MPS container: starts the daemons' process, passes signals on to it, ends with its exit
//! code, and reaps every process that lost its parent: servers that outlive their control daemon.
//!
//! This is a process of its own, because waiting for any child would take the exit status of children that the daemons'
//! process waits for itself.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
use tokio::signal::unix::SignalKind;

use crate::config::{INIT_FLAG, command_line};
use linkwise_system::signals::listen;

/// Returns true if this is the first process of its container.
pub fn is_first_process() -> bool {
    getpid().is_init()
}

/// Runs this program again as a child, until that ends.
pub async fn run() -> Result<ExitCode> {
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
