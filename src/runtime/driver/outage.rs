//! Whether NVML has been unavailable for longer than the grace period. Pure.
//!
//! Called by `machine`, so that a pause, a start that hangs and a driver that was released count alike.

use std::time::Duration;

use crate::state::Event;

/// The time without an agent that works.
#[derive(Debug)]
pub(super) struct NvmlOutage {
    grace: Duration,
    /// Whether GPUs are unhealthy during an outage.
    unhealthy: bool,
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

/// An outage to be reported.
pub(super) struct Outage {
    pub cause: String,
    /// What becomes of the GPUs, if anything.
    pub event: Option<Event>,
}

impl NvmlOutage {
    /// No agent has worked yet.
    pub fn new(grace: Duration, unhealthy: bool) -> Self {
        Self { grace, unhealthy, phase: Phase::Never }
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

    /// An agent works: what becomes of the GPUs, if anything.
    pub fn end(&mut self) -> Option<Event> {
        let was_reported = self.is_reported();
        self.phase = Phase::Up;
        (was_reported && self.unhealthy).then_some(Event::DriverBack)
    }

    /// When the outage is to be reported.
    pub fn due(&self) -> Option<Duration> {
        match self.phase {
            Phase::Down { report_at, .. } => Some(report_at),
            Phase::Never | Phase::Up | Phase::Reported => None,
        }
    }

    /// The outage, once, when the grace period is over.
    pub fn report(&mut self, now: Duration) -> Option<Outage> {
        let Phase::Down { cause, report_at } = &self.phase else { return None };
        if *report_at > now {
            return None;
        }
        let cause = cause.clone();
        self.phase = Phase::Reported;
        let event = self.unhealthy.then(|| Event::DriverAway { why: cause.clone() });
        Some(Outage { cause, event })
    }
}
