//! An operator's order to release the driver, for all processes of linkwise on the node, and the processes that still
//! hold it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linkwise_system::inotify::Changes;
use tokio::sync::{Mutex, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::metrics::DriverMetrics;
use crate::gate::Gate;

/// The time from one look at the node's order to the next where inotify does not report changes.
const LOOK: Duration = Duration::from_millis(500);

/// The same where it does. An idle process has no thread for files meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// The time from one look at the driver's users to the next, while an operator waits.
const WAITING: Duration = Duration::from_millis(50);

/// The longest time for writing the order down.
const FILES: Duration = Duration::from_secs(5);

/// The operator's order to release the driver, and the processes that still hold it.
#[derive(Clone, Debug)]
pub struct Release {
    wished: watch::Sender<bool>,
    held: watch::Sender<bool>,
    metrics: DriverMetrics,
    /// The node's gate; without one the order is this process's alone.
    gate: Option<Gate>,
    /// Set while the order stands in this process alone.
    is_alone: Arc<AtomicBool>,
    /// Held while the order is written or read, so that no reading overtakes an order.
    turn: Arc<Mutex<()>>,
}

/// Follows the folder of the gate; the folder may be a new one since.
fn follow(folder: &Path, before: Option<Changes>) -> Changes {
    if let Some(changes) = before.filter(|changes| changes.has_inotify() && changes.follows(folder)) {
        return changes;
    }
    let changes = Changes::of(folder, LOOK_AGAIN, true);
    if changes.has_inotify() { changes } else { Changes::of(folder, LOOK, false) }
}

impl Release {
    /// Starts with the order that stands on this node.
    pub fn new(metrics: DriverMetrics, gate: Option<Gate>) -> Self {
        let is_released = gate.as_ref().is_some_and(Gate::is_released);
        let (wished, held) = (watch::Sender::new(false), watch::Sender::new(false));
        let release = Self { wished, held, metrics, gate, is_alone: Arc::default(), turn: Arc::default() };
        release.see(is_released);
        release
    }

    /// The node's gate.
    pub fn gate(&self) -> Option<&Gate> {
        self.gate.as_ref()
    }

    /// Takes an operator's order: to release the driver, or to resume. It holds in this process at once. An error means
    /// that the node's other processes do not learn of it.
    pub async fn wish(&self, release: bool) -> io::Result<()> {
        let Some(gate) = self.gate.clone() else {
            self.see(release);
            return Ok(());
        };
        let written = timeout(FILES, async {
            let _turn = self.turn.lock().await;
            self.is_alone.store(true, Ordering::Relaxed);
            self.see(release);
            let written = spawn_blocking(move || gate.release(release)).await.map_err(io::Error::other)?;
            self.is_alone.store(!matches!(written, Ok(true)), Ordering::Relaxed);
            written
        });
        let written = written.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        self.see(release);
        if let Err(error) = &written {
            self.is_alone.store(true, Ordering::Relaxed);
            tracing::error!(%error, release, "the order is this process's alone: it cannot be written down for others");
        }
        written.map(drop)
    }

    /// Records an order.
    pub(super) fn see(&self, released: bool) {
        if self.wished.send_replace(released) != released {
            self.metrics.released.set(released.into());
            let words = if released { "an operator releases the driver" } else { "an operator resumes the driver" };
            tracing::info!("{words}");
        }
    }

    /// Follows the order that stands on this node, for ever; ends at once without a gate.
    pub async fn follow_node(self) {
        let Some(gate) = self.gate.clone() else { return };
        let made = gate.clone();
        if let Ok(Err(error)) = spawn_blocking(move || made.prepare()).await {
            tracing::warn!(%error, "an order to release the driver does not wait for this process");
        }
        let mut changes = None;
        loop {
            let turn = self.turn.lock().await;
            let gate = gate.clone();
            // The watch comes before the look: what is written between the two is reported.
            let look = move || (follow(gate.folder(), changes), gate.is_released());
            let Ok((mut follows, released)) = spawn_blocking(look).await else { return };
            if !self.is_alone.load(Ordering::Relaxed) {
                self.see(released);
            }
            drop(turn);
            follows.next().await;
            changes = Some(follows);
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

    /// Waits until no process of linkwise on this node holds the driver, at most so long; returns those that still do.
    pub async fn holders_after(&self, patience: Duration) -> Vec<String> {
        let until = Instant::now() + patience;
        let own = timeout_at(until, self.held.subscribe().wait_for(|held| !held)).await.is_err();
        loop {
            let gate = self.gate.clone();
            let users = spawn_blocking(move || gate.map_or_else(Vec::new, |gate| gate.users()));
            let users = timeout(FILES, users).await.ok().and_then(Result::ok).unwrap_or_default();
            match users {
                users if users.is_empty() && own => return vec!["this process".to_owned()],
                users if users.is_empty() || Instant::now() >= until => return users,
                _ => sleep(WAITING).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;
    use std::fs;

    /// Waits for the order, less long than an idle process looks again.
    async fn hears(release: &Release, wished: bool) {
        let mut orders = release.follow();
        let heard = timeout(LOOK_AGAIN / 2, orders.wait_for(|order| *order == wished)).await;
        heard.expect("no order").unwrap();
    }

    #[tokio::test]
    async fn order_of_another_process_is_heard_also_in_a_new_folder() {
        let kubelets = tempfile::tempdir().unwrap();
        let gate = Gate::beside(&kubelets.path().join("kubelet.sock"), "test").unwrap();
        let release = Release::new(DriverMetrics::register(&mut Registry::default()), Some(gate.clone()));
        let following = tokio::spawn(release.clone().follow_node());
        let other = gate.of("other");
        for order in [true, false, true] {
            other.release(order).unwrap();
            hears(&release, order).await;
        }
        fs::remove_dir_all(gate.folder()).unwrap();
        hears(&release, false).await;
        other.release(true).unwrap();
        hears(&release, true).await;
        following.abort();
    }
}
