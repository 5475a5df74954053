//! What happens while no child works: nothing for the grace period, then what the operator has said.
//!
//! Runs beside the life of the children, so that a pause, a start that hangs and a driver that was let go count alike.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::metrics::DriverMetrics;
use crate::state::Event;

/// Whether a child works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Working {
    /// None has ever: there is nothing to lose.
    Never,
    /// One does.
    Yes,
    /// None does any more, and why.
    No(String),
}

/// Follows whether a child works.
pub struct Away {
    /// What is followed.
    pub working: watch::Receiver<Working>,
    /// How long it is waited.
    pub grace: Duration,
    /// Whether devices are not given out afterwards.
    pub unhealthy: bool,
    /// Where events go.
    pub events: mpsc::Sender<Event>,
    /// The metrics.
    pub metrics: Arc<DriverMetrics>,
}

impl Away {
    /// Goes on for ever.
    pub async fn run(mut self) -> Result<()> {
        loop {
            let is_away = |working: &Working| matches!(working, Working::No(_));
            self.follow(is_away).await?;
            if timeout(self.grace, self.follow(|working| !is_away(working))).await.is_ok() {
                continue;
            }
            let Working::No(why) = self.working.borrow().clone() else { continue };
            let devices = if self.unhealthy { "not given out until it is back" } else { "given out as last seen" };
            tracing::error!(cause = why, grace = ?self.grace, devices, "NVML has been away for too long");
            self.metrics.nvml_away(true);
            if self.unhealthy {
                self.tell(Event::DriverAway { why }).await?;
            }
            self.follow(|working| !is_away(working)).await?;
            self.metrics.nvml_away(false);
            if self.unhealthy {
                self.tell(Event::DriverBack).await?;
            }
        }
    }

    async fn follow(&mut self, until: impl Fn(&Working) -> bool) -> Result<()> {
        self.working.wait_for(until).await.map(drop).context("nobody looks after NVML any more")
    }

    async fn tell(&self, event: Event) -> Result<()> {
        self.events.send(event).await.context("nobody takes events any more")
    }
}
