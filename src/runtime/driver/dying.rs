//! Children that were killed and have not ended: one that is stuck in the kernel does not even die of SIGKILL, and holds the
//! driver as long.
//!
//! Called by `driver`, which hands over each child that it has done with. Few of them are let pile up: a driver in which
//! children get stuck is not helped by more of them, and each keeps a process and its memory.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::super::operator::Release;
use super::metrics::DriverMetrics;
use crate::nvml::child::Agent;

/// So many may be stuck, and another child is still started: one for each of the two that can work beside each other.
const MOST: usize = 2;

/// Those that have not ended, each followed to its end.
pub(super) struct Dying {
    ends: JoinSet<()>,
    number: watch::Sender<usize>,
    release: Release,
    metrics: Arc<DriverMetrics>,
    /// Whether the log says that no child is started.
    said: bool,
}

/// One of them, until it is dropped.
struct Counted(watch::Sender<usize>, Arc<DriverMetrics>);

impl Counted {
    fn new(number: &watch::Sender<usize>, metrics: &Arc<DriverMetrics>) -> Self {
        let one = Self(number.clone(), Arc::clone(metrics));
        one.add(1);
        one
    }

    fn add(&self, more: isize) {
        self.0.send_modify(|number| {
            *number = number.saturating_add_signed(more);
            self.1.agents_stuck(*number);
        });
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.add(-1);
    }
}

impl Dying {
    /// None yet.
    pub(super) fn new(release: Release, metrics: Arc<DriverMetrics>) -> Self {
        Self { ends: JoinSet::new(), number: watch::Sender::new(0), release, metrics, said: false }
    }

    /// Takes a child that is done with. One that lives is killed.
    pub(super) fn take(&mut self, agent: Agent) {
        if agent.id().is_some() {
            self.follow(agent.gone());
        }
    }

    /// Follows a process to its end; until then it holds the driver.
    fn follow(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        while self.ends.try_join_next().is_some() {}
        let held = (self.release.holding(), Counted::new(&self.number, &self.metrics));
        self.ends.spawn(async move {
            end.await;
            drop(held);
        });
    }

    /// Whether another child may be started; the log says so once when not.
    pub(super) fn leave_room(&mut self) -> bool {
        let number = *self.number.borrow();
        let room = number <= MOST;
        if !room && !self.said {
            tracing::error!(
                number,
                "killed NVML agents do not end (stuck in the kernel): none is started before one has"
            );
        }
        self.said = !room;
        room
    }

    /// Waits until another child may be started.
    pub(super) async fn room(&mut self) {
        if !self.leave_room() {
            // It cannot fail: the sender is ours.
            let _ = self.number.subscribe().wait_for(|number| *number <= MOST).await;
        }
    }
}

#[cfg(test)]
impl Dying {
    /// For tests of who has one: none, on a node of nobody's.
    pub(super) fn of_nobody() -> Self {
        let metrics = Arc::new(DriverMetrics::default());
        Self::new(Release::new(Arc::clone(&metrics)), metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    #[tokio::test]
    async fn who_does_not_end_holds_the_driver_and_more_than_two_hold_up_the_next() {
        let mut dying = Dying::of_nobody();
        let (release, metrics) = (dying.release.clone(), Arc::clone(&dying.metrics));
        // Ends of processes, which come when the test says so.
        let process = |dying: &mut Dying| {
            let (end, ended) = oneshot::channel::<()>();
            dying.follow(async move { drop(ended.await) });
            end
        };
        let stuck = |number: i64| metrics.stuck() == number;
        let at_once = Duration::ZERO;
        assert!(release.is_let_go_within(at_once).await && stuck(0));
        let mut ends = vec![process(&mut dying), process(&mut dying)];
        assert!(dying.leave_room() && stuck(2));
        assert!(!release.is_let_go_within(at_once).await, "two hold it");
        ends.push(process(&mut dying));
        assert!(!dying.leave_room() && stuck(3));
        assert!(timeout(at_once, dying.room()).await.is_err(), "there is no room");
        ends.pop().unwrap().send(()).unwrap();
        dying.room().await;
        assert!(dying.leave_room() && stuck(2));
        assert!(!release.is_let_go_within(at_once).await, "two still hold it");
        drop(ends);
        let long = Duration::from_secs(60);
        assert!(release.is_let_go_within(long).await && stuck(0));
        // A child that works holds it too, and its end alone is not enough.
        let (working, end) = (release.holding(), process(&mut dying));
        drop(working);
        assert!(!release.is_let_go_within(at_once).await);
        end.send(()).unwrap();
        assert!(release.is_let_go_within(long).await);
    }
}
