//! Decides if NVML has been unavailable for longer than the grace period. Pure.
//!
//! Called by `machine`, so that a pause, a hanging start and a released driver count alike.

use std::time::Duration;

/// The time without a working agent.
#[derive(Debug)]
pub(super) struct NvmlOutage {
    grace: Duration,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// No agent has worked yet: no GPU can be lost.
    Never,
    Up,
    Down {
        cause: String,
        report_at: Duration,
    },
    Reported,
}

impl NvmlOutage {
    /// No agent has worked yet.
    pub fn new(grace: Duration) -> Self {
        Self { grace, phase: Phase::Never }
    }

    /// Returns true if an agent has ever scanned the GPUs: then there are some, and linkwise waits for a driver that is
    /// gone.
    pub fn has_worked(&self) -> bool {
        !matches!(self.phase, Phase::Never)
    }

    /// Returns true if the outage was reported, and lasts.
    pub fn is_reported(&self) -> bool {
        matches!(self.phase, Phase::Reported)
    }

    /// Begins the time without a working agent. Of several causes the first counts.
    pub fn begin(&mut self, cause: String, now: Duration) {
        if matches!(self.phase, Phase::Up) {
            self.phase = Phase::Down { cause, report_at: now + self.grace };
        }
    }

    /// Takes over the outage of another process, whose agent has worked. It is to be reported at a time.
    pub fn inherit(&mut self, cause: String, report_at: Duration) {
        if matches!(self.phase, Phase::Never) {
            self.phase = Phase::Down { cause, report_at };
        }
    }

    /// Records that an agent works. Returns true if that ends a reported outage.
    pub fn end(&mut self) -> bool {
        matches!(std::mem::replace(&mut self.phase, Phase::Up), Phase::Reported)
    }

    /// The moment at which the outage is to be reported.
    pub fn due(&self) -> Option<Duration> {
        match self.phase {
            Phase::Down { report_at, .. } => Some(report_at),
            Phase::Never | Phase::Up | Phase::Reported => None,
        }
    }

    /// Returns the cause of the outage, once, when the grace period is over.
    pub fn report(&mut self, now: Duration) -> Option<String> {
        self.due().filter(|at| *at <= now)?;
        match std::mem::replace(&mut self.phase, Phase::Reported) {
            Phase::Down { cause, .. } => Some(cause),
            Phase::Never | Phase::Up | Phase::Reported => None,
        }
    }
}
