//! Whether NVML has been unavailable for longer than the grace period. Pure.
//!
//! Called by `machine`, so that a pause, a start that hangs and a driver that was released count alike.

use std::time::Duration;

/// The time without an agent that works.
#[derive(Debug)]
pub(super) struct NvmlOutage {
    grace: Duration,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// No agent has worked yet: there is nothing to lose.
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

    /// Whether an agent has ever seen the GPUs: then there are some, and a driver that is gone is waited for.
    pub fn has_worked(&self) -> bool {
        !matches!(self.phase, Phase::Never)
    }

    /// Whether the outage was reported, and lasts.
    pub fn is_reported(&self) -> bool {
        matches!(self.phase, Phase::Reported)
    }

    /// No agent works any more. The cause that was first counts.
    pub fn begin(&mut self, cause: String, now: Duration) {
        if matches!(self.phase, Phase::Up) {
            self.phase = Phase::Down { cause, report_at: now + self.grace };
        }
    }

    /// An agent works. Returns whether that ends an outage that was reported.
    pub fn end(&mut self) -> bool {
        matches!(std::mem::replace(&mut self.phase, Phase::Up), Phase::Reported)
    }

    /// When the outage is to be reported.
    pub fn due(&self) -> Option<Duration> {
        match self.phase {
            Phase::Down { report_at, .. } => Some(report_at),
            Phase::Never | Phase::Up | Phase::Reported => None,
        }
    }

    /// The cause of the outage, once, when the grace period is over.
    pub fn report(&mut self, now: Duration) -> Option<String> {
        self.due().filter(|at| *at <= now)?;
        match std::mem::replace(&mut self.phase, Phase::Reported) {
            Phase::Down { cause, .. } => Some(cause),
            Phase::Never | Phase::Up | Phase::Reported => None,
        }
    }
}
