//! The child that works and the one that is to follow it.
//!
//! Called by `driver`, which decides when a second one is needed and what either's words mean.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::outside::Outside;
use super::suspects::Suspects;
use crate::nvml::child::{Agent, AgentEnded};
use crate::nvml::protocol::{FromAgent, Place};
use crate::topology::GpuUuid;

/// Why a second child is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    /// To try a GPU that was left out.
    Trial(Place),
    /// The first one does not see what there is now.
    Renewal(String),
}

/// The child that works, and the one that is to follow it.
pub(super) struct Shift {
    pub(super) agent: Agent,
    pub(super) skipped: Vec<Place>,
    /// Whether it has seen the GPUs.
    pub(super) ready: bool,
    /// The GPUs whose events it tells.
    pub(super) at_start: BTreeSet<GpuUuid>,
    /// What there was outside before it began, or when it was last seen.
    pub(super) outside: Option<Outside>,
    pub(super) successor: Option<Successor>,
    /// What a second one is to be started for, and when.
    pub(super) renewal: Option<(Instant, String)>,
    /// The pause after one that was started for that and came to nothing.
    pub(super) pause: Duration,
}

pub(super) struct Successor {
    pub(super) agent: Agent,
    pub(super) skipped: Vec<Place>,
    pub(super) errand: Errand,
    pub(super) outside: Option<Outside>,
    pub(super) failed: Option<String>,
}

/// Which of two children said something.
pub(super) enum Who {
    First,
    Second,
}

impl Shift {
    pub(super) fn new(agent: Agent, skipped: Vec<Place>, outside: Option<Outside>) -> Self {
        Self {
            agent,
            skipped,
            ready: false,
            at_start: BTreeSet::new(),
            outside,
            successor: None,
            renewal: None,
            pause: Duration::ZERO,
        }
    }

    /// What either says next. Cancel safe.
    pub(super) async fn next(&mut self) -> (Who, Result<FromAgent, AgentEnded>) {
        let Some(successor) = &mut self.successor else { return (Who::First, self.agent.next().await) };
        tokio::select! {
            said = self.agent.next() => (Who::First, said),
            said = successor.agent.next() => (Who::Second, said),
        }
    }

    /// When a second child is due, and what for; none where one is there.
    pub(super) fn due(&self, suspects: &Suspects) -> Option<(Instant, Errand)> {
        if !self.ready || self.successor.is_some() {
            return None;
        }
        let renewal = self.renewal.as_ref().map(|(at, why)| (*at, Errand::Renewal(why.clone())));
        let trial = suspects.next_trial().map(|(at, place)| (at, Errand::Trial(place)));
        [renewal, trial].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    /// A new child is needed; when, is known where one has come to nothing.
    pub(super) fn renew(&mut self, why: String) {
        self.renewal.get_or_insert((Instant::now(), why));
    }

    /// Ends both in order; those that do not end are killed.
    pub(super) async fn end(self) {
        for agent in [Some(self.agent), self.successor.map(|successor| successor.agent)].into_iter().flatten() {
            end(agent).await;
        }
    }
}

/// The errand, when its time has come; never where there is none.
pub(super) async fn at(due: Option<(Instant, Errand)>) -> Errand {
    let Some((at, errand)) = due else { return std::future::pending().await };
    sleep_until(at).await;
    errand
}

pub(super) async fn end(agent: Agent) {
    if let Err(error) = agent.end().await {
        tracing::warn!(%error, "the NVML agent does not end");
    }
}
