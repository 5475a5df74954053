//! The signals that end a program.

use anyhow::{Context, Result};
use futures_util::FutureExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for a signal from now on.
pub fn listen(kind: SignalKind, name: &'static str) -> Result<Signal> {
    signal(kind).with_context(|| format!("cannot listen for {name}"))
}

/// The signals that end a program. A program listens before it does anything else: the first process of a container
/// ignores every signal that it has no handler for.
pub struct LastSignals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
}

impl LastSignals {
    /// Listens from now on.
    pub fn listen() -> Result<Self> {
        Ok(Self {
            terminate: listen(SignalKind::terminate(), "SIGTERM")?,
            interrupt: listen(SignalKind::interrupt(), "SIGINT")?,
            quit: listen(SignalKind::quit(), "SIGQUIT")?,
        })
    }

    /// Waits for a signal; returns its name. Cancel-safe.
    pub async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.quit.recv() => "SIGQUIT",
        }
    }

    /// Takes a signal that has arrived; returns true if there was one.
    pub fn try_recv(&mut self) -> bool {
        self.recv().now_or_never().is_some()
    }
}
