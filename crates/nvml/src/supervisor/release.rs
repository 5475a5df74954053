//! An operator's order to release the driver, for all linkwise processes on the node, and the processes that still hold
//! the driver.

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

/// The time from one look at the node's order to the next if inotify does not report changes.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The time from one look to the next if inotify reports changes: long, so that the idle thread of a look can end.
const INOTIFY_LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The time from one look at the driver's users to the next, while an operator waits.
const HOLDERS_INTERVAL: Duration = Duration::from_millis(50);

/// The longest time for one access to the gate's files.
const FILES_TIMEOUT: Duration = Duration::from_secs(5);

/// The operator's order, and the processes that still hold the driver.
#[derive(Clone, Debug)]
pub struct Release {
    /// True while the driver is to be released.
    ordered: watch::Sender<bool>,
    /// True while an agent's process exists or starts.
    held: watch::Sender<bool>,
    metrics: DriverMetrics,
    /// The node's gate; without one the order reaches this process only.
    gate: Option<Gate>,
    /// Set while the order holds in this process only.
    is_local: Arc<AtomicBool>,
    /// Held while the order is written or read, so that no value from before an order is recorded after it.
    order_lock: Arc<Mutex<()>>,
}

/// Follows the gate's folder: goes on with `previous` if it has inotify and the path still names its folder.
fn follow(folder: &Path, previous: Option<Changes>) -> Changes {
    if let Some(changes) = previous.filter(|changes| changes.has_inotify() && changes.follows(folder)) {
        return changes;
    }
    let changes = Changes::of(folder, INOTIFY_LOOK_INTERVAL, true);
    if changes.has_inotify() { changes } else { Changes::of(folder, LOOK_INTERVAL, false) }
}

impl Release {
    /// Starts with the order that holds on this node.
    pub fn new(metrics: DriverMetrics, gate: Option<Gate>) -> Self {
        let is_released = gate.as_ref().is_some_and(Gate::is_released);
        let (ordered, held) = (watch::Sender::new(false), watch::Sender::new(false));
        let release = Self { ordered, held, metrics, gate, is_local: Arc::default(), order_lock: Arc::default() };
        release.record(is_released);
        release
    }

    /// The node's gate.
    pub fn gate(&self) -> Option<&Gate> {
        self.gate.as_ref()
    }

    /// Takes an operator's order: to release the driver, or to resume. It holds in this process at once, or after
    /// `FILES_TIMEOUT` if the gate's files hang. An error means that the node's other processes do not learn of it.
    pub async fn order(&self, release: bool) -> io::Result<()> {
        let Some(gate) = self.gate.clone() else {
            self.record(release);
            return Ok(());
        };
        let written = timeout(FILES_TIMEOUT, async {
            let _guard = self.order_lock.lock().await;
            self.is_local.store(true, Ordering::Relaxed);
            self.record(release);
            let written = spawn_blocking(move || gate.set_released(release)).await.map_err(io::Error::other)?;
            self.is_local.store(!matches!(written, Ok(true)), Ordering::Relaxed);
            written
        });
        let written = written.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        self.record(release);
        if let Err(error) = &written {
            self.is_local.store(true, Ordering::Relaxed);
            tracing::error!(%error, release, "cannot write the order for other processes, only this one follows it");
        }
        written.map(drop)
    }

    /// Records an order.
    pub(super) fn record(&self, released: bool) {
        if self.ordered.send_replace(released) != released {
            self.metrics.released.set(released.into());
            let order = if released { "an operator releases the driver" } else { "an operator resumes the driver" };
            tracing::info!("{order}");
        }
    }

    /// Follows the order that holds on this node, for ever; returns at once without a gate.
    pub async fn follow_node(self) {
        let Some(gate) = self.gate.clone() else { return };
        let prepared = gate.clone();
        if let Ok(Err(error)) = spawn_blocking(move || prepared.prepare()).await {
            tracing::warn!(%error, "cannot prepare the gate, a release of the driver does not wait for this process");
        }
        let mut changes = None;
        loop {
            let guard = self.order_lock.lock().await;
            let gate = gate.clone();
            // The folder is followed before the look, so that a change between the two is reported.
            let look = move || (follow(gate.folder(), changes), gate.is_released());
            let Ok((mut follows, released)) = spawn_blocking(look).await else { return };
            if !self.is_local.load(Ordering::Relaxed) {
                self.record(released);
            }
            drop(guard);
            follows.next().await;
            changes = Some(follows);
        }
    }

    /// Returns true if the driver is to be released.
    pub fn is_ordered(&self) -> bool {
        *self.ordered.borrow()
    }

    /// Follows whether the driver is to be released.
    pub fn follow(&self) -> watch::Receiver<bool> {
        self.ordered.subscribe()
    }

    /// Sets whether an agent's process exists. Before a start: set it, then call [`Self::is_ordered`], and start no
    /// agent if that is true.
    pub fn set_held(&self, held: bool) {
        self.held.send_if_modified(|was| std::mem::replace(was, held) != held);
    }

    /// Waits for at most `patience` until no linkwise process on this node holds the driver; returns those that do.
    pub async fn holders_after(&self, patience: Duration) -> Vec<String> {
        let until = Instant::now() + patience;
        let is_held_here = timeout_at(until, self.held.subscribe().wait_for(|held| !held)).await.is_err();
        loop {
            let gate = self.gate.clone();
            let users = spawn_blocking(move || gate.map_or_else(Vec::new, |gate| gate.users()));
            let users = timeout(FILES_TIMEOUT, users).await.ok().and_then(Result::ok).unwrap_or_default();
            match users {
                users if users.is_empty() && is_held_here => return vec!["this process".to_owned()],
                users if users.is_empty() || Instant::now() >= until => return users,
                _ => sleep(HOLDERS_INTERVAL).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;
    use std::fs;

    /// Waits for the order, for less time than from one look to the next.
    async fn await_order(release: &Release, ordered: bool) {
        let mut orders = release.follow();
        let received = timeout(INOTIFY_LOOK_INTERVAL / 2, orders.wait_for(|order| *order == ordered)).await;
        received.expect("the order did not arrive").unwrap();
    }

    #[tokio::test]
    async fn order_of_another_process_arrives_in_a_new_folder() {
        let kubelets = tempfile::tempdir().unwrap();
        let gate = Gate::of_kubelet(&kubelets.path().join("kubelet.sock"), "test").unwrap();
        let release = Release::new(DriverMetrics::register(&mut Registry::default()), Some(gate.clone()));
        let following = tokio::spawn(release.clone().follow_node());
        let other = gate.for_user("other");
        for order in [true, false, true] {
            other.set_released(order).unwrap();
            await_order(&release, order).await;
        }
        fs::remove_dir_all(gate.folder()).unwrap();
        await_order(&release, false).await;
        other.set_released(true).unwrap();
        await_order(&release, true).await;
        following.abort();
    }
}
