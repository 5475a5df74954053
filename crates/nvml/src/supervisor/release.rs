//! An operator's order to release the driver, and whether an agent still holds it.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::metrics::DriverMetrics;

/// The operator's order to release the driver, and whether agents still hold it.
#[derive(Clone, Debug)]
pub struct Release {
    wished: watch::Sender<bool>,
    held: watch::Sender<bool>,
    metrics: DriverMetrics,
}

impl Release {
    /// Starts without an order.
    pub fn new(metrics: DriverMetrics) -> Self {
        let (wished, held) = (watch::Sender::new(false), watch::Sender::new(false));
        Self { wished, held, metrics }
    }

    /// Takes an operator's order: to release the driver, or to resume.
    pub fn wish(&self, release: bool) {
        if self.wished.send_replace(release) != release {
            self.metrics.released.set(release.into());
            let words = if release { "an operator releases the driver" } else { "an operator resumes the driver" };
            tracing::info!("{words}");
        }
    }

    /// Returns true if the driver is to be released.
    pub fn is_wished(&self) -> bool {
        *self.wished.borrow()
    }

    /// Follows whether the driver is to be released.
    pub fn follow(&self) -> watch::Receiver<bool> {
        self.wished.subscribe()
    }

    /// Sets whether an agent's process exists. Before a start: set it, then call [`Self::is_wished`], and start no
    /// agent if that is true.
    pub fn set_held(&self, held: bool) {
        self.held.send_if_modified(|was| std::mem::replace(was, held) != held);
    }

    /// Waits until no agent holds the driver, at most so long; `false` where one still does.
    pub async fn is_free_within(&self, patience: Duration) -> bool {
        timeout(patience, self.held.subscribe().wait_for(|held| !held)).await.is_ok()
    }
}
